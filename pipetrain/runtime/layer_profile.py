"""Measures what layers and messages cost, on all ranks at the same time: they compete as in training.

On CPUs rank 0 measures alone before: how much less that takes says how far ranks that wait let others gain.

Each layer is a stage of its own, all of them on this rank, and the engine runs a program over them: what is
timed is what it does in training. One microbatch is recomputed, one saved whole, and one has its backward in
two halves; these two add to a gradient that is there, as most microbatches of a batch do. Behind the last
layer is a stage without any, whose times are what a stage takes beside its layers. What follows it is
nowhere: gradients are made up. What layers take of a pass is by their medians over windows, of which a quick
model gets more, since a small time is disturbed more easily; the pass takes its mean. For medians do not add
up: where ranks share cores, most short layers run without an interruption, but hardly any pass does. Messages
make round trips on the run's channel.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, pairwise
from statistics import fmean, median
from typing import Any

import torch
from torch import nn

from pipetrain.config.rate import LearningRate
from pipetrain.config.settings import Settings
from pipetrain.errors import ActionFailed, ConfigError, one_line
from pipetrain.model.chain import Chain
from pipetrain.model.network import Network, ValueId
from pipetrain.model.numerics import Numerics
from pipetrain.model.random_numbers import RngSnapshot
from pipetrain.model.specs import Size, TensorSpec, ValueSpec
from pipetrain.model.trial_tensors import made_up_samples
from pipetrain.plan.cost_estimate import Layer, estimate
from pipetrain.plan.costs import SECONDS, Facts, LayerTime, Profile
from pipetrain.plan.cut import cut_layers
from pipetrain.runtime.clock import Clock
from pipetrain.runtime.comm.channel import Channel
from pipetrain.runtime.comm.message import Message
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.runtime.engine import Engine
from pipetrain.runtime.mailbox import Mailbox
from pipetrain.runtime.microbatch_feed import RepeatedFeed
from pipetrain.runtime.rank_actions import Order
from pipetrain.runtime.rehearsal import LoopbackChannel
from pipetrain.runtime.stage.nonfinite import StopOnNaN
from pipetrain.runtime.stage.parameter_store import OptimizerFactory
from pipetrain.runtime.stage.stage import Stage
from pipetrain.runtime.stage.stage_options import StageOptions
from pipetrain.schedule.actions import Action, Op, Predicted, ranks_of
from pipetrain.schedule.lower import Lowering, edges, lower
from pipetrain.schedule.lower import links as links_of
from pipetrain.schedule.timeline import Bounds, Row

log = logging.getLogger("pipetrain")

WARMUP_WINDOWS = 1
# Windows, with those; after so many seconds MIN_WINDOWS are enough.
MIN_WINDOWS, MAX_WINDOWS, ENOUGH_S = 7, 30, 0.2
ALONE_WINDOWS = 4  # at least, on rank 0 while the others wait
FORWARD, BACKWARD = SECONDS.index("forward_s"), SECONDS.index("backward_s")
SMALL_BYTES, LARGE_BYTES = 2**10, 2**22  # of a message
COLD_ROUND_TRIPS, ROUND_TRIPS = 3, 11

EMPTY_STAGES = 2  # stages without layers
RECOMPUTED, WHOLE, SPLIT = MICROBATCHES = range(3)
MEASURED = {  # what is run of each microbatch, in order, and of which time it is a part
    (RECOMPUTED, Op.F): "kept_s",
    (RECOMPUTED, Op.R): "again_s",
    (RECOMPUTED, Op.B): "",
    (WHOLE, Op.F): "forward_s",
    (WHOLE, Op.B): "backward_s",
    (SPLIT, Op.F): "recorded_s",
    (SPLIT, Op.I): "input_s",
    (SPLIT, Op.W): "weight_s",
    (0, Op.REDUCE): "step_s",
    (0, Op.STEP): "step_s",
}


def measure(
    groups: ProcessGroups,
    settings: Settings,
    conditions: Facts,
    network: Network,
    optimizer: OptimizerFactory,
    layers: list[Layer],
    example: ValueSpec,
    numerics: Numerics,
) -> Profile:
    """Measure messages, then layers; return the same profile on every rank.

    `network`: one that is not trained afterwards, in host memory; `layers`: its estimates; `example`: of the
    input. They are measured at the mean lengths. Raises ConfigError, on all ranks, for a layer that fails on
    any, and ChannelError.
    """
    began, size, device, timed = time.perf_counter(), settings.timed, groups.device, layers
    if size != settings.full:
        timed = estimate(network.spare(), example.of(size), numerics)
    if groups.world.rank == 0:
        log.info("pipetrain: profiling %d layers, %s at a time", len(layers), size)
    latency_s, s_per_byte = slowest_link(groups, min(settings.buffer_sizes))

    def measured_here(least: int) -> Any:
        try:
            with RngSnapshot().replayed():
                return measure_layers(network, timed, example, size, numerics, optimizer, device, least)
        except (ConfigError, RuntimeError) as error:  # a layer failed, or out of memory
            return one_line(error)

    share = device.type == "cpu" and groups.world.size > 1  # cores and memory
    first = measured_here(ALONE_WINDOWS) if share and not groups.world.rank else None
    if share:
        first = groups.broadcast("the times of the layers on one rank", first)
    local = first if isinstance(first, str) else measured_here(MIN_WINDOWS)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    by_rank = groups.gather("the times of the layers", local)
    for failure in by_rank:
        if isinstance(failure, str):
            raise ConfigError(failure)
    if groups.world.rank == 0:
        log.info("profiled in %.1f s", time.perf_counter() - began)
    machine = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "ranks": len(by_rank),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "alone": round(min(1.0, _pass_s(first) / _pass_s(by_rank[0])), 3) if first else 1.0,
    }
    names_and_bytes = [*((layer.name, layer.output.nbytes) for layer in layers), ("", 0)]
    *measured, stage = (
        LayerTime(*layer, *map(median, zip(*seconds, strict=True)))
        for layer, *seconds in zip(names_and_bytes, *by_rank, strict=True)
    )
    return Profile(conditions, machine, latency_s, s_per_byte, measured, stage)


def _pass_s(times: Sequence[Sequence[float]]) -> float:
    """Return the time of a forward and a backward through all layers, measured."""
    return sum(seconds[FORWARD] + seconds[BACKWARD] for seconds in times)


def copy_to_measure(network: Network) -> Network:
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


# Layers


class _MeasuredStage(Stage):
    """A stage whose numbers are made up, and which does not prove a recomputation, as training does once."""

    def begin_window(self, predicted: Sequence[Predicted] = ()) -> None:
        super().begin_window(predicted)
        self.rehearses, self._compares_recompute = True, False


def measure_layers(
    network: Network,
    layers: Sequence[Layer],
    example: ValueSpec,
    size: Size,
    numerics: Numerics,
    optimizer: OptimizerFactory,
    device: torch.device,
    least: int,
) -> list[list[float]]:
    """Return the times of each layer, as SECONDS names them, and at the end those of a stage without any.

    They are for a microbatch of `size`, its samples like `example`, in the modes of the modules. This changes
    the network, which must not be trained afterwards. `layers`: its estimates; `least`: windows. Raises
    ConfigError with the name of a layer that fails.
    """
    followed, stage_count = _with_following_stages(layers), len(layers) + EMPTY_STAGES
    cut = cut_layers({size: followed}, range(1, stage_count + 1), example)
    identity = Chain(nn.Sequential(*(nn.Identity() for _ in range(stage_count))))
    for module in (network.model, *network.modules):
        module.to(device)
    stages: dict[int, Stage] = {}
    options = StageOptions(device.type, numerics, selective=True)
    for n, slice in enumerate(cut.slices[:-1]):
        part = (network if n < len(layers) else identity).part(slice)
        # At a rate of 0 the weights stay as they are.
        stages[n] = _MeasuredStage(n, part, optimizer, LearningRate(lambda update: 0.0), options)
        stages[n].add_observers(StopOnNaN(stages[n]))
    measured = [
        Action(n, op, mb, version=int(op is Op.STEP))
        for mb, op in MEASURED
        if op is not Op.REDUCE  # which is added
        for n in sorted(stages, reverse=op not in (Op.F, Op.R))
    ]
    following = [Action(stage_count, op, mb) for mb in MICROBATCHES for op in (Op.F, Op.B)]
    program = lower([measured, following], cut.edges)
    rank_of = Lowering.for_program(program).rank
    links = links_of(edges(program, cut.edges), ranks_of(program))
    channel = LoopbackChannel(dict.fromkeys(links), 1, math.inf, device)
    mail = Mailbox(channel, cut, ranks_of(program), 0)
    engine = Engine(stages, mail, mail, lambda stage: Bounds(1, 1, 0), Clock(device))
    feed = RepeatedFeed(size, [made_up_samples(example.of(size), device)])
    rows: list[Row | None] = []
    began = time.perf_counter()
    try:
        while len(rows) < least or (len(rows) < MAX_WINDOWS and time.perf_counter() - began < ENOUGH_S):
            order = Order(program[0], rank_of, microbatches=len(MICROBATCHES))
            rows.append(engine.train(order, feed, timed=True))
    except ActionFailed as error:
        raise ConfigError(
            f"layer {error.stage} ({followed[error.stage].name}) of the model cannot be profiled: "
            f"{type(error.__cause__).__name__}: {one_line(error.__cause__)}"
        ) from error
    return _times(stage_count, [row for row in rows[WARMUP_WINDOWS:] if row])


def _with_following_stages(layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers, the EMPTY ones, and what is nowhere; these return what the last layer does."""
    followed, output, needs = list(layers), layers[-1].output, layers[-1].requires_grad or ()
    for _ in range(EMPTY_STAGES + 1):
        takes = tuple(ValueId(len(followed) - 1, number) for number in range(len(output.specs)))
        followed.append(Layer("", 0, 0, output, needs, takes, reached=needs))
    return followed


