"""Who is where: what torchrun's variables mean, which device, which interface."""

from __future__ import annotations

import os
import socket
import sys

import pytest
import torch

from pipetrain.errors import ConfigError
from pipetrain.runtime import mesh
from pipetrain.runtime.channel import DistChannel
from pipetrain.runtime.mesh import (
    Mesh,
    World,
    _interface_towards,
    choose_device,
    choose_interface,
    shares_gpu,
)

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
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    with_gpus(monkeypatch, 2)
    worlds = [World(rank=4 + local, size=8, local_rank=local, local_size=4) for local in range(4)]
    assert [choose_device(world, "auto").index for world in worlds] == [0, 1, 0, 1]
    assert all(shares_gpu(world, torch.device("cuda", 0)) for world in worlds)
    assert not shares_gpu(World(1, 2, 1, 2), torch.device("cuda", 1))
    assert not any(shares_gpu(world, CPU) for world in worlds)
    monkeypatch.setenv("NCCL_HOSTID", "rank0")
    assert not any(shares_gpu(world, torch.device("cuda", 0)) for world in worlds)


# The interface


BOTH = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture
def interface(monkeypatch):
    """Gloo's and NCCL's variables: unset, and put back after the test."""
    for name in BOTH:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    return lambda: tuple(os.environ.get(name) for name in BOTH)


def test_ranks_of_one_machine_stay_off_the_network(interface):
    choose_interface(World(0, 2, 0, 2))
    assert interface() == ("lo", "=lo")


@pytest.mark.parametrize("master", ["localhost", "127.0.0.1"])
def test_so_do_those_that_meet_on_the_loopback(interface, monkeypatch, master):
    monkeypatch.setenv("MASTER_ADDR", master)
    choose_interface(World(0, 4, 0, 2))
    assert interface() == ("lo", "=lo")


def test_ranks_of_several_machines_listen_where_torchrun_s_address_is_reached(interface, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.7")
    monkeypatch.setattr(mesh, "_interface_towards", {"10.0.0.7": "eth0"}.get)
    choose_interface(World(0, 4, 0, 2))
    assert interface() == ("eth0", "=eth0")


@pytest.mark.parametrize("master", ["", "no-such-host.invalid"])
def test_where_that_is_not_known_the_choice_is_left_to_the_backends(interface, monkeypatch, master):
    monkeypatch.setenv("MASTER_ADDR", master)
    choose_interface(World(0, 4, 0, 2))
    assert interface() == (None, None)


@pytest.mark.skipif(sys.platform != "linux", reason="looks interfaces up as Linux does")
def test_a_machine_s_own_name_says_nothing_of_the_way_to_it():
    """It stands for the loopback there: what counts is the way to everybody else."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((mesh.ELSEWHERE, 9))
        except OSError:
            pytest.skip("there is no network")
        mine = probe.getsockname()[0]
    found = _interface_towards(mine)
    assert found in {name for _, name in socket.if_nameindex()} - {"lo"}
    assert _interface_towards("127.0.1.1") == found


def test_a_chosen_interface_is_respected(interface, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    choose_interface(World(0, 2, 0, 2))
    assert interface() == ("eth7", "=lo")


def test_a_machine_without_a_loopback_is_left_to_the_backends(interface, monkeypatch):
    monkeypatch.setattr("socket.if_nameindex", lambda: [(2, "eth0")])
    choose_interface(World(0, 2, 0, 2))
    assert interface() == (None, None)


# Alone


def test_a_world_of_one_needs_no_process_group():
    alone = Mesh(World(), [0, 0], [], CPU, None, 30)
    assert not torch.distributed.is_initialized()
    assert alone.gather("anything", {"a": 1}) == [{"a": 1}]
    assert alone.clock_offset() == (0.0, 0.0)
    channel = alone.channel(2)
    assert isinstance(channel, DistChannel)
    channel.expect([])
    channel.drain()
    alone.close()


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
