"""Suite `wire`: what codecs gain over a slow wire, for the 8 MiB that cross ResNet18's middle.

The wire is gloo's own over the loopback, behind a channel that holds each message back until it would have
come over a link of the stated bandwidth: that takes no root, as a shaped network interface would. Each edge
and direction is a link of its own, full duplex and without latency, which carries one message after the
other: a message comes bytes / bandwidth seconds after its SEND, or after the arrival of the one before where
that is later. So it may travel while both ranks compute, and costs the processors what gloo costs them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmark.contestants import Ours, race
from benchmark.report import Row, Series, timed_row
from benchmark.tasks import Scale, Task, prepare
from benchmark.worlds import Say, fitted, run_world, titled
from pipetrain.network.values import TensorSpec
from pipetrain.runtime.channel import Channel, Message
from pipetrain.runtime.mesh import Mesh
from pipetrain.schedule.actions import Edge

RANKS = 2
BANDWIDTHS = (100e6, 12.5e6)  # bytes/s: of a good disk or a shared Ethernet, and of Fast Ethernet
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
    "int8, topk_int8 1 % back": ("codec.forward=int8", "codec.backward=topk_int8"),
}
_ARRIVAL = TensorSpec((1,), torch.float64)


class SlowChannel:
    """A channel that holds what it receives back until a wire of `bandwidth` bytes/s had carried it.

    Each message says when that is, in seconds of the monotonic clock that all processes of a machine share.
    For schedules that wait for one message at a time: fbp looks at all that might have come.
    """

    def __init__(self, channel: Channel, bandwidth: float) -> None:
        self._channel = channel
        self._bandwidth = bandwidth
        self._free: dict[Edge, float] = {}  # when the link will have carried all that was sent
        self._held_s = 0.0

    def __getattr__(self, name: str) -> Any:
        """Return what the channel has."""
        return getattr(self._channel, name)

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
        *tensors, arrival = self._channel.recv(_timed(message))
        start = time.monotonic()
        time.sleep(max(0.0, arrival.item() - start))
        self._held_s += time.monotonic() - start
        return tuple(tensors)


def _timed(message: Message) -> Message:
    """Add the time of arrival to what travels."""
    return replace(message, specs=(*message.specs, _ARRIVAL))


Sent = Mapping[str, tuple[float, float]]
"""By contestant: MiB that a rank sends a batch, and milliseconds of its codecs."""


def suite(scale: Scale, say: Say) -> Iterator[Row]:
    """Measure each bandwidth."""
    for bandwidth in BANDWIDTHS[:1] if scale.quick else BANDWIDTHS:
        title = f"wire, {bandwidth / 1e6:g} MB/s"
        ranks = run_world(measure, RANKS, titled(say, title), bandwidth, scale)
        yield from make_rows(title, ranks[0][0], [sent for _, sent in ranks])


def measure(mesh: Mesh, say: Say, bandwidth: float, scale: Scale) -> tuple[Series, Sent]:
    """Race every codec in every schedule, on one rank."""
    racing = []
    for schedule, batches in TURNS.items():
        for name in (NONE, "int8, topk_int8 1 % back") if scale.quick else CODECS:
            job = prepare((SMALL if scale.quick else TASK).extended(*CODECS[name]), schedule, RANKS, batches)
            plan = job.plan
            plain = fitted(mesh, plan).channel(plan.settings.buffer_size, plan.numerics.channels_last)
            channel: Any = SlowChannel(plain, bandwidth)
            racing.append(Ours(f"{schedule}, {name}", job, mesh, batches, channel))
    series = race(mesh, racing, scale.rounds, say)
    return series, {one.name: _sent(one, one.batches * (scale.rounds + 1)) for one in racing}


def _sent(one: Ours, batches: int) -> tuple[float, float]:
    records = list(one.stats.values())
    nbytes, codec_s = sum(r.bytes_sent for r in records), sum(r.codec_s for r in records)
    return nbytes / 2**20 / batches, 1e3 * codec_s / batches


def make_rows(benchmark: str, series: Series, ranks: Sequence[Sent]) -> Iterator[Row]:
    """Hold each codec against none, by schedule; what was sent and coded is of all ranks."""
    for name, seconds in series.items():
        none = series[f"{name.partition(',')[0]}, {NONE}"]
        row = timed_row(benchmark, name, seconds, {f"x {NONE}": none})
        mib, codec_ms = (sum(sent[name][part] for sent in ranks) for part in range(2))
        more = {"MiB a batch": mib, "codec ms a batch": codec_ms}
        yield replace(row, ratios={**row.ratios, **more})
