"""The microbatches of one window, for the engine.

Only the rank of the first stage loads images, only that of the last stage reads labels, by the same ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pipetrain.runtime.stage import Target


class WindowFeed:
    """The batches of one window: each a list of its microbatches' sample ids, int64 [n].

    `images` yields the input of each microbatch in order; None if this rank does not hold the first stage.
    """

    def __init__(
        self,
        batches: Sequence[Sequence[Tensor]],
        labels: Tensor,
        images: Iterator[Tensor] | None,
        device: torch.device,
    ) -> None:
        self._ids = [ids for batch in batches for ids in batch]
        self._batch_samples = [sum(map(len, batch)) for batch in batches for _ in batch]
        self._labels = labels
        self._images = images
        self._device = device
        self._ahead: Tensor | None = None
        self._given = 0

    def size(self, mb: int) -> int:
        return len(self._ids[mb])

    def input(self, mb: int) -> Tensor:
        """Return the images of the next microbatch [n, 3, 32, 32] on the device."""
        assert self._images is not None, f"this rank has no images to give for microbatch {mb}"
        images, self._ahead = self._ahead, None
        self._given += 1
        return self._moved(next(self._images)) if images is None else images

    def prepare(self) -> None:
        """Load the next images, and start their copy to the device."""
        if self._images is not None and self._ahead is None and self._given < len(self._ids):
            self._ahead = self._moved(next(self._images))

    def target(self, mb: int) -> Target:
        """Return the labels of a microbatch [n] on the device, and its share of its batch."""
        ids = self._ids[mb]
        return Target(self._moved(self._labels[ids]), len(ids) / self._batch_samples[mb])

    def _moved(self, tensor: Tensor) -> Tensor:
        """Start the copy to the device; to a GPU it is asynchronous from pinned memory only."""
        if self._device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)
