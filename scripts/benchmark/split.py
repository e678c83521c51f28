"""Suite `split`: what it costs to split a backward into I and W, in one process with one thread.

Ours is a stage of the engine, as a schedule drives it; torch's is the walk through the graph that its
pipeline schedules make. Each is held against its own whole backward of the same layers: in time, and in the
floating-point operations of its kernels. Bytes are of all tensors made since the forward began that are
still alive, so they tell what waits for W. The gradients of the two halves must equal those of the whole
backward to the last bit.
"""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from benchmark.report import DIGITS, Row, Verdict
from benchmark.tasks import Scale
from benchmark.worlds import Say
from pipetrain.models.gpt import gpt
from pipetrain.models.vision import resnet18, vgg16
from pipetrain.network.chain import Chain
from pipetrain.network.network import Made, Slice
from pipetrain.network.tensors import strided
from pipetrain.runtime.microbatch import Saving
from pipetrain.runtime.stage import Stage

SPLIT, MIB = Saving(split=True), 2**20
REPEATS = 10  # in a round, each of all ways in turn
OURS, WALK = "ours", "torch's walk"
TIME, FLOPS = "I+W / B", "flops I+W / B"
COLUMNS = {TIME: ("IW", "B"), "F+I+W / F+B": ("FIW", "FB"), "I / F": ("I", "F"), "W / F": ("W", "F")}
"""Ratios of times, of parts of the halves to parts of the whole."""
MOST_TIME, MOST_FLOPS = 1.05, 1.03
Seconds = dict[str, float]
"""Of F, I and W, or of F and B."""


@dataclass(frozen=True, slots=True)
class Case:
    """Layers `start` to `end` (exclusive) of a model, for `inputs` of it."""

    model: Callable[[], nn.Sequential]
    inputs: Callable[[], Tensor]
    start: int
    end: int


def _images() -> Tensor:
    return torch.randn(16, 3, 32, 32)


def _gpt_block(width: int) -> Case:
    model = partial(gpt, depth=2, heads=4, width=width, sequence=128, vocabulary=256)
    return Case(model, lambda: torch.randint(256, (8, 128)), 1, 2)


CASES = {
    "convolution and BatchNorm (VGG16, layer 3)": Case(vgg16, _images, 3, 4),
    "GPT block, d = 128": _gpt_block(128),
    "GPT block, d = 256": _gpt_block(256),
    "VGG16, layers 3 to 6": Case(vgg16, _images, 3, 7),
    "VGG16, layers 7 to 13": Case(vgg16, _images, 7, 14),
    "ResNet18, layers 3 to 4": Case(resnet18, _images, 3, 5),
    "ResNet18, layers 5 to 9": Case(resnet18, _images, 5, 10),
}
SMALL = {"GPT block, d = 128": CASES["GPT block, d = 128"]}


Lap = Callable[[str], None]
"""Called after each part, with its letter."""


class Way(Protocol):
    """A way to run some layers forward and back, again and again. Gradients of weights accumulate.

    `back`: the last gradient of the input.
    """

    back: Tensor | None

    def whole(self, lap: Lap) -> None:
        """Run F and B."""

    def halves(self, lap: Lap) -> None:
        """Run F, I and W."""

    def weights(self) -> Sequence[Tensor]:
        """Return the weights, which have the gradients."""


class Engines:
    """A stage of ours, in the middle of a model."""

    def __init__(self, model: nn.Sequential, case: Case, entering: Tensor, grad: Tensor) -> None:
        slice = Slice(case.start, case.end, (Made(case.start - 1, 0),), (Made(case.end - 1, 0),))
        self._stage = Stage(1, Chain(model).part(slice), partial(torch.optim.SGD, lr=0.1), lambda update: 1.0)
        self._given, self._grads = (entering,), (grad,)
        self.back: Tensor | None = None

    def whole(self, lap: Lap) -> None:
        """Run F and B."""
        self._stage.forward(0, self._given, 0)
        lap("F")
        self.back = self._stage.backward(0, self._grads, 0)[0]
        lap("B")

    def halves(self, lap: Lap) -> None:
        """Run F, I and W."""
        self._stage.forward(0, self._given, 0, saving=SPLIT)
        lap("F")
        self.back = self._stage.backward_input(0, self._grads, 0)[0]
        lap("I")
        self._stage.backward_weight(0, 0)
        lap("W")

    def weights(self) -> Sequence[Tensor]:
        """Return the weights, which have the gradients."""
        return self._stage.weights.leaves(0)


