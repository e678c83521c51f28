"""CUDA graphs of a stage's passes: one launch in place of hundreds.

A program is static and its bounds are proven, so a stage needs the memory of so many microbatches in flight,
the slots, and of so many weight versions. For each slot and each version's storage, the forward and the
backward of a microbatch are captured once, and replayed from then on: inputs, targets and gradients are
copied to where the graphs expect them. A slot has a memory pool of its own, as its forward and backward
always alternate; two slots that shared one would overwrite what the other holds between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipetrain.errors import ConfigError, one_line
from pipetrain.network.values import Value, ValueSpec, as_tuple
from pipetrain.runtime.feed import Target
from pipetrain.runtime.microbatch import WHOLE, Batch, Microbatch, Saving, Tensors
from pipetrain.runtime.objective import Counted
from pipetrain.runtime.stage import Stage
from pipetrain.runtime.weights import Weights

_RECORDED = -1  # the microbatch of a pass that is captured


@dataclass(slots=True)
class Recorded:
    """What a forward that is captured has made."""

    outputs: Tensors
    needed: Sequence[Tensor]  # the outputs of which a gradient comes back
    counted: Counted | None  # at the last stage
    keeps: Any  # what must live as long as the graph


Forward = Callable[[Tensors, Value | None], Recorded]
Backward = Callable[[Tensors], Tensors]  # (gradients of the outputs) -> of the inputs


@dataclass(slots=True)
class Pass:
    """A microbatch's forward and backward, captured over one slot's memory and one version's storage."""

    slot: int
    inputs: Tensors
    target: Tensors
    made: Recorded
    grads: Tensors
    back: Tensors
    forward: Any  # torch.cuda.CUDAGraph
    backward: Any
    share: float | None = None  # that the gradient of the loss is filled with

    @property
    def counted(self) -> Counted | None:
        """What the last stage counts, copied: the next replay overwrites it."""
        if self.made.counted is None:
            return None
        sums = {name: some.clone() for name, some in self.made.counted.sums.items()}
        return self.made.counted._replace(loss=self.made.counted.loss.clone(), sums=sums)


class Graphs:
    """The captured passes of a stage: by slot, and by the storage of a weight version."""

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots))
        self._pools = [torch.cuda.graph_pool_handle() for _ in range(slots)]
        self._passes: dict[tuple[int, int], Pass] = {}

    def capture(
        self, storage: int, inputs: Tensors, target: Value | None, forward: Forward, backward: Backward
    ) -> None:
        """Capture the passes of all slots over one storage. `inputs`, `target`: such as will come."""
        for slot, pool in enumerate(self._pools):
            mine = tuple(t.clone() for t in inputs)
            aims = tuple(t.clone() for t in as_tuple(target)) if target is not None else ()
            value = None if target is None else ValueSpec.like(target).pack(aims)
            first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            with _capturing(first, pool):
                made = forward(mine, value)
            grads = tuple(torch.empty_like(t, requires_grad=False) for t in made.needed)
            with _capturing(second, pool):
                back = backward(grads)
            self._passes[slot, storage] = Pass(slot, mine, aims, made, grads, back, first, second)

    def forward(self, storage: int, inputs: Tensors, target: Value | None) -> Pass | None:
        """Replay a forward; None if these tensors are others than were captured."""
        aims = as_tuple(target) if target is not None else ()
        one = self._passes.get((self._free[-1], storage)) if self._free else None
        if one is None or _kinds(inputs) != _kinds(one.inputs) or _kinds(aims) != _kinds(one.target):
            return None
        self._free.pop()
        torch._foreach_copy_([*one.inputs, *one.target], [*inputs, *aims])
        one.forward.replay()
        return one

    def backward(self, one: Pass, grads: Tensors, share: float | None) -> Tensors:
        """Replay a backward; return gradients of the inputs, for good. `share`: at the last stage."""
        if share is None:
            torch._foreach_copy_(list(one.grads), list(grads))
        elif share != one.share:
            one.share = share
            one.grads[0].fill_(share)
        one.backward.replay()
        self._free.append(one.slot)
        return tuple(t.clone() for t in one.back)  # the slot's next forward may overwrite it


