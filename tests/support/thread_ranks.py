"""Ranks that are threads of one process: messages with the bounds of a real channel, and runs of cases."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Barrier, Condition, Lock, Thread
from typing import Any, Self
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _python_dispatch

from pipetrain.checkpoint.files import Manifest, Position, read_whole
from pipetrain.checkpoint.resume import Source, tensors_of
from pipetrain.checkpoint.writer import Writer
from pipetrain.errors import ChannelError
from pipetrain.model.random_numbers import Seeds, drawing
from pipetrain.runtime import engine
from pipetrain.runtime.comm.collectives import World
from pipetrain.runtime.comm.message import Message, message_error
from pipetrain.runtime.comm.transfer_watch import Deadline
from pipetrain.runtime.stage.stage import Stage
from pipetrain.schedule.actions import Edge, Placement, Tie
from pipetrain.schedule.lower import Link
from pipetrain.signals import Signals, StopRequest
from pipetrain.trainer.listeners import Checkpoints
from pipetrain.trainer.window_stop import WindowStop
from tests.support import DEADLINE_S
from tests.support.cases import Case, Listener, Ran, RankRun, Run, make_run, rank_run, state_of


class LocalChannel:
    """One rank's Channel; the channels of all ranks share one `Wire`."""

    ordered = False

    def __init__(
        self, wire: Wire, buffer_size: int | Mapping[Edge, int], timeout: float, rank: int = 0
    ) -> None:
        self._wire = wire
        self._rank = rank
        self._bounds = buffer_size.__getitem__ if isinstance(buffer_size, Mapping) else lambda _: buffer_size
        self._timeout = timeout
        self.waited = 0.0
        self.transferred_bytes = 0
        self.deadline = Deadline(timeout)
        self._expected: dict[Link, deque[Message]] = {}
        self._begun: Counter[Tie] = Counter()
        self._received: Counter[Tie] = Counter()

    def expect(self, messages: Sequence[Message], watched: bool = False) -> None:
        for message in messages:
            self._expected.setdefault(message.link, deque()).append(message)
        with self._wire.changed:
            for edge, expected in self._expected.items():
                self._wire.posted[edge] = self._wire.taken[edge] + min(self._bounds(edge[0]), len(expected))
            self._wire.changed.notify_all()

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        wire, edge = self._wire, message.link
        with wire.changed:
            self._await(lambda: self.room(message), [], [message])
            wire.queues[edge].append((message, tuple(tensors)))  # copied later, as by a real channel
            wire.sent[edge] += 1
            wire.changed.notify_all()
        self.transferred_bytes += message.nbytes

    def post(self, message: Message) -> None:
        """Receives are posted ahead."""

    def recv(self, message: Message) -> tuple[Tensor, ...]:
        wire, edge = self._wire, message.link
        assert self._expected[edge].popleft() == message, f"{message.name} is not what was expected next"
        with wire.changed:
            self._await(lambda: self.arrived(message), [message], [])
            sent, tensors = wire.queues[edge].popleft()
            assert sent.mb == message.mb, f"{sent.name} came instead of {message.name}"
            wire.taken[edge] += 1
            wire.posted[edge] = wire.taken[edge] + min(self._bounds(edge[0]), len(self._expected[edge]))
            wire.changed.notify_all()
        self.transferred_bytes += message.nbytes
        return tuple(t.clone() for t in tensors)

    def truncate(self, mb: int) -> None:
        wire = self._wire
        with wire.changed:
            for edge, expected in self._expected.items():
                self._expected[edge] = left = deque(message for message in expected if message.mb < mb)
                assert wire.posted[edge] <= wire.taken[edge] + len(left), f"{edge}: posted beyond {mb}"

    def drain(self) -> None:
        left = [m.name for expected in self._expected.values() for m in expected]
        assert not left, f"never received: {left}"

    def arrived(self, message: Message) -> bool:
        return bool(self._wire.queues[message.link])

    def room(self, message: Message) -> bool:
        # Sends without a posted receive: at most the bound, this one included.
        edge = message.link
        return self._wire.sent[edge] - self._wire.posted[edge] < self._bounds(edge[0])

    def wait(self, receives: Sequence[Message], sends: Sequence[Message]) -> None:
        with self._wire.changed:
            self._await(
                lambda: any(map(self.arrived, receives)) or any(map(self.room, sends)), receives, sends
            )

    def buffers(self) -> list[tuple[Sequence[int], Tensor]]:
        return []  # it keeps references to the tensors of others

    def all_reduce(self, tie: Tie, numbers: Tensor, early: bool = False) -> None:
        with self._wire.changed:
            self._wire.numbers[tie, self._begun[tie]][self._rank] = numbers
            self._begun[tie] += 1
            self._wire.changed.notify_all()

    def begin(self, tie: Tie, early: bool = False) -> None:
        """A sum begins with `all_reduce`."""

    def reduced(self, tie: Tie) -> Tensor:
        numbers, start = self._wire.numbers[tie, self._received[tie]], time.monotonic()
        self._received[tie] += 1
        placement = self._wire.placement
        stages = [stage for stage in tie if stage in range(len(placement))] or range(len(placement))
        ranks = {rank for stage in stages for rank in placement[stage]}
        with self._wire.changed:
            if not self._wire.changed.wait_for(lambda: numbers.keys() == ranks, self._timeout):
                raise ChannelError(f"a rank waited {self._timeout:g} s for sums of the other ranks")
        self.waited += time.monotonic() - start
        return torch.stack([numbers[rank] for rank in sorted(numbers)]).sum(0)

    def _await(
        self, ready: Callable[[], bool], receives: Sequence[Message], sends: Sequence[Message]
    ) -> None:
        start = time.monotonic()
        if not self._wire.changed.wait_for(ready, self._timeout):
            raise message_error(receives, sends, self._timeout, "")
        self.waited += time.monotonic() - start


