"""Suites `vgg16`, `resnet18`, `gpt` and `gpu`: real models, beside torch's pipelines and plain loops.

On two processes all have the cut that flops chooses. The images are random, the GPT's blocks are of the text
that ships. In one process ours stands beside a plain loop.

In `gpu` two ranks share a GPU over NCCL, or have one each where there are two. Without a GPU `--quick`
rehearses it over gloo, with models so small that its times say nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmark.contestants import TORCHS, Builders, Theirs, Ways, ours, plain, rows_of_race, torch_pipeline
from benchmark.report import Row
from benchmark.tasks import Scale, Task, prepare
from benchmark.worlds import CPU, Place, Say, WorldFailed
from pipetrain.runtime.comm.process_groups import ProcessGroups

RANKS = 2
BATCHES, WINDOW = 4, 12  # of a turn; of an asynchronous window
WHOLE = "microbatches=1"
TEXT = Task(("model=gpt", "data=text", "task=language_modelling", "optim=adamw"), None)
TASKS = {
    "vgg16": Task(("model=vgg16", "batch_size=64")),
    "resnet18": Task(("model=resnet18", "batch_size=64")),
    "gpt": TEXT.extended("model.depth=6", "model.width=256", "model.heads=4", "batch_size=16"),
}
SMALL = {
    "vgg16": Task(("model=mlp", "batch_size=64")),
    "gpt": TEXT.extended("model.depth=4", "model.width=16", "model.heads=2", "batch_size=8", "data.block=16"),
}
IN_FOUR = ("gpipe", "1f1b", "zb_h1", "zbv", "interleaved_1f1b", "pipedream_2bw")
IN_ONE = ("layer_dist", "pipedream")
WAYS: Ways = {**{name: (name, WHOLE) for name in IN_ONE}, **{name: (name,) for name in IN_FOUR}}
PLAIN, ONE_THREAD = "plain loop", "one process, 1 thread"
LEAST = {name: {f"x torch {name}": 1.0} for name in TORCHS} | {"pipedream": {"x torch 1f1b": 1.15}}


def suite(model: str, scale: Scale, say: Say) -> Iterator[Row]:
    """Measure one model on two processes, and in one."""
    task = (SMALL.get(model, SMALL["vgg16"]) if scale.quick else TASKS[model]).extended("microbatches=4")
    batches = 1 if scale.quick else BATCHES
    against = {f"x torch {rival}": f"torch {rival}" for rival in TORCHS} | {"x 1 thread": ONE_THREAD}
    make = partial(on_two, task, batches, 8 if scale.quick else WINDOW)
    yield from rows_of_race(model, RANKS, make, scale, say, against, LEAST)
    yield from _beside_a_loop(f"{model}, one process", task.extended(WHOLE), batches, 0.98, scale, say)


def _beside_a_loop(
    title: str, task: Task, batches: int, share: float, scale: Scale, say: Say, place: Place = CPU
) -> Iterator[Row]:
    """Race ours in one process with a plain loop, of whose speed it should have a `share`."""
    against, least = {f"x {PLAIN}": PLAIN}, {"1f1b": {f"x {PLAIN}": share}}
    make = partial(in_one, task, batches)
    yield from rows_of_race(title, 1, make, scale, say, against, least, place)


def on_two(task: Task, batches: int, window: int, groups: ProcessGroups) -> Builders:
    """Return what builds everybody. Synchronous schedules flush after each batch."""
    cores = os.cpu_count() or 1

    def alone(name: str, threads: int, parallel: bool) -> Theirs:
        return plain(name, prepare(task.extended(WHOLE), "1f1b", RANKS), groups, batches, threads, parallel)

    loops = {"torch DDP": (1, True), f"one process, {cores} threads": (cores, False), ONE_THREAD: (1, False)}
    return {
        **ours(groups, task, WAYS, batches, window),
        **{f"torch {name}": partial(_torchs, name, name, task, batches, groups) for name in TORCHS},
        **{name: partial(alone, name, *how) for name, how in loops.items()},
    }


def _torchs(name: str, schedule: str, task: Task, batches: int, groups: ProcessGroups) -> Theirs:
    """Build torch's pipeline at the cut that a schedule of ours has."""
    return torch_pipeline(name, prepare(task, schedule, RANKS), groups, batches)


