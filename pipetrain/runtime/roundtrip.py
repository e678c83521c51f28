"""Measures the time of a message: round trips on the run's channel, between one pair of ranks at a time."""

from __future__ import annotations

import time
from dataclasses import astuple, dataclass
from itertools import pairwise
from statistics import median

import torch

from pipetrain.network.boundary import TensorSpec
from pipetrain.runtime.channel import Channel, Message
from pipetrain.runtime.mesh import Mesh

SMALL, LARGE = 2**10, 2**22  # bytes
WARM_UP, REPEATS = 3, 11


@dataclass(frozen=True, slots=True)
class Link:
    """The time of a message of n bytes one way: `latency_s` + n `s_per_byte`, in seconds."""

    latency_s: float = 0.0
    s_per_byte: float = 0.0

    def seconds(self, nbytes: int) -> float:
        return self.latency_s + nbytes * self.s_per_byte


def slowest_link(mesh: Mesh, buffer_size: int) -> Link:
    """Measure all pairs of neighbours; return the slowest link, on every rank. Raises ChannelError."""
    if mesh.world.size == 1:
        return Link()
    channel = mesh.channel(buffer_size)
    mine = []
    met: set[frozenset[int]] = set()
    for stage, ranks in enumerate(pairwise(mesh.placement)):
        if len(set(ranks)) == 2 and frozenset(ranks) not in met and mesh.world.rank in ranks:
            mine.append(_measure(channel, mesh, stage))
        met.add(frozenset(ranks))
    told = mesh.gather("the times of messages", list(map(astuple, mine)))
    links = [Link(*link) for found in told for link in found]
    return max(links, key=lambda link: link.seconds(LARGE), default=Link())


def _measure(channel: Channel, mesh: Mesh, stage: int) -> Link:
    """Fit a line through the times of a small and of a large message to the next stage."""
    small, large = (_one_way(channel, mesh, stage, nbytes) for nbytes in (SMALL, LARGE))
    s_per_byte = max(0.0, (large - small) / (LARGE - SMALL))
    return Link(max(0.0, small - SMALL * s_per_byte), s_per_byte)


def _one_way(channel: Channel, mesh: Mesh, stage: int, nbytes: int) -> float:
    """Return half the median round trip; the other end, which only answers, measures about the same."""
    here, there = mesh.placement[stage], mesh.placement[stage + 1]
    specs = (TensorSpec((nbytes,), torch.uint8),)
    forth = [Message(stage, stage + 1, i, specs, (here, there)) for i in range(WARM_UP + REPEATS)]
    back = [Message(stage + 1, stage, i, specs, (there, here)) for i in range(WARM_UP + REPEATS)]
    leads = mesh.world.rank == here
    # A posted receive is a kernel that runs, for which the first use of another kernel may wait.
    payload = [torch.zeros(nbytes, dtype=torch.uint8, device=mesh.device)]
    channel.expect(back if leads else forth)
    seconds = []
    for out, answer in zip(forth, back, strict=True):
        start = time.perf_counter()
        if leads:
            channel.send(out, payload)
            channel.recv(answer)
        else:
            channel.send(answer, channel.recv(out))
        if mesh.device.type == "cuda":  # a receive may order the stream alone
            torch.cuda.current_stream(mesh.device).synchronize()
        seconds.append(time.perf_counter() - start)
    channel.drain()
    return median(seconds[WARM_UP:]) / 2
