"""Which cuts are possible: across a refused one, layers would behave otherwise than in one process."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from pipetrain.errors import ConfigError
from pipetrain.network.network import INPUT, Made, Network
from pipetrain.network.places import places
from pipetrain.plan.cut import copies_output, stage_of, values_entering
from pipetrain.plan.estimate import Layer, origin


def refuse_cuts(network: Network, layers: Sequence[Layer], cuts: Sequence[int]) -> None:
    """Refuse a cut across which layers would behave otherwise than in one process. Raises ConfigError."""
    for user, layer in enumerate(layers):
        stage = stage_of(user, cuts)
        for value in layer.takes:
            if value.layer != INPUT and stage_of(value.layer, cuts) != stage:
                _refuse_value(layers, value, user, cuts[stage - 1])
    _refuse_written(layers, cuts)
    _refuse_sharing(network, layers, cuts)


def _refuse_value(layers: Sequence[Layer], value: Made, user: int, cut: int) -> None:
    """Refuse that a value, which layer `user` takes, crosses `cut`, before the stage of that layer."""
    maker = layers[value.layer]
    where, output = f"layer {value.layer} ({maker.name})", maker.output
    cuts = f"before layer {user}" if user == value.layer + 1 else f"between layers {value.layer} and {user}"
    elsewhere = f"choose a partition that does not cut {cuts}"
    if output.specs[value.number].dtype.is_complex:
        raise ConfigError(f"{where} returns {output}, and complex tensors cannot cross a cut; {elsewhere}")
    written = {origin(layers, of, cut) for layer in layers[cut:] for of in layer.writes}
    if value in written and copies_output(layers, [value], 0):
        raise ConfigError(f"{where} keeps its output, which a later layer modifies; {elsewhere}")


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
                    f"layer {writer} ({layers[writer].name}) modifies in place what comes from {maker}, "
                    f"and layer {user} ({layer.name}), which uses it later, would not see that over a "
                    f"cut: let it make a new tensor, or keep both in one stage by partition="
                )


def _refuse_sharing(network: Network, layers: Sequence[Layer], cuts: Sequence[int]) -> None:
    """Refuse a buffer that changes, or a parameter that is not registered where it is used, of two stages.

    Each would have a copy of its own. Of a registered parameter that is right, see `shared_weights`.
    """
    if network.shared_buffers_are_read_only:
        return
    model = network.model
    tied = {_address(t) for t in model.parameters()}
    registered = {_address(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
    user: dict[str, int] = {}
    for index, (name, layer) in enumerate(zip(network.names, network.modules, strict=True)):
        stage = stage_of(index, cuts)
        own = {id(t) for t in layer.parameters()}
        used = [
            (place.name, registered.get(_address(place.tensor), ""))
            for place in places(layer)
            if _address(place.tensor) not in tied or id(place.tensor) not in own
        ]
        used += [(tensor, tensor) for tensor in layers[index].borrows]
        for label, tensor in used:
            if tensor and user.setdefault(tensor, stage) != stage:
                raise ConfigError(
                    f"layer {index} ({name}) of stage {stage} shares its {label} with stage {user[tensor]}; "
                    f"choose a partition that keeps both layers in one stage, or give each its own"
                )


def _address(tensor: Tensor) -> tuple[str, int]:
    if tensor.layout is not torch.strided or not tensor.data_ptr():
        return "object", id(tensor)
    return "memory", tensor.data_ptr()


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


def refuse_changing(sizes: Sequence[Sequence[Layer]], cuts: Sequence[int]) -> None:
    """Refuse a cut whose tensors differ in kind between microbatch sizes, or in evaluation.

    `sizes`: the layers as estimated for each size, in training and in evaluation. Raises ConfigError.
    """
    trained = [layers for layers in sizes if layers[-1].needs_grad is not None]
    entering = [values_entering(layers, cuts, 0) for layers in trained]
    for stage, cut in enumerate(cuts, 1):
        first, *others = [(before.single, before.packing) for before in (of[cut - 1].output for of in sizes)]
        needs = {tuple(values[stage].values()) for values in entering}
        changes = any(other != first for other in others)
        if changes or len(needs) > 1:
            what = "it is one tensor or a tuple" if changes else "gradients are needed there"
            raise ConfigError(
                f"whether {what} behind layer {cut - 1} ({sizes[0][cut - 1].name}) changes with the size of "
                f"a microbatch, or in evaluation; choose a partition that does not cut before layer {cut}"
            )