def in_one(task: Task, batches: int, groups: ProcessGroups) -> Builders:
    """Return what builds ours in one process, and a plain loop over the same microbatches."""
    torch.set_float32_matmul_precision("high" if groups.device.type == "cuda" else "highest")

    def loop() -> Theirs:
        return plain(PLAIN, prepare(task, "1f1b", 1), groups, batches)

    return {PLAIN: loop, **ours(groups, task, {"1f1b": ("1f1b",)}, batches)}


# On a GPU

RIVALS = ("gpipe", "1f1b")
ON_GPU: Ways = {name: (name, "cuda_graphs=false") for name in (*RIVALS, "pipedream")}
GRAPHED: Ways = {f"{name}, CUDA graphs": (name, "cuda_graphs=true") for name in ("1f1b", "pipedream")}
GPU_TIMEOUT_S = 60.0  # of a wait between ranks
_DEEP = ("model.depth=8", "model.width=512", "model.heads=8", "batch_size=16", "data.block=256")


def _vgg16(batch: int, pieces: int) -> Task:
    return Task(("model=vgg16", f"batch_size={batch}", f"microbatches={pieces}"))


LAUNCHING = "VGG16, batch 64 in 4"  # where launching is the limit
PAIRS = {
    LAUNCHING: _vgg16(64, 4),
    "VGG16, batch 512 in 4": _vgg16(512, 4),
    "GPT, batch 16 in 4": TEXT.extended(*_DEEP, "microbatches=4"),
}
ONES = {f"VGG16, batch {batch} in {m}": _vgg16(batch, m) for batch, m in ((64, 1), (64, 4), (512, 8))}
REHEARSED = {name: task.extended("microbatches=4") for name, task in SMALL.items()}


def gpu_parts() -> Iterator[Callable[[Scale, Say], Iterator[Row]]]:
    """Give the races on a GPU: one that fails does not keep the others from theirs."""
    for ranks, known in ((RANKS, PAIRS), (1, ONES)):
        yield from (partial(_on_gpu, number, ranks) for number in range(len(known)))


def _on_gpu(number: int, ranks: int, scale: Scale, say: Say) -> Iterator[Row]:
    cuda = torch.cuda.is_available()
    if not cuda and not scale.quick:
        raise WorldFailed("it needs a GPU that torch can use; --quick rehearses it over gloo on the CPU")
    known = REHEARSED if scale.quick else PAIRS if ranks > 1 else ONES
    batches, window = (1, 8) if scale.quick else (6, WINDOW)
    place = Place("cuda", timeout=GPU_TIMEOUT_S, apart=True) if cuda else CPU
    for name, task in list(known.items())[number : number + 1]:
        title = f"gpu{'' if cuda else ', a rehearsal on the CPU'}{', one process' * (ranks == 1)}, {name}"
        if ranks == 1:
            yield from _beside_a_loop(title, task, batches, 0.97 if cuda else 0.0, scale, say, place)
            continue
        against = {f"x torch {rival}": f"torch {rival}" for rival in RIVALS}
        least = {rival: {f"x torch {rival}": 1.0} for rival in RIVALS} | {"pipedream": {"x torch 1f1b": 1.2}}
        least |= {graphed: {"x torch 1f1b": 2.0} for graphed in GRAPHED if name == LAUNCHING}
        make = partial(on_gpu, task, batches, window)
        wanted = least if cuda else {}
        yield from rows_of_race(title, ranks, make, scale, say, against, wanted, place)


def on_gpu(task: Task, batches: int, window: int, groups: ProcessGroups) -> Builders:
    """Return what builds ours on two ranks, beside torch's schedules."""
    torch.set_float32_matmul_precision("high")
    ways: Ways = {**ON_GPU, **GRAPHED} if groups.device.type == "cuda" else ON_GPU
    rivals = {f"torch {name}": partial(_torchs, name, "1f1b", task, batches, groups) for name in RIVALS}
    return {**ours(groups, task, ways, batches, window), **rivals}
