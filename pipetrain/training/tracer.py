"""What `trace=` asks for: keeps when each action of the traced windows ran, and brings it together on rank 0.

Every rank knows every program, so it keeps times alone, in arrays (24 bytes an action), and what its messages
were on the wire; where a policy decides, it keeps the actions too. It sends all that once, after the epoch in
which the last traced window ran. Its clock is compared with rank 0's before and after; in between the offset
is taken to drift evenly.
"""

from __future__ import annotations

import platform
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from pipetrain.blueprint import window_lengths
from pipetrain.checkpoint.files import Position
from pipetrain.runtime.engine import Observer
from pipetrain.runtime.mesh import Mesh
from pipetrain.schedule.actions import Action, Op, shortened
from pipetrain.schedule.measured import Carried, RankWindow, TracedWindow
from pipetrain.training.run import Run

MOST_ACTIONS = 100_000  # of a rank, counted in whole windows, of which one is always traced


@dataclass(frozen=True, slots=True)
class Trace:
    """What rank 0 writes down. `clock_error_s`: by how much a rank's clock may differ from rank 0's."""

    windows: list[TracedWindow]
    cut: str  # why windows that were asked for are not there; nothing where all are
    clock_error_s: float


class Tracer:
    """One rank's tracing of the first windows from a position on. All ranks make the same calls."""

    def __init__(self, run: Run, mesh: Mesh, position: Position) -> None:
        self._run = run
        self._mesh = mesh
        lengths = _lengths(run, position)[: run.settings.trace]
        longest = {n: max(map(len, window.program)) for n, window in run.plan.windows.items()}
        actions = list(accumulate(longest[n] for n in lengths))
        self._left = max(1, bisect_right(actions, MOST_ACTIONS))
        self._cut = "" if self._left == len(lengths) else f"at {MOST_ACTIONS} actions of a rank"
        self._windows: list[
            tuple[int, int, list[int]]
        ] = []  # (epoch, planned batches, samples of microbatches)
        self._times: list[array[float]] = []  # of each window
        self._messages: list[list[Carried]] = []  # likewise
        self._ran: list[list[Action]] = []  # likewise, where a policy decides
        self._began = self._compare_clocks()

    @property
    def over(self) -> bool:
        """Whether all is traced that is to be traced."""
        return not self._left

    def observer(self, epoch: int, batches: Sequence[Sequence[Tensor]]) -> Observer | None:
        """Return what takes the times of the next window, of these sample ids; None if it is not traced."""
        if self.over:
            return None
        self._left -= 1
        return partial(self._take, epoch, batches)

    def collect(self) -> Trace:
        """Bring the times of all ranks together, on the clock of rank 0."""
        (began, first, error), (ended, last, other_error) = self._began, self._compare_clocks()
        drift = (last - first) / (ended - began)
        for times in self._times:
            _shift(times, lambda moment: moment + first + drift * (moment - began))
        mine = self._times, self._messages, self._ran, max(error, other_error)
        ranks: list[Any] = self._mesh.gather("the trace", mine)
        return Trace(
            [
                TracedWindow(epoch, samples, self._unpacked(n, batches, len(samples), ranks))
                for n, (epoch, batches, samples) in enumerate(self._windows)
            ],
            "where the run was stopped" if self._left else self._cut,
            max(error for *_, error in ranks),
        )

    def _take(self, epoch: int, batches: Sequence[Sequence[Tensor]], window: RankWindow) -> None:
        done = max(action.version for action, *_ in window.timed if action.op is Op.STEP)
        samples = [len(ids) for batch in batches[:done] for ids in batch]
        self._windows.append((epoch, len(batches), samples))
        self._times.append(_packed(window))
        self._messages.append(window.messages)
        if self._run.plan.policy:
            self._ran.append([action for action, *_ in window.timed])

    def _unpacked(
        self, number: int, batches: int, microbatches: int, ranks: Sequence[Any]
    ) -> list[RankWindow]:
        m = self._run.settings.microbatches
        program = [shortened(rank, microbatches // m, m) for rank in self._run.plan.windows[batches].program]
        if self._run.plan.policy:
            program = [ran[number] for *_, ran, _ in ranks]
        return [
            replace(_unpacked(times[number], actions), messages=messages[number])
            for (times, messages, *_), actions in zip(ranks, program, strict=True)
        ]

    def _compare_clocks(self) -> tuple[float, float, float]:
        """Return the present, the offset to rank 0's clock, and its error: seconds."""
        return perf_counter(), *self._mesh.clock_offset()


def about_trace(run: Run, trace: Trace, device: str) -> dict[str, Any]:
    """Say under what conditions a trace was made: what one must know to replay it."""
    settings, plan = run.settings, run.plan
    return {
        "model": settings.model,
        "parameters": sum(layer.params for layer in plan.layers),
        "data": run.data.name,
        "schedule": settings.schedule,
        "ranks": settings.ranks,
        "placement": plan.placement,
        "partition": plan.cuts,
        "batch_size": settings.batch_size,
        "microbatches": settings.microbatches,
        "window": settings.window,
        "epoch_batches": len(run.sampler.batch_sizes),
        "buffer_size": settings.buffer_size,
        "codec_forward": str(settings.codecs.forward),
        "codec_backward": str(settings.codecs.backward),
        "dtype": str(settings.dtype).removeprefix("torch."),
        "precision": settings.precision,
        "memory_format": plan.numerics.memory_format,
        "threads": torch.get_num_threads(),
        "device": device,
        "clock_error_us": round(1e6 * trace.clock_error_s, 1),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def _lengths(run: Run, position: Position) -> list[int]:
    """List the windows that a run still has: how many batches each has."""
    batches, window = len(run.sampler.batch_sizes), run.settings.window
    return [
        length
        for epoch in range(position.epoch, run.settings.epochs)
        for length in window_lengths(batches, window, position.batch if epoch == position.epoch else 0)
    ]


def _packed(window: RankWindow) -> array[float]:
    times = array("d", (window.began, *window.drain, window.ended))
    for _, start, end, blocked in window.timed:
        times.extend((start, end, blocked))
    return times


def _unpacked(times: array[float], actions: Sequence[Action]) -> RankWindow:
    began, drained, drain_end, ended = times[:4]
    timed = list(zip(actions, times[4::3], times[5::3], times[6::3], strict=True))
    return RankWindow(began, timed, (drained, drain_end), ended)


def _shift(times: array[float], shifted: Callable[[float], float]) -> None:
    """Put packed times on another clock; of each action the third number is no moment but a length."""
    for index, moment in enumerate(times):
        if index < 4 or (index - 4) % 3 != 2:
            times[index] = shifted(moment)
