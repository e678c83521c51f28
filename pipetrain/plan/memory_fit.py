"""What the ranks of a plan hold, and whether it fits: within memory_limit=, or in the memory of their GPUs.

It follows from the order of the actions, and from what the estimated layers save. It leaves out what an
action needs only while it runs, so a GPU that may be too small only gets a warning; only what exceeds a given
limit is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from pipetrain.config.settings import PROFILE
from pipetrain.errors import ActionFailed, ConfigError
from pipetrain.model.specs import TensorSpec
from pipetrain.schedule.memory import GIB, Memory, totals

WAYS = "choose more stages, more microbatches, recompute=selective or always, or precision=bf16"


def refuse_above(limit: float, stage_bytes: Memory) -> None:
    """Refuse a rank that exceeds memory_limit=, in GiB. Raises ConfigError."""
    rank, peak = _fullest(stage_bytes)
    if peak > limit * GIB:
        raise ConfigError(
            f"memory_limit={limit:g} is too small: rank {rank} is predicted to hold {_gib(peak)} GiB; to "
            f"hold less, {WAYS}; or choose partition={PROFILE}, which keeps to it where it can"
        )


def gpu_bytes(device: str, processes: int = 1) -> int | None:
    """Return a process's share of the smallest GPU, if `device` is a GPU; `processes`: that share it."""
    if device == "cpu" or not torch.cuda.is_available():
        return None
    count = torch.cuda.device_count()
    smallest = min(torch.cuda.get_device_properties(n).total_memory for n in range(count))
    return int(smallest) // processes


def peaks_by_rank(stage_bytes: Memory) -> list[int]:
    """Return the most bytes that the stages of each rank hold in sum."""
    return [max(totals(of_rank), default=0) for of_rank in stage_bytes]


def fit_sentence(stage_bytes: Memory, room: int) -> str:
    """Return a sentence that compares the fullest rank with the `room` bytes of each rank's GPU."""
    rank, peak = _fullest(stage_bytes)
    compared = (
        f"rank {rank}, the fullest, is predicted to hold {_gib(peak)} of the {_gib(room)} GiB of its GPU"
    )
    return compared if peak <= room else f"{compared} and is likely to run out: to hold less, {WAYS}"


def no_room_sentence(graphs: int, held: int, room: int) -> str:
    """Return why CUDA graphs of so many bytes do not fit next to what a rank holds, or nothing."""
    needed = f"they would take {_gib(graphs)} GiB beside {_gib(held)}, and there are {_gib(room)} GiB"
    return f"{needed}: choose more stages, or fewer microbatches in flight" if graphs + held > room else ""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an allocator raised this error; a CPU's raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def explained(error: ActionFailed, stage_bytes: Memory, rank: int, device: torch.device) -> ActionFailed:
    """Return the error of an action that ran out of memory, with the plan's prediction and advice."""
    room = gpu_bytes(device.type) or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    peak = peaks_by_rank(stage_bytes)[rank]
    return ActionFailed(
        f"{error}; there are {_gib(room)} GiB, and rank {rank} was predicted to hold {_gib(peak)}: to hold "
        f"less, {WAYS}",
        error.stage,
    )


def _fullest(stage_bytes: Memory) -> tuple[int, int]:
    """Return the rank that holds most, and its bytes."""
    peaks = peaks_by_rank(stage_bytes)
    return peaks.index(max(peaks)), max(peaks)


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.4g}"


def known_state(target: str, options: Mapping[str, Any]) -> int | None:
    """Return how many tensors of a parameter's size an optimizer of torch holds; None for other optimizers.

    Building the optimizer instead would load torch's compiler, which takes a second.
    """
    if target == "torch.optim.SGD":
        return int(bool(options.get("momentum")))
    if target in ("torch.optim.Adam", "torch.optim.AdamW"):
        return 2 + bool(options.get("amsgrad"))
    return None


def optimizer_state(make: Callable[[Any], Optimizer]) -> Callable[[str, TensorSpec], int]:
    """Return a function that returns the bytes of an optimizer's state for a parameter.

    It steps a small parameter with the same name and number of dimensions; if that fails, one that has the
    true shape when the optimizer is made. State without dimensions does not count.
    """

    @cache
    def ratio(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> float:
        small = torch.ones((2,) * len(shape), dtype=dtype)
        for parameter in (nn.Parameter(small), nn.Parameter(torch.ones((), dtype=dtype).expand(shape))):
            with suppress(Exception):  # as an optimizer of matrices for a vector, refused elsewhere
                optimizer = make([(name, parameter)])
                parameter.data, parameter.grad = small, torch.ones_like(small)
                optimizer.step()
                leaves = tree_leaves(list(optimizer.state.values()))
                return sum(t.nbytes for t in leaves if isinstance(t, Tensor) and t.dim()) / small.nbytes
        return 0.0

    return lambda name, spec: round(ratio(name, spec.shape, spec.dtype) * spec.nbytes)
