"""What Pipeline is given: read, and refused where it is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipetrain.config.build import Optim, make_schedule
from pipetrain.config.choices import names_of, nearest, shipped
from pipetrain.config.parameter_groups import title
from pipetrain.config.rate import LearningRate, asked_rate
from pipetrain.config.settings import AUTO, PIPELINE_OPTIONS, SEED, Settings
from pipetrain.data.batch import NamedTargets
from pipetrain.errors import ConfigError
from pipetrain.model.deferred_init import Factory, Initial, build
from pipetrain.model.requirements import own_dtype, require_module
from pipetrain.model.specs import Value
from pipetrain.plan.staleness_advice import settled
from pipetrain.plan.verification import Draft
from pipetrain.runtime.stage.optimizer_trial import trial_optimizer, try_optimizer
from pipetrain.runtime.stage.parameter_store import OptimizerFactory
from pipetrain.schedule.actions import Schedule, parse_program
from pipetrain.schedule.fixed_program import FixedProgram
from pipetrain.schedule.lower import ADDED
from pipetrain.tasks import LossFunction, Metric, ModelLoss, Task
from pipetrain.tasks.metrics import MetricFunction

_ELSEWHERE = {  # what is no argument of Pipeline, and where it is given
    "the optimizer, as in optimizer=lambda p: torch.optim.SGD(p, lr=0.1)": ("lr", "weight_decay", "momentum"),
    "the DataLoader": ("batch_size", "num_workers", "shuffle", "drop_last"),
    "pipetrain.fit": ("epochs", "max_updates", "run_dir", "resume", "checkpoint", "loggers", "log_every"),
}
_ARGUMENTS = (  # beside the options
    "model", "loss", "optimizer", "schedule", "task", "metrics", "weight", "param_groups", "lr_schedule",
    "sample", "targets", "weights",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Arguments:
    """What Pipeline is asked to train and how, proven as far as it can be without a batch.

    `whole_optimizer`: one like all stages' together; `optim`: its name and options; `lr`: its rate at first.
    """

    model: nn.Module
    task: Task
    draft: Draft
    optimizer: OptimizerFactory
    whole_optimizer: Optimizer
    optim: Mapping[str, Any]
    rate: LearningRate
    lr: float

    @classmethod
    def read(
        cls,
        model: nn.Module,
        task: Task,
        draft: Draft,
        optimizer: Callable[[Any], Optimizer] | Optim | None,
        groups: Mapping[str, Mapping[str, Any]] | None,
        lr_schedule: Any,
    ) -> Arguments:
        """Read the rest of the arguments. Raises ConfigError and ScheduleError."""
        optim = read_optimizer(optimizer, groups)
        require_module(model, "Pipeline needs", draft.settings.weights_dtype)
        if draft.settings.replicas != AUTO:  # else the chosen ones have another draft
            draft.refuse_unsound()
        if (rank := draft.placement[0][0]) != 0:
            raise ConfigError(
                f"schedule {draft.settings.schedule} has stage 0 on rank {rank}, and rank 0 reads the "
                f"batches: let rank 0 have it"
            )
        factory = try_optimizer(optim, model, len(draft.placement))
        whole_optimizer, named = trial_optimizer(factory, model)
        first = whole_optimizer.param_groups[0]
        lr = float(first.get("lr") or 0.0)
        shown = next(name for name, p in named if any(p is parameter for parameter in first["params"]))
        rate = asked_rate(lr_schedule, shown, whole_optimizer)
        options = optim.options or {"_target_": title(whole_optimizer)}
        settings = settled(draft.settings, str(options["_target_"]), len(draft.placement))
        draft = replace(draft, settings=settings)
        return cls(model, task, draft, factory, whole_optimizer, options, rate, lr)


def read_optimizer(function: Any, groups: Mapping[str, Mapping[str, Any]] | None) -> Optim:
    """Return the optimizer of a program's function of parameters and `param_groups`. Raises ConfigError."""
    if isinstance(function, Optim):
        return function
    name = getattr(function, "__qualname__", type(function).__qualname__)
    if not callable(function):
        kinds = {kind.lower(): kind for kind in dir(torch.optim)}
        named = name if hasattr(function, "param_groups") else str(function)
        example = f"torch.optim.{kinds.get(named.lower(), 'SGD')}"
        raise ConfigError(
            f"Pipeline needs optimizer=, such as lambda p: {example}(p, ...), a function of a stage's own "
            f"parameters; got {name}"
        )
    return Optim(name, [function], "param_groups", groups, {})


def read_task(
    loss: LossFunction | Task | str | None,
    task: Task | None,
    metrics: Sequence[Metric] | Mapping[str, MetricFunction],
    weight: Callable[[Value], Tensor | float] | None,
    targets: str | Sequence[str] | None = None,
) -> Task:
    """Return the task of Pipeline's arguments. Raises ConfigError."""
    if isinstance(loss, type):
        raise ConfigError(f"loss={loss.__name__} is a class: give an object of it, {loss.__name__}()")
    if task is not None and not isinstance(task, Task):
        raise ConfigError(f"task={task!r} must be a Task, such as pipetrain.Classification(); or give loss=")
    listed = isinstance(metrics, Sequence) and all(isinstance(metric, Metric) for metric in metrics)
    if not (listed or isinstance(metrics, Mapping)):
        raise ConfigError("metrics must be a list of Metric or a dict of functions: metrics={NAME: function}")
    task = loss if isinstance(loss, Task) else task
    if task is not None:
        if metrics or weight or (loss is not None and loss is not task):
            raise ConfigError("a Task has its loss, metrics and weight: give these to it, not to Pipeline")
        return task
    if loss == "model":
        return ModelLoss(_names_of(targets) or "labels", metrics, weight)
    if not callable(loss):
        raise ConfigError(
            f"Pipeline needs loss=, a function (outputs, targets) -> mean, or a Task, or loss='model' where "
            f"the model computes it; got {loss!r}"
        )
    return Task(loss, metrics, weight)


