"""The progress of a pass: a bar in a terminal or notebook, elsewhere an occasional line in the log."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

log = logging.getLogger("pipetrain")

NOTEBOOK = "ipykernel"  # a module of notebooks
SILENCE_S = 10.0  # seconds between two lines of progress, without a terminal


class Bar:
    """Counts the steps of one pass after another."""

    def __init__(self) -> None:
        self._done, self._what = 0, ""
        self._bar: Any = None
        self.spoke()

    def spoke(self) -> None:
        """Restart the time until the next line, as something else has been logged."""
        self._spoke = time.perf_counter()

    def tick(self, what: str, total: int) -> None:
        if what != self._what:  # the pass before had fewer steps than announced
            self.close()
        self._done, self._what = self._done + 1, what
        if log.level <= logging.INFO and (sys.stderr.isatty() or NOTEBOOK in sys.modules):
            if self._bar is None:
                from tqdm.auto import tqdm  # here, as the GPU check trains without it

                self._bar = tqdm(total=total, desc=what, leave=False)
            self._bar.update()
        elif time.perf_counter() - self._spoke > SILENCE_S:
            self.spoke()
            log.info("%s: %d of %d", what, self._done, total)
        if self._done == total:
            self.close()

    def close(self) -> None:
        """End the pass, finished or not."""
        self._done = 0
        if self._bar is not None:
            self._bar.close()
        self._bar = None
