"""The state of a Pipeline, collected, written and read when its program says so."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipetrain.checkpoint.files import (
    CHECKPOINTS,
    MANIFEST,
    PARTIAL,
    Manifest,
    Part,
    Position,
    Tensors,
    folder_name,
    folders,
    prune,
    publish,
    remove_unfinished,
    stage_file,
    write_part,
)
from pipetrain.checkpoint.plain import read_weights
from pipetrain.checkpoint.progress import Progress
from pipetrain.checkpoint.resume import difference
from pipetrain.checkpoint.source import Source, find_source
from pipetrain.checkpoint.state import (
    load,
    random_state,
    residual_state,
    saved_residuals,
    set_random_state,
    state_of,
)
from pipetrain.errors import ConfigError, TrainingStopped
from pipetrain.network.model import cast_exactly
from pipetrain.network.network import Network, Values
from pipetrain.network.places import named_tensors
from pipetrain.network.values import TensorSpec, bytes_of
from pipetrain.plan.cut import homes
from pipetrain.plan.plan import Plan
from pipetrain.runtime.mesh import Mesh
from pipetrain.runtime.session import Session, slots
from pipetrain.runtime.weights import OptimizerFactory
from pipetrain.schedule.timeline import StageStats
from pipetrain.untrusted import DamagedCheckpoint


def owners(network: Network, plan: Plan) -> dict[str, int]:
    """Return the rank of the first stage that holds each tensor, by its name in the model."""
    return {name: plan.placement[stage] for name, stage in homes(network, plan.cuts).items()}


def initial(model: nn.Module, values: Values | None, names: Collection[str]) -> dict[str, Tensor]:
    """Return tensors of a model that has not been trained, by name, with `values` before its own."""
    tensors = {name: tensor for name, tensor in named_tensors(model).items() if name in names}
    given = values.tensors(names) if values is not None else {}
    return {
        name: cast_exactly(name, given[name], mine.dtype) if name in given else mine
        for name, mine in tensors.items()
    }


def open_weights(path: str | Path, model: nn.Module, mesh: Mesh, rest: Values | None) -> Values:
    """Open the weights to begin with on all ranks. Raises ConfigError on all if one cannot."""
    found: list[Values] = []
    try:
        _agreed(mesh, "the weights", "read", lambda: found.append(read_weights(path, model, rest)))
    except TrainingStopped as error:
        raise ConfigError(str(error)) from error
    return found[0]


def own_tensors(runner: Session, names: Mapping[str, str], ema: bool = False) -> dict[str, Tensor]:
    """Return the tensors of this rank's stages by name; `names`: see `all_names`.

    `ema`: with the moving average of the weights.
    """
    found: dict[str, Tensor] = {}
    for stage in runner.stages.values():
        with stage.weights.averaged() if ema else nullcontext():
            for name, tensor in _all_named(stage.module):
                if name in names:  # not one that a layer has made as it ran
                    found.setdefault(names[name], tensor)
    return found


def all_names(model: nn.Module) -> dict[str, str]:
    """Return the name of each tensor of a model by all names that it has."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in _all_named(model)}


def _all_named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def merged(
    own: Mapping[str, Tensor], mesh: Mesh, specs: Mapping[str, TensorSpec], owners: Mapping[str, int]
) -> dict[str, Tensor]:
    """Return all tensors of the model by name, in host memory, on rank 0; none on the others.

    `own`: those of this rank's stages. Raises ChannelError.
    """
    found = {}
    for name, spec in specs.items():
        tensor = _on_first(f"{name} of the model", own.get(name), spec, mesh, owners[name])
        if tensor is not None:
            found[name] = tensor
    return found


def _on_first(what: str, mine: Tensor | None, spec: TensorSpec, mesh: Mesh, owner: int) -> Tensor | None:
    """Return on rank 0, in host memory, the tensor that its `owner` has; None on the others."""
    rank = mesh.world.rank
    if rank == owner:
        assert mine is not None
        if rank == 0:
            return mine.cpu()
        work = mesh.post_tensor(bytes_of(mine.detach().cpu()), 0)
        assert work is not None
        work.wait()
    elif rank == 0:
        sent = TensorSpec((spec.nbytes,), torch.uint8)
        return mesh.take_tensor(what, sent, owner).view(spec.dtype).reshape(spec.shape)
    return None


def brought(outputs: Sequence[tuple[Tensor, ...]], mesh: Mesh, owner: int) -> list[tuple[Tensor, ...]]:
    """Return on rank 0 the outputs that their `owner` has, in host memory; none on the others."""
    own = [[[list(t.shape), str(t.dtype).removeprefix("torch.")] for t in tensors] for tensors in outputs]
    told = mesh.tell("the forms of the outputs", own, owner)
    found = []
    for number, forms in enumerate(told):
        specs = [TensorSpec(tuple(shape), getattr(torch, dtype)) for shape, dtype in forms]
        mine = outputs[number] if outputs else [None] * len(specs)
        tensors = [_on_first("the outputs", t, s, mesh, owner) for t, s in zip(mine, specs, strict=True)]
        found.append(tuple(t for t in tensors if t is not None))
    return found


