"""The interpreter: the loop over one rank's actions.

Each operation is one method, looked up in a table. The order of the actions and their weight versions come
from the program, so there is no synchronous or asynchronous mode here, and a new schedule needs no change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain

import torch
from torch.profiler import record_function

from pipetrain.errors import ActionFailed, ChannelError, ConfigError, TrainingStopped
from pipetrain.model.network import Tensors
from pipetrain.model.random_numbers import EVALUATION, Seeds, drawing
from pipetrain.runtime.clock import Clock, Stopwatch, Times
from pipetrain.runtime.gradient_reductions import WAITING, Sums
from pipetrain.runtime.mailbox import Mailbox
from pipetrain.runtime.microbatch_feed import Feed
from pipetrain.runtime.rank_actions import Order
from pipetrain.runtime.rehearsal import Rehearsal
from pipetrain.runtime.stage.memory_meter import Meter
from pipetrain.runtime.stage.stage import Stage
from pipetrain.schedule.actions import COMPUTE, RECEIVES, SENDS, Action, Op
from pipetrain.schedule.timeline import Bounds, Row, StageStats


@dataclass(slots=True)
class _Window:
    """One window. `first_update`: or EVALUATION; `outputs`: of a prediction, which has no targets."""

    order: Order
    feed: Feed
    first_update: int
    mail: Mailbox
    sums: Sums
    outputs: list[Tensors] | None = None

    @property
    def trains(self) -> bool:
        return self.first_update != EVALUATION

    def overlapping(self, backward: Action) -> AbstractContextManager[None]:
        """Return the context of a backward, in which the last one of a batch starts the gradient's sums."""
        return self.sums.overlapping(backward) if self.order.ends_batch(backward) else nullcontext()


