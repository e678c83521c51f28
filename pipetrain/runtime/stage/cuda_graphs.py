"""CUDA graphs of a stage's passes: one launch in place of hundreds.

The plan bounds the microbatches in flight, each in a slot, and the weight versions of a stage. For each slot
and each version's storage, the forward and the backward of a microbatch are captured once and then replayed:
inputs, targets and gradients are copied to where the graphs expect them.

A graph is of microbatches of one shape. The largest one of the first window is captured before it, and
between windows others that come often, as some lengths of padded texts do, `MAX_SHAPES` in all. The rest runs
without graphs.

What a pass allocates and a later pass of its microbatch needs is in the memory pool of its slot: what a
forward saves, and what the first half of a split backward leaves. A slot has one open microbatch at a time,
so its passes of all versions and shapes share the pool, and those of all versions inputs, targets and
outputs. What the last pass of a microbatch allocates is not needed afterwards, so the last passes of all
slots share one pool. The returned gradients are copied, within the graph, to one place for all slots, and
from there before another pass is replayed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from pipetrain.errors import one_line
from pipetrain.model.network import Tensors
from pipetrain.model.numerics import signed
from pipetrain.model.random_numbers import RngSnapshot
from pipetrain.model.specs import ValueSpec, as_tuple, on_each
from pipetrain.model.tensor_places import Held, attributes_of
from pipetrain.runtime.microbatch_feed import Target
from pipetrain.runtime.stage.fixed_store import FixedStore
from pipetrain.runtime.stage.microbatch import WHOLE, Batch, Microbatch, Saving
from pipetrain.runtime.stage.objective import Counted
from pipetrain.runtime.stage.observer import around
from pipetrain.runtime.stage.stage import Stage
from pipetrain.schedule.actions import Predicted, Read

MAX_SHAPES = 8
"""The most shapes of microbatches whose passes are captured."""

OFTEN = 32
"""How many microbatches of a shape run without graphs before it is captured."""

OFTEN_SHARE = 1 / 16
"""The least share that these must be of all that ran without."""

_CAPTURED_MB = -1  # the microbatch of a pass that is captured
Example = tuple[Tensors, Target | None, Saving]  # a microbatch's inputs, target, and what it saves
MicrobatchShape = tuple[Any, ...]  # shapes and dtypes of a microbatch's inputs and target, and what it saves


def _shape_of(x: Tensors, target: Target | None, saving: Saving) -> MicrobatchShape:
    return saving, *[(t.shape, t.dtype) for t in (*x, *_tensors(target))]


def _without_memory(t: Tensor) -> Tensor:
    return torch.empty_like(t, device="meta")


def _tensors(target: Target | None) -> Tensors:
    return as_tuple(target.value) if target is not None else ()


@dataclass(slots=True)
class GraphMemory:
    """A pool of graphs that may overwrite each other's memory, and tensors that they share."""

    pool: Any
    tensors: dict[Any, Tensors] = field(default_factory=dict)

    def place(self, name: str, like: Tensors) -> Tensors:
        """Return the place of tensors with this name and the shapes of `like`."""
        key = name, *[(t.shape, t.dtype) for t in like]
        if key not in self.tensors:
            self.tensors[key] = tuple(torch.empty_like(t, requires_grad=False) for t in like)
        return self.tensors[key]

    def copied(self, name: str, tensors: Tensors) -> Tensors:
        place = self.place(name, tensors)
        _copy(place, tensors)
        return place


@dataclass(slots=True)
class CapturedPass:
    """A microbatch's forward and backward, captured for one slot's memory, version's storage and shape.

    `recorded`: what the last stage counts, overwritten by each replay.
    """

    slot: int
    inputs: Tensors
    target: Tensors
    recorded: Counted | None
    outputs: Tensors
    grads: Tensors
    back: Tensors
    forward: Any  # torch.cuda.CUDAGraph
    backward: Any
    weight: Any  # the second half of a split backward, else None

    def counted(self, target: Target | None) -> Counted | None:
        """Return a copy of what the last stage counts."""
        counted = self.recorded
        if counted is None or target is None:
            return None
        sums = {name: sum.clone() for name, sum in counted.sums.items()}
        return Counted(target.share, counted.loss.clone(), target.weight, target.samples, sums)


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        torch._foreach_copy_([*map(signed, targets)], [*map(signed, sources)])


@dataclass(slots=True)
class Graphs:
    """What a stage has captured.

    `leaves`: of each weight version, by its storage. `attributes`: of layers and task at the first capture.
    `shared`: the memory of last passes. `passes`: by slot, storage and shape. `shapes`: of these.
    `spoilt`: an error within a capture may have left the memory in any state.
    """

    leaves: dict[int, dict[str, nn.Parameter]]
    attributes: Held
    shared: GraphMemory
    memories: list[GraphMemory]  # by slot
    passes: dict[tuple[int, int, MicrobatchShape], CapturedPass] = field(default_factory=dict)
    shapes: set[MicrobatchShape] = field(default_factory=set)
    spoilt: bool = False


