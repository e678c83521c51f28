"""What the ranks of a Pipeline do together, and how an error of one of them becomes that of all."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from pipetrain.errors import ConfigError, TrainingStopped, one_line
from pipetrain.runtime.mesh import Mesh


class Together:
    """The ranks of a mesh, until an error of what they do together. `ended`: called after that."""

    def __init__(self, mesh: Mesh, ended: Callable[[], None]) -> None:
        self.mesh = mesh
        self._ended = ended
        self.stopped = ""
        """The error that ended it."""

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Run a part of what all ranks do together: after an error this rank leaves them for good."""
        try:
            yield
        except Exception as error:
            self.stopped = one_line(error) or type(error).__name__
            self._ended()
            for cause in (error, error.__cause__):  # frames refer to messages under way
                traceback.clear_frames(cause.__traceback__ if cause else None)
            self.mesh.abandon()
            raise

    def on_first(self, what: str, reader: Any, read: Callable[[Any], Any]) -> Any:
        """Return on every rank what `read` returns of the `reader` that rank 0 has; see `on_one`."""
        return self.on_one(0, what, None if reader is None else partial(read, reader))

    def on_one(self, rank: int, what: str, read: Callable[[], Any] | None) -> Any:
        """Return on every rank what `read` returns on a `rank`, or raise its error on all."""
        found, error = None, None
        try:
            found = None if read is None else read()
        except Exception as caught:  # a loader may raise anything
            error = caught
        text = None if error is None else one_line(error) or type(error).__name__
        with self():
            told = [found, text, isinstance(error, ConfigError)]
            found, text, refused = self.mesh.tell(what, told, rank)
        if error is not None:
            raise error
        if text is not None:
            raise (ConfigError if refused else TrainingStopped)(f"rank {rank} stopped: {text}")
        return found

    def abandon(self, error: BaseException | None) -> None:
        """Leave the other ranks, which may not come to close it together, after an error of the program."""
        if self.mesh.world.size > 1 and not self.stopped:
            self.stopped = one_line(error) if isinstance(error, Exception) else "interrupted"
            self.mesh.abandon()

    def prove(self) -> None:
        """Refuse to go on after an error. Raises TrainingStopped."""
        if self.stopped:
            raise TrainingStopped(
                f"this Pipeline has ended with an error: {self.stopped}; start the program again, from a "
                f"checkpoint if there is one"
            )
