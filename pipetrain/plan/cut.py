"""How a model is cut: the layers of each stage, the messages between stages, and the possible cuts.

A value that several stages use goes directly from the stage that makes it to each of them. The gradients that
they return are added. A cut is refused if layers would behave differently than in one process.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, pairwise, product, repeat

import torch
from torch import Tensor

from pipetrain.errors import ConfigError
from pipetrain.model.network import INPUT, Network, Slice, Tensors, ValueId
from pipetrain.model.specs import Gradients, Size, TensorSpec, ValueSpec, spec_at
from pipetrain.model.tensor_places import names_by_id, places, tensors_in
from pipetrain.plan.cost_estimate import Layer, origin
from pipetrain.schedule.actions import Edge, Tie

Estimates = Mapping[Size, list[Layer]]  # size of a microbatch -> the layers as estimated for it
Specs = Mapping[ValueId, TensorSpec]


@dataclass(frozen=True, slots=True)
class Route:
    """What a stage sends to a later one for each microbatch, and the way back of the gradients.

    `needs_grad`: the values for which the target returns a gradient. `bounds`: the most messages in flight,
    forward and back; None between stages on one rank.
    """

    source: int
    target: int
    values: tuple[ValueId, ...]  # ascending
    needs_grad: tuple[bool, ...]
    bounds: tuple[int, int] | None = None

    @property
    def edge(self) -> Edge:
        return self.source, self.target

    @property
    def way_back(self) -> Edge:
        return self.target, self.source

    @property
    def returned(self) -> tuple[ValueId, ...]:
        return tuple(value for value, needs in zip(self.values, self.needs_grad, strict=True) if needs)


@dataclass(frozen=True)
class Cut:
    """A model as stages, for training or evaluation: the layers of each, and the routes between them.

    `specs`: of the values that enter stages, by the size of a microbatch; `shared`: by its name in the model,
    the stages of each weight that several stages have.
    """

    slices: tuple[Slice, ...]  # by stage
    routes: tuple[Route, ...]  # ascending
    specs: Mapping[Size, Specs]
    shared: Mapping[str, Tie] = field(default_factory=dict)

    @cached_property
    def routes_into(self) -> list[list[Route]]:
        return [[route for route in self.routes if route.target == n] for n in range(len(self.slices))]

    @cached_property
    def routes_from(self) -> list[list[Route]]:
        return [[route for route in self.routes if route.source == n] for n in range(len(self.slices))]

    @property
    def edges(self) -> list[Edge]:
        """The pairs of stages between which activations travel, ascending."""
        return [route.edge for route in self.routes]

    @property
    def ties(self) -> list[Tie]:
        """The groups of stages that share weights, in one fixed order."""
        return sorted(set(self.shared.values()))

    @cached_property
    def bounds(self) -> dict[Edge, int]:
        """The bound of each edge between ranks, in a fixed order; see schedule/buffer_bounds.py."""
        bounded = [(route, route.bounds) for route in self.routes if route.bounds is not None]
        return {
            edge: n
            for route, pair in bounded
            for edge, n in zip((route.edge, route.way_back), pair, strict=True)
        }

    def bounded(self, bounds: Mapping[Edge, int]) -> Cut:
        both = [(bounds[r.edge], bounds[r.way_back]) if r.edge in bounds else None for r in self.routes]
        routes = (replace(route, bounds=pair) for route, pair in zip(self.routes, both, strict=True))
        return replace(self, routes=tuple(routes))

    def entering(self, stage: int, size: Size) -> tuple[TensorSpec, ...]:
        """Return the specs of what enters a stage for a microbatch of this size."""
        return tuple(self.specs[size][value] for value in self.slices[stage].enters)

    def message(self, edge: Edge, size: Size) -> tuple[TensorSpec, ...]:
        """Return the tensors of a message: activations, or gradients from a later stage to an earlier one."""
        return tuple(self.specs[size][value] for value in self._values[edge])

    def tensors(self, edge: Edge) -> int:
        """Return the number of tensors of a message."""
        return len(self._values[edge])

    @cached_property
    def _values(self) -> dict[Edge, tuple[ValueId, ...]]:
        there = {route.edge: route.values for route in self.routes}
        return there | {route.way_back: route.returned for route in self.routes}


def divide(tensors: Tensors, parts: Sequence[Sequence[ValueId]]) -> list[Tensors]:
    """Return the tensors of each part's values; `tensors`: of all these values, ascending."""
    if len(parts) == 1 and len(tensors) == len(parts[0]):
        return [tensors]
    by_value = dict(zip(sorted({value for values in parts for value in values}), tensors, strict=True))
    return [tuple(by_value[value] for value in values) for values in parts]


