"""TensorBoard's events: those of the run in its folder, and those of a stage in a folder such as `stage0`.

TensorBoard draws a tag of several runs in one chart, and takes a folder with events for a run. So what is of
a stage has the same tag for all of them, such as `stages/bubble`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib.image
from torch.utils.tensorboard.summary import hparams
from torch.utils.tensorboard.writer import SummaryWriter

from pipetrain.checkpoint.progress import EpochRecord
from pipetrain.records.files import write_whole
from pipetrain.records.folder import clear
from pipetrain.records.history import History

HYPER_PARAMETERS = [
    "data", "model", "schedule", "stages", "batch_size", "microbatches", "buffer_size",
    "lr", "epochs", "seed", "device", "data_workers", "codec_forward", "codec_backward",
]  # fmt: skip
RESULTS = ["val_loss", "samples_per_s", "epoch_s"]  # and the metrics
ROOM = 2**16  # bytes that must be free before an epoch is written


class TensorBoard:
    """Writes a run's events. `config`: its configuration; `picture`: the plan's timeline as PNG."""

    def __init__(self, folder: Path, history: History, config: str, picture: bytes) -> None:
        self._folder = folder
        self._history = history
        self._config = config
        self._pixels = matplotlib.image.imread(BytesIO(picture))[:, :, :3]
        self._writers: list[Any] = []  # the run's, then the stages'
        self._epochs = 0  # written

    def write(self) -> None:
        """Write the epochs that are new. Raises OSError; files that it has harmed are begun anew."""
        # PyTorch's writer has a thread, which a full disk ends with a traceback: so it is tried before.
        write_whole(self._folder / "room", lambda new: new.write_bytes(bytes(ROOM)))
        (self._folder / "room").unlink()
        new = self._history.records[self._epochs :]
        try:
            if not self._writers:
                self._begin()
            for record in new:
                self._write(record)
            for writer in self._writers:
                writer.flush()
        except OSError:
            for writer in self._writers:
                with suppress(OSError):
                    writer.close()
            self._writers, self._epochs = [], 0
            clear(self._folder, [])
            raise
        self._epochs += len(new)

    def close(self, summary: Mapping[str, Any]) -> None:
        """Write the hyper-parameters and results too. Raises OSError."""
        self.write()
        run = self._writers[0]
        metrics = [key for key in summary if key.startswith(("val_", "best_val_")) and key not in RESULTS]
        results = {f"result/{key}": summary[key] for key in [*metrics, *RESULTS]}
        for part in hparams({key: summary[key] for key in HYPER_PARAMETERS}, results):
            run.file_writer.add_summary(part)
        for name, value in results.items():
            run.add_scalar(name, value)
        for writer in self._writers:
            writer.close()

    def _begin(self) -> None:
        facts, stages = self._history.about.data, range(self._history.about.plan.stages)
        folders = [self._folder, *(self._folder / f"stage{stage}" for stage in stages)]
        self._writers = [SummaryWriter(str(folder)) for folder in folders]
        run = self._writers[0]
        run.add_text("config", f"```yaml\n{self._config}```")
        run.add_text("data", f"{facts.name}. {facts.note}".strip())
        run.add_image("timeline", self._pixels, dataformats="HWC")

    def _write(self, record: EpochRecord) -> None:
        run, *stages = self._writers
        for name, value in self._history.values(record).items():
            tag, _, of = name.partition("/stage")
            writer, tag = (stages[int(of)], f"stages/{tag}") if of else (run, tag)
            writer.add_scalar(tag, value, record.epoch, record.ended)
        for update, values in record.update_values.items():
            _scalars(run, values, update, record)
        for stage, stats in record.stages.items():
            _staleness(stages[stage], stats.staleness, record)
        for stage, rank in self._history.held.items():
            if record.epoch == self._history.held_epoch:
                for number, held in enumerate(rank.stages[stage]):  # after each action
                    values = {"": sum(held.values()) / 2**20, "_activations": held["activations"] / 2**20}
                    curve = {f"stages/memory_window{part}_mib": value for part, value in values.items()}
                    _scalars(stages[stage], curve, number, record)


def _scalars(writer: Any, values: Mapping[str, float], step: int, record: EpochRecord) -> None:
    for name, value in values.items():
        writer.add_scalar(name, value, step, record.ended)


def _staleness(writer: Any, counts: Mapping[int, int], record: EpochRecord) -> None:
    """Write a histogram with a bar for each integer."""
    counts = counts or {0: 1}
    bars = range(max(counts) + 1)
    writer.add_histogram_raw(
        "stages/staleness_distribution",
        min=min(counts),
        max=max(counts),
        num=sum(counts.values()),
        sum=sum(value * count for value, count in counts.items()),
        sum_squares=sum(value**2 * count for value, count in counts.items()),
        bucket_limits=[value + 0.5 for value in bars],
        bucket_counts=[counts.get(value, 0) for value in bars],
        global_step=record.epoch,
        walltime=record.ended,
    )
