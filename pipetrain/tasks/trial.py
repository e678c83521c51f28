"""Tries a task before the start, on made-up outputs: what it cannot take is refused, and a wrong weight too.

What the pieces of a batch make, weighted, must be what the batch makes: the loss, and gradients, which show
wrong weights even where the losses of the pieces are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import pairwise

import torch
from torch import Tensor, nn

from pipetrain.errors import ConfigError, failing
from pipetrain.model.network import Network
from pipetrain.model.random_numbers import RngSnapshot, SameDraws
from pipetrain.model.results import LOSS, Results, add_gradients, difference
from pipetrain.model.specs import Value, ValueSpec, as_tuple, differentiable, leaves_of, on_each, specs_of
from pipetrain.tasks.running_sums import Tally
from pipetrain.tasks.task import IGNORED, Classification, ModelLoss, Task, WeightFunction, counted_for

MOST_TRIED = 2**25  # numbers in the made outputs of a trial
APART = (
    "a layer or the loss looks at several samples at once, as x - x.mean(0), a term over the batch or "
    "scale_grad_by_freq=True does, or the loss is no mean over what counts. Let each sample count for "
    "itself, and give weight=, a function of the targets that says what they count for; or set microbatches=1"
)
CHANGES = (
    "the loss is another one when it is computed again of the same samples, as one does that counts its "
    "calls, and here it is computed for each microbatch. Let the program set between two batches what shall "
    "change, or set microbatches=1"
)


def try_task(
    task: Task,
    outputs: ValueSpec,
    layer: str,
    targets: Value,
    classes: int | None,
    microbatches: int = 2,
    after_forward: bool = False,
) -> None:
    """Refuse a task that cannot take a model's outputs with these targets. Raises ConfigError.

    `outputs`: what the last `layer` returns, for any number of samples; `targets`: those of a few samples
    [n, ...]; `classes`: of the data set, None if unknown. The outputs are made up: numbers from 0 to 1, which
    a loss of probabilities takes too. Losses of pieces of the samples must add up to that of all, where a
    batch has several `microbatches`; of a model that computes its loss `choose_weight` tries that.
    `after_forward`: whether the loss has taken outputs of a forward, of which it may read more than these.
    """
    made_outputs, labels = _made_up(outputs, targets)
    scored = task.classes_of(outputs)
    if type(task) is Classification and _scores_come_last(made_outputs, labels):
        raise ConfigError(
            f"the model gives {outputs} (layer {layer}), the scores of each position, for targets of each: "
            f"choose task=language_modelling (in Python LanguageModelling()), as experiment=gpt does"
        )
    if classes is not None and scored is not None and scored < classes:
        raise ConfigError(
            f"the model gives {outputs} (layer {layer}), scores of {scored} classes, and the data set has "
            f"{classes}: give the last layer at least {classes} outputs"
        )
    if scored is not None and (label := task.label_beyond(scored, labels)) is not None:
        raise ConfigError(
            f"the targets have a label {label}, and the model gives {outputs} (layer {layer}), scores of "
            f"{scored} classes, 0 to {scored - 1}: number the classes from 0, give the last layer more "
            f"outputs, or let the loss ignore it, by ignore_index="
        )
    of = " + ".join(map(str, specs_of(as_tuple(labels))))
    where = f"task {task} cannot take the model's {outputs} (layer {layer}) with targets {of}"
    with failing(where):
        if isinstance(task, ModelLoss):
            task.loss(made_outputs, on_each(labels, Tensor.clone))
        else:
            _loss_tried(task, made_outputs, labels, microbatches, after_forward)
    names = ["loss", *(metric.name for metric in task.metrics)]
    for number, metric in enumerate(task.metrics, 1):
        with failing(f"metric {metric.name} of {where}"):
            if metric.name in names[:number]:
                raise ValueError(f"two values are named {metric.name}: give them different names")
            whole = metric.sums(made_outputs, labels)
            Task(metrics=[metric]).values(Tally(1.0, 1.0, 1, {metric.name: whole.tolist()}))
            n = len(as_tuple(labels)[0])
            bounds = pairwise(sorted({0, max(1, n // 3), n}))
            parts = [metric.sums(part_of(made_outputs, *ends), part_of(labels, *ends)) for ends in bounds]
            added = sum(parts, torch.zeros_like(whole, dtype=torch.float64))
            if not torch.allclose(whole.double(), added, rtol=1e-3, atol=1e-6, equal_nan=True):
                raise ConfigError(
                    f"metric {metric.name} of {n} samples is not what those of its parts add up to: a "
                    f"function must return a mean over samples; for another figure, such as F1, give a "
                    f"pipetrain.Metric, whose sums() add up and whose value() is computed of them"
                )


def _scores_come_last(scores: Value, labels: Value) -> bool:
    """Return whether scores are [n, t, classes] for labels [n, t], and cannot be [n, classes, t]."""
    if not (isinstance(scores, Tensor) and isinstance(labels, Tensor)) or labels.dim() < 2:
        return False
    shape = scores.shape
    return shape[:-1] == labels.shape and (shape[0], *shape[2:]) != labels.shape


def _made_up(outputs: ValueSpec, targets: Value) -> tuple[Value, Value]:
    """Return made-up outputs, and the targets, of so few samples that the outputs stay small."""
    first = next((spec.shape[0] for spec in outputs.specs if spec.shape), 1)
    numbers = sum(spec.numel for spec in outputs.specs if spec.shape) / first
    n = min(len(as_tuple(targets)[0]), max(2, int(MOST_TRIED / max(1, numbers))))
    generator, tensors = torch.Generator().manual_seed(0), []
    for spec in outputs.specs:
        shape = spec.shape and (n * spec.shape[0] // first, *spec.shape[1:])
        tensors.append(torch.rand(shape, generator=generator).to(spec.dtype))
    return outputs.pack(tuple(tensors)), part_of(targets, 0, n)


def spare(task: Task, model: nn.Module) -> Task:
    """Return a copy of a task, whose calls its loss does not count, if there can be one."""
    with suppress(Exception):  # a user's loss may hold anything
        return task.copied([*model.modules(), *model.parameters()])
    return task


def used_outputs(task: Task, outputs: ValueSpec, targets: Value) -> list[bool]:
    """Return which of a model's outputs get a gradient from the loss; all if it cannot take made-up ones."""
    made_outputs, labels = _made_up(outputs, targets)
    made_outputs = on_each(made_outputs, lambda t: t.requires_grad_(differentiable(t)))
    every = leaves_of(made_outputs)
    leaves = [t for t in every if t.requires_grad]
    try:
        grads = iter(torch.autograd.grad(task.loss(made_outputs, labels), leaves, allow_unused=True))
    except Exception:  # a user's loss may raise anything, which try_task says
        return [True] * len(every)
    return [t.requires_grad and next(grads) is not None for t in every]


