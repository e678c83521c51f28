"""The loop over the windows of a pass: it trains, evaluates and predicts, whoever has started it.

Between two windows the ranks exchange one word: rank 0 says which batches come next, the last stage's rank
the losses of the last ones, and each what signals asked it for. Where a program looks at each loss, nothing
is read before it has seen it, so what comes next is a word of its own. Where nobody looks before a checkpoint
or the epoch's end, several windows run between two words, as many as take AT_ONCE_S: that changes no result.
Their batches are read before them, as an error of the loader is to come before the window.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor

from pipetrain.data.reader import BadBatch, too_small
from pipetrain.errors import ConfigError, of_all
from pipetrain.model.specs import Size
from pipetrain.runtime.clock import Observe
from pipetrain.runtime.comm.collective_guard import (
    CollectiveGuard,
    Failure,
    attempt,
    failure_of,
    raise_failure,
)
from pipetrain.runtime.engine import Tick
from pipetrain.runtime.feed import Batches
from pipetrain.runtime.order import StopCheck
from pipetrain.runtime.session import Session
from pipetrain.runtime.whole_model import gather_outputs
from pipetrain.signals import ORDER, StopRequest

MAX_UNSYNCED_S = 0.5  # windows run for at most this long without a word, where nobody looks at losses
AHEAD_S = 0.005  # rank 0 reads ahead for at most this long, as all ranks wait meanwhile
MOST_AHEAD = 64  # windows that are read ahead, whose batches rank 0 has in memory
NO_BATCH = "the loader has no batch: give one that has, and that can be read again"

Length = Callable[[int], int | None]
"""The batches of the next window, after so many of the pass: 0 for no window, None for all that are left."""
Until = Callable[[int], int]
"""The batches until somebody looks, after so many of the pass; as many may be read ahead."""
Around = Callable[[Sequence[Size]], AbstractContextManager[tuple[Observe | None, StopCheck | None]]]
"""Encloses a window of batches of these sizes; gives what observes it, and what may end it early."""
Ticks = Callable[[int], Tick]
"""Returns what shows the progress of a window of so many batches."""


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
    losses: list[float]
    rates: list[float]
    request: StopRequest


@dataclass(frozen=True, slots=True)
class WindowResult:
    """What ran between two words, on every rank alike: the size of each batch, each update's loss and rate.

    `early`: whether a window ended early. `over`: whether nothing is left of the pass, if that is known.
    """

    sizes: list[Size]
    losses: list[float]
    rates: list[float]
    request: StopRequest
    early: bool
    over: bool


@dataclass(slots=True)
class _Pass:
    """A pass over batches. `late`: an error of reading ahead.

    `until`: without it nothing is read before somebody has looked; where it gives 0, the next window is.
    """

    what: str
    batches: Batches
    length: Length
    until: Until | None = None
    trains: bool = False
    late: Exception | None = None

    def next(self, done: int, most: int) -> list[list[Size]] | None:
        """Return the size of each batch of at most so many windows, after so many batches of the pass."""
        if self.late is not None:
            raise self.late
        room, windows, read = 0 if self.until is None else self.until(done), list[list[Size]](), 0
        began = time.perf_counter()
        while not windows or (len(windows) < most and read < room and time.perf_counter() - began < AHEAD_S):
            length = self.length(done + read)
            try:
                sizes = [] if length == 0 else self.batches.next(length)
            except Exception as error:
                if not windows:
                    raise
                self.late = error  # when these have been trained
                break
            if not sizes:
                return windows or (None if sizes is None else [])
            windows.append(sizes)
            read += len(sizes)
        return windows


def alone(sizes: Sequence[Size]) -> AbstractContextManager[tuple[None, None]]:
    """Run a window without an observer, and to its end."""
    return nullcontext((None, None))


class Windows:
    """Runs the passes of a session, window by window. All ranks make the same calls.

    `take_request`: returns, once, what signals have asked this rank for. `max_unsynced_s`: see AT_ONCE_S.
    """

    def __init__(
        self,
        session: Session,
        guard: CollectiveGuard,
        take_request: Callable[[], StopRequest] = lambda: "",
        max_unsynced_s: float = MAX_UNSYNCED_S,
    ) -> None:
        self.session = session
        self._guard, self._groups = guard, guard.groups
        self._take_request = take_request
        self._max_unsynced_s = max_unsynced_s
        self._window_s = max_unsynced_s  # of the last windows that were trained

    def train(
        self,
        what: str,
        batches: Batches,
        length: Length,
        ticks: Ticks,
        around: Around = alone,
        until: Until | None = None,
        updates: int | None = None,
    ) -> Iterator[WindowResult]:
        """Train a pass; without `until` somebody looks after each window. `updates`: of all passes, if known.

        Raises ConfigError for a pass without batches, BadBatch for a batch with fewer samples than
        microbatches, ChannelError, and TrainingStopped as Session.train does.
        """

        def run(sizes: list[Size]) -> int:
            with around(sizes) as (observe, stop_check):
                return self.session.train(sizes, batches, ticks(len(sizes)), observe, stop_check)

        first, correction = self.session.updates, self.session.plan.settings.correction

        def bounded(done: int) -> int | None:
            lengths = length(done), correction.window(first + done, updates)
            return min((n for n in lengths if n is not None), default=None)

        return self._run(_Pass(what, batches, bounded, until, trains=True), run)

    def evaluate(
        self, what: str, batches: Batches, window: int | None, ticks: Ticks, around: Around = alone
    ) -> StopRequest:
        """Evaluate a pass, which the last stage counts; return what signals asked for if it ended early."""

        def run(sizes: list[Size]) -> int:
            with around(sizes) as (_, stop_check):
                return self.session.evaluate(sizes, batches, ticks(len(sizes)), stop_check)

        for done in self._run(_Pass(what, batches, lambda done: window, lambda done: 0), run):
            if done.early:
                return done.request
        return ""

    def predict(
        self, what: str, batches: Batches, window: int, ticks: Ticks
    ) -> Iterator[tuple[Tensor, ...] | None]:
        """Yield the outputs for each batch of a pass, in host memory, on rank 0; None on the others."""
        outputs: list[tuple[Tensor, ...]] = []  # of the window that has just run

        def run(sizes: list[Size]) -> int:
            made = self.session.predict(sizes, batches, ticks(len(sizes)))
            outputs[:] = gather_outputs(made, len(sizes), self._groups, self.session.plan.placement[-1])
            return len(sizes)

        for done in self._run(_Pass(what, batches, lambda done: window), run):
            yield from [None] * len(done.sizes) if self._groups.world.rank else outputs

    def _run(self, this: _Pass, run: Callable[[list[Size]], int]) -> Iterator[WindowResult]:
        """Run a pass. `run` runs a window of batches of such sizes, and returns how many it has run."""
        done, reads_ahead = 0, this.until is not None
        began = time.perf_counter()  # of reading these windows
        word = self._exchange(this, done)
        while windows := self._following(word):
            sizes, ran, early = list[Size](), 0, False
            for window in windows:
                if early or (this.trains and self._too_small(window)):
                    break
                with self._guard():
                    batches = run(window)
                sizes += window[:batches]
                early = batches < len(window)
                ran += 1
            if ran:
                done += len(sizes)
                if this.trains:
                    self._window_s = (time.perf_counter() - began) / ran
                began = time.perf_counter()
                word = self._exchange(this, done, reads_ahead, reports=this.trains or early)
                over = reads_ahead and not (word.windows or word.failure)
                yield WindowResult(sizes, word.losses, word.rates, word.request, early, over)
            if ran < len(windows) and not early:  # and the updates before it were seen
                raise of_all(BadBatch(self._too_small(windows[ran])), self._groups.world.rank)
            if not reads_ahead:
                word = self._announce(this, done)

    def _too_small(self, window: list[Size]) -> str:
        return too_small(window, self.session.plan.settings.microbatches)

    def _following(self, word: WindowWord) -> list[list[Size]]:
        raise_failure(word.error, word.failure, 0)
        if word.windows is None:
            raise of_all(ConfigError(NO_BATCH), self._groups.world.rank)
        return word.windows

    def _exchange(self, this: _Pass, done: int, reads: bool = True, reports: bool = False) -> WindowWord:
        """Exchange a word; rank 0 `reads` which batches come next. `reports`: also losses and signals."""
        last = self.session.last
        windows, error = self._read(this, done) if reads else (None, None)
        with self._guard():
            with self.session.engine.deadline.waiting():
                losses = last.counts.take_losses() if reports and last else []
            rates = self.session.take_rates() if reports else []
            mine = [
                _as_json(windows),
                failure_of(error),
                losses,
                rates,
                self._take_request() if reports else "",
            ]
            words = self._groups.gather(f"the next window of {this.what}", mine)
        sizes, failure, *_ = words[0]
        parts = [words[rank][2] for rank in self.session.plan.placement[-1]]
        losses = [*map(sum, zip(*parts, strict=True))]  # each replica has its share
        rates = next((received for *_, received, _ in words if received), [])
        request: StopRequest = max((request for *_, request in words), key=ORDER.index)
        return WindowWord(_from_json(sizes), failure, error, losses, rates, request)

    def _announce(self, this: _Pass, done: int) -> WindowWord:
        """Let rank 0 say which batches come next, and begin with them without waiting for the others."""
        windows, error = self._read(this, done)
        with self._guard():
            mine = [_as_json(windows), failure_of(error)]
            what = f"the next window of {this.what}"
            refused = this.trains and any(map(self._too_small, windows or ()))
            sizes, failure = self._groups.announce(what, mine, ends=refused or not windows)
        return WindowWord(_from_json(sizes), failure, error, [], [], "")

    def _read(self, this: _Pass, done: int) -> tuple[list[list[Size]] | None, Exception | None]:
        """Read the next windows on rank 0; return also the error of it."""
        most = min(MOST_AHEAD, max(1, int(self._max_unsynced_s / max(self._window_s, 1e-6))))
        return (None, None) if self._groups.world.rank else attempt(lambda: this.next(done, most))


def _as_json(windows: list[list[Size]] | None) -> list[list[list[int]]] | None:
    return None if windows is None else [[size.to_json() for size in window] for window in windows]


def _from_json(windows: list[list[list[int]]] | None) -> list[list[Size]] | None:
    return None if windows is None else [[Size.from_json(size) for size in window] for window in windows]
