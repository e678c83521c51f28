"""Tasks: what counts, so that microbatches make up their batch; and what is refused before the start."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipetrain.errors import ConfigError
from pipetrain.network.values import TensorSpec, Value, ValueSpec
from pipetrain.tally import Tally
from pipetrain.tasks import (
    Accuracy,
    Classification,
    LanguageModelling,
    Mean,
    Metric,
    Regression,
    Segmentation,
    SquaredError,
    Task,
    prove_task,
)

IGNORED = -100
PARTS = (1, 4, 2)
CLASS_WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


def labels(*shape: int, classes: int = 4) -> Tensor:
    """Labels, some of them ignored: all in the first of the parts, few in the others."""
    made = torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(2))
    made[0] = made[3] = IGNORED
    if len(shape) > 1:
        made[4:, ..., 0] = IGNORED
    return made


# What counts


@pytest.mark.parametrize(
    ("task", "outputs", "targets", "plain"),
    [
        (Classification(), randn(7, 4), labels(7), functional.cross_entropy),
        (Classification(ignore_index=2), randn(7, 4), labels(7).clamp(min=0), None),
        (Classification(label_smoothing=0.3), randn(7, 4), labels(7), None),
        (Segmentation(), randn(7, 4, 2, 3), labels(7, 2, 3), functional.cross_entropy),
        (
            LanguageModelling(),
            randn(7, 5, 4),
            labels(7, 5),
            lambda scores, tokens: functional.cross_entropy(scores.mT, tokens),
        ),
        (Regression(), randn(7, 4), randn(7, 4) + 1, functional.mse_loss),
        (Task(functional.mse_loss), randn(7, 4), randn(7, 4) + 1, functional.mse_loss),
        (Task(functional.cross_entropy), randn(7, 4), labels(7), functional.cross_entropy),
        (Task(functional.cross_entropy), randn(7, 4), randn(7, 4).softmax(1), functional.cross_entropy),
        (Task(functional.nll_loss), randn(7, 4), labels(7), functional.nll_loss),
        (Task(partial(functional.cross_entropy, ignore_index=2)), randn(7, 4), labels(7).clamp(min=0), None),
        (Task(partial(functional.cross_entropy, weight=CLASS_WEIGHTS)), randn(7, 4), labels(7), None),
        (Task(nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)), randn(7, 4), labels(7), None),
        (Task(nn.CrossEntropyLoss(CLASS_WEIGHTS, label_smoothing=0.2)), randn(7, 4), labels(7), None),
        (Task(nn.CrossEntropyLoss(CLASS_WEIGHTS)), randn(7, 4), randn(7, 4).softmax(1), None),
        (Task(nn.CrossEntropyLoss(ignore_index=2)), randn(7, 4), labels(7).clamp(min=0), None),
        (Task(nn.NLLLoss(weight=CLASS_WEIGHTS)), randn(7, 4, 3), labels(7, 3), None),
    ],
)
def test_weighted_losses_of_unequal_parts_make_up_the_loss_of_all(task, outputs, targets, plain):
    whole = task.loss(outputs, targets)
    if plain is not None:
        torch.testing.assert_close(whole, plain(outputs, targets), rtol=1e-14, atol=1e-14)
    total = counted = 0.0
    for made, wanted in zip(outputs.split(PARTS), targets.split(PARTS), strict=True):
        if weight := float(task.weight(wanted)):
            total += weight * task.loss(made, wanted).item()
        counted += weight
    assert total / counted == pytest.approx(whole.item(), rel=1e-13)


def test_smoothing_is_for_training_alone():
    task, scores, wanted = Classification(label_smoothing=0.5), randn(7, 4), labels(7)
    assert task.evaluation_loss(scores, wanted) == functional.cross_entropy(scores, wanted)
    assert task.loss(scores, wanted) == functional.cross_entropy(scores, wanted, label_smoothing=0.5)


def test_another_ignored_label_is_ignored_by_the_accuracy_too():
    task = Classification(ignore_index=2)
    (metric,) = task.metrics
    assert metric.sums(torch.eye(4), torch.tensor([0, 1, 2, 0])).tolist() == [2, 3]


# The score


def tally(loss: float, **sums: list[float]) -> Tally:
    return Tally(loss * 4, 4, 4, sums)


def test_the_first_metric_decides_which_epoch_is_best_and_without_metrics_the_loss():
    seen = tally(3.0, acc=[3, 4], mse=[2, 4])
    assert Task(metrics=[Accuracy(), SquaredError()]).score(seen) == 0.75
    assert Task(metrics=[SquaredError(), Accuracy()]).score(seen) == -0.5
    assert Task().score(seen) == -3.0
    assert LanguageModelling().score(tally(2.0, ppl=[])) == -math.exp(2)
    assert math.isnan(Classification().score(Tally()))


def test_functions_are_metrics_by_name_of_which_higher_is_better():
    (metric,) = Task(metrics={"first": lambda outputs, targets: 2.5}).metrics
    assert (metric.name, metric.higher) == ("first", True)
    assert Task(metrics=[metric]).values(tally(0.0, first=[10, 4])) == {"first": 2.5}


# What is refused


def spec(*shape: int, dtype: torch.dtype = torch.float64) -> ValueSpec:
    """The output for three samples."""
    return ValueSpec((TensorSpec((3, *shape), dtype),))


def refused(task: Task, outputs: ValueSpec, targets: Value, classes: int | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        prove_task(task, outputs, "head", targets, classes)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("task", "outputs", "targets"),
    [
        (Classification(), spec(4), labels(7)),
        (Classification(label_smoothing=0.1), spec(4), labels(7)),
        (Task(functional.cross_entropy), spec(4), randn(7, 4).softmax(1)),
        (Segmentation(), spec(4, 2, 3), labels(7, 2, 3)),
        (LanguageModelling(), spec(5, 4), labels(7, 5)),
        (LanguageModelling(), spec(5, 4), torch.full((7, 5), IGNORED)),  # nothing counts
        (Regression(), spec(3), randn(7, 3)),
        (Regression(), spec(3, dtype=torch.float32), randn(1, 3)),
        (Task(nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)), spec(4), labels(7)),
    ],
)
def test_a_task_that_is_right_is_let_through(task, outputs, targets):
    prove_task(task, outputs, "head", targets, None)


def test_outputs_and_targets_may_be_several_tensors():
    def loss(outputs: Value, targets: Value) -> Tensor:
        (boxes, scores), (corners, names) = outputs, targets
        return functional.mse_loss(boxes, corners) + functional.cross_entropy(scores, names)

    pair = ValueSpec((TensorSpec((3, 2), torch.float64), TensorSpec((3, 4), torch.float64)), single=False)
    prove_task(Task(loss), pair, "head", (randn(7, 2), labels(7).clamp(min=0)), 4)
    assert refused(Classification(), pair, labels(7)) == (
        "task Classification cannot take the model's float64[3, 2] + float64[3, 4] (layer head) with targets "
        "int64[7]: scores [n, classes] must be one tensor, not 2 of them"
    )


@pytest.mark.parametrize(
    ("task", "outputs", "known"),
    [
        (Classification(), spec(9), "9"),
        (LanguageModelling(), spec(20, 9), "9"),
        (Segmentation(), spec(9, 2, 2), "9"),
    ],
)
def test_too_few_classes_are_refused(task, outputs, known):
    targets = torch.zeros(
        (7, *({1: (), 2: (20,), 3: (2, 2)}[len(outputs.specs[0].shape) - 1])), dtype=torch.int64
    )
    assert refused(task, outputs, targets, 10) == (
        f"the model gives {outputs} (layer head), scores of {known} classes, and the data set has 10: give "
        f"the last layer at least 10 outputs"
    )


@pytest.mark.parametrize(
    ("task", "outputs", "targets", "says"),
    [
        (Classification(), spec(3, 4, 4), labels(7), "(layer head) with targets int64[7]: "),
        (Classification(), spec(), labels(7), "model's float64[3] (layer head) with targets int64[7]: "),
        (Classification(), spec(4), labels(7) * 1.0, "model's float64[3, 4] (layer head) with targets float"),
        (Classification(), spec(4), labels(7).clamp(min=4), "out of bounds"),
        (LanguageModelling(), spec(4), labels(7, 5), "scores [7, 4] need a target for each position"),
        (LanguageModelling(), spec(6, 4), labels(7, 5), "scores [7, 6, 4] need a target for each position"),
        (Regression(), spec(1), randn(7), "outputs [7, 1] and targets [7] differ in shape"),
        (Regression(), spec(1), (randn(7), randn(7)), "numbers must be one tensor, not 2 of them"),
        (Task(), spec(1), randn(7), "Task has no loss: give one, or override loss()"),
    ],
)
def test_outputs_that_do_not_fit_the_targets_are_refused(task, outputs, targets, says):
    said = refused(task, outputs, targets)
    assert said.startswith(f"task {task} cannot take the model's {outputs} (layer head) with targets ")
    assert says in said


class Elsewhere(Task):
    def evaluation_loss(self, outputs: Value, targets: Value) -> Tensor:
        raise KeyError("no such thing")


def test_an_evaluation_and_a_weight_that_fail_are_refused_too():
    assert refused(Elsewhere(functional.mse_loss), spec(2), randn(7, 2)).endswith(": 'no such thing'")
    broken = Task(functional.mse_loss, weight=lambda targets: [][0])
    assert refused(broken, spec(2), randn(7, 2)).endswith(": list index out of range")


def between(outputs: Value, targets: Value) -> Tensor:
    """Compares samples with each other."""
    return (outputs[0] - outputs[1:]).square().mean() if len(outputs) > 1 else outputs.sum() * 0


def padded(outputs: Value, targets: Value) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(
    ("loss", "outputs", "targets"),
    [
        (partial(functional.mse_loss, reduction="sum"), spec(2), randn(7, 2)),
        (nn.CrossEntropyLoss(reduction="sum"), spec(4), labels(7)),
        (between, spec(2), randn(7, 2)),
    ],
)
def test_a_loss_whose_parts_do_not_make_up_the_whole_is_refused(
    loss: Callable[..., Tensor], outputs, targets
):
    said = refused(Task(loss), outputs, targets)
    assert said.startswith(f"the loss of task {Task(loss)} over 7 samples is ")
    assert said.endswith(
        "and the mean over its microbatches, weighted by weight(targets), is another, or its gradient: let "
        "it be a mean over what counts (not a sum, and without a term between samples), and give weight=, a "
        "function of the targets that says what they count for; or set microbatches=1"
    )
    prove_task(Task(loss), outputs, "head", targets, None, microbatches=1)


def test_padding_with_its_weight_is_let_through():
    task = Task(padded, weight=lambda targets: (targets != IGNORED).sum())
    prove_task(task, spec(5, 4), "head", labels(7, 5), None)


@pytest.mark.parametrize(
    ("loss", "returns"),
    [
        (partial(functional.cross_entropy, reduction="none"), "float64[7]"),
        (lambda outputs, targets: (outputs.argmax(1) != targets).sum(), "int64[]"),
    ],
)
def test_a_loss_that_is_no_one_number_is_refused(loss, returns):
    assert refused(Task(loss), spec(4), labels(7)) == (
        f"the loss of task {Task(loss)} must be one number in a tensor, the mean over what counts; it "
        f"returns {returns}"
    )


@pytest.mark.parametrize(("returned", "kind"), [(0.5, "float"), (None, "NoneType"), ((), "tuple")])
def test_a_loss_that_is_no_tensor_is_refused(returned, kind):
    said = refused(Task(lambda outputs, targets: returned), spec(4), labels(7))
    assert said.startswith("the loss of task <lambda> must be one number in a tensor, the mean over what")
    assert said.endswith(f"; it returns {kind}")


class Vector(Task):
    def evaluation_loss(self, outputs: Value, targets: Value) -> Tensor:
        return functional.mse_loss(outputs, targets, reduction="none")


def test_an_evaluation_s_loss_must_be_one_number_too():
    assert refused(Vector(functional.mse_loss), spec(2), randn(7, 2)).endswith("; it returns float64[7, 2]")


class Own(Metric):
    name = title = "own"

    def __init__(self, sums: object) -> None:
        self._sums = sums

    def sums(self, outputs: Value, targets: Value) -> Tensor:
        return self._sums  # type: ignore[return-value]


@pytest.mark.parametrize("sums", [1.5, [1.0], torch.zeros(()), torch.zeros(2, 2)])
def test_a_metric_without_sums_is_refused(sums):
    task = Task(functional.cross_entropy, [Own(sums)])
    assert refused(task, spec(4), labels(7)) == (
        "metric own of task cross_entropy must return sums, a tensor [k]"
    )


def test_a_metric_that_fails_is_named():
    task = Task(functional.cross_entropy, [Mean("distance", lambda outputs, targets: outputs - targets)])
    assert refused(task, spec(4), labels(7)).startswith(
        "metric distance of task cross_entropy cannot take the model's float64[3, 4] (layer head) with "
    )


class Ratio(Metric):
    name = "ratio"

    def __init__(self, count: int) -> None:
        self._count = count

    def sums(self, outputs: Value, targets: Value) -> Tensor:
        return outputs.new_zeros(self._count)

    def value(self, sums: Sequence[float], loss: float) -> float:
        return sums[0] / sums[1]


def test_a_metric_whose_value_fails_is_named_before_the_start():
    said = refused(Task(functional.mse_loss, [Ratio(1)]), spec(4), randn(7, 4))
    assert said.startswith("metric ratio of task mse_loss cannot take")
    assert said.endswith(": list index out of range")


def test_of_what_was_not_counted_there_is_no_metric():
    """Neither of the first samples, where that may be by chance, nor of all."""
    task = Task(functional.mse_loss, [Ratio(2)])
    prove_task(task, spec(4), "head", randn(7, 4), None)
    assert math.isnan(task.values(Tally())["ratio"])
    assert math.isnan(task.values(tally(1.0, ratio=[0.0, 0.0]))["ratio"])


@pytest.mark.parametrize(
    ("metrics", "name"),
    [([Accuracy(), Accuracy(ignore_index=0)], "acc"), ([Mean("loss", functional.mse_loss)], "loss")],
)
def test_values_of_one_name_are_refused(metrics, name):
    said = refused(Task(functional.cross_entropy, metrics), spec(4), labels(7))
    assert said == f"task cross_entropy has two values named {name}: give its metrics different names"


WEIGHT = nn.Parameter(torch.ones(4, dtype=torch.float64))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = WEIGHT

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs * self.scale, targets)


@pytest.mark.parametrize(
    "loss", [Scaled(), lambda o, t: functional.cross_entropy(o, t) + 1e-3 * WEIGHT.square().sum()]
)
def test_a_loss_that_would_train_something_else_is_refused(loss):
    said = refused(Task(loss), spec(4), labels(7).clamp(min=0))
    assert f"the loss of task {Task(loss)} has a gradient for a float64[4] that is not among the" in said


def test_a_loss_of_probabilities_or_complex_numbers_is_let_through():
    prove_task(Task(nn.BCELoss()), spec(2), "head", randn(7, 2).sigmoid(), None)
    outputs = spec(2, dtype=torch.complex128)
    prove_task(Task(lambda o, t: (o.abs() - t).square().mean()), outputs, "head", randn(7, 2), None)


def test_targets_that_may_be_ignored_need_a_weight():
    said = refused(Task(padded), spec(5, 4), labels(7, 5))
    assert said.endswith("need a weight(targets): how many targets the loss averages over")
    assert Task(padded).weight(torch.tensor([156], dtype=torch.uint8)) == 1


def test_class_weights_move_with_the_task():
    loss = partial(functional.cross_entropy, weight=CLASS_WEIGHTS)
    for task in (Task(loss), Task(nn.CrossEntropyLoss(CLASS_WEIGHTS))):
        moved = task.to(torch.device("meta"))
        assert moved.loss(randn(7, 4).to("meta"), labels(7).to("meta")).is_meta
        assert float(moved.weight(torch.tensor([0, 3]))) == 3.5  # of targets in host memory


def test_a_large_model_s_task_is_proven_on_few_samples():
    """The outputs that are made up stay small, whatever one sample gives."""
    seen = []

    def loss(outputs: Value, targets: Value) -> Tensor:
        seen.append(tuple(outputs.shape))
        return outputs.mean() + 0 * targets.sum()

    prove_task(Task(loss), spec(2**23), "head", torch.zeros(7), None)
    assert seen[0] == (4, 2**23)


def test_a_loss_without_a_gradient_is_refused():
    task = Task(lambda outputs, targets: outputs.detach().square().mean())
    outputs = ValueSpec((TensorSpec((4, 1), torch.float32),))
    with pytest.raises(ConfigError, match="has no gradient with respect to the outputs"):
        prove_task(task, outputs, "last", torch.zeros(4, 1), None)


def test_tokens_are_no_labels():
    outputs, tokens = spec(20, 9), torch.zeros(7, 20, dtype=torch.int64)
    assert "there is task=language_modelling" in refused(Classification(), outputs, tokens, 9)
