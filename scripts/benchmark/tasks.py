"""What all contestants of a benchmark train: one model, one cut, one batch, one optimizer.

A task is overrides of the configuration, so that what is measured can be trained by the same words on the
command line; the others get the same stages and the same optimizer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from pipetrain import tasks
from pipetrain.commands.cli import composed, values_of
from pipetrain.config.build import make_model, make_optimizer, make_schedule, make_task
from pipetrain.config.settings import Settings
from pipetrain.data import load_data
from pipetrain.data.batch import Form
from pipetrain.model.chain import network_of
from pipetrain.model.specs import Size, ValueSpec, named_layers
from pipetrain.plan.costs import Profile
from pipetrain.plan.make_plan import estimate_model, make_plan
from pipetrain.plan.memory_fit import optimizer_state
from pipetrain.plan.plan import Plan, Samples
from pipetrain.plan.verification import Draft
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.runtime.layer_profile import measure
from pipetrain.runtime.stage.optimizer_trial import try_optimizer
from pipetrain.runtime.stage.parameter_store import OptimizerFactory
from pipetrain.tasks.task import IGNORED

LR = 1e-3  # low: the same random batch again and again must not blow up


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured. `quick` makes everything small, to see that it works and nothing else."""

    rounds: int = 5
    quick: bool = False


@dataclass(frozen=True, slots=True)
class Task:
    """Something to train: overrides, and the batch that all train on, again and again.

    `example`: the shape of a random sample, with one of `classes` at random; None: the batch is the first
    samples of the configured data set. `lengths`: whether batches of other lengths come too.
    """

    overrides: tuple[str, ...]
    example: tuple[int, ...] | None = (3, 32, 32)
    classes: int = 10
    lengths: bool = False

    def extended(self, *overrides: str) -> Task:
        """Return the task with more overrides."""
        return replace(self, overrides=(*self.overrides, *overrides))


@dataclass(frozen=True, slots=True)
class Job:
    """A task by one schedule: its plan, and what is trained by it. `samples`, `targets`: a batch [n, ...]."""

    plan: Plan
    model: nn.Sequential
    task: tasks.Task
    optimizer: OptimizerFactory
    samples: Tensor
    targets: Tensor

    @property
    def microbatches(self) -> int:
        """Into how many pieces a batch is cut."""
        return self.plan.settings.microbatches

    @property
    def size(self) -> Size:
        """The size of a microbatch."""
        full = self.plan.settings.full
        return replace(full, lengths=tuple(self.samples.shape[1:2])) if full.lengths else full

    def of_length(self, length: int) -> Job:
        """Return the job with the batch cut to a length, or where the plan has none, padded from there on."""
        if self.plan.settings.lengths:
            return replace(self, samples=self.samples[:, :length], targets=self.targets[:, :length])
        place = torch.arange(self.targets.shape[1])
        return replace(self, targets=self.targets.masked_fill(place >= length, IGNORED))

    def stage(self, index: int) -> nn.Sequential:
        """Return the layers of a stage."""
        slice = self.plan.cut.slices[index]
        return nn.Sequential(OrderedDict(named_layers(self.model)[slice.start : slice.end]))


@cache
def compose_task(task: Task, schedule: str) -> dict[str, Any]:
    """Return the configuration of a task."""
    recipe = ["lr_schedule=constant", "warmup=0", f"optim.lr={LR}", f"schedule={schedule}"]
    values: dict[str, Any] = values_of(composed("config", [*recipe, *task.overrides]))
    return values


def prepare(
    task: Task, schedule: str, ranks: int, window: int = 1, times: ProcessGroups | Profile | None = None
) -> Job:
    """Plan and prove a task as a training run does. `window`: its batches, where the schedule sets none.

    `times`: for partition=profile, a profile, or links on which it is measured; all ranks call this then.
    """
    cfg = compose_task(task, schedule)
    settings = Settings.composed(cfg, schedule, ranks)
    spare, model = (make_model(cfg, settings.seed, settings.dtype) for _ in range(2))
    assert isinstance(model, nn.Sequential), "a benchmark's model is compared as an nn.Sequential"
    samples, targets = _batch(task, cfg, settings)
    sizes: Samples | None = Samples.of([len(samples)] * window, [len(samples)])
    example = ValueSpec.in_batch(samples)
    if task.lengths:
        form = Form.of((samples, targets), (samples[:, 1:], targets[:, 1:]))
        settings, sizes = settings.fitted_to(form.size(samples, targets)), None
        example = replace(form.inputs, longest=settings.lengths, bounded=True)
    draft, objective = Draft.from_settings(settings, make_schedule(cfg)), make_task(cfg)
    optimizer = try_optimizer(make_optimizer(cfg), spare, len(draft.placement))
    estimated = estimate_model(settings, spare, example, sizes)
    if isinstance(times, ProcessGroups):
        network = network_of(make_model(cfg, settings.seed, settings.dtype), example)
        of_layers = estimated.layers, estimated.example, estimated.numerics
        times = measure(times, settings, {}, network, optimizer, *of_layers)
    plan = make_plan(draft, estimated, times, optimizer_state(optimizer), objective)
    return Job(plan, model, objective, optimizer, samples, targets)


def _batch(task: Task, cfg: Mapping[str, Any], settings: Settings) -> tuple[Tensor, Tensor]:
    n = settings.batch_size
    if task.example is not None:
        generator = torch.Generator().manual_seed(settings.seed)
        samples = torch.randn(n, *task.example, generator=generator, dtype=settings.dtype)
        return samples, torch.randint(task.classes, (n,), generator=generator)
    split, first = load_data(cfg["data"], settings.dtype).train, torch.arange(n)
    inputs, targets = split.inputs(first, None), split.targets(first, None)
    assert isinstance(inputs, Tensor)
    assert isinstance(targets, Tensor)
    return inputs.to(settings.dtype) if inputs.is_floating_point() else inputs, targets
