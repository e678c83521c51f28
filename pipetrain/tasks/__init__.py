"""What is learned: the loss, the weights of its targets, and the metrics.

A batch is cut into microbatches, so its loss is the mean of their losses, each weighted by its targets: the
number of samples, or of tokens that are not padding. `prove_task` tries this before the start.

A task of your own is a subclass of Task, or a loss function with metrics; see conf/task/.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipetrain.errors import ConfigError, TrainingStopped, one_line
from pipetrain.network.values import (
    TensorSpec,
    Value,
    ValueSpec,
    as_tuple,
    differentiable,
    leaves_of,
    on_each,
    scores_of,
    specs_of,
)
from pipetrain.tally import Tally
from pipetrain.tasks.metrics import Accuracy, Mean, MeanIoU, Metric, MetricFunction, Perplexity, SquaredError

__all__ = [
    "Accuracy",
    "Classification",
    "LanguageModelling",
    "Mean",
    "MeanIoU",
    "Metric",
    "ModelLoss",
    "Perplexity",
    "Regression",
    "Segmentation",
    "SquaredError",
    "Task",
    "prove_task",
]

LossFunction = Callable[[Value, Value], Tensor]
"""(outputs, targets) -> the mean loss over the targets that count, a scalar."""
WeightFunction = Callable[[Value], Tensor | float]
"""targets -> their weight: the number of those that count."""

IGNORED = -100  # PyTorch's default ignore_index: a target that does not count
MOST_TRIED = 2**25  # numbers in the made outputs of a trial
CPU = torch.device("cpu")


class Task:
    """A loss, the weight of its targets, and metrics. A subclass may override `loss` and `weight`.

    - `loss`: a function (outputs, targets) -> mean over the targets that count.
    - `metrics`: Metric objects, or functions (outputs, targets) -> mean by name, of which higher is better.
      The first one decides which epoch is best; without metrics the loss does.
    - `weight`: a function of targets -> how many count. By default all samples, and for torch's cross_entropy
      and nll_loss what these average over. Other losses need it if targets may be -100.
    """

    def __init__(
        self,
        loss: LossFunction | None = None,
        metrics: Sequence[Metric] | Mapping[str, MetricFunction] = (),
        weight: WeightFunction | None = None,
    ) -> None:
        self._loss = loss
        self._weight = weight or _weight_of(loss)
        self._weighted = weight is not None
        if isinstance(metrics, Mapping):
            metrics = [Mean(name, function) for name, function in metrics.items()]
        self.metrics = list(metrics)

    def __str__(self) -> str:
        """Return the name of the loss function, or of the class that has its own loss."""
        loss = self._loss.func if isinstance(self._loss, partial) else self._loss
        own = loss is None or type(self) is not Task
        return type(self).__name__ if own else getattr(loss, "__name__", type(loss).__name__)

    @property
    def is_own(self) -> bool:
        """Whether the loss or the weight is the user's own code."""
        loss = self._loss.func if isinstance(self._loss, partial) else self._loss
        code = type(self) if loss is None else loss
        known = str(getattr(code, "__module__", "")).startswith(("torch.nn.", "pipetrain.tasks"))
        return self._weighted or not known

    @property
    def counts_samples(self) -> bool:
        """Whether the weight is the number of samples, for want of another."""
        return self._weight is _samples and type(self).weight is Task.weight

    def to(self, device: torch.device) -> Task:
        """Move the modules and tensors of the task, such as class weights, to a device; return the task."""
        for name, held in vars(self).items():
            if isinstance(held, nn.Module | Tensor):
                setattr(self, name, held.to(device))
            elif isinstance(held, partial):
                values = held.keywords.items()
                moved = {key: t.to(device) if isinstance(t, Tensor) else t for key, t in values}
                setattr(self, name, partial(held.func, *held.args, **moved))
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
        """Return the weight of a microbatch's targets, which are in host memory."""
        return self._weight(targets)

    def classes_of(self, outputs: ValueSpec) -> int | None:
        """Return the number of classes that outputs score; None if they are no scores."""
        return None

    def prove(
        self, outputs: ValueSpec, layer: str, targets: Value, classes: int | None, microbatches: int = 2
    ) -> None:
        """Refuse outputs and targets that the task cannot take; see prove_task. Raises ConfigError."""
        prove_task(self, outputs, layer, targets, classes, microbatches)

    def values(self, tally: Tally) -> dict[str, float]:
        """Return each metric of a tally; NaN where the tally is empty."""
        return {metric.name: _value(metric, tally) for metric in self.metrics}

    def score(self, tally: Tally) -> float:
        """Return the number that compares epochs; higher is better."""
        if not self.metrics:
            return -tally.mean_loss
        value = self.values(tally)[self.metrics[0].name]
        return value if self.metrics[0].higher else -value


