"""When one rank saves, and what: its stages between two windows, under the run's name and conditions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipetrain.checkpoint.asking import Asking
from pipetrain.checkpoint.files import Manifest, Position, Tensors, stage_file
from pipetrain.checkpoint.saver import Saver, Snapshot
from pipetrain.checkpoint.untrusted import DamagedCheckpoint
from pipetrain.runtime.coded import Slot
from pipetrain.runtime.mesh import Mesh
from pipetrain.runtime.stage import Stage
from pipetrain.training.figures import Progress, most_accurate


@dataclass(slots=True)
class Keeper:
    """Saves every so many epochs or updates, if not None, and then the best epoch too; or asked by a signal.

    `run`, `conditions`, `config`: see Manifest. `seen`: the update at the last window's end.
    """

    saver: Saver
    asking: Asking
    every: int | None
    unit: str
    run: str
    conditions: Mapping[str, Any]
    config: Mapping[str, Any]
    seen: int = 0

    def due(self, position: Position, over: bool = False, best: bool = False) -> bool:
        """Say whether to save here; to be asked once at every window's end.

        `over`: it is the run's. `best`: it is that of the most accurate epoch so far.
        """
        before, self.seen = self.seen, position.update
        if self.every is None or over or best:
            return self.every is not None
        if self.unit == "updates":
            return position.update // self.every > before // self.every
        return position.batch == 0 and position.epoch % self.every == 0

    def go_on(self, folder: Path, position: Position, progress: Progress) -> None:
        """Start from a checkpoint, which its run may have left before it could mark it as the best."""
        self.seen = position.update
        if is_best(position, progress):
            self.saver.mark(folder)

    def save(
        self,
        stages: Mapping[int, Stage],
        mesh: Mesh,
        position: Position,
        pipeline: Mapping[str, Any],
        progress: Progress,
        residuals: Mapping[Slot, Tensor],
    ) -> None:
        """Start to save; all ranks must call it, with the same values but their own stages and residuals."""
        rank = mesh.world.rank
        metadata = {"run": self.run, "update": str(position.update)}
        try:
            files = {stage_file(index): stage.state() for index, stage in stages.items()}
            files[stage_file(min(stages))] |= random_state(rank, mesh.device) | residual_state(residuals)
            snapshot = Snapshot(files, metadata)
        except TypeError as error:  # where checkpoint.every=null let it start, and a signal asks for one
            snapshot = Snapshot({}, metadata, f"the optimizer of rank {rank} remembers {error}")
        manifest = None
        if rank == 0:
            manifest = Manifest(
                self.run, position, self.conditions, pipeline, self.config, progress.to_json(), {}
            )
        self.saver.save(position.update, snapshot, manifest, is_best(position, progress))

    def close(self) -> None:
        """Wait until all is on the disk."""
        self.saver.close()


def is_best(position: Position, progress: Progress) -> bool:
    """Whether a run stands at the end of its most accurate epoch so far."""
    history = progress.history
    return bool(history) and not position.batch and most_accurate(history) is history[-1]


def random_state(rank: int, device: torch.device) -> dict[str, Tensor]:
    """Return what a rank's random numbers go on from."""
    state = {f"random/{rank}/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state[f"random/{rank}/cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(tensors: Tensors, rank: int, device: torch.device) -> None:
    """Go on from what `random_state` returned. Raises DamagedCheckpoint."""
    try:
        torch.set_rng_state(tensors[f"random/{rank}/cpu"])
        if device.type == "cuda" and f"random/{rank}/cuda" in tensors:
            torch.cuda.set_rng_state(tensors[f"random/{rank}/cuda"], device)
    except (RuntimeError, TypeError) as error:  # of a tensor that is no such state
        raise DamagedCheckpoint(f"the random state of rank {rank} cannot be set: {error}") from error


def residual_state(residuals: Mapping[Slot, Tensor]) -> dict[str, Tensor]:
    """Return a copy, on the host, of what a rank's codecs still owe."""
    return {
        _path(slot): torch.empty(residual.shape, dtype=residual.dtype).copy_(residual)
        for slot, residual in residuals.items()
    }


def saved_residuals(
    tensors: Tensors, slots: Mapping[Slot, torch.dtype], device: torch.device
) -> dict[Slot, Tensor]:
    """Return what `residual_state` saved for these slots; what fits none of them is left out.

    Raises DamagedCheckpoint.
    """
    found = {slot: dtype for slot, dtype in slots.items() if _path(slot) in tensors}
    tensors.prove({_path(s): torch.empty(s[2], dtype=dtype, device="meta") for s, dtype in found.items()})
    return {slot: tensors[_path(slot)].to(device) for slot in found}


def _path(slot: Slot) -> str:
    (source, destination), number, shape = slot
    return f"residual/{source}-{destination}/{number}/{'x'.join(map(str, shape))}"
