"""Trains a chain in one process as a pipeline of any schedule would.

Which version of the weights the forwards of a stage read is what the schedule's own program says; nothing
runs at the same time. It knows no messages, replicas, ties or clipping.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from pipetrain.config.rate import Rate
from pipetrain.correction import Correction
from pipetrain.data import Draw, Sampler, Split
from pipetrain.schedule.actions import Op, Program, Schedule, compute_program

Piece = tuple[Tensor, Tensor]
"""The inputs and targets of a microbatch, [n, ...] each."""
Tensors = Mapping[str, Tensor]
"""By the names of parameters."""
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
    """`optimizer`: with a group for each parameter, at the peak rate; `loss`: the mean of a microbatch.

    `feedback`: steps go on as they change, U + (U - U before): the error feedback of arXiv 2606.30634.
    """

    model: nn.Sequential
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Optimizer
    rate: Rate
    correction: Correction = field(default_factory=Correction)
    feedback: bool = False
    updates: int = 0

    def __post_init__(self) -> None:
        self.parameters = dict(self.model.named_parameters())
        groups = {group["params"][0]: group for group in self.optimizer.param_groups}
        self.groups = {name: groups[p] for name, p in self.parameters.items()}
        self._peaks = {name: group["lr"] for name, group in self.groups.items()}
        self.steps: Tensors = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self._squares = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self._before: Tensors = {}  # with feedback, the last step without it

    def train(self, pipeline: Pipeline, batches: Iterable[Sequence[Piece]], length: int) -> list[float]:
        """Train on so many batches, window by window; return the loss of each."""
        losses, rest, window = list[float](), iter(batches), pipeline.window or length
        for start in range(0, length, window):
            size = min(window, length - start)
            losses += self.window(pipeline, islice(rest, size), size)
        return losses

    def window(self, pipeline: Pipeline, batches: Iterable[Sequence[Piece]], length: int) -> list[float]:
        """Train on a window of batches in their microbatches; return the loss of each batch."""
        self.model.train()
        program = pipeline.program(length)
        reads = {(a.stage, a.mb): a.version for actions in program for a in actions if a.op is Op.F}
        layers = {name: number for number, (name, _) in enumerate(self.model.named_children())}
        stages = {name: bisect_right(pipeline.cuts, layers[name.split(".")[0]]) for name in self.parameters}
        versions, losses, mb = {0: _Version.newest(self)}, list[float](), 0
        for batch, pieces in enumerate(batches):
            leaves: dict[tuple[str, int], Tensor] = {}
            count, mean = sum(len(y) for _, y in pieces), 0.0
            for x, y in pieces:
                keys = [(name, reads[stage, mb]) for name, stage in stages.items()]
                for name, version in keys:
                    if (name, version) not in leaves:
                        read = versions[version].read(name, batch - version, self)
                        leaves[name, version] = read.requires_grad_()
                weights = {key[0]: leaves[key] for key in keys}
                loss = self.loss(functional_call(self.model, weights, (x,)), y) * (len(y) / count)
                loss.backward()  # type: ignore[no-untyped-call]
                mean, mb = mean + loss.item(), mb + 1
            self._step(leaves, batch)
            oldest = min((reads[stage, mb] for stage in stages.values() if (stage, mb) in reads), default=0)
            versions = {number: version for number, version in versions.items() if number >= oldest}
            versions[batch + 1] = _Version.newest(self)
            losses.append(mean)
        return losses

    @torch.no_grad()
    def _step(self, leaves: Mapping[tuple[str, int], Tensor], batch: int) -> None:
        """Update by the gradients of the leaves, which are of these parameters and versions."""
        fraction, late = self.rate(self.updates), dict.fromkeys(self.parameters, 0)
        before = {name: p.clone() for name, p in self.parameters.items()}
        for (name, version), leaf in leaves.items():
            p, delay = self.parameters[name], batch - version
            assert leaf.grad is not None
            if delay and self.correction.weighs:
                self.correction.weigh([leaf.grad], [p - leaf], [self._squares[name].sqrt()])
            p.grad = leaf.grad if p.grad is None else p.grad + leaf.grad
            late[name] = max(late[name], delay)
        for name, group in self.groups.items():
            group["lr"] = self._peaks[name] * fraction * self.correction.rate(self.updates, late[name])
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.feedback:
            steps = {name: p - before[name] for name, p in self.parameters.items()}
            for name, step in steps.items():
                self.parameters[name].add_(step - self._before.get(name, step))
            self._before = steps
        self.steps = {name: p - before[name] for name, p in self.parameters.items()}
        self.updates += 1
        if self.correction.weighs:
            share = (1 - DECAY) / (1 - DECAY**self.updates)
            for name, step in self.steps.items():
                self._squares[name].lerp_((step / fraction).square(), share)

    @torch.no_grad()
    def outputs(self, x: Tensor) -> Tensor:
        """Return what the model gives in an evaluation."""
        outputs: Tensor = self.model.eval()(x)
        return outputs


@dataclass(frozen=True)
class _Version:
    """Weights, the step that made them, and what that is at the rate of the coming update."""

    weights: Tensors
    steps: Tensors
    ratio: float

    @classmethod
    def newest(cls, emulation: Emulation) -> _Version:
        rate, updates = emulation.rate, emulation.updates
        last = rate(updates - 1) if updates else 0.0
        weights = {name: p.detach().clone() for name, p in emulation.parameters.items()}
        return cls(weights, emulation.steps, rate(updates) / last if last else 0.0)

    def read(self, name: str, delay: int, emulation: Emulation) -> Tensor:
        """Return a copy of what a forward reads if its update comes so many updates later."""
        if not (delay and emulation.correction.predicts):
            return self.weights[name].clone()
        group = emulation.groups[name]
        momentum = group["momentum"] if "momentum" in group else group["betas"][0]
        reach = emulation.correction.reach(delay, momentum) * self.ratio
        return self.weights[name] + reach * self.steps[name]


@dataclass(frozen=True)
class Feed:
    """The samples of a run in the order of its seed, as pipetrain draws them."""

    split: Split
    batch_size: int
    microbatches: int
    seed: int

    def __len__(self) -> int:
        return len(self.split) // self.batch_size

    def epoch(self, number: int) -> Iterable[list[Piece]]:
        """Yield the batches of an epoch in their microbatches."""
        sampler = Sampler(len(self.split), self.batch_size, self.microbatches, self.seed, drop_last=True)
        draw = Draw(self.seed, number)
        for batch in sampler.epoch(number):
            yield [(self.split.inputs(ids, draw), self.split.targets(ids, draw)) for ids in batch]  # type: ignore[misc]
