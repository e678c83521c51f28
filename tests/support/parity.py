"""Any module trained by the real stages, engine and channel, and in one process by plain PyTorch.

The reference runs the user's module itself, with the weights that the theory lets each stage read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from copy import copy, deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from threading import Barrier
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pipetrain.arguments import read_schedule
from pipetrain.data.loader import pieces
from pipetrain.network.chain import network_of
from pipetrain.network.draws import Seeds, drawing
from pipetrain.network.network import Network
from pipetrain.network.tracing.traced import Traced
from pipetrain.network.values import Value, ValueSpec, as_tuple, on_each
from pipetrain.plan.cut import cut_layers
from pipetrain.plan.plan import Plan, Samples, make_plan
from pipetrain.runtime.batches import WindowSource
from pipetrain.runtime.ranks import World
from pipetrain.runtime.session import Session
from pipetrain.runtime.weights import OptimizerFactory
from pipetrain.settings import Settings
from pipetrain.tasks import Task
from tests.support import tracing
from tests.support.cases import LocalMesh, drawing_in_turn
from tests.support.deadlines import DEADLINE_S
from tests.support.local import Wire
from tests.support.reference import DELAYS, window

SAMPLES = (7, 7, 6)  # of the batches, each an update; microbatches have 2 or 3 samples
MICROBATCHES = 3
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.01)
Loss = Callable[[Any, Value], Tensor]
Weight = Callable[[Value], float]


@dataclass(frozen=True)
class Subject:
    """A model with its traced layers and data. `inputs`, `targets`: of a whole training, [n, ...].

    `weight`: what targets count for in the mean loss.
    """

    network: Network
    inputs: Value
    targets: Value
    task: Task
    loss: Loss
    weight: Weight
    initial: Mapping[str, Tensor]

    @classmethod
    def of(
        cls, model: nn.Module, inputs: Value, targets: Value, task: Task, loss: Loss, weight: Weight = len
    ) -> Subject:
        """Trace a model, in float64."""
        network = network_of(model.double(), ValueSpec.in_batch(inputs))
        return cls(network, inputs, targets, task, loss, weight, _copied(model.state_dict()))

    @property
    def model(self) -> nn.Module:
        """The user's module, with its initial values."""
        self.network.model.load_state_dict(self.initial)
        self.network.model.train()
        return self.network.model

    @property
    def draws(self) -> bool:
        """Whether a layer draws random numbers in training."""
        return isinstance(self.network, Traced) and bool(tracing.drawing(self.network))

    def copied(self) -> Network:
        """Return the network of a copy of the model, as another process would have."""
        model = deepcopy(self.model)
        if not isinstance(self.network, Traced):
            return network_of(model, ValueSpec.in_batch(self.inputs))
        network = copy(self.network)
        network.model = model
        network.modules = [
            network.part(network.alone(index), network.alone(index, False))
            for index in range(len(network.names))
        ]
        return network


@dataclass(frozen=True)
class Way:
    """How to train: on how many ranks, by which schedule; `options` as those of Pipeline."""

    schedule: str
    ranks: int
    optimizer: OptimizerFactory = SGD
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.schedule} on {self.ranks}"


@dataclass(frozen=True)
class Trained:
    """What a training leaves: the whole state, the mean loss of each update, and that of an evaluation."""

    state: dict[str, Tensor]
    losses: list[float]
    evaluated: float


def planned(subject: Subject, way: Way) -> Plan:
    """Plan one window of all batches, as Pipeline does."""
    options = {"device": "cpu", "seed": 5, "threads": 1, "partition": "even", **way.options}
    options |= {"microbatches": MICROBATCHES, "window": len(SAMPLES), "batch_size": max(SAMPLES)}
    name, schedule, _ = read_schedule(way.schedule)
    settings = Settings.read({"dtype": torch.float64, **options}, way.ranks, schedule=name)
    samples = Samples([*SAMPLES], [*SAMPLES])
    example = ValueSpec.in_batch(subject.inputs)
    return make_plan(settings, schedule, subject.network, example, samples)


def runner(subject: Subject, plan: Plan, way: Way, mesh: Any) -> Session:
    """Make the stages of one rank."""
    return Session(plan, subject.copied(), subject.task, way.optimizer, _constant, mesh)


