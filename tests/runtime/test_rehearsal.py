"""A rehearsal leaves no trace, and after it nothing waits for a message that waits for it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import SequentialLR, StepLR

from pipetrain import Pipeline
from pipetrain.runtime import session as session_module
from pipetrain.runtime.engine import Engine
from pipetrain.runtime.stage.parameter_store import ParameterStore
from pipetrain.schedule.actions import COMPUTE, RECEIVES, UPDATE, Action, Op
from tests.support import DEADLINE_S
from tests.support.cases import SCHEDULES, Case, make_run
from tests.support.thread_ranks import LocalChannel, LocalLinks, run_in_threads
from tests.users.test_saving import Lookahead

UNEVEN = ("microbatches=3", "epochs=2", "window=2")  # microbatches of 4, 3 and 2 samples


@contextmanager
def rehearsed() -> Iterator[None]:
    """Let the engines of this process rehearse."""
    with patch.object(session_module, "rehearses", lambda device: True):
        yield


@pytest.mark.parametrize(
    ("schedule", "ranks", "words"),
    [
        ("v_async", 2, ("optim=adamw", "clip_grad_norm=0.1", "ema=0.9")),
        ("pipedream", 2, ("correction=[gap_aware,spectrain]", "optim.momentum=0.9", "ema=0.9")),
        ("pipedream", 2, ("on_nan=skip", "batchnorm=batch", "recompute=always")),
        ("zbv", 2, ("codec.forward=topk_int8", "codec.backward=int8")),
        # On one rank, as threads share the generators whose state is put back.
        ("interleaved_1f1b", 1, ("model._target_=tests.support.models.dropping", "recompute=selective")),
    ],
    ids=str,
)
def test_training_after_a_rehearsal_is_equal_to_the_last_bit(schedule, ranks, words):
    def trained() -> tuple[dict[str, torch.Tensor], list[tuple[float, float, float]]]:
        state, epochs = run_in_threads(Case(schedule, ranks, (*UNEVEN, *words)))
        return state, [(f.trained["loss"], f.evaluated["loss"], f.score) for f in epochs]

    plain, losses = trained()
    with rehearsed():
        again, others = trained()
    assert losses == others
    assert plain.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in plain.items())


def test_the_first_rehearsal_alone_updates_weights_and_copies_them():
    """Twice two batches, of one size; other sizes come in the second window."""
    steps, copies, step, moved = list[bool](), list[bool](), ParameterStore.step, torch.Tensor.to

    def counted(self: ParameterStore, *arguments: Any) -> None:
        steps.append(True)
        step(self, *arguments)

    def copied(self: torch.Tensor, *where: Any, **how: Any) -> torch.Tensor:
        copies.extend([True] * ((*where, *how) == ("cpu", "copy")))
        return moved(self, *where, **how)

    with rehearsed(), patch.object(ParameterStore, "step", counted), patch.object(torch.Tensor, "to", copied):
        run_in_threads(case := Case("1f1b", 1, UNEVEN))
    assert len(steps) == 4 + 8
    assert len(copies) == len([*make_run(case).take_network().model.parameters()])


def in_turn(optimizer):
    """A scheduler with others in it, as an optimizer may have state in attributes."""
    return SequentialLR(optimizer, [StepLR(optimizer, 1, 0.5), StepLR(optimizer, 1, 0.25)], [1])


def test_a_process_alone_rehearses_too_and_tells_nobody_its_norms():
    def losses() -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        batch = torch.randn(4, 4), torch.randint(4, (4,))
        words = {"microbatches": 2, "clip_grad_norm": 0.01, "device": "cpu", "lr_schedule": in_turn}
        with Pipeline(model, nn.functional.cross_entropy, Lookahead, "interleaved_1f1b", **words) as pipe:
            found = [*pipe.train([batch]), *pipe.train([batch])]
            return [*found, *(float(output.sum()) for output in pipe.predict([batch[0]]))]

    plain = losses()
    with rehearsed():
        assert losses() == plain


# A device on which what is cold waits


class Spinning(LocalChannel):
    """A channel whose posted receives run on the device until their messages are there."""

    def spins(self) -> bool:
        wire = self._wire
        return any(wire.posted[e] - wire.taken[e] > len(wire.queues[e]) for e in self._expected)


class ColdEngine(Engine):
    """An engine on a device that loads something at the first use of each kind of action."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._warm: set[Hashable] = set()
        self.waited_for: list[Hashable] = []
        """The kinds of actions that were cold while a receive was posted: a GPU would hang there."""
        self._plain = self._methods
        self._methods = dict.fromkeys(self._plain, self._loading)

    def _run(self, window: Any, *rest: Any) -> Any:
        hear = window.sums.wait

        def hearing(action: Action, waits: Any) -> None:
            hear(action, lambda: (waits(), self._use(("heard", action.op))))

        window.sums.wait = hearing
        return super()._run(window, *rest)

    def _loading(self, action: Action, window: Any) -> None:
        at = window.trains, action.stage, action.op, action.peer
        kinds = [(*at, *kind) for kind in self._kinds(action, window)]
        if action.op in RECEIVES:  # its message is decoded when it is there
            self._plain[action.op](action, window)
            self._use(*kinds)
        else:
            self._use(*kinds)
            self._plain[action.op](action, window)

    def _kinds(self, action: Action, window: Any) -> list[tuple[Hashable, ...]]:
        """Return what changes the kernels of an action, beside its stage and operation."""
        stage, order = self.stages[action.stage], window.order
        if action.op is Op.STEP:
            optimizer = stage.store.optimizer
            begun = bool(optimizer and optimizer.state), bool(stage.store._average)
            return [("keeps", order.needed(action.stage, action.version - 1)), ("begun", *begun)]
        if action.op in UPDATE:
            return [()]
        first = action.op in COMPUTE and stage.buffers.reruns is None
        return [(window.feed.size(action.mb), order.saving(action.stage, action.mb), first)]

    def _use(self, *kinds: Hashable) -> None:
        cold = set(kinds) - self._warm
        self._warm |= cold
        self.waited_for += cold if self._evaluation.channel.spins() else ()


