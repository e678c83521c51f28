"""A case: a configuration on tiny data, planned for its ranks, trained, and held against the reference."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import repeat
from typing import Any
from unittest.mock import patch

import torch
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from pipetrain.checkpoint.epoch_record import EpochRecord, Stats
from pipetrain.commands.cli import as_hydra, values_of
from pipetrain.config.build import make_optimizer, make_schedule, make_task, model_of
from pipetrain.config.choices import conf_dir
from pipetrain.config.rate import LearningRate
from pipetrain.config.settings import Settings
from pipetrain.data import Augment, Data, DataFacts, Images, Sampler, load_augment
from pipetrain.data.sampling import Sampled, even
from pipetrain.model import deferred_init
from pipetrain.model.chain import network_of
from pipetrain.model.network import Network
from pipetrain.model.requirements import require_module
from pipetrain.model.specs import ValueSpec
from pipetrain.plan import make_plan as planning
from pipetrain.plan.cost_estimate import estimates
from pipetrain.plan.memory_fit import optimizer_state
from pipetrain.plan.plan import Plan, Samples
from pipetrain.plan.verification import Draft
from pipetrain.records.history import About
from pipetrain.records.recorder import Recorder
from pipetrain.records.tracer import Trace
from pipetrain.runtime.comm.collective_guard import CollectiveGuard
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.runtime.microbatch_feed import Batches
from pipetrain.runtime.sample_index_feed import SampleIndexBatches
from pipetrain.runtime.session import Session
from pipetrain.runtime.stage.optimizer_trial import try_optimizer
from pipetrain.runtime.stage.parameter_store import OptimizerFactory
from pipetrain.runtime.stage.stage_factory import make_stages
from pipetrain.schedule.actions import Op, Program, ranks_of
from pipetrain.tasks import IGNORED, Task
from pipetrain.trainer import run as trainer
from pipetrain.trainer.fit import run_epochs
from pipetrain.trainer.listeners import Checkpoints, listeners_of
from pipetrain.trainer.window_stop import WindowStop
from tests.support import DEADLINE_S, reference

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


@dataclass(frozen=True)
class Run:
    """One training run before it starts; `data` is None on ranks that need no sample."""

    settings: Settings
    facts: DataFacts
    data: Data | None
    task: Task
    plan: Plan
    sampler: Sampler
    optimizer: OptimizerFactory
    lr: float
    take_network: Callable[[], Network]

    @property
    def evaluation_sizes(self) -> list[int]:
        return even(self.facts.test, self.settings.batch_size)

    @property
    def updates(self) -> int:
        return self.settings.epochs * len(self.sampler.batch_sizes)

    @property
    def about(self) -> About:
        """What the records say of it."""
        return About(self.settings, self.plan, self.task, self.facts, len(self.sampler.batch_sizes), self.lr)


@dataclass(frozen=True)
class RankRun:
    """A run on one rank, which has yet to begin."""

    state: trainer.Run
    recorder: Recorder | None
    stop: WindowStop | None = None
    checkpoints: Checkpoints | None = None

    @property
    def session(self) -> Session:
        return self.state.session

    def run(self) -> bool:
        """Train and evaluate all epochs, as fit does; return False if stopped."""
        saves = self.checkpoints
        listeners = listeners_of(self.state, self.recorder, None, self.stop, saves)
        looks = (saves.signals, saves.look_every) if saves else (None, None)
        self.state.begin(listeners, *looks, max_unsynced_s=0.0)
        return run_epochs(self.state)


def rank_run(run: Run, groups: ProcessGroups, recorder: Recorder | None = None) -> RankRun:
    """Return a run on one rank."""
    settings, data = run.settings, run.data
    # The whole model is built, as its initial weights depend on the order of layers, and then dropped.
    network = run.take_network()
    shown = next(name for name, p in network.model.named_parameters() if p.requires_grad)
    rate = LearningRate(settings.rate(run.updates), shown)
    stages = make_stages(run.plan, network, run.task, run.optimizer, rate, groups)
    session = Session(run.plan, stages, run.task, groups)
    # A seed per rank, for dropout; set after the model is built, whose weights use the seed itself.
    torch.manual_seed((settings.seed + 1_000_003 * (groups.world.rank + 1)) % 2**63)
    own = settings.seed, settings.workers, settings.timeout
    train = Sampled(data.train if data else None, run.sampler.batch_sizes, run.sampler, *own)
    test = Sampled(data.test if data else None, run.evaluation_sizes, None, *own)
    batches: Any = PassesByNumber(train, test, run.task, groups, run.plan)
    guard = CollectiveGuard(groups, lambda: None)
    return RankRun(trainer.Run(session, guard, run.about, batches), recorder)


@dataclass(frozen=True)
class PassesByNumber:
    """The passes over samples by number."""

    train_samples: Sampled
    test_samples: Sampled
    task: Task
    groups: ProcessGroups
    plan: Plan

    def train(self, epoch: int, done: int) -> Batches:
        return SampleIndexBatches(self.train_samples, self.task, self.groups, self.plan, epoch, done)

    def evaluate(self) -> Batches:
        return SampleIndexBatches(self.test_samples, self.task, self.groups, self.plan)

    def random(self, done: int) -> dict[str, Tensor]:
        return {}


def network_for(cfg: Mapping[str, Any], settings: Settings, example: ValueSpec) -> Network:
    """Build a configuration's model, for inputs like the example."""
    made, values = model_of(cfg, settings.seed), None
    if not isinstance(made, nn.Module):
        made, values = deferred_init.build(made, settings.seed)
    require_module(made, "the model must be", settings.dtype)
    return network_of(made, example.cast(settings.dtype), settings.precision == "bf16").with_values(values)