class InMemory:
    """All batches of a subject, on every rank. See runtime.batches.Batches."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject

    def next(self, window: int | None) -> list[int]:
        raise AssertionError("the sizes are known")

    def open(self, cut: Sequence[Sequence[int]], last: int) -> WindowSource:
        flat, source = [size for batch in cut for size in batch], WindowSource()
        source.inputs, source.targets = _cut(self._subject.inputs, flat), _cut(self._subject.targets, flat)
        return source


def trained(
    runner: Session, subject: Subject, plan: Plan, rank: int, meet: Callable[[], object] = lambda: None
) -> tuple[list[float], float | None]:
    """Train and evaluate on one rank; return the loss of each update and of the evaluation, where known.

    `meet`: called between the two.
    """
    _, losses = runner.train([*SAMPLES], InMemory(subject))
    meet()
    runner.evaluate([*SAMPLES], InMemory(subject))
    return losses, None if runner.last is None else runner.last.take_evaluated().mean_loss


def train(subject: Subject, plan: Plan, way: Way) -> Trained:
    """Train with one thread a rank."""
    wire, barrier, board = Wire(plan.placement), Barrier(way.ranks), [None] * way.ranks
    meshes = [LocalMesh(World(rank, way.ranks), wire, barrier, board) for rank in range(way.ranks)]
    runners = [runner(subject, plan, way, mesh) for mesh in meshes]

    def work(rank: int) -> tuple[list[float], float | None]:
        return trained(runners[rank], subject, plan, rank, lambda: barrier.wait(DEADLINE_S))

    with ThreadPoolExecutor(way.ranks) as pool, drawing_in_turn() if subject.draws else nullcontext():
        found = [thread.result(DEADLINE_S) for thread in [pool.submit(work, k) for k in range(way.ranks)]]
    state: dict[str, Tensor] = {}
    for one in runners:
        for stage in one.stages.values():
            for name, tensor in stage.module.state_dict().items():
                assert torch.equal(state.setdefault(name, tensor), tensor), f"copies of {name} differ"
    (losses, evaluated) = next((known, mean) for known, mean in found if mean is not None)
    return Trained(_copied(state), losses, evaluated)


def expected(subject: Subject, plan: Plan, way: Way) -> Trained:
    """Train the module in one process: each stage reads the weights that the theory says.

    A weight that several stages share is, in each of them, of that stage's version, and gets the sum of their
    gradients. With dropout the module is one part of all layers, which seeds them as every cut does.
    """
    model = subject.model
    live = dict(model.named_parameters())
    optimizer = way.optimizer(live.values())
    delay = DELAYS[way.schedule](plan.stages, MICROBATCHES)
    stages = _stages(model, plan, subject.network).items()
    read = {alias: (name, partial(delay, stage)) for alias, (name, stage) in stages}
    batches, losses, start = [], [], 0
    for update, samples in enumerate(SAMPLES):
        inputs, targets = (_part(v, start, start + samples) for v in (subject.inputs, subject.targets))
        start += samples
        sizes = pieces(samples, MICROBATCHES)
        shares = [subject.weight(y) / subject.weight(targets) for y in _cut(targets, sizes)]
        seeds = [Seeds(plan.settings.seed, update, number) for number in range(MICROBATCHES)]
        batches.append([*zip(shares, _cut(inputs, sizes), _cut(targets, sizes), seeds, strict=True)])

    def loss_of(weights: dict[str, Tensor], x: Value, y: Value, seeds: Seeds) -> Tensor:
        with drawing(seeds):
            return subject.loss(_called(subject, plan, weights, x), y)

    for batch, found in zip(batches, window(live, read, batches, loss_of), strict=True):
        losses.append(sum(loss * share for loss, (share, *_) in zip(found, batch, strict=True)))
        optimizer.step()
        optimizer.zero_grad()
    state = _copied(model.state_dict())
    model.eval()
    with torch.no_grad():
        evaluated = sum(
            subject.loss(_outputs(model, x), y).item() * subject.weight(y)
            for x, y in zip(_cut(subject.inputs, [*SAMPLES]), _cut(subject.targets, [*SAMPLES]), strict=True)
        )
    return Trained(state, losses, evaluated / subject.weight(subject.targets))


def compare(subject: Subject, way: Way, tolerance: float = 1e-12) -> Plan:
    """Train in both ways, and hold weights, buffers, losses and the evaluation against each other."""
    plan = planned(subject, way)
    assert plan.stages >= way.ranks
    wanted = expected(subject, plan, way)
    found = train(subject, plan, way)
    assert found.state.keys() <= wanted.state.keys()
    missing = wanted.state.keys() - found.state.keys()
    known = dict(subject.network.model.named_parameters(remove_duplicate=True))
    assert not missing & known.keys(), missing  # the second names of tied weights are
    for name, tensor in found.state.items():
        torch.testing.assert_close(
            tensor,
            wanted.state[name],
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, n=name: f"{way}: {n}: {m}",
        )
    figures = [[*one.losses, one.evaluated] for one in (found, wanted)]
    torch.testing.assert_close(*figures, rtol=tolerance, atol=tolerance, msg=lambda m: f"{way}: {m}")
    moved = [name for name, before in subject.initial.items() if not torch.equal(before, wanted.state[name])]
    assert len(moved) > len(subject.initial) / 2
    return plan


def _stages(model: nn.Module, plan: Plan, network: Network) -> dict[str, tuple[str, int]]:
    """Return the first name and the stage of each parameter; of a shared one by each of its names."""
    users: dict[int, list[int]] = {}
    for stage, slice in enumerate(plan.cut.slices):
        for parameter in network.part(slice).parameters():
            users.setdefault(id(parameter), []).append(stage)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found = {}
    for key, aliases in names.items():
        stages = users[key] if len(users[key]) > 1 else users[key] * len(aliases)
        found |= {alias: (aliases[0], stage) for alias, stage in zip(aliases, stages, strict=True)}
    return found


def _called(subject: Subject, plan: Plan, weights: dict[str, Tensor], inputs: Value) -> Any:
    model = subject.network.model
    if not subject.draws:
        positional = () if isinstance(inputs, dict) else inputs if isinstance(inputs, tuple) else (inputs,)
        keywords = inputs if isinstance(inputs, dict) else {}
        return functional_call(model, weights, positional, keywords, tie_weights=False)
    (whole,) = cut_layers({1: plan.layers}, [], plan.example).slices
    part, tensors = subject.network.part(whole), as_tuple(inputs)
    weights = {name: weights[name] for name, _ in part.named_parameters()}  # each once
    outputs = functional_call(part, weights, tuple(tensors[made.number] for made in whole.enters))
    return part.pack(outputs)


def _outputs(model: nn.Module, inputs: Value) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*as_tuple(inputs))


def _constant(update: int) -> float:
    return 1.0


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _part(value: Value, start: int, end: int) -> Value:
    return on_each(value, lambda t: t[start:end])


def _cut(value: Value, sizes: Sequence[int]) -> Iterator[Value]:
    ends = [*accumulate(sizes, initial=0)]
    return (_part(value, start, end) for start, end in pairwise(ends))
