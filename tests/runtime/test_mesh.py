"""Who is where: what torchrun's variables mean, which device, which interface."""

from __future__ import annotations

import os

import pytest
import torch

from pipetrain.errors import ConfigError
from pipetrain.runtime.channel import DistChannel
from pipetrain.runtime.mesh import Mesh, World, choose_device, prefer_loopback, shares_gpu

CPU = torch.device("cpu")
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def with_gpus(monkeypatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_a_process_without_torchrun_is_alone(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert World.from_environment() == World(rank=0, size=1, local_rank=0, local_size=1)


def test_torchrun_s_numbers_are_read(monkeypatch):
    for name, value in zip(VARIABLES, (5, 8, 1, 4), strict=True):
        monkeypatch.setenv(name, str(value))
    assert World.from_environment() == World(rank=5, size=8, local_rank=1, local_size=4)


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
    with_gpus(monkeypatch, 2)
    worlds = [World(rank=4 + local, size=8, local_rank=local, local_size=4) for local in range(4)]
    assert [choose_device(world, "auto").index for world in worlds] == [0, 1, 0, 1]
    assert all(shares_gpu(world, torch.device("cuda", 0)) for world in worlds)
    assert not shares_gpu(World(1, 2, 1, 2), torch.device("cuda", 1))
    assert not any(shares_gpu(world, CPU) for world in worlds)


# The interface


@pytest.fixture
def interface(monkeypatch):
    """Gloo's variable: unset, and put back after the test."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    return lambda: os.environ.get("GLOO_SOCKET_IFNAME")


def test_ranks_of_one_machine_stay_off_the_network(interface):
    prefer_loopback(World(0, 2, 0, 2))
    assert interface() == "lo"


def test_ranks_of_several_machines_do_not(interface):
    prefer_loopback(World(0, 4, 0, 2))
    assert interface() is None


def test_a_chosen_interface_is_respected(interface, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    prefer_loopback(World(0, 2, 0, 2))
    assert interface() == "eth7"


def test_a_machine_without_a_loopback_is_left_to_gloo(interface, monkeypatch):
    monkeypatch.setattr("socket.if_nameindex", lambda: [(2, "eth0")])
    prefer_loopback(World(0, 2, 0, 2))
    assert interface() is None


# Alone


def test_a_world_of_one_needs_no_process_group():
    mesh = Mesh(World(), [0, 0], [], CPU, None, 30)
    assert not torch.distributed.is_initialized()
    assert mesh.gather("anything", {"a": 1}) == [{"a": 1}]
    assert mesh.clock_offset() == (0.0, 0.0)
    channel = mesh.channel(2)
    assert isinstance(channel, DistChannel)
    channel.expect([])
    channel.drain()
    mesh.close()


def test_the_backend_follows_the_device(monkeypatch, interface):
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
