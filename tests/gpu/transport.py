"""Messages: larger than any buffer of a backend's, both ways at once; a rank that ends; cold starts."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmark.contestants import Ours
from benchmark.tasks import Task, prepare
from benchmark.worlds import Say, WorldFailed, fitted
from pipetrain.model.specs import TensorSpec
from pipetrain.runtime.comm.message import Message
from pipetrain.runtime.comm.process_groups import ProcessGroups
from tests.gpu.rows import MIB, Row, Setting, judged
from tests.support.cases import Case, make_run, rank_run
from tests.support.models import flat, is_planned

PAYLOAD_MIB = 80  # gloo and NCCL cut messages into pieces well below 64 MiB
MESSAGES = 4  # each way
LOST_S = 8.0  # any wait's deadline where a rank ends
SOON_S = 7.0  # within which the other one says it; a host that a device holds up is ended after 5
END = 30  # the forward in which it does
ENDS = {"raises": "its own error", "is killed": "lost rank 1", "stands still": "of microbatch"}
"""How a rank ends, and what the other one says over NCCL."""
COLD, COLD_S = 10, 60.0  # worlds, and the seconds of each
ENOUGH = 3  # that fail


def large(setting: Setting) -> Iterator[Row]:
    """Two ranks send each other large messages at the same time, by both ways and with both bounds."""
    elements = (1 if setting.quick else PAYLOAD_MIB) * MIB // 4
    for backend, staged in [("NCCL", False), ("gloo", True)] if setting.cuda else [("gloo", True)]:
        ranks = setting.world(exchange_twice, 2, elements, staged=staged)
        for buffer_size in (1, 2):
            seconds = max(rank[buffer_size][0] for rank in ranks)
            wrong = sum(rank[buffer_size][1] for rank in ranks)
            what = f"{backend}, buffer_size={buffer_size}: {MESSAGES} x {4 * elements // MIB} MiB each way"
            yield judged(what, f"{seconds:.2f} s, {wrong} wrong", "0 wrong", wrong == 0)


def exchange_twice(groups: ProcessGroups, say: Say, elements: int) -> dict[int, tuple[float, int]]:
    """By buffer size: the seconds of an exchange, and how many messages came with other contents."""
    found = {}
    for buffer_size in (1, 2):
        say(f"buffer_size={buffer_size}")
        groups.gather("the start", None)
        start = perf_counter()
        wrong = exchange(groups, elements, buffer_size)
        found[buffer_size] = (perf_counter() - start, wrong)
    return found


def exchange(groups: ProcessGroups, elements: int, buffer_size: int) -> int:
    """Send first, then receive, on both of two ranks; return how many messages came wrong."""
    groups.open([((0, 1), (0, 1)), ((1, 0), (1, 0))])
    channel = groups.channel(buffer_size)
    here, there = groups.world.rank, 1 - groups.world.rank
    incoming = [message(there, here, mb, elements) for mb in range(MESSAGES)]
    mine = payload(groups, here, 0, elements)
    assert torch.equal(mine, mine.clone())  # what is cold would wait for a message
    channel.expect(incoming)
    wrong = 0
    for mb in range(MESSAGES):
        channel.send(message(here, there, mb, elements), [payload(groups, here, mb, elements)])
        (tensor,) = channel.recv(incoming[mb])
        wrong += not torch.equal(tensor, payload(groups, there, mb, elements))
    channel.drain()
    return wrong


def message(src: int, dst: int, mb: int, elements: int) -> Message:
    """Name a message of so many float32."""
    return Message(src, dst, mb, (TensorSpec((elements,), torch.float32),), (src, dst))


def payload(groups: ProcessGroups, rank: int, mb: int, elements: int) -> Tensor:
    """Make what a rank sends: other contents in every message and place."""
    return (torch.arange(elements, device=groups.device) % 1009 + 2000 * rank + 10000 * mb).float()


class Killed(BaseException):
    """Ends a process as a signal would: nothing is said, closed or caught."""


class Ending(nn.Module):
    """Hands on what it is given, until rank 1 ends in its forward number END in training. `said`: a file."""

    def __init__(self, how: str, said: str) -> None:
        super().__init__()
        self.how, self.said, self.done = how, said, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not is_planned() and dist.get_rank() == 1:
            self.done += 1
            if self.done == END:
                Path(f"{self.said}.began").write_text(str(monotonic()))
                if self.how == "raises":
                    raise RuntimeError("its own error")
                if self.how == "is killed":
                    raise Killed
                time.sleep(LOST_S + 4.0)
        return x


def ending(how: str, said: str) -> nn.Sequential:
    """Make a model of two stages, the second of which ends."""
    return nn.Sequential(*flat(), nn.Linear(12, 12), Ending(how, said), nn.Linear(12, 10))


def error(setting: Setting) -> Iterator[Row]:
    """Rank 1 raises, is killed or stands still in a window: the other one says what and when, and all end."""
    before = {*multiprocessing.active_children()}
    for how, over_nccl in [*ENDS.items()][: 1 if setting.quick else None]:
        target = over_nccl if setting.cuda else "rank 1"
        with TemporaryDirectory() as folder:
            file = Path(folder) / "said"
            try:
                (said, ended), _ = setting.world(end, 2, how, str(file), timeout=LOST_S)
            except WorldFailed:  # its host could not leave the device, so a thread has said it and ended it
                if not file.read_text():
                    raise
                said, ended = file.read_text().strip().splitlines()[-1], monotonic()
            seconds = ended - float(Path(f"{file}.began").read_text())
        limit = setting.patience * SOON_S + LOST_S * (how == "stands still")
        yield judged(f"rank 1 {how}: rank 0 says", said, f"... {target} ...", target in said)
        yield judged(
            f"rank 1 {how}: it says so after", f"{seconds:.1f} s", f"<= {limit:g} s", seconds <= limit
        )
    left = len({*multiprocessing.active_children()} - before)
    yield judged("processes left", str(left), "0", left == 0)


def end(groups: ProcessGroups, say: Say, how: str, file: str) -> tuple[str, float]:
    """Train until rank 1 ends; return what this rank raises, and when. `file`: for what threads say of it."""
    if groups.world.rank == 0:
        os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY), 2)
    words = "model._target_=tests.gpu.transport.ending", f"+model.how={how}", f"+model.said={file}"
    options = "partition=[1]", "epochs=9", "microbatches=4", "cuda_graphs=false"
    run = make_run(Case("1f1b", 2, (*words, *options), 24))
    try:
        rank_run(run, fitted(groups, run.plan)).run()
    except Killed:
        return "", 0.0
    except Exception as error:
        said, ended = f"{type(error).__name__}: {error}", monotonic()
        if how == "raises":
            groups.gather("the end", None)  # the rank's process lives on until the other one has said it
        return said, ended
    return "no error", monotonic()


def cold(setting: Setting, worlds: int = COLD) -> Iterator[Row]:
    """Fresh ranks train two batches, again and again: whatever is cold must not wait for a message."""
    worlds, model = (min(worlds, 2), "mlp") if setting.quick else (worlds, "vgg16")
    task = Task((f"model={model}", "batch_size=64", "microbatches=4"))
    seconds, failed = [], []
    while len(seconds) + len(failed) < worlds and len(failed) < ENOUGH:
        start = monotonic()
        try:
            setting.world(two_batches, 2, task, within=COLD_S)
            seconds.append(monotonic() - start)
        except WorldFailed as error:
            failed.append(str(error).strip().splitlines()[-1])
    figure = f"{len(seconds)} trained" + (f", the slowest in {max(seconds):.1f} s" if seconds else "")
    figure += f"; {len(failed)} did not: {failed[0]}" if failed else ""
    yield judged(f"cold starts, two batches of {model}", figure, f"{worlds}", len(seconds) == worlds)


def two_batches(groups: ProcessGroups, say: Say, task: Task) -> None:
    """Train two batches, and see that the loss is a number."""
    ours = Ours("1f1b", prepare(task, "1f1b", groups.world.size), groups, 2)
    ours.run()
    assert all(map(math.isfinite, ours.losses)), ours.losses
    groups.gather("the end", None)
