"""The tables that end a training on the console."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipetrain.records.history import MIB, History
from pipetrain.schedule.draw import aligned

MOST_ROWS = 40  # of the table of epochs
STAGES = (
    "stage  bubble  (plan)  seconds a batch  (plan)  wait  (plan)  updates late  (most)  MiB held  (plan)  "
    "allocator  MiB sent  ratio  codec s"
)


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
    """Return a row per stage of History.stages: times and memory, measured and planned, staleness, bytes."""
    rows = [STAGES.split("  ")]
    for stage in stages:
        times = [
            "-" if stage[of + name] is None else format(stage[of + name], form)
            for name, form in (("bubble", ".1%"), ("stage_time_s", ".4f"), ("wait", ".1%"))
            for of in ("", "predicted_")
        ]
        late = [f"{stage['mean_staleness']:.2f}", str(stage["max_staleness"])]
        held = [
            "-" if stage[name] is None else f"{stage[name] / MIB:.1f}"
            for name in ("memory_bytes", "predicted_memory_bytes", "allocated_bytes")
        ]
        ratio = "-" if stage["ratio"] is None else f"{stage['ratio']:.1f}"
        sent = [f"{stage['bytes_sent'] / MIB:.1f}", ratio, f"{stage['codec_s']:.2f}"]
        rows.append([str(stage["stage"]), *times, *late, *held, *sent])
    return aligned(rows, right=True)
