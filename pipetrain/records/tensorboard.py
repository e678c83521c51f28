"""TensorBoard's events: those of the run in its folder, and those of a stage in a folder such as `stage0`.

TensorBoard draws a tag of several runs in one chart, and shows each folder with events as a run. So values of
a stage have the same tag for all stages, such as `stages/bubble`. If a stage has several ranks, each has a
folder too, such as `stage0-rank1`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import matplotlib.image
from torch.utils.tensorboard.summary import hparams
from torch.utils.tensorboard.writer import SummaryWriter

from pipetrain.records.history import Epoch
from pipetrain.records.run_folder import clear

HYPER_PARAMETERS = [
    "data", "model", "schedule", "stages", "batch_size", "microbatches", "buffer_size",
    "lr", "epochs", "seed", "device", "data_workers", "codec_forward", "codec_backward", "correction",
]  # fmt: skip
ROOM = 2**16  # bytes that must be free to write an epoch


class TensorBoard:
    """Writes the events of a run. `picture`: the plan's timeline as PNG."""

    def __init__(self, folder: Path, texts: Mapping[str, str], picture: bytes) -> None:
        self._folder = folder
        self._texts = texts
        self._pixels = matplotlib.image.imread(BytesIO(picture))[:, :, :3]
        self._writers: dict[str, Any] = {}  # by folder; "" is the run's
        self._epochs = 0  # written

    def write(self, epochs: Sequence[Epoch], summary: Mapping[str, Any] | None = None) -> None:
        """Write the epochs that are new; at the end also hyper-parameters and results of a `summary`.

        Raises OSError; damaged files are written again from the start.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=self._folder) as room:  # a full disk ends PyTorch's thread with a traceback
            room.write(bytes(ROOM))
        try:
            if not self._writers:
                self._begin()
            for epoch in epochs[self._epochs :]:
                self._write(epoch)
            if summary:
                self._end(summary)
            for writer in self._writers.values():
                writer.close() if summary else writer.flush()
        except OSError:
            for writer in self._writers.values():
                with suppress(OSError):
                    writer.close()
            self._writers, self._epochs = {}, 0
            clear(self._folder, [])
            raise
        self._epochs = len(epochs)

    def _writer(self, folder: str = "") -> Any:
        if folder not in self._writers:
            self._writers[folder] = SummaryWriter(str(self._folder / folder))
        return self._writers[folder]

    def _begin(self) -> None:
        run = self._writer()
        for name, text in self._texts.items():
            run.add_text(name, text)
        run.add_image("timeline", self._pixels, dataformats="HWC")

    def _write(self, epoch: Epoch) -> None:
        run, record = self._writer(), epoch.record
        for name, value in epoch.values.items():
            tag, _, stage = name.partition("/stage")
            writer, tag = (self._writer(f"stage{stage}"), f"stages/{tag}") if stage else (run, tag)
            writer.add_scalar(tag, value, record.epoch, record.ended)
        for update, values in record.update_values.items():
            for name, value in values.items():
                run.add_scalar(name, value, update, record.ended)

    def _end(self, summary: Mapping[str, Any]) -> None:
        shown = ("val_", "best_val_", "samples_per_s", "epoch_s")
        results = {f"result/{key}": value for key, value in summary.items() if key.startswith(shown)}
        for part in hparams({key: summary[key] for key in HYPER_PARAMETERS}, results):
            self._writer().file_writer.add_summary(part)
        for name, value in results.items():
            self._writer().add_scalar(name, value)
