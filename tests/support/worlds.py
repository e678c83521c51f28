"""Gloo worlds: real processes, a file for a rendezvous, a hard deadline, nothing left behind."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
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


def gather_objects(item: object) -> list[Any]:
    """Return each rank's item, of any type: these are processes of one program on one machine."""
    if not dist.is_initialized():
        return [item]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, item)
    return found
