"""Which device a rank has, how messages travel between such, and how it allocates."""

from __future__ import annotations

import platform
import resource
from types import SimpleNamespace

import pytest
import torch

from pipetrain.errors import ConfigError
from pipetrain.runtime import mesh
from pipetrain.runtime.mesh import Mesh, choose_device
from pipetrain.runtime.ranks import World

ALONE, TWO = World(), World(0, 2, 0, 2)


@pytest.fixture
def with_gpus(monkeypatch):
    def have(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.delenv("NCCL_HOSTID", raising=False)

    return have


def test_each_rank_has_a_gpu_of_its_machine_and_one_that_is_not_there_is_refused(with_gpus):
    with_gpus(2)
    worlds = [World(rank=4 + local, size=8, local_rank=local, local_size=4) for local in range(4)]
    assert [choose_device(world, "auto").index for world in worlds] == [0, 1, 0, 1]
    assert [choose_device(ALONE, asked).type for asked in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]
    with_gpus(0)
    assert [choose_device(ALONE, asked).type for asked in ("auto", "cpu")] == ["cpu", "cpu"]
    with pytest.raises(ConfigError, match=r"device=cuda needs a GPU that torch can use, .*; use device=auto"):
        choose_device(ALONE, "cuda")


@pytest.mark.parametrize(
    ("gpus", "world", "device", "asked", "backend", "staged"),
    [
        (1, ALONE, "cpu", None, "gloo", False),
        (1, TWO, "cpu", None, "gloo", False),
        (1, ALONE, "cuda", None, "nccl", False),
        (1, ALONE, "cuda", True, "gloo", True),
        (2, TWO, "cuda", True, "gloo", True),  # a policy's
        (1, TWO, "cpu", True, "gloo", False),
        (1, TWO, "cuda", None, "gloo", True),  # they share it, which NCCL refuses
        (1, TWO, "cuda", False, "nccl", False),
        (2, TWO, "cuda", None, "nccl", False),
        (1, TWO, "cuda with NCCL_HOSTID", None, "nccl", False),
    ],
)
def test_the_backend_follows_the_device(monkeypatch, with_gpus, gpus, world, device, asked, backend, staged):
    monkeypatch.setattr(mesh, "choose_interface", lambda world: None)
    monkeypatch.setattr(Mesh, "_connect", lambda self, store: None)
    with_gpus(gpus)
    device, *variables = device.split(" with ")
    for name in variables:
        monkeypatch.setenv(name, "rank0")
    made = Mesh(world, [0] * world.size, [], torch.device(device, 0), None, 30, staged=asked)
    assert (made.backend, made.staged) == (backend, staged)


def test_each_mesh_has_keys_of_its_own(monkeypatch):
    """A stop that one training has decided is none of the next."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(mesh, "this_attempt", lambda world: SimpleNamespace(meet=lambda limit_s: store))
    first, second = (mesh._fresh_store(TWO, 1.0) for _ in range(2))
    first.set("decided", "stop")
    assert (first.check(["decided"]), second.check(["decided"])) == (True, False)


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
