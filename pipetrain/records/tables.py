"""The tables that end a training on the console."""

from __future__ import annotations

from collections.abc import Sequence

from pipetrain.records.history import History
from pipetrain.schedule.memory import PARTS, peaks

MOST_ROWS = 40  # of the table of epochs
STAGES = "stage  bubble  (plan)  seconds a batch  (plan)  wait  (plan)  updates late  (most)"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as text, each column as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = ([cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
    return "\n".join(map("  ".join, cells))


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
    head, *lines = aligned(rows).splitlines()
    marks = ("  best" if record is best else "" for record in shown)
    return "\n".join([head, *map("".join, zip(lines, marks, strict=True))])


def stage_table(history: History) -> str:
    """Return a row per stage: measured and planned times, staleness, and bytes sent."""
    rows = [[*STAGES.split("  "), "MiB sent", "ratio", "codec s"]]
    run = history.times(history.records)
    stages = zip(run, history.predicted, history.stats(history.records), strict=False)
    for stage, (actual, planned, stats) in enumerate(stages):
        times = [(times.bubble, times.stage_time_s, times.wait) for times in (actual, planned)]
        (bubble, seconds, wait) = (list(pair) for pair in zip(*times, strict=True))
        rows.append(
            [
                str(stage),
                *(f"{part:.1%}" for part in bubble),
                *("-" if time is None else f"{time:.4f}" for time in seconds),
                *(f"{part:.1%}" for part in wait),
                f"{stats.mean_staleness:.2f}",
                str(stats.max_staleness),
                f"{stats.bytes_sent / 2**20:.1f}",
                "-" if stats.ratio is None else f"{stats.ratio:.1f}",
                f"{stats.codec_s:.2f}",
            ]
        )
    return aligned(rows)


def memory_table(history: History) -> str:
    """Return a row per stage: the MiB at the peak, in all and of each part, and in brackets as planned."""
    allocated = [history.held[stage].allocated for stage in sorted(history.held)]
    gpu = any(nbytes is not None for nbytes in allocated)
    rows = [["stage", "MiB held", *PARTS, *(["allocator"] if gpu else [])]]
    planned = peaks(history.predicted_memory)
    for stage, (actual, plan, nbytes) in enumerate(zip(history.peaks, planned, allocated, strict=True)):
        pairs = [(actual[name], plan[name]) for name in ("total", *PARTS)]
        row = [str(stage), *(f"{_mib(a)} ({_mib(b)})" for a, b in pairs)]
        rows.append(row + ([_mib(nbytes or 0)] if gpu else []))
    return aligned(rows)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f}"