def _times(stages: int, rows: Sequence[Row]) -> list[list[float]]:
    """Return what each layer takes without what a stage takes beside it: medians that add up to the mean."""
    spans: dict[str, list[list[float]]] = {name: [[] for _ in range(stages)] for name in SECONDS}
    for row in rows:
        sums: dict[tuple[str, int], float] = defaultdict(float)
        for action, start, end, *_ in row.spans:
            if action is not None and (name := MEASURED.get((action.mb, action.op))):
                sums[name, action.stage] += end - start
        for (name, stage), seconds in sums.items():
            spans[name][stage].append(seconds)
    columns = []
    for name in SECONDS:
        medians = [*map(median, spans[name])]
        interrupted = sum(map(fmean, spans[name])) / sum(medians)
        *layers, warm, cold = (interrupted * seconds for seconds in medians)
        columns.append([*(max(seconds - warm, seconds / 10) for seconds in layers), cold])
    return [list(times) for times in zip(*columns, strict=True)]


# Messages


def slowest_link(groups: ProcessGroups, buffer_size: int) -> tuple[float, float]:
    """Measure a pair of neighbouring ranks at a time; return the slowest one's times, on every rank.

    These are the seconds of an empty message, and of a byte; 0 if there are no messages. Neighbours are those
    of a straight pipeline, whatever the placement is, or will be with replicas=auto. Raises ChannelError.
    """
    if groups.world.size == 1:
        return 0.0, 0.0
    pairs = [*pairwise(range(groups.world.size))]
    groups.open([(edge, edge) for pair in pairs for edge in (pair, pair[::-1])])
    channel = groups.channel(buffer_size)
    local = [
        [_one_way(channel, groups, pair, nbytes) for nbytes in (SMALL_BYTES, LARGE_BYTES)]
        for pair in pairs
        if groups.world.rank in pair
    ]
    times = chain.from_iterable(groups.gather("the times of messages", local))
    return latency_and_byte_time(*max(times, key=lambda small_and_large: small_and_large[1]))


