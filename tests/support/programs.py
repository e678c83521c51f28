"""Programs with a Pipeline, for one process and for the ranks of a spawned world, which import them.

`plain` is what they are held against: a plain loop of PyTorch, with the delays of tests/support/reference.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Store
from torch.func import functional_call
from torch.nn import functional
from torch.optim import SGD, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, default_collate

from pipetrain import LanguageModelling, Pipeline, Regression, Task, TrainingStopped
from pipetrain.checkpoint import writer
from pipetrain.data import pieces as sizes_of
from pipetrain.network.values import Value, as_tuple
from pipetrain.runtime.ranks import World
from tests.support.reference import DELAYS, Delay, by_stage, stage_of, window

DOUBLE = torch.float64
Batch = tuple[Value, Value]


@contextmanager
def process_group(world: World, store: Store | None) -> Iterator[None]:
    """Be in a group that the program has made itself, which Pipeline uses and leaves alone."""
    if store is None or world.size == 1:
        yield
        return
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    yield
    dist.barrier()  # it was not closed
    dist.destroy_process_group()


# Models, tasks and data


def mlp() -> nn.Sequential:
    layers = [layer for _ in range(3) for layer in (nn.Linear(6, 6), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(6, 5)).to(DOUBLE)


def labelled(n: int) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 6, dtype=DOUBLE, generator=generator)
    return list(zip(x, torch.randint(5, (n,), generator=generator), strict=True))


def normed() -> nn.Sequential:
    layers = [layer for _ in range(2) for layer in (nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(6, 5)).to(DOUBLE)


class Attention(nn.Module):
    """A causal block of a transformer, of one head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        made: Tensor = x + functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return made


def gpt() -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(11, 8), *(Attention(8) for _ in range(4)), nn.LayerNorm(8), nn.Linear(8, 11)
    ).to(DOUBLE)


