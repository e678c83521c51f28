"""Which cuts are possible: across a refused one, layers would behave otherwise than in one process."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from pipetrain.errors import ConfigError
from pipetrain.network.network import INPUT, Made, Network
from pipetrain.network.places import places
from pipetrain.plan.cut import copies_output, stage_of
from pipetrain.plan.estimate import Layer, origin


def cuts_that_may_be(network: Network, layers: Sequence[Layer]) -> list[int]:
    """Return the possible cuts, as the first layers behind them."""
    allowed = []
    for cut in range(1, len(layers)):
        try:
            refuse_cuts(network, layers, [cut])
        except ConfigError:
            continue
        allowed.append(cut)
    return allowed


def refuse_cuts(network: Network, layers: Sequence[Layer], cuts: Sequence[int]) -> None:
    """Refuse a cut across which layers would behave otherwise than in one process. Raises ConfigError."""
    for user, layer in enumerate(layers):
        stage = stage_of(user, cuts)
        for value in layer.takes:
            if value.layer != INPUT and stage_of(value.layer, cuts) != stage:
                _refuse_value(layers, value, user, cuts[stage - 1])
    _refuse_written(layers, cuts)
    if not network.shared_buffers_are_read_only:
        _refuse_sharing(network, layers, cuts)


def _refuse_value(layers: Sequence[Layer], value: Made, user: int, cut: int) -> None:
    """Refuse that a value, which layer `user` takes, crosses `cut`, before the stage of that layer."""
    maker = layers[value.layer]
    written = {origin(layers, of, cut) for layer in layers[cut:] for of in layer.writes}
    if maker.output.specs[value.number].dtype.is_complex:
        why = f"returns {maker.output}, and complex tensors cannot cross a cut"
    elif value in written and copies_output(layers, [value], 0):
        why = "keeps its output, which a later layer modifies"
    else:
        return
    raise ConfigError(
        f"layer {value.layer} ({maker.name}) {why}; choose a partition that does not cut between layers "
        f"{value.layer} and {user}"
    )


def _refuse_written(layers: Sequence[Layer], cuts: Sequence[int]) -> None:
    """Refuse a value that a layer modifies in place before a later one, which would not see it, uses it.

    It sees what its own stage does, and what the value's stage does before the value leaves, if the two
    layers have the same memory there. Over a cut each value is a tensor of its own.
    """
    starts = [0, *cuts]
    writers = [index for index, layer in enumerate(layers) if layer.writes]
    for (user, layer), writer in product(enumerate(layers), writers):
        stage = stage_of(writer, cuts)
        for value, written in product(layer.takes, layers[writer].writes):
            if not value.layer < writer < user or origin(layers, value) != origin(layers, written):
                continue
            seen = stage in (stage_of(user, cuts), stage_of(value.layer, cuts))
            start = starts[stage]
            if not seen or origin(layers, value, start) != origin(layers, written, start):
                maker = "the data" if value.layer == INPUT else f"layer {value.layer}"
                raise ConfigError(
                    f"layer {writer} ({layers[writer].name}) modifies in place what comes from {maker}, and "
                    f"layer {user} ({layer.name}), which uses it later, would not see that over a cut: let "
                    f"it make a new tensor, or keep both in one stage by partition="
                )


def _refuse_sharing(network: Network, layers: Sequence[Layer], cuts: Sequence[int]) -> None:
    """Refuse a buffer that changes, or a parameter that is not registered where it is used, of two stages.

    Each would have a copy of its own. Of a registered parameter that is right, see `shared_weights`.
    """
    model = network.model
    tied = {_address(t) for t in model.parameters()}
    registered = {_address(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
    user: dict[str, int] = {}
    for index, (name, module) in enumerate(zip(network.names, network.modules, strict=True)):
        stage, own = stage_of(index, cuts), {id(t) for t in module.parameters()}
        used = {
            registered.get(_address(place.tensor), ""): place.name
            for place in places(module)
            if _address(place.tensor) not in tied or id(place.tensor) not in own
        }
        for tensor, label in {**used, **{of: of for of in layers[index].borrows}}.items():
            if tensor and user.setdefault(tensor, stage) != stage:
                raise ConfigError(
                    f"layer {index} ({name}) of stage {stage} shares its {label} with stage {user[tensor]}; "
                    f"choose a partition that keeps both layers in one stage, or give each its own"
                )


def _address(tensor: Tensor) -> tuple[str, int]:
    if tensor.layout is not torch.strided or not tensor.data_ptr():
        return "object", id(tensor)
    return "memory", tensor.data_ptr()
