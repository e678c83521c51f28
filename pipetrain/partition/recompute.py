"""Which stages recompute their forwards, and what they keep meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum

RECOMPUTE = ("never", "except_last", "always", "selective")
"""The values of recompute=."""


class Mode(StrEnum):
    """What a stage holds of a microbatch between its forward and its backward.

    NEVER: all that the backward needs. SELECTIVE: its inputs, and what is dear to make again. ALWAYS: its
    inputs alone.
    """

    NEVER = "never"
    SELECTIVE = "selective"
    ALWAYS = "always"


def modes_of(recompute: str, stages: int) -> list[Mode]:
    """Return the mode of each stage for a value of recompute=."""
    if recompute == "except_last":
        return [Mode.ALWAYS] * (stages - 1) + [Mode.NEVER]
    return [Mode(recompute)] * stages


def stages_by(modes_of: Callable[[int], Sequence[Mode]]) -> Callable[[int], list[int]]:
    """Return number of stages -> those that recompute."""
    return lambda stages: [stage for stage, mode in enumerate(modes_of(stages)) if mode is not Mode.NEVER]