def merge(pairs: Iterable[tuple[Sequence[ValueId], Tensors]]) -> Tensors:
    """Return the tensors of all values, ascending; those of one value are added, in the order of `pairs`."""
    parts = list(pairs)
    if len(parts) == 1 and len(parts[0][0]) == len(parts[0][1]):
        return parts[0][1]
    sums: dict[ValueId, Tensor] = {}
    for values, tensors in parts:
        for value, tensor in zip(values, tensors, strict=True):
            sums[value] = sums[value] + tensor if value in sums else tensor
    return tuple(sums[value] for value in sorted(sums))


Shapes = Callable[[Size], Sequence[ValueSpec]]
"""What each layer makes of a microbatch of any size."""


class AnySize(dict[Size, Specs]):
    """Specs by size: those of other samples follow from the given two, the neighbours of one.

    `shapes`: for other lengths.
    """

    def __init__(self, given: Mapping[Size, Specs], example: ValueSpec, shapes: Shapes | None) -> None:
        super().__init__(given)
        self._given, self._example, self._shapes = [*given.items()][:2], example, shapes

    def __missing__(self, size: Size) -> Specs:
        (first, values), _ = self._given
        if size.lengths == first.lengths:
            self[size] = {
                value: spec_at(size, [(near, specs[value]) for near, specs in self._given])
                for value in values
            }
        else:
            assert self._shapes is not None, "the shapes of a model's layers are known"
            outputs = [*self._shapes(size), self._example.of(size)]  # layer INPUT is the last
            self[size] = {value: outputs[value.layer].specs[value.number] for value in values}
        return self[size]


def cut_layers(
    estimates: Estimates,
    cuts: Sequence[int],
    example: ValueSpec,
    shared: Mapping[str, Tie] | None = None,
    any_size: bool = False,
    shapes: Shapes | None = None,
) -> Cut:
    """Return a model cut before the layers `cuts`, according to its first estimate.

    `example`: of the inputs of the first stage; `any_size`: microbatches of any size may come, of other
    lengths by `shapes`.
    """
    layers = next(iter(estimates.values()))
    data = {ValueId(INPUT, number): False for number in range(len(example.specs))}
    enters = [data, *(entering(layers, *span) for span in pairwise([*cuts, len(layers)]))]
    used = {value for values in enters for value in values}
    routes = []
    for source, target in combinations(range(len(enters)), 2):
        values = {v: needs for v, needs in enters[target].items() if stage_of(v.layer, cuts) == source}
        if values:
            routes.append(Route(source, target, tuple(values), tuple(values.values())))

    def specs(size: Size, estimated: Sequence[Layer]) -> Specs:
        outputs = [*(layer.output for layer in estimated), example.of(size)]  # layer INPUT is the last
        return {value: outputs[value.layer].specs[value.number] for value in used}

    given = {size: specs(size, of) for size, of in estimates.items()}
    return Cut(
        slices=tuple(_slices(layers, cuts, enters, routes, example)),
        routes=tuple(routes),
        specs=AnySize(given, example, shapes) if any_size else given,
        shared=shared or {},
    )


def entering(layers: Sequence[Layer], start: int, end: int) -> dict[ValueId, bool]:
    """Return the values that layers `start` to `end` (exclusive) use from before them, ascending.

    Each with whether they return its gradient. The data come before the first layer.
    """
    needs_grad_of: dict[ValueId, bool] = {}
    for layer in layers[start:end]:
        for value, reached in zip(layer.takes, layer.reached or repeat(False), strict=False):
            if value.layer < start:
                needs_grad_of[value] = needs_grad_of.get(value, False) or reached
    return dict(sorted(needs_grad_of.items()))


