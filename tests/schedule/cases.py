"""Every schedule that conf/schedule/ names, and how to make its programs: a new YAML file is a new case."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, pairwise
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from pipetrain.schedule.actions import Placement, Program, Schedule, ScheduleError, ranks_of
from pipetrain.schedule.check import check
from pipetrain.schedule.lower import lower
from pipetrain.schedule.replicas import spread
from tests.schedule.theory import Theory, theory

CONF = Path(__file__).parents[2] / "conf" / "schedule"


@dataclass(frozen=True)
class Case:
    name: str
    config: DictConfig

    @property
    def schedule(self) -> Schedule:
        made: Schedule = instantiate(self.config.schedule)
        return made

    @cached_property
    def virtual(self) -> int:
        """The stages of each rank."""
        return len(ranks_of(self.schedule(2, 1, 2))) // 2

    def __str__(self) -> str:
        return self.name

    def theory(self, ranks: int, batches: int, microbatches: int) -> Theory | None:
        return theory(self.name, ranks, batches, microbatches, self.virtual)


CASES = [Case(path.stem, OmegaConf.load(path)) for path in sorted(CONF.glob("*.yaml"))]  # type: ignore[arg-type]
NAMES = [case.name for case in CASES]


def accepted(
    case: Case, sizes: Iterable[tuple[int, int, int]]
) -> Iterator[tuple[tuple[int, int, int], Program]]:
    """Yield each (ranks, batches, microbatches) that the schedule accepts, and its lowered program."""
    for size in sizes:
        if program := _lowered(case, size):
            yield size, program


@cache
def _lowered(case: Case, size: tuple[int, int, int]) -> Program | None:
    """Return None where the schedule refuses that size."""
    try:
        program = lower(case.schedule(*size))
    except ScheduleError:
        return None
    check(program, *size[1:])
    return program


def places_of(replicas: Sequence[int]) -> Placement:
    """Return places of so many ranks each, one after the other."""
    firsts = [0, *accumulate(replicas)]
    return [tuple(range(first, last)) for first, last in pairwise(firsts)]


def replicated(program: Program, replicas: Sequence[int], batches: int, microbatches: int) -> Program:
    """Spread a compute-only program over so many replicas of each rank."""
    return spread(program, places_of(replicas), batches, microbatches)
