"""What one rank goes on from: its stages, its random numbers, and what its codecs still owe."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipetrain.building import one_line
from pipetrain.checkpoint.files import Tensors, described
from pipetrain.checkpoint.untrusted import DamagedCheckpoint
from pipetrain.runtime.coded import Slot
from pipetrain.runtime.stage import Stage
from pipetrain.runtime.weights import OptimizerFactory


def load(stage: Stage, tensors: Tensors, updates: int, optimizer: OptimizerFactory) -> None:
    """Let a stage go on from a checkpoint, which must hold what it needs. Raises DamagedCheckpoint.

    What is remembered of a parameter is held against what `optimizer` remembers after one update.
    """
    tensors.prove({name: tensor for name, tensor in stage.state().items() if name.startswith("model/")})
    try:
        stage.load_state(tensors, updates)
    except Exception as error:  # whatever the optimizer says of what it is to remember
        said = f"{type(error).__name__}: {one_line(error)}"
        raise DamagedCheckpoint(f"stage {stage.index} cannot go on from the checkpoint: {said}") from error
    made = stage.weights.optimizer
    for name, parameter in stage.module.named_parameters():
        mine = _remembered(made, parameter) if made else {}
        for key, wanted in _fresh(optimizer, parameter).items() if mine else ():
            if mine.get(key) != wanted:
                raise DamagedCheckpoint(
                    f"the optimizer's {key} of {name} is {mine.get(key, 'missing')} in the checkpoint, and "
                    f"{wanted} here"
                )


def _remembered(optimizer: Optimizer, parameter: Tensor) -> dict[str, str]:
    """Return what an optimizer remembers of a parameter: a description of each value."""
    return {
        key: described(value) if isinstance(value, Tensor) else type(value).__name__
        for key, value in optimizer.state.get(parameter, {}).items()
        if value is not None
    }


def _fresh(optimizer: OptimizerFactory, parameter: Tensor) -> dict[str, str]:
    """Return what a new optimizer remembers of a parameter after one update, as far as that can be tried."""
    twin = nn.Parameter(torch.zeros_like(parameter))
    twin.grad = torch.zeros_like(parameter)
    try:
        made = optimizer([twin])
        made.step()
    except Exception:  # one that takes other gradients than these
        return {}
    return _remembered(made, twin)


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
        _name(slot): torch.empty(residual.shape, dtype=residual.dtype).copy_(residual)
        for slot, residual in residuals.items()
    }


def saved_residuals(
    tensors: Tensors, slots: Mapping[Slot, torch.dtype], device: torch.device
) -> dict[Slot, Tensor]:
    """Return what `residual_state` saved for these slots; what fits none of them is left out.

    Raises DamagedCheckpoint.
    """
    found = {slot: dtype for slot, dtype in slots.items() if _name(slot) in tensors}
    tensors.prove({_name(s): torch.empty(s[2], dtype=dtype, device="meta") for s, dtype in found.items()})
    return {slot: tensors[_name(slot)].to(device) for slot in found}


def _name(slot: Slot) -> str:
    (source, destination), number, shape = slot
    return f"residual/{source}-{destination}/{number}/{'x'.join(map(str, shape))}"