def _slices(
    layers: Sequence[Layer],
    cuts: Sequence[int],
    enters: Sequence[Mapping[ValueId, bool]],
    routes: Sequence[Route],
    example: ValueSpec,
) -> Iterator[Slice]:
    last = len(layers) - 1
    for stage, (start, end) in enumerate(pairwise([0, *cuts, len(layers)])):
        outgoing = [route for route in routes if route.source == stage]
        leaves = sorted({value for route in outgoing for value in route.values})
        returned = {value for route in outgoing for value in route.returned}
        if end > last:
            leaves = [ValueId(last, number) for number in range(len(layers[last].output.specs))]
        yield Slice(
            start,
            end,
            enters=tuple(enters[stage]),
            leaves=tuple(leaves),
            enters_grad=_gradients(layers, enters[stage]),
            leaves_grad=_gradients(layers, {v: v in returned for v in leaves}) if end <= last else None,
            copies_input=copies_input(layers, enters[stage], start, end),
            copies_output=copies_output(layers, leaves, start),
            drawing=frozenset(n for n in range(start, end) if layers[n].draws),
            form=layers[start - 1].output if start else example,
        )


def _gradients(layers: Sequence[Layer], needs: Mapping[ValueId, bool]) -> Gradients | None:
    """Return which of these values have gradients; None if unknown, as in an evaluation."""
    if layers[-1].requires_grad is None:
        return None
    return Gradients(tuple(requires_grad(layers, value) for value in needs), tuple(needs.values()))


def requires_grad(layers: Sequence[Layer], value: ValueId) -> bool:
    """Return whether a value depends on weights, in training."""
    return value.layer != INPUT and (layers[value.layer].requires_grad or ())[value.number]


def stage_of(layer: int, cuts: Sequence[int]) -> int:
    """Return the stage of a layer. The data belong to the first one."""
    return bisect_right(cuts, layer)


def homes(network: Network, cuts: Sequence[int]) -> dict[str, int]:
    """Return the first stage that holds each parameter and buffer, by its name in the model."""
    return {name: stages[0] for name, stages in _holders(network, cuts).items()}


def shared_weights(network: Network, cuts: Sequence[int]) -> dict[str, Tie]:
    """Return the stages of each trained parameter that several stages have, by its name in the model."""
    trained = {name for name, weight in network.model.named_parameters() if weight.requires_grad}
    holders = _holders(network, cuts)
    return {name: stages for name, stages in holders.items() if name in trained and len(stages) > 1}


def _holders(network: Network, cuts: Sequence[int]) -> dict[str, Tie]:
    """Return the stages of each parameter and buffer, ascending, by its name in the model."""
    names = names_by_id(network.model)
    users: dict[str, set[int]] = {}
    for index, module in enumerate(network.modules):
        for name in tensors_in(module, names):
            users.setdefault(name, set()).add(stage_of(index, cuts))
    return {name: tuple(sorted(stages)) for name, stages in users.items()}


def copies_input(layers: Sequence[Layer], enters: Iterable[ValueId], start: int, end: int) -> bool:
    """Return whether a layer of `start` to `end` (exclusive) modifies in place what enters them."""
    written = {origin(layers, value, start) for layer in layers[start:end] for value in layer.writes}
    return not written.isdisjoint(enters)


def copies_output(layers: Sequence[Layer], leaves: Iterable[ValueId], start: int) -> bool:
    """Return whether the output of layers from `start` on may change later, as one of them keeps it."""

    def kept(value: ValueId | None) -> bool:
        if value is None or value.layer < start:
            return False
        layer = layers[value.layer]
        return layer.keeps_output or bool(layer.views and kept(layer.views[value.number]))

    return any(map(kept, leaves))


def cuts_that_may_be(network: Network | None, layers: Sequence[Layer]) -> list[int]:
    """Return the possible cuts, each as the first layer after it."""
    return [cut for cut in range(1, len(layers)) if not any(_inseparable(network, layers, [cut]))]


