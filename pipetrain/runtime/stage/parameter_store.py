"""The parameters of a stage: versions of them to compute with, their gradients, and the optimizer's step.

`Weights` decides when there is a new version. How parameters lie in memory is known only here, in five
operations: compute with a version, accumulate, reduce, step, state by full name.

A version is a set of autograd leaves. A forward computes with the leaves of the version that its action
names, or with those of a prediction, made together with the version; a backward finds its leaves in its
graph. A step updates in place if no later action needs the old values; otherwise it first moves the
parameters to other storage. Released storage is reused, because a fresh allocation would cause page faults at
every step.

Leaves are made from `p.data`, so they share storage with the parameter but not its version counter. The
counter of a leaf changes exactly when its storage is overwritten, so autograd raises if a graph still needs
it.

A version is installed by writing its leaves to the places of the module's parameters. For VGG16's 52 tensors
this takes 0.01 ms, and `torch.func.functional_call`, which does the same, 0.26 ms: twice a microbatch, that
would be more than the rest of the engine's overhead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils._pytree import tree_leaves

from pipetrain.model.numerics import numbers_of
from pipetrain.model.tensor_places import places
from pipetrain.plan.costs import SMALL_GRADIENT
from pipetrain.runtime.comm import gradient_buckets
from pipetrain.schedule.actions import Read

Named = Iterable[tuple[str, nn.Parameter]]
OptimizerFactory = Callable[[Named], Optimizer]
"""Builds an optimizer of some parameters, given with their full names."""


def _leaf(parameter: nn.Parameter, copy: bool = False) -> nn.Parameter:
    leaf = nn.Parameter(parameter.data.clone() if copy else parameter.data)
    vars(leaf).update(vars(parameter))  # attributes set by a layer
    return leaf


_Places = list[tuple[Any, Any, Tensor, str]]  # containers, with the key, the parameter there and its name


class _Installed:
    """A context in which a module computes with these leaves."""

    __slots__ = ("_leaves", "_places")

    def __init__(self, places: _Places, leaves: Mapping[str, Tensor]) -> None:
        self._places, self._leaves = places, leaves

    def __enter__(self) -> None:
        for container, key, _, name in self._places:
            container[key] = self._leaves[name]

    def __exit__(self, *error: object) -> None:
        for container, key, parameter, _ in self._places:
            container[key] = parameter


class ParameterStore:
    """The trainable parameters of a module, all of them in this rank's memory.

    `full_names`: the names of parameters in the model, if they differ. `model`: another module that must
    compute with these parameters too. `optimizer` is None without parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: OptimizerFactory,
        full_names: Mapping[str, str] | None = None,
        model: nn.Module | None = None,
    ) -> None:
        trainable = ((name, p) for name, p in module.named_parameters() if p.requires_grad)
        self.parameters = {(full_names or {}).get(name, name): p for name, p in trainable}
        """The parameters that the optimizer steps, by full name."""
        names = {id(p): name for name, p in self.parameters.items()}
        # The places of each parameter: several if layers share it, or if the model is not made of its stages.
        all_places = [*places(module), *(places(model) if model is not None else ())]
        self._places: _Places = [
            (place.container, place.key, place.tensor, names[id(place.tensor)])
            for place in {(id(place.container), place.key): place for place in all_places}.values()
            if id(place.tensor) in names
        ]
        self._make_optimizer = optimizer
        self.optimizer = optimizer([*self.parameters.items()]) if self.parameters else None
        self._without_step = set(self.parameters)  # parameters without a gradient so far
        self._average: dict[str, nn.Parameter] = {}  # by name; empty before the first step
        self._spare: list[list[Tensor]] = []  # storage of released versions
        self.adds_at_once = True
        """Whether a backward may hold small gradients back, see `adding_at_once`; not if they are sent."""
        self.newest = 0
        self._versions: dict[Read, dict[str, nn.Parameter]] = {0: self._fresh_leaves()}
        self._accumulating = self._versions[0]

    @property
    def names(self) -> Collection[str]:
        return self.parameters.keys()

    # Compute with a version

    def installed(self, read: Read) -> AbstractContextManager[None]:
        """Let the module compute with a version. Raises KeyError if it is not held."""
        return _Installed(self._places, self._versions[read])

    def averaged(self) -> AbstractContextManager[None]:
        """Let the module compute with the moving average, if there is one."""
        return _Installed(self._places, self._average) if self._average else nullcontext()

    def leaves(self, read: Read) -> list[Tensor]:
        return list(self._versions[read].values())

    @property
    def count(self) -> int:
        """The number of versions, and of predictions."""
        return len(self._versions)

    def older(self) -> list[Read]:
        """Return all held versions and predictions except the newest version."""
        return [read for read in self._versions if read != self.newest]

    def restart_count(self) -> None:
        """Give the newest version number 0. There must be no other."""
        assert self.count == 1, f"versions {[*self._versions]} outlived their window"
        self._versions = {0: self._versions.pop(self.newest)}
        self.newest = 0

    def release(self, read: Read) -> None:
        # A graph that still refers to these leaves now raises in its backward instead of reading new values.
        leaves = self._versions.pop(read).values()
        increment_version(leaves)  # their storage will be overwritten
        self._spare.append([leaf.data for leaf in leaves])

    def add_copy(self, read: Read) -> list[Tensor]:
        """Hold a copy of the newest version as `read`; return its values, which may then be changed."""
        values = self._copied() if self.parameters else []
        leaves = self._fresh_leaves()
        for leaf, data in zip(leaves.values(), values, strict=True):
            leaf.data = data
        self._versions[read] = leaves
        return values

    def _fresh_leaves(self) -> dict[str, nn.Parameter]:
        return {name: _leaf(p) for name, p in self.parameters.items()}

    def _copied(self) -> list[Tensor]:
        """Return the values of the parameters in other storage."""
        old = [p.data for p in self.parameters.values()]
        new = self._spare.pop() if self._spare else [torch.empty_like(t) for t in old]
        torch._foreach_copy_(new, old)
        return new

    # Accumulate

    def accumulates_on(self, read: Read) -> bool:
        return self._versions[read] is self._accumulating

    def accumulate_on(self, read: Read) -> None:
        """Move the batch's gradient to these leaves: one sum, in the order of the microbatches."""
        # Each version has its own leaves, and autograd adds to the leaves of the graph. The sum of a batch
        # that reads several versions therefore moves from leaves to leaves.
        leaves = self._versions[read]
        if leaves is not self._accumulating:
            for name, leaf in self._accumulating.items():
                leaves[name].grad, leaf.grad = leaf.grad, None
            self._accumulating = leaves

    def accumulated(self) -> dict[str, nn.Parameter]:
        """Return the leaves that have a gradient."""
        return {name: leaf for name, leaf in self._accumulating.items() if leaf.grad is not None}

    @contextmanager
    def adding_at_once(self) -> Iterator[None]:
        """Let a backward make new small gradients, and add them to the batch's by one kernel of a GPU."""
        small = [leaf for leaf in self._accumulating.values() if leaf.nbytes <= SMALL_GRADIENT]
        sums = [(leaf, leaf.grad) for leaf in small if leaf.grad is not None and not leaf.grad.is_sparse]
        for leaf, _ in sums:
            leaf.grad = None
        yield
        totals, new = list[Tensor](), list[Tensor]()
        for leaf, total in sums:
            if leaf.grad is not None:
                totals.append(total)
                new.append(leaf.grad)
            leaf.grad = total
        if new:
            torch._foreach_add_(totals, new)

    # Reduce

    def reduce(self) -> None:
        """Move the batch's gradient from the leaves to the parameters."""
        for name, leaf in self._accumulating.items():
            self.parameters[name].grad, leaf.grad = leaf.grad, None

    def reduce_part(self) -> None:
        """Add these leaves' gradient to that of the parameters, which has the parts of other leaves."""
        for name, leaf in self.accumulated().items():
            before, parameter = self.parameters[name].grad, self.parameters[name]
            parameter.grad = leaf.grad if before is None or leaf.grad is None else before + leaf.grad
            leaf.grad = None

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def gradient_norm(self, device: str, without: Collection[str] = ()) -> Tensor:
        """Return the 2-norm of the gradients, a scalar on the device, as torch.nn.utils computes it."""
        for parameter in self.parameters.values():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()  # so that equal indices are summed
        gradients = [numbers_of(g) for name, g in self.gradients().items() if name not in without]
        norm: Tensor = get_total_norm(gradients) if gradients else torch.zeros((), device=device)
        return norm

    def clip(self, limit: float, norm: Tensor) -> None:
        clip_grads_with_norm_(self.parameters.values(), limit, norm)

    def buckets(self) -> list[list[str]]:
        """Return the names of parameters by bucket of their gradients, see gradient_buckets.py."""
        return [[*bucket] for bucket in gradient_buckets.buckets_of(self.parameters)]

    @contextmanager
    def reduce_when_finished(
        self, read: Read, buckets: Iterable[Sequence[str]], all_reduce: Callable[[Tensor], None]
    ) -> Iterator[None]:
        """Reduce each bucket once the backward over this version, in this context, has finished it."""
        leaves = self._versions[read]
        chosen = [{name: leaves[name] for name in bucket} for bucket in buckets]
        self.adds_at_once = False
        with gradient_buckets.reduce_when_finished(chosen, all_reduce):
            yield
        self.adds_at_once = True

    # Sums over ranks of the gradients with these names, see gradient_buckets.py.

    def flat_gradients(self, names: Iterable[str]) -> list[Tensor]:
        return gradient_buckets.flat_gradients(self._named(names))

    def counts(self, names: Iterable[str], skip: Tensor | None) -> list[Tensor]:
        return gradient_buckets.gradient_counts(self._named(names), skip)

    def parts(self, names: Iterable[str], sums: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return gradient_buckets.split_sums(self._named(names), sums)

    def set_gradients(
        self, names: Iterable[str], parts: Mapping[str, Tensor], counts: Tensor, copies: bool = True
    ) -> None:
        gradient_buckets.set_gradients(self._named(names), parts, counts, copies)

    def _named(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: self.parameters[name] for name in names}

    # Step

    def keep(self) -> None:
        """Move the parameters, with their values, to other storage, so that a step keeps the version.

        The leaves of the version stay in the old storage; the optimizer then changes the copy.
        """
        if self.parameters:
            for parameter, data in zip(self.parameters.values(), self._copied(), strict=True):
                parameter.data = data

    def step(self, skip: Tensor | None) -> None:
        """Step the parameters; `skip` 1 skips it.

        Parameters with their first gradient step separately, as torch's fused SGD refuses a mixture. A fused
        optimizer of torch skips by itself once all parameters have their state; else the host decides.
        """
        optimizer = self.optimizer
        if optimizer is None:
            return
        gradients = self.gradients() if self._without_step else {}
        first = self._without_step & gradients.keys()
        by_itself = getattr(optimizer, "_step_supports_amp_scaling", False) and not first
        if skip is not None and by_itself:
            vars(optimizer)["found_inf"] = skip  # as torch.amp.GradScaler passes it
            optimizer.step()
            del vars(optimizer)["found_inf"]
            return
        if skip is not None and skip:
            return
        self._without_step -= first
        if 0 < len(first) < len(gradients) and any(group.get("fused") for group in optimizer.param_groups):
            for name, parameter in self.parameters.items():
                parameter.grad = gradients[name] if name in first else None
            optimizer.step()
            for name, parameter in self.parameters.items():
                parameter.grad = None if name in first else gradients.get(name)
        optimizer.step()

    def drop_gradients(self) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad()  # an optimizer may do more in it
        for parameter in self.parameters.values():
            parameter.grad = None

    def add_version(self, keeps_previous: bool) -> None:
        """Count the stepped parameters as the next version; `keeps_previous`: the previous version stays."""
        self.newest += 1
        if keeps_previous:
            self._versions[self.newest] = self._fresh_leaves()
        else:
            leaves = self._versions.pop(self.newest - 1)
            increment_version(leaves.values())  # the step has changed them in place
            self._versions[self.newest] = leaves

    def average_in(self, decay: float, updates: int) -> None:
        """Update the moving average after so many updates; it begins with the values after the first step."""
        if not self._average:
            self._average = self._copies()
        elif self.parameters:
            average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
            new = [p.data for p in self.parameters.values()]
            average([leaf.data for leaf in self._average.values()], new, updates)

    def _copies(self) -> dict[str, nn.Parameter]:
        return {name: _leaf(p, copy=True) for name, p in self.parameters.items()}

    # State by full name

    def average(self) -> dict[str, Tensor]:
        """Return the moving average by name; empty without one."""
        return {name: leaf.data for name, leaf in self._average.items()}

    @torch.no_grad()
    def load_average(self, average: Mapping[str, Tensor]) -> None:
        """Restore from `average`; a parameter that it lacks begins from its current value.

        An empty average begins again with the next step.
        """
        self._average = self._copies() if average else {}
        for name in average.keys() & self._average.keys():
            numbers_of(self._average[name].data).copy_(average[name])

    def optimizer_values(self, name: str, fresh: bool = False) -> dict[str, Any]:
        """Return the optimizer's state of a parameter by key; if `fresh`, as after a first step."""
        parameter = self.parameters[name]
        state = dict(self.optimizer.state.get(parameter, {})) if self.optimizer else {}
        if state or not fresh:
            return state
        twin = nn.Parameter(torch.zeros_like(parameter))
        twin.grad = torch.zeros_like(parameter)
        stepped = self._make_optimizer([(name, twin)])
        stepped.step()
        return dict(stepped.state.get(twin, {}))

    def set_optimizer_value(self, name: str, key: str, value: Any) -> None:
        assert self.optimizer is not None
        self.optimizer.state[self.parameters[name]][key] = value

    def held_tensors(self) -> tuple[list[Tensor], list[Any]]:
        """Return all held tensors, with gradients, and the optimizer's state."""
        leaves = [leaf for version in self._versions.values() for leaf in version.values()]
        tensors = [*self.parameters.values(), *leaves, *self._average.values()]
        gradients = [t.grad for t in tensors if t.grad is not None]
        spare = [tensor for storage in self._spare for tensor in storage]
        state = [*self.optimizer.state.values()] if self.optimizer else []
        return [*tensors, *gradients, *spare], state

    def changing(self) -> tuple[list[Tensor], list[Any]]:
        """Return the tensors, and the lists, dicts and sets, that windows change."""
        tensors: list[Tensor] = [*self.parameters.values(), *self._average.values()]
        containers: list[Any] = [vars(self), self._versions, self._spare, self._without_step, self._average]
        if self.optimizer is not None:
            state = list(self.optimizer.state.values())
            tensors += [t for t in tree_leaves(state) if isinstance(t, Tensor)]
            containers += [vars(self.optimizer), self.optimizer.state, *state, *self.optimizer.param_groups]
        return tensors, containers
