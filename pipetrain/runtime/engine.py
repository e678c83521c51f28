"""The loop over one rank's actions; the only interpreter.

A dumb machine: each operation is one method, looked up in a table. What to do, in which order and over which
weights stands in the program, so there is no synchronous or asynchronous mode here, and a new schedule needs
no change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from pipetrain.boundary import Boundary, specs_of
from pipetrain.errors import ActionFailed, TrainingStopped
from pipetrain.runtime.channel import Channel, ChannelError, Message
from pipetrain.runtime.clock import Clock
from pipetrain.runtime.order import Order
from pipetrain.runtime.record import StageRecord, count
from pipetrain.runtime.stage import Stage, Target
from pipetrain.schedule.actions import COMMUNICATION, Action, Op
from pipetrain.schedule.measured import Carried, RankWindow, Timed
from pipetrain.schedule.policy import Wait

_RECEIVES = frozenset({Op.RECV_F, Op.RECV_B})
Tensors = tuple[Tensor, ...]
Boundaries = Mapping[int, Sequence[Boundary]]
Progress = Callable[[int], None]
"""Told of a stage that has done one more of what is counted."""
Ends = Callable[[int, int], bool]
"""(batches, begun) -> whether a window, of which so many batches have begun, ends after so many.

Asked by every rank, of the same numbers of batches, in order."""
Observer = Callable[[RankWindow], None]
"""Given what was measured of a window, after its end."""


class Feed(Protocol):
    """The microbatches of one window, numbered from 0."""

    def size(self, mb: int) -> int:
        """How many samples microbatch `mb` has."""

    def input(self, mb: int) -> Tensor:
        """Return the first stage's input [n, ...]; asked for in ascending order."""

    def target(self, mb: int) -> Target:
        """Return what the last stage needs."""

    def prepare(self) -> None:
        """Make the next input ahead: called before the engine waits for a message."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What `simulate` said that a stage holds at most."""

    activations: int
    versions: int


@dataclass(slots=True)
class _Window:
    """The state of one run of a program."""

    order: Order
    feed: Feed
    microbatches: int
    boundaries: Boundaries
    ends: Ends | None = None
    inputs: dict[tuple[int, int], Tensors] = field(default_factory=dict)  # of (stage, microbatch)
    grads: dict[tuple[int, int], Tensors] = field(default_factory=dict)  # of its outputs
    to_send: dict[tuple[int, int, int], Tensors] = field(
        default_factory=dict
    )  # (stage, microbatch, to stage)


@dataclass(frozen=True, slots=True)
class _View:
    """What a policy sees of the channel in a window."""

    channel: Channel
    message: Callable[[Action], Message]

    def arrived(self, receive: Action) -> bool:
        return self.channel.arrived(self.message(receive))

    def room(self, send: Action) -> bool:
        return self.channel.room(self.message(send))