def latency_and_byte_time(small_s: float, large_s: float) -> tuple[float, float]:
    """Return the line through the times of a small and of a large message: that of none, and of a byte."""
    s_per_byte = max(0.0, (large_s - small_s) / (LARGE_BYTES - SMALL_BYTES))
    return max(0.0, small_s - SMALL_BYTES * s_per_byte), s_per_byte


def _one_way(channel: Channel, groups: ProcessGroups, pair: tuple[int, int], nbytes: int) -> float:
    """Return half the median round trip; the other end, which only answers, measures about the same."""
    specs, trips = (TensorSpec((nbytes,), torch.uint8),), range(COLD_ROUND_TRIPS + ROUND_TRIPS)
    outbound, replies = ([Message(*way, i, specs, way) for i in trips] for way in (pair, pair[::-1]))
    leads = groups.world.rank == pair[0]
    # A posted receive is a kernel that runs, for which the first use of another kernel may wait.
    payload = [torch.zeros(nbytes, dtype=torch.uint8, device=groups.device)]
    channel.expect(replies if leads else outbound)
    seconds = []
    for request, reply in zip(outbound, replies, strict=True):
        start = time.perf_counter()
        if leads:
            channel.send(request, payload)
            channel.recv(reply)
        else:
            channel.send(reply, channel.recv(request))
        channel.deadline.settle()  # a receive may order the stream alone
        seconds.append(time.perf_counter() - start)
    channel.drain()
    channel.deadline.settle()
    return median(seconds[COLD_ROUND_TRIPS:]) / 2
