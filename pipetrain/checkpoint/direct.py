"""Checkpoints of a Pipeline, written and read when its program says so."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipetrain.blueprint import Plan
from pipetrain.checkpoint.files import (
    CHECKPOINTS,
    PARTIAL,
    Manifest,
    Part,
    Position,
    Tensors,
    folder_name,
    publish,
    stage_file,
    write_part,
)
from pipetrain.checkpoint.resume import difference
from pipetrain.checkpoint.source import Source, find_source
from pipetrain.checkpoint.state import (
    load,
    random_state,
    residual_state,
    saved_residuals,
    set_random_state,
)
from pipetrain.errors import ConfigError, TrainingStopped
from pipetrain.runtime.coded import Feedback
from pipetrain.runtime.mesh import Mesh
from pipetrain.runtime.stage import Stage
from pipetrain.runtime.weights import OptimizerFactory
from pipetrain.schedule.timeline import StageStats
from pipetrain.training.assembly import slots
from pipetrain.training.figures import Progress


def save(
    folder: Path,
    stages: Mapping[int, Stage],
    mesh: Mesh,
    plan: Plan,
    conditions: Mapping[str, Any],
    feedback: Feedback,
    updates: int,
) -> Path:
    """Write a checkpoint under `folder`; return its folder. Raises TrainingStopped if a rank cannot."""
    checkpoints = folder.expanduser().absolute() / CHECKPOINTS
    partial = checkpoints / (folder_name(updates) + PARTIAL)
    run: str = mesh.tell("the run's name", uuid.uuid4().hex)

    def write() -> dict[str, list[Any]]:
        files = {stage_file(index): stage.state() for index, stage in stages.items()}
        files[stage_file(min(stages))] |= random_state(mesh.world.rank, mesh.device)
        files[stage_file(min(stages))] |= residual_state(feedback.residuals)
        metadata = {"run": run, "update": str(updates)}
        parts = {name: write_part(partial, name, tensors, metadata) for name, tensors in files.items()}
        return {name: [part.sha256, part.nbytes] for name, part in parts.items()}

    written = _agreed(mesh, "what it saved", write)
    parts = {name: Part(*part) for one in written for name, part in one.items()}
    progress = Progress(stages={stage: StageStats() for stage in range(plan.stages)})
    cuts: Any = plan.pipeline
    manifest = Manifest(
        run,
        Position(0, 0, updates),
        conditions,
        cuts,
        {},
        progress.to_json(),
        parts,
    )
    try:
        published = _agreed(
            mesh, "the checkpoint", lambda: str(publish(partial, manifest)) if mesh.world.rank == 0 else ""
        )
    except TrainingStopped:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Path(published[0])


def restore(
    folder: Path,
    stages: Mapping[int, Stage],
    mesh: Mesh,
    plan: Plan,
    conditions: Mapping[str, Any],
    feedback: Feedback,
    optimizer: OptimizerFactory,
) -> None:
    """Load the newest checkpoint under `folder`, or this one. Raises ConfigError and DamagedCheckpoint."""
    source = find_source(str(folder), folder)
    if source is None:
        raise ConfigError(f"{folder} holds no checkpoint")
    theirs = source.manifest.conditions
    for key in conditions:
        if theirs.get(key) != conditions[key]:
            raise ConfigError(
                f"{source.folder} is of another model: {difference(key, theirs.get(key), conditions[key])}"
            )
    load_source(source, stages, mesh, plan, feedback, optimizer)


def load_source(
    source: Source,
    stages: Mapping[int, Stage],
    mesh: Mesh,
    plan: Plan,
    feedback: Feedback,
    optimizer: OptimizerFactory,
) -> None:
    """Load a checkpoint's weights and optimizer state; of the same pipeline, random states and residuals too.

    Raises DamagedCheckpoint.
    """
    tensors = Tensors(source.folder, list(source.manifest.parts))
    for stage in stages.values():
        load(stage, tensors, source.manifest.position.update, optimizer)
    if source.manifest.pipeline == plan.pipeline:
        set_random_state(tensors, mesh.world.rank, mesh.device)
        feedback.residuals = saved_residuals(tensors, slots(plan, mesh.world.rank), mesh.device)


def _agreed(mesh: Mesh, what: str, act: Callable[[], Any]) -> list[Any]:
    """Return what each rank's act returns. Raises TrainingStopped on all ranks if it fails on one."""
    try:
        mine = [act(), ""]
    except (OSError, TypeError, ValueError) as error:
        mine = [None, f"rank {mesh.world.rank} cannot save: {error}"]
    told = mesh.agree(what, mine)
    for _, failure in told:
        if failure:
            raise TrainingStopped(failure)
    return [made for made, _ in told]
