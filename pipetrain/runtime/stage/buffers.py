"""The buffers of a stage's module, such as running statistics: copied, compared, and restored.

They have no versions. A recomputed forward must not change them a second time, and a skipped update reverts
the changes of its forwards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from pipetrain.model.numerics import signed
from pipetrain.model.specs import differentiable
from pipetrain.model.tensor_places import places

Copies = list[tuple[Tensor, Tensor]]  # pairs of a buffer and a copy of its earlier values


class Buffers:
    """The buffers of a module, in all their places, `without` those of some identities."""

    def __init__(self, module: nn.Module, without: Collection[int] = ()) -> None:
        included = {id(buffer) for buffer in module.buffers()} - set(without)
        self._places = [place for place in places(module) if id(place.tensor) in included]
        self.reruns: bool | None = None
        """Whether a backward changes them, as a layer that recomputes inside does; None: unknown yet."""

    def copies(self) -> Copies:
        tensors = {id(place.tensor): place.tensor for place in self._places}
        copied = {key: torch.empty_like(tensor) for key, tensor in tensors.items()}
        pairs: list[Any] = [[*map(signed, tensors.values())], [*map(signed, copied.values())]]
        kinds: Any = _group_tensors_by_device_and_dtype(pairs).values() if tensors else ()
        for (old, new), _ in kinds:
            torch._foreach_copy_(new, old)  # on a GPU one kernel
        return [(place.tensor, copied[id(place.tensor)]) for place in self._places]

    @contextmanager
    def replaced(self, copies: Copies) -> Iterator[None]:
        """Let the module work on copies, and drop its changes; without copies, on its own buffers."""
        originals = [place.tensor for place in self._places] if copies else []
        try:
            for place, (_, copied) in zip(self._places, copies, strict=False):
                place.container[place.key] = copied
            yield
        finally:
            for place, buffer in zip(self._places, originals, strict=False):
                place.container[place.key] = buffer

    def in_backward(self) -> AbstractContextManager[None]:
        """Drop a backward's changes, as those of the forward count. The first call sets `reruns`."""
        return nullcontext() if self.reruns is False else self._dropping()

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        copies = self.copies()
        with self.replaced(copies):
            yield
        if self.reruns is None:
            self.reruns = any(not torch.equal(buffer, copied) for buffer, copied in copies)

    def restore_if(self, spoilt: Tensor, before: Copies, later: Sequence[Copies]) -> None:
        """Restore if `spoilt` is 1, in copies of `later` forwards too. The device decides; no host waits.

        Integer counts of later forwards stay. Each buffer stays in its place, without a new version; if
        `spoilt` is 0 it gets its own numbers.
        """
        spoilt = spoilt > 0
        for number, (place, (buffer, old)) in enumerate(zip(self._places, before, strict=True)):
            if place.tensor is not buffer:
                place.container[place.key] = place.tensor.clone()
            current, *copies = map(signed, (place.tensor.data, *(buffers[number][1] for buffers in later)))
            saved, counts = signed(old), not (differentiable(current) or current.dtype is torch.bool)
            added = (copies or [current])[0] - saved if counts else None
            for numbers in (current, *copies):
                torch.where(spoilt, saved if added is None else numbers - added, numbers, out=numbers)
