"""A plan as text: the cuts, what crosses them, the timeline, memory and bubble; and replicas alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from pipetrain.config.placement import span
from pipetrain.config.settings import PROFILE, Mode
from pipetrain.correction import Correction
from pipetrain.errors import ConfigError
from pipetrain.plan.memory_fit import fit_sentence
from pipetrain.plan.plan import Plan
from pipetrain.plan.replica_partition import Planner
from pipetrain.schedule.actions import Op, has_norms, splits
from pipetrain.schedule.memory import GIB, PARTS, Memory, peaks
from pipetrain.schedule.text import aligned, as_text, counted
from pipetrain.schedule.timeline import Timeline

MANY = 10**6  # updates, of which the first show how windows begin


def describe(
    plan: Plan, width: int = 100, span: tuple[int, int] | None = None, room: int | None = None
) -> str:
    """Return the plan as text: partition, timeline (for `width`, `span` see as_text), and figures.

    `room`: the bytes of each rank's GPU, if it has one.
    """
    settings, batches = plan.settings, max(plan.windows)
    head = (
        f"{settings.model}, schedule {settings.schedule}: {counted(plan.stages, 'stage')} on "
        f"{counted(settings.ranks, 'rank')}, batch {settings.batch_size} in "
        f"{counted(settings.microbatches, 'microbatch')}, window of {counted(batches, 'batch')}, "
        f"buffer_size {settings.buffer_size}\n"
    )
    if plan.samples is None:
        head += "as for the first batch: others may have any size, and windows any length\n"
    if plan.choices and settings.timed != settings.full:
        head += f"times are of microbatches of {settings.timed}, bytes of {settings.full}\n"
    if not settings.codecs.plain:
        head += f"codec forward {settings.codecs.forward}, backward {settings.codecs.backward}\n"
    if settings.correction != Correction():
        head += f"correction {settings.correction}\n{_windows(settings.correction, batches)}"
    if settings.clip_grad_norm is not None:
        whole = "the model: each update waits for the norms of all stages"
        over = whole if has_norms(plan.window.program) else "each stage"
        head += f"clip_grad_norm {settings.clip_grad_norm:g} by the norm of {over}\n"
    for name, stages in plan.cut.shared.items():
        head += f"{name} is trained as one by stages {', '.join(map(str, stages))}\n"
    run = plan.timeline()
    stage_bytes = plan.memory()
    picture = as_text(run, width, plan.unit_of_time, span, title(plan))
    predicted = [_predicted(plan, run)] if plan.choices else []
    sizes = [_memory(plan, stage_bytes, room)] if stage_bytes else []
    return "\n".join((head, _partition(plan), *predicted, picture, *sizes, _figures(plan, run, batches)))


def _windows(correction: Correction, batches: int) -> str:
    """Return a line with the lengths of windows, if the correction makes some shorter."""
    if not (share := correction.flushed) or batches == 1:
        return ""
    longer = counted(batches, "batch")
    if correction.window(0, MANY) == 1:
        return f"windows of 1 batch in the first {share:.0%} of the updates, then of {longer}\n"
    return f"windows of {longer}, in the last {share:.0%} of the updates of 1 batch\n"


def title(plan: Plan) -> str:
    """Return the heading of a plan's timeline."""
    return f"{plan.settings.model}, {plan.settings.schedule}"


