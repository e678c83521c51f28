"""Tasks: a loss, the weight of its targets, and metrics.

A batch is cut into microbatches, so its loss is the mean of their losses, each weighted by its targets: the
number of samples, or of tokens that are not padding. tasks/trial.py checks this before the start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipetrain.errors import ConfigError, TrainingStopped
from pipetrain.model.specs import Value, ValueSpec, as_tuple, scores_of, specs_of
from pipetrain.tasks.metrics import Accuracy, Mean, MeanIoU, Metric, MetricFunction, Perplexity, SquaredError
from pipetrain.tasks.running_sums import Tally

LossFunction = Callable[[Value, Value], Tensor]
"""(outputs, targets) -> the mean loss over the targets that count, a scalar."""
WeightFunction = Callable[[Value], Tensor | float]
"""targets -> their weight: the number of those that count."""

IGNORED = -100  # PyTorch's default ignore_index: a target that does not count


class Task:
    """A loss, the weight of its targets, and metrics. A subclass may override `loss` and `weight`.

    - `loss`: a function (outputs, targets) -> mean over the targets that count.
    - `metrics`: Metric objects, or functions (outputs, targets) -> mean over samples by name. The first
      metric that defines whether higher is better decides which epoch is best; without one, the loss does.
    - `weight`: a function of targets -> how many count. By default all samples, and for torch's cross_entropy
      and nll_loss the number that these average over. Other losses need it if targets may be -100.
    """

    _axis = 1  # of the classes, if outputs are scores

    def __init__(
        self,
        loss: LossFunction | None = None,
        metrics: Sequence[Metric] | Mapping[str, MetricFunction] = (),
        weight: WeightFunction | None = None,
    ) -> None:
        options = _cross_entropy_options(loss)
        self._loss = loss
        self._weight = weight or (_samples if options is None else _weight_of(options))
        # The label that does not count; None if targets are not known to be labels of classes.
        self._ignored: int | None = None if options is None else options.get("ignore_index", IGNORED)
        if isinstance(metrics, Mapping):
            metrics = [Mean(name, function) for name, function in metrics.items()]
        self.metrics = list(metrics)

    @property
    def function(self) -> Any:
        """The loss function, without bound arguments; None for a class with its own loss."""
        return self._loss.func if isinstance(self._loss, partial) else self._loss

    @property
    def _code(self) -> Any:
        """The loss function, or the class with its own loss."""
        return type(self) if self.function is None or type(self) is not Task else self.function

    def __str__(self) -> str:
        return str(getattr(self._code, "__name__", type(self._code).__name__))

    @property
    def is_known(self) -> bool:
        """Whether the loss is torch's or ours: a mean over the targets that count, of nothing else."""
        return str(self._code.__module__).partition(".")[0] in ("torch", __name__.partition(".")[0])

    @property
    def counts_samples(self) -> bool:
        """Whether the weight is the number of samples, by default."""
        return self._weight is _samples and type(self).weight is Task.weight

    def copied(self, shared: Iterable[object] = ()) -> Task:
        """Return a copy with its own state; `shared` objects and a module's parameters are not copied.

        Raises what deepcopy raises, and TypeError for a method, which would be copied with its whole object.
        """
        loss = self.function
        values = (*vars(self).values(), *getattr(loss, "__dict__", {}).values())
        frozen = (p for value in values if isinstance(value, nn.Module) for p in value.parameters())
        memo: dict[int, Any] = {id(item): item for item in (*shared, *frozen)}
        if isinstance(loss, MethodType):
            raise TypeError("a method is not copied")
        if isinstance(loss, FunctionType):  # with its own variables
            cells = tuple(CellType(cell.cell_contents) for cell in loss.__closure__ or ())
            memo[id(loss)] = FunctionType(
                loss.__code__, {**loss.__globals__}, loss.__name__, loss.__defaults__, cells
            )
            memo[id(loss)].__kwdefaults__ = loss.__kwdefaults__
        return deepcopy(self, memo)

    def to(self, device: torch.device) -> Task:
        """Move the modules and tensors of the task, such as class weights, to a device; return the task."""
        for name, value in vars(self).items():
            if isinstance(value, nn.Module | Tensor):
                setattr(self, name, value.to(device))
            elif isinstance(value, partial):
                values = value.keywords.items()
                moved = {key: t.to(device) if isinstance(t, Tensor) else t for key, t in values}
                setattr(self, name, partial(value.func, *value.args, **moved))
        return self

    def loss(self, outputs: Value, targets: Value) -> Tensor:
        """Return the mean loss over the targets that count, a scalar."""
        if self._loss is None:
            raise NotImplementedError(f"{self} has no loss: give one, or override loss()")
        return self._loss(outputs, targets)

    def evaluation_loss(self, outputs: Value, targets: Value) -> Tensor:
        """Return the loss of an evaluation: by default that of training."""
        return self.loss(outputs, targets)

    def weight(self, targets: Value) -> Tensor | float:
        """Return the weight of a microbatch's targets, in host memory."""
        return self._weight(targets)

    def classes_of(self, outputs: ValueSpec) -> int | None:
        """Return the number of classes that outputs score; None if they are not scores."""
        scores = scores_of(outputs.pack(tuple(torch.empty(t.shape, device="meta") for t in outputs.specs)))
        if self._ignored is None or not isinstance(scores, Tensor) or scores.dim() < 2:
            return None
        return scores.shape[self._axis]

    def label_beyond(self, classes: int, targets: Value) -> int | None:
        """Return a label that counts but is not below `classes`, if there is one."""
        labels = as_tuple(targets)[0]
        wrong = (labels != self._ignored) & ((labels < 0) | (labels >= classes))
        return int(labels[wrong][0]) if not labels.is_floating_point() and wrong.any() else None

    def values(self, tally: Tally) -> dict[str, float]:
        """Return each metric of a tally; NaN if nothing was counted, even if its value divides by that."""
        values = {metric.name: math.nan for metric in self.metrics}
        for metric in self.metrics:
            if metric.name in tally.sums:
                with suppress(ZeroDivisionError):
                    values[metric.name] = metric.value(tally.sums[metric.name], tally.mean_loss)
        return values

    @property
    def deciding(self) -> Metric | None:
        """The metric that decides which epoch is best; None: the loss does."""
        return next((metric for metric in self.metrics if metric.higher is not None), None)

    def score(self, tally: Tally) -> float:
        """Return the number that compares epochs; higher is better."""
        if (metric := self.deciding) is None:
            return -tally.mean_loss
        value = self.values(tally)[metric.name]
        return value if metric.higher else -value


