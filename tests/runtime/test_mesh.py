"""Which device a rank has, and a mesh of one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pipetrain.errors import ConfigError
from pipetrain.runtime import mesh
from pipetrain.runtime.channel import Channel
from pipetrain.runtime.mesh import Mesh, choose_device, shares_gpu
from pipetrain.runtime.ranks import World

CPU = torch.device("cpu")


def with_gpus(monkeypatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


# Devices


def test_auto_takes_a_gpu_where_there_is_one(monkeypatch):
    with_gpus(monkeypatch, 2)
    assert choose_device(World(), "auto") == torch.device("cuda", 0)
    assert choose_device(World(), "cuda") == torch.device("cuda", 0)
    assert choose_device(World(), "cpu") == CPU


def test_auto_takes_the_cpu_where_there_is_none(monkeypatch):
    with_gpus(monkeypatch, 0)
    assert choose_device(World(), "auto") == CPU
    assert choose_device(World(), "cpu") == CPU


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    with_gpus(monkeypatch, 0)
    with pytest.raises(ConfigError) as refusal:
        choose_device(World(), "cuda")
    assert str(refusal.value) == (
        "device=cuda needs a GPU that torch can use, and there is none; use device=auto"
    )


def test_each_rank_has_a_gpu_of_its_machine_and_shares_where_it_must(monkeypatch):
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    with_gpus(monkeypatch, 2)
    worlds = [World(rank=4 + local, size=8, local_rank=local, local_size=4) for local in range(4)]
    assert [choose_device(world, "auto").index for world in worlds] == [0, 1, 0, 1]
    assert all(shares_gpu(world, torch.device("cuda", 0)) for world in worlds)
    assert not shares_gpu(World(1, 2, 1, 2), torch.device("cuda", 1))
    assert not any(shares_gpu(world, CPU) for world in worlds)
    monkeypatch.setenv("NCCL_HOSTID", "rank0")
    assert not any(shares_gpu(world, torch.device("cuda", 0)) for world in worlds)


# Alone


def test_a_world_of_one_needs_no_process_group():
    alone = Mesh(World(), [0, 0], [], CPU, None, 30)
    assert not torch.distributed.is_initialized()
    assert alone.gather("anything", {"a": 1}) == [{"a": 1}]
    assert alone.clock_offset() == (0.0, 0.0)
    channel = alone.channel(2)
    assert isinstance(channel, Channel)
    channel.expect([])
    channel.drain()
    alone.close()


def test_each_mesh_has_keys_of_its_own(monkeypatch):
    """A stop that one training has decided is none of the next."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(mesh, "this_attempt", lambda world: SimpleNamespace(meet=lambda limit_s: store))
    first, second = (mesh._fresh_store(World(0, 2), 1.0) for _ in range(2))
    first.set("decided", "stop")
    assert (first.check(["decided"]), second.check(["decided"])) == (True, False)


def test_the_backend_follows_the_device(monkeypatch):
    monkeypatch.setattr(mesh, "choose_interface", lambda world: None)
    with_gpus(monkeypatch, 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    gpu = torch.device("cuda", 0)
    assert (Mesh(World(), [0], [], CPU, None, 30).backend) == "gloo"
    own = Mesh(World(), [0], [], gpu, None, 30)
    assert (own.backend, own.staged) == ("nccl", False)
    monkeypatch.setattr(Mesh, "_connect", lambda self, store: None)
    shared = Mesh(World(0, 2, 0, 2), [0, 1], [], gpu, None, 30)
    assert (shared.backend, shared.staged) == ("gloo", True)
    over_nccl = Mesh(World(0, 2, 0, 2), [0, 1], [], gpu, None, 30, staged=False)
    assert (over_nccl.backend, over_nccl.staged) == ("nccl", False)
    over_gloo = Mesh(World(), [0], [], gpu, None, 30, staged=True)
    assert (over_gloo.backend, over_gloo.staged) == ("gloo", True)
