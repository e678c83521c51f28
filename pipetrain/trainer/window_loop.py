"""The loop over the windows of a pass: it trains, evaluates and predicts, whoever has started it.

Between two windows the ranks exchange one word: rank 0 says which batches come next, the last stage's rank
the losses of the last ones, and each what signals asked it for. Where a program looks at each loss, nothing
is read before it has seen it, so what comes next is a word of its own. Where nobody looks before a checkpoint
or the epoch's end, several windows run between two words, as many as take MAX_UNSYNCED_S: that changes no
result. Their batches are read before them, as an error of the loader is to come before the window.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pipetrain.data.batch import BadBatch
from pipetrain.data.reader import too_small
from pipetrain.errors import ConfigError, of_all
from pipetrain.model.specs import Size
from pipetrain.plan.window_lengths import NONE, WindowLengths
from pipetrain.records.history import RankRecords
from pipetrain.runtime.comm.collective_guard import (
    CollectiveGuard,
    Failure,
    attempt,
    failure_of,
    raise_failure,
)
from pipetrain.runtime.microbatch_feed import Batches
from pipetrain.runtime.session import Session
from pipetrain.runtime.window_record import NO_HOOKS, WindowHooks, WindowRecord
from pipetrain.signals import ORDER, Signals, Stopping, StopRequest

MAX_UNSYNCED_S = 0.5  # windows run for at most this long without a word, where nobody looks at losses
AHEAD_S = 0.005  # rank 0 reads ahead for at most this long, as all ranks wait meanwhile
MOST_AHEAD = 64  # windows that are read ahead, whose batches rank 0 has in memory
NO_BATCH = "the loader has no batch: give one that has, and that can be read again"


Kind = Literal["training", "evaluation", "prediction"]


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass over batches, in windows of `window` batches; None: of all that are left.

    `what`: its name in messages; `title`: in the progress, of `shown` steps, or else of a window's. `begun`:
    the batches of its epoch before it, from whose first one windows are counted, each having its place; None:
    each is as long as it may be. `most`: its batches, where its loader goes on. `updates`: of all passes, if
    that is known. `reads_ahead`: whether a window is read before somebody has seen the losses of the one
    before; then somebody looks every `look_every` updates, or at its end alone. `epoch`: from 0. `sample_s`:
    the seconds that a sample took in the last epoch, if known.
    """

    kind: Kind
    what: str
    batches: Batches
    window: int | None
    begun: int | None = None
    most: int | None = None
    shown: int | None = None
    updates: int | None = None
    reads_ahead: bool = False
    look_every: int | None = None
    title: str = ""
    epoch: int = 0
    sample_s: float | None = None

    @property
    def trains(self) -> bool:
        return self.kind == "training"


@dataclass(frozen=True, slots=True)
class WindowResult:
    """What ran of a pass between two exchanges of the ranks, on every rank alike but for what was measured.

    `losses`, `rates`: of each update. `request`: what signals asked for. `over`: whether nothing is left of
    the pass, if that is known.
    """

    of: Pass
    windows: Sequence[WindowRecord]
    losses: list[float]
    rates: list[float]
    request: StopRequest
    over: bool

    @property
    def sizes(self) -> list[Size]:
        """The size of each batch that ran."""
        return [size for window in self.windows for size in window.sizes]

    @property
    def early(self) -> bool:
        """Whether the last window ended early."""
        return self.windows[-1].early


class Listener:
    """What is called as windows and epochs go on. All ranks have the same, as some call collectives."""

    def before_window(self, of: Pass, sizes: Sequence[Size]) -> WindowHooks:
        """Return what is to be looked at in a window of batches of these sizes."""
        return NO_HOOKS

    def after_windows(self, done: WindowResult) -> None:
        """Act after windows that have run; the run has counted their batches."""

    def after_epoch(self, ranks: RankRecords) -> None:
        """Act after an epoch, the last one of the run's history, made of these records."""

    def close(self) -> None:
        """End with the run: after its last epoch, or when a signal has stopped it."""


@dataclass(frozen=True, slots=True)
class WindowWord:
    """What the ranks say between windows.

    `windows`: by rank 0, the size of each batch of the next ones; None if there was never a batch.
    `failure`: why rank 0 cannot read them, and there its `error`. `losses`: by the last stage's rank.
    `rates`: of the same updates.
    """

    windows: list[list[Size]] | None
    failure: Failure | None
    error: Exception | None
    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    request: StopRequest = ""


class _Cursor:
    """How far a pass has come: `done` batches. Rank 0 reads on with `next`."""

    def __init__(self, of: Pass, session: Session) -> None:
        self.of, self.done = of, 0
        self._first = session.updates
        correction = session.plan.settings.correction if of.trains else NONE
        self._schedule = WindowLengths(of.window, correction, of.updates)
        self._late: Exception | None = None  # of reading ahead

    def next(self, most: int) -> list[list[Size]] | None:
        """Return the size of each batch of at most so many windows."""
        if self._late is not None:
            raise self._late
        unseen, windows, read = self._unseen(), list[list[Size]](), 0
        began = time.perf_counter()
        while not windows or (
            len(windows) < most and read < unseen and time.perf_counter() - began < AHEAD_S
        ):
            length = self._length(self.done + read)
            try:
                sizes = [] if length == 0 else self.of.batches.next(length)
            except Exception as error:
                if not windows:
                    raise
                self._late = error  # when these have been trained
                break
            if not sizes:
                return windows or (None if sizes is None else [])
            windows.append(sizes)
            read += len(sizes)
        return windows

    def _unseen(self) -> int:
        """Return the batches that may run before somebody looks; the next window runs in any case."""
        every = self.of.look_every
        if not self.of.reads_ahead:
            return 0
        return sys.maxsize if every is None else every - (self._first + self.done) % every

    def _length(self, done: int) -> int | None:
        """Return the batches of the next window after so many of the pass, as WindowLengths.next does."""
        place = None if self.of.begun is None else self.of.begun + done
        left = None if self.of.most is None else self.of.most - done
        return self._schedule.next(self._first + done, place, left)


