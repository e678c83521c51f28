"""The weight versions of one stage: when there is a new one, at which rate, and what is predicted from it.

A ParameterStore defines how parameters, versions and gradients lie in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipetrain.config.rate import LearningRate
from pipetrain.correction import Correction
from pipetrain.runtime.stage.correction_state import SAVED_KEYS, CorrectionState
from pipetrain.runtime.stage.learning_rates import Rates
from pipetrain.runtime.stage.optimizer_state import OptimizerState
from pipetrain.runtime.stage.parameter_store import ParameterStore
from pipetrain.schedule.actions import Predicted, Read


class Weights:
    """Versions 0, 1, 2, ... of the parameters of a store, counted from the start of a window.

    `ema`: the decay of an exponential moving average of the weights after each step, as in
    torch.optim.swa_utils. `correction`: of late gradients.
    """

    def __init__(
        self,
        store: ParameterStore,
        rate: LearningRate,
        ema: float | None = None,
        correction: Correction | None = None,
    ) -> None:
        self.store = store
        correction, optimizer, parameters = correction or Correction(), store.optimizer, store.parameters
        groups = optimizer.param_groups if optimizer else []
        self.rates = Rates(optimizer, rate, parameters.get(rate.shown))
        self.correction_state = CorrectionState(parameters, groups, self.rates.fractions, correction)
        """The correction's state for these weights."""
        self.weighs = correction.weighs
        """Whether a gradient is changed before its update."""
        options_we_set = {"params"} if rate.fraction is None else {"params", "lr"}
        corrected = self.correction_state.state
        self._state = OptimizerState(optimizer, corrected, options_we_set) if optimizer else None
        self._ema = ema
        self.updates = 0

    def begin_window(self, predicted: Iterable[Predicted] = ()) -> None:
        """Count versions from 0 again: version 0 is the newest one; make the `predicted` ones from it."""
        self.store.restart_count()
        self.rates.prepare(self.updates)
        self._predict(predicted)

    def _predict(self, reads: Iterable[Predicted]) -> None:
        for read in reads:
            self.correction_state.advance(self.store.add_copy(read), read.ahead, self.updates)

    # Gradients

    def accumulate_on(self, read: Read) -> None:
        """Accumulate on this version.

        If gradients are weighed by the weights they were computed with, each of these has its own sum.
        """
        if self.weighs and not self.store.accumulates_on(read):
            self._weigh()
        self.store.accumulate_on(read)

    def reduce(self) -> None:
        """End the batch's gradient, which the next step uses."""
        if self.weighs:
            self._weigh()
        else:
            self.store.reduce()

    def _weigh(self) -> None:
        """Weigh the sum of these leaves, and add it to the batch's."""
        if not self.store.accumulates_on(self.store.newest):
            self.correction_state.weigh(self.store.accumulated())
        self.store.reduce_part()

    # Update

    def step(
        self,
        keep: bool,
        skip: Tensor | None = None,
        delay: int = 0,
        predicted: Iterable[Predicted] = (),
        updates: bool = True,
    ) -> None:
        """Make the next version, and the `predicted` ones from it; `keep` the previous one for later actions.

        `skip` 1 drops the gradient, which is `delay` updates late; without `updates` it is not used.
        """
        store = self.store
        if keep:  # a later action reads the version that the step would overwrite
            store.keep()
        if store.optimizer is not None:
            self.rates.prepare(self.updates)
            factor = self.correction_state.correction.rate(self.updates, delay)
            if updates:
                with self.correction_state.following(self.updates, skip), self.rates.corrected(factor):
                    store.step(skip)
        store.drop_gradients()
        if self._ema is not None and updates:
            store.average_in(self._ema, self.updates)
        self.updates += 1
        store.add_version(keep)
        self._predict(predicted)

    # State

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return the optimizer's state, by `PARAMETER/NUMBER`. Raises TypeError: see OptimizerState."""
        saved = self._state
        by_name = {name: saved.tensors_of(p) for name, p in self.store.parameters.items()} if saved else {}
        return {f"{name}/{number}": t for name, state in by_name.items() for number, t in enumerate(state)}

    def count_from(self, updates: int) -> None:
        """Go on after so many updates."""
        self.updates = updates

    def load_optimizer_state(self, state: Mapping[str, Tensor], updates: int) -> None:
        self.count_from(updates)
        self.correction_state.state.clear()
        for name, p in self.store.parameters.items():
            count = sum(path.rpartition("/")[0] == name for path in state)
            if count and self._state is not None:
                self._state.restore(p, [state[f"{name}/{number}"] for number in range(count)])
        self.correction_state.complete()
        self.rates.accept_current()

    def load_average(self, average: Mapping[str, Tensor]) -> None:
        """Restore the moving average, if there is one; see ParameterStore.load_average."""
        if self._ema is not None:
            self.store.load_average(average)

    def named_state(self) -> dict[str, dict[str, Any]]:
        """Return the state of each parameter by key, in its own tensors.

        Before the first update it has the form that it would have after one.
        """
        by_name: dict[str, dict[str, Any]] = {}
        for name, parameter in self.store.parameters.items():
            state = self.store.optimizer_values(name, fresh=not self.updates)
            state |= self.correction_state.named_values(parameter)
            by_name[name] = {key: value for key, value in state.items() if value is not None}
        return {name: values for name, values in by_name.items() if values}

    def load_named_state(self, by_name: Mapping[str, Mapping[str, Any]]) -> None:
        for name in by_name.keys() & self.store.parameters.keys():
            for key, value in by_name[name].items():
                copied = value.clone() if isinstance(value, Tensor) else value
                if key in SAVED_KEYS:
                    state = self.correction_state.state
                    state.setdefault(self.store.parameters[name], {})[key] = copied
                else:
                    self.store.set_optimizer_value(name, key, copied)

    def held_tensors(self) -> tuple[list[Tensor], list[Any]]:
        """Return all held tensors, with gradients, and the state of the optimizer and the correction."""
        tensors, state = self.store.held_tensors()
        return tensors, [*state, *self.correction_state.state.values()]

    def changing(self) -> tuple[list[Tensor], list[Any]]:
        """Return the tensors, and the lists, dicts and sets, that windows change."""
        tensors, containers = self.store.changing()
        state = self.correction_state.state
        tensors += [t for t in tree_leaves(list(state.values())) if isinstance(t, Tensor)]
        return tensors, [*containers, vars(self), state, *state.values(), vars(self.rates), self.rates.used]