class Walk:
    """The functions of torch.distributed.pipelining, as its PipelineStage calls them."""

    def __init__(self, model: nn.Sequential, case: Case, entering: Tensor, grad: Tensor) -> None:
        self._module = model[case.start : case.end]
        self._given, self._grad = entering, grad
        self.back: Tensor | None = None

    def whole(self, lap: Lap) -> None:
        """Run F and B."""
        given, output = self._forward()
        lap("F")
        output.backward(self._grad)  # type: ignore[no-untyped-call]
        self.back = given.grad
        lap("B")

    def halves(self, lap: Lap) -> None:
        """Run F, I and W. What enters and leaves is held until W, as there."""
        given, output = self._forward()
        lap("F")
        groups = stage_backward_input([output], [self._grad], [given], self._module.parameters())[1]
        lap("I")
        stage_backward_weight(self._module.parameters(), groups)
        self.back = given.grad
        del given, output
        lap("W")

    def _forward(self) -> tuple[Tensor, Tensor]:
        given = self._given.detach().requires_grad_()
        return given, self._module(given)

    def weights(self) -> Sequence[Tensor]:
        """Return the weights, which have the gradients."""
        return list(self._module.parameters())


WAYS: dict[str, Callable[[nn.Sequential, Case, Tensor, Tensor], Way]] = {OURS: Engines, WALK: Walk}