def part_of(value: Value, start: int, end: int) -> Value:
    """Return a copy of some samples of a value, as a loss may write its targets."""
    return on_each(value, lambda t: (t[start:end] if t.dim() else t).clone())


def _loss_tried(
    task: Task, made_outputs: Value, labels: Value, microbatches: int, after_forward: bool
) -> None:
    """Refuse a loss that is not one number, that has weights, or that is no sum over samples."""
    modules = [module for module in vars(task).values() if isinstance(module, nn.Module)]
    for name in [name for of in modules for name, p in of.named_parameters() if p.requires_grad]:
        raise TypeError(
            f"its loss has a parameter {name}, which no stage would train: put it into a layer, or give it "
            f"requires_grad_(False)"
        )
    outputs = on_each(made_outputs, lambda t: t.detach().requires_grad_(differentiable(t)))
    try:
        losses = (
            task.loss(outputs, on_each(labels, Tensor.clone)),
            task.evaluation_loss(made_outputs, on_each(labels, Tensor.clone)),
        )
    except Exception:
        if after_forward:  # without one there is not yet what it reads of a layer
            return
        raise
    for loss in losses:
        if not isinstance(loss, Tensor) or loss.dim():
            returned = specs_of([loss])[0] if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(f"its loss must be a tensor of one number, the mean; it returns {returned}")
    leaves = {leaf: f"output {k}" for k, leaf in enumerate(leaves_of(outputs)) if leaf.requires_grad}

    def loss_of(start: int, end: int) -> Tensor:
        return task.loss(part_of(outputs, start, end), part_of(labels, start, end))

    if microbatches > 1 and (differs := pieces_differ(loss_of, task.weight, labels, leaves)):
        n = len(as_tuple(labels)[0])
        raise ConfigError(f"of {n} samples and made-up outputs {differs}")


def pieces_differ(
    loss_of: Callable[[int, int], Tensor],
    weight_of: WeightFunction,
    targets: Value,
    leaves: Mapping[Tensor, str],
) -> str:
    """Say how a loss or gradient of a batch is not that of its pieces, and why; "" if it is.

    `loss_of`: of samples from a number to another; `targets`: of the batch, tensors [n, ...]; `leaves`: the
    names of the tensors whose gradients count. What Python or NumPy draw cannot be the same in pieces, so
    nothing is compared then.
    """
    n, rng, total = len(as_tuple(targets)[0]), RngSnapshot(), counted_for(weight_of, targets)
    draws = SameDraws(n)

    def made_by(*bounds: int) -> Results:
        """Return the loss and the gradients that pieces of the batch make together."""
        results = Results()
        for start, end in pairwise(bounds):
            if share := counted_for(weight_of, part_of(targets, start, end)) / total if total else 0.0:
                with rng.replayed(), draws.for_samples(start, end):
                    loss = share * loss_of(start, end)
                    results[LOSS] = results.get(LOSS, 0) + loss.detach()
                    add_gradients(results, [loss], leaves)
                    if rng.drawn():
                        return {}
        return results

    def differs(*bounds: int) -> str:
        pieces = made_by(*bounds)
        if not pieces or not all(t.isfinite().all() for of in (whole, pieces) for t in of.values()):
            return ""
        unused = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
        return difference(whole, unused | pieces)

    whole = made_by(0, n)
    why = differs(0, n // 2, n)
    if not why:
        with suppress(Exception):  # a loss of pairs takes no odd number
            why = differs(0, max(1, n // 3), n)  # where halves count for as much
    return why and f"{why}, between the batch and its microbatches: {CHANGES if differs(0, n) else APART}"


# The loss that a model computes


def choose_weight(task: ModelLoss, network: Network, example: ValueSpec) -> None:
    """Find which labels count in the loss that a traced model computes. Raises ConfigError if it takes none.

    `example`: of the model's inputs.
    """
    names = example.names or ()
    if missing := [label for label in task.labels if label not in names]:
        shown = ", ".join(names) or "without names"
        raise ConfigError(
            f"the model's inputs are {shown}, and {missing[0]} is not among them: name the labels, by "
            f"targets= or on the command line task.labels="
        )
    task.ignored, task.shifted = network.labels(names.index(task.labels[0]), IGNORED)
