"""One case: a configuration on tiny data, trained by pipetrain and by the reference, and compared."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import repeat
from pathlib import Path
from threading import Barrier, Lock
from typing import Any, Self
from unittest.mock import patch

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from pipetrain.checkpoint.epoch_record import EpochRecord, Stats
from pipetrain.checkpoint.files import Manifest, Position, read_whole
from pipetrain.checkpoint.resume import Source, tensors_of
from pipetrain.checkpoint.writer import Writer
from pipetrain.commands.cli import as_hydra, values_of
from pipetrain.config.build import make_schedule
from pipetrain.config.choices import conf_dir
from pipetrain.data import Augment, Data, Images, load_augment
from pipetrain.model.random_numbers import Seeds, drawing
from pipetrain.records.tracer import Trace
from pipetrain.runtime import engine
from pipetrain.runtime.comm.collectives import World
from pipetrain.runtime.stage.stage import Stage
from pipetrain.schedule.actions import Op, Program, Tie, ranks_of
from pipetrain.signals import Signals, StopRequest
from pipetrain.tasks import IGNORED
from pipetrain.trainer.listeners import Checkpoints
from pipetrain.trainer.window_stop import WindowStop
from tests.support import DEADLINE_S, reference
from tests.support.runs import RankRun, Run, prepare, rank_run
from tests.support.thread_ranks import LocalChannel, Wire, in_threads

GROUPS = {path.name for path in conf_dir().iterdir() if path.is_dir()}
SCHEDULES = sorted(path.stem for path in (conf_dir() / "schedule").glob("*.yaml"))


@dataclass(frozen=True)
class Case:
    """`schedule` on `ranks` ranks with further overrides."""

    schedule: str
    ranks: int
    overrides: tuple[str, ...] = ()
    train_samples: int = 44  # with batches of 12: three whole ones and one of 8
    reference_model: str = ""  # a twin without recomputing
    ignored: tuple[int, ...] = ()  # the samples whose labels do not count
    early: tuple[int, int] | None = None  # the epoch, and after how many of its batches, a window was left

    def __str__(self) -> str:
        return f"{self.schedule} on {self.ranks}: {' '.join(self.overrides)}"


def config(overrides: Sequence[str]) -> DictConfig:
    """Compose the configuration as the command line would.

    By Hydra's own steps, but files of a group that choose no others are put in by themselves: that is most of
    its time. test_conf.py holds it against Hydra.
    """
    words = [_as_hydra(word) for word in overrides]
    choices = [word for word in words if re.split("[@=]", word)[0] in GROUPS]
    values = [_parsed(word) for word in words if word not in choices]
    alone = [word for word in choices if not word.startswith(("data=", "experiment=")) and _file(word)]
    if any(word.startswith("experiment=") for word in choices):
        alone = []  # it comes after the others
    cfg = deepcopy(_composed(tuple(word for word in choices if word not in alone)))
    for word in alone:
        package, content = word.partition("=")[0].split("@")[-1], _file(word)
        if package == "schedule":  # whose values are of the top level
            for key, value in content.items():
                cfg[key] = value
        else:
            OmegaConf.update(cfg, package, content, merge=False)
    ConfigLoaderImpl._apply_overrides_to_config(values, cfg)
    return cfg


@lru_cache(maxsize=4096)
def _as_hydra(word: str) -> str:
    (word,) = as_hydra([word])
    return word


@lru_cache(maxsize=4096)
def _parsed(word: str) -> Override:
    return OverridesParser.create().parse_override(word)


@lru_cache(maxsize=256)
def _file(choice: str) -> DictConfig | None:
    """The content of what a word chooses of a group; None if there is no such file, or it chooses others."""
    group, _, names = choice.partition("=")
    folder = conf_dir() / group.partition("@")[0]
    paths = [folder / f"{name}.yaml" for name in names.strip("[]").split(",") if name]
    if not all(path.exists() for path in paths):
        return None
    content = OmegaConf.merge({}, *map(OmegaConf.load, paths))
    return None if "defaults" in content else content  # type: ignore[return-value]


def options_of(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values of a configuration, as what it builds reads them."""
    values: dict[str, Any] = values_of(config(overrides))
    return values


def stages_of(schedule: str, ranks: int) -> int:
    """Return into how many stages `schedule`, as its YAML sets it, cuts a model."""
    return len(ranks_of(make_schedule(options_of([f"schedule={schedule}"]))(ranks, 1, ranks)))


@lru_cache(maxsize=128)
def _composed(choices: tuple[str, ...]) -> DictConfig:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("config", overrides=list(choices))


