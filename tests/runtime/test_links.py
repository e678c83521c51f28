"""How messages travel between ranks, and which keys of the store are whose."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pipetrain.runtime import links
from pipetrain.runtime.links import Links
from pipetrain.runtime.ranks import World

ALONE, TWO = World(), World(0, 2, 0, 2)


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
    monkeypatch.setattr(links, "choose_interface", lambda world: None)
    monkeypatch.setattr(Links, "_connect", lambda self, store: None)
    with_gpus(gpus)
    device, *variables = device.split(" with ")
    for name in variables:
        monkeypatch.setenv(name, "rank0")
    made = Links(world, [(0,)] * world.size, [], torch.device(device, 0), None, 30, staged=asked)
    assert (made.backend, made.staged) == (backend, staged)


def test_links_have_keys_of_their_own(monkeypatch):
    """A stop that one training has decided is none of the next."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(links, "this_attempt", lambda world: SimpleNamespace(meet=lambda limit_s: store))
    first, second = (links._fresh_store(TWO, 1.0) for _ in range(2))
    first.set("decided", "stop")
    assert (first.check(["decided"]), second.check(["decided"])) == (True, False)
