"""One stage: a slice of the model, its weights, and the tensors saved for the backward of open microbatches.

A stage has no notion of ranks or messages. Its memory is bounded by the program: the peak of `in_flight` is
the number of activations that `simulate` predicts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from pipetrain.errors import TrainingStopped
from pipetrain.network import draws
from pipetrain.network.boundary import (
    Gradients,
    Value,
    as_tuple,
    cast_floats,
    differentiable,
    leaves_of,
    needs_grad,
    requires_grad,
)
from pipetrain.network.modes import evaluating
from pipetrain.network.network import INPUT, Part
from pipetrain.network.numerics import Numerics
from pipetrain.rate import Rate
from pipetrain.runtime.finite import (
    DATA,
    FiniteWatch,
    all_finite,
    backward_origin,
    blame,
    blame_batch,
    blame_weights,
    forward_origin,
    in_host_memory_finite,
    not_finite,
    numbers_of,
    smallest_of_first_layer,
    witness,
)
from pipetrain.runtime.graphs import Graphs, Pass, Recorded, refused
from pipetrain.runtime.recompute import Again
from pipetrain.runtime.split import Deferred
from pipetrain.runtime.statistics import BatchStatistics
from pipetrain.runtime.tied import packed, unpack
from pipetrain.runtime.weights import Buffers, OptimizerFactory, Weights
from pipetrain.schedule.actions import Tie
from pipetrain.tally import Counter, Tally
from pipetrain.tasks import Task


class StateReader(Protocol):
    """Tensors by name."""

    def __getitem__(self, name: str) -> Tensor: ...

    def names(self, prefix: str) -> list[str]:
        """Return all names that start with `prefix`, without it."""


_CHANGES = (
    "the plan says otherwise: which of its inputs a layer uses, and which of its outputs depend on weights, "
    "must not change from one microbatch to another; keep it in one stage with the layers beside it, by "
    "partition="
)


def _all_finite_on_host(numbers: Tensor) -> bool:
    """Return whether numbers are finite. On a GPU the host waits for them."""
    return all(map(math.isfinite, numbers.reshape(-1).tolist()))


def _weighted(counted: Sequence[tuple[float, _Counted]]) -> Tensor:
    """Return the losses of microbatches, each times its share of the batch's loss [n]."""
    losses, shares = [loss for _, (loss, *_) in counted], [share for share, _ in counted]
    if shares == [1.0]:
        return losses[0].unsqueeze(0)
    return torch.stack(torch._foreach_mul(losses, shares))


