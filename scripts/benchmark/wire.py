"""Suite: what codecs gain over a slow wire, for the 8 MiB of a batch of 64 that cross ResNet18's middle.

The wire is gloo's own over the loopback, behind a channel that holds each message back until it would have
come over a link of the stated bandwidth: that takes no root, as a shaped network interface would. Each edge
and direction is a link of its own, full duplex and without latency, which carries one message after the
other: a message comes bytes / bandwidth seconds after its SEND, or after the arrival of the one before where
that is later. So it may travel while both ranks compute, and costs the processors what gloo costs them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmark.channels import Wrapped
from benchmark.contestants import FULL, Ours, race
from benchmark.report import Row, Series, ratio
from benchmark.tasks import Scale, Task, prepare
from benchmark.worlds import TIMEOUT_S, Say, fitted, run_world, titled
from pipetrain.network.values import TensorSpec
from pipetrain.runtime.channel import Channel, Message, expired
from pipetrain.runtime.mesh import Mesh
from pipetrain.schedule.actions import Edge

RANKS = 2
BANDWIDTHS = (100e6, 12.5e6)  # bytes/s: of a good disk or a shared Ethernet, and of Fast Ethernet
EPOCH = 782  # batches of 64 in CIFAR-10's 50,000 images
# One microbatch, so that a message is the whole batch's; cut after layer2. By schedule, batches of a turn:
# layer_dist waits for every message, pipedream computes while they travel.
TASK = Task(("model=resnet18", "partition=[5]", "batch_size=64", "microbatches=1"))
TURNS = {"layer_dist": 1, "pipedream": 12}
SMALL = Task(("model=mlp", "partition=[1]", "batch_size=64", "microbatches=1"))
NONE = "no codec"
CODECS: dict[str, tuple[str, ...]] = {
    NONE: (),
    "half both ways": ("codec.forward=half", "codec.backward=half"),
    "int8 both ways": ("codec.forward=int8", "codec.backward=int8"),
    "topk 1 % back": ("codec.backward=topk",),
    "half, topk 1 % back": ("codec.forward=half", "codec.backward=topk"),
    "int8, topk_int8 1 % back": ("codec.forward=int8", "codec.backward=topk_int8"),
}
QUICK = (NONE, "int8, topk_int8 1 % back")
LOOKING_S = 2e-4  # between two looks at what has arrived
_ARRIVAL = TensorSpec((1,), torch.float64)


class SlowChannel(Wrapped):
    """Holds what it receives back until a wire of `bandwidth` bytes/s had carried it; see this module.

    Each message says when that is, in seconds of the monotonic clock that all processes of a machine share;
    on two machines it would mean nothing.
    """

    def __init__(self, channel: Channel, bandwidth: float) -> None:
        super().__init__(channel)
        self._bandwidth = bandwidth
        self._free: dict[Edge, float] = {}  # when the link will have carried all that was sent
        self._early: dict[Edge, tuple[Tensor, ...]] = {}  # here, and still held back
        self._held_s = 0.0

    @property
    def waited(self) -> float:
        """Return the seconds that were waited for other ranks and for the wire."""
        return self._channel.waited + self._held_s

    def expect(self, messages: Sequence[Message], watched: bool = False) -> None:
        """Announce messages with their time of arrival."""
        self._channel.expect([*map(_timed, messages)], watched)

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Put a message on its link, behind those that the link still carries."""
        begins = max(time.monotonic(), self._free.get(message.edge, 0.0))
        self._free[message.edge] = begins + message.nbytes / self._bandwidth
        arrival = torch.tensor([self._free[message.edge]], dtype=torch.float64)
        self._channel.send(_timed(message), [*tensors, arrival])

    def recv(self, message: Message) -> tuple[Tensor, ...]:
        """Wait until a message is here, and until the link had carried it."""
        *tensors, arrival = self._early.pop(message.edge, None) or self._channel.recv(_timed(message))
        start = time.monotonic()
        time.sleep(max(0.0, arrival.item() - start))
        self._held_s += time.monotonic() - start
        return tuple(tensors)

    def arrived(self, message: Message) -> bool:
        """Whether a message is here, and the link had carried it."""
        if message.edge not in self._early:
            if not self._channel.arrived(_timed(message)):
                return False
            self._early[message.edge] = self._channel.recv(_timed(message))
        return bool(time.monotonic() >= self._early[message.edge][-1].item())

    def wait(self, receives: Sequence[Message], sends: Sequence[Message]) -> None:
        """Look again and again."""
        start = time.monotonic()
        while not any(map(self.arrived, receives)) and not any(map(self.room, sends)):
            if time.monotonic() > start + TIMEOUT_S:
                raise expired(receives, sends, TIMEOUT_S)
            time.sleep(LOOKING_S)
        self._held_s += time.monotonic() - start


