"""The loop over windows: what is read when, how many run between two words, and who hears of an error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

from pipetrain.correction import Correction
from pipetrain.data.batch import BadBatch
from pipetrain.data.reader import Reader
from pipetrain.errors import ConfigError, TrainingStopped
from pipetrain.model.specs import Size
from pipetrain.runtime.comm.collective_guard import CollectiveGuard
from pipetrain.runtime.comm.collectives import World
from pipetrain.runtime.comm.transfer_watch import Deadline
from pipetrain.runtime.window_record import WindowHooks, WindowRecord
from pipetrain.trainer import window_loop as module
from pipetrain.trainer.window_loop import Pass, WindowResult, Windows
from tests.support.thread_ranks import LocalLinks, Wire, in_threads

AHEAD: dict[str, Any] = {"reads_ahead": True}  # nobody looks before the end of the pass


class Source:
    """Batches of so many samples, or errors; notes what is read. `read_s`: that reading a window takes."""

    def __init__(
        self, log: list[str], *batches: int | Exception, clock: Any = None, read_s: float = 0.0
    ) -> None:
        self.log, self._batches, self._read = log, batches, 0
        self._clock, self._read_s = clock, read_s

    def next(self, window: int | None) -> list[Size] | None:
        if self._clock is not None:
            self._clock.now += self._read_s
        batches = self._batches[self._read :][:window]
        for one in batches:
            if isinstance(one, Exception):
                raise one
        self._read += len(batches)
        self.log.append(f"read {len(batches)}")
        return [*map(Size, batches)] if self._batches else None  # type: ignore[arg-type]


class Read:
    """Batches of a real loader, as rank 0 reads them."""

    def __init__(self, loader: Any, clock: Any, read_s: float) -> None:
        self._reader, self._clock, self._read_s = Reader(loader, "batch"), clock, read_s
        self.trained: list[int] = []

    def next(self, window: int | None) -> list[Size] | None:
        self._clock.now += self._read_s
        return self._reader.window(window)

    def train(self, sizes: Sequence[Size]) -> None:
        self.trained += [label for size in sizes for label in self._reader.take(size)[1].tolist()]


class Fake:
    """A session whose windows take `train_s` each; the loss of a batch is its size."""

    train_s = 1.0
    evaluate = predict = None

    def __init__(self, log: list[str], clock: Any, ends: int = 0) -> None:
        settings = SimpleNamespace(microbatches=2, correction=Correction())
        self.plan = SimpleNamespace(settings=settings, placement=[(0,), (1,)])
        self._groups = SimpleNamespace(world=SimpleNamespace(rank=0))
        self.log, self.clock, self._ends, self._losses = log, clock, ends, list[float]()
        self.updates, self.engine = 0, SimpleNamespace(deadline=Deadline(60))
        self.last: Any = SimpleNamespace(counts=self)

    def train(self, sizes: Sequence[Size], batches: Any, watch: WindowHooks) -> WindowRecord:
        self.clock.now += self.train_s
        if isinstance(batches, Read):
            batches.train(sizes)
        self.log.append(f"train {len(sizes)}")
        self._losses += [size.samples for size in sizes[: self._ends or None]]
        return WindowRecord(sizes, self._ends or len(sizes))

    def take_losses(self) -> list[float]:
        losses, self._losses = self._losses, []
        return losses

    def take_learning_rates(self) -> list[float]:
        """The rates of the updates, which another rank knows than the one that knows the losses."""
        return [] if self.last else [0.5] * len(self.take_losses())


class Requests:
    """What signals ask for, one window after the other."""

    def __init__(self, requests: Iterable[str]) -> None:
        self._requests = iter(requests)

    def take(self) -> Any:
        return next(self._requests, "")


def a_pass(batches: Any, window: int | None, **how: Any) -> Pass:
    return Pass("training", "a pass", batches, window, **how)


class Rank:
    """The windows of one rank alone."""

    def __init__(
        self, monkeypatch: Any, max_unsynced_s: float = 0.0, ends: int = 0, request: Sequence[str] = ()
    ) -> None:
        self.clock = clock = SimpleNamespace(now=0.0)
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
        self.log: list[str] = []
        groups: Any = LocalLinks(World(0, 1), Wire([(0,), (1,)]), Barrier(1), [None])
        session: Any = Fake(self.log, clock, ends)
        session.plan.placement = [(0,), (0,)]
        self.session, guard = session, CollectiveGuard(groups, lambda: None)
        self.windows = Windows(session, guard, Requests(request), (), max_unsynced_s)

    def train(
        self, *batches: Any, window: int = 1, read_s: float = 0.0, **how: Any
    ) -> Iterator[WindowResult]:
        source = Source(self.log, *batches, clock=self.clock, read_s=read_s)
        return self.windows.run(a_pass(source, window, **how))


def test_nothing_is_read_before_who_looks_at_the_losses_has_seen_them(monkeypatch):
    """A loop that is left early leaves no update behind that it did not see, nor a batch that is lost."""
    rank = Rank(monkeypatch, max_unsynced_s=100.0)
    for done in rank.train(4, 5, 6):
        rank.log.append(f"saw {done.losses}")
        if done.losses == [5]:
            break
    assert rank.log == ["read 1", "train 1", "saw [4]", "read 1", "train 1", "saw [5]"]


def test_where_nobody_looks_as_many_windows_run_between_two_words_as_take_half_a_second(monkeypatch):
    """A window takes a second here. The first one is alone: how long it takes is not known."""
    rank = Rank(monkeypatch, max_unsynced_s=3.0)
    words = [
        ([size.samples for size in done.sizes], done.losses, done.over)
        for done in rank.train(*range(2, 10), **AHEAD)
    ]
    assert words == [
        ([2], [2], False),
        ([3, 4, 5], [3, 4, 5], False),
        ([6, 7, 8], [6, 7, 8], False),
        ([9], [9], True),
    ]


def test_a_slow_loader_is_not_read_ahead_while_all_ranks_wait(monkeypatch):
    """A stop is heard soon, and data workers go on beside the training."""
    rank = Rank(monkeypatch, max_unsynced_s=100.0)
    for _ in rank.train(*[4] * 4, read_s=0.2, **AHEAD):
        pass
    assert rank.log == ["read 1", "train 1"] * 4 + ["read 0"]
    slow, some = Rank(monkeypatch, max_unsynced_s=100.0), []
    for done in slow.train(*[4] * 7, read_s=0.002, **AHEAD):
        some.append(len(done.sizes))
    assert some == [1, 3, 3]


class BeginsAnew:
    """A loader that is its own iterator, and begins another pass when it is asked beyond its end."""

    def __init__(self, loader: Any) -> None:
        self._loader, self._ends = loader, 0

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._batches = iter(self._loader)
        return self

    def __next__(self) -> Any:
        batch = next(self._batches, None)
        if batch is None:
            self._batches, self._ends = iter(self._loader), self._ends + 1
            assert self._ends <= 2, "it was asked beyond its end"
            raise StopIteration
        return batch


LOADERS = {
    "sizes are known": lambda data, how: DataLoader(data, 4, **how),
    "sizes are not known": lambda data, how: DataLoader(
        data, 4, collate_fn=lambda s: default_collate(s), **how
    ),
    "it begins anew": lambda data, how: BeginsAnew(DataLoader(data, 4, **how)),
    "a list": lambda data, how: [*DataLoader(data, 4, **how)],
}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("window", [1, 3, 4, 10, None])
def test_however_fast_windows_are_read_and_trained_they_train_what_a_loop_reads(monkeypatch, loader, window):
    """Ten batches, the last one short, in two passes; what draws at its end does so once."""
    data = TensorDataset(torch.arange(38.0).reshape(38, 1), torch.arange(38))

    def made() -> tuple[Any, torch.Generator]:
        generator = torch.Generator().manual_seed(5)
        return LOADERS[loader](data, {"shuffle": True, "generator": generator}), generator

    plain, expected = made()
    orders = [[label for _, labels in plain for label in labels.tolist()] for _ in range(2)]
    for read_s, train_s in ((0.0, 0.0), (0.2, 1.0), (0.0, 0.06), (0.002, 0.0)):
        rank, (read, generator) = Rank(monkeypatch, max_unsynced_s=0.5), made()
        rank.session.train_s = train_s
        for order in orders:
            source = Read(read, rank.clock, read_s)
            for _ in rank.windows.run(a_pass(source, window, **AHEAD)):
                pass
            assert source.trained == order, (read_s, train_s)
        assert torch.equal(generator.get_state(), expected.get_state()), (read_s, train_s)


def test_a_word_comes_where_somebody_looks(monkeypatch):
    """After every fifth batch of windows of two, the end of a window that reaches it."""
    rank = Rank(monkeypatch, max_unsynced_s=100.0)
    passed = rank.train(*[4] * 14, window=2, look_every=5, **AHEAD)
    assert [len(done.sizes) for done in passed] == [2, 4, 4, 4]


@pytest.mark.parametrize("how", [{}, AHEAD])
def test_an_error_of_the_loader_comes_after_the_updates_before_it(monkeypatch, how):
    """However far ahead it is read."""
    passed, seen = Rank(monkeypatch, max_unsynced_s=100.0).train(4, 5, KeyError("third"), 7, **how), []
    with pytest.raises(KeyError, match="third"):
        seen.extend(loss for done in passed for loss in done.losses)
    assert seen == [4, 5]


@pytest.mark.parametrize("how", [{}, AHEAD])
def test_a_batch_that_cannot_be_cut_is_refused_after_the_updates_before_it(monkeypatch, how):
    passed, seen = Rank(monkeypatch, max_unsynced_s=100.0).train(4, 5, 6, 1, 7, **how), []
    with pytest.raises(BadBatch, match="a batch of 1 sample cannot be cut into microbatches=2"):
        seen.extend(loss for done in passed for loss in done.losses)
    assert seen == [4, 5, 6]


def test_a_pass_without_batches_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="the loader has no batch"):
        list(Rank(monkeypatch).train())


def test_what_signals_ask_for_is_heard_after_windows_alone(monkeypatch):
    rank = Rank(monkeypatch, request=["", "save", "stop"])
    assert [done.request for done in rank.train(4, 5, 6)] == ["", "save", "stop"]


def test_a_window_that_ends_early_ends_what_runs_at_once(monkeypatch):
    rank = Rank(monkeypatch, max_unsynced_s=100.0, ends=1)
    done = next(rank.train(*[4] * 9, window=3, **AHEAD))
    assert (done.sizes, done.early) == ([Size(4)], True)


def test_all_ranks_hear_the_losses_of_the_last_stage_what_one_was_asked_for_and_the_error_of_rank_0(
    monkeypatch,
):
    barrier, board, seen = Barrier(2), [None] * 2, dict[int, list[Any]]()
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    request = [["", "save"], ["stop", ""]]

    def work(rank: int) -> None:
        log: list[str] = []
        groups: Any = LocalLinks(World(rank, 2), Wire([(0,), (1,)]), barrier, board)
        session: Any = Fake(log, SimpleNamespace(now=0.0))
        session.last = session.last if rank else None
        guard = CollectiveGuard(groups, lambda: None)
        windows = Windows(session, guard, Requests(request[rank]), (), 0.0)
        source = Source(log, 4, 5, ConfigError("no more"))
        heard: list[Any] = seen.setdefault(rank, [])
        try:
            for done in windows.run(a_pass(source, 1)):
                heard.append((done.losses, done.rates, done.request))
        except (ConfigError, TrainingStopped) as error:
            heard += [str(error), log]

    in_threads(work, barrier)
    said = [([4], [0.5], "stop"), ([5], [0.5], "save")]
    assert seen[0] == [*said, "no more", ["read 1", "train 1", "read 1", "train 1"]]
    assert seen[1] == [*said, "rank 0 stopped: no more", ["train 1", "train 1"]]