def save(
    folder: Path, runner: Session, mesh: Mesh, conditions: Mapping[str, Any], updates: int, keep: int | None
) -> Path:
    """Write a checkpoint under `folder`, and keep the newest `keep`; None: all. Return its folder.

    Raises TrainingStopped if a rank cannot write.
    """
    checkpoints = folder.expanduser().absolute() / CHECKPOINTS
    partial = checkpoints / (folder_name(updates) + PARTIAL)
    run: str = mesh.tell("the run's name", uuid.uuid4().hex)
    stages, plan = runner.stages, runner.plan

    def write() -> dict[str, list[Any]]:
        files = {stage_file(index): state_of(stage) for index, stage in stages.items()}
        files[stage_file(min(stages))] |= random_state(mesh.world.rank, mesh.device)
        files[stage_file(min(stages))] |= residual_state(runner.coding.residuals)
        metadata = {"run": run, "update": str(updates)}
        parts = {name: write_part(partial, name, tensors, metadata) for name, tensors in files.items()}
        return {name: [part.sha256, part.nbytes] for name, part in parts.items()}

    try:
        written = _agreed(mesh, "what it saved", "save", write)
        parts = {name: Part(*part) for one in written for name, part in one.items()}
        progress = Progress(stages={stage: StageStats() for stage in range(plan.stages)}).to_json()
        cuts: Any = plan.pipeline
        config = {"seed": runner.engine.seed}
        manifest = Manifest(run, Position(0, 0, updates), conditions, cuts, config, progress, parts)
        published = _agreed(
            mesh, "the checkpoint", "save", lambda: "" if mesh.world.rank else _kept(partial, manifest, keep)
        )
    except TrainingStopped:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Path(published[0])


def _kept(partial: Path, manifest: Manifest, keep: int | None) -> str:
    """Publish a checkpoint, and remove those before the newest `keep`; return its folder. Raises OSError."""
    final = publish(partial, manifest)
    if keep is not None:
        prune(final.parent, keep, final)
    remove_unfinished(final.parent)
    return str(final)


def find(folder: Path, mesh: Mesh, conditions: Mapping[str, Any]) -> Source | None:
    """Return the newest checkpoint under `folder`, or this one, verified; None if none was ever finished.

    Raises ConfigError on all ranks.
    """
    found: list[Source | None] = []
    try:
        _agreed(
            mesh, "the checkpoint that it found", "load", lambda: found.append(_found(folder, conditions))
        )
    except TrainingStopped as error:
        raise ConfigError(str(error)) from error
    return found[0]


def _found(folder: Path, conditions: Mapping[str, Any]) -> Source | None:
    checkpoints = folder.expanduser() / CHECKPOINTS
    if not folders(checkpoints) and not (folder.expanduser() / MANIFEST).exists():
        if checkpoints.is_dir():
            return None
        raise ConfigError(f"{folder} is neither a checkpoint nor a folder with {CHECKPOINTS}")
    source = find_source(str(folder), folder)
    assert source is not None
    theirs = source.manifest.conditions
    for key in conditions:
        if theirs.get(key) != conditions[key]:
            raise ConfigError(
                f"{source.folder} is of another model: {difference(key, theirs.get(key), conditions[key])}"
            )
    return source


def load_random(source: Source, mesh: Mesh) -> None:
    """Restore this rank's random state, if a rank of its number has saved one. Raises DamagedCheckpoint.

    That of rank 0 decides how a DataLoader shuffles, so this comes before the first batch is read.
    """
    tensors = Tensors(source.folder, list(source.manifest.parts))
    if f"random/{mesh.world.rank}/cpu" in tensors:
        set_random_state(tensors, mesh.world.rank, mesh.device)


def load_source(source: Source, runner: Session, mesh: Mesh, optimizer: OptimizerFactory) -> None:
    """Load a checkpoint's weights, optimizer state and seed; of the same pipeline, its codecs' residuals too.

    Raises DamagedCheckpoint.
    """
    tensors = Tensors(source.folder, list(source.manifest.parts))
    runner.engine.seed = source.manifest.config.get("seed", runner.engine.seed)
    for stage in runner.stages.values():
        load(stage, tensors, source.manifest.position.update, optimizer)
    if source.manifest.pipeline == runner.plan.pipeline:
        wanted = slots(runner.plan, mesh.world.rank)
        runner.coding.residuals = saved_residuals(tensors, wanted, mesh.device)


def _agreed(mesh: Mesh, what: str, verb: str, act: Callable[[], Any]) -> list[Any]:
    """Return what each rank's act returns. Raises TrainingStopped on all ranks if it fails on one."""
    try:
        mine = [act(), ""]
    except (OSError, TypeError, ValueError, DamagedCheckpoint) as error:
        mine = [None, f"rank {mesh.world.rank} cannot {verb}: {error}"]
    told = mesh.gather(what, mine)
    for _, failure in told:
        if failure:
            raise TrainingStopped(failure)
    return [made for made, _ in told]
