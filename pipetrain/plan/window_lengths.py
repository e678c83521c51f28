"""How many batches each window of a training has: for the loop that runs them and for their proof."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipetrain.correction import Correction

NONE = Correction()


@dataclass(frozen=True, slots=True)
class WindowLengths:
    """The lengths of windows, as a function of how many updates have been made.

    `window`: the batches of a window; None: all that are left. `correction`: it may let the pipeline drain
    earlier. `updates`: of the whole training, if that is known.
    """

    window: int | None
    correction: Correction = NONE
    updates: int | None = None

    def next(self, update: int, place: int | None = None, left: int | None = None) -> int | None:
        """Return the batches of the window that begins before an update; None for all that are left.

        `place`: of its first batch in the epoch, where windows begin at multiples of their length; None: it
        is as long as it may be. `left`: the batches of the pass from there, if that is known.
        """
        window = self.window
        if window is not None and place is not None:
            window -= place % window
        lengths = window, left, self.correction.window(update, self.updates)
        return min((length for length in lengths if length is not None), default=None)

    def lengths(self, batches: int, done: int = 0, update: int = 0) -> Iterator[int]:
        """Yield the lengths of an epoch's windows after `done` batches and an `update`."""
        while done < batches:
            length = self.next(update, done, batches - done)
            assert length is not None
            yield length
            done, update = done + length, update + length