def _partition(plan: Plan) -> str:
    size, flops = plan.settings.full, sum(layer.flops for layer in plan.layers)
    recomputes = any(mode is not Mode.NEVER for mode in plan.recompute)
    shown = [Op.F, *[Op.R] * recomputes, *([Op.I, Op.W] if splits(plan.window.program) else [Op.B])]
    codecs, rows = plan.settings.codecs, []
    for stage, ranks in enumerate(plan.placement):
        layers, slice, mode = plan.stage_layers(stage), plan.cut.slices[stage], plan.recompute[stage]
        enters, routes = plan.cut.entering(stage, size), plan.cut.routes_into[stage]
        parts = [] if stage else list(map(str, enters))
        for route in routes:
            tensors = " + ".join(map(str, plan.cut.message(route.edge, size)))
            parts.append(tensors if route.source == stage - 1 else f"{tensors} from {route.source}")
        row = {
            "stage": str(stage),
            "rank": span(ranks),
            "layers": f"{slice.start}-{slice.end - 1} {layers[0].name}..{layers[-1].name}",
            "parameters": f"{sum(layer.params for layer in layers):,}",
            "work": f"{sum(layer.flops for layer in layers) / flops:.1%}",
            f"enters, {size}": " + ".join(parts),
            "bytes": f"{sum(spec.nbytes for spec in enters):,}",
        }
        if not codecs.plain:
            there = sum(codecs.wire_bytes(plan.cut.message(route.edge, size), True) for route in routes)
            back = sum(codecs.wire_bytes(plan.cut.message(route.way_back, size), False) for route in routes)
            row |= {"on the wire": f"{there:,}" if stage else "-", "and back": f"{back:,}" if stage else "-"}
        if recomputes:
            row["recompute"] = mode.value
        if plan.choices:
            costs, batch_s = plan.stage_costs.seconds, plan.choices[PROFILE].stages[stage].batch_s
            messages = {kind[::2]: s for kind, s in costs.items() if len(kind) == 3 and stage in kind[::2]}
            between = sum(s for edge, s in messages.items() if edge in plan.cut.bounds)
            seconds = {str(op): costs[stage, op] for op in (*shown, Op.STEP)}
            seconds |= {"messages": between, "batch": batch_s}
            row |= {f"{name} ms": f"{1e3 * s:.2f}" for name, s in seconds.items()}
        rows.append(row)
    return aligned([[*rows[0]], *([*row.values()] for row in rows)]) + "\n"


def _predicted(plan: Plan, run: Timeline) -> str:
    profile = plan.table.times
    latency_ms, ms_per_mib = 1e3 * profile.latency_s, 1e3 * 2**20 * profile.s_per_byte
    machine = ", ".join(f"{key} {value}" for key, value in profile.machine.items())
    return (
        f"F, B, I, W and messages of a microbatch, STEP and all of a batch; profiled on {machine}\n"
        f"messages {latency_ms:.3f} ms + {ms_per_mib:.3f} ms/MiB; the schedule at these times: "
        f"{1e3 * run.makespan / max(plan.windows):.2f} ms a batch\n\n{choices(plan)}\n"
    )


def _ways(plan: Plan) -> str:
    """Return a row for the chosen replicas, and for others to compare."""
    rows = [["replicas=auto", "replicas", "cut before layers", "ms a batch", "bound by"]]
    for name, way in plan.ways.items():
        cells = ["-", "-", "-", "cannot be here"]
        if way is not None:
            cells = ["-".join(map(str, way.replicas)), str(way.cuts), f"{1e3 * way.batch_s:.2f}", way.bound]
        rows.append([name, *cells])
    return aligned(rows)


def choices(plan: Plan) -> str:
    """Return a row for the cuts of a profile, for each other strategy, and for other replicas."""
    rows = [("partition", "cut before layers", "slowest stage, ms a batch", "fullest stage, MiB", "")]
    limit = (plan.settings.memory_limit or math.inf) * GIB
    for name, choice in plan.choices.items():
        excess = "does not fit into memory_limit" if choice.held_bytes > limit else ""
        mib = f"{choice.held_bytes / 2**20:.1f}"
        rows.append((name, str(choice.cuts), f"{1e3 * choice.slowest_s:.2f}", mib, excess))
    return aligned(rows) + (f"\n{_ways(plan)}" if plan.ways else "")


