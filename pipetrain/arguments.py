"""What a program gives Pipeline, read and refused where it is wrong."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_flatten_with_path

from pipetrain.building import make_schedule, names_of, shipped
from pipetrain.data.loading import NamedTargets
from pipetrain.errors import ConfigError
from pipetrain.network.boundary import Value, bytes_of
from pipetrain.network.chain import Chain
from pipetrain.network.deferred import Deferred
from pipetrain.network.factory import Factory, build
from pipetrain.network.loan import renewed
from pipetrain.network.materialise import named_tensors
from pipetrain.network.network import Network
from pipetrain.rate import Rate, learning_rate
from pipetrain.runtime.mesh import Mesh
from pipetrain.schedule.actions import (
    UPDATE,
    Action,
    Op,
    Program,
    Schedule,
    ScheduleError,
    format_program,
    parse_program,
)
from pipetrain.schedule.lower import ADDED
from pipetrain.settings import PIPELINE_OPTIONS, SEED, Settings, refuse_unknown
from pipetrain.tasks import LossFunction, Metric, ModelLoss, Task
from pipetrain.tasks.metrics import MetricFunction

COMPARED_UPDATES = (0, 1, 2, 3, 10)  # whose learning rates are compared between ranks
_ARGUMENTS = (  # beside the options
    "model", "loss", "optimizer", "schedule", "task", "metrics", "weight", "param_groups", "lr_schedule",
    "sample", "targets", "weights",
)  # fmt: skip


def read_task(
    loss: LossFunction | Task | str | None,
    task: Task | None,
    metrics: Sequence[Metric] | Mapping[str, MetricFunction],
    weight: Callable[[Value], Tensor | float] | None,
    targets: str | Sequence[str] | None = None,
) -> Task:
    """Return the task of Pipeline's arguments. Raises ConfigError."""
    for name, given in (("loss", loss), ("task", task)):
        if isinstance(given, type):
            raise ConfigError(f"{name}={given.__name__} is a class: give an object of it, {given.__name__}()")
    if task is not None and not isinstance(task, Task):
        raise ConfigError(f"task={task!r} must be a Task, such as pipetrain.Classification(); or give loss=")
    if not _are_metrics(metrics):
        raise ConfigError("metrics must be a list of Metric or a dict of functions: metrics={NAME: function}")
    if weight is not None and not callable(weight):
        raise ConfigError(f"weight={weight!r} must be a function of targets: what they count for together")
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


def _are_metrics(given: object) -> bool:
    if isinstance(given, Mapping):
        return all(isinstance(name, str) and callable(metric) for name, metric in given.items())
    return isinstance(given, Sequence) and all(isinstance(metric, Metric) for metric in given)


def read_path(name: str, given: object) -> Path:
    """Return the path of a file or a folder. Raises ConfigError."""
    if isinstance(given, Mapping):
        raise ConfigError(
            f"{name} must be the path of a file or a folder; got {type(given).__name__}: to begin with a "
            f"state_dict, call model.load_state_dict(...) before Pipeline(model, ...)"
        )
    if not isinstance(given, str | PathLike) or not str(given):
        raise ConfigError(f"{name}={given!r} must be the path of a file or a folder")
    return Path(given)


def read_targets(targets: str | Sequence[str] | None, task: Task) -> NamedTargets | None:
    """Return the names of the targets where batches are dicts. Raises ConfigError."""
    names = _names_of(targets)
    if isinstance(task, ModelLoss):
        labels = task.labels
        if names is not None and names not in (labels, labels[0]):
            raise ConfigError(
                f"a ModelLoss has the names of its labels: give them to it, ModelLoss({targets!r})"
            )
        return NamedTargets(labels[0] if len(labels) == 1 else labels, kept=True)
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


def read_rate(lr_schedule: Rate | None) -> Rate:
    """Return the learning rate as a fraction of the optimizer's, tried for update 0. Raises ConfigError."""
    if lr_schedule is None:
        return lambda update: 1.0
    if not callable(lr_schedule):
        raise ConfigError(
            f"lr_schedule={lr_schedule} must be a function of the update number (0, 1, ...) that returns a "
            f"fraction of the optimizer's rate"
        )
    return learning_rate(lr_schedule, 0.0, 1)


