"""Which cuts are possible, and how the layers on both sides treat the tensors that cross."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from pipetrain.boundary import named_layers
from pipetrain.errors import ConfigError
from pipetrain.partition.estimate import Layer
from pipetrain.places import places


def writes_input(layers: Sequence[Layer]) -> bool:
    """Return whether these layers modify their input in place."""
    return _comes_first(layers, lambda layer: layer.writes_input)


def keeps_output(layers: Sequence[Layer]) -> bool:
    """Return whether the output of these layers may change later, because they keep it."""
    return _comes_first(reversed(layers), lambda layer: layer.keeps_output)


def _comes_first(layers: Iterable[Layer], wanted: Callable[[Layer], bool]) -> bool:
    """Return whether a layer is `wanted`, perhaps after layers whose output shares their input's memory."""
    for layer in layers:
        if wanted(layer):
            return True
        if not layer.hands_through:
            return False
    return False


def refuse_cuts(model: nn.Sequential, layers: Sequence[Layer], cuts: Sequence[int]) -> None:
    """Refuse a cut across which layers would behave otherwise than in one process. Raises ConfigError."""
    for cut in cuts:
        output, where = layers[cut - 1].output, f"layer {cut - 1} ({layers[cut - 1].name})"
        elsewhere = f"choose a partition that does not cut before layer {cut}"
        if any(spec.dtype.is_complex for spec in output.specs):
            raise ConfigError(
                f"{where} returns {output}, and complex tensors cannot cross a cut; {elsewhere}"
            )
        if writes_input(layers[cut:]) and keeps_output(layers[:cut]):
            raise ConfigError(f"{where} keeps its output, which a later layer modifies; {elsewhere}")
    _refuse_sharing(model, layers, cuts)


def cuts_that_may_be(model: nn.Sequential, layers: Sequence[Layer]) -> list[int]:
    """Return the possible cuts, as the first layers behind them."""
    allowed = []
    for cut in range(1, len(layers)):
        try:
            refuse_cuts(model, layers, [cut])
        except ConfigError:
            continue
        allowed.append(cut)
    return allowed


def _refuse_sharing(model: nn.Sequential, layers: Sequence[Layer], cuts: Sequence[int]) -> None:
    """Refuse a parameter or buffer that two stages use, as each would have a copy of its own."""
    registered = {_address(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
    user: dict[str, int] = {}
    for index, (name, layer) in enumerate(named_layers(model)):
        stage = sum(cut <= index for cut in cuts)
        used = [(place.name, registered.get(_address(place.tensor), "")) for place in places(layer)]
        used += [(tensor, tensor) for tensor in layers[index].borrows]
        for label, tensor in used:
            if tensor and user.setdefault(tensor, stage) != stage:
                raise ConfigError(
                    f"layer {index} ({name}) of stage {stage} shares its {label} with stage {user[tensor]}; "
                    f"choose a partition that keeps both layers in one stage, or give each its own "
                    f"(for model=gpt: model.tied=false)"
                )


def _address(tensor: Tensor) -> tuple[str, int]:
    if tensor.layout is not torch.strided or not tensor.data_ptr():
        return "object", id(tensor)
    return "memory", tensor.data_ptr()


def refuse_changing(sizes: Sequence[Sequence[Layer]], cuts: Sequence[int]) -> None:
    """Refuse a cut whose tensors differ in kind between microbatch sizes, or in evaluation.

    `sizes`: the layers as estimated for each size, in training and in evaluation. Raises ConfigError.
    """
    for cut in cuts:
        outputs = [layers[cut - 1].output for layers in sizes]
        kinds = {output.single for output in outputs}
        needs = {output.needs_grad for output in outputs if output.needs_grad is not None}
        if len(kinds) > 1 or len(needs) > 1:
            what = "gradients are needed there" if len(kinds) == 1 else "it is one tensor or a tuple"
            raise ConfigError(
                f"whether {what} behind layer {cut - 1} ({sizes[0][cut - 1].name}) changes with the size of "
                f"a microbatch, or in evaluation; choose a partition that does not cut before layer {cut}"
            )
