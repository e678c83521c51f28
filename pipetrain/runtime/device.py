"""The device of a rank, and the memory of its process."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from contextlib import suppress

import torch

from pipetrain.errors import ConfigError

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
_ALLOCATOR = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def choose_device(local_rank: int, device: str) -> torch.device:
    """Return the device for `device` = auto, cpu or cuda. Raises ConfigError if there is no GPU."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device=cuda needs a GPU that torch can use, and there is none; use device=auto")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def gpu_of(device: torch.device) -> list[str]:
    """Return the UUID of a GPU and this rank's NCCL_HOSTID, "" if there is none; an empty list of a CPU."""
    if device.type == "cpu":
        return []
    return [str(torch.cuda.get_device_properties(device).uuid), os.environ.get("NCCL_HOSTID", "")]


def nccl_obstacle(gpus: Sequence[Sequence[str]]) -> str:
    """Return why ranks with GPUs cannot talk over NCCL, "" if they can, from the `gpu_of` of each.

    NCCL refuses two ranks on one GPU, but where each has an NCCL_HOSTID of its own.
    """
    for rank, gpu in enumerate(gpus):
        if gpu and gpu in gpus[:rank]:
            return f"ranks {gpus.index(gpu)} and {rank} share a GPU"
    return ""


def keep_freed_memory() -> str:
    """Let glibc keep freed blocks of up to 32 MiB in this process; return a phrase that says what was done.

    It returns them to the system otherwise, and the next one of the same size is page-faulted in again. Each
    step frees and allocates the same blocks: VGG16 with a batch of 64 has 35,000 to 50,000 page faults a
    step, a tenth of its time. The peak stays as it is. Nothing is done with another C library, or where the
    environment has settings of its own. Call it early.
    """
    if chosen := [name for name in _ALLOCATOR if os.environ.get(name)]:
        return f"allocator as {', '.join(chosen)} says"
    with suppress(OSError, TypeError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        if mallopt(_M_TRIM_THRESHOLD, 2**31 - 1) and mallopt(_M_MMAP_THRESHOLD, 32 * 2**20):
            return "glibc's allocator keeps freed blocks of up to 32 MiB"
    return "the system's allocator"
