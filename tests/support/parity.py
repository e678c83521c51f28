"""Any model trained through Pipeline, on some ranks or one, and in one process by plain PyTorch.

The reference runs the user's module itself, with the weights that the theory lets each stage read. A plain
loop is what the programs of users are held against.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from pipetrain import Pipeline
from pipetrain.model.specs import Size, Value, as_tuple, on_each
from pipetrain.plan.plan import Plan
from pipetrain.runtime.comm.collectives import World
from pipetrain.tasks import Task
from tests.support.reference import DELAYS, Reference, copied

Batch = tuple[Value, Value]
SEED = 5
MOMENTUM = partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
ADAMW = partial(AdamW, lr=0.01)


@dataclass(frozen=True)
class Subject:
    """A model in float64 with the batches of a pass, each an update.

    `whole`: where weights have no versions, the pieces of a batch train it as the whole batch does.
    `factory`: the model is made by Pipeline, and has its initial weights from there.
    """

    model: nn.Module
    batches: Sequence[Batch]
    task: Task
    whole: bool = False
    factory: Callable[[], nn.Module] | None = None


@dataclass(frozen=True)
class Way:
    """How to train. `window`: of `train`, None: the schedule's; `options` as those of Pipeline."""

    schedule: str
    microbatches: int = 3
    window: int | None = None
    by_step: bool = False
    optimizer: Callable[[Any], Optimizer] = MOMENTUM
    options: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 2

    def __str__(self) -> str:
        return f"{self.schedule} on {self.ranks}"


GROUPS: dict[str, dict[str, Any]] = {
    "norms_and_biases": {"weight_decay": 0.0},
    "head": {"params": r"6\..*", "lr": 0.02},
}


def optimizer_of(model: nn.Module, way: Way) -> Optimizer:
    """Return the optimizer of a whole model, of GROUPS by hand: matrices, vectors, and the head's matrix."""
    if "param_groups" not in way.options:
        return way.optimizer(model.parameters())
    groups: dict[str, Any] = {
        "rest": {"params": []},
        "vectors": {"params": [], "weight_decay": 0.0},
        "head": {"params": [], "lr": 0.02},
    }
    for name, p in model.named_parameters():
        groups["vectors" if p.dim() < 2 else "head" if name.startswith("6.") else "rest"]["params"].append(p)
    return way.optimizer([*groups.values()])


def falling(update: int) -> float:
    return float(0.8**update)


def train(subject: Subject, way: Way, tolerance: float = 1e-11) -> dict[str, Any]:
    """Train, evaluate and take the weights on this rank; on rank 0 hold all against one process.

    Returns what must be the same on all ranks. Other ranks begin with other weights and read other batches.
    """
    rank, model, batches = World.current().rank, deepcopy(subject.model), subject.batches
    if rank:
        batches = batches[::-1]
        for parameter in subject.model.parameters():
            parameter.data.mul_(2)
    options = {"lr_schedule": falling, "seed": SEED, "device": "cpu", "threads": 1, "partition": "even"}
    given = subject.factory or subject.model, subject.task, way.optimizer, way.schedule
    with Pipeline(*given, microbatches=way.microbatches, **{**options, **way.options}) as pipe:
        initial, averages = pipe.state_dict(), "ema" in way.options
        if way.by_step:
            losses = [pipe.step(*batch) for batch in batches]
        else:
            losses = list(pipe.train(batches, window=way.window))
        told = {"losses": losses, "evaluation": pipe.evaluate(batches), "updates": pipe.updates}
        told["metrics"], told["layers"] = pipe.metrics, [layer.name for layer in pipe.plan.layers]
        state, averaged = pipe.state_dict(), pipe.state_dict(ema=True) if averages else {}
        if rank:
            assert not initial | state | averaged, "only rank 0 has the whole state"
            return told
    if subject.factory:
        model.load_state_dict(initial)
    before = copied(model.state_dict())
    assert not (before.keys() - state.keys()) & dict(model.named_parameters()).keys()  # tied ones have two
    assert all(torch.equal(tensor, before[name]) for name, tensor in initial.items())
    reference, wanted = referred(subject, way, model, pipe.plan)
    close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    close(losses, wanted, msg=lambda m: f"{way}: {m}")
    for found, trained in ((state, model), (averaged, reference.average and reference.average.module)):
        for name, tensor in found.items():
            close(tensor, trained.state_dict()[name], msg=lambda m, name=name: f"{way}: {name}: {m}")
    moved = [name for name, tensor in before.items() if not torch.equal(tensor, model.state_dict()[name])]
    assert len(moved) > len(before) / 2
    close(told["evaluation"], reference.evaluated(batches), msg=lambda m: f"{way}: {m}")
    if not way.by_step:
        weights = [float(subject.task.weight(y)) for _, y in batches]
        peak = optimizer_of(model, way).param_groups[0]["lr"]
        close(pipe.metrics["loss"], sum(map(float.__mul__, losses, weights)) / sum(weights))
        close(pipe.metrics["learning_rate"], peak * falling(len(losses) - 1))
    return told


def referred(subject: Subject, way: Way, model: nn.Module, plan: Plan) -> tuple[Reference, list[float]]:
    """Train a pass by the reference; return it and the loss of each update."""
    reference = Reference(model, plan, subject.task, optimizer_of(model, way), falling)
    delay_of = DELAYS[way.schedule]
    m = 1 if subject.whole and delay_of is DELAYS["1f1b"] else way.microbatches
    length, losses = way.window or plan.settings.window or len(subject.batches), []
    cut = [_pieces(batch, m) for batch in subject.batches]
    for start in range(0, len(cut), length):
        for found in reference.window(delay_of(plan.stages, m), cut[start : start + length]):
            losses.append(sum(weight * loss for weight, loss in found) / sum(weight for weight, _ in found))
    return reference, losses


def _pieces(batch: Batch, m: int) -> list[Batch]:
    sizes = [size.samples for size in Size(len(as_tuple(batch[0])[0])).pieces(m)]
    return [*zip(*(cut_batches(value, sizes) for value in batch), strict=True)]


def cut_batches(value: Value, sizes: Sequence[int]) -> Iterator[Value]:
    """Cut along the samples."""
    ends = pairwise(accumulate(sizes, initial=0))
    return (on_each(value, lambda t, start=start, end=end: t[start:end]) for start, end in ends)


Loss = Callable[[nn.Module, Any], Tensor]
"""(model, batch) -> its mean loss."""


def plainly(model: nn.Module, optimizer: Optimizer, loss: Loss, batches: Iterable[Any]) -> list[float]:
    """Train a model, an update a batch; return the losses."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        found = loss(model, batch)
        found.backward()
        optimizer.step()
        losses.append(found.item())
    return losses


def of_pairs(loss: Callable[[Any, Tensor], Tensor], microbatches: int = 1) -> Loss:
    """Return the loss of batches (inputs, targets): the mean of those of its microbatches, of equal size."""

    def mean(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        pieces = zip(*(tensor.chunk(microbatches) for tensor in batch), strict=True)
        return torch.stack([loss(model(x), y) for x, y in pieces]).mean()

    return mean


@torch.no_grad()
def evaluated(model: nn.Module, loss: Loss, batches: Iterable[Any]) -> list[float]:
    """Return the loss of each batch in evaluation mode; modes are as they were."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    losses = [loss(model, batch).item() for batch in batches]
    for module, mode in modes:
        module.training = mode
    return losses
