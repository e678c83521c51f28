"""A training as torch.distributed.checkpoint saves and loads it, with the names of plain PyTorch.

These are `model.NAME` of the model's state_dict, `state.NAME.KEY` of the optimizer's state of a parameter,
and `updates`. Each rank gives the tensors of its stages; what several ranks give is written once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pipetrain.checkpoint.state import fresh_state, named
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
        for stage in stages:
            for name, parameter in stage.weights.live.items():
                made = stage.weights.optimizer
                known = made.state.get(parameter) if made else None
                if not stage.weights.updates and not known:
                    known = fresh_state(optimizer, name, parameter)
                found[name] = {key: value for key, value in (known or {}).items() if value is not None}
        return {name: values for name, values in found.items() if values}

    def load_state(found: Mapping[str, Mapping[str, Any]]) -> None:
        for stage in stages:
            for name, parameter in stage.weights.live.items():
                for key, value in found.get(name, {}).items():
                    copied = value.clone() if isinstance(value, Tensor) else value
                    stage.weights.optimizer.state[parameter][key] = copied  # type: ignore[union-attr]

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
