"""Metrics, as sums that add up over microbatches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pipetrain.model.specs import Value, as_tuple, leaves_of, scores_of

MetricFunction = Callable[[Value, Value], Tensor | float]
"""(outputs, targets) -> the mean over the samples of a microbatch."""


class Metric:
    """A number over all samples, computed from sums over microbatches.

    - `name`: for tables; `title`: for charts, "" if it is the same.
    - `higher`: whether higher is better; None: undefined, so it cannot decide which epoch is best.
    - `percent`: whether it is shown as a percentage.
    """

    name: str
    title: str = ""
    higher: bool | None = None
    percent: bool = False

    def sums(self, outputs: Value, targets: Value) -> Tensor:
        """Return the sums of one microbatch, a tensor [k] on the device of the outputs."""
        raise NotImplementedError

    def value(self, sums: Sequence[float], loss: float) -> float:
        """Return the metric, from the sums over all microbatches and the mean loss: by default a ratio."""
        return sums[0] / sums[1] if sums[1] else math.nan

    def text(self, value: float) -> str:
        """Format a value for people."""
        return f"{value:.2%}".replace("%", " %") if self.percent else f"{value:.4g}"


class Mean(Metric):
    """The mean over samples of a function that returns a microbatch's mean. `higher`: see Metric."""

    def __init__(self, name: str, function: MetricFunction, higher: bool | None = None) -> None:
        self.name = self.title = name
        self.higher = higher
        self._function = function

    def sums(self, outputs: Value, targets: Value) -> Tensor:
        device, n = _first(outputs).device, len(as_tuple(targets)[0])
        mean = torch.as_tensor(self._function(outputs, targets), dtype=torch.float64, device=device)
        if mean.dim():
            raise ValueError(f"it must return one number, not {list(mean.shape)}")
        return torch.stack([mean * n, torch.full_like(mean, n)])


class Accuracy(Metric):
    """The share of labels [n, ...] among the `top` highest scores; the classes lie along `axis`."""

    higher = True
    percent = True

    def __init__(self, ignore_index: int = -100, axis: int = 1, top: int = 1) -> None:
        self.name = "acc" if top == 1 else f"top{top}"
        self.title = "accuracy" if top == 1 else f"top{top}_accuracy"
        self._ignored = ignore_index
        self._axis = axis
        self._top = top

    def sums(self, outputs: Value, targets: Value) -> Tensor:
        scores, labels = _first(outputs), as_tuple(targets)[0]
        if labels.is_floating_point():  # probabilities of classes
            labels = labels.argmax(self._axis)
        if self._top == 1:
            hits = scores.argmax(self._axis) == labels
        else:
            best = scores.topk(min(self._top, scores.shape[self._axis]), self._axis).indices
            hits = (best == labels.unsqueeze(self._axis)).any(self._axis)
        counted = labels != self._ignored
        if self._ignored >= 0:  # otherwise no class is ignored, and none hits
            hits &= counted
        return torch.stack([hits, counted]).flatten(1).sum(1)


class Perplexity(Metric):
    """The exponential of the mean loss."""

    name, title = "ppl", "perplexity"
    higher = False

    def sums(self, outputs: Value, targets: Value) -> Tensor:
        return _first(outputs).new_empty(0)  # no sums; a view would keep the outputs in memory

    def value(self, sums: Sequence[float], loss: float) -> float:
        return math.exp(loss) if loss < 700 else math.inf if loss >= 700 else math.nan


class MeanIoU(Metric):
    """The mean over classes of intersection over union, of scores [n, classes, ...] and labels [n, ...].

    Classes that neither the labels nor the predictions have are left out.
    """

    name, title = "miou", "mean_iou"
    higher = True
    percent = True

    def __init__(self, ignore_index: int = -100) -> None:
        self._ignored = ignore_index

    def sums(self, outputs: Value, targets: Value) -> Tensor:
        scores, labels = _first(outputs), as_tuple(targets)[0]
        predicted, counted = scores.argmax(1), labels != self._ignored

        def count(classes: Tensor, where: Tensor) -> Tensor:  # bincount would make the host wait
            counts = where.new_zeros(scores.shape[1], dtype=torch.long)
            return counts.scatter_add_(0, (classes * where).flatten(), where.long().flatten())

        intersection = count(labels, counted & (predicted == labels))
        union = count(predicted, counted) + count(labels, counted) - intersection
        return torch.cat([intersection, union])

    def value(self, sums: Sequence[float], loss: float) -> float:
        classes = len(sums) // 2
        shares = [
            shared / union for shared, union in zip(sums[:classes], sums[classes:], strict=True) if union
        ]
        return sum(shares) / len(shares) if shares else math.nan


class SquaredError(Metric):
    """The mean squared error of outputs and targets of equal shape."""

    name, title = "mse", "squared_error"
    higher = False

    def sums(self, outputs: Value, targets: Value) -> Tensor:
        errors = (_first(outputs) - as_tuple(targets)[0]).double()
        return torch.stack([errors.square().sum(), errors.new_full((), errors.numel())])


def _first(outputs: Value) -> Tensor:
    return leaves_of(scores_of(outputs))[0]
