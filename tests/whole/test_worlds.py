"""Every schedule over real processes and gloo, against the single-process reference, in float64 to 1e-12."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from pipetrain import Pipeline
from pipetrain.config.build import make_optimizer, make_schedule, model_of
from pipetrain.data.sampling import Sampled
from pipetrain.errors import ChannelError
from pipetrain.model.specs import TensorSpec
from pipetrain.runtime.comm.collectives import World
from pipetrain.runtime.comm.message import Message
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.schedule.actions import ALL
from pipetrain.trainer import fit
from pipetrain.trainer.run import EpochData
from tests.support import DEADLINE_S
from tests.support.cases import (
    SCHEDULES,
    Case,
    Listener,
    Ran,
    compare,
    make_run,
    options_of_case,
    stages_of,
    state_of,
)
from tests.support.process_ranks import in_world, run_world

pytestmark = pytest.mark.processes


NORM = "model._target_=tests.support.models.with_norm"


PLAIN = "model._target_=tests.support.models.without_norm"


SKIPS = ("model._target_=tests.support.models.skipping", "+model.dropout=0.3", "epochs=1")


# By stages. Some cuts lie between a layer and its skip connection, or before a layer that works in place.
UNEVEN = {2: "[3]", 3: "[1,7]", 4: "[1,4,8]", 6: "[1,2,4,6,9]"}


SPLIT = [schedule for schedule in SCHEDULES if schedule.startswith(("zb", "v_"))]


TURNS = [
    (NORM, "even", "window=null"),
    (NORM, "uneven", "window=2", "buffer_size=1"),
    (PLAIN, "even", "window=2", "optim=adamw"),
    (PLAIN, "uneven", "window=null", "buffer_size=1", "optim=adamw"),
]


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


def cases_of(ranks: int) -> list[Case]:
    """Half of the schedules, by turns on even and uneven cuts, with BatchNorm and without.

    In threads, each is held on more: see test_equivalence.py.
    """
    cases = []
    for number, schedule in enumerate(SCHEDULES[ranks - 2 :: 2]):
        model, cut, *words = TURNS[(number + ranks) % len(TURNS)]
        if schedule in SPLIT:
            model, cut, *words = PLAIN if ranks % 2 else NORM, "uneven", "window=2", "buffer_size=1"
            words += ["clip_grad_norm=0.25", *["optim=adamw"] * (ranks % 2)]
        cuts = UNEVEN[stages_of(schedule, ranks)] if cut == "uneven" else cut
        words = [model, f"partition={cuts}", "microbatches=4", "epochs=1", *words]
        cases.append(Case(schedule, ranks, tuple(words)))
    return cases


def test_every_schedule_equals_the_reference(ranks, three):
    for size, staying in ((2, ranks), (3, three)):
        equal_the_reference(staying, cases_of(size))


def test_skips_what_is_dropped_and_norms_of_the_model_equal_the_reference(three):
    """Each process draws for itself, and a skip has an edge of its own."""
    clip = (NORM, "microbatches=3", "clip_grad_norm=0.25", "window=2", "epochs=1")
    cases = [
        Case("1f1b", 3, (*SKIPS, "partition=[3,9]", "microbatches=6", "+model.recompute=plain")),
        Case("fbp", 3, (*SKIPS, "partition=[6,11]", "microbatches=3")),
        Case("pipedream", 3, (*SKIPS, "partition=[3,9]", "microbatches=2", "window=2", "buffer_size=1")),
        Case("v_half", 3, (*SKIPS, "partition=[2,4,6,9,11]", "microbatches=6", "buffer_size=1")),
        Case("interleaved_1f1b", 3, (*clip, "partition=even")),
        Case("pipedream", 3, (*clip, "partition=[1,7]", "clip_grad_norm_over=model", "ema=0.5")),
    ]
    equal_the_reference(three, cases)


@pytest.mark.parametrize(("elements", "messages", "buffer_size"), [(4, 9, 3), (2 << 20, 3, 1)])
def test_two_ranks_that_both_send_first_do_not_hang(ranks, elements, messages, buffer_size):
    up, down = ranks(in_world, exchange, elements, messages, buffer_size)
    assert up == [100.0 + mb for mb in range(messages)]
    assert down == [float(mb) for mb in range(messages)]


def test_the_bound_is_enforced_and_its_expiry_named_and_so_are_norms_that_do_not_come():
    full, silent = run_world(overfill, 2)
    assert full == "rank 0 waited 1 s for rank 1 to take the activation of microbatch 0"
    assert silent == "rank 1 waited 1 s for the gradient norms of rank 0"


def test_a_rank_that_leaves_after_an_error_is_lost_at_once_whatever_still_refers_to_its_messages(ranks):
    (message, told), _ = ranks(in_world, leave_with_references)
    assert message.startswith("rank 0 lost rank 1 at the gradient of microbatch 0: Connection closed by peer")
    assert told.startswith("rank 0 could not receive it from rank 1: Connection closed by peer")


def test_what_has_arrived_and_where_there_is_room_can_be_asked():
    sender, receiver = run_world(watch, 2)
    assert sender == ["rank 0 waited 1 s for rank 1 to take the activation of microbatch 9"]
    late, *received, lost, norms = receiver
    assert late == "rank 1 waited 1 s for the activation of microbatch 7 from rank 0"
    assert received == ["7.0", "8.0"]
    assert lost.startswith("rank 1 lost rank 0 at the activation of microbatch 9: ")
    assert norms.startswith("rank 1 lost rank 0 at the gradient norms: ")


def test_clocks_are_compared_with_rank_0_s(three):
    """perf_counter is one clock for all processes of a machine, so what is found is the shift alone."""
    (zero, no_error), *others = three(in_world, compare_clocks, [5.0, 105.0, -20.0])
    assert (zero, no_error) == (0.0, 0.0)
    for (offset, error), shift in zip(others, [-100.0, 25.0], strict=True):
        assert 0 < error < 5
        assert abs(offset - shift) <= error