class Windows:
    """Runs the passes of a session, window by window. All ranks make the same calls.

    `max_unsynced_s`: see MAX_UNSYNCED_S.
    """

    def __init__(
        self,
        session: Session,
        guard: CollectiveGuard,
        requests: Signals | Stopping | None = None,
        listeners: Sequence[Listener] = (),
        max_unsynced_s: float = MAX_UNSYNCED_S,
    ) -> None:
        self._session, self._guard, self._groups = session, guard, guard.groups
        self._requests, self._listeners = requests, listeners
        self._max_unsynced_s = max_unsynced_s
        self._window_s = max_unsynced_s  # of the last windows that were trained

    def run(self, of: Pass) -> Iterator[WindowResult]:
        """Run a pass, and yield what came of its windows whenever the ranks have exchanged it.

        Raises ConfigError for a pass without batches, BadBatch for a batch to train with fewer samples than
        microbatches, ChannelError, and TrainingStopped.
        """
        cursor = _Cursor(of, self._session)
        began = time.perf_counter()  # of reading these windows
        word = self._exchange(cursor)
        while True:
            raise_failure(word.error, word.failure, 0)
            if word.windows is None:
                raise of_all(ConfigError(NO_BATCH), self._groups.world.rank)
            if not (windows := word.windows):
                return
            ran: list[WindowRecord] = []
            for sizes in windows:
                if (ran and ran[-1].early) or self._too_small(of, sizes):
                    break
                ran.append(self._run(of, sizes))
            early = bool(ran) and ran[-1].early
            if ran:
                cursor.done += sum(window.done for window in ran)
                if of.trains:
                    self._window_s = (time.perf_counter() - began) / len(ran)
                began = time.perf_counter()
                word = self._exchange(cursor, of.reads_ahead, reports=of.trains or early)
                over = of.reads_ahead and not (word.windows or word.failure)
                yield WindowResult(of, ran, word.losses, word.rates, word.request, over)
            if len(ran) < len(windows) and not early:  # and the updates before it were seen
                raise of_all(BadBatch(self._too_small(of, windows[len(ran)])), self._groups.world.rank)
            if not of.reads_ahead:
                word = self._announce(cursor)

    def _run(self, of: Pass, sizes: list[Size]) -> WindowRecord:
        session = self._session
        run = {"training": session.train, "evaluation": session.evaluate, "prediction": session.predict}
        with self._guard():
            hooks = WindowHooks.together(listener.before_window(of, sizes) for listener in self._listeners)
            return run[of.kind](sizes, of.batches, hooks)

    def _too_small(self, of: Pass, window: list[Size]) -> str:
        return too_small(window, self._session.plan.settings.microbatches) if of.trains else ""

    def _exchange(self, cursor: _Cursor, reads: bool = True, reports: bool = False) -> WindowWord:
        """Exchange a word; rank 0 `reads` which batches come next. `reports`: also losses and signals."""
        last = self._session.last
        windows, error = self._read(cursor) if reads else (None, None)
        with self._guard():
            with self._session.engine.deadline.waiting():
                losses = last.counts.take_losses() if reports and last else []
            rates = self._session.take_learning_rates() if reports else []
            request = self._requests.take() if reports and self._requests else ""
            word = [_as_json(windows), failure_of(error), losses, rates, request]
            words = self._groups.gather(f"the next window of {cursor.of.what}", word)
        parts = [words[rank][2] for rank in self._session.plan.placement[-1]]
        losses = [*map(sum, zip(*parts, strict=True))]  # each replica has its share
        rates = next((received for *_, received, _ in words if received), [])
        request = max((request for *_, request in words), key=ORDER.index)
        return WindowWord(_from_json(words[0][0]), words[0][1], error, losses, rates, request)

    def _announce(self, cursor: _Cursor) -> WindowWord:
        """Let rank 0 say which batches come next, and begin with them without waiting for the others."""
        windows, error = self._read(cursor)
        with self._guard():
            what = f"the next window of {cursor.of.what}"
            ends = not windows or any(self._too_small(cursor.of, sizes) for sizes in windows)
            sizes, failure = self._groups.broadcast_nowait(
                what, [_as_json(windows), failure_of(error)], ends=ends
            )
        return WindowWord(_from_json(sizes), failure, error)

    def _read(self, cursor: _Cursor) -> tuple[list[list[Size]] | None, Exception | None]:
        """Read the next windows on rank 0; return also the error of it."""
        most = min(MOST_AHEAD, max(1, int(self._max_unsynced_s / max(self._window_s, 1e-6))))
        return (None, None) if self._groups.world.rank else attempt(lambda: cursor.next(most))


def _as_json(windows: list[list[Size]] | None) -> list[list[list[int]]] | None:
    return None if windows is None else [[size.to_json() for size in window] for window in windows]


def _from_json(windows: list[list[list[int]]] | None) -> list[list[Size]] | None:
    return None if windows is None else [[Size.from_json(size) for size in window] for window in windows]