_HINTS = {  # by the dimensions of labels that do not fit
    2: "for tokens [n, t] there is task=language_modelling",
    3: "let the model enlarge its scores, or the data reduce its labels",
}


class Classification(Task):
    """Cross-entropy of scores [n, classes, ...] for labels int64 [n, ...], and accuracy."""

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
        """Return the cross-entropy without label smoothing."""
        return self._cross_entropy(outputs, targets, 0.0)

    def weight(self, targets: Value) -> Tensor | float:
        return _counting(targets, self._ignored)

    def classes_of(self, outputs: ValueSpec) -> int | None:
        shape = _scores(outputs).shape
        return shape[1] if len(shape) > 1 else None

    def _cross_entropy(self, outputs: Value, targets: Value, smoothing: float) -> Tensor:
        scores, labels = _tensor(outputs, "scores [n, classes]"), _tensor(targets, "labels")
        if not labels.is_floating_point() and scores.shape[2:] != labels.shape[1:]:
            raise ValueError(
                f"scores {list(scores.shape)} are for labels {[len(scores), *scores.shape[2:]]}, with the "
                f"classes along dimension 1 ({_HINTS.get(labels.dim(), _HINTS[2])})"
            )
        return functional.cross_entropy(scores, labels, ignore_index=self._ignored, label_smoothing=smoothing)


class Segmentation(Classification):
    """Classification of each pixel: scores [n, classes, h, w] for labels int64 [n, h, w]; mean IoU."""

    def __init__(self, label_smoothing: float = 0.0, ignore_index: int = IGNORED) -> None:
        super().__init__(label_smoothing, ignore_index, (MeanIoU(ignore_index), Accuracy(ignore_index)))


class LanguageModelling(Classification):
    """Cross-entropy of the next token: scores [n, t, vocabulary] for tokens int64 [n, t]; perplexity."""

    def __init__(self, label_smoothing: float = 0.0, ignore_index: int = IGNORED) -> None:
        super().__init__(label_smoothing, ignore_index, (Perplexity(), Accuracy(ignore_index, axis=-1)))

    def classes_of(self, outputs: ValueSpec) -> int | None:
        shape = _scores(outputs).shape
        return shape[-1] if shape else None

    def _cross_entropy(self, outputs: Value, targets: Value, smoothing: float) -> Tensor:
        scores, tokens = _tensor(outputs, "scores [n, t, vocabulary]"), _tensor(targets, "tokens [n, t]")
        if scores.shape[:-1] != tokens.shape:
            raise ValueError(f"scores {list(scores.shape)} need a target for each position")
        return super()._cross_entropy(scores.flatten(0, -2), tokens.flatten(), smoothing)


class Regression(Task):
    """Mean squared error of outputs and targets of equal shape [n, ...]."""

    def __init__(self) -> None:
        super().__init__(metrics=[SquaredError()])

    def loss(self, outputs: Value, targets: Value) -> Tensor:
        made, wanted = _tensor(outputs, "numbers"), _tensor(targets, "numbers")
        if made.shape != wanted.shape:  # mse_loss would broadcast them
            raise ValueError(f"outputs {list(made.shape)} and targets {list(wanted.shape)} differ in shape")
        return functional.mse_loss(made, wanted)


