"""Which device a rank has, how it allocates, and a mesh of one."""

from __future__ import annotations

import platform
import resource
from types import SimpleNamespace

import pytest
import torch

from pipetrain.errors import ConfigError
from pipetrain.runtime import mesh
from pipetrain.runtime.mesh import Mesh, choose_device, shares_gpu
from pipetrain.runtime.ranks import World

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def with_gpus(monkeypatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.delenv("NCCL_HOSTID", raising=False)


def test_auto_takes_a_gpu_where_there_is_one_and_one_that_is_not_there_is_refused(monkeypatch):
    with_gpus(monkeypatch, 2)
    assert [choose_device(World(), asked) for asked in ("auto", "cuda", "cpu")] == [GPU, GPU, CPU]
    with_gpus(monkeypatch, 0)
    assert [choose_device(World(), asked) for asked in ("auto", "cpu")] == [CPU, CPU]
    with pytest.raises(ConfigError, match=r"device=cuda needs a GPU that torch can use, .*; use device=auto"):
        choose_device(World(), "cuda")


def test_each_rank_has_a_gpu_of_its_machine_and_shares_where_it_must(monkeypatch):
    with_gpus(monkeypatch, 2)
    worlds = [World(rank=4 + local, size=8, local_rank=local, local_size=4) for local in range(4)]
    assert [choose_device(world, "auto").index for world in worlds] == [0, 1, 0, 1]
    assert all(shares_gpu(world, GPU) for world in worlds)
    assert not shares_gpu(World(1, 2, 1, 2), torch.device("cuda", 1))
    assert not any(shares_gpu(world, CPU) for world in worlds)
    monkeypatch.setenv("NCCL_HOSTID", "rank0")
    assert not any(shares_gpu(world, GPU) for world in worlds)


def test_each_mesh_has_keys_of_its_own(monkeypatch):
    """A stop that one training has decided is none of the next."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(mesh, "this_attempt", lambda world: SimpleNamespace(meet=lambda limit_s: store))
    first, second = (mesh._fresh_store(World(0, 2), 1.0) for _ in range(2))
    first.set("decided", "stop")
    assert (first.check(["decided"]), second.check(["decided"])) == (True, False)


@pytest.mark.parametrize(
    ("world", "device", "asked", "backend", "staged"),
    [
        (World(), CPU, None, "gloo", False),
        (World(), GPU, None, "nccl", False),
        (World(), GPU, True, "gloo", True),
        (World(0, 2, 0, 2), GPU, None, "gloo", True),  # two ranks share it
        (World(0, 2, 0, 2), GPU, False, "nccl", False),
    ],
)
def test_the_backend_follows_the_device(monkeypatch, world, device, asked, backend, staged):
    monkeypatch.setattr(mesh, "choose_interface", lambda world: None)
    monkeypatch.setattr(Mesh, "_connect", lambda self, store: None)
    with_gpus(monkeypatch, 1)
    made = Mesh(world, [0] * world.size, [], device, None, 30, staged=asked)
    assert (made.backend, made.staged) == (backend, staged)


def faults() -> tuple[str, int]:
    """What is said, and the pages of the last of many blocks of 16 MiB that were faulted in."""
    said, seen = mesh.keep_freed_memory(), 0
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
    assert mesh.keep_freed_memory() == "allocator as MALLOC_TRIM_THRESHOLD_ says"
