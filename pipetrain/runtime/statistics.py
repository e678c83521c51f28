"""The running statistics of BatchNorm over whole batches rather than microbatches.

In training a BatchNorm normalises each microbatch by its own mean and variance, as it sees no other. By
default each also moves the running statistics, which evaluations use: m times a batch, by moments of few
samples. With batchnorm=batch they move once an update, by the mean and the unbiased variance of all samples
of its batch, as in one process that is given them at once (torchgpipe's DeferredBatchNorm; Kim et al. 2020,
arXiv 2004.09910, section 3.3.2). The moments of the microbatches are joined by the rule of Chan, Golub and
LeVeque (1983), and no sum of squares loses digits.

A batch counts when its update is made, so an update that is skipped takes its statistics with it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode

from pipetrain.runtime.microbatch import Batch, Microbatch, Observer

_ATEN = torch.ops.aten
_BY_MODULE = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_BY_OPERATION = ("input", "weight", "bias", "running_mean", "running_var", *_BY_MODULE[5:], "cudnn_enabled")
_NORMS = {
    F.batch_norm: _BY_MODULE,
    torch.batch_norm: _BY_OPERATION,
    _ATEN.batch_norm.default: _BY_OPERATION,
}
"""The operations, and the names of their arguments by position."""


class Moments(NamedTuple):
    """Of one call for one microbatch: by channel, over so many values each."""

    mean: Tensor
    variance: Tensor  # unbiased
    values: int
    momentum: float


class _Running(NamedTuple):
    """The buffers of one BatchNorm. `calls`: how often it was called; `averages`: over all batches alike."""

    mean: Tensor
    variance: Tensor
    calls: Tensor | None
    averages: bool

    @torch.no_grad()
    def move(self, mean: Tensor, variance: Tensor, momentum: float) -> None:
        if self.calls is not None:
            self.calls.add_(1)
        for running, new in ((self.mean, mean), (self.variance, variance)):
            if self.averages and self.calls is not None:
                running.add_((new - running) / self.calls)
            else:
                running.mul_(1 - momentum).add_(new.to(running.dtype), alpha=momentum)


class BatchStatistics(Observer):
    """The running statistics of a stage's module, which move once a batch.

    `only_finite`: they stay as they are where a moment is not finite.
    """

    def __init__(self, module: nn.Module, only_finite: bool = False) -> None:
        self._only_finite = only_finite
        owners = {id(norm.running_mean): norm for norm in module.modules() if hasattr(norm, "running_mean")}
        buffers = dict(module.named_buffers(remove_duplicate=False))
        self._running: dict[int, _Running] = {}  # by id of the running mean
        for name, mean in buffers.items():
            prefix, found, _ = name.rpartition("running_mean")
            norm = owners.get(id(mean))
            if found and f"{prefix}running_var" in buffers and not isinstance(norm, _InstanceNorm):
                variance, calls = buffers[f"{prefix}running_var"], buffers.get(f"{prefix}num_batches_tracked")
                averages = isinstance(norm, _NormBase) and norm.momentum is None
                self._running[id(mean)] = _Running(mean, variance, calls, averages)
        self._made: dict[int, list[tuple[int, Moments]]] = {}  # by microbatch, in the order of the calls

    @property
    def buffers(self) -> set[int]:
        return {id(t) for of in self._running.values() for t in (of.mean, of.variance, of.calls)}

    @contextmanager
    def around_forward(self, microbatch: Microbatch) -> Iterator[None]:
        """Let a forward note its moments in place of moving the running statistics."""
        made = self._made[microbatch.mb] = []
        with _Noting(self._running, made):
            yield
        for key, _ in made:
            if (calls := self._running[key].calls) is not None:
                calls.sub_(1)

    def before_step(self, batch: Batch) -> None:
        """Move the running statistics by a batch, unless its update is left out."""
        calls: dict[tuple[int, int], list[Moments]] = defaultdict(list)  # (BatchNorm, number of its call)
        for note in [self._made.pop(mb) for mb in batch.mbs]:
            number: Counter[int] = Counter()
            for key, moments in note:
                calls[key, number[key]].append(moments)
                number[key] += 1
        for (key, _), parts in calls.items() if not batch.skipped else ():
            mean, variance = joined(parts)
            if not self._only_finite or all(map(math.isfinite, torch.cat([mean, variance]).tolist())):
                self._running[key].move(mean, variance, parts[0].momentum)


def joined(moments: Sequence[Moments]) -> tuple[Tensor, Tensor]:
    """Return mean and unbiased variance over several sets of values, in float64."""
    count = sum(of.values for of in moments)
    mean = torch.stack([of.mean.double() * (of.values / count) for of in moments]).sum(0)
    squares = [
        of.variance.double() * (of.values - 1) + of.values * (of.mean.double() - mean) ** 2 for of in moments
    ]
    return mean, torch.stack(squares).sum(0) / (count - 1)


class _Noting(TorchFunctionMode):
    def __init__(self, running: Mapping[int, _Running], made: list[tuple[int, Moments]]) -> None:
        super().__init__()
        self._running, self._made = running, made

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func not in _NORMS:
            return func(*args, **kwargs)
        given = dict(zip(_NORMS[func], args, strict=False)) | kwargs
        key = id(given.get("running_mean"))
        if key not in self._running or not given.get("training"):
            return func(*args, **kwargs)
        x, momentum = given["input"], given.get("momentum", 0.1)
        running = self._running[key]
        # Zeros, moved by all of a microbatch's moments, are these moments.
        mean, variance = torch.zeros_like(running.mean), torch.zeros_like(running.variance)
        given |= {"running_mean": mean, "running_var": variance, "momentum": 1.0}
        result = func(**given)
        self._made.append((key, Moments(mean, variance, x.numel() // x.shape[1], float(momentum))))
        return result