class Flops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts floating-point operations by torch's formulas; its own counter follows modules by hooks."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator, and count it."""
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            self.total += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=result)
        return result


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors that were made under it and are alive, each storage once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes: dict[int, int] = {}
        self._watches: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @property
    def bytes(self) -> int:
        """The bytes by now."""
        return sum(self._sizes.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator, and watch what it makes."""
        given = {id(tensor.untyped_storage()) for tensor in strided(args, kwargs)}
        result = func(*args, **(kwargs or {}))
        for tensor in strided(result):
            storage = tensor.untyped_storage()
            key = id(storage)
            if key not in given and key not in self._sizes:
                self._sizes[key] = storage.nbytes()
                self._watches[key] = weakref.ref(storage, partial(self._forget, key))
        return result

    def _forget(self, key: int, _: object) -> None:
        del self._sizes[key], self._watches[key]


@dataclass(frozen=True, slots=True)
class Found:
    """What was measured of one way. By F, I, W and B: their flops; by F, I and W: bytes after them."""

    whole: list[Seconds]  # by round
    halves: list[Seconds]
    flops: Mapping[str, float]
    held: Mapping[str, float]
    equal: bool

    def ratio(self, of: str, to: str) -> list[float]:
        """Return, by round, how long some parts of the halves took beside parts of the whole, as "IW"."""
        return [
            sum(halves[part] for part in of) / sum(whole[part] for part in to)
            for halves, whole in zip(self.halves, self.whole, strict=True)
        ]


def suite(scale: Scale, say: Say) -> Iterator[Row]:
    """Measure, and give the rows as they come."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found: dict[str, dict[str, Found]] = {}
        for title, case in (SMALL if scale.quick else CASES).items():
            say(f"split: {title}")
            found[title] = measure(case, scale.rounds, 2 if scale.quick else REPEATS)
            yield from make_rows(f"split, {title}", found[title])
        yield from make_summary(found)
    finally:
        torch.set_num_threads(threads)


def measure(case: Case, rounds: int, repeats: int = REPEATS) -> dict[str, Found]:
    """Measure all ways for some layers."""
    torch.manual_seed(0)
    model, entering = case.model().train(), case.inputs()
    with torch.no_grad():
        entering = model[: case.start](entering)
        grad = torch.randn_like(model[case.start : case.end](entering))
    ways = {name: make(deepcopy(model), case, entering, grad) for name, make in WAYS.items()}
    equal = {name: _equal(way) for name, way in ways.items()}  # warms up, too
    flops, held = ({name: count(way) for name, way in ways.items()} for count in (_flops, _held))
    whole: dict[str, list[Seconds]] = {name: [] for name in ways}
    halves: dict[str, list[Seconds]] = {name: [] for name in ways}
    for _ in range(rounds):
        runs: dict[tuple[str, bool], list[Seconds]] = defaultdict(list)
        for _ in range(repeats):
            for name, way in ways.items():
                runs[name, False].append(_seconds(way.whole))
                runs[name, True].append(_seconds(way.halves))
        for (name, split), times in runs.items():
            middle = {part: median(one[part] for one in times) for part in times[0]}
            (halves if split else whole)[name].append(middle)
    return {name: Found(whole[name], halves[name], flops[name], held[name], equal[name]) for name in ways}


def _equal(way: Way) -> bool:
    """Say whether the halves give what the whole does, to the last bit."""
    results = []
    for run in (way.whole, way.halves):
        for weight in way.weights():
            weight.grad = None
        run(lambda part: None)
        results.append([way.back, *(weight.grad for weight in way.weights())])
    return all(
        a is b or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(*results, strict=True)
    )


def _seconds(run: Callable[[Lap], None]) -> Seconds:
    return _differences(_laps(run, time.perf_counter))


def _flops(way: Way) -> dict[str, float]:
    found: dict[str, float] = {}
    for run in (way.whole, way.halves):
        with Flops() as flops:
            found |= _differences(_laps(run, lambda: flops.total))
    return found


def _held(way: Way) -> dict[str, float]:
    def read() -> float:
        way.back = None  # sent by now
        return alive.bytes

    alive = Alive()
    with alive:
        return _laps(way.halves, read)


def _laps(run: Callable[[Lap], None], read: Callable[[], float]) -> dict[str, float]:
    """Return what is read before a run and after each of its parts."""
    marks = {"": read()}
    run(lambda part: marks.__setitem__(part, read()))
    return marks


def _differences(marks: Mapping[str, float]) -> dict[str, float]:
    return {part: after - before for (_, before), (part, after) in pairwise(marks.items())}


def make_rows(benchmark: str, found: Mapping[str, Found]) -> list[Row]:
    """Make the rows of some layers: the time of F, I and W, and what it is beside the whole."""
    rows = []
    for name, one in found.items():
        ratios = {column: median(one.ratio(of, to)) for column, (of, to) in COLUMNS.items()}
        flops = (one.flops["I"] + one.flops["W"]) / one.flops["B"]
        ratios |= {FLOPS: flops} | {f"MiB after {part}": one.held[part] / MIB for part in "FIW"}
        verdicts = [
            Verdict(f"{FLOPS} <= {MOST_FLOPS}", round(flops, DIGITS) <= MOST_FLOPS),
            Verdict("gradients equal to the last bit", one.equal),
        ]
        times = [1000 * sum(halves.values()) for halves in one.halves]
        title = f"{name}: F + I + W"
        rows.append(Row(benchmark, title, times, "ms", ratios, verdicts if name == OURS else []))
    return rows


def make_summary(found: Mapping[str, Mapping[str, Found]]) -> list[Row]:
    """Make the rows over all layers: the median of the times."""
    rows = []
    for name in WAYS:
        rounds = zip(*(one[name].ratio(*COLUMNS[TIME]) for one in found.values()), strict=True)
        values = [median(ratios) for ratios in rounds]
        met = round(median(values), DIGITS) <= MOST_TIME
        verdicts = [Verdict(f"<= {MOST_TIME}", met)] if name == OURS else []
        rows.append(Row("split, median of all", f"{name}: {TIME}", values, "", verdicts=verdicts))
    return rows
