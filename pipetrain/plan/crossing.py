"""What crosses from stage to stage: the values of each route, and which cuts are possible.

A value that several stages use enters each of them, straight from the stage that made it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product

import torch
from torch import Tensor

from pipetrain.errors import ConfigError
from pipetrain.network.boundary import Boundary
from pipetrain.network.network import INPUT, Made, Network, Slice
from pipetrain.network.places import places
from pipetrain.plan.estimate import Layer
from pipetrain.schedule.lower import Route


@dataclass(frozen=True, slots=True)
class Carried:
    """The tensors of a route: their positions in what leaves its source, and in what enters its end."""

    left: tuple[int, ...]
    entered: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Seams:
    """How the stages of a cut model are joined, for one number of samples. Lists are by stage."""

    slices: list[Slice]
    routes: dict[Route, Carried]  # ascending
    entries: list[Boundary]  # what enters
    exits: list[Boundary]  # what leaves; of the last stage the model's outputs


def seams(layers: Sequence[Layer], cuts: Sequence[int], inputs: Boundary) -> Seams:
    """Return how the stages between `cuts` are joined; `inputs` of the model all enter the first one."""
    ends = [0, *cuts, len(layers)]
    stages = range(len(cuts) + 1)
    stage_of = [stage for stage in stages for _ in range(ends[stage], ends[stage + 1])]

    def source(value: Made) -> int:
        return 0 if value.layer == INPUT else stage_of[value.layer]

    needs: list[dict[Made, bool]] = [{} for _ in stages]  # the values that enter: is a gradient needed?
    needs[0] = {Made(INPUT, number): False for number in range(len(inputs.specs))}
    for layer, here in zip(layers, stage_of, strict=True):
        for number, value in enumerate(layer.takes):
            if source(value) != here:
                reached = bool(layer.reached) and layer.reached[number]
                needs[here][value] = needs[here].get(value, False) or reached
    enters = [tuple(sorted(taken)) for taken in needs]
    leaves = [
        tuple(sorted({v for later in stages[stage + 1 :] for v in enters[later] if source(v) == stage}))
        for stage in stages
    ]
    outputs = layers[-1].output
    leaves[-1] = tuple(Made(len(layers) - 1, number) for number in range(len(outputs.specs)))
    routes = {
        (stage, later): Carried(
            tuple(position for position, value in enumerate(leaves[stage]) if value in enters[later]),
            tuple(position for position, value in enumerate(enters[later]) if source(value) == stage),
        )
        for stage in stages
        for later in stages[stage + 1 :]
        if any(source(value) == stage for value in enters[later])
    }
    known = outputs.needs_grad is not None
    boundary = partial(_boundary, layers, inputs)
    entries = [
        boundary(values, tuple(needs[stage][v] for v in values) if known else None)
        for stage, values in enumerate(enters)
    ]
    exits = [
        boundary(values, tuple(any(taken.get(v, False) for taken in needs[1:]) for v in values))
        for values in leaves[:-1]
    ]
    slices = [
        Slice(
            ends[stage],
            ends[stage + 1],
            enters[stage],
            leaves[stage],
            frozenset(n for n in range(ends[stage], ends[stage + 1]) if layers[n].draws),
            before.single,
            before.packing,
        )
        for stage, before in enumerate([inputs, *(layers[cut - 1].output for cut in cuts)])
    ]
    return Seams(slices, dict(sorted(routes.items())), entries, [*exits, outputs])


def _boundary(
    layers: Sequence[Layer], inputs: Boundary, values: Sequence[Made], needs: tuple[bool, ...] | None
) -> Boundary:
    made = [inputs if value.layer == INPUT else layers[value.layer].output for value in values]
    requires = [of.requires_grad or (False,) * len(of.specs) for of in made]
    return Boundary(
        specs=tuple(of.specs[value.number] for of, value in zip(made, values, strict=True)),
        single=len(values) == 1 and made[0].single,
        needs_grad=needs,
        requires_grad=None
        if needs is None
        else tuple(known[value.number] for known, value in zip(requires, values, strict=True)),
    )


def copies_input(layers: Sequence[Layer], slice: Slice) -> bool:
    """Return whether a stage modifies what enters it in place."""
    return _reaches(layers, slice.enters, range(slice.start, slice.end), lambda layer: layer.writes_input)


def copies_output(layers: Sequence[Layer], slice: Slice) -> bool:
    """Return whether what leaves a stage may change later, because a layer keeps it."""
    kept: set[int] = set()  # the layers of which that is true
    for index in range(slice.start, slice.end):
        layer = layers[index]
        if layer.keeps_output or (layer.hands_through and any(v.layer in kept for v in layer.takes)):
            kept.add(index)
    return any(value.layer in kept for value in slice.leaves)


def _reaches(
    layers: Sequence[Layer], values: Iterable[Made], among: Iterable[int], wanted: Callable[[Layer], bool]
) -> bool:
    """Return whether a layer that takes one of the values, or shares its memory, is `wanted`."""
    same = set(values)
    for index in among:
        layer = layers[index]
        if not same.isdisjoint(layer.takes):
            if wanted(layer):
                return True
            if layer.hands_through:
                same |= {Made(index, number) for number in range(len(layer.output.specs))}
    return False


def lighter_cuts(layers: Sequence[Layer], cuts: Sequence[int], inputs: Boundary) -> list[int]:
    """Move cuts over a layer that only hands on what it takes, such as a Pop, where fewer bytes cross then.

    The stages' work stays the same. Behind a Pop a skip would travel to the Pop's stage, and on from there.
    """

    def crossing(cuts: Sequence[int]) -> int:
        return sum(entry.nbytes for entry in seams(layers, cuts, inputs).entries[1:])

    best = list(cuts)
    for position in range(len(best)):
        for moved in (best[position] - 1, best[position] + 1):
            other = [*best[:position], moved, *best[position + 1 :]]
            if any(a >= b for a, b in pairwise([0, *other, len(layers)])):
                continue
            layer = layers[min(best[position], moved)]
            elements = sum(spec.numel for spec in layer.output.specs)
            idle = layer.hands_through and not layer.params and layer.flops == elements
            if idle and crossing(other) < crossing(best):
                best = other
                break
    return best


def refuse_cuts(network: Network, layers: Sequence[Layer], cuts: Sequence[int]) -> None:
    """Refuse a cut across which layers would behave otherwise than in one process. Raises ConfigError."""
    ends = [0, *cuts, len(layers)]
    stage_of = [stage for stage, (start, end) in enumerate(pairwise(ends)) for _ in range(start, end)]
    for user, layer in enumerate(layers):
        for value in layer.takes:
            if value.layer != INPUT and stage_of[value.layer] != stage_of[user]:
                _refuse_value(layers, value, user, ends[stage_of[user]])
    _refuse_written(layers, ends, stage_of)
    _refuse_sharing(network, layers, cuts)


def _refuse_value(layers: Sequence[Layer], value: Made, user: int, cut: int) -> None:
    """Refuse that a value, which layer `user` takes, crosses `cut`, before the stage of that layer."""
    maker = layers[value.layer]
    where, output = f"layer {value.layer} ({maker.name})", maker.output
    cuts = f"before layer {user}" if user == value.layer + 1 else f"between layers {value.layer} and {user}"
    elsewhere = f"choose a partition that does not cut {cuts}"
    if output.specs[value.number].dtype.is_complex:
        raise ConfigError(f"{where} returns {output}, and complex tensors cannot cross a cut; {elsewhere}")
    behind = range(cut, len(layers))
    if copies_output(layers, Slice(0, cut, (), (value,))) and _reaches(
        layers, [value], behind, lambda layer: layer.writes_input
    ):
        raise ConfigError(f"{where} keeps its output, which a later layer modifies; {elsewhere}")


def _refuse_written(layers: Sequence[Layer], ends: Sequence[int], stage_of: Sequence[int]) -> None:
    """Refuse a value that a layer modifies in place before a later one, which would not see it, uses it.

    It sees what its own stage does, and what the value's stage does before the value leaves, if the two
    layers have the same memory there. Over a cut each value is a tensor of its own.
    """
    writers = [index for index, layer in enumerate(layers) if layer.writes_input]
    if not writers:
        return
    memory = {start: _memory(layers, start) for start in ends[:-1]}

    def shared(a: Made, b: Made, start: int) -> bool:
        of = memory[start]
        return not of.get(a, frozenset((a,))).isdisjoint(of.get(b, frozenset((b,))))

    for user, layer in enumerate(layers):
        for value, writer in product(layer.takes, writers):
            if not value.layer < writer < user:
                continue
            stage = stage_of[writer]
            seen = stage in (stage_of[user], stage_of[max(value.layer, 0)])
            for written in layers[writer].takes:
                if shared(value, written, 0) and not (seen and shared(value, written, ends[stage])):
                    maker = "the data" if value.layer == INPUT else f"layer {value.layer}"
                    raise ConfigError(
                        f"layer {writer} ({layers[writer].name}) modifies in place what comes from {maker}, "
                        f"and layer {user} ({layer.name}), which uses it later, would not see that over a "
                        f"cut: let it make a new tensor, or keep both in one stage by partition="
                    )


def _memory(layers: Sequence[Layer], start: int) -> dict[Made, frozenset[Made]]:
    """Return, of what layers from `start` on make, the values whose memory each may share."""
    found: dict[Made, frozenset[Made]] = {}
    for index, layer in enumerate(layers[start:], start):
        taken = [found.get(value, frozenset((value,))) for value in layer.takes if layer.hands_through]
        for number in range(len(layer.output.specs)):
            value = Made(index, number)
            found[value] = frozenset((value,)).union(*taken)
    return found


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
        stage = sum(cut <= index for cut in cuts)
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


def homes(network: Network, cuts: Sequence[int]) -> dict[str, int]:
    """Return the first stage that holds each parameter and buffer, by its name in the model."""
    named = [*network.model.named_parameters(), *network.model.named_buffers()]
    names = {id(tensor): name for name, tensor in named}
    found: dict[str, int] = {}
    for index, module in enumerate(network.modules):
        for place in places(module):
            if id(place.tensor) in names:
                found.setdefault(names[id(place.tensor)], sum(cut <= index for cut in cuts))
    return found


def shared_weights(network: Network, cuts: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the stages of each trained parameter that several have, by its name in the model."""
    names = {id(p): name for name, p in network.model.named_parameters() if p.requires_grad}
    holders: dict[str, set[int]] = {}
    for index, module in enumerate(network.modules):
        for parameter in module.parameters():
            if id(parameter) in names:
                holders.setdefault(names[id(parameter)], set()).add(sum(cut <= index for cut in cuts))
    return {name: tuple(sorted(stages)) for name, stages in holders.items() if len(stages) > 1}


def _address(tensor: Tensor) -> tuple[str, int]:
    if tensor.layout is not torch.strided or not tensor.data_ptr():
        return "object", id(tensor)
    return "memory", tensor.data_ptr()


def refuse_changing(sizes: Sequence[Sequence[Layer]], cuts: Sequence[int], inputs: Boundary) -> None:
    """Refuse a cut whose tensors differ in kind between microbatch sizes, or in evaluation.

    `sizes`: the layers as estimated for each size, in training and in evaluation. Raises ConfigError.
    """
    joined = [seams(layers, cuts, inputs) for layers in sizes]
    for stage, cut in enumerate(cuts, 1):
        first, *others = [(found.slices[stage].single, found.slices[stage].packing) for found in joined]
        needs = {found.entries[stage].needs_grad for found in joined} - {None}
        changes = any(other != first for other in others)
        if changes or len(needs) > 1:
            what = "it is one tensor or a tuple" if changes else "gradients are needed there"
            raise ConfigError(
                f"whether {what} behind layer {cut - 1} ({sizes[0][cut - 1].name}) changes with the size of "
                f"a microbatch, or in evaluation; choose a partition that does not cut before layer {cut}"
            )