def read_targets(targets: str | Sequence[str] | None, task: Task) -> NamedTargets | None:
    """Return the names of the targets where batches are dicts. Raises ConfigError."""
    names = _names_of(targets)
    if isinstance(task, ModelLoss):
        labels = task.labels
        if names is not None and names not in (labels, labels[0]):
            raise ConfigError(
                f"a ModelLoss has the names of its labels: give them to it, ModelLoss({targets!r})"
            )
        return NamedTargets(labels[0] if len(labels) == 1 else labels, as_inputs=True)
    return None if names is None else NamedTargets(names)


def _names_of(targets: str | Sequence[str] | None) -> str | tuple[str, ...] | None:
    if targets is None or (isinstance(targets, str) and targets):
        return targets
    names = tuple(targets) if isinstance(targets, list | tuple) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"targets={targets!r} must be the name of the targets in a batch, as in targets='label', or names"
        )
    return names


def read_draft(
    schedule: str | Path | Schedule,
    settings: Settings | None,
    options: Mapping[str, Any],
    model: object,
    ranks: int,
) -> Draft:
    """Return the draft of a schedule, by settings or else by keyword options.

    It is given by name, as a function, or as the path of a program's file. Without window= one of these has a
    window of one batch, or of the whole pass where it is asynchronous. Raises ConfigError and ScheduleError.
    """
    name, function, defaults = read_schedule(schedule)
    if settings is not None:
        return Draft.from_settings(settings, function)
    draft = Draft.from_settings(read_options(options, model, name, defaults, ranks), function)
    if options.get("window") is not None or "window" in defaults:
        return draft
    whole = draft.reads_late and draft.least == 1
    return replace(draft, settings=replace(draft.settings, window=None if whole else draft.least))


def read_options(
    keywords: Mapping[str, Any], model: object, schedule: str, defaults: Mapping[str, Any], ranks: int
) -> Settings:
    """Return the settings of keyword options; None is as not given. Raises ConfigError.

    `defaults`: of the schedule. Without dtype= the weights have their own.
    """
    _refuse_unknown(keywords)
    options = {name: value for name, value in keywords.items() if value is not None}
    its_dtype = own_dtype(model)
    values = {**defaults, "dtype": its_dtype or torch.float32, **options}
    about: dict[str, Any] = {"model": type(model).__name__, "schedule": schedule, "samples": None}
    typed = "dtype" in options
    return Settings.read(
        values, ranks, **about, casts_weights=typed, casts_data=typed or its_dtype is not None
    )


def _refuse_unknown(keywords: Iterable[str]) -> None:
    places = {name: place for place, names in _ELSEWHERE.items() for name in names}
    for name in sorted(set(keywords).difference(PIPELINE_OPTIONS)):
        names = [*PIPELINE_OPTIONS, *_ARGUMENTS, *places]
        longer = [other for other in names if other.startswith(f"{name}_")]
        close = [name] if name in places else longer or nearest(name, names)
        if close and close[0] in places:
            raise ConfigError(f"Pipeline takes no {name}: give {close[0]} to {places[close[0]]}")
        meant = f"did you mean {' or '.join(close)}" if close else f"choose of {', '.join(PIPELINE_OPTIONS)}"
        raise ConfigError(f"Pipeline takes no {name}; {meant}")


def read_schedule(schedule: str | Path | Schedule) -> tuple[str, Schedule, dict[str, Any]]:
    """Return the name and the function of a schedule, and the defaults that it brings. Raises ConfigError."""
    defaults = {"microbatches": 1}
    if callable(schedule):
        return str(getattr(schedule, "__name__", type(schedule).__name__)), schedule, defaults
    if isinstance(schedule, str) and (chosen := shipped("schedule", schedule)) is not None:
        return schedule, make_schedule(chosen), {key: chosen[key] for key in ("microbatches", "window")}
    names = ", ".join(names_of("schedule"))
    try:
        program = parse_program(Path(schedule).read_text())
    except (OSError, TypeError) as error:
        raise ConfigError(f"schedule={schedule} is neither a function, a file nor one of {names}") from error
    program = [[action for action in actions if action.op not in ADDED] for actions in program]
    return Path(schedule).stem, FixedProgram(str(schedule), program), defaults


def read_model(model: nn.Module | Factory, seed: Any) -> tuple[nn.Module, Initial | None]:
    """Return a model, or a factory's model without numbers and where these come from. Raises ConfigError."""
    if callable(model) and not isinstance(model, nn.Module):
        return build(model, SEED.read("seed", seed, null=True) or 0)
    return model, None
