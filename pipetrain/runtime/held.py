"""Measures what the stages of a rank hold during one window, in bytes, after each action.

Autograd's part is seen through hooks on the tensors that a forward saves: their storages are noted, without
being kept alive, and count as long as they live, each once. Tensors that a stage, the channel or the
optimizer hold are looked up. Both cost time, so a run measures one window; without a Meter nothing is done.

What an action needs only while it runs is not in it; on a GPU the allocator's peak is measured too, which is.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pipetrain.network.tensors import strided
from pipetrain.runtime.stage import Stage
from pipetrain.schedule.actions import Action, Op
from pipetrain.schedule.memory import Held

MOST = 1000  # actions that are measured; an asynchronous window repeats itself long before

_Storages = dict[int, int]  # the bytes of each, by the identity of its Python object


@dataclass(frozen=True, slots=True)
class Measured:
    """The most that each stage of a rank held in a window, in `total` and of each part, in bytes.

    `allocated`: the peak of the GPU's allocator; None on a CPU.
    """

    stages: dict[int, dict[str, int]]
    allocated: int | None = None


class Meter:
    """Measures the stages of a rank during one window. `device`: theirs."""

    def __init__(self, stages: Mapping[int, Stage], device: torch.device) -> None:
        self._stages = stages
        self._device = device
        self._saved: dict[int, _Storages] = {stage: {} for stage in stages}  # by autograd
        self._refs: dict[tuple[int, int], weakref.ref[torch.UntypedStorage]] = {}
        self._peaks: dict[int, dict[str, int]] = {stage: {} for stage in stages}
        self._left = MOST
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def during(self, action: Action) -> AbstractContextManager[object]:
        """Return a context for an action, in which what autograd saves is noted."""
        if action.op not in (Op.F, Op.R) or not self._left:
            return nullcontext()
        return saved_tensors_hooks(partial(self._note, action.stage), lambda tensor: tensor)

    def after(self, action: Action, messages: Iterable[tuple[Sequence[int], Tensor]]) -> dict[int, Held]:
        """Measure after an action, and return what each stage holds now.

        `messages`: their tensors, with the stages between them; of two of this rank it counts at the last.
        """
        if not self._left:
            return {}
        self._left -= 1
        by_stage: dict[int, list[Tensor]] = {stage: [] for stage in self._stages}
        for between, tensor in messages:
            by_stage[next(stage for stage in reversed(between) if stage in by_stage)].append(tensor)
        now = {stage: self._held(stage, tensors) for stage, tensors in by_stage.items()}
        for stage, peak in self._peaks.items():
            for part, nbytes in {"total": sum(now[stage].values()), **now[stage]}.items():
                peak[part] = max(peak.get(part, 0), nbytes)
        return now

    def close(self) -> Measured:
        """End the measurement after the window."""
        cuda = self._device.type == "cuda"
        return Measured(self._peaks, torch.cuda.max_memory_allocated(self._device) if cuda else None)

    def _note(self, stage: int, tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            key = id(storage)
            if key not in self._saved[stage]:
                self._saved[stage][key] = storage.nbytes()
                self._refs[stage, key] = weakref.ref(storage, partial(self._forget, stage, key))
        return tensor.detach()  # a node that saves its own output would keep itself alive

    def _forget(self, stage: int, key: int, _: object) -> None:
        del self._saved[stage][key], self._refs[stage, key]

    def _held(self, stage: int, messages: list[Tensor]) -> Held:
        """Return the bytes by part; a storage counts at the first part that has it."""
        module, weights = self._stages[stage].module, self._stages[stage].weights
        leaves, optimizer = weights.stored(), weights.optimizer
        held = _storages(list(self._stages[stage].open_tensors()))
        sent = _storages(messages)
        parts = {
            "weights": _storages([*module.parameters(), *module.buffers(), *weights.average().values()]),
            "versions": _storages(leaves),
            "gradients": _storages([t.grad for t in (*weights.live.values(), *leaves)]),
            "optimizer": _storages(list(optimizer.state.values()) if optimizer else []),
            "messages": {key: size for key, size in sent.items() if key not in held},
            "activations": held | self._saved[stage],
        }
        seen, sizes = set[int](), dict[str, int]()
        for name, storages in parts.items():
            sizes[name] = sum(size for key, size in storages.items() if key not in seen)
            seen |= storages.keys()
        return sizes


def _storages(tensors: Any) -> _Storages:
    storages = [tensor.untyped_storage() for tensor in strided(tensors)]
    return {id(storage): storage.nbytes() for storage in storages}