def _host_copy(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def _weight_of(path: str) -> str:
    """Return the parameter or buffer of an entry of a stage's state."""
    kind, _, name = path.partition("/")
    return name.rpartition("/")[0] if kind == "optimizer" else name


@dataclass(frozen=True, slots=True)
class Target:
    """The last stage's targets of a microbatch.

    `weight`: how much they count for, and `share`: of what those of the whole batch do. `take`: called with
    the outputs of a prediction, in place of a loss.
    """

    value: Value  # tensors [n, ...]
    weight: float
    share: float
    take: Callable[[tuple[Tensor, ...]], None] | None = None

    @property
    def samples(self) -> int:
        return len(as_tuple(self.value)[0])


def compiled(module: nn.Module) -> Callable[..., Value]:
    """Return a module's call through torch.compile, specialised to the shapes that occur."""
    draws.leave_to_python()
    return torch.compile(module, dynamic=False)


class Saving(NamedTuple):
    """What a forward saves for its backward, which may come in two halves, or after a recomputation."""

    split: bool = False
    recomputed: bool = False


WHOLE = Saving()
_RECORDED = -1  # the microbatch of a pass that is captured

_Counted = tuple[Tensor, float, int, Mapping[str, Tensor]]
"""A microbatch's mean loss, what it counts for, its samples, and the sums of its metrics."""


@dataclass(slots=True)
class _Saved:
    """An open microbatch. Before a recomputation there are no outputs, and after I no inputs either."""

    inputs: tuple[Tensor, ...]
    version: int
    saving: Saving
    target: Target | None = None
    outputs: tuple[Tensor, ...] = ()
    grads: tuple[Tensor, ...] = ()  # of the outputs, where W is all of the backward
    share: float = 1.0  # of its loss in that of the batch, at the last stage
    deferred: Deferred | None = None  # the weight gradients to be made in W
    again: Again | None = None  # between the forward and its recomputation
    counted: _Counted | None = None  # at the last stage
    replayed: Pass | None = None  # where the forward was a CUDA graph


class Stage:
    """Slice `index` of a model. The last stage has the task; the others pass their outputs on.

    `inputs` and `outputs` tell which of the tensors that enter and leave have a gradient; by default every
    one but the data that can have one does.
    `copy_input`: a layer modifies what enters; `copy_output`: a layer keeps what leaves. `compile`: use
    torch.compile; `cuda_graphs`: `capture` will be called. `selective`: a forward that is to be run again
    keeps dear results, see recompute.py.
    `batch_statistics`: those of a BatchNorm that run are of batches, see statistics.py.
    `skip_not_finite`: a non-finite gradient skips the update, with its changes of the buffers, instead of
    stopping the training. `ema`: evaluate a moving average of the weights, see Weights.
    `clip_grad_norm`: the most that the norm of a batch's gradient may be, otherwise it is scaled to it.
    `names`: those of parameters in the model, where they differ, as of a weight that an earlier layer has
    too; `shared`: of each parameter of several stages, by its name in the model, these stages;
    `elsewhere`: tensors, by these names, that are in the state of an earlier stage.
    """

    def __init__(
        self,
        index: int,
        module: Part,
        optimizer: OptimizerFactory,
        rate: Rate,
        *,
        task: Task | None = None,
        inputs: Gradients | None = None,
        outputs: Gradients | None = None,
        copy_input: bool = False,
        copy_output: bool = False,
        numerics: Numerics | None = None,
        compile: bool = False,
        cuda_graphs: bool = False,
        selective: bool = False,
        batch_statistics: bool = False,
        skip_not_finite: bool = False,
        ema: float | None = None,
        clip_grad_norm: float | None = None,
        names: Mapping[str, str] | None = None,
        shared: Mapping[str, Tie] | None = None,
        elsewhere: Collection[str] = (),
    ) -> None:
        self.index = index
        self._names = names or {}
        self._shared = shared or {}
        self._elsewhere = elsewhere
        self._numerics = numerics or Numerics()
        self._numerics.arrange_weights(module)
        self.module = module
        self._layers = compiled(module) if compile else module
        self._device = next((p.device.type for p in module.parameters()), "cpu")
        self.weights = Weights(module, optimizer, rate, ema, self._names)
        self._captures = cuda_graphs
        self._graphs: Graphs | None = None
        self._example: tuple[tuple[Tensor, ...], Target | None] | None = None  # of a rehearsal
        self._trained = Counter()
        self._reruns: bool | None = None  # whether a backward runs forwards that change buffers
        self._evaluated = Counter()
        self._watch = FiniteWatch(index)
        self._clip = clip_grad_norm
        self._norms: list[Tensor] = []  # by which the updates of the window were clipped
        self._reduced: list[int] = []  # the microbatches of the gradient that is to be stepped
        self._selective = selective
        self._statistics = BatchStatistics(module) if batch_statistics else None
        self._proves = True  # whether the next recomputation is held against its forward
        self._skips = skip_not_finite
        self._skip = False
        self._unless: Tensor | None = None  # on a GPU: 1 where the gradient is not finite
        self.skipped = 0  # number of updates skipped because of a non-finite gradient
        self._task = task
        self._inputs = inputs
        self._outputs = outputs
        self._copy_input = copy_input
        self._copy_output = copy_output
        self._saved: dict[int, _Saved] = {}
        self._before: dict[int, Buffers] = {}  # before each forward, where updates may be skipped
        self._batch: list[int] = []  # the microbatches in the gradient so far
        self._batch_counted: list[tuple[float, _Counted]] = []  # with their shares of the batch's loss
        self._losses: list[Tensor] = []  # the losses of the updates since `take_losses`
        self._front = self._name(smallest_of_first_layer(module))

    @property
    def in_flight(self) -> int:
        """The number of microbatches between their forward and the end of their backward."""
        return len(self._saved)

    def open_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that open microbatches hold themselves, beside what autograd saves."""
        for saved in self._saved.values():
            yield from (*saved.inputs, *saved.outputs, *saved.grads)
            if saved.target is not None:
                yield from as_tuple(saved.target.value)
            if saved.again is not None:
                yield from (*(copy for _, copy in saved.again.buffers), *saved.again.kept)
            if saved.deferred is not None:
                yield from saved.deferred.held

    def forward(
        self,
        mb: int,
        x: tuple[Tensor, ...],
        version: int,
        target: Target | None = None,
        saving: Saving = WHOLE,
    ) -> tuple[Tensor, ...]:
        """Run microbatch `mb` with a weight version, and save what its backward needs.

        Returns the detached outputs; nothing at the last stage, which computes the loss of the target
        instead. Raises TrainingStopped if outputs or loss are not finite.
        """
        x = tuple(self._numerics.arrange(t.detach()) for t in x)
        if self._graphs is not None and (target is None or target.weight):
            value = None if target is None else target.value
            replayed = self._graphs.forward(self.weights.storage(version), x, value)
            if replayed is not None:
                return self._replayed(mb, version, replayed, target)
        if self._watch.ignores and self._captures:
            self._example = x, target
        requires = requires_grad(self._inputs, x) if self.index else [False] * len(x)
        x = tuple(t.requires_grad_(require) for t, require in zip(x, requires, strict=True))
        if self._skips:
            self._before[mb] = self.weights.buffers()
        saved = self._saved[mb] = _Saved(x, version, saving, target)
        if saving.recomputed:
            saved.again = Again(self.weights.buffers(), self._selective)
        noting = self._statistics.noting(mb) if self._statistics else nullcontext()
        with self.weights.installed(version), noting:
            outputs = self._recorded(saved) if saved.again is None else self._first(saved, saved.again)
        forward = partial(self._forward_origin, x, version, target)
        if self._task is not None:
            assert target is not None, (
                f"stage {self.index} is the last and needs the target of microbatch {mb}"
            )
            if target.share and not target.weight and not (self._skips or self._watch.ignores):
                raise TrainingStopped(
                    f"in the batch of microbatch {mb}, update {self.weights.updates}, none of the targets "
                    f"counts: leave it out of the data, or set on_nan=skip, which leaves out the update"
                )
            loss = self._loss_of(target, outputs)
            origin = partial(self._loss_origin, loss, forward)
            self._check(f"the loss of microbatch {mb} is {{0}}", (loss,), origin)
            saved.counted = self._counted(loss, outputs, target)
            outputs, saved.share = (loss,), target.share
        else:
            made = tuple(t for t in outputs if t.requires_grad)  # not, for example, a mask of -inf
            self._check(f"the activation of microbatch {mb} is not finite", made, forward)
            planned = requires_grad(self._outputs, outputs)
            for number, (t, require) in enumerate(zip(outputs, planned, strict=True)):
                if t.requires_grad and not require:
                    raise TrainingStopped(
                        f"output {number} of stage {self.index} depends on weights in microbatch {mb}, and "
                        f"{_CHANGES}"
                    )
        if saved.again is None:
            saved.outputs = outputs
        else:
            saved.again.end(outputs if self._proves else ())
            self._proves = False
        return () if self._task is not None else self._handed_on(outputs)

    def _replayed(self, mb: int, version: int, replayed: Pass, target: Target | None) -> tuple[Tensor, ...]:
        """Open a microbatch whose forward was a CUDA graph."""
        saved = self._saved[mb] = _Saved((), version, WHOLE, replayed=replayed)
        counted = replayed.counted
        if target is not None and counted is not None:
            saved.share = target.share
            saved.counted = counted[0], target.weight, target.samples, counted[3]
        return replayed.made.outputs

    def capture(self, slots: int, versions: int) -> None:
        """Capture the passes of microbatches like those of the rehearsal, as CUDA graphs: see graphs.py.

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

    def _recording_forward(self, like: Target | None, x: tuple[Tensor, ...], value: Value | None) -> Recorded:
        target = None if like is None or value is None else replace(like, value=value)
        outputs = self.forward(_RECORDED, x, 0, target)
        saved = self._saved[_RECORDED]
        needs = needs_grad(self._outputs, saved.outputs)
        needed = [t for t, need in zip(saved.outputs, needs, strict=True) if need]
        return Recorded(outputs, needed, saved.counted, saved)

    def _recording_backward(self, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        back = self.backward(_RECORDED, grads, 0)
        self._batch, self._batch_counted = [], []
        return back

    def recompute(self, mb: int, version: int) -> None:
        """Run a forward again, with the weights, buffers and random numbers of the first time.

        Neither metrics nor the statistics of a BatchNorm count it. Raises TrainingStopped if it made other
        outputs, for the first microbatch of a window.
        """
        saved = self._saved[mb]
        again, saved.again = saved.again, None
        assert again is not None and saved.version == version
        with self.weights.installed(version, again=again.buffers), again.second():
            outputs = self._recorded(saved)
            if saved.target is not None:
                outputs = (self._loss_of(saved.target, outputs),)
        if not again.equals(outputs):
            raise TrainingStopped(
                f"stage {self.index} made other outputs when it ran the forward of microbatch {mb} again: "
                f"its layers must depend on inputs, weights, buffers and the random numbers of torch, NumPy "
                f"or Python alone; choose recompute=never"
            )
        saved.outputs = outputs

    def _first(self, saved: _Saved, again: Again) -> tuple[Tensor, ...]:
        with again.first():
            return self._call(saved.inputs)

    def _recorded(self, saved: _Saved) -> tuple[Tensor, ...]:
        """Run the layers; where the backward is split, with what puts the gradients of weights off."""
        if not saved.saving.split or not any(t.requires_grad for t in saved.inputs):
            return self._call(saved.inputs)
        saved.deferred = Deferred(self.weights.leaves(saved.version))
        with saved.deferred.recording():
            return self._call(saved.inputs)

    def backward(self, mb: int, grads: tuple[Tensor, ...], version: int) -> tuple[Tensor, ...]:
        """Run the whole backward of a microbatch and add to its version's gradients.

        `grads`: one gradient per output that needs one (none at the last stage); returns one per input that
        needs one (none at the first). Raises TrainingStopped if they are not finite.
        """
        saved = self._take(mb, version)
        if saved.replayed is not None:
            assert self._graphs is not None
            return self._graphs.backward(saved.replayed, grads, saved.share if self._task else None)
        self.weights.accumulate_on(version)
        self._differentiate(saved, grads, torch.autograd.backward)
        back = self._input_gradients(mb, saved)
        self._check_gradient(mb, saved, grads, back or self._front_gradient(version))
        return back

    def backward_input(self, mb: int, grads: tuple[Tensor, ...], version: int) -> tuple[Tensor, ...]:
        """Run the first half of a backward: the gradients of the inputs, for which the stage before waits.

        Without any, as on the first stage, the second half is all of it.
        """
        saved = self._saved[mb]
        assert saved.saving.split and saved.version == version
        if saved.deferred is None:
            saved.grads = grads
            return ()
        self._differentiate(saved, grads, partial(saved.deferred.input_half, self.weights.leaves(version)))
        back = self._input_gradients(mb, saved)
        self._check_gradient(mb, saved, grads, back)
        saved.inputs, saved.outputs, saved.target = (), (), None
        return back

    def backward_weight(self, mb: int, version: int) -> None:
        """Run the second half: the gradients of the weights."""
        deferred = self._saved[mb].deferred
        if deferred is None:
            self.backward(mb, self._saved[mb].grads, version)
            return
        self._take(mb, version)
        self.weights.accumulate_on(version)
        deferred.weight_half()

    def reduce(self) -> None:
        """Give the batch's gradient to the optimizer. Raises TrainingStopped if it is not finite."""
        self.weights.reduce()
        gradients, mbs, self._batch = self.weights.gradients(), self._batch, []
        counted, self._batch_counted = self._batch_counted, []
        losses = _weighted(counted) if self._task is not None else None
        self._reduced = mbs
        self._look_at(losses, gradients, mbs)
        if losses is not None:
            self._losses.append(losses.sum() if len(losses) > 1 else losses[0])
            numbers = losses.tolist() if self._skips else [0.0] * len(mbs)
            for (_, one), number in zip(counted, numbers, strict=True):
                if math.isfinite(number):
                    self._trained.add(*one)
            self._trained.add_up()

    def _look_at(self, losses: Tensor | None, gradients: Mapping[str, Tensor], mbs: list[int]) -> None:
        """See whether losses [n] and gradients are finite; on a GPU, when that has come to the host."""
        numbers, update = [numbers_of(gradient) for gradient in gradients.values()], self.weights.updates
        if numbers and numbers[0].is_cuda:
            found = not_finite(numbers)
            if self._skips:
                self._skip = not self._watch.ignores and found.item() != 0.0
                return
            self._unless = found
            both = [*([] if losses is None else [losses]), found.atanh().reshape(1)]  # of 1, infinite
            lossy = [] if losses is None else mbs
            self._watch.add(partial(blame_batch, lossy, mbs), update, torch.cat(both))
            return
        norms = witness(numbers) if numbers else None
        if self._skips:
            self._skip = norms is not None and not (self._watch.ignores or _all_finite_on_host(norms))
            return
        if losses is not None:
            self._watch.add(partial(blame_batch, mbs, mbs), update, losses)
        if norms is not None:
            self._watch.add(partial(blame_weights, list(gradients), mbs), update, norms)

    @property
    def ties(self) -> list[Tie]:
        """The groups of stages with which this one shares weights."""
        return sorted(set(self._shared.values()))

    def _names_of(self, tie: Tie) -> list[str]:
        return sorted(name for name, stages in self._shared.items() if stages == tie)

    def tied(self, tie: Tie) -> Tensor:
        """Return the batch's gradient of the weights of a tie, to be added to that of its other stages."""
        return packed(self.weights.live, self._names_of(tie), self._skip)

    def add_tied(self, tie: Tie, sums: Tensor) -> None:
        """Take the sums of what `tied` returned on all stages of a tie."""
        unpack(self.weights.live, self._names_of(tie), sums)
        self._skip = self._skip or (self._skips and not _all_finite_on_host(sums))

    def squared_norm(self) -> Tensor:
        """Return the squared norm of the batch's gradient, as far as it is this stage's, in float64.

        A weight that several stages share counts at the first of them.
        """
        return self._gradient_norm().double() ** 2

    def _gradient_norm(self) -> Tensor:
        elsewhere = [name for name, stages in self._shared.items() if stages[0] != self.index]
        return self.weights.gradient_norm(elsewhere)

    def step(self, keep: bool, norm: Tensor | None = None) -> None:
        """Update the weights; `keep` the previous version for later actions.

        The gradient is clipped by `norm`, that of the whole model, or None for that of this stage.
        """
        if self._clip is not None:
            by = self._gradient_norm() if norm is None else norm
            self._norms.append(by)
            self._skip = self._skip or (self._skips and not _all_finite_on_host(by))
            if not self._skip:
                self.weights.clip(self._clip, by)
        if self._skips:
            self._forget_buffers(self._reduced)
        self.weights.step(keep, self._skip, self._unless)
        if self._statistics:
            self._statistics.commit(self._reduced, self._skip, self._skips)
            for before in self._before.values():
                self._statistics.follow(before)
        self.skipped += self._skip
        self._skip = False

    def _forget_buffers(self, mbs: list[int]) -> None:
        """Restore the buffers from before a batch that is skipped or spoilt them, also for later forwards."""
        first = self._before[mbs[0]]
        if self._skip or self.weights.spoilt(first):
            self.weights.restore(first)
            self._before = {mb: self.weights.buffers() for mb in self._before}
        for mb in mbs:
            del self._before[mb]

    def take_trained(self) -> Tally:
        """Return and reset the tally of training. Raises TrainingStopped for a bad loss."""
        self._watch.check(self.weights.updates, wait=True)
        return self._trained.take()

    def take_evaluated(self) -> Tally:
        """Return and reset the tally of evaluation."""
        return self._evaluated.take()

    def take_tallies(self) -> tuple[Tally, Tally]:
        return self.take_trained(), self.take_evaluated()

    def take_losses(self) -> list[float]:
        """Return the mean loss of each update since the last call; empty except at the last stage."""
        losses, self._losses = self._losses, []
        return torch.stack(losses).tolist() if losses else []

    def take_norms(self) -> list[float]:
        """Return the norm by which each update of the window was clipped; empty without clipping."""
        norms, self._norms = self._norms, []
        return [float(norm) for norm in norms]

    def state(self) -> dict[str, Tensor]:
        """Return copies, in host memory, of the state between two windows.

        Keys use the layer names of the whole model: `model/NAME` for parameters and buffers (complex ones as
        pairs of real numbers), `optimizer/NAME/NUMBER` for the optimizer's state, `ema/NAME` for the moving
        average of the weights. What several stages share is in the state of the first of them.
        """
        self._watch.check(self.weights.updates, wait=True)
        model = itertools.chain(self.module.named_parameters(), self.module.named_buffers())
        tensors = {f"model/{self._name(name)}": numbers_of(tensor.detach()) for name, tensor in model}
        tensors |= {f"optimizer/{path}": tensor for path, tensor in self.weights.optimizer_state().items()}
        tensors |= {f"ema/{name}": numbers_of(tensor) for name, tensor in self.weights.average().items()}
        return {
            path: _host_copy(tensor.detach())
            for path, tensor in tensors.items()
            if _weight_of(path) not in self._elsewhere
        }

    @torch.no_grad()
    def load_state(self, tensors: StateReader, updates: int) -> None:
        """Restore from `state`, of this stage or of other stages that held these layers."""
        for name, tensor in itertools.chain(self.module.named_parameters(), self.module.named_buffers()):
            numbers_of(tensor.data).copy_(tensors[f"model/{self._name(name)}"])
        mine = self.weights.live.keys()
        paths = [path for path in tensors.names("optimizer/") if path.rpartition("/")[0] in mine]
        self.weights.load_optimizer_state({path: tensors[f"optimizer/{path}"] for path in paths}, updates)
        averaged = mine & set(tensors.names("ema/"))
        self.weights.load_average({name: tensors[f"ema/{name}"] for name in averaged})

    def _name(self, own: str) -> str:
        """Return the name in the model of a parameter or buffer."""
        return self._names.get(own, own)

    def restore_tally(self, trained: Tally) -> None:
        self._trained.restore(trained, self._device)

    @property
    def trained_so_far(self) -> Tally:
        """The training tally since the last `take_tallies`."""
        return self._trained.peek()

    @contextmanager
    def rehearsing(self, training: bool) -> Iterator[None]:
        """Put back, at the end, what windows change: tallies, and in training weights, buffers and optimizer.

        Attributes of layers are left to the caller.
        """
        self._watch.check(self.weights.updates, wait=True)
        names = ("_trained", "_evaluated", "_losses", "_norms", "skipped")
        before = {name: getattr(self, name) for name in names}
        self._trained, self._evaluated, self._losses = Counter(), Counter(), []
        self._watch.ignores = True
        try:
            with self.weights.rehearsing() if training else nullcontext():
                yield
            self._watch.check(self.weights.updates, wait=True)
        finally:
            self._watch.ignores = False
            for name, value in before.items():
                setattr(self, name, value)

    def begin_window(self) -> None:
        """Start counting versions from 0. No microbatch may be open."""
        assert not self._saved, f"microbatches {sorted(self._saved)} outlived their window"
        self._watch.check(self.weights.updates)
        self._norms = []
        # On a GPU, where the host would wait for the outcome, the rehearsal does.
        self._proves = self._device == "cpu" or self._watch.ignores
        self.weights.begin_window()

    @torch.no_grad()
    def predict(self, x: tuple[Tensor, ...], target: Target | None = None) -> tuple[Tensor, ...]:
        """Evaluate with the newest weights, or their moving average, and the running statistics.

        The last stage updates its tally. Raises TrainingStopped if a number of the training was not finite.
        """
        self._watch.check(self.weights.updates, wait=True)
        with evaluating(self.module), self.weights.averaged():
            outputs = self._call(tuple(self._numerics.arrange(t) for t in x))
        if self._task is None:
            return self._handed_on(outputs)
        assert target is not None, f"stage {self.index} is the last and needs the targets"
        if target.take is not None:
            target.take(leaves_of(self._made(outputs)))
            return ()
        loss = self._task.evaluation_loss(self._made(outputs), target.value)
        self._evaluated.add(*self._counted(loss, outputs, target))
        return ()

    @torch.no_grad()
    def _counted(self, loss: Tensor, outputs: tuple[Tensor, ...], target: Target) -> _Counted:
        assert self._task is not None
        made = self._made(tuple(t.detach() for t in outputs))
        sums = {metric.name: metric.sums(made, target.value) for metric in self._task.metrics}
        return loss.detach(), target.weight, target.samples, sums

    def _call(self, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self._copy_input:
            x = tuple(t.clone() for t in x)
        with self._numerics.context(self._device):
            outputs = as_tuple(self._layers(*x))
        if self._task is not None:
            return outputs
        data = {number for number, value in enumerate(self.module.slice.leaves) if value.layer == INPUT}
        return tuple(t if number in data else self._numerics.narrow(t) for number, t in enumerate(outputs))

    def _handed_on(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the outputs to send, copied where the layers may keep or change them."""
        requires = requires_grad(self._outputs, outputs)
        return tuple(
            t.detach() if require and not self._copy_output else t.detach().clone()
            for t, require in zip(outputs, requires, strict=True)
        )

    def _check(self, template: str, tensors: tuple[Tensor, ...], origin: Callable[[], str]) -> None:
        """Stop the training if tensors in host memory are not finite; `origin` then finds the layer.

        On a GPU each check would be kernels, and the numbers would come when the weights have changed.
        """
        floating = [numbers_of(t.detach()) for t in tensors if differentiable(t)]
        if self._skips or not floating or floating[0].is_cuda:
            return
        if not all(map(in_host_memory_finite, floating)):
            numbers = torch.stack([t.sum() for t in floating])
            self._watch.add(partial(blame, template, origin), self.weights.updates, numbers)

    def _check_gradient(
        self, mb: int, saved: _Saved, grads: tuple[Tensor, ...], made: tuple[Tensor, ...]
    ) -> None:
        origin = partial(self._backward_origin, saved, grads)
        self._check(f"the gradient of microbatch {mb} is not finite", made, origin)

    def _front_gradient(self, version: int) -> tuple[Tensor, ...]:
        """Return a small gradient to check where none leaves the stage: non-finite values propagate to it."""
        grad = self._front and self.weights.leaf(version, self._front).grad
        return () if not isinstance(grad, Tensor) else (grad,)

    def _forward_origin(self, x: tuple[Tensor, ...], version: int, target: Target | None) -> str:
        for value, tensor in zip(self.module.slice.enters, x, strict=True):
            if not all_finite([tensor]):
                earlier = f"what came from layer {value.layer}, in an earlier stage"
                return DATA if value.layer == INPUT else earlier
        with (
            self.weights.installed(version, again=self.weights.buffers()),
            self._numerics.context(self._device),
        ):
            found = forward_origin(self.module, x)
        if found or target is None or all_finite(as_tuple(target.value)):
            return found
        return f"the targets, {DATA}"

    def _loss_origin(self, loss: Tensor, forward: Callable[[], str]) -> str:
        """Say where a loss that is not finite began; `forward` looks for it in the layers."""
        assert self._task is not None
        where = forward()
        if not where and self._task.counts_samples and bool(loss.isnan()):
            return "the loss itself, which needs weight= where targets may not count"
        return where

    def _backward_origin(self, saved: _Saved, grads: tuple[Tensor, ...]) -> str:
        needs = needs_grad(self._outputs, saved.outputs)
        if self._task is None:
            left = [value for value, need in zip(self.module.slice.leaves, needs, strict=True) if need]
            for value, grad in zip(left, grads, strict=True):
                if not all_finite([grad]):
                    return f"what came back to layer {value.layer} from a later stage"
        loss = None if self._task is None else partial(self._loss_of, saved.target)
        with (
            self.weights.installed(saved.version, again=self.weights.buffers()),
            self._numerics.context(self._device),
        ):
            return backward_origin(self.module, saved.inputs, grads, needs, loss)

    def _loss_of(self, target: Target | None, outputs: tuple[Tensor, ...]) -> Tensor:
        """Return the mean loss of a microbatch; without targets that count it has no mean, and is 0."""
        assert self._task is not None and target is not None
        if not target.weight and target.share == 0:
            # A loss among the outputs may be a mean over nothing.
            numbers = (t if t.dim() else t.nan_to_num() for t in outputs if differentiable(t))
            return torch.stack([(t * 0).sum() for t in numbers]).sum()
        return self._task.loss(self._made(outputs), target.value)

    def _made(self, outputs: tuple[Tensor, ...]) -> Any:
        """Return the outputs as the model returns them, for the task."""
        if self._numerics.autocast:
            outputs = as_tuple(cast_floats(outputs, torch.float32))
        return self.module.pack(outputs)

    def _take(self, mb: int, version: int) -> _Saved:
        saved = self._saved.pop(mb)
        self._batch.append(mb)
        if saved.counted is not None:
            self._batch_counted.append((saved.share, saved.counted))
        assert saved.version == version, f"microbatch {mb} ran forward over {saved.version}, not {version}"
        return saved

    def _differentiate(
        self, saved: _Saved, grads: tuple[Tensor, ...], run: Callable[[list[Tensor], list[Tensor]], None]
    ) -> None:
        if self._task is not None:
            grads = grads or (torch.full_like(saved.outputs[0], saved.share),)
        needs = needs_grad(self._outputs, saved.outputs)
        outputs = [t for t, need in zip(saved.outputs, needs, strict=True) if need]
        pairs = [(t, grad) for t, grad in zip(outputs, grads, strict=True) if t.requires_grad]
        if pairs:
            copies = [] if self._reruns is False else self.weights.buffers()
            before = self.weights.changes()
            with self.weights.installed(saved.version, again=copies):
                run([t for t, _ in pairs], [grad for _, grad in pairs])
            if self._reruns is None:
                self._reruns = self.weights.changed(copies)
            elif not self._reruns and self.weights.changes() != before:
                raise TrainingStopped(
                    f"a backward of stage {self.index} changed buffers, and its first one did not: a layer "
                    f"that runs its forward again in the backward must do so from the start"
                )

    def _input_gradients(self, mb: int, saved: _Saved) -> tuple[Tensor, ...]:
        """Return the gradients that the stage before needs. Raises TrainingStopped for any others."""
        if not self.index:
            return ()
        needs = needs_grad(self._inputs, saved.inputs)
        for number, (t, need) in enumerate(zip(saved.inputs, needs, strict=True)):
            if need != (t.grad is not None):
                found = "no" if need else "a"
                raise TrainingStopped(
                    f"{found} gradient reaches input {number} of stage {self.index} in microbatch {mb}, and "
                    f"{_CHANGES}"
                )
        return tuple(t.grad for t in saved.inputs if t.grad is not None)
