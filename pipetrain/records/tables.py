"""The tables that end a training on the console."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipetrain.records.history import MIB, History
from pipetrain.schedule.draw import aligned
from pipetrain.schedule.memory import PARTS

MOST_ROWS = 40  # of the table of epochs
STAGES = "stage  bubble  (plan)  seconds a batch  (plan)  wait  (plan)  updates late  (most)"


def epoch_table(history: History) -> str:
    """Return a row per epoch: all, or of many the best and the last ones."""
    metrics, best = history.about.task.metrics, history.best
    many = len(history.records) > MOST_ROWS
    shown = [best, *history.records[-MOST_ROWS // 2 :]] if many else history.records
    names = ["loss", *(metric.name for metric in metrics)]
    rows = [["epoch", *(f"{of} {name}" for of in ("train", "val") for name in names), "samples/s", "seconds"]]
    for record in shown:
        row = [str(record.epoch)]
        for values in (record.trained, record.evaluated):
            row += [f"{values['loss']:.4f}", *(metric.text(values[metric.name]) for metric in metrics)]
        rows.append([*row, f"{record.samples_per_s:.1f}", f"{record.train_s:.1f}"])
    head, *lines = aligned(rows, right=True).splitlines()
    marks = ("  best" if record is best else "" for record in shown)
    return "\n".join([head, *map("".join, zip(lines, marks, strict=True))])


def stage_table(stages: Sequence[dict[str, Any]]) -> str:
    """Return a row per stage of History.stages: measured and planned times, staleness, and bytes sent."""
    rows = [[*STAGES.split("  "), "MiB sent", "ratio", "codec s"]]
    for stage in stages:
        times = [
            "-" if stage[of + name] is None else format(stage[of + name], form)
            for name, form in (("bubble", ".1%"), ("stage_time_s", ".4f"), ("wait", ".1%"))
            for of in ("", "predicted_")
        ]
        late = [f"{stage['mean_staleness']:.2f}", str(stage["max_staleness"])]
        ratio = "-" if stage["ratio"] is None else f"{stage['ratio']:.1f}"
        sent = [f"{stage['bytes_sent'] / MIB:.1f}", ratio, f"{stage['codec_s']:.2f}"]
        rows.append([str(stage["stage"]), *times, *late, *sent])
    return aligned(rows, right=True)


def memory_table(stages: Sequence[dict[str, Any]]) -> str:
    """Return a row per stage: the MiB at the peak, in all and of each part, and in brackets as planned."""
    rows = [["stage", "MiB held", *PARTS, "allocator"]]
    for stage in stages:
        held, planned, allocated = (stage[key] for key in ("memory", "predicted_memory", "allocated_bytes"))
        parts = [f"{held[name] / MIB:.1f} ({planned[name] / MIB:.1f})" for name in ("total", *PARTS)]
        rows.append([str(stage["stage"]), *parts, "-" if allocated is None else f"{allocated / MIB:.1f}"])
    return aligned(rows, right=True)
