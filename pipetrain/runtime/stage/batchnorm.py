"""The running statistics of BatchNorm over whole batches rather than microbatches.

In training a BatchNorm normalises each microbatch by its own mean and variance. By default each microbatch
also moves the running statistics, which evaluations use: m times per batch, by moments of few samples. With
batchnorm=batch they move once per update, by the mean and the unbiased variance of all samples of its batch,
as in one process that gets the whole batch (torchgpipe's DeferredBatchNorm; Kim et al. 2020, arXiv
2004.09910, section 3.3.2). The moments of the microbatches are combined by the rule of Chan, Golub and
LeVeque (1983), so no sum of squares loses digits.

A batch counts when its update is made, so a skipped update skips its statistics. Replicas exchange the
moments of their microbatches, so all move equally.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode

from pipetrain.runtime.stage.microbatch import Batch, Microbatch
from pipetrain.runtime.stage.observer import Observer

_BY_MODULE = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_BY_OPERATION = ("input", "weight", "bias", "running_mean", "running_var", *_BY_MODULE[5:], "cudnn_enabled")
_NORMS = {  # the names of their arguments by position
    F.batch_norm: _BY_MODULE,
    torch.batch_norm: _BY_OPERATION,
    torch.ops.aten.batch_norm.default: _BY_OPERATION,
}


class Moments(NamedTuple):
    """The moments of one call for one microbatch, by channel; `values`: of each channel."""

    mean: Tensor
    variance: Tensor  # unbiased
    values: int | Tensor  # a scalar tensor from another replica
    momentum: float


class _Running(NamedTuple):
    """The buffers of one BatchNorm. `averages`: the mean over all batches."""

    mean: Tensor
    variance: Tensor
    calls: Tensor | None
    averages: bool


class BatchStatistics(Observer):
    """The running statistics of a stage's module, which move once per batch.

    `only_finite`: they do not change if a moment is not finite.
    """

    def __init__(self, module: nn.Module, only_finite: bool = False) -> None:
        self._only_finite = only_finite
        owners = {id(norm.running_mean): norm for norm in module.modules() if hasattr(norm, "running_mean")}
        buffers = dict(module.named_buffers(remove_duplicate=False))
        self._running: dict[int, _Running] = {}  # by id of the running mean
        for name, mean in buffers.items():
            prefix, is_mean, _ = name.rpartition("running_mean")
            norm, variance = owners.get(id(mean)), buffers.get(f"{prefix}running_var")
            if is_mean and variance is not None and not isinstance(norm, _InstanceNorm):
                calls = buffers.get(f"{prefix}num_batches_tracked")
                averages = isinstance(norm, _NormBase) and norm.momentum is None
                self._running[id(mean)] = _Running(mean, variance, calls, averages)
        self._calls: dict[int, _Calls] = {}  # by microbatch
        self._from_replicas: dict[int, list[list[Moments]]] | None = None  # of all replicas, by norm and call

    @property
    def buffers(self) -> set[int]:
        """The ids of the running statistics and their counters."""
        return {id(buffer) for running in self._running.values() for buffer in running[:3]}

    @contextmanager
    def around_forward(self, microbatch: Microbatch) -> Iterator[None]:
        """Record the moments of a forward, which does not move the running statistics."""
        by_norm = self._calls[microbatch.mb] = defaultdict(list)
        with _RecordMoments(self._running, by_norm):
            yield
        for key, calls in by_norm.items():
            if (counted := self._running[key].calls) is not None:
                counted.sub_(len(calls))

    def before_step(self, batch: Batch) -> None:
        """Move the running statistics by a batch, unless its update is skipped."""
        by_norm, self._from_replicas = self._from_replicas or self._by_call(batch), None
        for mb in batch.mbs:
            del self._calls[mb]
        for key, running in self._running.items():
            for calls in by_norm[key]:
                self._update(running, calls, batch.skipped)

    def _by_call(self, batch: Batch) -> dict[int, list[list[Moments]]]:
        """Return, by norm and call within a forward, the moments of a batch's microbatches."""
        by_norm = {key: [self._calls[mb][key] for mb in batch.mbs] for key in self._running}
        return {
            key: [[call for call in calls if call is not None] for calls in zip_longest(*of_microbatches)]
            for key, of_microbatches in by_norm.items()
        }

    def partial_sums(self, batch: Batch, replica: int, replicas: int) -> Tensor | None:
        """Return this rank's moments, in float64, with zeros in the places of the other replicas."""
        places = list[Tensor]()
        for calls in self._by_call(batch).values():
            for parts in calls:
                mean, variance = combined(parts)
                count: Any = sum(moments.values for moments in parts)
                numbers = torch.cat([mean, variance, mean.new_full((1,), count)])
                zeros = [torch.zeros_like(numbers)] * replicas
                places += [*zeros[:replica], numbers, *zeros[replica + 1 :]]
        return torch.cat(places) if places else None

    def on_reduced(self, batch: Batch, numbers: Tensor) -> None:
        by_norm, start = self._by_call(batch), 0
        of_one = sum(2 * len(parts[0].mean) + 1 for calls in by_norm.values() for parts in calls)
        replicas = len(numbers) // max(1, of_one)
        for calls in by_norm.values():
            for parts in calls:
                channels, momentum = len(parts[0].mean), parts[0].momentum
                rows = numbers[start : start + replicas * (2 * channels + 1)].view(replicas, -1)
                start += rows.numel()
                parts[:] = [Moments(row[:channels], row[channels:-1], row[-1], momentum) for row in rows]
        self._from_replicas = by_norm

    @torch.no_grad()
    def _update(self, running: _Running, parts: Sequence[Moments], skipped: Tensor | None) -> None:
        mean, variance = combined(parts)
        buffers = [tensor for tensor in (running.mean, running.variance, running.calls) if tensor is not None]
        before = [tensor.clone() for tensor in buffers] if self._only_finite else []
        if running.calls is not None:
            running.calls.add_(1)
        for old, new in ((running.mean, mean), (running.variance, variance)):
            if running.averages and running.calls is not None:
                old.add_((new - old) / running.calls)
            else:
                old.mul_(1 - parts[0].momentum).add_(new.to(old.dtype), alpha=parts[0].momentum)
        if before:  # decided on the device, so no host waits
            finite = torch.cat([mean, variance]).isfinite().all()
            if skipped is not None:
                finite &= skipped == 0
            for buffer, saved in zip(buffers, before, strict=True):
                buffer.copy_(torch.where(finite, buffer, saved))


