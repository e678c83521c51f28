"""One process: what the engine takes from a plain PyTorch loop on a GPU, and what the options give.

And two: ours beside torch.distributed.pipelining at one cut, a part of what `scripts/bench.py gpu` races.

Both launch ahead of the device. A plain loop looks at its losses at the end of a turn only; of ours, 1f1b
drains after each batch, as it does by default, and pipedream once a turn.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from benchmark.contestants import Ours, plain, race
from benchmark.models import BATCHES as RACED
from benchmark.models import LAUNCHING, PAIRS, REHEARSED, WINDOW, on_gpu
from benchmark.report import Series, ratio
from benchmark.tasks import Task, prepare
from benchmark.worlds import Say, titled
from pipetrain.runtime.comm.process_groups import ProcessGroups
from tests.gpu.rows import SKIPPED, Row, Setting, judged

PLAIN, WANTED = "plain loop", 0.97
MODELS = ("vgg16", "resnet18")
BATCHES = {64: 24, 512: 8}  # of a turn, by the size of one
ROUNDS = 7
RIVAL, BESIDE = "torch 1f1b", ("1f1b", "1f1b, CUDA graphs")
OPTIONS: dict[str, tuple[str, ...]] = {
    "fp32": (),
    "optimizer not fused": ("optim.fused=false",),
    "contiguous": ("memory_format=contiguous",),
    "bf16": ("precision=bf16",),
}
COMPILED = {"compile": ("compile=true",), "compile, bf16": ("compile=true", "precision=bf16")}


def speed(setting: Setting) -> Iterator[Row]:
    """VGG16 and ResNet18 with small and large batches, in turns."""
    models = ("mlp",) if setting.quick else MODELS
    tasks = [(model, size) for model in models for size in ([8] if setting.quick else BATCHES)]
    schedules = {"1f1b": ("1f1b", ()), "pipedream": ("pipedream", ())}
    found = setting.world(measure, 1, tasks, schedules, 1 if setting.quick else ROUNDS)[0]
    for (model, size), series in found.items():
        for name in schedules:
            share, text = _against_plain(series, name)
            wanted = 0.0 if setting.quick else WANTED
            yield judged(f"{model}, batch {size}, {name}", text, f">= {wanted}", share >= wanted)


def gains(setting: Setting) -> Iterator[Row]:
    """What each option of the configuration gives over a plain loop in fp32, VGG16 with batches of 512."""
    task, rounds = (("mlp", 8), 1) if setting.quick else (("vgg16", 512), 3)
    for chosen in (OPTIONS, COMPILED):
        why = no_compiler(setting) if chosen is COMPILED else ""
        if why:
            yield Row("compile", why, "", SKIPPED)
            continue
        contestants = {name: ("1f1b", overrides) for name, overrides in chosen.items()}
        series = setting.world(measure, 1, [task], contestants, rounds)[0][task]
        for name in chosen:
            yield Row(f"{task[0]}, batch {task[1]}, {name}", _against_plain(series, name)[1])


def race_beside_torch(setting: Setting) -> Iterator[Row]:
    """Two ranks, where launching is the limit, in turns with torch's 1F1B; eager, and by CUDA graphs."""
    tasks = [*REHEARSED.values()][:1] if setting.quick else [PAIRS[LAUNCHING], PAIRS["GPT, batch 16 in 4"]]
    for task in tasks:
        series = setting.world(beside_torch, 2, task, 1 if setting.quick else 3)[0]
        for name in [name for name in BESIDE if name in series]:
            ms, rival = (1e3 * median(series[one]) for one in (name, RIVAL))
            share, wanted = ratio(series[RIVAL], series[name]), 0.0 if setting.quick else 1.0
            figure = f"{ms:.2f} ms a batch, {RIVAL} {rival:.2f}: {share:.3f}"
            yield judged(f"{' '.join(task.overrides[:2])}, {name}", figure, f">= {wanted}", share >= wanted)


def beside_torch(groups: ProcessGroups, say: Say, task: Task, rounds: int) -> Series:
    """Race ours and torch's 1F1B over the ranks of a world."""
    builders = on_gpu(task, RACED, WINDOW, groups)
    chosen = [builders[name]() for name in (*BESIDE, RIVAL) if name in builders]
    return race(groups, chosen, rounds, say)


def no_compiler(setting: Setting) -> str:
    """Say what torch.compile lacks here; nothing where it has all."""
    if not setting.cuda:
        return "a rehearsal"
    lacking = {
        "triton": find_spec("triton"),
        "a C compiler": next(filter(shutil.which, [os.environ.get("CC", "cc"), "gcc", "clang"]), None),
        "Python.h": (Path(sysconfig.get_path("include")) / "Python.h").exists(),
    }
    return " and ".join(f"no {what}" for what, there in lacking.items() if not there)


def _against_plain(series: Series, name: str) -> tuple[float, str]:
    share = round(ratio(series[PLAIN], series[name]), 3)
    mine, plain = (1e3 * median(series[one]) for one in (name, PLAIN))
    return share, f"{mine:.2f} ms a batch, plain {plain:.2f}: {share:.3f}"


def measure(
    groups: ProcessGroups,
    say: Say,
    tasks: Sequence[tuple[str, int]],
    contestants: Mapping[str, tuple[str, tuple[str, ...]]],
    rounds: int,
) -> dict[tuple[str, int], Series]:
    """Race the contestants, each a schedule and overrides, against the plain loop, at each (model, batch)."""
    found = {}
    for model, size in tasks:
        turn = BATCHES.get(size, 2)
        task = Task((f"model={model}", f"batch_size={size}", "microbatches=1"))
        loop = plain(PLAIN, prepare(task, "1f1b", 1), groups, turn)
        ours = [
            Ours(name, prepare(task.extended(*overrides), schedule, 1, turn), groups, turn)
            for name, (schedule, overrides) in contestants.items()
        ]
        found[model, size] = race(groups, [loop, *ours], rounds, titled(say, f"{model}, batch {size}"))
    return found
