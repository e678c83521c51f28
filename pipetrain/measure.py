"""Measures what layers and messages cost, on all ranks at the same time: they compete as in training.

Each layer has a graph of its own: its input is detached, as at a cut, and its backward starts from its own
output used as the gradient, which has the right shape and ordinary numbers. All layers run forward, then all
backward in reverse order, so that the caches are in the same state as in training. Then the same with each
backward in two halves. The times are medians over passes, of which a quick model gets more, since a small
time is disturbed more easily, without what starting a backward costs, which a stage does once for all its
layers. Messages make round trips on the run's channel.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from pipetrain.errors import ConfigError, one_line
from pipetrain.network.network import INPUT, Made, Network, Tensors
from pipetrain.network.numerics import Numerics
from pipetrain.network.tensors import made_up
from pipetrain.network.values import TensorSpec, Value, ValueSpec, as_tuple, leaves_of
from pipetrain.plan.costs import SECONDS, Facts, LayerTime, Profile, average
from pipetrain.plan.estimate import Layer
from pipetrain.plan.plan import Plan
from pipetrain.runtime.channel import Channel, Message
from pipetrain.runtime.clock import Clock, Mark
from pipetrain.runtime.mesh import Mesh
from pipetrain.runtime.recompute import Recompute
from pipetrain.runtime.split import Deferred
from pipetrain.runtime.weights import OptimizerFactory

log = logging.getLogger("pipetrain")

WARM_UP, REPEATS = 2, 7  # passes over the layers
MOST, ENOUGH_S = 30, 0.2  # passes, and seconds after which there are no more than REPEATS
EMPTY = -1  # the number of a layer that computes nothing
SMALL, LARGE = 2**10, 2**22  # bytes of a message
COLD_TRIPS, TRIPS = 3, 11


def measure(
    mesh: Mesh, draft: Plan, conditions: Facts, make: Callable[[], tuple[Network, OptimizerFactory]]
) -> Profile:
    """Measure messages, then layers; return the same profile on every rank.

    `draft`: a plan of the run, whose cuts do not matter; `make`: returns a network that is not trained
    afterwards, in host memory, and its optimizer's factory. Raises ConfigError, on all ranks, for a layer
    that fails on any, and ChannelError.
    """
    began, size, device = time.perf_counter(), draft.settings.full, mesh.device
    if mesh.world.rank == 0:
        log.info("pipetrain: profiling %d layers, %d samples at a time", len(draft.layers), size)
    latency_s, s_per_byte = slowest_link(mesh, draft.settings.buffer_size)
    cuda = [device] if device.type == "cuda" else []
    mine: Any
    try:
        with torch.random.fork_rng(cuda):
            network, optimizer = make()
            for module in (network.model, *network.modules):
                module.to(device)
            x = draft.example.pack(tuple(made_up(spec, device) for spec in draft.example.of(size).specs))
            mine = [*map(asdict, measure_layers(network, x, draft.layers, optimizer, draft.numerics))]
    except (ConfigError, RuntimeError) as error:  # a layer failed, or out of memory
        mine = one_line(error)
    if cuda:
        torch.cuda.empty_cache()
    told = mesh.gather("the times of the layers", mine)
    for failure in told:
        if isinstance(failure, str):
            raise ConfigError(failure)
    if mesh.world.rank == 0:
        log.info("profiled in %.1f s", time.perf_counter() - began)
    machine = {
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "ranks": len(told),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
    }
    layers = average([[LayerTime(**layer) for layer in layers] for layers in told])
    return Profile(conditions, machine, latency_s, s_per_byte, layers)


def twin_of(network: Network) -> Network:
    """Return a copy of a network, to be measured before it is trained. Raises ConfigError."""
    if any(tensor.is_meta for tensor in network.model.parameters()):
        raise ConfigError(
            "partition=profile measures the whole model in each process, which does not hold it: choose "
            "partition=flops, or give the file of a profile measured where it fits, as "
            "partition.profile=FILE or in a program partition={'profile': FILE}"
        )
    try:
        return network.twin()
    except Exception as error:  # a layer may hold anything
        raise ConfigError(
            "partition=profile measures a copy of the model, which copy.deepcopy cannot make: choose another "
            "partition"
        ) from error


# Messages


def slowest_link(mesh: Mesh, buffer_size: int) -> tuple[float, float]:
    """Measure a pair of neighbours at a time; return the slowest one's times, on every rank.

    These are the seconds of a message beside its bytes, and of a byte; 0 if there are no messages. Raises
    ChannelError.
    """
    if mesh.world.size == 1:
        return 0.0, 0.0
    channel = mesh.channel(buffer_size)
    mine = [
        [_one_way(channel, mesh, stage, nbytes) for nbytes in (SMALL, LARGE)]
        for stage, ranks in enumerate(pairwise(mesh.placement))
        if len(set(ranks)) == 2 and mesh.world.rank in ranks
    ]
    told = [pair for found in mesh.gather("the times of messages", mine) for pair in found]
    return line(*max(told, key=lambda pair: pair[1], default=(0.0, 0.0)))


def line(small_s: float, large_s: float) -> tuple[float, float]:
    """Return the line through the times of a SMALL and of a LARGE message: that of none, and of a byte."""
    s_per_byte = max(0.0, (large_s - small_s) / (LARGE - SMALL))
    return max(0.0, small_s - SMALL * s_per_byte), s_per_byte


def _one_way(channel: Channel, mesh: Mesh, stage: int, nbytes: int) -> float:
    """Return half the median round trip; the other end, which only answers, measures about the same."""
    here, there = mesh.placement[stage : stage + 2]
    specs = (TensorSpec((nbytes,), torch.uint8),)
    forth = [Message(stage, stage + 1, i, specs, (here, there)) for i in range(COLD_TRIPS + TRIPS)]
    back = [Message(stage + 1, stage, i, specs, (there, here)) for i in range(COLD_TRIPS + TRIPS)]
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
    return median(seconds[COLD_TRIPS:]) / 2


# Layers


def measure_layers(
    network: Network, x: Value, layers: Sequence[Layer], optimizer: OptimizerFactory, numerics: Numerics
) -> list[LayerTime]:
    """Measure every layer for the microbatch `x`, in its own modes, on the device of both.

    This changes the network, which must not be trained afterwards, and the random generators. `layers`: its
    estimates. Raises ConfigError with the name of a layer that fails.
    """
    bench = _Bench(network, layers, optimizer, numerics, as_tuple(x)[0].device)
    for _ in range(WARM_UP):
        bench.run(x)
    bench.spans.clear()
    began, done = time.perf_counter(), 0
    while done < REPEATS or (done < MOST and time.perf_counter() - began < ENOUGH_S):
        bench.run(x)
        done += 1
    return [
        LayerTime(layer.name, layer.output.nbytes, **{name: bench.seconds(name, i) for name in SECONDS})
        for i, layer in enumerate(layers)
    ]


class _Bench:
    """The layers of a model, to be run one by one."""

    def __init__(
        self,
        network: Network,
        layers: Sequence[Layer],
        optimizer: OptimizerFactory,
        numerics: Numerics,
        device: torch.device,
    ) -> None:
        numerics.arrange_weights(network.model)
        self._network, self._layers, self._numerics = network, layers, numerics
        self._clock, self._device = Clock(device), device.type
        # By a name of SECONDS and the number of a layer:
        self.spans: dict[tuple[str, int], list[tuple[int, Mark, Mark]]] = defaultdict(list)
        self._weights = [[p for p in module.parameters() if p.requires_grad] for module in network.modules]
        met: set[int] = set()
        self._optimizers: dict[int, torch.optim.Optimizer] = {}  # a shared weight is the first layer's
        for index, module in enumerate(network.modules):
            own = [(name, p) for name, p in module.named_parameters() if p.requires_grad and id(p) not in met]
            met.update(id(p) for _, p in own)
            if own:
                self._optimizers[index] = optimizer(own)
                for group in self._optimizers[index].param_groups:
                    group["lr"] = 0.0  # the same work, but the weights stay as they are

    def run(self, x: Value) -> None:
        """Run a batch of two microbatches, the second with a split backward. Gradients accumulate.

        Between them are the two forwards of one that recomputes and keeps dear results.
        """
        numbers = range(len(self._layers))
        graphs = list(self._forwards(x, "forward_s", lambda index: nullcontext()))
        for index in reversed(numbers):
            self._backward("backward_s", index, graphs.pop())
        recompute = [Recompute([], keep=True) for _ in numbers]
        deque(self._forwards(x, "kept_s", lambda index: recompute[index].forward()), maxlen=0)
        deque(self._forwards(x, "again_s", lambda index: recompute[index].recomputing()), maxlen=0)
        splits = [any(layer.reached) for layer in self._layers]  # else W is a whole backward
        halves = [Deferred(weights if on else []) for weights, on in zip(self._weights, splits, strict=True)]
        graphs = list(self._forwards(x, "recorded_s", halves.__getitem__))
        for index in reversed(numbers):
            if splits[index]:
                self._backward("input_s", index, graphs[index], halves[index])
        for index in reversed(numbers):
            if splits[index]:
                with self._timed("weight_s", index):
                    halves[index].weight_half()
            else:
                self._backward("weight_s", index, graphs[index])
            graphs[index] = ()
        for index, optimizer in self._optimizers.items():
            with self._timed("step_s", index):
                optimizer.step()
        leaf = torch.zeros(1, device=self._device, requires_grad=True)
        for _ in range(2):
            self._backward("backward_s", EMPTY, (leaf.view_as(leaf),))
            self._backward("input_s", EMPTY, (leaf.view_as(leaf),), Deferred([]))

    def _forwards(
        self, x: Value, part: str, within: Callable[[int], AbstractContextManager[object]]
    ) -> Iterator[Tensors]:
        """Yield each layer's outputs with their graph. It runs `within`(layer)."""
        last_use = {value: index for index, layer in enumerate(self._layers) for value in layer.takes}
        values = {Made(INPUT, number): t for number, t in enumerate(as_tuple(x))}
        made = [ValueSpec.like(x)]
        for index, layer in enumerate(self._layers):
            given = tuple(self._numerics.arrange(values[value].detach()) for value in layer.takes)
            reached = layer.reached or (False,) * len(given)
            given = tuple(t.requires_grad_(reaches) for t, reaches in zip(given, reached, strict=True))
            if layer.writes:
                given = tuple(t.clone() for t in given)
            with self._timed(part, index), self._numerics.context(self._device), within(index):
                outputs = leaves_of(self._network.call(index, given, made))
            values |= {Made(index, number): t.detach() for number, t in enumerate(outputs)}
            values = {v: t for v, t in values.items() if last_use.get(v, -1) > index}
            made.append(layer.output)
            yield outputs

    def _backward(self, part: str, index: int, outputs: Tensors, half: Deferred | None = None) -> None:
        """Run a backward, or the `half` of one."""
        if wanted := [t for t in outputs if t.requires_grad]:
            # A half must not get the storage of an activation.
            grads = [t.detach().clone() if half else t.detach() for t in wanted]
            with self._timed(part, index):
                if half:
                    half.input_half(self._weights[index] if index != EMPTY else [], wanted, grads)
                else:
                    torch.autograd.backward(wanted, grads)

    @contextmanager
    def _timed(self, part: str, index: int) -> Iterator[None]:
        """Time a part of a layer; errors name the layer."""
        start = self._clock.mark()
        try:
            yield
        except Exception as error:
            raise ConfigError(
                f"layer {index} ({self._network.names[index]}) of the model cannot be profiled: "
                f"{type(error).__name__}: {one_line(error)}"
            ) from error
        self.spans[part, index].append((index, start, self._clock.mark()))

    def seconds(self, part: str, index: int) -> float:
        """Return the median seconds of a part of a layer; 0 for one that it lacks.

        Without the least that a backward of an empty layer took, and at least a tenth.
        """
        times, empty = ([s for _, s in self._clock.durations(self.spans[part, n])] for n in (index, EMPTY))
        return max(median(times) - min(empty, default=0.0), median(times) / 10) if times else 0.0