def combined(moments: Sequence[Moments]) -> tuple[Tensor, Tensor]:
    """Return the mean and unbiased variance over several sets of values, in float64."""
    count: Any = sum(part.values for part in moments)
    mean = torch.stack([part.mean.double() * (part.values / count) for part in moments]).sum(0)
    squares = [
        part.variance.double() * (part.values - 1) + part.values * (part.mean.double() - mean) ** 2
        for part in moments
    ]
    return mean, torch.stack(squares).sum(0) / (count - 1)


_Calls = defaultdict[int, list[Moments]]  # by BatchNorm, in one forward


class _RecordMoments(TorchFunctionMode):
    def __init__(self, running: Mapping[int, _Running], calls: _Calls) -> None:
        super().__init__()
        self._running, self._calls = running, calls

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        arguments = dict(zip(_NORMS[func], args, strict=False)) | dict(kwargs or {}) if func in _NORMS else {}
        key = id(arguments.get("running_mean"))
        if key not in self._running or not arguments.get("training"):
            return func(*args, **(kwargs or {}))
        x, momentum, running = arguments["input"], arguments.get("momentum", 0.1), self._running[key]
        # Zeros that are moved completely to a microbatch's moments become these moments.
        mean, variance = torch.zeros_like(running.mean), torch.zeros_like(running.variance)
        result = func(**arguments | {"running_mean": mean, "running_var": variance, "momentum": 1.0})
        self._calls[key].append(Moments(mean, variance, x.numel() // x.shape[1], float(momentum)))
        return result
