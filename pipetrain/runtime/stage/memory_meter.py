"""Measures the bytes that the stages of a rank hold during one window, after each action.

Autograd's part is measured through hooks on the tensors that a forward saves: their storages are recorded,
without being kept alive, and count as long as they live, each once. Tensors that a stage, the channel or the
optimizer hold are looked up. Both cost time, so a run measures one window; without a Meter nothing is done.

What an action needs only while it runs is not included, except in the peak of a GPU's allocator.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pipetrain.model.trial_tensors import strided
from pipetrain.runtime.stage.stage import Stage
from pipetrain.schedule.actions import Action, Op

MAX_ACTIONS = 1000  # actions measured; an asynchronous window repeats itself long before


@dataclass(frozen=True, slots=True)
class PeakBytes:
    """The most bytes that each stage of a rank held in a window.

    `allocated`: the peak of the GPU's allocator; None on a CPU.
    """

    stages: dict[int, int]
    allocated: int | None = None


class Meter:
    """Measures the stages of a rank during one window. `device`: of the stages."""

    def __init__(self, stages: Mapping[int, Stage], device: torch.device) -> None:
        self._stages = stages
        self._device = device
        # The bytes of each storage that autograd saves, by the identity of its Python object:
        self._saved: dict[int, dict[int, int]] = {stage: {} for stage in stages}
        self._refs: dict[tuple[int, int], weakref.ref[torch.UntypedStorage]] = {}
        self._peaks = dict.fromkeys(stages, 0)
        self._actions_left = MAX_ACTIONS
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def during(self, action: Action) -> AbstractContextManager[object]:
        """Return a context for an action, which records what autograd saves."""
        if action.op not in (Op.F, Op.R) or not self._actions_left:
            return nullcontext()
        return saved_tensors_hooks(partial(self._record_storage, action.stage), lambda tensor: tensor)

    def after(self, messages: Iterable[tuple[Sequence[int], Tensor]]) -> dict[int, int]:
        """Measure after an action, and return the bytes that each stage holds now.

        `messages`: their tensors, with the stages between them; if both are on this rank the last one counts.
        """
        if not self._actions_left:
            return {}
        self._actions_left -= 1
        by_stage: dict[int, list[Tensor]] = {stage: [] for stage in self._stages}
        for between, tensor in messages:
            by_stage[next(stage for stage in reversed(between) if stage in by_stage)].append(tensor)
        stage_bytes = {stage: self._bytes_of(stage, tensors) for stage, tensors in by_stage.items()}
        self._peaks = {stage: max(peak, stage_bytes[stage]) for stage, peak in self._peaks.items()}
        return stage_bytes

    def close(self) -> PeakBytes:
        """End the measurement after the window."""
        cuda = self._device.type == "cuda"
        return PeakBytes(self._peaks, torch.cuda.max_memory_allocated(self._device) if cuda else None)

    def _record_storage(self, stage: int, tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            key = id(storage)
            if key not in self._saved[stage]:
                self._saved[stage][key] = storage.nbytes()
                self._refs[stage, key] = weakref.ref(storage, partial(self._drop_storage, stage, key))
        return tensor.detach()  # a node that saves its own output would keep itself alive

    def _drop_storage(self, stage: int, key: int, _: object) -> None:
        del self._saved[stage][key], self._refs[stage, key]

    def _bytes_of(self, number: int, messages: list[Tensor]) -> int:
        """Return the bytes of a stage; each storage counts once, however many tensors use it."""
        stage = self._stages[number]
        weight_tensors, state = stage.weights.held_tensors()
        tensors = [*weight_tensors, *stage.module.parameters(), *stage.module.buffers()]
        storages = [t.untyped_storage() for t in strided(tensors, [*stage.open_tensors(), *messages], state)]
        return sum(({id(storage): storage.nbytes() for storage in storages} | self._saved[number]).values())