def _kinds(tensors: Sequence[Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(t.shape, t.dtype) for t in tensors]


def _capturing(graph: Any, pool: Any) -> Any:
    # thread_local: other threads look at events meanwhile.
    return torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")


class FixedWeights(Weights):
    """Weights whose gradients, and the storage of whose versions, stay where they are after `fix`.

    CUDA graphs compute at the addresses of their capture.

    The leaves of all versions then have one gradient, to which graphs add. It is 0 before a batch.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._fixed: dict[str, Tensor] = {}  # gradients
        self._graded: set[str] = set()  # weights that have had a gradient so far, in rehearsals too
        super().__init__(*arguments, **options)

    def fix(self, versions: int) -> dict[int, dict[str, Tensor]]:
        """Let all stay from now on, with storage for so many versions; return leaves by its address."""
        self._fixed = {name: torch.zeros_like(p.data) for name, p in self.live.items()}
        self._versions = {self.newest: self._fresh_leaves()}
        self._accumulating = self._versions[self.newest]
        own = [p.data for p in self.live.values()]
        while len(self._spare) < versions - 1:
            self._spare.append([torch.empty_like(t) for t in own])
        found = {}
        for storage in (own, *self._spare):
            leaves = self._fresh_leaves()
            for leaf, data in zip(leaves.values(), storage, strict=True):
                leaf.data = data
            found[_address(storage)] = leaves
        return found

    def storage(self, version: int) -> int:
        """Return the address of a version's storage, as in `fix`."""
        return _address(self._versions[version].values())

    @contextmanager
    def only(self, leaves: dict[str, Tensor]) -> Iterator[None]:
        """Let these leaves be version 0."""
        before = self._versions
        self._versions = {0: leaves}
        try:
            yield
        finally:
            self._versions = before

    def accumulate_on(self, version: int) -> None:
        if not self._fixed:
            super().accumulate_on(version)

    def reduce(self) -> None:
        for name in self._graded if self._fixed else ():
            self.live[name].grad = self._fixed[name]
        if not self._fixed:
            super().reduce()
            self._graded |= self.gradients().keys()

    def step(self, keep: bool, skip: bool = False, unless: Tensor | None = None) -> None:
        super().step(keep, skip, unless)
        self._clear()

    @contextmanager
    def put_back(self) -> Iterator[None]:
        try:
            with super().put_back():
                yield
        finally:
            for name, leaf in self._accumulating.items():
                leaf.grad = self._fixed.get(name)
            self._clear()

    def _fresh_leaves(self) -> dict[str, Tensor]:
        leaves = super()._fresh_leaves()
        for name, gradient in self._fixed.items():
            leaves[name].grad = gradient
        return leaves

    def _clear(self) -> None:
        if self._fixed:
            torch._foreach_zero_(list(self._fixed.values()))


def _address(storage: Iterable[Tensor]) -> int:
    return next((t.data_ptr() for t in storage), 0)


class GraphedStage(Stage):
    """A stage whose passes are captured after a rehearsal, and replayed for microbatches like those of it."""

    weights: FixedWeights
    _weights = FixedWeights

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._graphs: Graphs | None = None
        self._example: tuple[Tensors, Target | None] | None = None  # of a rehearsal
        self._replayed: dict[int, Pass] = {}

    def forward(
        self, mb: int, x: Tensors, version: int, target: Target | None = None, saving: Saving = WHOLE
    ) -> Tensors:
        x = tuple(self.numerics.arrange(t.detach()) for t in x)
        if self._graphs is not None and (target is None or target.weight):
            value = None if target is None else target.value
            replayed = self._graphs.forward(self.weights.storage(version), x, value)
            if replayed is not None:
                one = self._open[mb] = Microbatch(mb, (), version, WHOLE)
                if target is not None and (counted := replayed.counted) is not None:
                    one.counted = counted._replace(
                        share=target.share, weight=target.weight, samples=target.samples
                    )
                self._replayed[mb] = replayed
                return replayed.made.outputs
        if self.rehearses:
            self._example = x, target
        return super().forward(mb, x, version, target, saving)

    def backward(self, mb: int, grads: Tensors, version: int) -> Tensors:
        replayed = self._replayed.pop(mb, None)
        if replayed is None or self._graphs is None:
            return super().backward(mb, grads, version)
        counted = self._close(mb, version).counted
        return self._graphs.backward(replayed, grads, None if counted is None else counted.share)

    def capture(self, slots: int, versions: int) -> None:
        """Capture the passes of so many open microbatches and weight versions.

        Raises ConfigError for layers that cannot be captured.
        """
        assert self._example is not None, "only after a rehearsal"
        (x, target), self._example = self._example, None
        graphs = Graphs(slots)
        forward = partial(self._recording_forward, target)
        value = None if target is None else target.value
        for storage, leaves in self.weights.fix(versions).items():
            with self.weights.only(leaves):
                try:
                    graphs.capture(storage, x, value, forward, self._recording_backward)
                except Exception as error:
                    raise refused(self.index, error) from error
        self._graphs = graphs

    def _recording_forward(self, like: Target | None, x: Tensors, value: Value | None) -> Recorded:
        target = None if like is None or value is None else replace(like, value=value)
        outputs = super().forward(_RECORDED, x, 0, target)
        one = self._open[_RECORDED]
        needed = [t for t, need in zip(one.outputs, self.needed(one.outputs), strict=True) if need]
        return Recorded(outputs, needed, one.counted, one)

    def _recording_backward(self, grads: Tensors) -> Tensors:
        back = super().backward(_RECORDED, grads, 0)
        self._batch = Batch()
        return back


def refused(stage: int, error: Exception) -> ConfigError:
    """Return the error for a stage whose passes cannot be captured."""
    return ConfigError(
        f"cuda_graphs=true: the passes of stage {stage} cannot be captured, as layers or loss do what a "
        f"graph cannot, such as to look at a number: {one_line(error)}; set cuda_graphs=false"
    )
