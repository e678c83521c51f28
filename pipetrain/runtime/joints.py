"""The messages of a stage: which tensors go to which other stage, and which come from where.

Activations travel along the routes, gradients the other way. A value that several stages use gets a gradient
from each of them; they are added in the order of the stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from pipetrain.network.boundary import Boundary, TensorSpec
from pipetrain.plan.crossing import Seams
from pipetrain.runtime.channel import Edge

Tensors = tuple[Tensor, ...]
Take = Callable[[Edge], Tensors]  # returns the message that has come over an edge


class Joints:
    """Divides what leaves a stage into messages, and joins what enters it."""

    def __init__(self, seams: Seams) -> None:
        self.routes = list(seams.routes)
        self._left = {route: carried.left for route, carried in seams.routes.items()}
        self._entered = {route: carried.entered for route, carried in seams.routes.items()}
        entering = [_places(entry) for entry in seams.entries]
        leaving = [_places(leaves) for leaves in seams.exits]
        # The entering values of each route that need a gradient, and the places of these gradients among all
        # that its end makes, and all that its source takes.
        self._needed = {
            r: [p for p in entered if p in entering[r[1]]] for r, entered in self._entered.items()
        }
        self._made = {r: [entering[r[1]][p] for p in needed] for r, needed in self._needed.items()}
        self._taken = {
            r: [
                leaving[r[0]][left]
                for left, p in zip(self._left[r], self._entered[r], strict=True)
                if p in entering[r[1]]
            ]
            for r in self.routes
        }
        self._counts = list(map(len, leaving))
        stages = range(len(seams.slices))
        self._from = [[route for route in self.routes if route[0] == stage] for stage in stages]
        self._to = [[route for route in self.routes if route[1] == stage] for stage in stages]

    def handed_on(self, stage: int, outputs: Tensors) -> Iterator[tuple[Edge, Tensors]]:
        """Yield the message for each later stage, from what has left this one."""
        for route in self._from[stage]:
            yield route, _pick(outputs, self._left[route])

    def inputs(self, stage: int, take: Take) -> Tensors:
        """Return what enters a stage, in its order."""
        arrived: dict[int, Tensor] = {}
        for route in self._to[stage]:
            arrived |= zip(self._entered[route], take(route), strict=True)
        return tuple(arrived[position] for position in sorted(arrived))

    def handed_back(self, stage: int, grads: Tensors) -> Iterator[tuple[Edge, Tensors]]:
        """Yield the message for each earlier stage, from the gradients of what has entered this one."""
        for route in self._to[stage]:
            yield route[::-1], _pick(grads, self._made[route])

    def output_grads(self, stage: int, take: Take) -> Tensors:
        """Return the gradient of each tensor that has left a stage and needs one."""
        sums: list[Tensor | None] = [None] * self._counts[stage]
        for route in self._from[stage]:
            for place, grad in zip(self._taken[route], take(route[::-1]), strict=True):
                before = sums[place]
                sums[place] = grad if before is None else before + grad
        return tuple(grad for grad in sums if grad is not None)

    def specs(self, edge: Edge, entry: Boundary) -> tuple[TensorSpec, ...]:
        """Return the tensors of a message; `entry`: what enters the later one of its stages."""
        forward = edge[0] < edge[1]
        positions = self._entered[edge] if forward else self._needed[edge[::-1]]
        return tuple(entry.specs[position] for position in positions)


def _places(boundary: Boundary) -> dict[int, int]:
    """Return the place, among the gradients, of each tensor that needs one. In an evaluation none does."""
    needs = boundary.needs_grad or ()
    return {position: place for place, position in enumerate(i for i, need in enumerate(needs) if need)}


def _pick(tensors: Tensors, positions: Sequence[int]) -> Tensors:
    return tuple(tensors[position] for position in positions)