@contextmanager
def loading() -> Iterator[list[ColdEngine]]:
    """Let each rank have a device that loads; the engines are those that were made meanwhile."""
    engines: list[ColdEngine] = []

    def make(*arguments: Any) -> ColdEngine:
        engines.append(ColdEngine(*arguments))
        return engines[-1]

    def channel(groups: Any, bounds: Any, channels_last: bool = False) -> Spinning:
        return Spinning(groups._wire, bounds, DEADLINE_S, groups.world.rank)

    with patch.object(LocalLinks, "channel", channel), patch.object(session_module, "Engine", make):
        yield engines


TINY = ("model._target_=tests.runtime.test_rehearsal.lines", "epochs=1", "dtype=float32")


def lines() -> nn.Sequential:
    """Twelve layers."""
    first = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 4))
    return nn.Sequential(first, *(nn.Linear(4, 4) for _ in range(10)), nn.Linear(4, 10))


CODED = ("codec.forward=int8", "codec.backward=topk_int8")
SKIPPING = ("recompute=always", "window=2", "on_nan=skip")
CLIPPED = ("clip_grad_norm=0.1", "clip_grad_norm_over=model", "ema=0.9", "optim=adamw")
TIED = ("model._target_=tests.support.models.tied",)
OPTIONS = {
    "1f1b": [CODED, SKIPPING, CLIPPED, TIED],
    "pipedream": [CLIPPED],
    "zbv": [("recompute=always", *TIED)],
    "fbp": [CODED, SKIPPING],
}
ON_THREE = ("pipedream", "zb_h1", "v_half", "fbp")
FOUR = ("microbatches=4",)  # of 3 and 2 samples, evaluation of 6 and 5; else as the schedule's file says


@pytest.mark.parametrize(
    ("schedule", "ranks", "words"),
    [
        *((name, 3 if name in ON_THREE else 2, FOUR) for name in SCHEDULES),
        *((name, 2, words) for name, some in OPTIONS.items() for words in some),
    ],
    ids=str,
)
def test_nothing_is_cold_while_a_receive_is_posted(schedule, ranks, words):
    """Receives are posted ahead, as over gloo."""
    with loading() as engines, rehearsed():
        run_in_threads(Case(schedule, ranks, (*TINY, *words)))
    assert all(engine._warm for engine in engines)
    assert [engine.waited_for for engine in engines] == [[]] * ranks


def test_without_a_rehearsal_a_forward_waits_for_what_waits_for_it():
    with loading() as engines:
        run_in_threads(Case("1f1b", 2, (*TINY, "microbatches=4")))
    assert (True, 1, Op.F, -1) in {kind[:4] for kind in engines[1].waited_for}
