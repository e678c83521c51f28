"""Messages: larger than any buffer of a backend's, both ways at once; a peer that is killed; cold starts."""

from __future__ import annotations

import math
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, perf_counter

import torch
from torch import Tensor

from benchmark.contestants import Ours
from benchmark.tasks import Task, prepare
from benchmark.worlds import Say, WorldFailed
from pipetrain.errors import ChannelError
from pipetrain.network.values import TensorSpec
from pipetrain.runtime.links import Links
from pipetrain.runtime.message import Message
from tests.gpu.rows import MIB, Row, Setting, judged

PAYLOAD_MIB = 80  # gloo and NCCL cut messages into pieces well below 64 MiB
MESSAGES = 4  # each way
LOST_S = 12.0  # any wait's deadline where a peer is lost
SOON_S = 5.0  # within which what a rank does to its connections, or what comes to a deadline, is said
LOST = {"is killed": "lost rank 1", "raises, and lives on": "lost rank 1", "stands still": "microbatch 7"}
"""What becomes of a rank, and what the other one says."""
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


def exchange_twice(links: Links, say: Say, elements: int) -> dict[int, tuple[float, int]]:
    """By buffer size: the seconds of an exchange, and how many messages came with other contents."""
    found = {}
    for buffer_size in (1, 2):
        say(f"buffer_size={buffer_size}")
        links.gather("the start", None)
        start = perf_counter()
        wrong = exchange(links, elements, buffer_size)
        found[buffer_size] = (perf_counter() - start, wrong)
    return found


def exchange(links: Links, elements: int, buffer_size: int) -> int:
    """Send first, then receive, on both of two ranks; return how many messages came wrong."""
    links.open([((0, 1), (0, 1)), ((1, 0), (1, 0))])
    channel = links.channel(buffer_size)
    here, there = links.world.rank, 1 - links.world.rank
    incoming = [message(there, here, mb, elements) for mb in range(MESSAGES)]
    mine = payload(links, here, 0, elements)
    assert torch.equal(mine, mine.clone())  # what is cold would wait for a message
    channel.expect(incoming)
    wrong = 0
    for mb in range(MESSAGES):
        channel.send(message(here, there, mb, elements), [payload(links, here, mb, elements)])
        (tensor,) = channel.recv(incoming[mb])
        wrong += not torch.equal(tensor, payload(links, there, mb, elements))
    channel.drain()
    return wrong


def message(src: int, dst: int, mb: int, elements: int) -> Message:
    """Name a message of so many float32."""
    return Message(src, dst, mb, (TensorSpec((elements,), torch.float32),), (src, dst))


def payload(links: Links, rank: int, mb: int, elements: int) -> Tensor:
    """Make what a rank sends: other contents in every message and place."""
    return (torch.arange(elements, device=links.device) % 1009 + 2000 * rank + 10000 * mb).float()


def lost_peer(setting: Setting) -> Iterator[Row]:
    """Rank 1 never sends what the other one waits for: that one says why in time, and nobody is left."""
    for how, target in LOST.items():
        with TemporaryDirectory() as folder:
            words = Path(folder) / "words"
            try:
                (said, seconds), _ = setting.world(lose, 2, str(words), how, timeout=LOST_S)
            except WorldFailed:  # its host could not leave the device, so it said it and ended
                said = words.read_text().strip().splitlines()[-1]
                seconds = monotonic() - float(Path(f"{words}.began").read_text())
        limit = setting.patience * SOON_S + (LOST_S if how == "stands still" else 1.0)
        yield judged(f"a rank {how}: the other says", said, f"... {target} ...", target in said)
        yield judged("after", f"{seconds:.1f} s", f"<= {limit:g} s", seconds <= limit)
    left = len(multiprocessing.active_children())
    yield judged("processes left", str(left), "0", left == 0)


def lose(links: Links, say: Say, words: str, how: str) -> tuple[str, float]:
    """Wait on rank 0 for what rank 1 never sends. `words`: a file for its errors."""
    if links.world.rank == 0:
        os.dup2(os.open(words, os.O_CREAT | os.O_WRONLY), 2)
    exchange(links, 1024, 2)
    if links.world.rank == 1:
        if how == "is killed":
            # After its result has gone; by status 0, so that the parent does not end all for it.
            threading.Timer(1.0, os._exit, (0,)).start()
        elif how == "stands still":
            time.sleep(LOST_S + SOON_S)
        else:
            links.abandon("its own error")
            time.sleep(SOON_S)
        return "", 0.0
    channel = links.channel(1)
    start = perf_counter()
    Path(f"{words}.began").write_text(str(monotonic()))
    try:
        channel.expect([message(1, 0, 7, 1024)])
        channel.recv(message(1, 0, 7, 1024))
        channel.deadline.settle()
    except ChannelError as error:
        return str(error), perf_counter() - start
    return "no error", perf_counter() - start


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


def two_batches(links: Links, say: Say, task: Task) -> None:
    """Train two batches, and see that the loss is a number."""
    ours = Ours("1f1b", prepare(task, "1f1b", links.world.size), links, 2)
    ours.run()
    assert all(map(math.isfinite, ours.losses)), ours.losses
    links.gather("the end", None)
