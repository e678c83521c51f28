"""The model that a program has given, as it was when it was cut.

A plan says which gradients travel, and a trace holds the numbers of the model. A program that changes these
later would train another model than it has: that is refused at the next pass.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from torch import nn

from pipetrain.errors import ConfigError
from pipetrain.model.chain import Chain
from pipetrain.model.network import Network
from pipetrain.model.tensor_places import Held, attributes_of

_REGISTERED = re.compile(r"(?<![^.])_(parameters|buffers|modules)\.(?=[^.]*$)")
log = logging.getLogger("pipetrain")


class ModelGuard:
    """What must not change of a model: its parameters, which of them it trains, and its layers.

    Of one that is traced the buffers, the hooks and all submodules too, and what it computes: where anything
    else is another in attributes, or in what these hold, the model is traced again and compared.
    """

    def __init__(self, model: nn.Module, network: Network) -> None:
        self._model, self._network, self._warned = model, network, False
        self._facts = [
            (f"{path}.{key}.{fact}".lstrip("."), module._parameters, key, fact, getattr(parameter, fact))
            for path, module in model.named_modules()
            for key, parameter in module._parameters.items()
            if parameter is not None
            for fact in ("requires_grad", "dtype")
        ]
        self._roots = attributes_of(model)
        if isinstance(network, Chain):
            registries = [(f"{path}._parameters".lstrip("."), of["_parameters"]) for path, of in self._roots]
            self._roots = [*registries, ("_modules", model._modules)]
        self.held = Held(self._roots)
        self._grown: dict[int, Any] = {}  # by id, lists whose length does not matter to the model

    def refuse_changes(self, training: bool) -> None:
        """Refuse what has changed before a pass, of training or of evaluation. Raises ConfigError."""
        if training and not self._warned:
            self._warned = True
            if not any(module.training for module in self._model.modules()):
                log.warning(
                    "pipetrain: the model is in evaluation mode and is trained so, without dropout and with "
                    "the statistics of BatchNorm as they are: call model.train() before, if that is not meant"
                )
        now = ((name, getattr(of.get(key), fact, was), was) for name, of, key, fact, was in self._facts)
        names = [name for name, is_, was in now if is_ != was and (training or not name.endswith("grad"))]
        changes = [
            (name, of, was, (_REGISTERED.search(name) and was.get(key) is not None) or "_hooks." in name)
            for name, of, key, was in (self.held.changes() if self.held.changed() else ())
            if (training or key != "training") and id(of) not in self._grown
        ]
        names += [name for name, *_, fixed in changes if fixed]
        if changes and not names and not self._network.computes_as_cut(training):
            names = [name for name, *_ in changes]
        if names:
            raise ConfigError(
                f"since the model was cut into stages, which do not follow, this has changed: "
                f"{_REGISTERED.sub('', names[0])}; do so before the first batch; to go on so, end this "
                f"Pipeline by collect() and close(), and make another of the model"
            )
        if changes and training:
            log.warning("pipetrain: %s has changed; traced again, the model computes the same", changes[0][0])
            lists = ((of, was) for _, of, was, _ in changes if not isinstance(of, dict))
            self._grown |= {id(of): of for of, was in lists if len(of) != len(was)}
            self.held = Held(self._roots)