def refuse_cuts(network: Network | None, layers: Sequence[Layer], cuts: Sequence[int]) -> None:
    """Refuse a cut that changes how layers behave. Raises ConfigError."""
    for layer, other, why in _inseparable(network, layers, cuts):
        raise ConfigError(
            f"layer {layer} ({layers[layer].name}) {why}: choose a partition that keeps layers {layer} and "
            f"{other} in one stage"
        )


def _inseparable(
    network: Network | None, layers: Sequence[Layer], cuts: Sequence[int]
) -> Iterator[tuple[int, int, str]]:
    """Yield pairs of layers in two stages that must be in one, and why. `network`: None if unknown."""
    for user, layer in enumerate(layers):
        behind = [0, *cuts][stage_of(user, cuts)]
        inputs = [value for value in layer.takes if value.layer != INPUT]
        for value in (value for value in inputs if stage_of(value.layer, cuts) != stage_of(user, cuts)):
            output = layers[value.layer].output
            written = {
                origin(layers, changed, behind) for later in layers[behind:] for changed in later.writes
            }
            if output.specs[value.number].dtype.is_complex:
                yield value.layer, user, f"returns {output}, and complex tensors cannot cross a cut"
            elif value in written and copies_output(layers, [value], 0):
                yield value.layer, user, "keeps its output, which a later layer modifies"
    yield from _unseen_writes(layers, cuts)
    if network and not network.shared_buffers_are_read_only:
        yield from _shared_tensors(network, layers, cuts)


def _unseen_writes(layers: Sequence[Layer], cuts: Sequence[int]) -> Iterator[tuple[int, int, str]]:
    """Yield layers that modify a value in place, with those that use it later and would not see the change.

    A user sees a change made in its own stage, or in the value's stage before it is sent, if both layers have
    the same memory there. In another stage each value is a tensor of its own.
    """
    writers = [index for index, layer in enumerate(layers) if layer.writes]
    for (user, layer), writer in product(enumerate(layers), writers):
        stage = stage_of(writer, cuts)
        start = [0, *cuts][stage]
        for value, written in product(layer.takes, layers[writer].writes):
            if not value.layer < writer < user or origin(layers, value) != origin(layers, written):
                continue
            seen = stage in (stage_of(user, cuts), stage_of(value.layer, cuts))
            if not seen or origin(layers, value, start) != origin(layers, written, start):
                yield writer, user, f"modifies in place what layer {user} uses later, behind a cut"


def _shared_tensors(
    network: Network, layers: Sequence[Layer], cuts: Sequence[int]
) -> Iterator[tuple[int, int, str]]:
    """Yield users of another stage's buffer that changes, or parameter that is not registered in the user.

    Each stage would have its own copy. For a registered parameter that is right, see `shared_weights`.
    """
    model = network.model
    tied = {_address(t) for t in model.parameters()}
    registered = {_address(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
    holders: dict[str, list[int]] = {}  # layers that register each parameter
    for index, module in enumerate(network.modules):
        for parameter in module.parameters():
            holders.setdefault(registered.get(_address(parameter), ""), []).append(index)
    user: dict[str, int] = {}
    for index, module in enumerate(network.modules):
        stage, parameters = stage_of(index, cuts), {id(t) for t in module.parameters()}
        used = [
            registered.get(_address(place.tensor), "")
            for place in places(module)
            if _address(place.tensor) not in tied or id(place.tensor) not in parameters
        ]
        for name in filter(None, [*used, *layers[index].borrows]):
            registering = holders.get(name, [])
            elsewhere = [] if stage in {stage_of(layer, cuts) for layer in registering} else registering
            for other in (user.setdefault(name, index), *elsewhere):
                if (other_stage := stage_of(other, cuts)) != stage:
                    yield index, other, f"of stage {stage} shares its {name} with stage {other_stage}"


def _address(tensor: Tensor) -> tuple[str, int]:
    if tensor.layout is not torch.strided or not tensor.data_ptr():
        return "object", id(tensor)
    return "memory", tensor.data_ptr()
