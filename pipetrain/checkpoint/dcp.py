"""A training as torch.distributed.checkpoint saves and loads it, with the names of plain PyTorch.

These are `model.NAME` of the model's state_dict, `state.NAME.KEY` of the optimizer's state of a parameter,
and `updates`. Each rank gives the tensors of its stages; what several ranks give is written once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipetrain.checkpoint.state import named
from pipetrain.runtime.session import Session
from pipetrain.runtime.weights import OptimizerFactory


class Part:
    """A Stateful of that library, which overwrites in place what `state_dict` returns, then hands it back."""

    def __init__(self, state_dict: Callable[[], Any], load_state_dict: Callable[[Any], None]) -> None:
        self.state_dict = state_dict
        self.load_state_dict = load_state_dict


def parts_of(session: Session, keys: Mapping[str, str], optimizer: OptimizerFactory) -> dict[str, Part]:
    """Return what to save or load. `keys`: the tensor behind each entry of the model's state_dict.

    Before the first update the optimizer's state has the form that one would give it, to be overwritten.
    """
    stages = session.stages.values()
    live = [(stage.weights, name, p) for stage in stages for name, p in stage.weights.live.items()]

    def model() -> dict[str, Tensor]:
        own = {name: tensor.detach() for stage in stages for name, tensor in named(stage)}
        return {key: own[name] for key, name in keys.items() if name in own}

    @torch.no_grad()
    def load_model(tensors: Mapping[str, Tensor]) -> None:
        loaded = {keys[key]: tensor for key, tensor in tensors.items()}
        for stage in stages:
            for name, tensor in named(stage):  # stages that share a weight have a copy each
                tensor.data.copy_(loaded.get(name, tensor))
            stage.weights.load_average({})

    def state() -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for weights, name, parameter in live:
            known = weights.optimizer.state.get(parameter) if weights.optimizer else None
            if not weights.updates and not known:
                known = _fresh_state(optimizer, name, parameter)
            found[name] = {key: value for key, value in (known or {}).items() if value is not None}
        return {name: values for name, values in found.items() if values}

    def load_state(found: Mapping[str, Mapping[str, Any]]) -> None:
        for weights, name, parameter in live:
            for key, value in found.get(name, {}).items():
                copied = value.clone() if isinstance(value, Tensor) else value
                weights.optimizer.state[parameter][key] = copied  # type: ignore[union-attr]

    def updates() -> Tensor:
        return torch.tensor(next(iter(stages)).weights.updates)

    def load_updates(number: Tensor) -> None:
        for stage in stages:
            stage.weights.updates = int(number)

    return {
        "model": Part(model, load_model),
        "state": Part(state, load_state),
        "updates": Part(updates, load_updates),
    }


def _fresh_state(optimizer: OptimizerFactory, name: str, parameter: Tensor) -> dict[str, Any]:
    """Return a new optimizer's state of a parameter after one update."""
    twin = nn.Parameter(torch.zeros_like(parameter))
    twin.grad = torch.zeros_like(parameter)
    made = optimizer([(name, twin)])
    made.step()
    return dict(made.state.get(twin, {}))
