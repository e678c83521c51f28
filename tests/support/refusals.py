"""Wrong values and programs of every kind, and what is said of them: on one rank, or on each of two."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset

from pipetrain import ConfigError, Pipeline, ScheduleError, TrainingStopped
from pipetrain.commands.cli import values_of
from pipetrain.errors import ChannelError
from pipetrain.runtime.comm.collectives import World
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.schedule.programs import one_f_one_b
from tests.support.cases import config

WORDS = st.text("abcxyz019 _-.,:/[]{}'\"=é", max_size=8)
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-100, 10**9),
    st.floats(),
    WORDS,
    st.lists(st.one_of(st.integers(-9, 99), st.booleans(), WORDS, st.none()), max_size=3),
    st.dictionaries(st.sampled_from("abc"), st.integers(), max_size=2),
)


TARGETS = ["pipetrain.models.mlp", "pipetrain.models", "torch.nn.Sequential", "torch.nn.Linear", "math.pi"]
TARGETS += ["builtins.dict", "builtins.len", "torch.optim.SGD", "pipetrain.schedule.programs.gpipe", "a.b"]
ARGUMENTS = st.dictionaries(
    st.sampled_from(["depth", "width", "num_classes", "lr", "momentum", "virtual", "colour"]),
    st.one_of(st.integers(-2, 12), WORDS, st.none(), st.floats(-1, 2), st.booleans()),
    max_size=2,
)


@cache
def _composed(*overrides: str) -> DictConfig:
    return config(["data=digits", *overrides])


def changed(key: str, value: Any, *overrides: str) -> dict[str, Any]:
    """The values of a configuration in which one is another."""
    cfg = _composed(*overrides).copy()
    OmegaConf.update(cfg, key, value, merge=False, force_add=True)
    values: dict[str, Any] = values_of(cfg)
    return values


def refusal(action: Any) -> str:
    """What an action is refused with: one line."""
    with pytest.raises((ConfigError, ScheduleError)) as error:
        action()
    said = str(error.value)
    assert said
    assert "\n" not in said
    return said


def outcome(action: Any) -> Any:
    """What an action gives, or the text that it is refused with."""
    try:
        return action()
    except ConfigError as error:
        return str(error) or "nothing"


Program = Callable[[int], object]
KNOWN = (ConfigError, ScheduleError, TrainingStopped, ChannelError)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))


def sgd(parameters: Any) -> SGD:
    return SGD(parameters, 0.1)


def batch(n: int = 8, features: int = 4, classes: int = 3) -> tuple[Tensor, Tensor]:
    return torch.ones(n, features), torch.arange(n) % classes


def pipe(**given: Any) -> Pipeline:
    options = {
        "model": model(),
        "loss": functional.cross_entropy,
        "optimizer": sgd,
        "device": "cpu",
        "threads": 1,
    }
    return Pipeline(**{"timeout": 60.0, **options, **given})


def step(*given: Any, **options: Any) -> object:
    return pipe(**options).step(*(given or batch()))


def train(batches: Any, window: int | None = None, **options: Any) -> object:
    return list(pipe(**options).train(batches, window))


def failing_later(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that fails for labels of 2."""
    if (targets == 2).any():
        raise RuntimeError("no label 2, please")
    return functional.cross_entropy(outputs, targets)


def raising() -> Iterator[Any]:
    yield batch()
    raise OSError("the disk is gone")


class Ending(Dataset[tuple[Tensor, Tensor]]):
    """Says that it has more samples than it gives."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 16:
            raise StopIteration
        return torch.ones(4), torch.tensor(0)


class Coupled(SGD):
    """Divides every gradient by the norm of all."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1e-3)
        return super().step(closure)


def twice(rank: int) -> None:
    first = pipe()
    try:
        pipe()
    finally:
        first.close()


def closed(rank: int) -> str:
    """Call a Pipeline once more after its end."""
    made = pipe()
    made.step(*batch())
    made.close()
    made.close()  # says nothing
    assert made.updates == 1
    assert made.plan.stages
    calls: list[Callable[[], object]] = [lambda: list(made.train([batch()])), made.state_dict, made.collect]
    calls += [partial(made.save, "/nowhere"), partial(made.load, "/nowhere"), partial(made.step, *batch())]
    (said,) = {told(lambda _, call=call: call(), rank) for call in calls}
    raise ConfigError(said)


def left(rank: int) -> None:
    """Rank 1 leaves a pass, and rank 0 goes on with it."""
    made = pipe(sample=batch())
    for _ in made.train([batch()] * 4, window=2):
        if rank:
            break
    made.step(*batch())


def reversed_1f1b(ranks: int, batches: int, microbatches: int) -> Any:
    return one_f_one_b(ranks, batches, microbatches)[::-1]


