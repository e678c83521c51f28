"""TensorBoard's event files of a run, as bytes: one of the run, and one of each stage.

TensorBoard draws a tag of several runs in one chart, and takes a folder with events for a run. So what is of
a stage has the same tag for all of them, such as `stages/bubble`, in a file in a folder of the stage.

PyTorch's SummaryWriter writes in a thread, which a full disk ends with a traceback and a loss of data. Bytes
can be written again.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import matplotlib.image
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import histogram_raw, hparams, image, scalar, text

from pipetrain.checkpoint.progress import EpochFigures
from pipetrain.records.about import About
from pipetrain.records.history import History, Memory
from pipetrain.schedule.memory import peaks

HYPER_PARAMETERS = [
    "data", "model", "schedule", "stages", "batch_size", "microbatches", "buffer_size",
    "lr", "epochs", "seed", "device", "data_workers", "codec_forward", "codec_backward",
]  # fmt: skip
_OF_STAGE = re.compile(r"(.+)/stage(\d+)")
RESULTS = ["val_loss", "samples_per_s", "epoch_s"]  # and the metrics


def file_name() -> str:
    """Return a new name for an event file."""
    return f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.0"


def beginning(now: float) -> bytes:
    """Return what each file begins with."""
    return _record(Event(file_version="brain.Event:2", wall_time=now))


def introduction(about: About, config: str, picture: bytes) -> bytes:
    """Return the beginning of the run's file: the configuration, the data, and the timeline from a PNG."""
    now, pixels = time.time(), matplotlib.image.imread(BytesIO(picture))[:, :, :3]
    summaries = [
        text("config", f"```yaml\n{config}```"),
        text("data", f"{about.data.name}. {about.data.note}".strip()),
        image("timeline", pixels, dataformats="HWC"),
    ]
    return beginning(now) + _records(summaries, now)


def scalars(history: History) -> dict[str, float]:
    """Return the values of a history's newest epoch, by name."""
    figures = history.last
    values = {
        "loss/train": figures.trained.mean_loss,
        "loss/val": figures.evaluated.mean_loss,
        "speed/learning_rate": figures.lr,
        "speed/samples_per_s": figures.samples_per_s,
    }
    for metric, trained, evaluated in history.metrics_of(figures):
        title = metric.title or metric.name
        values[f"{title}/train"] = trained
        values[f"{title}/val"] = evaluated
    for stage, (actual, planned) in enumerate(zip(history.measured_last(), history.predicted, strict=False)):
        stats = figures.stages[stage]
        values[f"staleness/stage{stage}"] = stats.max_staleness
        values[f"staleness_mean/stage{stage}"] = stats.mean_staleness
        values[f"sent_mib/stage{stage}"] = stats.bytes_sent / 2**20
        values[f"codec_s/stage{stage}"] = stats.codec_s
        for suffix, times in (("", actual), ("_predicted", planned)):
            values[f"bubble{suffix}/stage{stage}"] = times.bubble
            values[f"wait{suffix}/stage{stage}"] = times.wait
            if times.stage_time_s is not None:
                values[f"stage_time{suffix}/stage{stage}"] = times.stage_time_s
    if history.memory is not None and history.memory.epoch == figures.epoch:
        for suffix, found in (("", history.memory.peaks), ("_predicted", peaks(history.predicted_memory))):
            for stage, of in enumerate(found):
                values[f"memory_mib{suffix}/stage{stage}"] = of.total / 2**20
    return values


def updates(figures: EpochFigures) -> dict[int, dict[str, float]]:
    """Return the values of an epoch's updates, by their numbers and names."""
    return {
        update: {f"{name}/update": value for name, value in values.items()}
        for update, values in figures.groups.items()
    }


def points(history: History) -> bytes:
    """Return the points of a history's newest epoch, without those of its stages."""
    figures = history.last
    values = {name: value for name, value in scalars(history).items() if not _OF_STAGE.fullmatch(name)}
    by_update = (_scalars(of_one, figures.ended, update) for update, of_one in updates(figures).items())
    return _scalars(values, figures.ended, figures.epoch) + b"".join(by_update)


def stage_points(history: History, stage: int) -> bytes:
    """Return the points of a stage in a history's newest epoch."""
    figures = history.last
    values = {
        f"stages/{match[1]}": value
        for name, value in scalars(history).items()
        if (match := _OF_STAGE.fullmatch(name)) and int(match[2]) == stage
    }
    made = _scalars(values, figures.ended, figures.epoch)
    if (stats := figures.stages.get(stage)) is not None:
        late = _distribution("stages/staleness_distribution", stats.staleness)
        made += _records([late], figures.ended, figures.epoch)
    if history.memory is not None and history.memory.epoch == figures.epoch:
        made += _curve(history.memory, stage, figures.ended)
    return made


def _curve(memory: Memory, stage: int, moment: float) -> bytes:
    """Return what a stage held in the measured window, by the number of its rank's action."""
    (over_time,) = (rank.stages[stage] for rank in memory.ranks if stage in rank.stages)
    return b"".join(
        _scalars(
            {
                "stages/memory_window_mib": held.total / 2**20,
                "stages/memory_window_activations_mib": held.activations / 2**20,
            },
            moment,
            number,
        )
        for number, held in enumerate(over_time)
    )


def outcome(summary: Mapping[str, Any]) -> bytes:
    """Return the end of a file: the run's hyper-parameters and results."""
    metrics = [key for key in summary if key.startswith(("val_", "best_val_")) and key not in RESULTS]
    results = {f"result/{key}": summary[key] for key in [*metrics, *RESULTS]}
    parameters = hparams({key: summary[key] for key in HYPER_PARAMETERS}, results)
    return _records([*parameters, *(scalar(name, value) for name, value in results.items())], time.time())


def _distribution(name: str, counts: Mapping[int, int]) -> Any:
    """Return a histogram with a bar for each integer."""
    counts = counts or {0: 1}
    bars = range(max(counts) + 1)
    return histogram_raw(
        name,
        min=min(counts),
        max=max(counts),
        num=sum(counts.values()),
        sum=sum(value * count for value, count in counts.items()),
        sum_squares=sum(value**2 * count for value, count in counts.items()),
        bucket_limits=[value + 0.5 for value in bars],
        bucket_counts=[counts.get(value, 0) for value in bars],
    )


def _scalars(values: Mapping[str, float], moment: float, step: int) -> bytes:
    return _records([scalar(name, value) for name, value in values.items()], moment, step)


def _records(summaries: Sequence[Any], moment: float, step: int = 0) -> bytes:
    return b"".join(_record(Event(summary=summary, step=step, wall_time=moment)) for summary in summaries)


def _record(event: Event) -> bytes:
    buffer = BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()
