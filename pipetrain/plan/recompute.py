"""Which stages recompute their forwards, and what they keep meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from pipetrain.errors import ConfigError
from pipetrain.settings import RECOMPUTE


class Mode(StrEnum):
    """What a stage holds of a microbatch between its forward and its backward.

    NEVER: all that the backward needs. SELECTIVE: its inputs, and what is dear to make again. ALWAYS: its
    inputs alone.
    """

    NEVER = "never"
    SELECTIVE = "selective"
    ALWAYS = "always"


AUTO = "auto"


def modes_of(recompute: str | Sequence[str], stages: int) -> list[Mode]:
    """Return the mode of each stage for a value of recompute=; auto is never. Raises ConfigError."""
    if not isinstance(recompute, str):
        if len(recompute) != stages:
            raise ConfigError(
                f"recompute=[{','.join(recompute)}] has modes of {len(recompute)} stages, and there are "
                f"{stages}: give one for each, or one of {', '.join(RECOMPUTE)}"
            )
        return [Mode(mode) for mode in recompute]
    if recompute == AUTO:
        return [Mode.NEVER] * stages
    if recompute == "except_last":
        return [Mode.ALWAYS] * (stages - 1) + [Mode.NEVER]
    return [Mode(recompute)] * stages


def recomputing(modes: Sequence[Mode]) -> list[int]:
    """Return the stages that recompute their forwards."""
    return [stage for stage, mode in enumerate(modes) if mode is not Mode.NEVER]