NAMED = dict(zip("xy", batch(), strict=True))
WEIGHT = r"weight\(targets\) must be one number that is not negative, what they count for together; got "
ALIKE: dict[str, tuple[Program, str]] = {
    "shapes": (
        lambda rank: train([batch(), batch(8, 5)]),
        r"layer 0 \(0\) of the model cannot take float32\[2, 5\]",
    ),
    "two": (twice, r"this process has a Pipeline already: call close\(\)"),
    "no optimizer": (lambda rank: step(optimizer=None), "Pipeline needs optimizer="),
    "no loss": (lambda rank: step(loss=None), "Pipeline needs loss="),
    "loss class": (
        lambda rank: step(loss=nn.CrossEntropyLoss),
        r"loss=CrossEntropyLoss is a class: give an object of it, CrossEntropyLoss\(\)",
    ),
    "optimizer name": (lambda rank: step(optimizer="adam"), r"such as lambda p: torch.optim.Adam\(p, "),
    "no tensor": (lambda rank: step([[1.0]], batch()[1]), "inputs of batch 0 must be a tensor .* got list"),
    "a class as loader": (lambda rank: train(DataLoader), "'type' object is not iterable"),
    "groups": (
        lambda rank: step(param_groups={"norms_and_biases": {"weight_dekay": 0}}),
        "param_groups.norms_and_biases.weight_dekay: sgd has no weight_dekay",
    ),
    "no actions": (
        lambda rank: step(schedule=lambda ranks, batches, microbatches: [["0F0"]] * ranks),
        "schedule <lambda> .*a program is a list of Action for each rank",
    ),
    "a triple": (lambda rank: step((*batch(), batch()[1])), r"a tuple of 3: let the loader give \(\(FIRST,"),
    "text": (
        lambda rank: step({**NAMED, "text": ["a"] * 8}, targets="y"),
        r"text of the inputs of batch 0 must be a tensor \[n, ...\]; got list: leave it out, or make it one",
    ),
    "a model's loss": (lambda rank: step(loss="model"), "batch 0 must be a dict with the targets labels;"),
    "weight a sample": (lambda rank: step(weight=lambda t: (t >= 0).double()), rf"{WEIGHT}float64\[8\]: su"),
    "state_dict": (
        lambda rank: step(weights=model().state_dict()),
        r"weights=OrderedDict.* must be the path of a file or a folder",
    ),
    "save": (lambda rank: pipe(sample=batch()).save(None), "folder=None must be the path of a file or"),  # type: ignore[arg-type]
    "closed": (closed, "this Pipeline has been closed: call clo"),
}  # fmt: skip
"""By name: a program, and what all of its ranks are told."""

APART: dict[str, tuple[Program, str, str]] = {
    "stage 0 elsewhere": (
        lambda rank: step(schedule=reversed_1f1b),
        *["schedule reversed_1f1b has stage 0 on rank 1, and rank 0 reads the batches"] * 2,
    ),
    "coupled": (
        lambda rank: step(optimizer=lambda p: Coupled(p, 0.1)),
        *["lets the step of one parameter depend"] * 2,
    ),
    "asynchronous": (lambda rank: step(schedule="pipedream"), *["schedule pipedream is asynchronous"] * 2),
    "raises": (lambda rank: train(raising()), "the disk is gone", "rank 0 stopped: the disk is gone"),
    "ends early": (
        lambda rank: train(DataLoader(Ending(), 8), schedule="pipedream"),
        "the loader ended after 2 batches, and its sampler said 3",
        "rank 1 (lost rank 0|could not)",
    ),
    "a loss, later": (
        lambda rank: train([batch(classes=1), batch()], loss=failing_later),
        "rank 0 (lost rank 1|could not)",
        "stage 1, action 1F.*no label 2, please",
    ),
    "other calls": (
        lambda rank: (
            pipe(sample=batch()).evaluate([batch()])
            if rank
            else pipe(sample=batch()).save("/dev/null/nowhere")
        ),
        "rank 0 waits for the name of what is saved, and rank 1 is at the next window of the evaluation",
        "rank 1 waits for the next window of the evaluation, and rank 0 is at the name of what is saved",
    ),
    "NaN in the inputs": (
        lambda rank: step(batch()[0] * math.nan, batch()[1]),
        r"first in what came from the data\) at stage 0, update 0: .*; look for NaN and infinite numbers th",
        "rank 1 (lost rank 0|could not)",
    ),
    "NaN in the targets": (
        lambda rank: step(batch()[0], torch.full((8, 3), math.nan), loss=functional.mse_loss),
        "rank 0 (lost rank 1|could not)",
        r"first in the targets, what came from the data\) at stage 1, .*; look for NaN",
    ),
    "left on one rank": (
        left,
        "rank 0 lost rank 1",  # it has begun with the next window
        r"rank 1 waits for .* of the training by step\(\), and rank 0 is at .* of the training \(pass 1\)",
    ),
    "weights on one rank": (
        lambda rank: pipe(sample=batch()).state_dict() if rank else train([batch()], sample=batch()),
        "rank 0 waits for the next window of the training .*, and rank 1 is at the state_dict",
        "rank 1 waits for the state_dict, and rank 0 is at the next window of the training",
    ),
}
"""By name: a program, and what rank 0 and rank 1 are told."""


def told(program: Program, rank: int) -> str:
    """Return what a program is told; anything but one sentence of ours, or of the loader, is an error."""
    from pipetrain.trainer import pipeline

    pipeline._open.clear()
    try:
        program(rank)
    except (*KNOWN, OSError, TypeError) as error:
        return str(error)
    return "nothing"


def all_told(names: Sequence[str], store: str) -> list[str]:
    """Run programs in a group that the program has made itself, which Pipeline uses and leaves alone."""
    world, hook = World.current(), sys.excepthook
    dist.init_process_group("gloo", f"file://{store}", rank=world.rank, world_size=world.size)
    said = [told((ALIKE | APART)[name][0], world.rank) for name in names]
    for groups in [found for found in gc.get_objects() if isinstance(found, ProcessGroups)]:
        groups.abandon("")  # each of its groups has a thread that looks a hundred times a second
    dist.barrier()  # it was not closed
    dist.destroy_process_group()
    sys.excepthook = hook  # torch names the rank once more for each group
    return said