def in_threads(work: Callable[[int], object], barrier: Barrier) -> None:
    """Call `work` for each rank, in as many threads as meet at a barrier; raise what one of them raises."""
    errors: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [Thread(target=guarded, args=(rank,), daemon=True) for rank in range(barrier.parties)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + DEADLINE_S
    while not errors and any(thread.is_alive() for thread in threads) and time.monotonic() < end:
        threads[-1].join(0.02)
        time.sleep(0.002)
    # Torch notes for all threads together that one has a mode.
    _python_dispatch._is_in_torch_dispatch_mode = False
    if errors:
        raise errors[0]  # the other threads, which wait for this one, end at their deadline
    assert not any(thread.is_alive() for thread in threads), f"it did not end in {DEADLINE_S:g} s"


class Wire:
    """The queues and counts of each edge, shared by the local channels of one process.

    `placement`: the ranks of each stage.
    """

    def __init__(self, placement: Placement | None = None) -> None:
        self.placement = placement or [(0,), (1,)]
        self.changed = Condition()
        self.queues: defaultdict[Link, deque[tuple[Message, tuple[Tensor, ...]]]] = defaultdict(deque)
        self.sent: Counter[Link] = Counter()
        self.posted: Counter[Link] = Counter()
        self.taken: Counter[Link] = Counter()
        self.numbers: defaultdict[tuple[Tie, int], dict[int, Tensor]] = defaultdict(
            dict
        )  # (tie, sum) -> by rank


class LocalRanks:
    """Collectives of the ranks that are threads of this process, as one of them calls them."""

    def __init__(self, world: World, barrier: Barrier, board: list[Any]) -> None:
        self.world = world
        self._barrier, self._board = barrier, board

    def gather(self, what: str, item: object) -> list[Any]:
        self._board[self.world.rank] = json.loads(json.dumps(item))
        self._barrier.wait(DEADLINE_S)
        gathered = list(self._board)
        self._barrier.wait(DEADLINE_S)
        return gathered

    def maximum(self, what: str, mine: int) -> int:
        return max(self.gather(what, mine))

    def broadcast(self, what: str, item: object = None, source: int = 0) -> object:
        return self.gather(what, item)[source]

    def broadcast_nowait(self, what: str, item: object = None, ends: bool = False) -> object:
        return self.broadcast(what, item)


class LocalLinks(LocalRanks):
    """The links of one thread among several of this process."""

    def __init__(self, world: World, wire: Wire, barrier: Barrier, board: list[Any]) -> None:
        super().__init__(world, barrier, board)
        self.device, self.staged, self.ranks_on_gpu = torch.device("cpu"), False, 1
        self._wire = wire
        self.placement = wire.placement
        self._adding: LocalChannel | None = None

    def channel(self, buffer_size: int, channels_last: bool = False) -> LocalChannel:
        return LocalChannel(self._wire, buffer_size, DEADLINE_S, self.world.rank)

    def sum_over_ranks(self, tie: Tie, numbers: Tensor) -> Tensor:
        channel = self._adding = self._adding or self.channel(1)
        channel.all_reduce(("between windows", *tie), numbers)  # type: ignore[arg-type]
        return channel.reduced(("between windows", *tie))  # type: ignore[arg-type]

    def abandon(self, why: str) -> None: ...

    def first_error(self, why: str) -> tuple[int, str]:
        return self.world.rank, why

    def check(self) -> None: ...

    def clock_offset(self) -> tuple[float, float]:
        return 0.0, 0.0


class SavingRanks(LocalRanks):
    """The ranks of threads that save: each waits for itself alone, and beside it all tell what they wrote."""

    @classmethod
    def of(cls, ranks: int) -> list[Self]:
        barrier, board = Barrier(ranks), [None] * ranks
        return [cls(World(rank, ranks), barrier, board) for rank in range(ranks)]

    def maximum(self, what: str, mine: int) -> int:
        return mine

    def for_thread(self) -> LocalRanks:
        return self


class FixedSignals(Signals):
    """Has no handlers: requests a save or a stop after so many windows."""

    def __init__(self, at: int, request: StopRequest) -> None:
        super().__init__(0, str)
        self.windows_left, self.will_ask = at, request

    def take(self) -> StopRequest:
        self.windows_left -= 1
        return self.will_ask if self.windows_left == 0 else ""


class FixedEnd(WindowStop):
    """Ends a window early. `ends`: its number, evaluations counted, and after how many batches."""

    def __init__(self, signals: FixedSignals, ends: tuple[int, int]) -> None:
        super().__init__(signals, dist.HashStore(), False)  # type: ignore[attr-defined]
        self._ends, self._fixed = ends, signals

    def ends_window(self, batches: int, begun: int) -> bool:
        if (self._windows, batches) != self._ends:
            return False
        self._fixed.windows_left, self._fixed.will_ask = 1, "stop"
        return True


@dataclass(frozen=True)
class Saved:
    """Where and when the ranks of a case save."""

    folder: Path
    every: int | None = 1
    unit: str = "updates"
    keep: int = 1000
    at: int = 0
    request: StopRequest = ""
    ends: tuple[int, int] = (0, 0)
    config: dict[str, Any] = field(default_factory=dict)

    def listeners(self, runs: Sequence[RankRun], terms: dict[str, Any], seen: int) -> list[RankRun]:
        """The runs of all ranks, each of which saves. `seen`: the update from which they go on."""
        saving = SavingRanks.of(len(runs))
        saved = []
        for rank, run in enumerate(runs):
            signals = FixedSignals(self.at, self.request)
            writer: Any = Writer(self.folder, saving[rank], self.keep)  # type: ignore[arg-type]
            manifest = Manifest("a run", Position(), terms, run.session.plan.pipeline, self.config)
            every = self.every, self.unit, seen
            saves = Checkpoints(run.state, writer, signals, manifest, *every)
            saved.append(replace(run, stop=FixedEnd(signals, self.ends), checkpoints=saves))
        return saved


def run_in_threads(
    case: Case,
    listener: Listener | None = None,
    saved: Saved | None = None,
    source: Path | None = None,
    runs: Sequence[Run] = (),
) -> tuple[dict[str, Tensor], Ran]:
    """Train a case with one thread a rank over the local channel; return the whole state and the figures.

    It saves as `saved` says, and goes on from the checkpoint `source`. `runs`: what each rank has prepared,
    in place of the case's run on tiny data.
    """
    manifest = None if source is None else read_whole(source)
    run = runs[0] if runs else make_run(case)
    runs = runs or [run] * case.ranks
    seen, terms = manifest.position.update if manifest else 0, tensors_of(run.take_network().model)
    wire, barrier, board = Wire(run.plan.placement), Barrier(case.ranks), [None] * case.ranks
    listener, state = listener or Listener(), {}

    all_links = [LocalLinks(World(rank, case.ranks), wire, barrier, board) for rank in range(case.ranks)]
    # Here, one after the other: a model's weights come from the process's one random generator.
    trainers = [
        rank_run(runs[groups.world.rank], groups, None if groups.world.rank else listener)  # type: ignore[arg-type]
        for groups in all_links
    ]
    trainers = saved.listeners(trainers, terms, seen) if saved else trainers
    for trainer in trainers if manifest else ():
        trainer.state.restore(Source(source, manifest))  # type: ignore[arg-type]

    def work(rank: int) -> None:
        trainers[rank].run()
        state.update(state_of(trainers[rank], run))

    with drawing_in_turn() if any(layer.draws for layer in run.plan.layers) else nullcontext():
        in_threads(work, barrier)
    return state, listener.epochs


@contextmanager
def drawing_in_turn() -> Iterator[None]:
    """Let threads, which share torch's generators, run their forwards one at a time, and their backwards.

    In a backward torch.utils.checkpoint sets the generators.
    """
    lock, differentiate = Lock(), Stage._differentiate

    @contextmanager
    def alone(seeds: Seeds | None) -> Iterator[None]:
        with lock, drawing(seeds):
            yield

    def differentiate_alone(*args: Any) -> Any:
        with lock:
            return differentiate(*args)

    with patch.object(engine, "drawing", alone), patch.object(Stage, "_differentiate", differentiate_alone):
        yield
