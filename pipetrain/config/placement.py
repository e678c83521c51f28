"""The ranks of each stage, from stages=, replicas= and placement=, and the number of processes they need.

If a schedule gives each rank several stages, a place is what one of its ranks holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from pipetrain.errors import ConfigError
from pipetrain.rules import COUNT, Rule, index_of, kept
from pipetrain.schedule.actions import Placement
from pipetrain.schedule.text import counted


def _replicas(key: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [COUNT.convert(key, count) for count in kept(value, bool(value))]
    if value == "auto":
        return value
    return COUNT.convert(key, value)


def _placement(key: str, value: Any) -> Placement:
    """Return the ranks of each stage from `0-6.7`, or from lists of numbers."""
    if isinstance(value, list | tuple):
        places = [tuple(sorted({*map(index_of, ranks)})) for ranks in kept(value, bool(value))]
    else:
        ends = [[*map(int, ranks.split("-"))] for ranks in str(value).split(".")]
        places = [tuple(range(pair[0], pair[-1] + 1)) for pair in kept(ends, max(map(len, ends)) < 3)]
    ranks = {rank for place in places for rank in place}
    return kept(places, all(places) and ranks == set(range(len(ranks))))  # type: ignore[no-any-return]


REPLICAS = Rule(
    "the number of replicas of the pipeline, a list with one for each stage, such as [7,1], or auto",
    _replicas,
)
PLACEMENT = Rule(
    "the ranks of each stage, from 0 on and without a gap, such as 0-6.7 for stage 0 on ranks 0 to 6 and "
    "stage 1 on rank 7",
    _placement,
)

RULES = {"stages": COUNT, "replicas": REPLICAS, "placement": PLACEMENT}


def places_of(replicas: int | Sequence[int], ranks: int) -> Placement:
    """Return the ranks of each place, one place after the other."""
    counts = [replicas] * (ranks // replicas) if isinstance(replicas, int) else replicas
    return [tuple(range(first, end)) for first, end in pairwise([0, *accumulate(counts)])]


def processes(
    stages: int | None,
    replicas: int | str | list[int] | None,
    placement: Placement | None,
    started: int | None,
) -> int:
    """Return how many processes there are or, if none are `started`, must be started.

    Raises ConfigError if they do not match, or if the options contradict each other.
    """
    if replicas == "auto" and (stages or placement):
        other = "stages" if stages else "placement"
        raise ConfigError(f"replicas=auto chooses the stages and their ranks: leave {other} out")
    if placement is not None and replicas is not None:
        raise ConfigError("placement= says what replicas= does, and more: leave one of them out")
    if placement is not None:
        places, needed = len(placement), max(map(max, placement)) + 1
        said = f"placement={spans(placement)}"
    elif isinstance(replicas, list):
        places, needed = len(replicas), sum(replicas)
        said = f"replicas=[{','.join(map(str, replicas))}]"
    else:
        times = replicas if isinstance(replicas, int) else 1
        places = stages or max(1, (started or 2 * times) // times)
        needed = places * times
        said = " and ".join([f"stages={stages}"] * bool(stages) + [f"replicas={replicas}"] * bool(replicas))
    if stages not in (None, places):
        raise ConfigError(f"{said} has {counted(places, 'stage')}, and stages={stages}: leave stages out")
    if started not in (None, needed):
        raise ConfigError(
            f"{said} needs {needed} processes and there are {started}; start {needed}, by torchrun "
            f"--nproc_per_node={needed} or NPROC={needed} pipetrain, or leave {said.split('=')[0]} out"
        )
    return needed


def spans(placement: Placement) -> str:
    """Return a placement as text: 0-6.7."""
    return ".".join(map(span, placement))


def span(ranks: Sequence[int]) -> str:
    """Return the ranks of a stage, as 7, 0-6 or, with gaps, 0 2."""
    whole = len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1
    return f"{ranks[0]}-{ranks[-1]}" if whole else " ".join(map(str, ranks))
