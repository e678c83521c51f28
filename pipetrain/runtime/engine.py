"""The interpreter: the loop over one rank's actions.

Each operation is one method, looked up in a table. The order of the actions and their weight versions come
from the program, so there is no synchronous or asynchronous mode here, and a new schedule needs no change.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

from pipetrain.errors import ActionFailed, TrainingStopped
from pipetrain.network.boundary import TensorSpec, specs_of
from pipetrain.network.draws import EVALUATION, Seeds, drawing
from pipetrain.plan.cut import Cut, divide, merge
from pipetrain.runtime.channel import Channel, ChannelError, Message
from pipetrain.runtime.clock import Clock, Stopwatch
from pipetrain.runtime.feed import Target
from pipetrain.runtime.held import Meter
from pipetrain.runtime.order import Order
from pipetrain.runtime.rehearsal import Rehearsal, Repeated, attributes_put_back, put_back
from pipetrain.runtime.stage import Stage
from pipetrain.schedule.actions import RECEIVES, Action, Edge, Op, Tie
from pipetrain.schedule.policy import Bounds, Wait
from pipetrain.schedule.timeline import Row, StageStats, stage_stats, total

Tensors = tuple[Tensor, ...]
Specs = tuple[TensorSpec, ...]
Progress = Callable[[int], None]
"""Called with a stage after each counted action (an update, or a microbatch of an evaluation)."""
Observer = Callable[[Row], None]  # called with the measured spans of a window, after its end


UNREAD = 256  # windows whose times need not have been read


class Feed(Protocol):
    """The microbatches of one window, numbered from 0."""

    def size(self, mb: int) -> int:
        """Return the number of samples of a microbatch."""

    def input(self, mb: int) -> Tensors:
        """Return the first stage's inputs [n, ...]; called in ascending order."""

    def target(self, mb: int) -> Target:
        """Return the last stage's targets; called once for each microbatch."""

    def prepare(self) -> None:
        """Make the next input in advance; called before the engine waits for a message."""

    def first(self) -> tuple[Tensors | None, Target | None]:
        """Return the first microbatch's inputs and targets, each if it is given here, without taking them.

        Called before the window begins.
        """


@dataclass(slots=True)
class _Window:
    """The state of one window."""

    order: Order
    feed: Feed
    microbatches: int
    cut: Cut
    channel: Channel
    first: int  # update
    specs: dict[tuple[int, int, int], Specs] = field(default_factory=dict)  # by edge and samples
    arrived: dict[tuple[Edge, int], Tensors] = field(
        default_factory=dict
    )  # (edge, microbatch) -> its message
    to_send: dict[tuple[Edge, int], Tensors] = field(default_factory=dict)
    squares: dict[int, dict[int, Tensor]] = field(default_factory=dict)  # version -> stage -> squared norm
    norms: dict[int, Tensor] = field(default_factory=dict)  # -> norm of the whole gradient, once heard
    shares: dict[tuple[Tie, int], dict[int, Tensor]] = field(default_factory=dict)  # (tie, version) -> stage
    sums: dict[tuple[Tie, int], Tensor] = field(default_factory=dict)  # of shared weights' gradients
    tied: set[tuple[Tie, int]] = field(default_factory=set)  # (tie, version) whose stages here have its sum
    raw_bytes: Counter[int] = field(default_factory=Counter)  # stage -> bytes sent, before encoding


@dataclass(slots=True)
class _Ran:
    """A window of training whose times have not been read."""

    row: Row
    microbatches: int
    skipped: dict[int, int]  # updates, by stage
    raw_bytes: Mapping[int, int]
    observe: Observer | None


_Method = Callable[[Action, _Window], None]


@dataclass(frozen=True, slots=True)
class _View:
    """A policy's view of the channel in a window."""

    channel: Channel
    message: Callable[[Action], Message]

    def arrived(self, receive: Action) -> bool:
        return self.channel.arrived(self.message(receive))

    def room(self, send: Action) -> bool:
        return self.channel.room(self.message(send))

    def forget(self, mb: int) -> None:
        self.channel.forget(mb)


