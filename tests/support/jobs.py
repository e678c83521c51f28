"""What the processes of a spawned world do in the tests: importable, so that it can be spawned."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from pipetrain import Pipeline
from pipetrain.codec import Codecs
from pipetrain.config.build import make_optimizer, make_schedule, model_of
from pipetrain.data.sampling import Sampled
from pipetrain.errors import ChannelError, Refused
from pipetrain.model.specs import TensorSpec, specs_of
from pipetrain.runtime.comm.collectives import Ranks, World
from pipetrain.runtime.comm.message import Message
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.runtime.comm.rendezvous import make_group
from pipetrain.runtime.mailbox import Coding
from pipetrain.schedule.actions import ALL
from pipetrain.trainer import fit
from pipetrain.trainer.run import EpochData
from tests.support import DEADLINE_S
from tests.support.cases import Case, Listener, Ran, compare, make_run, options_of_case, state_of

CPU = torch.device("cpu")


def train_cases(cases: Sequence[Case]) -> list[tuple[dict[str, Tensor], Ran]]:
    """Train each case over gloo by Pipeline; return this rank's state, and rank 0's figures."""
    return [train_by_pipeline(case) for case in cases]


def train_by_pipeline(case: Case) -> tuple[dict[str, Tensor], Ran]:
    """Train a case as the command does, on a rank of torchrun; return its stages' state, and the figures."""
    run, cfg, listener = make_run(case), options_of_case(case), Listener()
    settings, data = run.settings, run.data
    assert data is not None
    own = settings.seed, settings.workers, settings.timeout, data.classes
    train = Sampled(data.train, run.sampler.batch_sizes, run.sampler, *own)
    test = Sampled(data.test, run.evaluation_sizes, None, *own)
    optimizer, schedule, rate = make_optimizer(cfg), make_schedule(cfg), settings.rate(run.updates)
    model = model_of(cfg, settings.seed)
    with (
        Pipeline(model, run.task, optimizer, schedule, lr_schedule=rate, settings=settings) as pipe,
        patch.object(fit, "_recorder", lambda *_: listener),
    ):
        training = pipe._training
        epochs = EpochData(training, train, test, len(run.sampler.batch_sizes), None)
        fit.train_epochs(training, epochs, training.settings, run.facts, None)
        return state_of(training, run), listener.epochs


def equal_the_reference(ranks: Callable[..., list[Any]], cases: Sequence[Case]) -> None:
    """Train cases on ranks that stay, and hold each against the reference."""
    for case, parts in zip(cases, zip(*ranks(train_cases, cases), strict=True), strict=True):
        compare(case, {name: t for state, _ in parts for name, t in state.items()}, parts[0][1])


def _message(mb: int, elements: int, forward: bool = True) -> Message:
    ends = (0, 1) if forward else (1, 0)
    return Message(*ends, mb, (TensorSpec((elements,), torch.float32),), ends)


def exchange(world: World, store: Store, elements: int, messages: int, buffer_size: int) -> list[float]:
    """Both of two ranks send first, then receive: returns the first value of each message."""
    groups = ProcessGroups(world, [(0,), (1,)], [((0, 1), (0, 1)), ((1, 0), (1, 0))], CPU, store, DEADLINE_S)
    channel = groups.channel(buffer_size)
    forward = world.rank == 0
    incoming = [_message(mb, elements, not forward) for mb in range(messages)]
    channel.expect(incoming)
    seen = []
    for mb in range(messages):
        channel.send(_message(mb, elements, forward), [torch.full((elements,), 100.0 * world.rank + mb)])
        (tensor,) = channel.recv(incoming[mb])
        assert bool((tensor == tensor[0]).all())
        seen.append(tensor[0].item())
    channel.drain()
    groups.close()
    return seen


def overfill(world: World, store: Store) -> str:
    """Rank 0 sends more than the bound to a rank that takes nothing, and that waits for norms in vain."""
    groups = ProcessGroups(world, [(0,), (1,)], [((0, 1), (0, 1)), ((1, 0), (1, 0))], CPU, store, DEADLINE_S)
    channel = groups.channel(2)
    channel._timeout = 1.0
    if world.rank == 1:
        channel.all_reduce(ALL, torch.ones(2, dtype=torch.float64))
        said = _complaint(partial(channel.reduced, ALL))
        store.wait(["done"])
        return said
    for mb in range(2):
        channel.send(_message(mb, 4), [torch.zeros(4)])  # within the bound: not waited for
    said = _complaint(lambda: channel.send(_message(2, 4), [torch.zeros(4)]))
    store.set("done", "1")
    return said