def _memory(plan: Plan, stage_bytes: Memory, room: int | None) -> str:
    rows = [["stage", "MiB held", *PARTS]]
    for stage, by_part in enumerate(peaks(stage_bytes)):
        rows.append([str(stage), *(f"{by_part[name] / 2**20:.1f}" for name in ("total", *PARTS))])
    fullest = " on its fullest rank" * plan.replicated
    note = f"the peak of each stage{fullest}, and of each part of it; without what an action needs while it "
    note += "runs\n"
    if plan.settings.memory_limit is not None:
        a = "stage" if plan.settings.partition == PROFILE else "rank"
        note += f"memory_limit {plan.settings.memory_limit * 1024:.1f} MiB a {a}\n"
    if room is not None:
        note += f"{fit_sentence(stage_bytes, room)}\n"
    graphs = [sum(map(plan.graph_bytes, of_rank)) / 2**20 for of_rank in stage_bytes]
    if room is not None and plan.settings.cuda_graphs:
        note += f"CUDA graphs take up to {max(graphs):.1f} MiB more, where they fit\n"
    return f"{aligned(rows)}\n{note}"


def _figures(plan: Plan, run: Timeline, batches: int) -> str:
    settings, policy = plan.settings, plan.draft.policy
    simulation = run if plan.by_costs else plan.window.simulation
    which = "these" if plan.by_costs else "equal"
    rows = [[f"details of {which} stages", "simulated"], ["bubble", f"{simulation.bubble:.2%}"]]
    bounds = zip(*map(plan.peaks, range(plan.stages)), strict=True)
    for name, bound in zip(("activations", "versions", "staleness"), bounds, strict=True):
        rows.append([name, " ".join(map(str, getattr(simulation, name)))])
        if policy:
            rows[-1].append(" ".join(map(str, bound)))
    if policy:
        rows[0].append("at most")
        rows[1].append("-")
    note = "by stage; activations in microbatches, staleness in updates\n"
    note += f"the timeline and its bubble go by the {'times' if plan.costs else 'work'} of the stages, "
    note += "as do these details and the order\n" if plan.by_costs else "these details as if all were equal\n"
    if (share := settings.correction.flushed) and plan.samples is not None:
        longer = plan.timeline(1).makespan * batches / run.makespan
        note += (
            f"{share:.0%} of the updates are synchronous and take {longer:.2f} times as long: the run takes "
        )
        note += f"{1 + share * (longer - 1):.2f} times as long as without them\n"
    if policy:
        note += "the order is decided while it runs: this is how it goes if times are even\n"
    return f"{aligned(rows)}\n{note}"


# Cuts and replicas, without a schedule


def describe_replicas(planner: Planner, names: Sequence[str]) -> str:
    """Return a planner's cuts and replicas of these layers, beside data parallelism and no replicas.

    Raises ConfigError if none fits.
    """
    ranks = planner.machines.ranks
    if (chosen := planner.best()) is None:
        raise ConfigError(
            f"memory_limit={planner.limit / GIB:g} is too small for all cuts and replicas on "
            f"{counted(ranks, 'rank')}: choose a larger one, or more ranks"
        )
    parallel = replace(planner, limit=math.inf).priced([(0, ranks)])
    rows = [["plan", "replicas", "cut before layers", "ms a microbatch", "x data parallel", "bound by"]]
    ways = {"data parallel": planner.best([ranks]), "straight pipeline": planner.best([1] * ranks)}
    for name, plan in {**ways, "chosen": chosen}.items():
        if plan is None:
            rows.append([name, *"----", "has too few layers, or too little memory"])
            continue
        speed = [f"{1e3 * plan.seconds:.2f}", f"{parallel.seconds / plan.seconds:.2f}"]
        rows.append([name, joined(plan.replicas), ",".join(map(str, plan.cuts)), *speed, plan.bound])
    stages, first = [["stage", "ranks", "layers", *(f"{part} ms" for part in chosen.parts[0])]], 0
    for n, (start, end) in enumerate(pairwise([0, *chosen.cuts, len(names)])):
        layers, last = f"{start}-{end - 1} {names[start]}..{names[end - 1]}", first + chosen.replicas[n] - 1
        parts = (f"{1e3 * seconds:.2f}" for seconds in chosen.parts[n].values())
        stages.append([str(n), f"{first}-{last}" if last > first else str(first), layers, *parts])
        first = last + 1
    return f"{aligned(rows)}\n\n{aligned(stages)}"


def joined(replicas: Sequence[int]) -> str:
    """Return replicas as 15-1."""
    return "straight" if len(replicas) > 1 and set(replicas) == {1} else "-".join(map(str, replicas))
