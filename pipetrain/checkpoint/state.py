"""The state of one rank as tensors by name, and back: its stages, random numbers and codecs' residuals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

import torch
from torch import Tensor

from pipetrain.checkpoint.files import stage_file
from pipetrain.checkpoint.resume import Source
from pipetrain.checkpoint.tensors import EMA, MODEL, OPTIMIZER, Tensors, names_of
from pipetrain.network.numerics import numbers_of
from pipetrain.runtime.coding import Slot
from pipetrain.runtime.mesh import Mesh
from pipetrain.runtime.session import Session, slots
from pipetrain.runtime.stage import Stage


def snapshot(session: Session, mesh: Mesh, random: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return copies, in host memory, of a rank's state between two windows, by file.

    `random`: further random states. Raises TypeError for an optimizer that remembers what cannot be saved.
    """
    files = {stage_file(index): state_of(stage) for index, stage in session.stages.items()}
    rank, device = mesh.world.rank, mesh.device
    own = {f"random/{rank}/cpu": torch.get_rng_state(), **random}
    if device.type == "cuda":
        own[f"random/{rank}/cuda"] = torch.cuda.get_rng_state(device)
    residuals = {_name(slot): _copy(residual) for slot, residual in session.coding.residuals.items()}
    files[stage_file(min(session.stages))] |= own | residuals
    return files


def state_of(stage: Stage) -> dict[str, Tensor]:
    """Return copies, in host memory, of a stage's state between two windows.

    Keys use the layer names of the whole model: `model/NAME` for parameters and buffers (complex ones as
    pairs of real numbers), `optimizer/NAME/NUMBER` for the optimizer's state, `ema/NAME` for the moving
    average of the weights. What several stages share is in the state of the first of them.
    """
    stage.settle()
    weights = stage.weights
    tensors = {MODEL + name: numbers_of(tensor.detach()) for name, tensor in named(stage)}
    tensors |= {OPTIMIZER + path: tensor for path, tensor in weights.optimizer_state().items()}
    tensors |= {EMA + name: numbers_of(tensor) for name, tensor in weights.average().items()}
    return {
        path: _copy(tensor) for path, tensor in tensors.items() if _weight_of(path) not in stage.elsewhere
    }


def restore(source: Source, session: Session, mesh: Mesh) -> None:
    """Load a rank's stages, and the seed; of the same pipeline, its codecs' residuals too."""
    tensors = source.tensors()
    session.engine.seed = source.manifest.config.get("seed", session.engine.seed)
    for stage in session.stages.values():
        _load(stage, tensors, source.manifest.position.update)
    if source.manifest.pipeline == session.plan.pipeline:
        known = {slot: _name(slot) for slot in slots(session.plan, mesh.world.rank)}
        session.coding.residuals = {
            slot: tensors[name].clone().to(mesh.device) for slot, name in known.items() if name in tensors
        }


@torch.no_grad()
def _load(stage: Stage, tensors: Tensors, updates: int) -> None:
    """Restore from `state_of`, of this stage or of other stages that held these layers."""
    for name, tensor in named(stage):
        numbers_of(tensor.data).copy_(tensors[MODEL + name])
    mine = stage.weights.live.keys()
    paths = [path for path in names_of(tensors, OPTIMIZER) if path.rpartition("/")[0] in mine]
    state = {path: tensors[OPTIMIZER + path].clone() for path in paths}
    stage.weights.load_optimizer_state(state, updates)
    stage.weights.load_average({name: tensors[EMA + name] for name in mine if EMA + name in tensors})


def named(stage: Stage) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers by their names in the model."""
    for name, tensor in chain(stage.module.named_parameters(), stage.module.named_buffers()):
        yield stage.name(name), tensor


def _weight_of(path: str) -> str:
    """Return the parameter or buffer of an entry of a stage's state."""
    kind, _, name = path.partition("/")
    return name.rpartition("/")[0] if kind + "/" == OPTIMIZER else name


def _copy(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


def restore_random(source: Source, mesh: Mesh) -> None:
    """Restore this rank's random state, if a rank of its number has saved one.

    That of rank 0 decides how a DataLoader shuffles, so this comes before the first batch is read.
    """
    tensors, rank = source.tensors(), mesh.world.rank
    if f"random/{rank}/cpu" in tensors:
        torch.set_rng_state(tensors[f"random/{rank}/cpu"])
    if mesh.device.type == "cuda" and f"random/{rank}/cuda" in tensors:
        torch.cuda.set_rng_state(tensors[f"random/{rank}/cuda"], mesh.device)


def _name(slot: Slot) -> str:
    (source, destination), number, shape = slot
    return f"residual/{source}-{destination}/{number}/{'x'.join(map(str, shape))}"
