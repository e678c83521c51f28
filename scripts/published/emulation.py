"""Trains a chain in one process as a pipeline of any schedule would, several runs at once.

Which version of the weights the forwards of a stage read is what the schedule's own program says; nothing
runs at the same time. The runs have seeds and rates of their own and are one batch of weights, so that a step
of all costs little more than the numbers in it. It knows no messages, replicas, ties or clipping.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from pipetrain.config.rate import Rate
from pipetrain.correction import Correction
from pipetrain.data import Draw, Sampler, Split
from pipetrain.schedule.actions import Op, Program, Schedule, compute_program
from published.stacked_optimizers import Optimizer

Piece = tuple[Tensor, Tensor]
"""The inputs and targets of a microbatch, [runs, n, ...] each."""
Tensors = dict[str, Tensor]
"""Of each parameter [runs, ...], by its name."""
DECAY = 0.999  # of the running mean of squared steps


@dataclass(frozen=True)
class Pipeline:
    """A chain cut before the layers `cuts`, and its schedule. `window`: in batches; None: an epoch."""

    schedule: Schedule
    ranks: int = 1
    microbatches: int = 1
    cuts: Sequence[int] = ()
    window: int | None = None

    def program(self, batches: int) -> Program:
        return compute_program(self.schedule, self.ranks, batches, self.microbatches)


def even_cuts(layers: int, stages: int) -> list[int]:
    """Return cuts that leave about as many layers to each stage."""
    return [round(layers * stage / stages) for stage in range(1, stages)]


@dataclass
class Emulation:
    """`models`: of one structure, with the first weights of each run; `loss`: the mean of a microbatch."""

    models: Sequence[nn.Sequential]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Optimizer
    rate: Rate
    correction: Correction = field(default_factory=Correction)
    updates: int = 0

    def __post_init__(self) -> None:
        weights, self.buffers = stack_module_state([*self.models])
        self.weights: Tensors = {name: weight.detach() for name, weight in weights.items()}
        self.steps: Tensors = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self._squares: Tensors = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}

    @cached_property
    def layers(self) -> dict[str, int]:
        """The layer of each parameter."""
        numbers = {name: number for number, (name, _) in enumerate(self.models[0].named_children())}
        return {name: numbers[name.split(".")[0]] for name in self.weights}

    def train(self, pipeline: Pipeline, batches: Iterable[Sequence[Piece]], length: int) -> list[Tensor]:
        """Train on so many batches, window by window; return the losses [runs] of each."""
        losses, rest, window = list[Tensor](), iter(batches), pipeline.window or length
        for start in range(0, length, window):
            size = min(window, length - start)
            losses += self.window(pipeline, islice(rest, size), size)
        return losses

    def window(self, pipeline: Pipeline, batches: Iterable[Sequence[Piece]], length: int) -> list[Tensor]:
        """Train on a window of batches in their microbatches; return the losses [runs] of each batch."""
        program = pipeline.program(length)
        reads = {(a.stage, a.mb): a.version for actions in program for a in actions if a.op is Op.F}
        homes = {name: bisect_right(pipeline.cuts, layer) for name, layer in self.layers.items()}
        versions, losses, mb = {0: _Version.of(self)}, list[Tensor](), 0
        for batch, pieces in enumerate(batches):
            used: dict[tuple[str, int], Tensor] = {}
            sums: dict[tuple[str, int], Tensor] = {}
            count, mean = sum(y.shape[1] for _, y in pieces), torch.zeros(())
            for x, y in pieces:
                keys = [(name, reads[stage, mb]) for name, stage in homes.items()]
                for name, version in keys:
                    if (name, version) not in used:
                        read = versions[version].read(name, batch - version, self)
                        used[name, version] = read.detach().requires_grad_()
                leaves = [used[key] for key in keys]
                loss = self._losses(dict(zip(homes, leaves, strict=True)), x, y) * (y.shape[1] / count)
                for key, gradient in zip(keys, torch.autograd.grad(loss.sum(), leaves), strict=True):
                    sums[key] = sums[key] + gradient if key in sums else gradient
                mean, mb = mean + loss.detach(), mb + 1
            self._step(used, sums, {key: batch - key[1] for key in sums})
            oldest = min((reads[stage, mb] for stage in homes.values() if (stage, mb) in reads), default=0)
            versions = {v: of for v, of in versions.items() if v >= oldest}
            versions[batch + 1] = _Version.of(self)
            losses.append(mean)
        return losses

    def _losses(self, weights: Tensors, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of each run, [runs]."""
        return vmap(self._loss_of)(weights, self.buffers, x, y)

    def _loss_of(self, weights: Tensors, buffers: Tensors, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(functional_call(self.models[0].train(), (weights, buffers), (x,)), y)

    @torch.no_grad()
    def _step(
        self,
        used: Mapping[tuple[str, int], Tensor],
        sums: Mapping[tuple[str, int], Tensor],
        delays: Mapping[tuple[str, int], int],
    ) -> None:
        """Update by the sums of gradients of each version that was used, after the delays of each."""
        fraction, before, late = self.rate(self.updates), self.weights, dict.fromkeys(self.weights, 0)
        total: Tensors = {}
        for (name, version), gradient in sums.items():
            if (delay := delays[name, version]) and self.correction.weighs:
                gaps = self.weights[name] - used[name, version]
                self.correction.weigh([gradient], [gaps], [self._squares[name].sqrt()])
            total[name] = total[name] + gradient if name in total else gradient
            late[name] = max(late[name], delay)
        rates = {name: fraction * self.correction.rate(self.updates, delay) for name, delay in late.items()}
        self.weights = self.optimizer.stepped(before, total, rates)
        self.steps = {name: weight - before[name] for name, weight in self.weights.items()}
        self.updates += 1
        if self.correction.weighs:
            share = (1 - DECAY) / (1 - DECAY**self.updates)
            for name, step in self.steps.items():
                self._squares[name].lerp_((step / fraction).square(), share)

    @torch.no_grad()
    def outputs(self, x: Tensor) -> Tensor:
        """Return what each run's model gives in an evaluation, [runs, n, ...], of inputs [n, ...]."""
        call = partial(functional_call, self.models[0].eval())
        outputs: Tensor = vmap(lambda *state: call(state, (x,)))(self.weights, self.buffers)
        return outputs


@dataclass(frozen=True)
class _Version:
    """Weights, the step that made them, and what that is at the rate of the coming update."""

    weights: Tensors
    steps: Tensors
    ratio: float

    @classmethod
    def of(cls, now: Emulation) -> _Version:
        last = now.rate(now.updates - 1) if now.updates else 0.0
        return cls(now.weights, now.steps, now.rate(now.updates) / last if last else 0.0)

    def read(self, name: str, delay: int, now: Emulation) -> Tensor:
        """Return what a forward reads of which the update comes so many updates later."""
        if not (delay and now.correction.predicts):
            return self.weights[name]
        reach = now.correction.reach(delay, now.optimizer.momentum(name)) * self.ratio
        return self.weights[name] + reach * self.steps[name]


@dataclass(frozen=True)
class Feed:
    """The samples of several runs, each in the order of its seed, as pipetrain draws them."""

    split: Split
    batch_size: int
    microbatches: int
    seeds: Sequence[int]

    def samplers(self) -> list[Sampler]:
        size = len(self.split), self.batch_size, self.microbatches
        return [Sampler(*size, seed, drop_last=True) for seed in self.seeds]

    def __len__(self) -> int:
        return len(self.split) // self.batch_size

    def epoch(self, number: int) -> Iterable[list[Piece]]:
        """Yield the batches of an epoch in their microbatches."""
        read = (partial(self._batch, Draw(seed, number)) for seed in self.seeds)
        orders = [sampler.epoch(number) for sampler in self.samplers()]
        by_run = [map(of, order) for of, order in zip(read, orders, strict=True)]
        for batch in zip(*by_run, strict=True):
            yield [
                (torch.stack(x), torch.stack(y))
                for x, y in (zip(*piece, strict=True) for piece in zip(*batch, strict=True))
            ]

    def _batch(self, draw: Draw, pieces: Sequence[Tensor]) -> list[Piece]:
        read = self.split.inputs, self.split.targets
        return [tuple(of(ids, draw) for of in read) for ids in pieces]  # type: ignore[misc]