class ModelLoss(Task):
    """The loss that the model computes itself, as Hugging Face's do: its output `loss`, or the first one.

    `labels`: the names of the inputs that are the targets. By default those that are not -100 count, or, in a
    causal language model, those of them that follow another: tasks/trial.py tries which.
    """

    def __init__(
        self,
        labels: str | Sequence[str] = "labels",
        metrics: Sequence[Metric] | Mapping[str, MetricFunction] = (),
        weight: WeightFunction | None = None,
    ) -> None:
        super().__init__(None, metrics, weight)
        self.labels = (labels,) if isinstance(labels, str) else tuple(labels)
        self.weights = [weight] if weight else [_unmasked, _unmasked_after_the_first]
        """Candidates for `weight`; the first one is in use."""

    @property
    def is_own(self) -> bool:
        return True

    def loss(self, outputs: Value, targets: Value) -> Tensor:
        found: Any = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        loss = found[0] if isinstance(found, tuple | list) and found else found
        if not isinstance(loss, Tensor) or loss.dim():
            raise TypeError(
                "the model returns no loss, one number as `loss` or first of its outputs: let its inputs "
                "hold labels, or give a loss= of outputs and targets"
            )
        return loss

    def weight(self, targets: Value) -> Tensor | float:
        return self.weights[0](targets)

    def prove(
        self, outputs: ValueSpec, layer: str, targets: Value, classes: int | None, microbatches: int = 2
    ) -> None:
        """Refuse a model without a loss, and metrics that fail. Raises ConfigError."""
        given, wanted = _made_up(outputs, targets)
        _tried(self.loss, given, wanted, f"loss=model cannot use the outputs {outputs} (layer {layer})")
        _prove_metrics(self, given, wanted, f"the model's {outputs} (layer {layer})")


def _unmasked(targets: Value) -> Tensor | float:
    return _counting(targets, IGNORED)


def _unmasked_after_the_first(targets: Value) -> Tensor | float:
    """Return how many labels count where each is predicted from those before it."""
    return _counting(as_tuple(targets)[0][:, 1:], IGNORED)


def _tensor(value: Value, what: str) -> Tensor:
    value = scores_of(value)
    if not isinstance(value, Tensor):
        raise TypeError(f"{what} must be one tensor, not {len(value)} of them")
    return value


def _scores(outputs: ValueSpec) -> TensorSpec | Tensor:
    """Return what has the shape of the scores among a model's outputs; of no dimension if unknown."""
    unknown = TensorSpec((), torch.float32)
    if outputs.packing is None:
        return outputs.specs[0] if outputs.single else unknown
    packed = scores_of(outputs.pack(tuple(torch.empty(spec.shape, device="meta") for spec in outputs.specs)))
    return packed if isinstance(packed, Tensor) else unknown


def _counting(targets: Value, ignored: int) -> Tensor | float:
    """Return how many labels are not ignored; probabilities of classes count by the sample."""
    labels = as_tuple(targets)[0]
    return (labels != ignored).sum() if not labels.is_floating_point() else float(len(labels))


def counted_for(weight: WeightFunction, targets: Value) -> float:
    """Return the weight of targets. Raises ConfigError if it is no number, NaN, or negative."""
    made = weight(targets)
    try:
        number = float(made)
    except (TypeError, ValueError, RuntimeError):  # of what is no number, or several
        got = f"{specs_of([made])[0]}: sum it" if isinstance(made, Tensor) else type(made).__name__
    else:
        if number >= 0:
            return number
        got = str(number)
    raise ConfigError(
        f"weight(targets) must be one number that is not negative, what they count for together; got {got}"
    )


def _value(metric: Metric, tally: Tally) -> float:
    """Return a metric of a tally; NaN if it has counted nothing, even if the metric divides by that."""
    if metric.name not in tally.sums:
        return math.nan
    try:
        return metric.value(tally.sums[metric.name], tally.mean_loss)
    except ZeroDivisionError:
        return math.nan


def _samples(targets: Value) -> float:
    if any((t == IGNORED).any() for t in as_tuple(targets) if t.dtype == torch.int64):
        raise ValueError(
            f"targets of {IGNORED}, which losses of torch ignore, need a weight(targets): how many targets "
            f"the loss averages over"
        )
    return float(len(as_tuple(targets)[0]))


def _weight_of(loss: LossFunction | None) -> WeightFunction:
    """Return how a known loss of torch weights its targets; samples for any other."""
    options: Mapping[str, object] = {}
    function: object = loss
    if isinstance(loss, partial):
        function, options = loss.func, loss.keywords
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        function, options = functional.cross_entropy, vars(loss) | loss._buffers
    if function not in (functional.cross_entropy, functional.nll_loss):
        return _samples
    ignored, by_class = options.get("ignore_index", IGNORED), options.get("weight")
    assert isinstance(ignored, int)
    if not isinstance(by_class, Tensor):
        return lambda targets: _counting(targets, ignored)

    def weight(targets: Value) -> Tensor | float:
        labels = as_tuple(targets)[0]
        if labels.is_floating_point():  # torch does not average probabilities by class weights
            return float(len(labels))
        return by_class.cpu()[labels[labels != ignored].cpu()].sum()

    return weight


