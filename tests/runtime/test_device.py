"""Which device a rank has, and how its process allocates."""

from __future__ import annotations

import platform
import resource

import pytest
import torch

from pipetrain.errors import ConfigError
from pipetrain.runtime.comm.collectives import World
from pipetrain.runtime.device import choose_device, keep_freed_memory

ALONE = World()


def test_each_rank_has_a_gpu_of_its_machine_and_one_that_is_not_there_is_refused(with_gpus, monkeypatch):
    with_gpus(2)
    worlds = [World(rank=4 + local, size=8, local_rank=local, local_size=4) for local in range(4)]
    assert [choose_device(world.local_rank, "auto").index for world in worlds] == [0, 1, 0, 1]
    assert [choose_device(0, asked).type for asked in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for rank in range(2):  # as mpirun's, whose wrapper sets these alone
        monkeypatch.setenv("RANK", str(6 + rank))
        monkeypatch.setenv("WORLD_SIZE", "8")
        assert World.current() == World(6 + rank, 8, local_rank=6 + rank, local_size=0)
        assert choose_device(World.current().local_rank, "auto").index == rank
    with_gpus(0)
    assert [choose_device(0, asked).type for asked in ("auto", "cpu")] == ["cpu", "cpu"]
    with pytest.raises(ConfigError, match=r"device=cuda needs a GPU that torch can use, .*; use device=auto"):
        choose_device(0, "cuda")


def faults() -> tuple[str, int]:
    """What is said, and the pages of the last of many blocks of 16 MiB that were faulted in."""
    said, seen = keep_freed_memory(), 0
    for _ in range(20):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(4 * 2**20)
        seen = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return said, seen


@pytest.mark.processes
def test_a_block_that_comes_again_is_not_faulted_in_again_unless_the_environment_says_otherwise(
    ranks, monkeypatch
):
    for said, seen in ranks(faults):
        if platform.libc_ver()[0] == "glibc":
            assert said == "glibc's allocator keeps freed blocks of up to 32 MiB"
            assert seen < 16 * 2**20 / 4096 / 10
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    assert keep_freed_memory() == "allocator as MALLOC_TRIM_THRESHOLD_ says"
