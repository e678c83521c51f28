"""A pass over batches as plain data, and what came of its windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipetrain.model.specs import Size
from pipetrain.runtime.microbatch_feed import Batches
from pipetrain.runtime.window_run import UNWATCHED, WindowRun, WindowWatch
from pipetrain.signals import StopRequest

Kind = Literal["training", "evaluation", "prediction"]


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass over batches, in windows of `window` batches; None: of all that are left.

    `what`: its name in messages; `title`: in the progress, of `shown` steps, or else of a window's. `begun`:
    the batches of its epoch before it, from whose first one windows are counted, each having its place; None:
    each is as long as it may be. `most`: its batches, where its loader goes on. `updates`: of all passes, if
    that is known. `reads_ahead`: whether a window is read before somebody has seen the losses of the one
    before; then somebody looks every `look_every` updates, or at its end alone. `epoch`: from 0. `sample_s`:
    the seconds that a sample took in the last epoch, if known.
    """

    kind: Kind
    what: str
    batches: Batches
    window: int | None
    begun: int | None = None
    most: int | None = None
    shown: int | None = None
    updates: int | None = None
    reads_ahead: bool = False
    look_every: int | None = None
    title: str = ""
    epoch: int = 0
    sample_s: float | None = None

    @property
    def trains(self) -> bool:
        return self.kind == "training"


@dataclass(frozen=True, slots=True)
class WindowResult:
    """What ran of a pass between two exchanges of the ranks, on every rank alike but for what was measured.

    `losses`, `rates`: of each update. `request`: what signals asked for. `over`: whether nothing is left of
    the pass, if that is known.
    """

    of: Pass
    windows: Sequence[WindowRun]
    losses: list[float]
    rates: list[float]
    request: StopRequest
    over: bool

    @property
    def sizes(self) -> list[Size]:
        """The size of each batch that ran."""
        return [size for window in self.windows for size in window.sizes]

    @property
    def early(self) -> bool:
        """Whether the last window ended early."""
        return self.windows[-1].early


class WindowListener:
    """What is called before each window."""

    def before_window(self, of: Pass, sizes: Sequence[Size]) -> WindowWatch:
        """Return what is to be looked at in a window of batches of these sizes."""
        return UNWATCHED
