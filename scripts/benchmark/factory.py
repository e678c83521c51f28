"""Suite `factory`: the memory of each rank for a model that a function makes.

A process has imported everything, and has trained a tiny model of a factory, before it is measured. What it
holds at its most beyond that is compared with the weights of its stage: when the Pipeline has been made, and
after a step of SGD without momentum, which needs a gradient for each weight, and activations.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import nn

from benchmark.report import Row
from benchmark.tasks import Scale
from benchmark.worlds import Say, run_world, titled
from pipetrain import Pipeline
from pipetrain.runtime.comm.process_groups import ProcessGroups

RANKS, MICROBATCHES = 4, 4
BUILT, STEPPED = "built", "after a step"
MOST = {BUILT: 1.25, STEPPED: 2.75}  # of the weights of the stage


def linear(depth: int, width: int) -> nn.Sequential:
    """Return linear layers without bias, each behind a tanh: of 64 layers of width 2048, 1 GiB."""
    return nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(width, width, bias=False), nn.Tanh())))


def suite(scale: Scale, say: Say) -> Iterator[Row]:
    """Measure in processes of its own, and hold the peaks of each rank against its weights."""
    sizes = (8, 32) if scale.quick else (64, 2048)
    for rank, (weights, peaks) in enumerate(run_world(measure, RANKS, titled(say, "factory"), *sizes)):
        for moment, peak in peaks.items():
            times = peak / weights
            ratios = {"of weights, MiB": weights, "x its weights": times}
            met = {} if scale.quick else {f"< {MOST[moment]:g} x its weights": times < MOST[moment]}
            yield Row(f"factory, rank {rank}", moment, [peak], "MiB", ratios, met)


def measure(groups: ProcessGroups, say: Say, depth: int, width: int) -> tuple[float, dict[str, float]]:
    """Train a tiny model, and then this one, on one rank: the MiB of its weights, and of the peaks beyond."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    os.environ |= dict(zip(names, map(str, (groups.world.rank, RANKS) * 2), strict=True))
    _train(RANKS, 4)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _mib("VmRSS")
    weights, peaks = _train(depth, width)
    return weights, {moment: peak - before for moment, peak in peaks.items()}


def _train(depth: int, width: int) -> tuple[float, dict[str, float]]:
    """Train one batch; return the MiB of this rank's weights, and the peaks of its memory."""
    batch = torch.ones(16, width), torch.ones(16, width)
    with Pipeline(
        partial(linear, depth, width),
        nn.MSELoss(),
        partial(torch.optim.SGD, lr=0.01),
        microbatches=MICROBATCHES,
        sample=batch,
        partition="params",
        device="cpu",
        threads=1,
    ) as pipe:
        peaks = {BUILT: _mib("VmHWM")}
        pipe.step(*batch)
        peaks[STEPPED] = _mib("VmHWM")
        layers = pipe.plan.layers
        params = sum(layers[number].params for number in pipe.plan.layers_on(pipe.rank))
    return 4 * params / 2**20, peaks


def _mib(key: str) -> float:
    """Return a figure of this process, in MiB."""
    line = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert line is not None
    return int(line[1]) / 1024
