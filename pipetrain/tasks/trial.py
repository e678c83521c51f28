"""Tries a task before the start, on made-up outputs: what it cannot take is refused, and a wrong weight too.

The losses of parts of a batch, weighted, must make up that of the batch, and so must their gradients: they
show wrong weights even where the losses of the parts are alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor

from pipetrain.errors import ConfigError, one_line
from pipetrain.network.network import INPUT, Made, Part, evaluating
from pipetrain.network.values import Value, ValueSpec, as_tuple, differentiable, leaves_of, on_each, specs_of
from pipetrain.tally import Tally
from pipetrain.tasks.metrics import Metric
from pipetrain.tasks.task import IGNORED, LossFunction, ModelLoss, Task, WeightFunction, counted_for

MOST_TRIED = 2**25  # numbers in the made outputs of a trial
CPU = torch.device("cpu")


def prove_task(
    task: Task,
    outputs: ValueSpec,
    layer: str,
    targets: Value,
    classes: int | None,
    microbatches: int = 2,
) -> None:
    """Refuse a task that cannot take a model's outputs with these targets. Raises ConfigError.

    `outputs`: what the last `layer` returns, for any number of samples; `targets`: those of a few samples
    [n, ...]; `classes`: of the data set, None if unknown. The outputs are made up: numbers from 0 to 1, which
    a loss of probabilities takes too. Losses of parts of the samples must add up to that of all, where a
    batch has several `microbatches`; ModelTrial tries that of a model that computes its loss.
    """
    given, wanted = _made_up(outputs, targets)
    known = task.classes_of(outputs)
    if classes is not None and known is not None and known < classes:
        raise ConfigError(
            f"the model gives {outputs} (layer {layer}), scores of {known} classes, and the data set has "
            f"{classes}: give the last layer at least {classes} outputs"
        )
    of = " + ".join(map(str, specs_of(as_tuple(wanted))))
    where = f"task {task} cannot take the model's {outputs} (layer {layer}) with targets {of}"
    with _said_of(where):
        if isinstance(task, ModelLoss):
            task.loss(given, wanted)
        else:
            _prove_loss(task, given, wanted)
            if microbatches > 1:
                prove_sum(f"task {task}", task.loss, task.weight, given, wanted)
    names = ["loss", *(metric.name for metric in task.metrics)]
    for number, metric in enumerate(task.metrics, 1):
        with _said_of(f"metric {metric.name} of {where}"):
            if metric.name in names[:number]:
                raise ValueError(f"two values are named {metric.name}: give them different names")
            sums = metric.sums(given, wanted)
            Task(metrics=[metric]).values(Tally(1.0, 1.0, 1, {metric.name: sums.tolist()}))
            _prove_metric(metric, given, wanted, sums.double())


def _prove_metric(metric: Metric, given: Value, wanted: Value, whole: Tensor) -> None:
    """Refuse a metric whose sums over parts of the samples are not those over all. Raises ConfigError."""
    n = len(as_tuple(wanted)[0])
    bounds = sorted({0, max(1, n // 3), n})
    parts = [metric.sums(part_of(given, *ends), part_of(wanted, *ends)) for ends in pairwise(bounds)]
    if not torch.allclose(whole, sum(parts, torch.zeros_like(whole)), rtol=1e-3, atol=1e-6, equal_nan=True):
        raise ConfigError(
            f"metric {metric.name} of {n} samples is not what those of its parts add up to: a function must "
            f"return a mean over samples; for another figure, such as F1, give a pipetrain.Metric, whose "
            f"sums() add up and whose value() is computed of them"
        )


@contextmanager
def _said_of(where: str) -> Iterator[None]:
    """Say what fails in a trial, where a user's function may raise anything, in one sentence."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{where}: {one_line(error) or type(error).__name__}") from error


