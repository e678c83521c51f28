"""Suite `factory`: the memory of each rank for a model that a function makes, beside the same model whole.

A process has imported everything, and has trained a tiny model of a factory, before it is measured. What it
holds at its most beyond that is compared with the weights of its stage: when the Pipeline has been made, and
after a step of SGD without momentum, which needs a gradient for each weight, and activations.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmark.report import Row, Verdict
from benchmark.tasks import Scale
from benchmark.worlds import Say, run_world, titled
from pipetrain import Pipeline
from pipetrain.models import gpt
from pipetrain.network.values import Value
from pipetrain.runtime.mesh import Mesh
from pipetrain.tasks import LossFunction

RANKS, MICROBATCHES = 4, 4
BUILT, STEPPED = "built", "after a step"
MOST = {BUILT: 1.25, STEPPED: 2.75}  # of the weights of the stage


@dataclass(frozen=True, slots=True)
class Large:
    """A model, and a batch for it."""

    make: Callable[[], nn.Module]
    batch: tuple[Tensor, Tensor]
    loss: LossFunction


@dataclass(frozen=True, slots=True)
class Held:
    """MiB of one rank: of its weights, and the most beyond what it held before, by moment."""

    weights: float
    peaks: dict[str, float]


def linear(depth: int, width: int) -> nn.Sequential:
    """Return linear layers without bias, each behind a tanh."""
    return nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(width, width, bias=False), nn.Tanh())))


def of_tokens(outputs: Value, targets: Value) -> Tensor:
    """Return the mean cross-entropy over all tokens."""
    assert isinstance(outputs, Tensor)
    assert isinstance(targets, Tensor)
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def models(quick: bool) -> dict[str, Large]:
    """Return the models, of 1 GiB of float32; small ones if `quick`."""
    depth, width, blocks, words = (8, 32, 6, 64) if quick else (64, 2048, 20, 8192)
    tokens, numbers = torch.zeros(4, 16, dtype=torch.int64), torch.ones(16, width)  # few: little but weights
    language = partial(gpt, depth=blocks, heads=8, width=width // 2, sequence=16, vocabulary=words)
    return {
        "linear": Large(partial(linear, depth, width), (numbers, numbers), nn.MSELoss()),
        "gpt": Large(language, (tokens, tokens), of_tokens),
    }


def suite(scale: Scale, say: Say) -> Iterator[Row]:
    """Measure each model of a factory, and one of them whole; `quick`: one."""
    for name in ["gpt"] if scale.quick else models(False):
        for whole in (False, True) if name == "linear" else (False,):
            title = f"factory, {name}{', whole' if whole else ''}"
            for rank, held in enumerate(
                run_world(measure, RANKS, titled(say, title), name, whole, scale.quick)
            ):
                yield from make_rows(f"{title}, rank {rank}", held, whole or scale.quick)


def measure(mesh: Mesh, say: Say, name: str, whole: bool, quick: bool) -> Held:
    """Train a tiny model, and then this one, on one rank."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    os.environ |= dict(zip(names, map(str, (mesh.world.rank, RANKS) * 2), strict=True))
    tiny = Large(partial(linear, RANKS, 4), (torch.ones(4, 4),) * 2, nn.MSELoss())
    _train(tiny, False)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    weights, peaks = _train(models(quick)[name], whole)
    say(f"{peaks[BUILT] - before:.0f} MiB when built, {peaks[STEPPED] - before:.0f} after a step")
    return Held(weights, {moment: peak - before for moment, peak in peaks.items()})


def _train(large: Large, whole: bool) -> tuple[float, dict[str, float]]:
    """Train one batch; return the MiB of this rank's weights, and the peaks of its memory."""
    with Pipeline(
        large.make() if whole else large.make,
        large.loss,
        partial(torch.optim.SGD, lr=0.01),
        microbatches=MICROBATCHES,
        sample=large.batch,
        partition="params",
        device="cpu",
        threads=1,
    ) as pipe:
        peaks = {BUILT: _status("VmHWM")}
        pipe.step(*large.batch)
        peaks[STEPPED] = _status("VmHWM")
        layers = pipe.plan.layers
        params = sum(layers[number].params for number in pipe.plan.layers_on(pipe.rank))
    return 4 * params / 2**20, peaks


def _status(key: str) -> float:
    """Return a figure of this process, in MiB."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def make_rows(benchmark: str, held: Held, free: bool) -> list[Row]:
    """Hold the peaks of a rank against its weights; `free`: without a target."""
    rows = []
    for moment, peak in held.peaks.items():
        times = peak / held.weights
        verdict = Verdict(f"< {MOST[moment]:g} x its weights", times < MOST[moment])
        ratios = {"MiB of its weights": held.weights, "x its weights": times}
        rows.append(Row(benchmark, moment, [peak], "MiB", ratios, [] if free else [verdict]))
    return rows
