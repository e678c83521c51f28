"""What the ranks of a plan hold, and whether it fits: within memory_limit=, or in the memory of their GPUs.

It follows from the order of the actions, and from what the estimated layers save. A prediction is no proof,
as it leaves out what an action needs only while it runs: that a GPU may be too small is said, and refused is
only what is above a limit that was given.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from pipetrain.codec import Identity
from pipetrain.errors import ActionFailed, ConfigError
from pipetrain.network.values import TensorSpec
from pipetrain.plan.balance import GIB
from pipetrain.plan.plan import Plan
from pipetrain.plan.sizes import loss_sizes, stage_sizes, tensors_of
from pipetrain.schedule.memory import Moment, over_time
from pipetrain.schedule.timeline import Timeline
from pipetrain.settings import AUTO, PROFILE, Mode, Settings
from pipetrain.tasks import Task


def sized(plan: Plan, task: Task, state_of: Callable[[TensorSpec], int]) -> Plan:
    """Return a plan with the bytes of its stages. `state_of`: of the optimizer's state of a parameter.

    Raises ConfigError if a rank is predicted to hold more than memory_limit=.
    """
    loss = loss_sizes(task, plan.layers[-1].output, plan.settings.data_dtype)
    codecs, averaged = plan.settings.codecs, plan.settings.ema is not None
    messages = [(edge, plan.cut.message(edge, plan.full)) for edge in plan.cut.message_edges]
    wire = {edge: codecs.wire_bytes(specs, edge[0] < edge[1]) for edge, specs in messages}
    raw = {edge: sum(spec.nbytes for spec in specs) for edge, specs in messages}
    sizes = []
    for stage, slice in enumerate(plan.cut.slices):
        parameters, _ = tensors_of(plan.stage_layers(stage))
        held = stage_sizes(
            plan.layers,
            plan.example.of(plan.full),
            slice.start,
            slice.end,
            loss,
            averaged=averaged,
            copies_input=slice.copies_input,
            selective=plan.modes[stage] is Mode.SELECTIVE,
        )
        optimizer = sum(map(state_of, parameters.values()))
        tied = sum(parameters[name].nbytes for name, tie in plan.cut.shared.items() if stage in tie)
        sizes.append(replace(held, optimizer=optimizer, tied=tied, wire=wire, raw=raw))
    plan = replace(plan, sizes=sizes)
    _refuse_more(plan)
    return plan


def memory(plan: Plan, run: Timeline) -> list[list[Moment]]:
    """Return, by rank, what the stages of a plan that is `sized` hold after each action of a timeline."""
    coded = not isinstance(plan.settings.codecs.forward, Identity)
    copied = [edge for edge in plan.cut.edges if coded or plan.cut.slices[edge[0]].copies_output]
    return over_time(run, plan.sizes, plan.cut.bounds, plan.cut.edges, copied)


def gpu_bytes(device: str, processes: int = 1) -> int | None:
    """Return a process's share of the smallest GPU, if `device` is one; `processes`: of this machine."""
    if device == "cpu" or not torch.cuda.is_available():
        return None
    count = torch.cuda.device_count()
    smallest = min(torch.cuda.get_device_properties(n).total_memory for n in range(count))
    return int(smallest) // math.ceil(processes / count)


def peaks_by_rank(held: Sequence[Sequence[Moment]]) -> list[int]:
    """Return the most bytes that the stages of each rank hold together."""
    return [max((moment.total for moment in moments), default=0) for moments in held]


def says_whether_it_fits(settings: Settings, held: Sequence[Sequence[Moment]], room: int) -> str:
    """Return a sentence that compares the fullest rank with the `room` bytes of each rank's GPU."""
    rank, peak = _fullest(held)
    if peak <= room:
        return (
            f"each rank fits into its GPU: of {_gib(room)} GiB rank {rank}, the fullest, is predicted to "
            f"hold {_gib(peak)}"
        )
    return (
        f"rank {rank} is likely to run out of memory: it is predicted to hold {_gib(peak)} GiB, and its GPU "
        f"has {_gib(room)}; {_ways(settings)}"
    )


def _refuse_more(plan: Plan) -> None:
    """Refuse a plan above the limit; the cut of partition=profile keeps to it, by what was measured."""
    limit = plan.settings.memory_limit
    if limit is None or plan.settings.partition == PROFILE:
        return
    rank, peak = _fullest(memory(plan, plan.timeline()))
    if peak > limit * GIB:
        raise ConfigError(
            f"memory_limit={limit:g} is too small: rank {rank} is predicted to hold {_gib(peak)} GiB; "
            f"{_ways(plan.settings)}, or choose partition={PROFILE}, which keeps to it where it can"
        )


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an allocator raised it."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def explained(error: ActionFailed, plan: Plan, rank: int, device: torch.device) -> ActionFailed:
    """Return the error of an action that ran out of memory, with what the plan predicted and what helps."""
    room = gpu_bytes(device.type) or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    whose = "its GPU" if device.type == "cuda" else "its machine"
    predicted = ""
    if plan.sizes:
        peak = peaks_by_rank(memory(plan, plan.timeline()))[rank]
        predicted = f" and it was predicted to hold {_gib(peak)} GiB at its peak"
    return ActionFailed(f"{error}; {whose} has {_gib(room)} GiB{predicted}: {_ways(plan.settings)}")


def _fullest(held: Sequence[Sequence[Moment]]) -> tuple[int, int]:
    """Return the rank that holds most, and its bytes."""
    peaks = peaks_by_rank(held)
    return peaks.index(max(peaks)), max(peaks)


def _ways(settings: Settings) -> str:
    """Say what would make a rank hold less."""
    ways = ["more stages", "more microbatches"]
    if settings.recompute in (AUTO, Mode.NEVER):
        ways.append("recompute=always" if settings.compile else "recompute=selective or always")
    if settings.precision != "bf16" and settings.dtype == torch.float32:
        ways.append("precision=bf16")
    return f"to hold less, choose {', '.join(ways)}"


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.4g}"
