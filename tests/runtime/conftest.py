"""What several tests of the runtime use."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def with_gpus(monkeypatch):
    def have(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.delenv("NCCL_HOSTID", raising=False)

    return have
