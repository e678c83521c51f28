"""Gloo worlds: real processes, a file for a rendezvous, a hard deadline, nothing left behind."""

from __future__ import annotations

from typing import Any

from torch.distributed.distributed_c10d import Store

from benchmark.worlds import Say, Work, meeting, run_ranks
from pipetrain.runtime.ranks import World
from tests.support.deadlines import DEADLINE_S
from tests.support.processes import context


def run_world(work: Work, size: int, *arguments: Any) -> list[Any]:
    """Run `work`(world, store, *arguments) in `size` processes and return what each returned, by rank."""
    context()
    return run_ranks(_meet, _quietly, size, print, (work, *arguments), DEADLINE_S)


def _meet(world: World, path: str) -> tuple[World, Store]:
    return world, meeting(world, path)


def _quietly(met: tuple[World, Store], say: Say, work: Work, *arguments: Any) -> Any:
    return work(*met, *arguments)