def padded(n: int) -> list[Any]:
    """Sequences of 7 tokens, of which 1 to 6 count, unevenly; in some none does."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(11, (n, 8), generator=generator)
    x, y = tokens[:, :-1], tokens[:, 1:].clone()
    for row, targets in enumerate(y):
        targets[row * row % 8 :] = -100
    return list(zip(x, y, strict=True))


class Mixing(nn.Module):
    """Takes two tensors and gives two."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(3, 3)

    def forward(self, both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        a, b = both
        return torch.tanh(self.a(a)) + b.sum(-1, keepdim=True), torch.tanh(self.b(b)) * a.mean(
            -1, keepdim=True
        )


def mixing() -> nn.Sequential:
    return nn.Sequential(*(Mixing() for _ in range(6))).to(DOUBLE)


class Both(Task):
    """The mean over samples of the squared errors of two outputs, each sample with a weight of its own."""

    def loss(self, outputs: Value, targets: Value) -> Tensor:
        (a, b), (first, second, weight) = as_tuple(outputs), as_tuple(targets)
        errors = ((a - first) ** 2).sum(-1) + ((b - second) ** 2).sum(-1)
        return (errors * weight).sum() / weight.sum()

    def weight(self, targets: Value) -> Tensor | float:
        return as_tuple(targets)[2].sum()


def pairs(n: int) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    a, first = torch.randn(2, n, 4, dtype=DOUBLE, generator=generator)
    b, second = torch.randn(2, n, 3, dtype=DOUBLE, generator=generator)
    weight = torch.rand(n, dtype=DOUBLE, generator=generator) + 0.1
    return [((a[i], b[i]), (first[i], second[i], weight[i])) for i in range(n)]


def numbers(n: int) -> list[Any]:
    generator = torch.Generator().manual_seed(4)
    x, y = (
        torch.randn(n, 6, dtype=DOUBLE, generator=generator),
        torch.randn(n, 5, dtype=DOUBLE, generator=generator),
    )
    return list(zip(x, y, strict=True))


def accuracy(outputs: Value, targets: Value) -> Tensor:
    assert isinstance(outputs, Tensor)
    return (outputs.argmax(1) == targets).double().mean()


@dataclass(frozen=True)
class Job:
    """A model with its data and task; `whole`: a batch in pieces is trained as the whole batch is."""

    model: Callable[[], nn.Sequential]
    samples: Callable[[int], list[Any]]
    task: Callable[[], Task]
    whole: bool = True


JOBS = {
    "mlp": Job(mlp, labelled, lambda: Task(functional.cross_entropy, {"acc": accuracy})),
    "normed": Job(normed, labelled, lambda: Task(nn.CrossEntropyLoss()), whole=False),
    "gpt": Job(gpt, padded, LanguageModelling),
    "tuples": Job(mixing, pairs, Both),
    "regression": Job(mlp, numbers, Regression),
}


# Training


def momentum(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def falling(update: int) -> float:
    return float(0.8**update)


GROUPS: dict[str, dict[str, Any]] = {
    "norms_and_biases": {"weight_decay": 0.0},
    "head": {"params": r"^6\.", "lr": 0.02},
}


def grouped(model: nn.Module) -> Optimizer:
    """Return the optimizer of GROUPS, by hand: matrices, vectors, and the head's matrix."""
    named = dict(model.named_parameters())
    vectors = [name for name, p in named.items() if p.dim() < 2]
    head = [name for name in named if name.startswith("6.") and name not in vectors]
    rest = [name for name in named if name not in vectors and name not in head]
    return momentum(
        [
            {"params": [named[name] for name in rest]},
            {"params": [named[name] for name in vectors], "weight_decay": 0.0},
            {"params": [named[name] for name in head], "lr": 0.02},
        ]
    )


@dataclass(frozen=True)
class Case:
    """What is trained through the API, and how."""

    job: str
    schedule: str
    microbatches: int = 4
    window: int | None = None  # of train(); None: the schedule's
    samples: int = 22  # in batches of 8: the last one is ragged
    by_step: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


class Recorded:
    """Collates samples, and keeps what a loader has yielded."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def __call__(self, samples: list[Any]) -> Any:
        made = default_collate(samples)
        self.batches.append(tuple(tuple(v) if isinstance(v, list) else v for v in made))  # type: ignore[arg-type]
        return made


def piece(value: Value, sizes: Sequence[int]) -> list[Value]:
    if isinstance(value, Tensor):
        return list(value.split(list(sizes)))
    return list(zip(*(t.split(list(sizes)) for t in value), strict=True))


def plain(
    model: nn.Sequential,
    task: Task,
    optimizer: Optimizer,
    windows: Sequence[Sequence[Batch]],
    microbatches: int,
    cuts: Sequence[int],
    delay: Delay,
    clip: float | None = None,
    by_stage_norm: bool = False,
    average: AveragedModel | None = None,
    rate: Callable[[int], float] = falling,
) -> list[float]:
    """Train in one process, microbatch by microbatch with delayed weights; return the loss of each update.

    `clip`: the most of the gradient's norm, of each stage's `by_stage_norm`; `average` follows the weights.
    """
    live = dict(model.named_parameters())
    read = by_stage(live, cuts, delay)
    peaks = [group["lr"] for group in optimizer.param_groups]
    losses: list[float] = []

    def pieces(batch: Batch) -> list[Any]:
        inputs, targets = batch
        sizes = sizes_of(len(as_tuple(inputs)[0]), microbatches)
        parts = piece(targets, sizes)
        weights = [float(task.weight(y)) for y in parts]
        shares = [weight / sum(weights) for weight in weights]
        return list(zip(shares, piece(inputs, sizes), parts, strict=True))

    def loss_of(weights: dict[str, Tensor], x: Value, y: Value) -> Tensor:
        outputs = functional_call(model, weights, (x,))
        return task.loss(outputs, y) if task.weight(y) else torch.zeros(())

    for batches in windows:
        batches = [pieces(batch) for batch in batches]
        for batch, found in zip(batches, window(live, read, batches, loss_of), strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * rate(len(losses))
            if clip is not None:
                for stage in range(len(cuts) + 1) if by_stage_norm else [None]:
                    mine = [p for name, p in live.items() if stage in (None, stage_of(name, cuts))]
                    nn.utils.clip_grad_norm_(mine, clip)
            optimizer.step()
            optimizer.zero_grad()
            if average is not None:
                average.update_parameters(model)
            losses.append(sum(loss * share for loss, (share, *_) in zip(found, batch, strict=True)))
    return losses


@torch.no_grad()
def evaluated(model: nn.Sequential, task: Task, samples: list[Any]) -> dict[str, float]:
    """Evaluate all samples at once."""
    recorded = Recorded()
    recorded(samples)
    inputs, targets = recorded.batches[0]
    outputs = model.eval()(inputs)
    loss = task.evaluation_loss(outputs, targets).item()
    return {"loss": loss} | {m.name: m.value(m.sums(outputs, targets).tolist(), loss) for m in task.metrics}


def train_case(case: Case, rank: int) -> dict[str, Any]:
    """Train a case with a loader that shuffles differently on each rank; hold it against `plain` on rank 0.

    Returns what must be equal on all ranks.
    """
    job = JOBS[case.job]
    torch.manual_seed(7 + rank)  # so the models differ, until all take that of rank 0
    model, samples, recorded = job.model(), job.samples(case.samples), Recorded()
    initial = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    options = {"threads": 1, "device": "cpu", "lr_schedule": falling, **case.options}
    pipe = Pipeline(model, job.task(), momentum, case.schedule, microbatches=case.microbatches, **options)
    loader: Any = DataLoader(samples, batch_size=8, shuffle=True, collate_fn=recorded)
    if case.by_step:
        losses = [pipe.step(*batch) for batch in loader]
    else:
        losses = list(pipe.train(loader, window=case.window))
    test = DataLoader(job.samples(19), batch_size=5)
    metrics = pipe.evaluate(test)
    state = pipe.state_dict()
    averaged = pipe.state_dict(ema=True) if "ema" in case.options else {}
    if rank == 0:
        length = case.window or pipe._settings.window or len(recorded.batches)
        windows = [recorded.batches[i : i + length] for i in range(0, len(recorded.batches), length)]
        twin, task = job.model(), job.task()
        twin.load_state_dict(initial)
        stashing = DELAYS[case.schedule] is not DELAYS["1f1b"]
        m = case.microbatches if stashing or not job.whole else 1
        optimizer = grouped(twin) if "param_groups" in case.options else momentum(twin.parameters())
        delay = DELAYS[case.schedule](pipe.plan.stages, m)
        decay = case.options.get("ema")
        average = decay and AveragedModel(twin, multi_avg_fn=get_ema_multi_avg_fn(decay))
        clip = case.options.get("clip_grad_norm")
        cuts = pipe.plan.cuts
        wanted = plain(twin, task, optimizer, windows, m, cuts, delay, clip, stashing, average)
        torch.testing.assert_close(losses, wanted, rtol=1e-10, atol=1e-12)
        again = job.model()
        again.load_state_dict(state, strict=True)
        for name, tensor in twin.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-11)
        if average:
            assert averaged.keys() == state.keys()
            for name, tensor in average.module.state_dict().items():
                torch.testing.assert_close(averaged[name], tensor, rtol=1e-9, atol=1e-11)
            again.load_state_dict(averaged, strict=True)
        expected = evaluated(again, task, job.samples(19))
        torch.testing.assert_close(metrics, expected, rtol=1e-9, atol=1e-11)
        weights = [float(task.weight(y)) for _, y in recorded.batches]
        if not case.by_step:
            mean = sum(map(float.__mul__, losses, weights)) / sum(weights)
            torch.testing.assert_close(pipe.metrics["loss"], mean, rtol=1e-9, atol=1e-11)
            torch.testing.assert_close(pipe.metrics["learning_rate"], 0.1 * falling(len(losses) - 1))
    elif state:
        raise AssertionError("only rank 0 has the whole state")
    told = {"losses": losses, "evaluation": metrics, "metrics": pipe.metrics, "updates": pipe.updates}
    pipe.close()
    return told


def train_cases(world: World, store: Store, cases: Sequence[Case]) -> list[dict[str, Any]]:
    with process_group(world, store):
        told = [train_case(case, world.rank) for case in cases]
        assert world.size == 1 or len(dist.distributed_c10d._world.pg_map) == 1, "a Pipeline left groups"
        return told


# Training in two halves


def dropping(width: int = 6) -> nn.Sequential:
    layers = [nn.Linear(6, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Dropout(0.3), nn.Linear(width, 5)).to(DOUBLE)


def going_on(schedule: str, width: int = 6) -> Pipeline:
    torch.manual_seed(3)
    loss = functional.cross_entropy
    return Pipeline(
        dropping(width),
        loss,
        momentum,
        schedule,
        microbatches=2,
        device="cpu",
        threads=1,
        lr_schedule=falling,
    )


def loader_of(samples: int) -> Any:
    return DataLoader(labelled(samples), batch_size=8, shuffle=True)


def whole(folder: Path, schedule: str) -> tuple[list[float], dict[str, Tensor]]:
    """Train 3 updates, save, and train 3 more; return the losses of all, and the weights."""
    pipe = going_on(schedule)
    losses = list(pipe.train(loader_of(24)))
    pipe.save(folder)
    losses += pipe.train(loader_of(24))
    state = pipe.state_dict()
    pipe.close()
    return losses, state


def resumed(folder: Path, schedule: str, begun: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Go on from what was saved, before the first batch or after others; return losses and weights."""
    pipe = going_on(schedule)
    if begun:
        list(pipe.train(loader_of(16)))
    pipe.load(folder)
    losses = list(pipe.train(loader_of(24)))
    state = pipe.state_dict()
    assert pipe.updates == 6
    pipe.close()
    return losses, state


def first_half(world: World, store: Store, folder: Path) -> tuple[dict[str, Any], Any]:
    """Train 3 updates with 1F1B and save; return the weights, and an evaluation."""
    with process_group(world, store):
        pipe = going_on("1f1b")
        list(pipe.train(loader_of(24)))
        pipe.save(folder)
        state = {name: tensor.numpy() for name, tensor in pipe.state_dict().items()}  # a tensor shares memory
        known = pipe.evaluate(loader_of(19))
        pipe.close()
        return state, known


def damaged_on_one_rank(world: World, store: Store, folder: Path) -> str:
    """Save where rank 1 cannot write; return what is told. The training can go on."""
    with process_group(world, store):
        pipe = going_on("1f1b")
        list(pipe.train(loader_of(24)))
        said = ""
        with patch.object(writer, "write_part", _full if world.rank else writer.write_part):
            try:
                pipe.save(folder)
            except TrainingStopped as error:
                said = str(error)
        list(pipe.train(loader_of(24)))
        pipe.close()
        return said


def _full(*arguments: object) -> NoReturn:
    raise OSError("No space left")