class GraphedStage(Stage):
    """A stage whose passes are captured between windows, and replayed for microbatches of equal shapes."""

    store: FixedStore
    _store = FixedStore

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._graphs: Graphs | None = None
        self._free_slots: list[int] = []
        # To be captured next. It and the next two change in place, as a rehearsal restores attributes.
        self._examples: dict[MicrobatchShape, Example] = {}
        self._ran_without = Counter[MicrobatchShape]()  # microbatches, since the first capture
        self._refused = set[MicrobatchShape]()
        self._replayed: dict[int, CapturedPass] = {}
        self._replays = False  # in this window: a program may have changed attributes since

    def forward(
        self, mb: int, x: Tensors, read: Read, target: Target | None = None, saving: Saving = WHOLE
    ) -> Tensors:
        x = tuple(self.numerics.arrange(t.detach()) for t in x)
        example, captured = (x, target, saving), None
        if self._graphs is None:
            if self.rehearses and not self._refused:
                self._examples.clear()
                self._keep(example)
        elif self._can_replay(target):
            key = self._free_slots[-1], self.store.storage(read), _shape_of(*example)
            captured = self._graphs.passes.get(key)
            if captured is None and not self.rehearses:
                self._count(example)
        if captured is None:
            return super().forward(mb, x, read, target, saving)
        self._free_slots.pop()
        _copy((*captured.inputs, *captured.target), (*x, *_tensors(target)))
        opened = self._microbatches[mb] = Microbatch(mb, (), read, saving)
        with around(self.observers, opened):
            captured.forward.replay()
        opened.counted = captured.counted(target)
        self._replayed[mb] = captured
        # Copied if the outputs may still be in use after the backward, as no gradient comes back.
        return captured.outputs if captured.grads else tuple(t.clone() for t in captured.outputs)

    def backward(self, mb: int, grads: Tensors, read: Read) -> Tensors:
        if (captured := self._replayed.pop(mb, None)) is None:
            return super().backward(mb, grads, read)
        self._load_gradients(captured, self._close(mb, read), grads)
        self._free_slots.append(captured.slot)
        return self._replay_backward(captured)

    def backward_input(self, mb: int, grads: Tensors, read: Read) -> Tensors:
        if (captured := self._replayed.get(mb)) is None:
            return super().backward_input(mb, grads, read)
        self._load_gradients(captured, self._microbatches[mb], grads)
        return self._replay_backward(captured) if captured.weight is not None else ()

    def backward_weight(self, mb: int, read: Read) -> None:
        if (captured := self._replayed.pop(mb, None)) is None:
            super().backward_weight(mb, read)
            return
        self._close(mb, read)
        (captured.weight or captured.backward).replay()
        self._free_slots.append(captured.slot)

    def _adding(self) -> AbstractContextManager[None]:
        """Add directly: a graph's kernel costs no launch, and each slot's memory would hold the gradients."""
        return nullcontext() if self.store.fixed else super()._adding()

    def _load_gradients(self, captured: CapturedPass, opened: Microbatch, grads: Tensors) -> None:
        if opened.counted is not None:
            captured.grads[0].fill_(opened.counted.share)
        else:
            _copy(captured.grads, grads)  # none if no earlier stage has weights

    def _replay_backward(self, captured: CapturedPass) -> Tensors:
        captured.backward.replay()
        return tuple(t.clone() for t in captured.back)  # another slot's backward overwrites it

    def _can_replay(self, target: Target | None) -> bool:
        observed = any(observer.needs_outputs() for observer in self.observers)
        weighs = target is None or bool(target.weight)
        return self._replays and bool(self._free_slots) and weighs and not observed

    def _count(self, example: Example) -> None:
        """Count a microbatch that runs without graphs, and keep its shape if that is to be captured."""
        shape, graphs = _shape_of(*example), self._graphs
        assert graphs is not None
        if shape in graphs.shapes or shape in self._refused or graphs.spoilt:
            return  # of a captured one there is no graph for this weight version's storage
        self._ran_without[shape] += 1
        if self._ran_without[shape] >= max(OFTEN, OFTEN_SHARE * self._ran_without.total()):
            self._keep(example)

    def _keep(self, example: Example) -> None:
        """Keep what is like an example, without its memory, to be captured next."""
        x, target, saving = example
        x, no_memory = tuple(map(_without_memory, x)), target
        if target is not None:
            no_memory = replace(target, value=on_each(target.value, _without_memory))
        self._examples[_shape_of(*example)] = x, no_memory, saving

    @property
    def shapes_captured(self) -> int:
        return len(self._graphs.shapes) if self._graphs else 0

    @property
    def capture_due(self) -> bool:
        return bool(self._examples)

    def capture(self, slots: int, versions: int, reason: str = "") -> str:
        """Capture the passes of so many open microbatches and weight versions, of the next shape that is due.

        If that is impossible, or not wanted (`reason`), return why; such a shape runs without graphs.
        """
        shape, example = self._examples.popitem()
        if self.shapes_captured == MAX_SHAPES:
            reason = f"microbatches have more than {MAX_SHAPES} shapes: pad them to fewer lengths"
        if reason := reason or self._capture(shape, example, slots, versions):
            self._refused.add(shape)
        return reason

    def _capture(self, shape: MicrobatchShape, example: Example, slots: int, versions: int) -> str:
        if self._graphs and self._graphs.attributes.changed():
            return ""  # its graphs would do other things than those of the other shapes
        before, generators, first = self._attributes(), RngSnapshot(), self._graphs is None
        hooks = [(m._forward_hooks, m._forward_pre_hooks, m._backward_hooks) for m in self.module.modules()]
        observers, self.observers = self.observers, []  # in a pass on a GPU they look at nothing
        reason, passes = "", dict[tuple[int, int, MicrobatchShape], CapturedPass]()
        try:
            with torch.cuda.stream(torch.cuda.current_stream()):  # a failed capture does not leave its stream
                graphs = self._graphs or self._prepared(before, slots, versions)
                for storage, leaves in graphs.leaves.items():
                    with self.store.holding_only(leaves):
                        for slot, memory in enumerate(graphs.memories):
                            arguments = memory, graphs.shared, versions > 1, example
                            passes[slot, storage, shape] = self._captured(slot, *arguments)
            # Later another thread may draw meanwhile.
            if any(map(any, hooks)) or before.changed() or (first and generators.drawn()):
                reason = (
                    "layers have hooks, or do more than change tensors in place, which a replay would not"
                )
        except Exception as error:
            reason = f"layers or loss do what a graph cannot, such as to look at a number: {one_line(error)}"
        self.observers = observers
        if not reason:
            graphs.passes |= passes
            graphs.shapes.add(shape)
            self._graphs, self._free_slots = graphs, list(range(slots))
            return ""
        self._microbatches, self._batch = {}, Batch()
        if self._graphs is None:
            self.store.unfix()
        else:
            self._graphs.spoilt = True
            self._examples.clear()
        return reason

    def _prepared(self, attributes: Held, slots: int, versions: int) -> Graphs:
        shared, *memories = [GraphMemory(torch.cuda.graph_pool_handle()) for _ in range(1 + slots)]
        return Graphs(self.store.fix(versions), attributes, shared, memories)

    def _zeros(self, like: Tensor) -> Tensor:
        return torch.zeros_like(like, device=self.device)

    def _attributes(self) -> Held:
        """Return what the passes may depend on besides tensors: attributes of layers and the task."""
        of_task = vars(self.objective.task) if self.objective else {}
        losses = [value for value in of_task.values() if isinstance(value, nn.Module)]
        return Held([*attributes_of(*self.module.children(), *losses), ("", of_task)])

    def begin_window(self, predicted: Sequence[Predicted] = ()) -> None:
        super().begin_window(predicted)
        self._replays = self._graphs is not None and not self._graphs.attributes.changed()

    def _captured(
        self, slot: int, memory: GraphMemory, shared: GraphMemory, copies_outputs: bool, example: Example
    ) -> CapturedPass:
        """Capture the passes of a slot in its `memory`, and its last pass in the `shared` one.

        `copies_outputs`: to one place for all weight versions.
        """
        x, target, saving = example
        inputs, targets = memory.copied("inputs", tuple(map(self._zeros, x))), cast(Tensors, ())
        if target is not None:
            targets = memory.copied("targets", tuple(map(self._zeros, _tensors(target))))
            target = replace(target, value=ValueSpec.like(target.value).pack(targets))
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with _capturing(forward, memory.pool):
            outputs = super().forward(_CAPTURED_MB, inputs, 0, target, saving)
            if copies_outputs:
                outputs = memory.copied("outputs", outputs)
        microbatch = self._microbatches[_CAPTURED_MB]
        outputs_with_gradient = tuple(self._outputs_with_gradient(microbatch))
        # In the slot's own memory if W may need them too.
        grads = (memory if saving.split else shared).place("gradients", outputs_with_gradient)
        weight = torch.cuda.CUDAGraph() if microbatch.deferred is not None else None
        with _capturing(backward, (memory if weight else shared).pool):
            back = (super().backward_input if weight else super().backward)(_CAPTURED_MB, grads, 0)
            back = shared.copied("back", back)
        if weight:
            with _capturing(weight, shared.pool):
                super().backward_weight(_CAPTURED_MB, 0)
        self._batch = Batch()
        tensors = inputs, targets, microbatch.counted, outputs, grads, back
        return CapturedPass(slot, *tensors, forward, backward, weight)


@contextmanager
def _capturing(graph: Any, pool: Any) -> Iterator[None]:
    # thread_local: other threads query events meanwhile.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")  # raises before a wait of the host would spoil the capture
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