def _timed(message: Message) -> Message:
    """Add the time of arrival to what travels."""
    return replace(message, specs=(*message.specs, _ARRIVAL))


@dataclass(frozen=True, slots=True)
class Found:
    """What was measured at one bandwidth: seconds a batch by contestant, and what each sent a batch."""

    series: Series
    mib: Mapping[str, float]
    codec_ms: Mapping[str, float]  # of both ranks


def suite(scale: Scale, say: Say) -> Iterator[Row]:
    """Measure each bandwidth, and give its rows."""
    for bandwidth in BANDWIDTHS[:1] if scale.quick else BANDWIDTHS:
        title = f"wire, {bandwidth / 1e6:g} MB/s"
        yield from make_rows(title, run_world(measure, RANKS, titled(say, title), bandwidth, scale)[0])


def measure(mesh: Mesh, say: Say, bandwidth: float, scale: Scale) -> Found:
    """Race every codec in every schedule, on one rank."""
    task = SMALL if scale.quick else TASK
    contestants = []
    for schedule, batches in TURNS.items():
        for name in QUICK if scale.quick else CODECS:
            job = prepare(task.extended(*CODECS[name]), schedule, RANKS, batches)
            plan = job.plan
            plain = fitted(mesh, plan).channel(plan.settings.buffer_size, plan.numerics.channels_last)
            channel: Any = SlowChannel(plain, bandwidth)
            contestants.append(Ours(f"{schedule}, {name}", job, mesh, batches, channel))
    series = race(mesh, contestants, scale.rounds, say)
    mine = {one.name: _sent(one, one.batches * (scale.rounds + 1)) for one in contestants}
    ranks: list[dict[str, tuple[float, float]]] = mesh.gather("what was sent", mine)
    mib, codec_ms = ({name: sum(of[name][i] for of in ranks) for name in mine} for i in range(2))
    return Found(series, mib, codec_ms)


def _sent(one: Ours, batches: int) -> tuple[float, float]:
    """Return the MiB that a rank has sent a batch, and the milliseconds of its codecs."""
    records = list(one.stats.values())
    nbytes, codec_s = sum(r.bytes_sent for r in records), sum(r.codec_s for r in records)
    return nbytes / 2**20 / batches, 1e3 * codec_s / batches


def make_rows(benchmark: str, found: Found) -> list[Row]:
    """Hold each codec against none, by schedule. Values are seconds of an epoch of CIFAR-10.

    Of pipedream, at the pace that it has once full: an epoch is filled and drained once in 782 batches.
    """
    rows = []
    paces = {name: found.series.get(name + FULL, found.series[name]) for name in found.mib}
    for name, seconds in paces.items():
        none = f"{name.partition(',')[0]}, {NONE}"
        ratios = {f"x {NONE}": ratio(paces[none], seconds)}
        ratios |= {"MiB a batch": found.mib[name], "codec ms a batch": found.codec_ms[name]}
        rows.append(Row(benchmark, name, [EPOCH * s for s in seconds], "s an epoch", ratios))
    return rows