def prove_task(
    task: Task,
    outputs: ValueSpec,
    layer: str,
    targets: Value,
    classes: int | None,
    microbatches: int = 2,
) -> None:
    """Refuse a task that cannot take a model's outputs with these targets. Raises ConfigError.

    `outputs`: what the last `layer` returns, for any number of samples; `targets`: those of a few
    samples [n, ...]; `classes`: of the data set, None if unknown. The outputs are made up: numbers from 0
    to 1, which a loss of probabilities takes too. Losses of parts of the samples must add up to that of all,
    where a batch has several `microbatches`.
    """
    given, wanted = _made_up(outputs, targets)
    where = (
        f"task {task} cannot take the model's {outputs} (layer {layer}) with targets "
        f"{' + '.join(map(str, specs_of(as_tuple(wanted))))}"
    )
    # Label 0, which every model has, as a wrong number of classes has an error of its own.
    form = on_each(wanted, lambda t: t if t.is_floating_point() else torch.zeros_like(t))
    _tried(task.loss, given, form, where)
    known = task.classes_of(outputs)
    if classes is not None and known is not None and known < classes:
        raise ConfigError(
            f"the model gives {outputs} (layer {layer}), scores of {known} classes, and the data set has "
            f"{classes}: give the last layer at least {classes} outputs"
        )
    _prove_loss(task, given, wanted, where)
    _tried(lambda _, some: counted_for(task.weight, some), given, wanted, where)
    _prove_metrics(task, given, wanted, where)
    if microbatches > 1:
        prove_sum(f"task {task}", task.loss, task.weight, given, wanted)


def prove_batch(task: Task, outputs: ValueSpec, targets: Value, device: torch.device) -> None:
    """Refuse a loss that those of parts of a batch do not add up to: of its `targets`, in host memory.

    What counts, such as padding, may first show in a later batch. Raises TrainingStopped.
    """
    given, wanted = _made_up(outputs, targets)
    try:
        prove_sum(f"task {task}", task.loss, task.weight, given, wanted, device)
    except ConfigError as error:
        raise TrainingStopped(str(error)) from error