class Engine:
    """Runs programs over the stages of one rank.

    `placement[stage]` is a stage's rank; `cut` and `evaluation_cut` tell what the stages send each other, in
    training and in an evaluation. `bounds[stage]` is asserted while the program runs. `plain` is the channel
    of evaluations, whose messages are not encoded. `rehearsal`: None for none.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        channel: Channel,
        placement: Sequence[int],
        cut: Cut,
        evaluation_cut: Cut,
        bounds: Mapping[int, Bounds],
        clock: Clock,
        plain: Channel | None = None,
        seed: int = 0,
        rehearsal: Rehearsal | None = None,
    ) -> None:
        self._stages = stages
        self._channel = channel
        self._plain = plain or channel
        self._placement = placement
        self._cut = cut
        self._evaluation_cut = evaluation_cut
        self.bounds = bounds
        self._clock = clock
        self.seed = seed
        """Of random numbers such as dropout's."""
        self._rehearsal = rehearsal
        self._ties_of = {index: stage.ties for index, stage in stages.items()}
        self._stats = {stage: StageStats() for stage in stages}
        self._unread: deque[_Ran] = deque()
        self.meter: Meter | None = None
        """What measures the memory of a window of training, if anything does."""
        self._train: dict[Op, _Method] = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.I: self._backward_input,
            Op.W: self._backward_weight,
            Op.R: self._recompute,
            Op.SEND_F: self._send,
            Op.RECV_F: self._recv,
            Op.SEND_B: self._send,
            Op.RECV_B: self._recv,
            Op.REDUCE: self._reduce,
            Op.TIE: self._tie,
            Op.NORM: self._norm,
            Op.STEP: self._step,
        }
        self._evaluate = {**self._train, Op.F: self._predict}

    def train(
        self,
        order: Order,
        feed: Feed,
        microbatches: int,
        progress: Progress = lambda stage: None,
        observe: Observer | None = None,
    ) -> None:
        """Run this rank's actions of one window, with batches of `microbatches` each, and drain.

        `progress` is called at each update, `observe` with the measured spans. Raises ChannelError and
        TrainingStopped.
        """
        self._rehearse(order, feed, microbatches, training=True)
        for stage in self._stages.values():
            stage.begin_window()
        skipped = {index: stage.skipped for index, stage in self._stages.items()}
        first = next(iter(self._stages.values())).weights.updates
        window = _Window(order, feed, microbatches, self._cut, self._channel, first)
        row = self._run(window, self._train, Op.STEP, progress, self.meter)
        skips = {index: stage.skipped - skipped[index] for index, stage in self._stages.items()}
        self._unread.append(_Ran(row, microbatches, skips, window.raw_bytes, observe))
        self._read(wait=observe is not None)

    @property
    def stats(self) -> dict[int, StageStats]:
        """The statistics of each stage's training since `take_stats`. On a GPU this waits for the device."""
        self.settle()
        return self._stats

    @stats.setter
    def stats(self, stats: dict[int, StageStats]) -> None:
        self._stats = stats

    def take_stats(self) -> dict[int, StageStats]:
        """Return the statistics of each stage, and reset them."""
        stats, self.stats = self.stats, {stage: StageStats() for stage in self._stages}
        return stats

    def _read(self, wait: bool) -> None:
        """Read the times of all windows, for which the host waits, or of those that are too many."""
        while self._unread and (wait or len(self._unread) > UNREAD):
            ran = self._unread.popleft()
            row = self._clock.resolve(ran.row)
            for index, stats in stage_stats(row, ran.microbatches).items():
                stats.skipped = ran.skipped[index]
                stats.raw_bytes = ran.raw_bytes[index]
                self._stats[index] = total([self._stats[index], stats])
            if ran.observe:
                ran.observe(row)

    def evaluate(self, order: Order, feed: Feed, progress: Progress = lambda stage: None) -> None:
        """Run forwards with the newest weights."""
        self._rehearse(order, feed, 1, training=False)
        window = _Window(order, feed, 1, self._evaluation_cut, self._plain, EVALUATION)
        self._run(window, self._evaluate, Op.F, progress)
        self.settle()

    def settle(self) -> None:
        """Wait until the device has done all. Raises ChannelError for a message that never came."""
        self._read(wait=True)
        self._clock.settle()
        self._channel.check()
        self._plain.check()

    def _rehearse(self, order: Order, feed: Feed, microbatches: int, training: bool) -> None:
        """Play a few batches with made-up messages for each new size of microbatches, and put all back."""
        rehearsal = self._rehearsal
        if rehearsal is None:
            return
        found = {(training, feed.size(mb)) for mb in range(order.batches * microbatches)}
        if found <= rehearsal.done:
            return
        inputs, target = feed.first()
        new = sorted(size for _, size in found - rehearsal.done)
        norms = False
        with put_back(self._stages.values(), training):
            for size in new:
                for _ in range(2):  # in the second one the optimizer has its state
                    norms |= self._play(order.short(), Repeated(size, inputs, target), microbatches, training)
        if training and not any(trained for trained, _ in rehearsal.done):
            with attributes_put_back(self._stages.values()):
                rehearsal.after_first()
        if norms:  # which connects the ranks
            nothing = torch.zeros((), dtype=torch.float64)
            self._channel.tell_norms(dict.fromkeys(self._stages, nothing), len(self._placement))
            self._channel.hear_norms()
        rehearsal.meet()
        rehearsal.done |= found

    def _play(self, order: Order, feed: Feed, microbatches: int, training: bool) -> bool:
        """Run a window of a rehearsal; return whether the ranks exchange norms in it."""
        assert self._rehearsal is not None
        channel = self._rehearsal.loopback(training)
        if training:
            for stage in self._stages.values():
                stage.begin_window()
            window = _Window(order, feed, microbatches, self._cut, channel, 0)
            self._run(window, self._train, Op.STEP, lambda stage: None)
        else:
            window = _Window(order, feed, 1, self._evaluation_cut, channel, EVALUATION)
            self._run(window, self._evaluate, Op.F, lambda stage: None)
        return bool(window.squares)

    def _run(
        self,
        window: _Window,
        methods: Mapping[Op, _Method],
        counted: Op,
        progress: Progress,
        meter: Meter | None = None,
    ) -> Row:
        watch = Stopwatch(self._clock, window.channel)
        receives = [self._message(action, window) for action in window.order.receives()]
        profiled = torch.autograd.profiler._is_profiler_enabled  # naming an action takes 10 us
        action: Action | Wait | None = None
        try:
            window.channel.expect(receives, window.order.decided)
            for action in self._actions(window):
                if isinstance(action, Wait):
                    watch.start(None)
                    self._wait(action, window)
                    continue
                if action.op is Op.STEP or action.op is Op.NORM:
                    self._hear(action, window, watch)
                watch.start(action)
                with (
                    record_function(str(action)) if profiled else nullcontext(),
                    meter.during(action) if meter else nullcontext(),
                ):
                    methods[action.op](action, window)
                watch.stop()
                if meter:
                    meter.after(action, self._held_messages(window))
                if action.op is counted:
                    progress(action.stage)
        except (TrainingStopped, AssertionError):
            raise
        except Exception as error:
            raise self._explained(error, action) from error
        watch.start(None)
        window.channel.drain()
        return watch.row()

    def _actions(self, window: _Window) -> Iterator[Action | Wait]:
        """Yield the order's actions. Before one that may block, the feed makes the next input."""
        view = _View(window.channel, lambda action: self._message(action, window))
        for action in window.order.actions(view):
            if isinstance(action, Wait) or action.op in RECEIVES:
                window.feed.prepare()
            yield action

    def _wait(self, wait: Wait, window: _Window) -> None:
        receives, sends = (
            [self._message(action, window) for action in actions] for actions in (wait.receives, wait.sends)
        )
        window.channel.wait(receives, sends)

    def _hear(self, action: Action, window: _Window, watch: Stopwatch) -> None:
        """Wait for what a NORM or STEP needs of other ranks, once."""
        version = action.version
        for tie in self._ties_of[action.stage]:
            if (tie, version) not in window.tied:
                watch.start(None)
                sums = window.sums.pop((tie, version), None)
                sums = window.channel.hear_tied(tie) if sums is None else sums
                for index in self._held(tie):
                    self._stages[index].add_tied(tie, sums)
                window.tied.add((tie, version))
        if action.op is Op.STEP and version in window.squares.keys() - window.norms.keys():
            watch.start(None)
            window.norms[version] = window.channel.hear_norms().sum().sqrt()

    def _explained(self, error: Exception, action: Action | Wait | None) -> Exception:
        """Return the exception to raise for one that an action raised."""
        if isinstance(error, ChannelError):
            where = f"stage {action.stage} was at {action}" if action else "nothing was done yet"
            return ChannelError(f"{error}; {where}")
        stage = action.stage if action else min(self._stages)  # an error of a layer, or out of memory
        return ActionFailed(
            f"rank {self._placement[stage]}, stage {stage}, action {action}: {type(error).__name__}: {error}"
        )

    # Compute

    def _forward(self, action: Action, window: _Window) -> None:
        stage = self._stages[action.stage]
        target = window.feed.target(action.mb) if self._is_last(action.stage) else None
        saving = window.order.saving(action.stage, action.mb)
        with drawing(self._seeds(action, window)):
            outputs = stage.forward(action.mb, self._inputs(action, window), action.version, target, saving)
        self._hand_on(action, outputs, window)
        limit = self.bounds[action.stage].activations
        assert stage.in_flight <= limit, (
            f"{action}: {stage.in_flight} microbatches in flight, {limit} simulated"
        )

    def _recompute(self, action: Action, window: _Window) -> None:
        with drawing(self._seeds(action, window)):
            self._stages[action.stage].recompute(action.mb, action.version)

    def _seeds(self, action: Action, window: _Window) -> Seeds:
        batch, microbatch = divmod(action.mb, window.microbatches)
        return Seeds(self.seed, window.first + batch, microbatch)

    def _predict(self, action: Action, window: _Window) -> None:
        stage = self._stages[action.stage]
        target = window.feed.target(action.mb) if self._is_last(action.stage) else None
        with drawing(Seeds(self.seed, EVALUATION, action.mb)):
            outputs = stage.predict(self._inputs(action, window), target)
        self._hand_on(action, outputs, window)

    def _backward(self, action: Action, window: _Window) -> None:
        grads, stage = self._grads(action, window), self._stages[action.stage]
        self._hand_back(action, stage.backward(action.mb, grads, action.version), window)
        self._release(action, window)

    def _backward_input(self, action: Action, window: _Window) -> None:
        grads, stage = self._grads(action, window), self._stages[action.stage]
        self._hand_back(action, stage.backward_input(action.mb, grads, action.version), window)

    def _backward_weight(self, action: Action, window: _Window) -> None:
        self._stages[action.stage].backward_weight(action.mb, action.version)
        self._release(action, window)

    def _reduce(self, action: Action, window: _Window) -> None:
        self._stages[action.stage].reduce()

    def _tie(self, action: Action, window: _Window) -> None:
        """Tell the other ranks of each tie, together with the last stage of it on this rank."""
        for tie in self._ties_of[action.stage]:
            mine = window.shares.setdefault((tie, action.version), {})
            mine[action.stage] = self._stages[action.stage].tied(tie)
            held = self._held(tie)
            if len(mine) == len(held):
                total = sum((mine[stage] for stage in held[1:]), mine[held[0]])
                del window.shares[tie, action.version]
                ranks = len({self._placement[stage] for stage in tie})
                if ranks == 1:
                    window.sums[tie, action.version] = total
                else:
                    window.channel.tell_tied(tie, held[0], total, ranks)

    def _held(self, tie: Tie) -> list[int]:
        return [stage for stage in tie if stage in self._stages]

    def _norm(self, action: Action, window: _Window) -> None:
        """Tell the other ranks, together with the last NORM of this rank for a version."""
        squares = window.squares.setdefault(action.version, {})
        squares[action.stage] = self._stages[action.stage].squared_norm()
        if len(squares) == len(self._stages):
            window.channel.tell_norms(squares, len(self._placement))

    def _step(self, action: Action, window: _Window) -> None:
        stage = self._stages[action.stage]
        keep = window.order.needed(action.stage, action.version - 1)
        stage.step(keep, window.norms.get(action.version))
        self._release(action, window)
        held = stage.weights.held
        limit = self.bounds[action.stage].versions
        assert held <= limit, f"{action}: {held} weight versions held, {limit} simulated"

    def _release(self, action: Action, window: _Window) -> None:
        """Release the older versions that no action reads any more."""
        weights = self._stages[action.stage].weights
        for version in weights.older():
            if not window.order.needed(action.stage, version):
                weights.release(version)

    # Outputs and gradients: passed directly to a stage on this rank, or kept for the program's SEND

    def _inputs(self, action: Action, window: _Window) -> Tensors:
        if action.stage == 0:
            return window.feed.input(action.mb)
        routes = window.cut.routes_into[action.stage]
        return merge((route.values, window.arrived.pop((route.edge, action.mb))) for route in routes)

    def _grads(self, action: Action, window: _Window) -> Tensors:
        routes = window.cut.routes_from[action.stage]
        return merge((route.returned, window.arrived.pop((route.way_back, action.mb))) for route in routes)

    def _hand_on(self, action: Action, outputs: Tensors, window: _Window) -> None:
        routes = window.cut.routes_from[action.stage]
        messages = divide(outputs, [route.values for route in routes])
        self._hand(action, zip((route.edge for route in routes), messages, strict=True), window)

    def _hand_back(self, action: Action, grads: Tensors, window: _Window) -> None:
        routes = window.cut.routes_into[action.stage]
        messages = divide(grads, [route.returned for route in routes])
        self._hand(action, zip((route.way_back for route in routes), messages, strict=True), window)

    def _hand(self, action: Action, messages: Iterable[tuple[Edge, Tensors]], window: _Window) -> None:
        for edge, tensors in messages:
            mailbox = window.arrived if edge[1] in self._stages else window.to_send
            mailbox[edge, action.mb] = tensors

    def _is_last(self, stage: int) -> bool:
        return stage == len(self._placement) - 1

    # Messages

    def _message(self, action: Action, window: _Window) -> Message:
        src, dst = action.edge
        size = window.feed.size(action.mb)
        specs = window.specs.get((src, dst, size))
        if specs is None:
            specs = window.cut.message((src, dst), size)
            window.specs[src, dst, size] = specs
        return Message(src, dst, action.mb, specs, (self._placement[src], self._placement[dst]))

    def _send(self, action: Action, window: _Window) -> None:
        message = self._message(action, window)
        tensors = window.to_send.pop((message.edge, action.mb))
        if specs_of(tensors) != message.specs:  # the receiver would not notice
            made, planned = (" + ".join(map(str, specs)) for specs in (specs_of(tensors), message.specs))
            raise TrainingStopped(
                f"stage {action.stage} made {made} for {message.name}, and the plan says {planned}: what a "
                f"layer returns must depend only on the number of samples"
            )
        window.channel.send(message, tensors)
        window.raw_bytes[action.stage] += message.nbytes

    def _held_messages(self, window: _Window) -> Iterator[tuple[Sequence[int], Tensor]]:
        """Yield the tensors of messages that this rank holds, with the stages between which they travel."""
        yield from window.channel.buffers()
        for mailbox in (window.arrived, window.to_send):
            for (edge, _), tensors in mailbox.items():
                yield from ((edge, tensor) for tensor in tensors)
        for shares in window.shares.values():
            yield from (((stage,), numbers) for stage, numbers in shares.items())
        yield from ((tie, sums) for (tie, _), sums in window.sums.items())

    def _recv(self, action: Action, window: _Window) -> None:
        message = self._message(action, window)
        window.arrived[message.edge, action.mb] = window.channel.recv(message)
