"""The model that a program has given, as it was when it was cut.

A plan says which gradients travel, and a trace holds the numbers of the model. A program that changes these
later would train another model than it has: that is refused at the next pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipetrain.errors import ConfigError

_PLAIN = bool | int | float | complex | str
_LISTS = nn.Sequential | nn.ModuleList | nn.ModuleDict
log = logging.getLogger("pipetrain")


class Unchanged:
    """What must not change of a model: its parameters, which of them it trains, and its layers.

    Of one that is `traced` the buffers too, and of all modules the modes, and the attributes that are
    numbers, strings, functions or tensors.
    """

    def __init__(self, model: nn.Module, traced: bool) -> None:
        self._model = model
        self._warned = False
        facts = [(name, read, read()) for name, read in _facts(model, traced)]
        self._facts = [
            fact for fact in facts if isinstance(fact[2], Tensor | torch.dtype | _PLAIN) or callable(fact[2])
        ]

    def note(self) -> None:
        """Take the tensors that the model has now for its own."""
        self._facts = [
            (name, read, read() if isinstance(was, Tensor) else was) for name, read, was in self._facts
        ]

    def refuse_changes(self, training: bool) -> None:
        """Refuse what has changed before a pass, of training or of evaluation. Raises ConfigError."""
        if training and not self._warned:
            self._warned = True
            if not any(module.training for module in self._model.modules()):
                log.warning(
                    "pipetrain: the model is in evaluation mode and is trained so, without dropout and with "
                    "the statistics of BatchNorm as they are: call model.train() before, if that is not meant"
                )
        for name, read, was in self._facts:
            now = read()
            same = now is was or (isinstance(was, _PLAIN) and type(now) is type(was) and now == was)
            if not same and (training or name.rpartition(".")[2] not in ("training", "requires_grad")):
                raise ConfigError(
                    f"since the model was cut into stages, which do not follow, this has changed: {name}; do "
                    f"so before the first batch; to go on so, end this Pipeline by collect() and close(), "
                    f"and make another of the model"
                )


def _facts(model: nn.Module, traced: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield what reads an entry of a module, by name."""
    for path, module in model.named_modules():
        of, own = f"{path}.".lstrip("."), vars(module)
        dicts = [own["_parameters"], *([own["_buffers"], own] if traced else [])]
        for entries in [*dicts, own["_modules"]] if traced or module is model else dicts:
            yield from ((f"{of}{key}", partial(entries.get, key)) for key in entries)
        for key in (key for key, p in own["_parameters"].items() if p is not None):
            for fact in ("requires_grad", "dtype"):
                yield f"{of}{key}.{fact}", partial(_of, own["_parameters"], key, fact)
        if isinstance(module, _LISTS) and (traced or module is model):
            yield f"the length of {path or 'it'}", partial(len, own["_modules"])


def _of(parameters: dict[str, nn.Parameter], key: str, fact: str) -> Any:
    return getattr(parameters[key], fact)
