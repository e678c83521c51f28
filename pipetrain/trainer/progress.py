"""Shows how far a pass has come; a Pipeline that is no run of `fit` needs no more of the listeners."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from pipetrain.model.specs import Size
from pipetrain.records.progress_bar import Bar
from pipetrain.runtime.session import Session
from pipetrain.runtime.window_record import NO_HOOKS, WindowHooks
from pipetrain.trainer.window_loop import Listener, Pass

if TYPE_CHECKING:
    from pipetrain.records.recorder import Recorder


class ShowsProgress(Listener):
    """Shows the steps of each pass, but for windows of less than `least` batches."""

    def __init__(self, shown_by: Bar | Recorder, session: Session, least: int = 1) -> None:
        self._shown_by, self._least = shown_by, least
        self._replicas = len(session.plan.placement[min(session.stages)])

    def before_window(self, of: Pass, sizes: Sequence[Size]) -> WindowHooks:
        if len(sizes) < self._least:
            return NO_HOOKS
        total = len(sizes) if of.trains else -(-len(sizes) // self._replicas)  # the first has the most
        return WindowHooks(progress=(partial(self._shown_by.tick, of.title or of.kind, of.shown or total),))
