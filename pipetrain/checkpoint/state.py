"""The state of one rank in a checkpoint: its stages, its random numbers and its codecs' residuals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipetrain.checkpoint.files import Tensors, described
from pipetrain.errors import one_line
from pipetrain.network.numerics import numbers_of
from pipetrain.runtime.coding import Slot
from pipetrain.runtime.stage import Stage
from pipetrain.runtime.weights import OptimizerFactory
from pipetrain.untrusted import DamagedCheckpoint


def state_of(stage: Stage) -> dict[str, Tensor]:
    """Return copies, in host memory, of a stage's state between two windows.

    Keys use the layer names of the whole model: `model/NAME` for parameters and buffers (complex ones as
    pairs of real numbers), `optimizer/NAME/NUMBER` for the optimizer's state, `ema/NAME` for the moving
    average of the weights. What several stages share is in the state of the first of them.
    """
    stage.settle()
    weights = stage.weights
    tensors = {f"model/{name}": numbers_of(tensor.detach()) for name, tensor in _named(stage)}
    tensors |= {f"optimizer/{path}": tensor for path, tensor in weights.optimizer_state().items()}
    tensors |= {f"ema/{name}": numbers_of(tensor) for name, tensor in weights.average().items()}
    return {
        path: torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        for path, tensor in tensors.items()
        if _weight_of(path) not in stage.elsewhere
    }


@torch.no_grad()
def _restore(stage: Stage, tensors: Tensors, updates: int) -> None:
    """Restore from `state_of`, of this stage or of other stages that held these layers."""
    for name, tensor in _named(stage):
        numbers_of(tensor.data).copy_(tensors[f"model/{name}"])
    mine = stage.weights.live.keys()
    paths = [path for path in tensors.names("optimizer/") if path.rpartition("/")[0] in mine]
    stage.weights.load_optimizer_state({path: tensors[f"optimizer/{path}"] for path in paths}, updates)
    averaged = mine & set(tensors.names("ema/"))
    stage.weights.load_average({name: tensors[f"ema/{name}"] for name in averaged})


def _named(stage: Stage) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers by their names in the model."""
    for name, tensor in chain(stage.module.named_parameters(), stage.module.named_buffers()):
        yield stage.name(name), tensor


def _weight_of(path: str) -> str:
    """Return the parameter or buffer of an entry of a stage's state."""
    kind, _, name = path.partition("/")
    return name.rpartition("/")[0] if kind == "optimizer" else name


def load(stage: Stage, tensors: Tensors, updates: int, optimizer: OptimizerFactory) -> None:
    """Load a stage's state from a checkpoint. Raises DamagedCheckpoint.

    The optimizer state of each parameter must have the form that `optimizer` gives it after one update.
    """
    model = {name: tensor for name, tensor in state_of(stage).items() if name.startswith("model/")}
    averages = {name.replace("model/", "ema/", 1): tensor for name, tensor in model.items()}
    tensors.prove(model | {name: tensor for name, tensor in averages.items() if name in tensors})
    try:
        _restore(stage, tensors, updates)
    except Exception as error:  # an optimizer may raise anything for a state that it cannot load
        cause = f"{type(error).__name__}: {one_line(error)}"
        raise DamagedCheckpoint(f"stage {stage.index} cannot go on from the checkpoint: {cause}") from error
    made = stage.weights.optimizer
    for name, parameter in stage.module.named_parameters():
        mine = _remembered(made, parameter) if made else {}
        for key, wanted in _fresh(optimizer, name, parameter).items() if mine else ():
            if mine.get(key) != wanted:
                raise DamagedCheckpoint(
                    f"the optimizer's {key} of {name} is {mine.get(key, 'missing')} in the checkpoint, and "
                    f"{wanted} here"
                )


def _remembered(optimizer: Optimizer, parameter: Tensor) -> dict[str, str]:
    return {
        key: described(value) if isinstance(value, Tensor) else type(value).__name__
        for key, value in optimizer.state.get(parameter, {}).items()
        if value is not None
    }


def _fresh(optimizer: OptimizerFactory, name: str, parameter: Tensor) -> dict[str, str]:
    """Describe a new optimizer's state of a parameter after one update; empty if the update fails."""
    twin = nn.Parameter(torch.zeros_like(parameter))
    twin.grad = torch.zeros_like(parameter)
    try:
        made = optimizer([(name, twin)])
        made.step()
    except Exception:  # an optimizer that needs other gradients, such as sparse ones
        return {}
    return _remembered(made, twin)


def random_state(rank: int, device: torch.device) -> dict[str, Tensor]:
    """Return the states of a rank's random number generators."""
    state = {f"random/{rank}/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state[f"random/{rank}/cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(tensors: Tensors, rank: int, device: torch.device) -> None:
    """Restore the states that `random_state` returned. Raises DamagedCheckpoint."""
    try:
        torch.set_rng_state(tensors[f"random/{rank}/cpu"])
        if device.type == "cuda" and f"random/{rank}/cuda" in tensors:
            torch.cuda.set_rng_state(tensors[f"random/{rank}/cuda"], device)
    except (RuntimeError, TypeError) as error:  # the tensor is not a generator's state
        raise DamagedCheckpoint(f"the random state of rank {rank} cannot be set: {error}") from error


def residual_state(residuals: Mapping[Slot, Tensor]) -> dict[str, Tensor]:
    """Return copies, in host memory, of the residuals of a rank's codecs."""
    return {
        _name(slot): torch.empty(residual.shape, dtype=residual.dtype).copy_(residual)
        for slot, residual in residuals.items()
    }


def saved_residuals(
    tensors: Tensors, slots: Mapping[Slot, torch.dtype], device: torch.device
) -> dict[Slot, Tensor]:
    """Return the residuals saved for these slots; others are left out. Raises DamagedCheckpoint."""
    found = {slot: dtype for slot, dtype in slots.items() if _name(slot) in tensors}
    tensors.prove({_name(s): torch.empty(s[2], dtype=dtype, device="meta") for s, dtype in found.items()})
    return {slot: tensors[_name(slot)].to(device) for slot in found}


def _name(slot: Slot) -> str:
    (source, destination), number, shape = slot
    return f"residual/{source}-{destination}/{number}/{'x'.join(map(str, shape))}"