PLAIN = {"with_norm", "without_norm", "recomputing", "recomputing_reentrant", "skipping", "tied", "dropping"}


"""Models that no forward changes: the layers of each are estimated once for all runs."""


_known: dict[str, Any] = {}


def _once(key: Any, make: Callable[[], Any]) -> Any:
    """Return what `make` makes for a model of PLAIN, once for all runs that have the same key."""
    if key[0]["_target_"].removeprefix("tests.support.models.") not in PLAIN:
        return make()
    if (name := repr(key)) not in _known:
        _known[name] = make()
    return _known[name]


def prepare(cfg: Mapping[str, Any], schedule: str, ranks: int, data: Data) -> Run:
    """Build a run of a configuration."""
    settings, facts = Settings.composed(cfg, schedule, ranks), data.facts
    sampler = Sampler(
        facts.train, settings.batch_size, settings.microbatches, settings.seed, settings.drop_last
    )
    samples = Samples.of(sampler.batch_sizes, even(facts.test, settings.batch_size))
    network = network_for(cfg, settings, facts.example)
    task = make_task(cfg)
    draft = Draft.from_settings(settings, make_schedule(cfg))
    model = cfg["model"], settings.dtype, settings.precision, settings.memory_format, facts.example
    trying = partial(try_optimizer, make_optimizer(cfg), network.model, len(draft.placement))
    optimizer = _once((*model, cfg["optim"], len(draft.placement)), trying)
    state = _once((*model, cfg["optim"]), partial(optimizer_state, optimizer))

    def estimated(*given: Any) -> Any:
        sizes = [settings.full, *map(sorted, given[3:])]
        return _once((*model, sizes), partial(estimates, *given))

    with patch.object(planning, "estimates", estimated):
        model_estimates = planning.estimate_model(settings, network, facts.example, samples)
    plan = planning.make_plan(draft, model_estimates, None, state, task)
    return Run(
        settings=settings,
        facts=facts,
        data=data,
        task=task,
        plan=plan,
        sampler=sampler,
        optimizer=optimizer,
        lr=cfg["optim"]["lr"],
        take_network=partial(network_for, cfg, settings, plan.example),
    )


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
