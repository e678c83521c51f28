"""A correction's state for a stage's weights: their last step, and the typical size of a step.

The last step is the last change of the weights, whatever the optimizer: for SGD with momentum v it is -lr v,
for Adam -lr m / (sqrt v + e). It is scaled to the rate of the coming update. The typical size of a step is
the root of the mean of squared steps at the peak rate. If an update is skipped, the last one that was made
counts again, as the optimizer's momentum stays too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pipetrain.correction import Correction

STEP, SQUARE = "last_step", "squared_step"  # keys of the state of a weight
RATE = "last_rate"  # of the last step, as a fraction of the peak rate
SAVED_KEYS = (STEP, SQUARE)
DECAY = 0.999  # of the mean of squared steps


class CorrectionState:
    """The state of a correction for some weights, by name.

    `groups`: of their optimizer; `rates`: returns each group's rate of an update, as a fraction of its peak.
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        groups: Sequence[Mapping[str, Any]],
        rates: Callable[[int], Sequence[float]],
        correction: Correction,
    ) -> None:
        self.correction = correction
        self.state: dict[Tensor, dict[str, Any]] = {}
        """By weight, the last step and the mean of squared steps, once there was a step."""
        self._weights, self._by_group = weights, rates
        members = {p: number for number, group in enumerate(groups) for p in group["params"]}
        self._numbers = [members[p] for p in weights.values()] if members else []
        self._groups = [groups[number] for number in self._numbers]

    def _rates(self, update: int) -> list[float]:
        """Return the rate of an update for each weight, as a fraction of its peak."""
        rates = self._by_group(update)
        return [rates[number] for number in self._numbers]

    def _changes(self, update: int) -> list[float]:
        """Return the rate of an update for each weight, as a multiple of that of its last step."""
        rates, rates_before = self._rates(update), self._rates(max(update - 1, 0))
        lasts = [
            self.state[p].get(RATE, before_rate)
            for p, before_rate in zip(self._weights.values(), rates_before, strict=True)
        ]
        return [rate / last if last else 0.0 for rate, last in zip(rates, lasts, strict=True)]

    @contextmanager
    def following(self, update: int, skip: Tensor | None = None) -> Iterator[None]:
        """Record how the update in this context, which is skipped if `skip` is 1, moves the weights."""
        if not self.correction.copies or not self._weights:
            yield
            return
        live = [p.data for p in self._weights.values()]
        fresh = not self.state
        for p in self._weights.values() if fresh else ():
            self.state[p] = {STEP: torch.zeros_like(p.data)}
        states = [self.state[p] for p in self._weights.values()]
        steps = [state[STEP] for state in states]
        last = torch._foreach_mul(steps, self._changes(update)) if skip is not None else ()
        for state, rate in zip(states, self._rates(update), strict=True):
            state[RATE] = rate
        torch._foreach_copy_(steps, live)
        yield
        torch._foreach_mul_(steps, -1)
        torch._foreach_add_(steps, live)
        if skip is not None:  # the device decides
            torch._foreach_add_(steps, torch._foreach_mul(last, skip))
        if self.correction.weighs:
            self._average([state for state in states if state[RATE]], update + 1)

    def _average(self, states: Sequence[dict[str, Any]], count: int) -> None:
        """Add the squares of last steps, at the peak rate, to their mean, which begins with the first."""
        if not states:
            return
        steps = torch._foreach_div([state[STEP] for state in states], [state[RATE] for state in states])
        sizes = _widened(torch._foreach_abs(steps))
        squares = torch._foreach_mul(sizes, sizes)
        for state, square in zip(states, squares, strict=True):
            state.setdefault(SQUARE, square)
        means = [state[SQUARE] for state in states]
        torch._foreach_lerp_(means, [*squares], (1 - DECAY) / (1 - DECAY**count))

    def named_values(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a weight, in the form that it has after a first update."""
        step = torch.zeros_like(parameter.data)
        fresh = dict(zip(SAVED_KEYS[: self.correction.copies], (step, *_widened([step.abs()])), strict=False))
        saved = self.state.get(parameter, {})
        return {**fresh, **{key: saved[key] for key in SAVED_KEYS if key in saved}}

    def complete(self) -> None:
        """After a load, hold what this correction needs; a weight that was frozen has not moved yet."""
        loaded, keys = dict(self.state), SAVED_KEYS[: self.correction.copies]
        self.state.clear()
        for p in self._weights.values() if loaded and keys else ():
            state = loaded.get(p, {STEP: torch.zeros_like(p.data)})
            self.state[p] = {key: state[key] for key in (*keys, RATE) if key in state}

    def advance(self, data: Sequence[Tensor], ahead: int, update: int) -> None:
        """Move copies of the weights to the prediction for `ahead` updates later; `update` comes next."""
        if not (update and self.state and data):
            return
        steps = [self.state[p][STEP] for p in self._weights.values()]
        changes = zip(self._groups, self._changes(update), strict=True)
        reach = [self.correction.reach(ahead, _momentum(group)) * change for group, change in changes]
        torch._foreach_add_([*data], torch._foreach_mul(steps, reach))

    @torch.no_grad()
    def weigh(self, leaves: Mapping[str, Tensor]) -> None:
        """Change the gradients of leaves other than the newest weights, in place."""
        states = [self.state.get(self._weights[name], {}) for name in leaves]
        if leaves and all(SQUARE in state for state in states):
            newest = [self._weights[name].data for name in leaves]
            gaps = torch._foreach_sub(newest, [leaf.data for leaf in leaves.values()])
            gradients = [leaf.grad for leaf in leaves.values() if leaf.grad is not None]
            self.correction.weigh(gradients, gaps, torch._foreach_sqrt([state[SQUARE] for state in states]))


def _widened(sizes: Sequence[Tensor]) -> list[Tensor]:
    """Return sizes in a dtype in which their squares do not vanish: for 16 bits, 32."""
    return [size.to(torch.promote_types(size.dtype, torch.float32)) for size in sizes]


def _momentum(group: Mapping[str, Any]) -> float:
    """Return how much of a step the optimizer's next step repeats."""
    return float(group.get("momentum", group.get("betas", (0.0,))[0]))
