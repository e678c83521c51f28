"""Costs from a CSV file, a row per layer, so that a plan needs no model; and a plan as CSV, a row per stage.

    name,forward_ms,backward_ms,activation_bytes,parameter_bytes
    embedding,0.4,0.6,4194304,51200000

The profiles that PipeDream's authors published can be read unchanged: they have `node` instead of `name`, an
`inputs` column with the rows that each layer uses, and rows for the data, with the operator Input.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, TextIO

import torch

from pipetrain.config.placement import span
from pipetrain.errors import ConfigError
from pipetrain.model.network import INPUT, ValueId
from pipetrain.model.specs import TensorSpec, ValueSpec
from pipetrain.plan.cost_estimate import Layer
from pipetrain.plan.costs import LayerTime, Profile
from pipetrain.plan.memory_fit import peaks_by_rank
from pipetrain.plan.operation_costs import Kept
from pipetrain.plan.plan import Plan
from pipetrain.schedule.actions import Op, splits
from pipetrain.schedule.memory import PARTS, peaks

NEEDED = ("forward_ms", "backward_ms")
HALVES = ("input_ms", "weight_ms")  # of a backward
NUMBERS = (*NEEDED, *HALVES, "step_ms", "activation_bytes", "parameter_bytes")
COLUMNS = ("name", "node", "inputs", "operator", *NUMBERS)
OF_SAMPLES = (*NEEDED, *HALVES, "activation_bytes")


class Rows(NamedTuple):
    """The layers of a file, the data that they use, and the times of a microbatch."""

    layers: list[Layer]
    data: ValueSpec
    profile: Profile


def read_rows(path: Path, s_per_byte: float = 0.0, scale: float = 1.0) -> Rows:
    """Read a file of costs. Raises ConfigError.

    `s_per_byte`: of a message; `scale`: samples of a microbatch, relative to the file's.
    """
    try:
        with path.expanduser().open(newline="", encoding="utf-8-sig") as file:  # as Excel writes it
            lines = csv.reader(file, strict=True, skipinitialspace=True)
            columns = next(lines, [])
            _refuse_columns(columns)
            data, layers, times = _read(columns, ((lines.line_num, cells) for cells in lines if cells), scale)
    except OSError as error:
        raise ConfigError(f"costs={path} cannot be read: {error.strerror}") from error
    except (ValueError, csv.Error) as error:  # also of a file that is no text
        raise ConfigError(f"costs={path} cannot be read: {error}") from error
    return Rows(layers, ValueSpec(tuple(data)), Profile({}, {"file": str(path)}, 0.0, s_per_byte, times))


def _refuse_columns(columns: Sequence[str]) -> None:
    """Refuse missing and unused columns. Raises ValueError."""
    halves = HALVES if not {*HALVES}.isdisjoint(columns) else ()
    needed = ("node" if "node" in columns else "name", *NEEDED, *halves)
    if missing := [column for column in needed if column not in columns]:
        raise ValueError(f"it has no column {missing[0]}, and needs {', '.join(needed)}")
    for column in columns:
        if column not in COLUMNS or columns.count(column) > 1:
            raise ValueError(f"nothing reads its column {column}; there may be {', '.join(COLUMNS)}")


def _read(
    columns: Sequence[str], lines: Iterable[tuple[int, list[str]]], scale: float
) -> tuple[list[TensorSpec], list[Layer], list[LayerTime]]:
    """Return the data, the layers and their times. Raises ValueError."""
    data: list[TensorSpec] = []
    layers: list[Layer] = []
    times: list[LayerTime] = []
    values: dict[str, ValueId] = {}
    for line, cells in lines:
        if len(cells) != len(columns):
            raise ValueError(f"line {line} has {len(cells)} cells, and there are {len(columns)} columns")
        row = dict(zip(columns, cells, strict=True))
        name = row.get("node") or row.get("name", "")
        numbers = {column: _number(line, column, row.get(column, "")) for column in NUMBERS}
        numbers |= {column: scale * numbers[column] for column in OF_SAMPLES}
        if not name or name in values:
            raise ValueError(f"line {line} needs a name of its own, and has {name!r}")
        output = _tensor(numbers["activation_bytes"])
        if row.get("operator", "").startswith("Input"):
            values[name] = ValueId(INPUT, len(data))
            data.append(output)
            continue
        inputs = row["inputs"].split() if "inputs" in row else [*values][-1:]
        if unknown := [source for source in inputs if source not in values]:
            raise ValueError(f"line {line} takes {unknown[0]}, which no line above it makes")
        values[name] = value = ValueId(len(layers), 0)
        layers.append(_layer(name, numbers, value, [values[source] for source in inputs], output))
        times.append(_times(name, numbers, output.nbytes, halved="input_ms" in row))
    if not layers:
        raise ValueError("it has no layers")
    return data, layers, times


def _number(line: int, column: str, text: str) -> float:
    """Return the number in a cell, 0 if it may be empty. Raises ValueError."""
    try:
        number = float(text or (math.nan if column in NEEDED else 0))
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(f"line {line} has {column}={text}, and must have a number of at least 0")
    return number


def _tensor(nbytes: float) -> TensorSpec:
    return TensorSpec((math.ceil(nbytes / 4),), torch.float32)


def _layer(
    name: str, numbers: Mapping[str, float], value: ValueId, inputs: Sequence[ValueId], output: TensorSpec
) -> Layer:
    weights = _tensor(numbers["parameter_bytes"])
    return Layer(
        name,
        params=weights.numel,
        flops=max(1, round(1e6 * (numbers["forward_ms"] + numbers["backward_ms"]))),  # by which work is shown
        output=ValueSpec((output,)),
        requires_grad=(True,),
        takes=tuple(inputs),
        reached=tuple(value_id.layer != INPUT for value_id in inputs),
        saved=Kept({value: output.nbytes}, 0),
        weights={name: weights} if weights.numel else {},
    )


def _times(name: str, numbers: Mapping[str, float], nbytes: int, halved: bool) -> LayerTime:
    """Return the times of a layer; if the halves are not given, weights take half of the backward."""
    forward, backward, step = (numbers[key] / 1e3 for key in (*NEEDED, "step_ms"))
    halves = [numbers[key] / 1e3 for key in HALVES]
    if not halved:
        weight = backward / 2 if numbers["parameter_bytes"] else 0.0
        halves = [backward - weight, weight]
    forwards = dict.fromkeys(("forward_s", "recorded_s", "kept_s", "again_s"), forward)
    input_s, weight_s = halves
    return LayerTime(
        name, nbytes, **forwards, backward_s=backward, input_s=input_s, weight_s=weight_s, step_s=step
    )


# A plan


def write_rows(plan: Plan, file: TextIO) -> None:
    """Write a row for each stage of a plan that is `sized`, with the figures of its rank and of all ranks.

    For replicas these are the means, and the bytes of the fullest. Forward, backward and messages are per
    microbatch, busy and batch per batch: in ms, or without times in the plan's own unit.
    """
    run, costs, batches = plan.timeline(), plan.stage_costs, max(plan.windows)
    stage_bytes, recompute, bubbles = plan.memory(), plan.recompute, run.bubble_per_rank
    ranks, backward = peaks_by_rank(stage_bytes), {Op.I, Op.W} if splits(plan.window.program) else {Op.B}
    scale, unit = (1e3, "_ms") if plan.costs else (1.0, "")

    def time_of(stage: int, ops: Collection[Op]) -> float:
        return sum(
            time for (at_stage, op, *_), time in costs.seconds.items() if at_stage == stage and op in ops
        )

    rows: list[dict[str, object]] = []
    for stage, (on, peak) in enumerate(zip(plan.placement, peaks(stage_bytes), strict=True)):
        times = {
            "forward": time_of(stage, {Op.F}),
            "backward": time_of(stage, backward),
            "messages": time_of(stage, {Op.SEND_F, Op.SEND_B}),
            "busy": run.stages[stage].busy_s / batches,
            "batch": run.makespan / batches,
        }
        layers, fullest = plan.cut.slices[stage], max(ranks[rank] for rank in on)
        rows.append(
            {"stage": stage, "rank": span(on), "first_layer": layers.start, "last_layer": layers.end - 1}
            | {f"{name}{unit}": f"{scale * time:.6g}" for name, time in times.items()}
            | {"rank_bubble": f"{fmean(bubbles[rank] for rank in on):.6g}", "bubble": f"{run.bubble:.6g}"}
            | plan.peaks(stage)._asdict()
            | {"recompute": recompute[stage].value, "rank_bytes": fullest, "stage_bytes": peak["total"]}
            | {f"{part}_bytes": peak[part] for part in PARTS}
        )
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