class Engine:
    """Runs programs over the stages of one rank.

    `placement[stage]` is a stage's rank; `boundaries[size][stage]` is what enters a stage for a microbatch
    of `size` samples, `evaluated` likewise in an evaluation; `limits[stage]` is asserted as the program runs.
    An evaluation goes over `plain`, where what training sends is encoded.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        channel: Channel,
        placement: Sequence[int],
        boundaries: Boundaries,
        evaluated: Boundaries,
        limits: Mapping[int, Limits],
        clock: Clock,
        plain: Channel | None = None,
    ) -> None:
        self._stages = stages
        self._channel = channel
        self._plain = plain or channel
        self._placement = placement
        self._boundaries = boundaries
        self._evaluated = evaluated
        self._limits = limits
        self._clock = clock
        self.records = {stage: StageRecord() for stage in stages}
        self._execute: dict[Op, Callable[[Action, _Window], None]] = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.I: self._backward_input,
            Op.W: self._backward_weight,
            Op.SEND_F: self._send_activation,
            Op.RECV_F: self._recv_activation,
            Op.SEND_B: self._send_gradient,
            Op.RECV_B: self._recv_gradient,
            Op.REDUCE: self._reduce,
            Op.STEP: self._step,
        }

    def train(
        self,
        order: Order,
        feed: Feed,
        microbatches: int,
        progress: Progress = lambda stage: None,
        observe: Observer | None = None,
        ends: Ends | None = None,
    ) -> None:
        """Run this rank's actions of one window of batches of `microbatches` each, and drain.

        `progress` is told of each update, `observe` of when each action ran. `ends` may let the window end
        earlier than planned: `order` then says after how many batches. Raises ChannelError and
        TrainingStopped.
        """
        for stage in self._stages.values():
            stage.begin_window()
        window = _Window(order, feed, microbatches, self._boundaries, ends)
        measured = self._run(window, self._execute, Op.STEP, progress)
        count(self.records, measured)
        if observe:
            observe(measured)

    def evaluate(
        self,
        order: Order,
        feed: Feed,
        progress: Progress = lambda stage: None,
        ends: Ends | None = None,
    ) -> None:
        """Run an order of forwards alone: each predicts with the newest weights, saves and records nothing.

        `progress` is told of each microbatch; each is a batch to `ends`, see `train`.
        """
        trained = self.records, self._channel
        self.records, self._channel = {stage: StageRecord() for stage in self._stages}, self._plain
        try:
            execute = {**self._execute, Op.F: self._predict}
            self._run(_Window(order, feed, 1, self._evaluated, ends), execute, Op.F, progress)
        finally:
            self.records, self._channel = trained

    def _run(
        self,
        window: _Window,
        execute: Mapping[Op, Callable[[Action, _Window], None]],
        counted: Op,
        progress: Progress,
    ) -> RankWindow:
        began, channel, order = self._clock.begin(), self._channel, window.order

        def message(action: Action) -> Message:
            return self._message(action, window)

        channel.expect([message(action) for action in order.receives()], order.decided)
        timed: list[Timed] = []
        messages: list[Carried] = []
        since: tuple[float, float] | None = None  # the time and the channel's waiting before a Wait
        undecided, action = 0.0, None
        try:
            for action in self._asking(window, _View(channel, message)):
                if isinstance(action, Wait):
                    window.feed.prepare()
                    since = since or (time.perf_counter(), channel.waited)
                    channel.wait([*map(message, action.receives)], [*map(message, action.sends)])
                elif action.op in COMMUNICATION:
                    if action.op in _RECEIVES and not since:
                        window.feed.prepare()  # before its span, which starts with the wait
                    start, waited = since or (time.perf_counter(), channel.waited)
                    carried, coded = channel.carried, channel.coded
                    execute[action.op](action, window)
                    timed.append((action, start, time.perf_counter(), channel.waited - waited))
                    messages.append((channel.carried - carried, channel.coded - coded))
                    since = None
                else:
                    if since:
                        undecided, since = undecided + channel.waited - since[1], None
                    start = self._clock.mark()
                    execute[action.op](action, window)
                    timed.append((action, start, self._clock.mark(), 0.0))
                    if action.op is counted:
                        progress(action.stage)
        except (TrainingStopped, AssertionError):
            raise
        except ChannelError as error:
            where = f"stage {action.stage} was at {action}" if action else "nothing was done yet"
            raise ChannelError(f"{error}; {where}") from error
        except Exception as error:  # of a layer, or for want of memory
            stage = action.stage if action else min(self._stages)
            raise ActionFailed(
                f"rank {self._placement[stage]}, stage {stage}, action {action}: "
                f"{type(error).__name__}: {error}"
            ) from error
        start = time.perf_counter()
        channel.drain()
        end = time.perf_counter()
        ran = RankWindow(began, timed, (start, end), end, messages, undecided)
        return self._clock.resolve(ran)

    # The end of a window

    def _asking(self, window: _Window, view: _View) -> Iterator[Action | Wait]:
        """Give the order's actions, and ask on the way whether the window ends earlier.

        It may end before a batch of which no rank has posted a receive. Receives are posted `bound` ahead, so
        the rank of the first stage decides before its forward of the microbatch that is one more ahead. The
        others ask when they have received that one, and so after the decision.
        """
        if window.ends is None:
            yield from window.order.actions(view)
            return
        first = min(self._stages)
        asking = (first, Op.RECV_F if first else Op.F)
        for action in window.order.actions(view):
            asks = isinstance(action, Action) and (action.stage, action.op) == asking
            if asks and not first:
                self._ask(action, window, window.ends)
            yield action
            if asks and first:
                self._ask(action, window, window.ends)

    def _ask(self, action: Action | Wait, window: _Window, ends: Ends) -> None:
        assert isinstance(action, Action)
        batches, rest = divmod(action.mb + self._channel.bound + 1, window.microbatches)
        begun = action.mb // window.microbatches + 1
        if rest or batches >= window.order.batches or not ends(batches, begun):
            return
        window.order.shorten(batches)
        self._channel.forget(batches * window.microbatches)
        for index, stage in self._stages.items():
            for version in stage.weights.older():
                if not window.order.needed(index, version):
                    stage.weights.release(version)

    # Compute

    def _forward(self, action: Action, window: _Window) -> None:
        stage, record = self._stages[action.stage], self.records[action.stage]
        target = window.feed.target(action.mb) if self._is_last(action.stage) else None
        outputs = stage.forward(action.mb, self._inputs(action, window), action.version, target)
        self._hand_on(action, outputs, window)
        record.peak_in_flight = max(record.peak_in_flight, stage.in_flight)
        late = action.mb // window.microbatches - action.version
        record.staleness[late] = record.staleness.get(late, 0) + 1
        limit = self._limits[action.stage].activations
        assert stage.in_flight <= limit, (
            f"{action}: {stage.in_flight} microbatches in flight, {limit} simulated"
        )

    def _predict(self, action: Action, window: _Window) -> None:
        stage = self._stages[action.stage]
        labels = window.feed.target(action.mb).labels if self._is_last(action.stage) else None
        self._hand_on(action, stage.predict(self._inputs(action, window), labels), window)

    def _backward(self, action: Action, window: _Window) -> None:
        grads = window.grads.pop((action.stage, action.mb), ())
        self._hand_back(action, self._stages[action.stage].backward(action.mb, grads, action.version), window)
        self._release(action, window)

    def _backward_input(self, action: Action, window: _Window) -> None:
        grads = window.grads.pop((action.stage, action.mb), ())
        stage = self._stages[action.stage]
        self._hand_back(action, stage.backward_input(action.mb, grads, action.version), window)

    def _backward_weight(self, action: Action, window: _Window) -> None:
        self._stages[action.stage].backward_weight(action.mb, action.version)
        self._release(action, window)

    def _reduce(self, action: Action, window: _Window) -> None:
        self._stages[action.stage].reduce()

    def _step(self, action: Action, window: _Window) -> None:
        stage = self._stages[action.stage]
        old, skipped = action.version - 1, stage.skipped
        stage.step(keep=window.order.needed(action.stage, old))
        record, held = self.records[action.stage], stage.weights.held
        record.skipped += stage.skipped - skipped
        record.peak_versions = max(record.peak_versions, held)
        limit = self._limits[action.stage].versions
        assert held <= limit, f"{action}: {held} weight versions held, {limit} simulated"

    def _release(self, action: Action, window: _Window) -> None:
        """Give up a version after its last use, unless it is the newest."""
        weights = self._stages[action.stage].weights
        if action.version < weights.newest and not window.order.needed(action.stage, action.version):
            weights.release(action.version)

    # Hand-over: to a neighbour on this rank at once, to another rank by the program's SEND

    def _inputs(self, action: Action, window: _Window) -> Tensors:
        if action.stage == 0:
            return (window.feed.input(action.mb),)
        return window.inputs.pop((action.stage, action.mb))

    def _hand_on(self, action: Action, outputs: Tensors, window: _Window) -> None:
        if not self._is_last(action.stage):
            self._hand(action, action.stage + 1, outputs, window.inputs, window)

    def _hand_back(self, action: Action, grads: Tensors, window: _Window) -> None:
        if action.stage > 0:
            self._hand(action, action.stage - 1, grads, window.grads, window)

    def _hand(
        self,
        action: Action,
        to: int,
        tensors: Tensors,
        mailbox: dict[tuple[int, int], Tensors],
        window: _Window,
    ) -> None:
        if to in self._stages:
            mailbox[to, action.mb] = tensors
        else:
            window.to_send[action.stage, action.mb, to] = tensors

    def _is_last(self, stage: int) -> bool:
        return stage == len(self._placement) - 1

    # Messages

    def _message(self, action: Action, window: _Window) -> Message:
        ends = {
            Op.SEND_F: (action.stage, action.stage + 1),
            Op.RECV_F: (action.stage - 1, action.stage),
            Op.SEND_B: (action.stage, action.stage - 1),
            Op.RECV_B: (action.stage + 1, action.stage),
        }
        src, dst = ends[action.op]
        boundary = window.boundaries[window.feed.size(action.mb)][max(src, dst)]
        specs = boundary.specs if src < dst else boundary.gradients
        return Message(src, dst, action.mb, specs, (self._placement[src], self._placement[dst]))

    def _send(self, action: Action, window: _Window) -> None:
        message = self._message(action, window)
        tensors = window.to_send.pop((action.stage, action.mb, message.dst))
        if specs_of(tensors) != message.specs:  # the receiver would take it for what was planned, in silence
            made, planned = (" + ".join(map(str, specs)) for specs in (specs_of(tensors), message.specs))
            raise TrainingStopped(
                f"stage {action.stage} made {made} for {message.name}, and the plan says {planned}: what a "
                f"layer returns must depend on the number of samples alone"
            )
        self._channel.send(message, tensors)
        self.records[action.stage].raw_bytes += message.nbytes

    _send_activation = _send_gradient = _send

    def _recv_activation(self, action: Action, window: _Window) -> None:
        window.inputs[action.stage, action.mb] = self._channel.recv(self._message(action, window))

    def _recv_gradient(self, action: Action, window: _Window) -> None:
        window.grads[action.stage, action.mb] = self._channel.recv(self._message(action, window))
