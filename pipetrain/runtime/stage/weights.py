"""The weight versions of one stage, and the optimizer that makes the next one.

A version is a set of autograd leaves. A forward computes with the leaves of the version that its action
names, or with those that a correction predicts by it, made with the version; a backward finds its leaves in
its graph. A step updates in place if no later action needs the old values, and otherwise moves the live
parameters to other storage. Released storage is used again, because a fresh allocation would be page-faulted
in at every step.

Leaves are made from `p.data`, so they share storage with the parameter but not its version counter. The
counter of a leaf moves exactly when its storage is overwritten, so autograd raises if a graph still needs it.

A version is installed by writing its leaves to the places where the module's parameters are. For VGG16's 52
tensors this takes 0.01 ms, and `torch.func.functional_call`, which does the same, 0.26 ms: twice a
microbatch, that would be more than the rest of the engine's overhead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils._pytree import tree_leaves

from pipetrain.config.rate import LearningRate
from pipetrain.correction import Correction
from pipetrain.model.numerics import numbers_of
from pipetrain.model.tensor_access import places
from pipetrain.plan.costs import SMALL_GRADIENT
from pipetrain.runtime.stage.correction_state import CorrectionState
from pipetrain.runtime.stage.learning_rates import Rates
from pipetrain.runtime.stage.optimizer_state import OptimizerState
from pipetrain.schedule.actions import Predicted, Read

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


class Weights:
    """Versions 0, 1, 2, ... of a module's trainable parameters, counted from the start of a window.

    `ema`: the decay of an exponential moving average of the weights after each step, as in
    torch.optim.swa_utils. `known_as`: the names of parameters in the model, where they differ. `correction`:
    what is done about late gradients. `model`: another module that is to compute with these weights too.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: OptimizerFactory,
        rate: LearningRate,
        ema: float | None = None,
        known_as: Mapping[str, str] | None = None,
        correction: Correction | None = None,
        model: nn.Module | None = None,
    ) -> None:
        own = ((name, p) for name, p in module.named_parameters() if p.requires_grad)
        self.live = {(known_as or {}).get(name, name): p for name, p in own}
        """The parameters by their names in the model; the optimizer steps them by their gradients."""
        names = {id(p): name for name, p in self.live.items()}
        # The places of each parameter: several if layers share it, or if the model is not made of its stages.
        every = [*places(module), *(places(model) if model is not None else ())]
        self._places: _Places = [
            (place.container, place.key, place.tensor, names[id(place.tensor)])
            for place in {(id(place.container), place.key): place for place in every}.values()
            if id(place.tensor) in names
        ]
        self.optimizer = optimizer([*self.live.items()]) if self.live else None
        groups = self.optimizer.param_groups if self.optimizer else []
        self.rates = Rates(self.optimizer, rate, self.live.get(rate.shown))
        self.correction_state = CorrectionState(
            self.live, groups, self.rates.fractions, correction or Correction()
        )
        """What the correction knows of them."""
        by_us = {"params"} if rate.fraction is None else {"params", "lr"}
        self._state = (
            OptimizerState(self.optimizer, self.correction_state.state, by_us) if self.optimizer else None
        )
        self._ema = ema
        self._unmoved = set(self.live)  # weights that have had no gradient so far
        self._average: dict[str, nn.Parameter] = {}  # by name; empty before the first step
        self._spare: list[list[Tensor]] = []
        self.updates = 0
        self.newest = 0
        self._versions: dict[Read, dict[str, nn.Parameter]] = {0: self._fresh_leaves()}
        self._accumulating = self._versions[0]

    # Versions

    @property
    def count(self) -> int:
        """The number of versions, and of predictions."""
        return len(self._versions)

    @property
    def weighs(self) -> bool:
        """Whether a gradient is changed before its update."""
        return self.correction_state.correction.weighs

    def leaves(self, read: Read) -> list[Tensor]:
        return list(self._versions[read].values())

    def stored(self) -> list[Tensor]:
        leaves = [leaf for version in self._versions.values() for leaf in version.values()]
        return leaves + [tensor for spare in self._spare for tensor in spare]

    def installed(self, read: Read) -> AbstractContextManager[None]:
        """Let the module compute with these weights. Raises KeyError for some that are not held."""
        return _Installed(self._places, self._versions[read])

    def averaged(self) -> AbstractContextManager[None]:
        return _Installed(self._places, self._average) if self._average else nullcontext()

    def begin_window(self, predicted: Iterable[Predicted] = ()) -> None:
        """Count versions from 0 again: version 0 is the newest one; make what is `predicted` by it."""
        assert self.count == 1, f"versions {[*self._versions]} outlived their window"
        self._versions = {0: self._versions.pop(self.newest)}
        self.newest = 0
        self.rates.prepare(self.updates)
        self._predict(predicted)

    def others(self) -> list[Read]:
        """Return what is held beside the newest version."""
        return [read for read in self._versions if read != self.newest]

    def release(self, read: Read) -> None:
        leaves = self._versions.pop(read).values()
        increment_version(leaves)  # their storage will be overwritten
        self._spare.append([leaf.data for leaf in leaves])

    def _fresh_leaves(self) -> dict[str, nn.Parameter]:
        return {name: _leaf(p) for name, p in self.live.items()}

    def _copied(self) -> list[Tensor]:
        """Return the values of the live parameters in other storage."""
        old = [p.data for p in self.live.values()]
        new = self._spare.pop() if self._spare else [torch.empty_like(t) for t in old]
        torch._foreach_copy_(new, old)
        return new

    def _move(self) -> None:
        """Move the live parameters, with their values, to other storage."""
        for parameter, data in zip(self.live.values(), self._copied(), strict=True):
            parameter.data = data

    def _predict(self, reads: Iterable[Predicted]) -> None:
        """Make what is predicted by the newest version, which the live parameters have."""
        for read in reads:
            data = self._copied() if self.live else []
            self.correction_state.advance(data, read.ahead, self.updates)
            leaves = self._fresh_leaves()
            for leaf, values in zip(leaves.values(), data, strict=True):
                leaf.data = values
            self._versions[read] = leaves

    # Gradients

    def accumulate_on(self, read: Read) -> None:
        """Move the batch's gradient to these leaves: one sum, in the order of the microbatches.

        Where gradients are weighed by the weights that they are of, there is a sum for each of these.
        """
        leaves = self._versions[read]
        if leaves is self._accumulating:
            return
        if self.weighs:
            self._weigh()
        else:
            for name, leaf in self._accumulating.items():
                leaves[name].grad, leaf.grad = leaf.grad, None
        self._accumulating = leaves

    def _weigh(self) -> None:
        """Weigh the sum of one kind of leaves, and add it to the batch's."""
        gradients = {name: leaf.grad for name, leaf in self._accumulating.items() if leaf.grad is not None}
        leaves = {name: self._accumulating[name] for name in gradients}
        if self._accumulating is not self._versions[self.newest]:
            self.correction_state.weigh(leaves)
        for name, gradient in gradients.items():
            others = self.live[name].grad
            self.live[name].grad = gradient if others is None else others + gradient
            leaves[name].grad = None

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

    def reduce(self) -> None:
        if self.weighs:
            self._weigh()
            return
        for name, leaf in self._accumulating.items():
            self.live[name].grad, leaf.grad = leaf.grad, None

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.live.items() if p.grad is not None}

    def gradient_norm(self, device: str, without: Collection[str] = ()) -> Tensor:
        """Return the 2-norm of the gradients, a scalar on the device, as torch.nn.utils computes it."""
        for parameter in self.live.values():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()  # whose values are those of the sum
        gradients = [numbers_of(g) for name, g in self.gradients().items() if name not in without]
        norm: Tensor = get_total_norm(gradients) if gradients else torch.zeros((), device=device)
        return norm

    # Update

    def step(
        self,
        keep: bool,
        skip: Tensor | None = None,
        delay: int = 0,
        predicted: Iterable[Predicted] = (),
        updates: bool = True,
    ) -> None:
        """Make the next version, and what is `predicted` by it; `keep` the previous one for later actions.

        `skip` 1 drops the gradient, which is `delay` updates late; without `updates` nobody uses it.
        """
        if keep and self.live:
            self._move()
        if self.optimizer is not None:
            self.rates.prepare(self.updates)
            factor = self.correction_state.correction.rate(self.updates, delay)
            if updates:
                with self.correction_state.following(self.updates, skip), self.rates.corrected(factor):
                    self._step(self.optimizer, skip)
            self.optimizer.zero_grad()  # as a program does
            for parameter in self.live.values():
                parameter.grad = None
        if self._ema is not None and updates:
            self._average_in(self._ema)
        self.updates += 1
        self.newest += 1
        if keep:
            self._versions[self.newest] = self._fresh_leaves()
        else:
            leaves = self._versions.pop(self.newest - 1)
            increment_version(leaves.values())
            self._versions[self.newest] = leaves
        self._predict(predicted)

    def _step(self, optimizer: Optimizer, skip: Tensor | None) -> None:
        """Step. Weights with their first gradient step alone, as torch's fused SGD refuses a mixture.

        A fused optimizer of torch skips by itself once all weights have their state; else the host decides.
        """
        gradients = self.gradients() if self._unmoved else {}
        first = self._unmoved & gradients.keys()
        by_itself = getattr(optimizer, "_step_supports_amp_scaling", False) and not first
        if skip is not None and by_itself:
            vars(optimizer)["found_inf"] = skip  # as torch.amp.GradScaler hands it over
            optimizer.step()
            del vars(optimizer)["found_inf"]
            return
        if skip is not None and skip:
            return
        self._unmoved -= first
        if 0 < len(first) < len(gradients) and any(group.get("fused") for group in optimizer.param_groups):
            for name, parameter in self.live.items():
                parameter.grad = gradients[name] if name in first else None
            optimizer.step()
            for name, parameter in self.live.items():
                parameter.grad = None if name in first else gradients.get(name)
        optimizer.step()

    def _average_in(self, decay: float) -> None:
        """Update the moving average, which begins with the weights after the first step."""
        if not self._average:
            self._average = {name: _leaf(p, copy=True) for name, p in self.live.items()}
        elif self.live:
            average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
            new = [p.data for p in self.live.values()]
            average([leaf.data for leaf in self._average.values()], new, self.updates)

    # State

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return the optimizer's state, by `PARAMETER/NUMBER`. Raises TypeError: see OptimizerState."""
        saved = self._state
        each = {name: saved.of(p) for name, p in self.live.items()} if saved else {}
        return {f"{name}/{number}": t for name, state in each.items() for number, t in enumerate(state)}

    def load_optimizer_state(self, state: Mapping[str, Tensor], updates: int) -> None:
        self.updates = updates
        self.correction_state.state.clear()
        for name, p in self.live.items():
            count = sum(path.rpartition("/")[0] == name for path in state)
            if count and self._state is not None:
                self._state.restore(p, [state[f"{name}/{number}"] for number in range(count)])
        self.correction_state.complete()
        self.rates.note()

    def average(self) -> dict[str, Tensor]:
        """Return the moving average of the weights by name; empty without one."""
        return {name: leaf.data for name, leaf in self._average.items()}

    @torch.no_grad()
    def load_average(self, average: Mapping[str, Tensor]) -> None:
        """Restore from `average`; a weight that is missing in it begins from its present value.

        An empty one begins anew with the next step.
        """
        if self._ema is not None:
            copies = {name: _leaf(p, copy=True) for name, p in self.live.items()}
            self._average = copies if average else {}
            for name in average.keys() & self.live.keys():
                numbers_of(self._average[name].data).copy_(average[name])

    def changing(self) -> tuple[list[Tensor], list[Any]]:
        """Return the tensors, and the lists, dicts and sets, that windows change."""
        tensors: list[Tensor] = [*self.live.values(), *self._average.values()]
        containers: list[Any] = [vars(self), self._versions, self._spare, self._unmoved, self._average]
        late = self.correction_state.state
        tensors += [t for t in tree_leaves(list(late.values())) if isinstance(t, Tensor)]
        containers += [late, *late.values(), vars(self.rates), self.rates.used]
        if self.optimizer is not None:
            state = list(self.optimizer.state.values())
            tensors += [t for t in tree_leaves(state) if isinstance(t, Tensor)]
            containers += [vars(self.optimizer), self.optimizer.state, *state, *self.optimizer.param_groups]
        return tensors, containers
