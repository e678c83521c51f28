"""A disk that is full, for as long as a test wants."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_disk(pid: int = 0, room: int = 0) -> Iterator[None]:
    """Let a process (0: this one) write no file that is larger than `room` bytes.

    A write raises EFBIG, because Python ignores the signal; pipes take what they are given.
    """
    before = resource.prlimit(pid or os.getpid(), resource.RLIMIT_FSIZE)
    resource.prlimit(pid or os.getpid(), resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid or os.getpid(), resource.RLIMIT_FSIZE, before)
