"""Parameter groups: options by the names of parameters, or separate optimizers.

A group has the parameters that match its regular expression or kind and belong to no group before it. Several
optimizers are combined into one torch optimizer with the groups and the state of all, so rates, weight
versions and checkpoints handle a single type.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer

from pipetrain.config.build import Optim, build_node
from pipetrain.errors import ConfigError
from pipetrain.rules import POSITIVE, decoded


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Options for the parameters of these `names`; `function`: makes a separate optimizer for them."""

    key: str
    names: Collection[str]
    options: Mapping[str, Any]
    function: Callable[[Any], Optimizer] | None = None


class Kind(NamedTuple):
    """Parameters that need no params=: described in words, with a function for their names in a model."""

    words: str
    names: Callable[[nn.Module], set[str]]


class ChainedOptimizer(Optimizer):
    """Optimizers of different parameters as one, with the groups and the state of all."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts, self.defaults = parts, parts[0].defaults
        for part in parts:
            self.state.update(part.state)  # some optimizers make it at once
            part.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step(closure)


def title(optimizer: Optimizer) -> str:
    """Return the names of an optimizer's class, or of its parts' classes."""
    parts = optimizer.parts if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return " + ".join(type(part).__name__ for part in parts)


def optimizer_of(
    function: Callable[[Any], Optimizer], groups: Sequence[Group], named: Iterable[tuple[str, nn.Parameter]]
) -> Optimizer:
    """Return an optimizer with a torch group for each non-empty group, and one for the rest."""
    rest = Group("", (), {})
    members: dict[Group, list[nn.Parameter]] = {}
    for name, parameter in named:
        group = next((group for group in groups if name in group.names), rest)
        members.setdefault(group, []).append(parameter)
    shared = [
        {"params": parameters, **group.options} for group, parameters in members.items() if not group.function
    ]
    parts = [group.function(parameters) for group, parameters in members.items() if group.function]
    if shared:
        alone = all(group.function for group in groups)
        parts.insert(0, function(members[rest] if alone else shared))
    return parts[0] if len(parts) == 1 else ChainedOptimizer(parts)


# From the configuration


def groups_of(optim: Optim, model: nn.Module) -> list[Group]:
    """Return the groups of a model's parameters. Raises ConfigError."""
    if not isinstance(optim.groups or {}, Mapping):
        raise ConfigError(f"{optim.key}={optim.groups} must have a name for each group, with its options")
    groups = list[Group]()
    left = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, options in (optim.groups or {}).items():
        groups.append(_group(f"{optim.key}.{name}", options, KINDS.get(name), model, left))
        left = {name: p for name, p in left.items() if name not in groups[-1].names}
    return groups


def _group(key: str, content: Any, kind: Kind | None, model: nn.Module, left: Mapping[str, Tensor]) -> Group:
    """Return a group of parameters that are `left`: those of its kind, and those that params= matches."""
    if not isinstance(content, Mapping):
        raise ConfigError(f"{key}={content} must have options of the optimizer, such as {key}.weight_decay=0")
    options = dict(content)
    pattern = options.pop("params", None)
    if pattern is None and kind is None:
        raise ConfigError(f"{key} needs {key}.params=, a regular expression that its parameters' names match")
    of_kind = kind.names(model) & left.keys() if kind else set()
    try:
        matched = {name for name in left if pattern is not None and re.fullmatch(str(pattern), name)}
    except re.error as error:
        raise ConfigError(f"{key}.params={pattern} is no regular expression: {error}") from error
    if not (of_kind if pattern is None else matched):
        criterion = kind.words if kind and pattern is None else f"matched as a whole by params={pattern}"
        raise ConfigError(
            f"{key} has no parameter: none that is left by the groups before it is {criterion}; "
            f"parameters have names such as {next(name for name, _ in model.named_parameters())}"
        )
    names = of_kind | matched
    if "_target_" not in options:
        return Group(key, names, options)
    if "lr" in options:
        options["lr"] = POSITIVE.read(f"{key}.lr", decoded(options["lr"]))
    return Group(key, names, options, build_node(key, options, partial=True))


def _all_but_hidden(model: nn.Module) -> set[str]:
    """Return all names but those of hidden matrices and kernels, which exclude embeddings and the head."""
    weights = {id(module._parameters.get("weight")): module for module in model.modules()}
    kernels = {n for n, module in weights.items() if isinstance(module, _ConvNd)}
    tables = {n for n, module in weights.items() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}
    every = model.named_parameters(remove_duplicate=False)
    matrices = [id(p) for _, p in every if p.dim() == 2 or id(p) in kernels]
    hidden = {*matrices} - tables - {*matrices[-1:]}
    return {name for name, p in model.named_parameters() if id(p) not in hidden}


KINDS = {
    "norms_and_biases": Kind(
        "a norm or a bias", lambda model: {name for name, p in model.named_parameters() if p.dim() < 2}
    ),
    "all_but_hidden": Kind("an embedding, a head, a norm or a bias", _all_but_hidden),
}
