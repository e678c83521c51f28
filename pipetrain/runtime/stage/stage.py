"""One stage: a slice of the model, its weights, and the tensors saved for the backward of open microbatches.

A stage has no ranks or messages. The program bounds its memory: the peak of `in_flight` is the number of
activations that `simulate` predicts. Observers check numbers, make statistics of batches, or skip updates.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from pipetrain.config.rate import LearningRate
from pipetrain.errors import TrainingStopped
from pipetrain.model import random_numbers as draws
from pipetrain.model.network import INPUT, Part, Tensors, evaluating
from pipetrain.model.specs import Value, as_tuple, leaves_of, needs_grad, requires_grad
from pipetrain.runtime.microbatch_feed import Target
from pipetrain.runtime.stage.attribute_state import attributes_of
from pipetrain.runtime.stage.buffers import Buffers
from pipetrain.runtime.stage.microbatch import WHOLE, Batch, Microbatch, Saving
from pipetrain.runtime.stage.objective import Objective, weighted
from pipetrain.runtime.stage.observer import Observer, around
from pipetrain.runtime.stage.parameter_store import OptimizerFactory, ParameterStore
from pipetrain.runtime.stage.recompute import Recompute
from pipetrain.runtime.stage.split_backward import Deferred, differentiate
from pipetrain.runtime.stage.stage_options import StageOptions
from pipetrain.runtime.stage.weight_versions import Weights
from pipetrain.schedule.actions import Predicted, Read
from pipetrain.tasks import Task
from pipetrain.tasks.running_sums import Tally


class Stage:
    """Slice `index` of a model. The last stage has the task; the others return their outputs.

    `module.slice` defines what enters and leaves it. `names`: of parameters in the model, if they differ, as
    for a weight that an earlier layer has too. `elsewhere`: the names in the model of tensors in the state of
    an earlier stage. `model`: if the loss may read its weights, the model.
    """

    _store: type[ParameterStore] = ParameterStore

    def __init__(
        self,
        index: int,
        module: Part,
        optimizer: OptimizerFactory,
        rate: LearningRate,
        options: StageOptions,
        task: Task | None = None,
        names: Mapping[str, str] | None = None,
        elsewhere: Collection[str] = (),
        model: nn.Module | None = None,
    ) -> None:
        self.index, self.names, self.elsewhere = index, names or {}, elsewhere
        self.device, self.numerics = options.device, options.numerics
        self.numerics.arrange_weights(module)
        self.module = module
        self._layers: Callable[..., Value] = module
        if options.compile:
            draws.leave_to_python()
            # Specialised to the shapes that occur, unless there are many.
            self._layers = torch.compile(module, dynamic=options.lengths)
        self.store = self._store(module, optimizer, self.names, model)
        self.weights = Weights(self.store, rate, options.ema, options.correction)
        of_updates = self.store.optimizer, self.weights.rates.scheduler
        self.attributes = attributes_of(module, *of_updates, dict(self.tensors_by_name()))
        self.buffers = Buffers(module)
        self.objective = Objective(task, module.pack, self.numerics.autocast) if task is not None else None
        self.observers: list[Observer] = []
        self.rehearses = False  # whether numbers are made up, so that none is refused
        self._updates = True  # whether weights are updated; in some rehearsals not
        self._skipped = 0  # updates, since `take_skipped`
        self._clip, self._selective = options.clip_grad_norm, options.selective
        self._compares_recompute = True  # whether the next recompute is compared with its forward
        self._microbatches: dict[int, Microbatch] = {}  # in flight
        self._batch, self._reduced = Batch(), Batch()  # whose gradient is being made; to be stepped

    def add_observers(self, *observers: Observer) -> None:
        """Let these observe the stage, the first one first, before those that do already."""
        self.observers[:0] = observers

    def tensors_by_name(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters and buffers by their names in the model."""
        for name, tensor in chain(self.module.named_parameters(), self.module.named_buffers()):
            yield self.names.get(name, name), tensor

    @property
    def shapes_captured(self) -> int:
        """Of how many shapes of microbatches CUDA graphs are replayed."""
        return 0

    @property
    def capture_due(self) -> bool:
        """Whether there is one more to capture."""
        return False

    @property
    def in_flight(self) -> int:
        return len(self._microbatches)

    def open_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that microbatches hold themselves, besides what autograd saves."""
        return chain.from_iterable(microbatch.tensors() for microbatch in self._microbatches.values())

    # Forward

    def forward(
        self, mb: int, x: Tensors, read: Read, target: Target | None = None, saving: Saving = WHOLE
    ) -> Tensors:
        """Run microbatch `mb` with these weights, and save what its backward needs.

        Returns the detached outputs; nothing at the last stage, which computes the loss of the target
        instead. Raises TrainingStopped, as observers do.
        """
        requires = zip(x, requires_grad(self.module.slice.enters_grad, x), strict=True)
        x = tuple([self.numerics.arrange(t.detach()).requires_grad_(require) for t, require in requires])
        recompute = Recompute(self.buffers.copies(), self._selective) if saving.recomputed else None
        microbatch = Microbatch(mb, x, read, saving, target, recompute=recompute)
        self._microbatches[mb] = microbatch
        with self.store.installed(read):  # a loss may read weights too
            with around(self.observers, microbatch), recompute.forward() if recompute else nullcontext():
                result = self._run_layers(microbatch)
            outputs = result if self.objective is None else (self.objective.loss(result, target),)
        for observer in self.observers:
            observer.after_forward(microbatch, outputs, result)
        if self.objective is not None:
            microbatch.counted = self.objective.counted(outputs[0], result, target)
        if recompute is None:
            microbatch.outputs = outputs
        else:  # which makes the outputs again, and compares the first ones of a window
            recompute.end(outputs if self._compares_recompute else ())
            self._compares_recompute = False
        return self._outputs_to_send(mb, outputs) if self.objective is None else ()

    def recompute(self, mb: int, read: Read) -> None:
        """Run a forward again, with the weights, buffers and random numbers of the first time.

        It is not counted or observed. For the first microbatch of a window it raises TrainingStopped if the
        outputs differ.
        """
        microbatch = self._microbatches[mb]
        recompute, microbatch.recompute = microbatch.recompute, None
        assert recompute is not None and microbatch.read == read
        with self.store.installed(read), self.buffers.replaced(recompute.buffers), recompute.recomputing():
            outputs = self._run_layers(microbatch)
            if self.objective is not None:
                outputs = (self.objective.loss(outputs, microbatch.target),)
        if not recompute.equals(outputs):
            raise TrainingStopped(
                f"stage {self.index} made other outputs when it ran the forward of microbatch {mb} again: "
                f"its layers must depend on inputs, weights, buffers and the random numbers of torch, NumPy "
                f"or Python alone; choose recompute=never"
            )
        microbatch.outputs = outputs

    @torch.no_grad()
    def predict(self, x: Tensors, target: Target | None = None) -> Tensors:
        """Evaluate with the newest weights, or their moving average, and the running statistics.

        The last stage counts, or without targets returns the model's outputs.
        """
        with evaluating(self.module), self.store.averaged():
            outputs = self._call(tuple(self.numerics.arrange(t) for t in x))
            if self.objective is None:
                return self._outputs_to_send(0, outputs)
            if target is None:
                return leaves_of(self.objective.model_output(outputs))
            self.objective.evaluate(outputs, target)
            return ()

    def _run_layers(self, microbatch: Microbatch) -> Tensors:
        """Run the layers; if the backward is split, defer the gradients of weights."""
        inputs, splits = microbatch.inputs, microbatch.saving.split and microbatch.recompute is None
        if splits and any(t.requires_grad for t in inputs):
            microbatch.deferred = Deferred(self.store.leaves(microbatch.read))
            with microbatch.deferred:
                return self._call(inputs)
        return self._call(inputs)

    def _call(self, x: Tensors) -> Tensors:
        if self.module.slice.copies_input:
            x = tuple(t.clone() for t in x)
        if not self.numerics.autocast:
            return as_tuple(self._layers(*x))
        with self.numerics.context(self.device):
            outputs = as_tuple(self._layers(*x))
        if self.objective is not None:
            return outputs
        data = {number for number, value in enumerate(self.module.slice.leaves) if value.layer == INPUT}
        return tuple(t if number in data else self.numerics.narrow(t) for number, t in enumerate(outputs))

    def _outputs_to_send(self, mb: int, outputs: Tensors) -> Tensors:
        """Return the outputs to send, copied if the layers may keep or change them."""
        slice, sent = self.module.slice, []
        planned = requires_grad(slice.leaves_grad, outputs)
        for number, (t, require) in enumerate(zip(outputs, planned, strict=True)):
            if t.requires_grad and not require:
                raise self._unplanned_error(mb, f"output {number} depends on weights")
            sent.append(t.detach() if require and not slice.copies_output else t.detach().clone())
        return tuple(sent)

    def _unplanned_error(self, mb: int, fact: str) -> TrainingStopped:
        return TrainingStopped(
            f"{fact} in microbatch {mb} of stage {self.index}, and the plan, made for the first batch, says "
            f"otherwise: which of its inputs a layer uses, which outputs the loss uses, and which of them "
            f"depend on weights, must not change from one microbatch to another; let the loss add "
            f"0 * output.sum() of others, or keep the layer in one stage with those beside it, by partition="
        )

    # Backward

    def backward(self, mb: int, grads: Tensors, read: Read) -> Tensors:
        """Run the whole backward of a microbatch and add to the gradients of its weights.

        `grads`: one gradient per output that needs one (none at the last stage); returns one per input that
        needs one (none at the first). Raises TrainingStopped, as observers do.
        """
        microbatch = self._close(mb, read)
        self.weights.accumulate_on(read)
        with self._adding():
            return self._differentiate(microbatch, grads, differentiate)

    def backward_input(self, mb: int, grads: Tensors, read: Read) -> Tensors:
        """Run the first half of a backward: the gradients of the inputs, for which the previous stage waits.

        If there are none, as on the first stage, the second half is the whole backward.
        """
        microbatch = self._microbatches[mb]
        assert microbatch.saving.split and microbatch.read == read
        if microbatch.deferred is None:
            microbatch.grads = grads
            return ()
        run = partial(microbatch.deferred.input_half, self.store.leaves(read))
        back = self._differentiate(microbatch, grads, run)
        microbatch.inputs, microbatch.outputs, microbatch.target = (), (), None
        return back

    def backward_weight(self, mb: int, read: Read) -> None:
        deferred = self._microbatches[mb].deferred
        if deferred is None:
            self.backward(mb, self._microbatches[mb].grads, read)
            return
        self._close(mb, read)
        self.weights.accumulate_on(read)
        with self._adding():
            deferred.weight_half()

    def _adding(self) -> AbstractContextManager[None]:
        """Return a context that adds gradients; on a CPU a second copy costs more than many launches."""
        at_once = self.store.adds_at_once and self.device != "cpu"
        return self.store.adding_at_once() if at_once else nullcontext()

    def _close(self, mb: int, read: Read) -> Microbatch:
        microbatch = self._microbatches.pop(mb)
        assert microbatch.read == read, f"microbatch {mb} ran forward over {microbatch.read}, not {read}"
        self._batch.mbs.append(mb)
        if microbatch.counted is not None:
            self._batch.counted.append(microbatch.counted)
        return microbatch

    def _outputs_with_gradient(self, microbatch: Microbatch) -> list[Tensor]:
        """Return the outputs for which the next stage sends a gradient, as planned."""
        outputs = microbatch.outputs
        needs = needs_grad(self.module.slice.leaves_grad, outputs)
        return [t for t, need in zip(outputs, needs, strict=True) if need]

    def _differentiate(
        self, microbatch: Microbatch, grads: Tensors, run: Callable[[Any, Any], None]
    ) -> Tensors:
        """Run a backward; return the gradients that the previous stage needs."""
        if self.objective is not None and microbatch.counted is not None:
            grads = grads or (self.objective.gradient(microbatch.outputs[0], microbatch.counted.share),)
        outputs = self._outputs_with_gradient(microbatch)
        pairs = [(t, grad) for t, grad in zip(outputs, grads, strict=True) if t.requires_grad]
        if pairs:
            with self.store.installed(microbatch.read), self.buffers.in_backward():
                run(*map(list, zip(*pairs, strict=True)))
        needs = needs_grad(self.module.slice.enters_grad, microbatch.inputs)
        for number, (t, need) in enumerate(zip(microbatch.inputs, needs, strict=True)):
            if need != (t.grad is not None):
                count = "no" if need else "a"
                raise self._unplanned_error(microbatch.mb, f"{count} gradient reaches input {number}")
        back = tuple(t.grad for t in microbatch.inputs if t.grad is not None)
        for observer in self.observers:
            observer.after_backward(microbatch, back)
        return back

    # Update

    def reduce(self) -> None:
        """Pass the batch's gradient to the optimizer. Raises TrainingStopped, as observers do."""
        self.weights.reduce()
        batch, self._batch = self._batch, Batch()
        self._reduced = batch
        if self.objective is not None and batch.counted:
            batch.losses = weighted(batch.counted)
        for observer in self.observers:
            observer.after_reduce(batch)
        if self.objective is not None:
            self.objective.count(batch.losses, batch.counted)

    @property
    def skipped_update(self) -> Tensor | None:
        """Whether the update of the reduced batch is skipped, see Batch."""
        return self._reduced.skipped

    # What the observers of the reduced batch exchange with other stages and replicas, see Observer.

    def on_sums(self, numbers: Tensor) -> None:
        for observer in self.observers:
            observer.on_sums(self._reduced, numbers)

    def partial_sums(self, replica: int, replicas: int) -> list[Tensor]:
        sums = (observer.partial_sums(self._reduced, replica, replicas) for observer in self.observers)
        return [numbers for numbers in sums if numbers is not None]

    def on_reduced(self, numbers: Tensor) -> None:
        for observer in self.observers:
            observer.on_reduced(self._reduced, numbers)

    def gradient_norm(self) -> Tensor:
        """Return the norm of the batch's gradient; a shared weight counts at the first of its stages."""
        return self.store.gradient_norm(self.device, without=self.elsewhere)

    def step(
        self, keep: bool, norm: Tensor | None = None, delay: int = 0, predicted: Sequence[Predicted] = ()
    ) -> None:
        """Update the weights; `keep` the previous version for later actions, and make the `predicted` ones.

        The gradient, `delay` updates late, is clipped by `norm`, of the whole model; None: that of this
        stage.
        """
        if self._clip is not None:
            clip_norm = self.gradient_norm() if norm is None else norm
            self.on_sums(clip_norm)
            self.store.clip(self._clip, clip_norm)
        batch, self._reduced = self._reduced, Batch()
        for observer in self.observers:
            observer.before_step(batch)
        self.weights.step(keep, batch.skipped, delay, predicted, self._updates)

    def count_skipped(self) -> None:
        self._skipped += 1

    def take_skipped(self) -> int:
        """Return how many updates were skipped since the last call, as far as the host knows."""
        skipped, self._skipped = self._skipped, 0
        return skipped

    # Between windows

    def check(self, wait: bool = True) -> None:
        """Raise an error of observers that is known by now or, with `wait`, after all work of the device."""
        for observer in self.observers:
            observer.check(wait)

    def begin_window(self, predicted: Sequence[Predicted] = ()) -> None:
        """Start counting versions from 0, and make the `predicted` ones. No microbatch may be open."""
        assert not self._microbatches, f"microbatches {sorted(self._microbatches)} outlived their window"
        self.check(wait=False)
        # On a GPU the host would wait for the result: there the rehearsal compares.
        self._compares_recompute = self.device == "cpu" or self.rehearses
        self.weights.begin_window(predicted)

    def changing(self, training: bool) -> tuple[list[Tensor], list[Tensor], list[Any]]:
        """Return what windows change: by updates, in buffers, in containers, but not layers' attributes."""
        self.check()
        containers = [vars(owner) for owner in (self, self.objective) if owner is not None]
        if not training:
            return [], [], containers
        tensors, containers_of_weights = self.weights.changing()
        return tensors, [*self.module.buffers()], [*containers, *containers_of_weights]

    def begin_rehearsal(self, updates: bool) -> None:
        """Count made-up numbers separately, until the result of `changing` is restored."""
        self.rehearses, self._updates, self._batch = True, updates, Batch()
        if self.objective is not None:
            self.objective.start_counting()

    @property
    def counts(self) -> Objective:
        assert self.objective is not None, f"stage {self.index} is not the last"
        return self.objective

    def peek_trained(self) -> Tally:
        """Return the tally of training. Raises TrainingStopped for a bad loss."""
        self.check()
        return self.counts.trained.peek()

    def take_trained(self) -> Tally:
        """Return and reset the tally of training. Raises TrainingStopped for a bad loss."""
        self.check()
        return self.counts.trained.take()

    def take_evaluated(self) -> Tally:
        return self.counts.evaluated.take()