def leave_with_references(world: World, store: Store) -> tuple[str, str]:
    """Rank 1 leaves after an error, and something still refers to its messages and to what it waits for."""
    groups = ProcessGroups(world, [(0,), (1,)], [((0, 1), (0, 1)), ((1, 0), (1, 0))], CPU, store, DEADLINE_S)
    channel, first = groups.channel(1), world.rank == 0
    channel.expect([_message(0, 4, not first)])
    groups.broadcast_nowait("the next window") if first else None
    referred_to = [list(end.posted) for end in channel._ends.values()], groups._heads.copy(), groups._gloo
    if first:
        said = (
            _complaint(partial(channel.recv, _message(0, 4, False))),
            _complaint(partial(groups.broadcast, "it")),
        )
        store.set("seen", "1")
        groups.abandon("it has lost rank 1")
    else:
        groups.broadcast_nowait("the next window")
        groups.abandon("its layer has raised an error")
        store.wait(["seen"])
        said = "", ""
    del referred_to
    return said


def watch(world: World, store: Store) -> list[str]:
    """Both ranks look before they wait: for what comes late, for room, and for a peer that dies."""
    groups = ProcessGroups(world, [(0,), (1,)], [((0, 1), (0, 1)), ((1, 0), (1, 0))], CPU, store, DEADLINE_S)
    channel = groups.channel(1)
    channel._timeout = 1.0
    first, second, third = (_message(mb, 4) for mb in (7, 8, 9))
    said = []
    if world.rank == 0:
        channel.expect([], watched=True)
        store.wait(["late"])
        assert channel.room(first)
        channel.send(first, [torch.full((4,), 7.0)])
        channel.wait([], [second])  # until that one has arrived
        channel.send(second, [torch.full((4,), 8.0)])
        assert not channel.room(third)  # rank 1 has taken none, so it has posted no more
        said.append(_complaint(lambda: channel.wait([], [third])))
        store.set("full", "1")
        store.wait(["taken"])
        raise SystemExit(said)
    channel.expect([first, second, third], watched=True)
    assert not channel.arrived(first)
    said.append(_complaint(lambda: channel.wait([first], [])))
    store.set("late", "1")
    channel.wait([first], [])
    assert channel.arrived(first)
    store.wait(["full"])
    for message in (first, second):
        channel.wait([message], [])
        said.append(str(channel.recv(message)[0][0].item()))
    channel._timeout = DEADLINE_S
    store.set("taken", "1")
    channel.wait([third], [])
    said.append(_complaint(lambda: channel.recv(third)))
    channel.all_reduce(ALL, torch.ones(2, dtype=torch.float64))
    said.append(_complaint(partial(channel.reduced, ALL)))
    return said


def _complaint(action: Callable[[], object]) -> str:
    try:
        action()
    except ChannelError as error:
        return str(error)
    return "no error"


def compare_clocks(world: World, store: Store, shifts: Sequence[float]) -> tuple[float, float]:
    """Each rank's clock is `shifts[rank]` seconds ahead; returns its offset and the error."""
    groups = ProcessGroups(world, [(rank,) for rank in range(world.size)], [], CPU, store, DEADLINE_S)
    offset = groups.clock_offset(lambda: time.perf_counter() + shifts[world.rank])
    groups.close()
    return offset


def exchange_coded(world: World, store: Store, all_codecs: Sequence[Codecs]) -> int:
    """Two ranks send each other images, channels innermost, through each pair of codecs, and check them."""
    groups = ProcessGroups(world, [(0,), (1,)], [((0, 1), (0, 1)), ((1, 0), (1, 0))], CPU, store, DEADLINE_S)
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    x = x.contiguous(memory_format=torch.channels_last)
    for codecs in all_codecs:
        channel, coding, plain = groups.channel(1, True), Coding(codecs, True), specs_of([x])
        ends = (0, 1), (1, 0)
        out, back = (
            Message(*end, 0, coding.specs(end, plain), end, plain)
            for end in (ends if world.rank == 0 else ends[::-1])
        )
        channel.expect([back] * 2)
        for _ in range(2):
            channel.send(out, coding.encode(out, [x]))
            (arrived,) = coding.decode(back, channel.recv(back))
        channel.drain()
        codec, residual = codecs.for_edge(back.edge), torch.zeros_like(x)
        for _ in range(2):  # what the other rank did
            owed = x + residual if codec.error_feedback else x
            decoded = codec.decode(codec.encode(owed), plain[0])
            residual = owed - decoded
        assert torch.equal(arrived, decoded)
        assert arrived.is_contiguous(memory_format=torch.channels_last)
    groups.close()
    return len(all_codecs)


def agreements(world: World, store: Store) -> list[str]:
    """Three ranks agree, or do not; returns what each call ended with. In the last one rank 2 is missing."""
    make_group(world, store, timedelta(seconds=DEADLINE_S))
    ranks, rank = Ranks(world, DEADLINE_S, dist.group.WORLD), world.rank
    refusals = {}, {2: "it has no GPU"}, {0: "the first of two", 1: "another"}
    said = [_agreed(ranks, refusal=refusal.get(rank, "")) for refusal in refusals]
    said.append("" if rank == 2 else _agreed(ranks, limit_s=1.0))
    if rank == 0:
        store.set("over", "")
    store.wait(["over"])
    return said


def _agreed(ranks: Ranks, **words: Any) -> str:
    try:
        ranks.barrier_or_raise("get ready", **words)
        return "agreed"
    except (Refused, ChannelError) as error:
        return str(error)
