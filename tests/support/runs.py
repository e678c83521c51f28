"""A run of a configuration for the threads and worlds of the tests: planned and trained, no command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from pipetrain.config.build import make_optimizer, make_schedule, make_task, model_of
from pipetrain.config.rate import LearningRate
from pipetrain.config.settings import Settings
from pipetrain.data import Data, DataFacts, Sampler
from pipetrain.data.sampling import Sampled, even
from pipetrain.model import factory
from pipetrain.model.chain import network_of
from pipetrain.model.network import Network
from pipetrain.model.requirements import require_module
from pipetrain.model.specs import ValueSpec
from pipetrain.plan import make_plan as planning
from pipetrain.plan.cost_estimate import estimates
from pipetrain.plan.memory_fit import optimizer_state
from pipetrain.plan.plan import Plan, Samples
from pipetrain.plan.program import Draft
from pipetrain.records.history import About
from pipetrain.records.recorder import Recorder
from pipetrain.runtime.comm.collective_guard import CollectiveGuard
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.runtime.microbatch_feed import Batches
from pipetrain.runtime.sample_index_feed import SampleIndexBatches
from pipetrain.runtime.session import Session
from pipetrain.runtime.stage.optimizer_trial import try_optimizer
from pipetrain.runtime.stage.parameter_store import OptimizerFactory
from pipetrain.runtime.stage.stage_factory import make_stages
from pipetrain.tasks import Task
from pipetrain.trainer import run as trainer
from pipetrain.trainer.fit import run_epochs
from pipetrain.trainer.listeners import Checkpoints, listeners_of
from pipetrain.trainer.window_stop import WindowStop


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
        made, values = factory.build(made, settings.seed)
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
        plan = planning.make_plan(draft, network, facts.example, samples, None, state, task)
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