class Classification(Task):
    """Cross-entropy of scores [n, classes, ...] for labels int64 [n, ...], and accuracy."""

    _ignored: int

    def __init__(
        self,
        label_smoothing: float = 0.0,
        ignore_index: int = IGNORED,
        metrics: Sequence[Metric] | None = None,
    ) -> None:
        super().__init__(metrics=[Accuracy(ignore_index)] if metrics is None else metrics)
        self._smoothing = label_smoothing
        self._ignored = ignore_index

    def loss(self, outputs: Value, targets: Value) -> Tensor:
        return self._cross_entropy(outputs, targets, self._smoothing)

    def evaluation_loss(self, outputs: Value, targets: Value) -> Tensor:
        return self._cross_entropy(outputs, targets, 0.0)

    def weight(self, targets: Value) -> Tensor | float:
        return _counting(targets, self._ignored)

    def _cross_entropy(self, outputs: Value, targets: Value, smoothing: float) -> Tensor:
        scores, labels = _tensor(outputs, "scores [n, classes]"), _tensor(targets, "labels")
        return functional.cross_entropy(scores, labels, ignore_index=self._ignored, label_smoothing=smoothing)


class Segmentation(Classification):
    """Classification of each pixel: scores [n, classes, h, w] for labels int64 [n, h, w]; mean IoU."""

    def __init__(self, label_smoothing: float = 0.0, ignore_index: int = IGNORED) -> None:
        super().__init__(label_smoothing, ignore_index, (MeanIoU(ignore_index), Accuracy(ignore_index)))


class LanguageModelling(Classification):
    """Cross-entropy of the next token: scores [n, t, vocabulary] for tokens int64 [n, t]; perplexity."""

    _axis = -1

    def __init__(self, label_smoothing: float = 0.0, ignore_index: int = IGNORED) -> None:
        super().__init__(label_smoothing, ignore_index, (Perplexity(), Accuracy(ignore_index, axis=-1)))

    def _cross_entropy(self, outputs: Value, targets: Value, smoothing: float) -> Tensor:
        scores, tokens = _tensor(outputs, "scores [n, t, vocabulary]"), _tensor(targets, "tokens [n, t]")
        if scores.dim() < 3 or scores.shape[:-1] != tokens.shape:
            advice = "; of one label a sample, choose task=classification" if scores.dim() == 2 else ""
            raise ValueError(
                f"scores {list(scores.shape)} need a target for each of several positions{advice}"
            )
        return super()._cross_entropy(scores.flatten(0, -2), tokens.flatten(), smoothing)


