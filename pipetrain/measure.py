"""Measures what layers and messages cost, on all ranks at the same time: they compete as in training.

Each layer has a graph of its own: its input is detached, as at a cut, and its backward starts from its own
output used as the gradient, which has the right shape and ordinary numbers. All layers run forward, then all
backward in reverse order, so that the caches are in the same state as in training. Then the same with each
backward in two halves. The times are medians over passes, of which a quick model gets more, since a small
time is disturbed more easily, without what starting a backward costs, which a stage does once for all its
layers. Times and bytes are measured in separate passes. Messages make round trips on the run's channel.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, astuple, dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipetrain.building import make_model
from pipetrain.errors import ConfigError, one_line
from pipetrain.network.chain import network_of
from pipetrain.network.network import INPUT, Made, Network, Tensors
from pipetrain.network.numerics import Numerics
from pipetrain.network.tensors import made_up, strided
from pipetrain.network.values import TensorSpec, Value, ValueSpec, as_tuple, leaves_of
from pipetrain.plan.estimate import Layer
from pipetrain.plan.plan import Plan
from pipetrain.plan.profile import Facts, LayerTime, Profile, average, profile_conditions
from pipetrain.runtime.channel import Channel, Message
from pipetrain.runtime.clock import Clock, Mark
from pipetrain.runtime.mesh import Mesh, choose_device
from pipetrain.runtime.optimizer import make_optimizer
from pipetrain.runtime.ranks import World
from pipetrain.runtime.recompute import Recompute
from pipetrain.runtime.split import Deferred
from pipetrain.runtime.weights import OptimizerFactory
from pipetrain.settings import Settings, share_of_cores

log = logging.getLogger("pipetrain")

WARM_UP, REPEATS = 2, 7  # passes over the layers
MOST, ENOUGH_S = 30, 0.2  # passes, and seconds after which there are no more than REPEATS
EMPTY = -1  # the number of a layer that computes nothing
SMALL, LARGE = 2**10, 2**22  # bytes of a message
COLD_TRIPS, TRIPS = 3, 11

Measured = tuple[Network, OptimizerFactory]


def measure(mesh: Mesh, draft: Plan, conditions: Facts, make: Callable[[], Measured]) -> Profile:
    """Measure messages, then layers; return the same profile on every rank.

    `draft`: a plan of the run, whose cuts do not matter; `make`: returns a network that is not trained
    afterwards, in host memory, and its optimizer's factory. Raises ConfigError, on all ranks, for a layer
    that fails on any, and ChannelError.
    """
    began, size = time.perf_counter(), draft.settings.full
    if mesh.world.rank == 0:
        log.info("pipetrain: profiling %d layers, %d samples at a time", len(draft.layers), size)
    link = slowest_link(mesh, draft.settings.buffer_size)
    mine = _layer_times(draft, mesh.device, make)
    told = mesh.gather(
        "the times of the layers", mine if isinstance(mine, str) else [asdict(layer) for layer in mine]
    )
    for failure in told:
        if isinstance(failure, str):
            raise ConfigError(failure)
    if mesh.world.rank == 0:
        log.info("profiled in %.1f s", time.perf_counter() - began)
    return Profile(
        conditions=conditions,
        machine=_machine(mesh.device, len(told)),
        latency_s=link.latency_s,
        s_per_byte=link.s_per_byte,
        layers=average([[LayerTime(**layer) for layer in layers] for layers in told]),
    )


def measure_alone(cfg: DictConfig, draft: Plan) -> Profile:
    """Measure the model of a configuration in this process, without messages. Raises ConfigError."""
    settings, world = draft.settings, World()
    torch.set_num_threads(settings.threads or share_of_cores(settings.ranks))
    device = choose_device(world, settings.device)
    mesh = Mesh(world, draft.placement, [], device, None, settings.timeout)
    conditions = profile_conditions(settings, cfg.optim)
    return measure(mesh, draft, conditions, partial(_built, cfg, settings, draft.example))


def _built(cfg: DictConfig, settings: Settings, example: ValueSpec) -> Measured:
    model = make_model(cfg, settings.seed, settings.dtype)
    return network_of(model, example, settings.precision == "bf16"), make_optimizer(cfg, model)


def _machine(device: torch.device, ranks: int) -> Facts:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    threads, version = torch.get_num_threads(), str(torch.__version__)
    return {"device": name, "ranks": ranks, "threads": threads, "torch": version}


# Messages


@dataclass(frozen=True, slots=True)
class Link:
    """The time of a message of n bytes one way: `latency_s` + n `s_per_byte`, in seconds."""

    latency_s: float = 0.0
    s_per_byte: float = 0.0

    def seconds(self, nbytes: int) -> float:
        return self.latency_s + nbytes * self.s_per_byte


def slowest_link(mesh: Mesh, buffer_size: int) -> Link:
    """Measure a pair of neighbours at a time; return the slowest link, on every rank. Raises ChannelError."""
    if mesh.world.size == 1:
        return Link()
    channel = mesh.channel(buffer_size)
    mine = []
    met: set[frozenset[int]] = set()
    for stage, ranks in enumerate(pairwise(mesh.placement)):
        if len(set(ranks)) == 2 and frozenset(ranks) not in met and mesh.world.rank in ranks:
            mine.append(_line(channel, mesh, stage))
        met.add(frozenset(ranks))
    told = mesh.gather("the times of messages", list(map(astuple, mine)))
    links = [Link(*link) for found in told for link in found]
    return max(links, key=lambda link: link.seconds(LARGE), default=Link())


def _line(channel: Channel, mesh: Mesh, stage: int) -> Link:
    """Fit a line through the times of a small and of a large message to the next stage."""
    small, large = (_one_way(channel, mesh, stage, nbytes) for nbytes in (SMALL, LARGE))
    s_per_byte = max(0.0, (large - small) / (LARGE - SMALL))
    return Link(max(0.0, small - SMALL * s_per_byte), s_per_byte)


def _one_way(channel: Channel, mesh: Mesh, stage: int, nbytes: int) -> float:
    """Return half the median round trip; the other end, which only answers, measures about the same."""
    here, there = mesh.placement[stage], mesh.placement[stage + 1]
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


def _layer_times(draft: Plan, device: torch.device, make: Callable[[], Measured]) -> list[LayerTime] | str:
    """Return the times of all layers or, where one fails, why."""
    cuda, entry = device.type == "cuda", draft.example.of(draft.full)
    try:
        with torch.random.fork_rng([device] if cuda else []):
            network, optimizer = make()
            for module in (network.model, *network.modules):
                module.to(device)
            x = draft.example.pack(tuple(made_up(spec, device) for spec in entry.specs))
            return measure_layers(network, x, draft.layers, optimizer, draft.numerics)
    except (ConfigError, RuntimeError) as error:  # a layer failed, or out of memory
        return one_line(error)
    finally:
        if cuda:
            torch.cuda.empty_cache()


def measure_layers(
    network: Network,
    x: Value,
    layers: Sequence[Layer],
    optimizer: OptimizerFactory,
    numerics: Numerics,
) -> list[LayerTime]:
    """Measure every layer for the microbatch `x`, in its own modes, on the device of both.

    This changes the network, which must not be trained afterwards, and the random generators. `layers`: its
    estimates. Raises ConfigError with the name of a layer that fails.
    """
    bench = _Bench(network, layers, optimizer, numerics, as_tuple(x)[0].device)
    for _ in range(WARM_UP):
        bench.run(x)
    bench.spans.clear()
    began = time.perf_counter()
    for done in range(MOST):
        if done >= REPEATS and time.perf_counter() - began > ENOUGH_S:
            break
        bench.run(x)
    seconds = bench.median_seconds()
    peaks = bench.peak_bytes(x)
    return [
        LayerTime(
            name=layer.name,
            forward_s=seconds["forward", i],
            recorded_s=seconds["recorded", i],
            kept_s=seconds["kept", i],
            again_s=seconds["again", i],
            backward_s=seconds["backward", i],
            input_s=seconds["input", i],
            weight_s=seconds["weight", i],
            step_s=seconds["step", i],
            peak_bytes=peaks[i],
            output_bytes=layer.output.nbytes,
            gradient_bytes=sum(s.nbytes for n, s in enumerate(layer.output.specs) if layer.needs(n)),
            state_bytes=bench.state_bytes(i),
        )
        for i, layer in enumerate(layers)
    ]


class _Bench:
    """The layers of a model, to be run one by one."""

    def __init__(
        self,
        network: Network,
        estimated: Sequence[Layer],
        optimizer: OptimizerFactory,
        numerics: Numerics,
        device: torch.device,
    ) -> None:
        numerics.arrange_weights(network.model)
        self._network = network
        self._estimated = estimated
        self._last_use = {value: index for index, layer in enumerate(estimated) for value in layer.takes}
        self._numerics = numerics
        self._clock = Clock(device)
        self._device = device.type
        self.spans: list[tuple[tuple[str, int], Mark, Mark]] = []  # (forward, backward, ...; layer)
        self._plain: set[tuple[str, int]] = set()  # what fails in its context, see _forward_within
        met: set[int] = set()
        trained: list[list[tuple[str, nn.Parameter]]] = []  # of each layer; a shared one at the first
        for module in network.modules:
            own = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
            trained.append([(name, p) for name, p in own if id(p) not in met])
            met.update(id(p) for _, p in own)
        self._optimizers = [optimizer(params) if params else None for params in trained]
        for made in filter(None, self._optimizers):
            for group in made.param_groups:
                group["lr"] = 0.0  # the same work, but the weights stay as they are

    def run(self, x: Value) -> None:
        """Run a batch of two microbatches, the second with a split backward. Gradients accumulate.

        Between them are the two forwards of one that recomputes and keeps dear results.
        """
        graphs = [outputs for outputs, _ in self._forwards(x)]
        for index in reversed(range(len(graphs))):
            self._backward(index, graphs.pop())
        recompute = [Recompute([], keep=True) for _ in self._estimated]
        deque(self._forwards(x, "kept", lambda index: recompute[index].forward()), maxlen=0)
        deque(self._forwards(x, "again", lambda index: recompute[index].recomputing()), maxlen=0)
        halves = [self._deferred(index) for index in range(len(self._estimated))]
        graphs = [outputs for outputs, _ in self._forwards(x, "recorded", lambda i: halves[i].recording())]
        for index in reversed(range(len(graphs))):
            if any(self._estimated[index].reached):
                self._input_half(index, graphs[index], halves[index])
                graphs[index] = ()
        for index in reversed(range(len(graphs))):
            if any(self._estimated[index].reached):
                with self._timed("weight", index):
                    halves[index].weight_half()
            else:
                self._backward(index, graphs[index], "weight")
            graphs[index] = ()
        for index, optimizer in enumerate(self._optimizers):
            if optimizer is not None:
                with self._timed("step", index):
                    optimizer.step()
        self._run_empty()

    def _run_empty(self) -> None:
        """Time the backward of a layer that computes nothing, in one and in two halves."""
        leaf = torch.zeros(1, device=self._device, requires_grad=True)
        grad = torch.ones_like(leaf)
        for made in (leaf.view_as(leaf), leaf.view_as(leaf)):
            with self._timed("backward", EMPTY):
                torch.autograd.backward([made], [grad])
        for made in (leaf.view_as(leaf), leaf.view_as(leaf)):
            with self._timed("input", EMPTY):
                Deferred([]).input_half([], [made], [grad])

    def _deferred(self, index: int) -> Deferred:
        return Deferred(self._leaves(index) if any(self._estimated[index].reached) else [])

    def _leaves(self, index: int) -> list[Tensor]:
        return [p for p in self._network.modules[index].parameters() if p.requires_grad]

    def _forwards(
        self,
        x: Value,
        part: str = "forward",
        within: Callable[[int], AbstractContextManager[object]] = lambda index: nullcontext(),
    ) -> Iterator[tuple[Tensors, Tensors]]:
        """Yield each layer's outputs with their graph, and what it was given. It runs `within`(layer)."""
        values = {Made(INPUT, number): t for number, t in enumerate(as_tuple(x))}
        made = [ValueSpec.like(x)]
        for index, layer in enumerate(self._estimated):
            given = tuple(values[value] for value in layer.takes)
            outputs = self._forward_within(index, given, made, part, within)
            values |= {Made(index, number): t.detach() for number, t in enumerate(outputs)}
            values = {v: t for v, t in values.items() if self._last_use.get(v, -1) > index}
            made.append(layer.output)
            yield outputs, given

    def _forward_within(
        self,
        index: int,
        given: Tensors,
        made: Sequence[ValueSpec],
        part: str,
        within: Callable[[int], AbstractContextManager[object]],
    ) -> Tensors:
        """Run a layer; without `within` if it fails in there, as one that differentiates itself.

        It cannot be trained so, and a schedule that does neither needs its price nevertheless.
        """
        if (part, index) not in self._plain:
            try:
                return self._forward(index, given, made, part, within(index))
            except ConfigError:
                if part == "forward":
                    raise
                self._plain.add((part, index))
        return self._forward(index, given, made, part, nullcontext())

    def _forward(
        self,
        index: int,
        given: Tensors,
        made: Sequence[ValueSpec],
        part: str,
        within: AbstractContextManager[object],
    ) -> Tensors:
        given = tuple(self._numerics.arrange(t.detach()) for t in given)
        reached = self._estimated[index].reached or (False,) * len(given)
        given = tuple(t.requires_grad_(reaches) for t, reaches in zip(given, reached, strict=True))
        if self._estimated[index].writes_input:
            given = tuple(t.clone() for t in given)
        with self._timed(part, index), self._numerics.context(self._device), within:
            return leaves_of(self._network.call(index, given, made))

    def _backward(self, index: int, outputs: Tensors, part: str = "backward") -> None:
        wanted = [t for t in outputs if t.requires_grad]
        if wanted:
            grads = [t.detach() for t in wanted]
            with self._timed(part, index):
                torch.autograd.backward(wanted, grads)

    def _input_half(self, index: int, outputs: Tensors, deferred: Deferred) -> None:
        wanted = [t for t in outputs if t.requires_grad]
        if wanted:
            grads = [t.detach().clone() for t in wanted]  # not of the storage of an activation
            leaves = self._leaves(index)
            with self._timed("input", index):
                deferred.input_half(leaves, wanted, grads)

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
        self.spans.append(((part, index), start, self._clock.mark()))

    def median_seconds(self) -> dict[tuple[str, int], float]:
        """Return the median seconds of each part of each layer; 0 for parts that a layer lacks.

        Without the least that a backward of an empty layer took, and at least a tenth.
        """
        seconds = defaultdict(list)
        spans = ((number, start, end) for number, (_, start, end) in enumerate(self.spans))
        for number, taken in self._clock.durations(spans):
            seconds[self.spans[number][0]].append(taken)
        found: dict[tuple[str, int], float] = defaultdict(float)
        for (part, index), times in seconds.items():
            empty = min(seconds[part, EMPTY]) if (part, EMPTY) in seconds else 0.0
            found[part, index] = max(median(times) - empty, median(times) / 10)
        return found

    def peak_bytes(self, x: Value) -> list[int]:
        peaks = []
        passes = self._forwards(x)
        for index in range(len(self._estimated)):
            with _Live() as live:
                outputs, _ = next(passes)
                self._backward(index, outputs)
            peaks.append(live.peak)
        return peaks

    def state_bytes(self, index: int) -> int:
        """Return the bytes of the optimizer's state of a layer."""
        optimizer = self._optimizers[index]
        state = tree_leaves(list(optimizer.state.values())) if optimizer is not None else []
        return sum(t.nbytes for t in state if isinstance(t, Tensor))


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors that are created and still alive, on any device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._now = 0
        self._met: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._meet((args, kwargs), made=False)
        result = func(*args, **(kwargs or {}))
        self._meet(result, made=True)
        self.peak = max(self.peak, self._now)
        return result

    def _meet(self, values: Any, made: bool) -> None:
        for tensor in strided(values):
            storage = tensor.untyped_storage()
            if id(storage) not in self._met:
                size = storage.nbytes() if made else 0
                self._now += size
                self._met[id(storage)] = weakref.ref(storage, partial(self._forget, id(storage), size))

    def _forget(self, key: int, size: int, _: object) -> None:
        self._now -= size
        del self._met[key]
