"""Suites `vgg16`, `resnet18`, `gpt` and `gpu`: real models, beside torch's pipelines and plain loops.

On two processes all have the cut that flops chooses. The ideal is each stage alone on local tensors, at the
same time as the other, with no message: its slower stage is the pace that no pipeline beats. The images are
random, the GPT's blocks are of the text that ships. In one process the ideal is a plain loop.

In `gpu` two ranks share a GPU over NCCL, or have one each where there are two. Without a GPU `--quick`
rehearses it over gloo, with models so small that its times say nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from benchmark.contestants import TORCHS, Contestant, Ways, alone, ours, plain, rows_of_race, torch_pipeline
from benchmark.report import Row
from benchmark.tasks import Job, Scale, Task, prepare
from benchmark.worlds import CPU, Place, Say, WorldFailed
from pipetrain.runtime.mesh import Mesh

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
WAYS: Ways = {
    **{name: (name, WHOLE) for name in ("layer_dist", "pipedream")},
    **{name: (name,) for name in IN_FOUR},
}
IDEAL, IDEAL_WHOLE = "ideal, m = 4", "ideal, m = 1"
ONE_THREAD = "one process, 1 thread"
LEAST = {name: {f"x torch {name}": 1.0} for name in TORCHS} | {"pipedream": {"x torch 1f1b": 1.15}}


def suite(model: str, scale: Scale, say: Say) -> Iterator[Row]:
    """Measure one model on two processes, and in one."""
    task = (SMALL.get(model, SMALL["vgg16"]) if scale.quick else TASKS[model]).extended("microbatches=4")
    make = partial(on_two, task, 1 if scale.quick else BATCHES, 8 if scale.quick else WINDOW)
    yield from rows_of_race(model, RANKS, make, scale, say, _others, LEAST)
    one = partial(in_one, task.extended(WHOLE), 1 if scale.quick else BATCHES)
    yield from rows_of_race(f"{model}, one process", 1, one, scale, say, _plain, _as_plain(0.98))


def _others(name: str) -> Mapping[str, str]:
    whole = WHOLE in WAYS.get(name, ())
    rivals = {f"x torch {rival}": f"torch {rival}" for rival in TORCHS}
    return {"of ideal": IDEAL_WHOLE if whole else IDEAL, **rivals, "x 1 thread": ONE_THREAD}


def on_two(task: Task, batches: int, window: int, mesh: Mesh) -> tuple[list[Contestant], Mapping[str, float]]:
    """Build everybody. Synchronous schedules flush after each batch."""

    def job(schedule: str = "1f1b", *overrides: str) -> Job:
        return prepare(task.extended(*overrides), schedule, RANKS)

    cores = os.cpu_count() or 1
    return [
        alone(IDEAL, job(), mesh, batches),
        alone(IDEAL_WHOLE, job("1f1b", WHOLE), mesh, batches),
        *ours(mesh, task, WAYS, batches, window),
        *(torch_pipeline(name, job(name), mesh, batches) for name in TORCHS),
        plain("torch DDP", job("1f1b", WHOLE), mesh, batches, parallel=True),
        plain(f"one process, {cores} threads", job("1f1b", WHOLE), mesh, batches, cores),
        plain(ONE_THREAD, job("1f1b", WHOLE), mesh, batches),
    ], {}


PLAIN = "plain loop"


def in_one(task: Task, batches: int, mesh: Mesh) -> tuple[list[Contestant], Mapping[str, float]]:
    """Build ours in one process, and a plain loop over the same microbatches."""
    loop = plain(PLAIN, prepare(task, "1f1b", 1), mesh, batches)
    return [loop, *ours(mesh, task, {"1f1b": ("1f1b",)}, batches)], {}


def _plain(name: str) -> Mapping[str, str]:
    return {f"x {PLAIN}": PLAIN}


def _as_plain(share: float) -> Mapping[str, Mapping[str, float]]:
    return {"1f1b": {f"x {PLAIN}": share}}


# On a GPU

GRAPHS = ", CUDA graphs"
ON_GPU = {name: (name,) for name in ("1f1b", "gpipe", "pipedream")}
GRAPHED = {name + GRAPHS: (name, "cuda_graphs=true") for name in ("1f1b", "pipedream")}
ONCE, GAIN, WITH_GRAPHS = (
    1.0,
    1.2,
    2.0,
)  # of torch's same schedule; of its 1F1B: pipedream, graphs of small batches
GPU_TIMEOUT_S = 60.0  # of a wait between ranks
_DEEP = ("model.depth=8", "model.width=512", "model.heads=8", "batch_size=16", "data.block=256")


def _vgg16(batch: int, pieces: int) -> Task:
    return Task(("model=vgg16", f"batch_size={batch}", f"microbatches={pieces}"))


PAIRS = {
    "VGG16, batch 64 in 4": _vgg16(64, 4),
    "VGG16, batch 512 in 4": _vgg16(512, 4),
    "GPT, batch 16 in 4": TEXT.extended(*_DEEP, "microbatches=4"),
}
ONES = {f"VGG16, batch {batch} in {m}": _vgg16(batch, m) for batch, m in ((64, 1), (64, 4), (512, 8))}
LAUNCHING = "VGG16, batch 64 in 4"  # where launching is the limit
REHEARSED = {name: task.extended("microbatches=4") for name, task in SMALL.items()}


def gpu_parts() -> Iterator[Callable[[Scale, Say], Iterator[Row]]]:
    """Give the races on a GPU: one that fails does not keep the others from theirs."""
    for number in range(len(PAIRS)):
        yield partial(_on_gpu, number, RANKS)
    for number in range(len(ONES)):
        yield partial(_on_gpu, number, 1)


def _on_gpu(number: int, ranks: int, scale: Scale, say: Say) -> Iterator[Row]:
    cuda = torch.cuda.is_available()
    if not cuda and not scale.quick:
        raise WorldFailed("it needs a GPU that torch can use; --quick rehearses it over gloo on the CPU")
    known = REHEARSED if scale.quick else PAIRS if ranks > 1 else ONES
    for name, task in list(known.items())[number : number + 1]:
        title = f"gpu{'' if cuda else ', a rehearsal on the CPU'}{', one process' * (ranks == 1)}, {name}"
        place = Place("cuda", None, GPU_TIMEOUT_S, apart=True) if cuda else CPU
        make = partial(on_gpu, task, 1 if scale.quick else 6, 8 if scale.quick else WINDOW)
        others, least = (_gpu_others, gpu_least(name)) if ranks > 1 else (_plain, _as_plain(0.97))
        yield from rows_of_race(title, ranks, make, scale, say, others, least if cuda else None, place)


def _gpu_others(name: str) -> Mapping[str, str]:
    return {f"x torch {rival}": f"torch {rival}" for rival in ("gpipe", "1f1b")}


def gpu_least(name: str) -> dict[str, dict[str, float]]:
    """Return what ours should be beside torch's."""
    least = {rival: {f"x torch {rival}": ONCE} for rival in ("gpipe", "1f1b")}
    least["pipedream"] = {"x torch 1f1b": GAIN}
    return least | {one: {"x torch 1f1b": WITH_GRAPHS} for one in GRAPHED if name == LAUNCHING}


def on_gpu(task: Task, batches: int, window: int, mesh: Mesh) -> tuple[list[Contestant], Mapping[str, float]]:
    """Build everybody: on two ranks beside torch's schedules, on one beside a plain loop."""
    torch.set_float32_matmul_precision("high")
    if mesh.world.size == 1:
        return in_one(task, batches, mesh)
    ways: Ways = {**ON_GPU, **GRAPHED} if mesh.device.type == "cuda" else ON_GPU
    rivals = [torch_pipeline(name, prepare(task, "1f1b", RANKS), mesh, batches) for name in ("gpipe", "1f1b")]
    return [*ours(mesh, task, ways, batches, window), *rivals], {}