def _made_up(outputs: ValueSpec, targets: Value) -> tuple[Value, Value]:
    n, first = few(outputs, targets), _samples_of(outputs)
    generator, made = torch.Generator().manual_seed(0), []
    for spec in outputs.specs:
        shape = spec.shape and (n * spec.shape[0] // first, *spec.shape[1:])
        made.append(torch.rand(shape, generator=generator).to(spec.dtype))
    return outputs.pack(tuple(made)), part_of(targets, 0, n)


def few(outputs: ValueSpec, targets: Value) -> int:
    """Return how many of the samples of targets are to be tried."""
    n = len(as_tuple(targets)[0])
    per_sample = sum(spec.numel for spec in outputs.specs if spec.shape) / _samples_of(outputs)
    return max(min(n, int(MOST_TRIED / max(1, per_sample))), min(n, 2))


def _samples_of(outputs: ValueSpec) -> int:
    """Return the first dimension of the first output that has one."""
    return next((spec.shape[0] for spec in outputs.specs if spec.shape), 1)


def part_of(value: Value, start: int, end: int) -> Value:
    """Return some samples of a value."""
    return on_each(value, lambda t: t[start:end] if t.dim() else t)


def prove_sum(
    what: str,
    loss_of: LossFunction,
    weight_of: WeightFunction,
    given: Value,
    wanted: Value,
    device: torch.device = CPU,
) -> None:
    """Refuse a loss that those of parts of the samples do not add up to, or their gradients.

    `given`, `wanted`: outputs and targets [n, ...]. Raises ConfigError.
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
    for start, end in pairwise(n * part // parts for part in range(parts + 1)):
        some, targets = part_of(given, start, end), part_of(wanted, start, end)
        if share := counted_for(weight_of, targets) / weight:
            loss, *own = _sloped(loss_of, some, targets, device)
            sums[0] += share * loss
            for total, slope in zip(sums[1:], own, strict=True):
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


def _prove_loss(task: Task, given: Value, wanted: Value) -> None:
    """Refuse a loss that is not one number with a gradient for the outputs alone."""
    outputs = on_each(given, lambda t: t.detach().requires_grad_(differentiable(t)))
    whole = task.loss(outputs, wanted)
    for loss in (whole, task.evaluation_loss(given, wanted)):
        if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
            returned = specs_of([loss])[0] if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(f"its loss must be a tensor of one number, the mean; it returns {returned}")
    if not whole.requires_grad:
        raise TypeError("its loss has no gradient with respect to the outputs, as after detach() or item()")
    ours = {id(t) for t in leaves_of(outputs)}
    if others := [leaf for leaf in _leaves(whole) if id(leaf) not in ours]:
        raise TypeError(
            f"its loss has a gradient for a {specs_of(others)[0]} that is not among the outputs, which no "
            f"stage would train: put it into a layer, or give it requires_grad_(False)"
        )
    counted_for(task.weight, wanted)


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


class ModelTrial:
    """Tries the loss that a model computes itself, by its last layer with made-up inputs. `part`: its layers.

    What its labels count for cannot be read from the model: a causal language model leaves out the first of
    each sequence, others do not. Wrong weights would train otherwise than one process does, so the loss of a
    batch, and its gradients, must be those of its parts.

    `example`: of the model's inputs; `microbatches`: of a batch.
    """

    def __init__(
        self,
        task: ModelLoss,
        example: ValueSpec,
        microbatches: int,
        part: Part,
        device: torch.device,
    ) -> None:
        layer, names = part.last_layer(), example.names or ()
        if layer is None:
            raise ConfigError(
                "an nn.Sequential takes no labels beside its inputs: give a loss= of outputs and targets, or "
                "a model of another class that takes them by name"
            )
        if missing := [label for label in task.labels if label not in names]:
            known = ", ".join(names) or "without names"
            raise ConfigError(
                f"the model's inputs are {known}, and {missing[0]} is not among them: name the labels, by "
                f"targets= or on the command line task.labels="
            )
        self._task = task
        self._microbatches = microbatches
        self._part = part
        self._device = device
        self._layer = layer
        numbers = [names.index(label) for label in task.labels]
        self._labels = {Made(INPUT, number): example.specs[number] for number in numbers}
        others = (value for value in layer.takes if value not in self._labels)
        self._by_sample = [value for value in others if layer.spec(value, 2) != layer.spec(value, 3)]
        self._filled = 0  # with what whole numbers are made up

    def settle(self) -> None:
        """Find what the labels of sequences count for. Raises ConfigError if none of the weights is right."""
        first, *others = (torch.zeros((2, *spec.shape), dtype=spec.dtype) for spec in self._labels.values())
        if len(self._task.weights) == 1 or first.is_floating_point() or first.dim() < 2 or first.shape[1] < 2:
            return
        first[:, 2:] = first[1, 0] = IGNORED  # the first label of the first sequence counts, or does not
        wanted = (first, *others) if others else first
        refused: Exception
        for filled in (0, 1):
            self._filled = filled
            for weight in self._task.weights:
                try:
                    if self._loss(self._made_up(2), wanted).isfinite():
                        prove_sum("the model", self._loss, weight, self._made_up(2), wanted, self._device)
                        self._task.weights = [weight]
                        return
                    refused = ValueError("it is not finite")
                except Exception as error:  # the model's code may raise anything
                    refused = error
        if self._microbatches == 1:  # nothing is added up
            return
        raise ConfigError(
            f"the loss that the model computes is no mean over labels that are not {IGNORED}, nor over those "
            f"after the first of each sequence: give weight=, a function of the labels that says what they "
            f"count for ({one_line(refused)})"
        )

    def _made_up(self, samples: int) -> tuple[Tensor, ...]:
        made = tuple(self._tensor(value, samples) for value in self._by_sample)
        return made or (torch.zeros(samples),)

    def _tensor(self, value: Made, samples: int) -> Tensor:
        spec = self._layer.spec(value, samples)
        if spec.dtype.is_floating_point:
            generator = torch.Generator().manual_seed(value.layer * 1000 + value.number + 2000)
            return torch.rand(spec.shape, generator=generator).to(self._device, spec.dtype)
        return torch.full(spec.shape, self._filled, dtype=spec.dtype, device=self._device)

    def _loss(self, given: Value, wanted: Value) -> Tensor:
        known = dict(
            zip([*self._labels, *self._by_sample], (*as_tuple(wanted), *as_tuple(given)), strict=False)
        )
        tensors = [
            known[value].to(self._device) if value in known else self._tensor(value, 1)
            for value in self._layer.takes
        ]
        with evaluating(self._part), torch.enable_grad():
            return self._task.loss(self._layer.run(tensors), wanted)