def _made_up(outputs: ValueSpec, targets: Value) -> tuple[Value, Value]:
    """Return made-up outputs of a few samples, and their targets."""
    n = few(outputs, targets)
    first = _samples_of(outputs)
    generator = torch.Generator().manual_seed(0)
    shapes = [spec.shape and (n * spec.shape[0] // first, *spec.shape[1:]) for spec in outputs.specs]
    made = tuple(
        torch.rand(shape, generator=generator).to(spec.dtype)
        for shape, spec in zip(shapes, outputs.specs, strict=True)
    )
    return outputs.pack(made), _part(targets, 0, n)


def few(outputs: ValueSpec, targets: Value) -> int:
    """Return how many of the samples of targets are to be tried."""
    n = len(as_tuple(targets)[0])
    per_sample = sum(spec.numel for spec in outputs.specs if spec.shape) / _samples_of(outputs)
    return max(min(n, int(MOST_TRIED / max(1, per_sample))), min(n, 2))


def _samples_of(outputs: ValueSpec) -> int:
    """Return the first dimension of the first output that has one."""
    return next((spec.shape[0] for spec in outputs.specs if spec.shape), 1)


def prove_sum(
    what: str,
    loss_of: LossFunction,
    weight_of: WeightFunction,
    given: Value,
    wanted: Value,
    device: torch.device = CPU,
) -> None:
    """Refuse a loss that those of parts of the samples do not add up to, or their gradients.

    `given`, `wanted`: outputs and targets [n, ...]. Gradients show wrong weights even where the losses of the
    parts are alike. Raises ConfigError.
    """
    n = len(as_tuple(wanted)[0])
    weight = counted_for(weight_of, wanted)
    if n < 2 or not weight:
        return
    whole, *slopes = _sloped(loss_of, given, wanted, device)
    if not whole.isfinite():
        return
    sums = [torch.zeros_like(tensor) for tensor in (whole, *slopes)]
    parts = min(8, max(2, n // 2))
    ends = [n * part // parts for part in range(parts + 1)]
    for start, end in pairwise(ends):
        part, targets = _part(given, start, end), _part(wanted, start, end)
        if share := counted_for(weight_of, targets) / weight:
            loss, *some = _sloped(loss_of, part, targets, device)
            sums[0] += share * loss
            for total, slope in zip(sums[1:], some, strict=True):
                (total[start:end] if total.dim() else total).add_(slope, alpha=share)
    eps = max(torch.finfo(tensor.dtype).eps for tensor in sums)
    for one, other in zip((whole, *slopes), sums, strict=True):
        scale = max(1e-3 if one is whole else 0.0, float(one.abs().nan_to_num(0, 0).max()))
        if not torch.allclose(one, other, rtol=0, atol=10 * math.sqrt(eps) * scale, equal_nan=True):
            raise ConfigError(
                f"the loss of {what} over {n} samples is {float(whole):.6g}, and the mean over its "
                f"microbatches, weighted by weight(targets), is another, or its gradient: let it be a mean "
                f"over what counts (not a sum, and without a term between samples), and give weight=, a "
                f"function of the targets that says what they count for; or set microbatches=1"
            )


def _sloped(loss_of: LossFunction, given: Value, wanted: Value, device: torch.device) -> list[Tensor]:
    """Return a loss, and its gradients for the outputs that can have one."""
    outputs = on_each(given, lambda t: t.to(device).detach().requires_grad_(differentiable(t)))
    loss = loss_of(outputs, on_each(wanted, lambda t: t.to(device)))
    leaves = [t for t in leaves_of(outputs) if t.requires_grad]
    slopes = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return [loss.detach(), *slopes]


def _prove_loss(task: Task, given: Value, wanted: Value, where: str) -> None:
    """Refuse a loss that is not one number with a gradient for the outputs alone."""
    outputs = on_each(given, lambda t: t.detach().requires_grad_(differentiable(t)))
    whole = _tried(task.loss, outputs, wanted, where)
    for loss in (whole, _tried(task.evaluation_loss, given, wanted, where)):
        if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
            returned = specs_of([loss])[0] if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(
                f"the loss of task {task} must be one number in a tensor, the mean over what counts; it "
                f"returns {returned}"
            )
    if not whole.requires_grad:
        raise ConfigError(
            f"the loss of task {task} has no gradient with respect to the outputs: compute it from them by "
            f"differentiable operations, without detach() or item()"
        )
    ours = {id(t) for t in leaves_of(outputs)}
    if others := [leaf for leaf in _leaves(whole) if id(leaf) not in ours]:
        raise ConfigError(
            f"the loss of task {task} has a gradient for a {specs_of(others)[0]} that is not among the "
            f"model's outputs, which no stage would train: put it into a layer, give it "
            f"requires_grad_(False), or leave a penalty of weights to the optimizer's weight_decay"
        )


def _leaves(root: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that a backward of `root` would give a gradient."""
    nodes, met = [root.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in met:
            met.add(node)
            if isinstance(leaf := getattr(node, "variable", None), Tensor):
                yield leaf
            nodes += [following for following, _ in node.next_functions]


def _prove_metrics(task: Task, given: Value, wanted: Value, where: str) -> None:
    """Refuse metrics that fail, or whose names are taken."""
    names = Counter(["loss", *(metric.name for metric in task.metrics)])
    if taken := [name for name, count in names.items() if count > 1]:
        raise ConfigError(f"task {task} has two values named {taken[0]}: give its metrics different names")
    for metric in task.metrics:
        of = f"metric {metric.name} of {where}"
        sums = _tried(metric.sums, given, wanted, of)
        if not isinstance(sums, Tensor) or sums.dim() != 1:
            raise ConfigError(f"metric {metric.name} of task {task} must return sums, a tensor [k]")
        tally = Tally(1.0, 1.0, 1, {metric.name: sums.tolist()})
        _tried(lambda *_, metric=metric, tally=tally: _value(metric, tally), given, wanted, of)


def _tried(call: Callable[[Value, Value], Any], outputs: Value, targets: Value, where: str) -> Any:
    try:
        return call(outputs, targets)
    except ConfigError:
        raise
    except Exception as error:  # a user's function may raise anything
        raise ConfigError(f"{where}: {one_line(error) or type(error).__name__}") from error


def _part(value: Value, start: int, end: int) -> Value:
    return on_each(value, lambda t: t[start:end] if t.dim() else t)
