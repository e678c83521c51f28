"""What the ranks of a plan hold, and whether it fits: within memory_limit=, or in the memory of their GPUs.

It follows from the order of the actions, and from what the estimated layers save. A prediction is no proof,
as it leaves out what an action needs only while it runs: that a GPU may be too small is said, and refused is
only what is above a limit that was given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from pipetrain.codec import Identity
from pipetrain.errors import ActionFailed, ConfigError
from pipetrain.network.values import TensorSpec
from pipetrain.plan.plan import Plan
from pipetrain.schedule.memory import GIB, Memory, over_time, totals
from pipetrain.schedule.timeline import Timeline
from pipetrain.settings import PROFILE
from pipetrain.tasks import Task

WAYS = "choose more stages, more microbatches, recompute=selective or always, or precision=bf16"


def sized(plan: Plan, task: Task | None, state_of: Callable[[TensorSpec], float]) -> Plan:
    """Return a plan with the bytes of its stages. `state_of`: of the optimizer's state of a parameter.

    `task`: of which there are targets; None: without any.

    Raises ConfigError if a rank is predicted to hold more than memory_limit=; the cut of partition=profile
    keeps to it, by what was measured.
    """
    outputs = plan.layers[-1].output
    classes = task and task.classes_of(outputs)
    # Labels, or numbers as the outputs are.
    targets = 8 * outputs.specs[0].numel // classes if classes else plan.table.loss
    table, sizes = replace(plan.table, state_of=state_of, targets=targets), []
    for stage, (slice, mode) in enumerate(zip(plan.cut.slices, plan.modes, strict=True)):
        span, routes = (slice.start, slice.end), [r for r in plan.cut.routes if stage in r.edge and r.bounds]
        sent = {value for route in routes for value in route.values}  # others stay on the rank: no copies
        enters, leaves = (
            {value: needs for value, needs in of.items() if value in sent}
            for of in (table.entering(*span), table.leaving(*span))
        )
        copies = {"outputs": table.wire_bytes(leaves)[0], "returned": table.wire_bytes(enters)[1]}
        sizes.append(table.sizes(*span, mode)._replace(**copies))
    plan = replace(plan, sizes=sizes)
    limit = plan.settings.memory_limit
    if limit is not None and plan.settings.partition != PROFILE:
        rank, peak = _fullest(memory(plan, plan.timeline()))
        if peak > limit * GIB:
            raise ConfigError(
                f"memory_limit={limit:g} is too small: rank {rank} is predicted to hold {_gib(peak)} GiB; to "
                f"hold less, {WAYS}; or choose partition={PROFILE}, which keeps to it where it can"
            )
    return plan


def memory(plan: Plan, run: Timeline) -> Memory:
    """Return what the stages of a plan that is `sized` hold after each action of a timeline."""
    coded = not isinstance(plan.settings.codecs.forward, Identity)
    copied = [n for n, slice in enumerate(plan.cut.slices) if coded or slice.copies_output]
    return over_time(run, plan.sizes, plan.settings.buffer_size, copied)


def gpu_bytes(device: str, processes: int = 1) -> int | None:
    """Return a process's share of the smallest GPU, if `device` is one; `processes`: of this machine."""
    if device == "cpu" or not torch.cuda.is_available():
        return None
    count = torch.cuda.device_count()
    smallest = min(torch.cuda.get_device_properties(n).total_memory for n in range(count))
    return int(smallest) // math.ceil(processes / count)


def peaks_by_rank(stage_bytes: Memory) -> list[int]:
    """Return the most bytes that the stages of each rank hold together."""
    return [max(totals(of_rank), default=0) for of_rank in stage_bytes]


def says_whether_it_fits(stage_bytes: Memory, room: int) -> str:
    """Return a sentence that compares the fullest rank with the `room` bytes of each rank's GPU."""
    rank, peak = _fullest(stage_bytes)
    compared = (
        f"rank {rank}, the fullest, is predicted to hold {_gib(peak)} of the {_gib(room)} GiB of its GPU"
    )
    return compared if peak <= room else f"{compared} and is likely to run out: to hold less, {WAYS}"


def explained(error: ActionFailed, plan: Plan, rank: int, device: torch.device) -> ActionFailed:
    """Return the error of an action that ran out of memory, with what the plan predicted and what helps."""
    room = gpu_bytes(device.type) or 0
    predicted = ""
    if plan.sizes:
        peak = peaks_by_rank(memory(plan, plan.timeline()))[rank]
        predicted = f", and rank {rank} was predicted to hold {_gib(peak)}"
    return ActionFailed(f"{error}; there are {_gib(room)} GiB{predicted}: to hold less, {WAYS}", error.stage)


def _fullest(stage_bytes: Memory) -> tuple[int, int]:
    """Return the rank that holds most, and its bytes."""
    peaks = peaks_by_rank(stage_bytes)
    return peaks.index(max(peaks)), max(peaks)


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.4g}"


def known_state(target: str, options: Mapping[str, Any]) -> int | None:
    """Return how many tensors of a parameter's size an optimizer of torch keeps; None for any other one.

    To build one loads torch's compiler, which takes a second.
    """
    if target == "torch.optim.SGD":
        return int(bool(options.get("momentum")))
    if target in ("torch.optim.Adam", "torch.optim.AdamW"):
        return 2 + bool(options.get("amsgrad"))
    return None


def optimizer_state(make: Callable[[Any], Optimizer]) -> Callable[[TensorSpec], int]:
    """Return a function that tells the bytes of an optimizer's state of a parameter.

    It steps a small parameter of each number of dimensions; state of less than one dimension is left out.
    """

    @cache
    def ratio(dimensions: int, dtype: torch.dtype) -> float:
        parameter = nn.Parameter(torch.ones((2,) * dimensions, dtype=dtype))
        try:
            optimizer = make([("", parameter)])
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        except Exception:  # such as an optimizer of matrices for a vector, which is refused elsewhere
            return 0.0
        leaves = tree_leaves(list(optimizer.state.values()))
        return sum(t.nbytes for t in leaves if isinstance(t, Tensor) and t.dim()) / parameter.nbytes

    return lambda spec: round(ratio(len(spec.shape), spec.dtype) * spec.nbytes)