def tiny_data(cfg: Mapping[str, Any], train: int, ignored: Sequence[int] = ()) -> Data:
    """Random images, the same every time, with a configuration's augmentation and dtype.

    The labels of the samples `ignored` do not count.
    """
    generator = torch.Generator().manual_seed(1)
    dtype = torch.float64 if cfg["dtype"] == "float64" else torch.float32

    def split(n: int, ignored: Sequence[int], augment: Augment | None) -> Images:
        images = torch.randint(0, 256, (n, 3, 32, 32), dtype=torch.uint8, generator=generator)
        labels = torch.randint(0, 10, (n,), generator=generator)
        labels[list(ignored)] = IGNORED
        return Images(images, labels, (0.5,) * 3, (0.25,) * 3, augment, dtype)

    return Data("tiny", split(train, ignored, load_augment(cfg["data"])), split(11, (), None), 10)


def prepared(
    cfg: Mapping[str, Any], schedule: str, ranks: int, train: int, ignored: Sequence[int] = ()
) -> Run:
    """Prepare a run over tiny data."""
    return prepare(cfg, schedule, ranks, tiny_data(cfg, train, ignored))


@lru_cache(maxsize=8)
def make_run(case: Case) -> Run:
    """Prepare a case as a rank would, in float64."""
    cfg = options_of_case(case)
    return prepared(cfg, case.schedule, case.ranks, case.train_samples, case.ignored)


@lru_cache(maxsize=16)
def options_of_case(case: Case, model: str = "") -> dict[str, Any]:
    defaults = ["data=digits", "dtype=float64", "batch_size=12", "epochs=2", "optim.lr=0.05", "warmup=0.3"]
    defaults += ["lr_schedule=cosine", "model._target_=tests.support.models.with_norm"]
    defaults += ["data.augment.flip=true", f"timeout={DEADLINE_S}"]
    twin = model if "." in model else f"models.{model}"
    chosen = [f"model._target_=tests.support.{twin}"] if model else []
    return options_of([*defaults, f"schedule={case.schedule}", *case.overrides, *chosen])


def expected(case: Case, ran: Sequence[Program] = ()) -> reference.Outcome:
    """Train a case by the reference; where a policy decided the order, by the versions that were read."""
    run = make_run(case)
    if case.reference_model:
        cfg = options_of_case(case, case.reference_model)
        run = prepared(cfg, case.schedule, case.ranks, case.train_samples, case.ignored)
    delays = [_reads(program) for program in ran] or repeat(_delay(case, run))
    return reference.train(run.take_network().model, run, delays, dict([case.early] if case.early else []))


def _delay(case: Case, run: Run) -> reference.Delay:
    """The theory's delays; for a schedule that has none, what the plan's program says."""
    alone = all(len(ranks) == 1 for ranks in run.plan.placement)  # replicas change how many are ahead
    if case.schedule in reference.DELAYS and alone:
        buffer = options_of_case(case)["schedule"].get("buffer")
        more = [] if buffer is None else [buffer]
        return reference.DELAYS[case.schedule](run.plan.stages, run.settings.microbatches, *more)
    return _reads(run.plan.window.program)


def _reads(program: Program) -> reference.Delay:
    reads = {(a.stage, a.mb): a.version for actions in program for a in actions if a.op is Op.F}
    return lambda stage, mb: reads[stage, mb]


class Ran(list[EpochRecord]):
    """The figures of all epochs, and the programs of all windows that a policy decided."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[Program] = []


class Listener:
    """Stands in for the recorder: keeps the figures."""

    def __init__(self) -> None:
        self.epochs = Ran()
        self.traces: list[Trace] = []

    def close(self) -> None: ...

    def begin(self, history: Sequence[EpochRecord] = (), again: bool = False) -> None:
        self.epochs.extend(history)

    def tick(self, what: str, total: int) -> None: ...

    def epoch(self, figures: EpochRecord, held: Sequence[object] = (), ranks: Sequence[Stats] = ()) -> None:
        self.epochs.append(figures)

    def programs(self, epoch: int, programs: Sequence[Program]) -> None:
        self.epochs.ran.extend(programs)

    def trace(self, trace: Trace) -> None:
        self.traces.append(trace)


def state_of(rank: Any, run: Run) -> dict[str, Tensor]:
    """The weights and statistics of a rank's stages, by the whole model's names."""
    return {
        name: tensor.detach().clone()
        for stage in rank.session.stages.values()
        for name, tensor in stage.module.state_dict().items()
    }


def compare(case: Case, state: dict[str, Tensor], figures: Ran, tolerance: float = 1e-12) -> None:
    """Hold a trained state and its figures against the reference."""
    wanted = expected(case, figures.ran)
    names = state.keys() if case.reference_model else wanted.state.keys()  # a twin may name a weight twice
    assert state.keys() == wanted.state.keys() & names, case
    for name in names:
        torch.testing.assert_close(
            state[name],
            wanted.state[name],
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, name=name: f"{case}: {name}: {m}",
        )
    seen = [(f.trained["loss"], f.evaluated["loss"], f.score) for f in figures]
    torch.testing.assert_close(seen, wanted.epochs, rtol=1e-10, atol=1e-10, msg=lambda m: f"{case}: {m}")


class LocalRanks:
    """The ranks of threads of this process, as one of them tells and hears them."""

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
    """Hears no signals: asks for `asked` after so many windows."""

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
