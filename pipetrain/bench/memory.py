"""Suite: what a stage holds, as simulated; and a resident memory that does not grow with the windows."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression

from torch import nn

from pipetrain.bench.figures import Row, Scale, Verdict
from pipetrain.bench.ours import Ours
from pipetrain.bench.tasks import Task, prepare
from pipetrain.bench.worlds import Say, run_world, titled
from pipetrain.config import conf_dir
from pipetrain.runtime.mesh import Mesh

RANKS, WINDOW = 2, 4  # batches of an asynchronous window
WARMUP, WINDOWS = 10, 50
GROWTH_MIB = 1.0  # that is no growth: an allocator's noise
TASK = Task(("model._target_=pipetrain.bench.memory.small_cnn", "partition=flops", "batch_size=32"))
ASYNCHRONOUS = ("pipedream", "pipedream_2bw")


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


def suite(scale: Scale, say: Say) -> list[Row]:
    """Measure each schedule in processes of its own, and return the rows."""
    schedules = sorted(path.stem for path in (conf_dir() / "schedule").glob("*.yaml"))
    warmup, windows = (1, 3) if scale.quick else (WARMUP, WINDOWS)
    rows: list[Row] = []
    for schedule in ["1f1b", "pipedream"] if scale.quick else schedules:
        held = run_world(measure, RANKS, titled(say, "memory"), schedule, warmup, windows)
        for rank, one in enumerate(held):
            rows += make_rows(f"memory, {schedule}, rank {rank}", one)
    return rows


def measure(mesh: Mesh, say: Say, schedule: str, warmup: int, windows: int) -> Held:
    """Run the windows of one schedule, on one rank."""
    length = WINDOW if schedule in ASYNCHRONOUS else 1
    ours = Ours(schedule, prepare(TASK, schedule, RANKS, length), mesh)
    resident: list[float] = []
    for number in range(warmup + windows):
        say(f"{schedule}: window {number + 1}/{warmup + windows}")
        ours.run()
        gc.collect()
        if number >= warmup:
            resident.append(resident_mib())
    simulated = ours.plan.window.simulation
    records = sorted(ours.records.items())
    return Held(
        resident,
        [(record.peak_in_flight, simulated.activations[stage]) for stage, record in records],
        [(record.peak_versions, simulated.versions[stage]) for stage, record in records],
    )


def resident_mib() -> float:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def make_rows(benchmark: str, held: Held) -> list[Row]:
    """Make the rows of one rank."""
    windows = len(held.resident)
    slope = linear_regression(range(windows), held.resident).slope
    growth = held.resident[-1] - held.resident[0]
    still = Verdict(f"< {GROWTH_MIB:g} MiB over {windows} windows", growth < GROWTH_MIB)
    return [
        Row(benchmark, "resident memory", held.resident, "MiB"),
        Row(benchmark, "its growth from the first window to the last", [growth], "MiB", verdicts=[still]),
        Row(benchmark, "its slope, a window", [1024 * slope], "KiB"),
        _peaks(benchmark, "activations at the peak", held.activations),
        _peaks(benchmark, "weight versions at the peak", held.versions),
    ]


def _peaks(benchmark: str, what: str, peaks: Sequence[tuple[int, int]]) -> Row:
    measured, simulated = zip(*peaks, strict=True)
    verdict = Verdict(f"as simulated: {' '.join(map(str, simulated))}", measured == simulated)
    return Row(benchmark, what, measured if len(measured) == 1 else [max(measured)], "", verdicts=[verdict])
