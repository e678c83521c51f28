"""Any model trained through Pipeline, on some ranks or one, and in one process by plain PyTorch.

The reference runs the user's module itself, with the weights that the theory lets each stage read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Store
from torch.func import functional_call
from torch.optim import SGD, AdamW, Optimizer

from pipetrain import Pipeline
from pipetrain.data.loader import pieces
from pipetrain.ending import end_by_sentence
from pipetrain.network.chain import network_of
from pipetrain.network.draws import Seeds, drawing
from pipetrain.network.network import Network
from pipetrain.network.values import Value, ValueSpec, as_tuple, on_each
from pipetrain.plan.cut import cut_layers
from pipetrain.plan.plan import Plan
from pipetrain.runtime.ranks import World
from pipetrain.tasks import Task
from tests.support.reference import DELAYS, Loop, average_of, copied, drops, grouped

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
    "head": {"params": r"^6\.", "lr": 0.02},
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


@contextmanager
def process_group(world: World, store: Store | None) -> Iterator[None]:
    """Be in a group that the program has made itself, which Pipeline uses and leaves alone."""
    if store is None or world.size == 1:
        yield
        return
    end_by_sentence()
    hook = sys.excepthook
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    yield
    dist.barrier()  # it was not closed
    dist.destroy_process_group()
    sys.excepthook = hook  # torch names the rank once more for each group


def train(subject: Subject, way: Way, tolerance: float = 1e-11) -> dict[str, Any]:
    """Train, evaluate and take the weights on this rank; on rank 0 hold all against one process.

    Returns what must be the same on all ranks. Other ranks begin with other weights and read other batches.
    """
    rank, twin = World.current().rank, deepcopy(subject.model)
    for parameter in subject.model.parameters() if rank else ():
        parameter.data.mul_(2)
    given = {
        "lr_schedule": falling,
        "seed": SEED,
        "device": "cpu",
        "threads": 1,
        "partition": "even",
        **way.options,
    }
    model, batches = subject.factory or subject.model, subject.batches[:: -1 if rank else 1]
    with Pipeline(
        model, subject.task, way.optimizer, way.schedule, microbatches=way.microbatches, **given
    ) as pipe:
        initial = pipe.state_dict()
        if way.by_step:
            losses = [pipe.step(*batch) for batch in batches]
        else:
            losses = list(pipe.train(batches, window=way.window))
        told = {"losses": losses, "evaluation": pipe.evaluate(batches), "updates": pipe.updates}
        told["metrics"], told["layers"] = pipe.metrics, [layer.name for layer in pipe.plan.layers]
        state, averaged = pipe.state_dict(), pipe.state_dict(ema=True) if "ema" in way.options else {}
        if rank:
            assert not initial | state | averaged, "only rank 0 has the whole state"
            return told
        twin.load_state_dict(initial if subject.factory else twin.state_dict())
        length = way.window or pipe._settings.window or len(batches)
        windows = [batches[start : start + length] for start in range(0, len(batches), length)]
        _hold(Reference(subject, twin, pipe.plan, way, windows), told, initial, state, averaged, tolerance)
    return told


def _hold(
    reference: Reference,
    told: Mapping[str, Any],
    initial: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    averaged: Mapping[str, Tensor],
    tolerance: float,
) -> None:
    """Hold losses, weights, buffers, their average and the evaluation against the reference."""
    close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    model, subject, way = reference.model, reference.subject, reference.way
    before = copied(model.state_dict())
    known = dict(model.named_parameters())
    missing = model.state_dict().keys() - state.keys()
    assert not missing & known.keys(), missing  # the second names of tied weights are
    assert all(torch.equal(tensor, before[name]) for name, tensor in initial.items())
    losses = reference.train()
    close(told["losses"], losses, msg=lambda m: f"{way}: {m}")
    for found, wanted in ((state, model), (averaged, reference.average and reference.average.module)):
        for name, tensor in found.items():
            close(tensor, wanted.state_dict()[name], msg=lambda m, name=name: f"{way}: {name}: {m}")
    moved = [name for name, tensor in before.items() if not torch.equal(tensor, model.state_dict()[name])]
    assert len(moved) > len(before) / 2
    if reference.average:
        model.load_state_dict(averaged)
    close(told["evaluation"], reference.evaluated(), msg=lambda m: f"{way}: {m}")
    weights = [float(subject.task.weight(y)) for _, y in subject.batches]
    if not way.by_step:
        mean = sum(map(float.__mul__, losses, weights)) / sum(weights)
        close(told["metrics"]["loss"], mean)
        close(told["metrics"]["learning_rate"], reference.peak * reference.rate(len(losses) - 1))


class Reference:
    """One process, in which each stage reads the weights that the theory says.

    A weight that several stages share is, in each of them, of that stage's version, and gets the sum of their
    gradients. With dropout the module is one part of all layers, which seeds them as every cut does.
    """

    def __init__(
        self, subject: Subject, model: nn.Module, plan: Plan, way: Way, windows: Sequence[Sequence[Batch]]
    ) -> None:
        self.subject, self.model, self.plan, self.way = subject, model, plan, way
        self._windows = windows
        self._network: Network | None = None
        if drops(model):
            self._network = network_of(model, ValueSpec.in_batch(subject.batches[0][0]))
        delay_of = DELAYS[way.schedule]
        flushes = delay_of is DELAYS["1f1b"]
        self._m = 1 if subject.whole and flushes else way.microbatches
        delay, stages = delay_of(plan.stages, self._m), stages_of(model, plan)
        self._read = {alias: (name, partial(delay, stage)) for alias, (name, stage) in stages.items()}
        live = dict(model.named_parameters())
        optimizer = optimizer_of(model, way)
        self.peak, self.rate = optimizer.param_groups[0]["lr"], way.options.get("lr_schedule", falling)
        self.average = average_of(model, way.options.get("ema"))
        self._loop = Loop(
            *(model, optimizer, self._loss_of, self.rate, way.options.get("clip_grad_norm")),
            *(grouped(live, lambda name: 0 if flushes else stages[name][1]), self.average),
        )

    def train(self) -> list[float]:
        """Train all windows; return the loss of each update."""
        losses: list[float] = []
        for batches in self._windows:
            cut = [self._pieces(batch, self._loop.updates + number) for number, batch in enumerate(batches)]
            for batch, found in zip(cut, self._loop.window(self._read, cut), strict=True):
                losses.append(sum(loss * share for loss, (share, *_) in zip(found, batch, strict=True)))
        return losses

    @torch.no_grad()
    def evaluated(self) -> dict[str, float]:
        """Evaluate by batches."""
        task, loss, weight, sums = self.subject.task, 0.0, 0.0, {}
        self.model.eval()
        for inputs, targets in self.subject.batches:
            args, keywords = _arguments(self.model, inputs)
            outputs, counts = self.model(*args, **keywords), float(task.weight(targets))
            loss += task.evaluation_loss(outputs, targets).item() * counts if counts else 0.0
            weight += counts
            for metric in task.metrics:
                sums[metric.name] = sums.get(metric.name, 0) + metric.sums(outputs, targets).double()
        mean = loss / weight
        return {"loss": mean} | {m.name: m.value(sums[m.name].tolist(), mean) for m in task.metrics}

    def _pieces(self, batch: Batch, update: int) -> list[Any]:
        """(share, inputs, targets, seeds) of each microbatch."""
        inputs, targets = batch
        sizes = pieces(len(as_tuple(inputs)[0]), self._m)
        weights = [float(self.subject.task.weight(y)) for y in cut_batches(targets, sizes)]
        shares = [weight / sum(weights) for weight in weights]
        seeds = [Seeds(SEED, update, number) for number in range(len(sizes))]
        return [*zip(shares, cut_batches(inputs, sizes), cut_batches(targets, sizes), seeds, strict=True)]

    def _loss_of(self, weights: dict[str, Tensor], x: Value, y: Value, seeds: Seeds) -> Tensor:
        with drawing(seeds):
            outputs = self._outputs(weights, x)
        return self.subject.task.loss(outputs, y) if self.subject.task.weight(y) else torch.zeros(())

    def _outputs(self, weights: dict[str, Tensor], inputs: Value) -> Any:
        if self._network is None:
            return functional_call(self.model, weights, *_arguments(self.model, inputs), tie_weights=False)
        (whole,) = cut_layers({1: self.plan.layers}, [], self.plan.example).slices
        part, tensors = self._network.part(whole), as_tuple(inputs)
        weights = {name: weights[name] for name, _ in part.named_parameters()}  # each once
        outputs = functional_call(part, weights, tuple(tensors[made.number] for made in whole.enters))
        return part.pack(outputs)


def stages_of(model: nn.Module, plan: Plan) -> dict[str, tuple[str, int]]:
    """Return the first name and the stage of each parameter; of a shared one by each of its names."""
    users: dict[str, list[int]] = {}
    for stage in range(plan.stages):
        layers = plan.stage_layers(stage)
        for name in dict.fromkeys(name for layer in layers for name in (*layer.weights, *layer.frozen)):
            users.setdefault(name, []).append(stage)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found = {}
    for aliases in names.values():
        using = users[aliases[0]]
        stages = using if len(using) > 1 else using * len(aliases)
        found |= {alias: (aliases[0], stage) for alias, stage in zip(aliases, stages, strict=True)}
    return found


def _arguments(model: nn.Module, inputs: Value) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    """Return with what a model is called; an nn.Sequential takes one value."""
    if isinstance(inputs, dict):
        return (), inputs
    one = isinstance(inputs, Tensor) or isinstance(model, nn.Sequential)
    return ((inputs,) if one else tuple(inputs)), {}


def cut_batches(value: Value, sizes: Sequence[int]) -> Iterator[Value]:
    """Cut along the samples."""
    ends = pairwise(accumulate(sizes, initial=0))
    return (on_each(value, lambda t, start=start, end=end: t[start:end]) for start, end in ends)