class Regression(Task):
    """Mean squared error of outputs and targets of equal shape [n, ...]."""

    def __init__(self) -> None:
        super().__init__(metrics=[SquaredError()])

    def loss(self, outputs: Value, targets: Value) -> Tensor:
        numbers, expected = _tensor(outputs, "numbers"), _tensor(targets, "numbers")
        if numbers.shape != expected.shape:  # mse_loss would broadcast them
            raise ValueError(
                f"outputs {list(numbers.shape)} and targets {list(expected.shape)} differ in shape"
            )
        return functional.mse_loss(numbers, expected)


class ModelLoss(Task):
    """The loss that the model computes itself, as Hugging Face's do: its output `loss`, or the first one.

    `labels`: the names of the inputs that are the targets. By default those count that the model's
    cross-entropy does not ignore (-100), in a causal language model without the first of each sequence, as
    found in the model's trace, see choose_weight in tasks/trial.py.
    """

    def __init__(
        self,
        labels: str | Sequence[str] = "labels",
        metrics: Sequence[Metric] | Mapping[str, MetricFunction] = (),
        weight: WeightFunction | None = None,
    ) -> None:
        super().__init__(None, metrics, weight or self._counted)
        self.labels = (labels,) if isinstance(labels, str) else tuple(labels)
        self.ignored, self.shifted = IGNORED, False

    def loss(self, outputs: Value, targets: Value) -> Tensor:
        loss: Any = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        loss = loss[0] if isinstance(loss, tuple | list) and loss else loss
        if not isinstance(loss, Tensor) or loss.dim():
            raise TypeError(
                "the model returns no loss, one number as `loss` or first of its outputs: let its inputs "
                "hold labels, or give a loss= of outputs and targets"
            )
        return loss

    def _counted(self, targets: Value) -> Tensor | float:
        labels = as_tuple(targets)[0]
        return _counting(labels[:, 1:] if self.shifted else labels, self.ignored)


def counted_for(weight: WeightFunction, targets: Value) -> float:
    """Return the weight of targets. Raises ConfigError if it is not a number, NaN, or negative."""
    counts = weight(targets)
    got = f"{specs_of([counts])[0]}: sum it" if isinstance(counts, Tensor) else type(counts).__name__
    with suppress(TypeError, ValueError, RuntimeError):  # no number, or several
        number = float(counts)
        got = str(number)
        if number >= 0:
            return number
    raise ConfigError(
        f"weight(targets) must be one number that is not negative, what they count for together; got {got}"
    )


def _counting(targets: Value, ignored: int) -> Tensor | float:
    """Return how many labels are not ignored; probabilities of classes count per sample."""
    labels = as_tuple(targets)[0]
    return (labels != ignored).sum() if not labels.is_floating_point() else float(len(labels))


def _samples(targets: Value) -> float:
    if any((t == IGNORED).any() for t in as_tuple(targets) if t.dtype == torch.int64):
        raise TrainingStopped(
            f"targets of {IGNORED}, which losses of torch ignore, need a weight(targets): how many targets "
            f"the loss averages over"
        )
    return float(len(as_tuple(targets)[0]))


def _cross_entropy_options(loss: LossFunction | None) -> Mapping[str, Any] | None:
    """Return the options of torch's cross_entropy or nll_loss; None for any other loss."""
    options: Mapping[str, Any] = {}
    function: object = loss
    if isinstance(loss, partial):
        function, options = loss.func, loss.keywords
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        function, options = functional.cross_entropy, vars(loss) | loss._buffers
    return options if function in (functional.cross_entropy, functional.nll_loss) else None


def _weight_of(options: Mapping[str, Any]) -> WeightFunction:
    """Return how a cross-entropy with these options weights its targets."""
    ignored, by_class = options.get("ignore_index", IGNORED), options.get("weight")

    def weight(targets: Value) -> Tensor | float:
        labels = as_tuple(targets)[0]
        # torch does not average probabilities by class weights.
        if not isinstance(by_class, Tensor) or labels.is_floating_point():
            return _counting(labels, ignored)
        return by_class.cpu()[labels[labels != ignored].cpu()].sum()

    return weight


def _tensor(value: Value, what: str) -> Tensor:
    value = scores_of(value)
    if not isinstance(value, Tensor):
        raise TypeError(f"{what} must be one tensor, not {len(value)} of them")
    return value
