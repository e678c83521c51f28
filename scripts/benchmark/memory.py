"""Suite: what a stage holds, as simulated; and a resident memory that does not grow with the windows."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression, median

from torch import nn

from benchmark.contestants import Ours
from benchmark.report import Row, Verdict
from benchmark.tasks import Scale, Task, prepare, schedules
from benchmark.worlds import Say, run_world, titled
from pipetrain.runtime.mesh import Mesh

RANKS, WINDOW = 2, 4  # batches of an asynchronous window
WARMUP, WINDOWS = 10, 50
ENDS = 10  # windows at either end, of which the medians are compared: single ones jitter by an activation
NO_GROWTH = 0.01  # of the resident memory; a weight version kept a window would be 4 times as much
TASK = Task(("model._target_=benchmark.memory.small_cnn", "partition=flops", "batch_size=32"))


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank held: MiB after each window, and by stage (measured, simulated) peaks."""

    resident: list[float]
    activations: list[tuple[int, int]]
    versions: list[tuple[int, int]]


def small_cnn() -> nn.Sequential:
    """Return 8 convolutions and a head: small, and with real activations."""
    blocks = [nn.Sequential(nn.Conv2d(3 if i == 0 else 32, 32, 3, padding=1), nn.ReLU()) for i in range(8)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return nn.Sequential(*blocks, head)


def suite(scale: Scale, say: Say) -> Iterator[Row]:
    """Measure each schedule in processes of its own, and give the rows as they come."""
    warmup, windows = (1, 3) if scale.quick else (WARMUP, WINDOWS)
    for schedule in ["pipedream"] if scale.quick else schedules():
        held = run_world(measure, RANKS, titled(say, "memory"), schedule, warmup, windows)
        for rank, one in enumerate(held):
            yield from make_rows(f"memory, {schedule}, rank {rank}", one)


def measure(mesh: Mesh, say: Say, schedule: str, warmup: int, windows: int) -> Held:
    """Run the windows of one schedule, on one rank."""
    ours = Ours(schedule, prepare(TASK, schedule, RANKS, WINDOW), mesh)
    resident: list[float] = []
    for number in range(warmup + windows):
        say(f"{schedule}: window {number + 1}/{warmup + windows}")
        ours.run()
        gc.collect()
        if number >= warmup:
            resident.append(resident_mib())
    simulated = ours.plan.window.simulation
    records = sorted(ours.stats.items())
    return Held(
        resident,
        [(record.activations, simulated.activations[stage]) for stage, record in records],
        [(record.versions, simulated.versions[stage]) for stage, record in records],
    )


def resident_mib() -> float:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def make_rows(benchmark: str, held: Held) -> list[Row]:
    """Make the rows of one rank."""
    windows, first, last = len(held.resident), held.resident[:ENDS], held.resident[-ENDS:]
    growth, slope = median(last) - median(first), linear_regression(range(windows), held.resident).slope
    still = Verdict(f"< {NO_GROWTH:.0%} over {windows} windows", growth < NO_GROWTH * median(first))
    return [
        Row(benchmark, "resident memory", held.resident, "MiB"),
        Row(benchmark, f"its growth, first to last {ENDS} windows", [growth], "MiB", verdicts=[still]),
        Row(benchmark, "its slope, a window", [1024 * slope], "KiB"),
        _peaks(benchmark, "activations at the peak", held.activations),
        _peaks(benchmark, "weight versions at the peak", held.versions),
    ]


def _peaks(benchmark: str, what: str, peaks: Sequence[tuple[int, int]]) -> Row:
    measured, simulated = zip(*peaks, strict=True)
    verdict = Verdict(f"as simulated: {' '.join(map(str, simulated))}", measured == simulated)
    return Row(benchmark, what, measured, "", verdicts=[verdict])