def read_options(
    given: Mapping[str, Any], model: object, schedule: str, defaults: Mapping[str, Any], ranks: int
) -> Settings:
    """Return the settings of keyword options; None is as not given. Raises ConfigError.

    `defaults`: of the schedule. Without dtype= the weights have their own.
    """
    options = {name: value for name, value in given.items() if value is not None}
    refuse_unknown(given, PIPELINE_OPTIONS, _ARGUMENTS)
    own = own_dtype(model)
    values = {**defaults, "dtype": own or torch.float32, **options}
    values["batch_size"] = values["microbatches"]  # until the first batch
    as_given = own is None and "dtype" not in options
    known = {"model": type(model).__name__, "schedule": schedule, "as_given": as_given}
    return Settings.read(values, ranks, **known)


def conditions(settings: Settings, optimizer: Optimizer, program: Program, rate: Rate) -> dict[str, Any]:
    """Return what must be the same on all ranks: settings, program, rates, the optimizer with its options."""
    found = {"optimizer": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        of = f"optimizer.{number}" if number else "optimizer"
        found |= {f"{of}.{key}": value for key, value in group.items() if key != "params"}
    rates = {f"lr_schedule({update})": _rate_of(rate, update) for update in COMPARED_UPDATES}
    return {**settings.shared(), **found, **rates, "program": digest(program)}


def _rate_of(rate: Rate, update: int) -> float | str:
    try:
        return rate(update)
    except Exception as error:  # a user's function may end before
        return type(error).__name__


def digest(program: Program) -> int:
    """Return a checksum of a program."""
    return zlib.crc32(format_program(program).encode())


def prove_same(mesh: Mesh, what: str, mine: Mapping[str, Any]) -> None:
    """Refuse ranks that have different values under a name. Raises ConfigError, on all of them alike."""
    texts = {name: json.dumps(value, default=_in_words) for name, value in mine.items()}
    if len(set(mesh.gather(what, zlib.crc32(json.dumps(texts).encode())))) == 1:
        return
    first, *others = mesh.gather(what, texts)
    for rank, theirs in enumerate(others, start=1):
        for name in first | theirs:
            expected, other = (texts.get(name, "nothing") for texts in (first, theirs))
            if expected != other:
                raise ConfigError(
                    f"rank {rank} has {name}={other}, and rank 0 has {expected}: give "
                    f"Pipeline the same arguments on every rank"
                )


def _in_words(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor | np.generic) else type(value).__name__


def own_dtype(model: object) -> torch.dtype | None:
    """Return the dtype of all floating-point parameters; None if they have several, or less than float32."""
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    found = {p.dtype for p in parameters if p.is_floating_point()} or {torch.float32}
    return found.pop() if found in ({torch.float32}, {torch.float64}) else None


def read_schedule(schedule: str | Path | Schedule) -> tuple[str, Schedule, dict[str, Any]]:
    """Return the name, the function, and the default microbatches and window of a schedule.

    It is given by name, as a function, or as the path of a program's file. Raises ConfigError.
    """
    own = {"microbatches": 1, "window": 1}
    if callable(schedule):
        return str(getattr(schedule, "__name__", type(schedule).__name__)), schedule, own
    if isinstance(schedule, str) and (chosen := shipped("schedule", schedule)) is not None:
        return schedule, make_schedule(chosen), {key: chosen[key] for key in own}
    names = names_of("schedule")
    if not isinstance(schedule, str | Path):
        raise ConfigError(f"schedule={schedule} must be one of {names}, a function or the path of a file")
    try:
        program = parse_program(Path(schedule).read_text())
    except OSError as error:
        raise ConfigError(
            f"schedule={schedule} is neither a file nor one of {names}: {error.strerror}"
        ) from error
    program = [[action for action in actions if action.op not in ADDED] for actions in program]
    return Path(schedule).stem, FixedProgram(str(schedule), program), own


class FixedProgram:
    """The program of a file as a schedule: of one batch, and then of any number of them, or of one window."""

    def __init__(self, path: str, program: Program) -> None:
        self._path = path
        self._program = program
        stages = {action.stage for actions in program for action in actions}
        steps = [a for actions in program for a in actions if a.op is Op.STEP]
        self.batches = len(steps) // max(1, len(stages))

    def __call__(self, ranks: int, batches: int, microbatches: int) -> Program:
        """Return the program of a window. Raises ScheduleError if the file's is of another size."""
        found = {action.mb for actions in self._program for action in actions if action.op is Op.F}
        times, rest = divmod(batches, self.batches or 1)
        fits = len(self._program) == ranks and found == set(range(self.batches * microbatches))
        if not fits or rest or (times > 1 and self.batches > 1):
            raise ScheduleError(
                f"the program in {self._path} is of {len(self._program)} ranks, {self.batches} batches "
                f"and {len(found)} microbatches in all; there are {ranks} ranks, a window of {batches} "
                f"batches and microbatches={microbatches} a batch: start {len(self._program)} processes, and "
                f"set microbatches={len(found) // (self.batches or 1)}"
            )
        return [
            [self._later(action, batch, microbatches) for batch in range(times) for action in actions]
            for actions in self._program
        ]

    @staticmethod
    def _later(action: Action, batch: int, microbatches: int) -> Action:
        shift = 0 if action.op in UPDATE else batch * microbatches  # an update has no microbatch
        return replace(action, mb=action.mb + shift, version=action.version + batch)


def read_model(model: nn.Module | Factory, seed: Any) -> tuple[nn.Module, Deferred | None]:
    """Return a model; if a factory is given, without its numbers, and where these come from.

    Raises ConfigError for a factory that fails, and a model that is not in host memory.
    """
    if callable(model) and not isinstance(model, nn.Module):
        return build(model, int(seed) if SEED.holds(seed) else 0)  # a wrong one is refused with the settings
    if isinstance(model, nn.Module):
        renewed(model)
        _refuse_elsewhere(model)
    return model, None


def _refuse_elsewhere(model: nn.Module) -> None:
    for name, tensor in named_tensors(model).items():
        if tensor.is_meta:
            raise ConfigError(
                f"{name} of the model is on the meta device and has no values: give the function that makes "
                f"the model in place of it, Pipeline(lambda: ...)"
            )
        if tensor.device.type != "cpu":
            raise ConfigError(
                f"{name} of the model is on {tensor.device}: build the model on the CPU, and Pipeline moves "
                f"the stages of each rank to its device"
            )


def level(model: nn.Module, mesh: Mesh, record: Deferred | None = None) -> None:
    """Let all ranks start from the tensors of rank 0. Raises ConfigError if their models differ in form.

    Weights, buffers, and the tensors among its attributes. Those without numbers follow from the `record` of
    the factory, which must be the same on all ranks.
    """
    made = record.digest if record else 0
    level_tensors("the model", named_tensors(model) | tensor_attributes(model), mesh, made)


def level_tensors(what: str, tensors: Mapping[str, Tensor], mesh: Mesh, made: int = 0) -> None:
    """Give tensors in host memory the numbers that they have on rank 0. Raises ConfigError as `level` does.

    `made`: the digest of the factory's record.
    """
    forms = [[name, str(t.dtype), list(t.shape)] for name, t in tensors.items()]
    held = {name: t for name, t in tensors.items() if t.device.type == "cpu"}
    digests = [zlib.crc32(bytes_of(t).numpy().data) for t in held.values()]
    told = mesh.gather(what, [zlib.crc32(json.dumps([forms, [*held]]).encode()), made, digests])
    for rank, (form, making, _) in enumerate(told):
        if form != told[0][0]:
            raise ConfigError(
                f"rank {rank} built another model than rank 0: its parameters, or other tensors, differ in "
                f"name, dtype or shape; build the same model on every rank"
            )
        if making != told[0][1]:
            raise ConfigError(
                f"the model's factory initialises it otherwise on rank {rank} than on rank 0: let it depend "
                f"on nothing that differs between ranks"
            )
    for tensor, *sums in zip(held.values(), *(digests for *_, digests in told), strict=True):
        if len(set(sums)) > 1:
            mesh.copy_from_first("the initial weights", tensor.data)


def tensor_attributes(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors in attributes, and in collections there, that are no weights or buffers."""
    known = {id(tensor) for tensor in named_tensors(model).values()}
    return {
        f"{name}.{key}{keystr(path)}".lstrip("."): leaf
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        for path, leaf in tree_flatten_with_path(value)[0]
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and id(leaf) not in known
    }


def copied(network: Network) -> Network:
    """Return a copy of a chain to plan with; itself if it cannot be copied, or is traced."""
    if not isinstance(network, Chain):
        return network
    try:
        return network.twin()
    except Exception:  # a layer may hold anything
        return network