class Engine:
    """Runs programs over the stages of one rank.

    `training` and `evaluation`: how stages exchange tensors. `bounds`: of a stage in all windows so
    far, asserted while a program runs. `seed`: of random numbers such as dropout's.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        training: Mailbox,
        evaluation: Mailbox,
        bounds: Callable[[int], Bounds],
        clock: Clock,
        seed: int = 0,
        rehearsal: Rehearsal | None = None,
    ) -> None:
        self.stages = stages
        self._training, self.coding = training, training.coding
        self.deadline = training.channel.deadline
        self._evaluation = evaluation
        self._bounds = bounds
        self._limits = {stage: bounds(stage) for stage in stages}
        self._clock = clock
        self.seed = seed
        self._rehearsal = rehearsal
        self._times = Times(stages, clock)
        self._methods: dict[Op, Callable[[Action, _Window], None]] = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.I: self._backward,
            Op.W: self._backward_weight,
            Op.R: self._recompute,
            **dict.fromkeys(SENDS, lambda action, window: window.mail.send(action)),
            **dict.fromkeys(RECEIVES, lambda action, window: window.mail.recv(action)),
            Op.REDUCE: lambda action, window: window.sums.reduce(action),
            Op.TIE: lambda action, window: window.sums.reduce_tied(action),
            Op.NORM: lambda action, window: window.sums.reduce_norm(action),
            Op.STEP: self._step,
        }

    def draw_by(self, seed: int) -> None:
        """Go on with the random numbers of another seed, that of a checkpoint."""
        self.seed = seed

    def train(
        self,
        order: Order,
        feed: Feed,
        progress: Sequence[Callable[[], None]] = (),
        meter: Meter | None = None,
        timed: bool = False,
    ) -> Row | None:
        """Run this rank's actions of one window, and drain.

        `progress`: called at each update of the rank's first stage, or evaluated microbatch. `meter` measures
        what the stages hold. With `timed` the host waits for the device, and the measured spans are returned.
        Raises ChannelError and TrainingStopped.
        """
        self._limits = {stage: self._bounds(stage) for stage in self.stages}
        self._rehearse(order, feed, training=True)
        mail, first = self._training, next(iter(self.stages.values())).weights.updates
        window = _Window(order, feed, first, mail, Sums(self.stages, mail))
        row = self._run(window, progress, meter)
        with self.deadline.waiting():
            return self._times.add(row, order.microbatches, mail.raw_bytes, timed)

    def evaluate(
        self,
        order: Order,
        feed: Feed,
        progress: Sequence[Callable[[], None]] = (),
        outputs: list[Tensors] | None = None,
    ) -> None:
        """Run forwards with the newest weights; the last stage counts them.

        Of a prediction, which has no targets, `outputs` gets them instead, in host memory. Raises
        TrainingStopped if a number of the training was not finite.
        """
        self.synchronize()
        self._rehearse(order, feed, training=False)
        mail = self._evaluation
        self._run(_Window(order, feed, EVALUATION, mail, Sums(self.stages, mail), outputs), progress)
        self.synchronize()

    def synchronize(self) -> None:
        """Wait until the device has done all. Raises ChannelError for a message that never came."""
        self.deadline.settle()
        for stage in self.stages.values():
            stage.check()
        self._times.read(wait=True)
        self._clock.synchronize()

    @property
    def stats(self) -> dict[int, StageStats]:
        """The statistics of each stage's training since `reset_stats`. On a GPU this waits for the device."""
        self.synchronize()
        return self._times.stats

    def reset_stats(self, stats: Mapping[int, StageStats] | None = None) -> None:
        """Begin the statistics anew, or go on from these."""
        self.synchronize()
        self._times.reset(stats or {})

    # The loop

    def _rehearse(self, order: Order, feed: Feed, training: bool) -> None:
        def run_window(example: Feed, mail: Mailbox) -> bool:
            predicts = not training and example.peek()[1] is None
            outputs = list[Tensors]() if predicts else None
            first, sums = 0 if training else EVALUATION, Sums(self.stages, mail)
            window = _Window(order.short(), example, first, mail, sums, outputs)
            self._run(window)
            return bool(window.sums.norms)

        if self._rehearsal:
            total = order.batches * order.microbatches
            self._rehearsal.before(self.stages.values(), run_window, feed, total, training)

    def _run(
        self, window: _Window, progress: Sequence[Callable[[], None]] = (), meter: Meter | None = None
    ) -> Row:
        order, mail, sums, methods = window.order, window.mail, window.sums, self._methods
        counted, first = Op.STEP if window.trains else Op.F, min(self.stages)
        for stage in self.stages.values() if window.trains else ():
            stage.begin_window(order.predicted(stage.index, 0))
        stopwatch = Stopwatch(self._clock, mail.channel, lambda: mail.coding.seconds)
        action: Action | None = None

        def before_wait() -> None:
            window.feed.prefetch()
            stopwatch.start(None)

        try:
            order.begin(mail, window.feed)
            for action in order.actions(mail, before_wait):
                op = action.op
                if op in RECEIVES:
                    window.feed.prefetch()  # while the message is on its way
                elif op in WAITING:
                    sums.wait(action, before_wait)
                stopwatch.start(action)
                if meter or torch.autograd.profiler._is_profiler_enabled:
                    with record_function(str(action)), meter.during(action) if meter else nullcontext():
                        methods[op](action, window)
                else:  # naming an action takes 10 us
                    methods[op](action, window)
                stopwatch.stop()
                if meter:
                    meter.after(chain(mail.tensors(), sums.tensors()))
                if op is counted and action.stage == first:  # once a batch, or an evaluated microbatch
                    for count in progress:
                        count()
        except (TrainingStopped, ConfigError, AssertionError):  # a length that a layer cannot take
            raise
        except ChannelError as error:
            last = order.waiting or action
            position = f"stage {last.stage} was at {last}" if last else "nothing was done yet"
            raise ChannelError(f"{error}; {position}") from error
        except Exception as error:  # of a layer, or out of memory
            stage_number = action.stage if action else first
            place = f"rank {mail.rank}, stage {stage_number}, action {action}"
            if action and action.op in COMPUTE and (size := window.feed.size(action.mb)).lengths:
                place += f" of {size}"
            raise ActionFailed(f"{place}: {type(error).__name__}: {error}", stage_number) from error
        finally:
            mail.end()
        stopwatch.start(None)  # the drain counts as waiting
        mail.channel.drain()
        return stopwatch.row()

    # Actions

    def _forward(self, action: Action, window: _Window) -> None:
        stage, mb = self.stages[action.stage], action.mb
        target = window.feed.target(mb) if stage.objective is not None and window.outputs is None else None
        with drawing(self._seeds(action, window)):
            inputs = window.mail.inputs(action.stage, mb) if action.stage else window.feed.input(mb)
            if window.trains:
                saving = window.order.saving(action.stage, mb)
                outputs = stage.forward(mb, inputs, action.read, target, saving)
            else:
                outputs = stage.predict(inputs, target)
        if stage.objective is None:
            window.mail.put_outputs(action.stage, mb, outputs)
        elif window.outputs is not None:
            window.outputs.append(tuple(tensor.detach().cpu() for tensor in outputs))
        opened, limit = stage.in_flight, self._limits[action.stage].activations
        assert opened <= limit, f"{action}: {opened} microbatches in flight, {limit} simulated"

    def _recompute(self, action: Action, window: _Window) -> None:
        with drawing(self._seeds(action, window)):
            self.stages[action.stage].recompute(action.mb, action.read)

    def _seeds(self, action: Action, window: _Window) -> Seeds:
        if not window.trains:
            return Seeds(self.seed, EVALUATION, action.mb)
        batch, microbatch = divmod(action.mb, window.order.microbatches)
        return Seeds(self.seed, window.first_update + batch, microbatch)

    def _backward(self, action: Action, window: _Window) -> None:
        stage = self.stages[action.stage]
        run = stage.backward if action.op is Op.B else stage.backward_input
        grads = window.mail.grads(action.stage, action.mb)
        with window.overlapping(action):
            back = run(action.mb, grads, action.read)
        window.mail.put_input_grads(action.stage, action.mb, back)
        self._release(action, window)

    def _backward_weight(self, action: Action, window: _Window) -> None:
        with window.overlapping(action):
            self.stages[action.stage].backward_weight(action.mb, action.read)
        self._release(action, window)

    def _step(self, action: Action, window: _Window) -> None:
        stage = self.stages[action.stage]
        keep = window.order.needed(action.stage, action.version - 1)
        predicted = window.order.predicted(action.stage, action.version)
        stage.step(keep, window.sums.norms.get(action.version), action.delay, predicted)
        self._release(action, window)
        versions, limit = stage.store.count, self._limits[action.stage].versions
        assert versions <= limit, f"{action}: {versions} weight versions held, {limit} simulated"

    def _release(self, action: Action, window: _Window) -> None:
        store = self.stages[action.stage].store
        for read in store.older():
            if not window.order.needed(action.stage, read):
                store.release(read)
