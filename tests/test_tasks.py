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
from pipetrain.model.specs import TensorSpec, Value, ValueSpec
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
    trial,
)
from pipetrain.tasks.running_sums import Tally
from pipetrain.tasks.trial import try_task

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


SOFT, PLAIN = randn(7, 4).softmax(1), labels(7).clamp(min=0)
CROSS = functional.cross_entropy


# What counts


@pytest.mark.parametrize(
    ("task", "outputs", "targets", "plain"),
    [
        (Classification(), randn(7, 4), labels(7), CROSS),
        (Classification(label_smoothing=0.3), randn(7, 4), labels(7), None),
        (Segmentation(), randn(7, 4, 2, 3), labels(7, 2, 3), CROSS),
        (LanguageModelling(), randn(7, 5, 4), labels(7, 5), lambda scores, tokens: CROSS(scores.mT, tokens)),
        (Regression(), randn(7, 4), randn(7, 4) + 1, functional.mse_loss),
        (Task(CROSS), randn(7, 4), SOFT, CROSS),
        (Task(functional.nll_loss), randn(7, 4), labels(7), functional.nll_loss),
        (Task(nn.CrossEntropyLoss(CLASS_WEIGHTS, label_smoothing=0.2)), randn(7, 4), labels(7), None),
        (Task(nn.CrossEntropyLoss(CLASS_WEIGHTS)), randn(7, 4), SOFT, None),
        (Task(nn.CrossEntropyLoss(ignore_index=2)), randn(7, 4), PLAIN, None),
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
    assert task.evaluation_loss(scores, wanted) == CROSS(scores, wanted)
    assert task.loss(scores, wanted) == CROSS(scores, wanted, label_smoothing=0.5)


def tally(loss: float, **sums: list[float]) -> Tally:
    return Tally(loss * 4, 4, 4, sums)


def mean_error(outputs: Value, targets: Value) -> Tensor:
    return (outputs - targets).abs().mean()


def test_the_first_metric_that_says_what_is_better_decides_which_epoch_is_best_else_the_loss():
    seen = tally(3.0, acc=[3, 4], mse=[2, 4])
    assert Task(metrics=[Accuracy(), SquaredError()]).score(seen) == 0.75
    assert Task(metrics=[SquaredError(), Accuracy()]).score(seen) == -0.5
    assert Task().score(seen) == -3.0
    # A function does not say whether higher is better: the loss decides, or a metric that says it.
    assert Task(metrics={"acc": mean_error}).score(seen) == -3.0
    assert Task(metrics=[Mean("mse", mean_error), Accuracy()]).score(seen) == 0.75
    assert Task(metrics=[Mean("mse", mean_error, higher=False), Accuracy()]).score(seen) == -0.5
    assert LanguageModelling().score(tally(2.0, ppl=[])) == -math.exp(2)
    assert math.isnan(Classification().score(Tally()))


def test_class_weights_move_with_the_task():
    for task in (Task(partial(CROSS, weight=CLASS_WEIGHTS)), Task(nn.CrossEntropyLoss(CLASS_WEIGHTS))):
        moved = task.to(torch.device("meta"))
        assert moved.loss(randn(7, 4).to("meta"), labels(7).to("meta")).is_meta
        assert float(moved.weight(torch.tensor([0, 3]))) == 3.5  # of targets in host memory


# What is let through, and what is refused


def spec(*shape: int, dtype: torch.dtype = torch.float64) -> ValueSpec:
    """The output for three samples."""
    return ValueSpec((TensorSpec((3, *shape), dtype),))


def several(outputs: Value, targets: Value) -> Tensor:
    (boxes, scores), (corners, names) = outputs, targets
    return functional.mse_loss(boxes, corners) + CROSS(scores, names)


def padded(outputs: Value, targets: Value) -> Tensor:
    return CROSS(outputs.flatten(0, 1), targets.flatten())


def between(outputs: Value, targets: Value) -> Tensor:
    """Compares samples with each other."""
    return (outputs[0] - outputs[1:]).square().mean() if len(outputs) > 1 else outputs.sum() * 0


class Tempered(nn.Module):
    """A loss with a number to learn."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return CROSS(outputs * self.temperature, targets)


class Elsewhere(Task):
    """Its evaluation is another function."""

    def __init__(self, evaluation: Callable[[], Tensor]) -> None:
        super().__init__(functional.mse_loss)
        self._evaluation = evaluation

    def evaluation_loss(self, outputs: Value, targets: Value) -> Tensor:
        return self._evaluation()


class Own(Metric):
    """Sums as they are given, and the first over the second as its value."""

    name = title = "own"

    def __init__(self, sums: object) -> None:
        self._sums = sums

    def sums(self, outputs: Value, targets: Value) -> Tensor:
        return self._sums  # type: ignore[return-value]

    def value(self, sums: Sequence[float], loss: float) -> float:
        return sums[0] / sums[1]


def crossed(*metrics: Metric) -> Task:
    return Task(CROSS, metrics)


PAIR = ValueSpec((TensorSpec((3, 2), torch.float64), TensorSpec((3, 4), torch.float64)), single=False)
FOUR, NUMBERS = spec(4), randn(7, 2)


@pytest.mark.parametrize(
    ("task", "outputs", "targets"),
    [
        (Classification(label_smoothing=0.1), FOUR, labels(7)),
        (Task(CROSS), FOUR, SOFT),
        (Segmentation(), spec(4, 2, 3), labels(7, 2, 3)),
        (LanguageModelling(), spec(5, 4), torch.full((7, 5), IGNORED)),  # nothing counts
        (Regression(), spec(3), randn(7, 3)),
        (Task(nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)), FOUR, labels(7)),
        (Task(several), PAIR, (NUMBERS, PLAIN)),
        (Task(padded, weight=lambda targets: (targets != IGNORED).sum()), spec(5, 4), labels(7, 5)),
        (Task(nn.BCELoss()), spec(2), NUMBERS.sigmoid()),
        (Task(lambda o, t: (o.abs() - t).square().mean()), spec(2, dtype=torch.complex128), NUMBERS),
    ],
)
def test_a_task_that_is_right_is_let_through(task, outputs, targets):
    try_task(task, outputs, "head", targets, None)


def refused(task: Task, outputs: ValueSpec, targets: Value, classes: int | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        try_task(task, outputs, "head", targets, classes)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_too_few_classes_are_refused():
    tokens, pixels = (torch.zeros(shape, dtype=torch.int64) for shape in ((7, 20), (7, 2, 2)))
    for task, outputs, wanted in (
        (LanguageModelling(), spec(20, 9), tokens),
        (Segmentation(), spec(9, 2, 2), pixels),
    ):
        assert refused(task, outputs, wanted, 10) == (
            f"the model gives {outputs} (layer head), scores of 9 classes, and the data set has 10: give "
            f"the last layer at least 10 outputs"
        )


def test_scores_of_each_position_need_another_task():
    said = refused(Classification(), spec(128, 256), torch.zeros(7, 128, dtype=torch.int64), 256)
    assert "choose task=language_modelling" in said


@pytest.mark.parametrize("task", [Classification(), Task(CROSS), Task(nn.CrossEntropyLoss(ignore_index=-5))])
@pytest.mark.parametrize("label", [4, -1])
def test_a_label_that_is_no_class_is_refused_by_its_number(task, label):
    assert refused(task, FOUR, torch.tensor([0, 3, label])) == (
        f"the targets have a label {label}, and the model gives {FOUR} (layer head), scores of 4 classes, 0 "
        f"to 3: number the classes from 0, give the last layer more outputs, or let the loss ignore it, by "
        f"ignore_index="
    )


@pytest.mark.parametrize(
    ("loss", "outputs", "targets"),
    [(nn.CrossEntropyLoss(reduction="sum"), FOUR, labels(7)), (between, spec(2), NUMBERS)],
)
def test_a_loss_whose_parts_do_not_make_up_the_whole_is_refused(loss, outputs, targets):
    said = refused(Task(loss), outputs, targets)
    assert said.startswith("of 7 samples and made-up outputs the loss differs by ")
    assert ", between the batch and its microbatches: a layer or the loss looks at several samples" in said
    assert said.endswith("a function of the targets that says what they count for; or set microbatches=1")
    try_task(Task(loss), outputs, "head", targets, None, microbatches=1)


def test_a_loss_that_is_another_at_each_call_is_refused_by_that_cause():
    def annealed(outputs: Value, targets: Value) -> Tensor:
        calls.append(0)
        return len(calls) * functional.mse_loss(outputs, targets)

    calls: list[int] = []
    said = refused(Task(annealed), spec(2), NUMBERS)
    assert "the loss is another one when it is computed again of the same samples" in said
    assert "looks at several samples" not in said


def masked(outputs: Value, targets: Value) -> Tensor:
    values, mask = targets
    return ((outputs - values).square().mean(1) * mask).sum() / mask.sum()


def test_a_mask_of_which_each_half_of_the_batch_has_as_much_is_seen():
    mask = torch.tensor([3.0, 1, 2, 0, 0, 2, 1, 3])
    said = refused(Task(masked), spec(2), (randn(8, 2), mask))
    assert "of 8 samples and made-up outputs the loss differs by" in said
    try_task(
        Task(masked, weight=lambda targets: targets[1].sum()), spec(2), "head", (randn(8, 2), mask), None
    )


def test_a_loss_of_pairs_is_right_where_microbatches_have_whole_pairs():
    pairs = Task(lambda outputs, targets: (outputs.view(-1, 2, 2).diff(dim=1) - 1).square().mean())
    try_task(pairs, spec(2), "head", randn(16, 2), None)


OF_A_METRIC = "metric {} of task cross_entropy cannot take the model's"
REFUSED: list[tuple[Task, ValueSpec, Value, str]] = [
    (Classification(), spec(), labels(7), "model's float64[3] (layer head) with targets int64[7]: "),
    (Classification(), PAIR, labels(7), "scores [n, classes] must be one tensor, not 2 of them"),
    (LanguageModelling(), spec(6, 4), labels(7, 5), "scores [7, 6, 4] need a target for each of several"),
    (
        LanguageModelling(),
        FOUR,
        PLAIN,
        "for each of several positions; of one label a sample, choose task=cl",
    ),
    (Regression(), spec(1), randn(7), "outputs [7, 1] and targets [7] differ in shape"),
    (Task(), spec(1), randn(7), "Task has no loss: give one, or override loss()"),
    (Task(padded), spec(5, 4), labels(7, 5), "need a weight(targets): how many targets the loss aver"),
    (Task(partial(CROSS, reduction="none")), FOUR, PLAIN, "the mean; it returns float64[7]"),
    (Task(lambda o, t: o.detach().square().mean()), FOUR, PLAIN, "does not require grad and does not have"),
    (Task(Tempered()), FOUR, PLAIN, "its loss has a parameter temperature, which no stage would train: "),
    (Task(CROSS, weight=lambda targets: [][0]), FOUR, PLAIN, "list index"),
    (Elsewhere(lambda: torch.zeros(7, 2)), spec(2), NUMBERS, "the mean; it returns float32[7, 2]"),
    (Elsewhere(lambda: {}["no such thing"]), spec(2), NUMBERS, ": 'no such thing'"),
    (crossed(Own(1.5)), FOUR, PLAIN, OF_A_METRIC.format("own")),
    (crossed(Own(torch.zeros(1))), FOUR, PLAIN, "list index out"),
    (crossed(Mean("far", lambda o, t: o - t[:, None])), FOUR, PLAIN, "one number, not [7, 4]"),
    (crossed(Accuracy(), Accuracy(0)), FOUR, PLAIN, "two values are named acc: give them different"),
    (crossed(Mean("loss", functional.mse_loss)), FOUR, PLAIN, OF_A_METRIC.format("loss")),
]


@pytest.mark.parametrize(("task", "outputs", "targets", "says"), REFUSED)
def test_what_fails_in_a_trial_call_is_said_with_task_outputs_and_targets(task, outputs, targets, says):
    said = refused(task, outputs, targets)
    assert f"task {task} cannot take the model's {outputs} (layer head) with targets " in said
    assert says in said


def f1(outputs: Value, targets: Value) -> Tensor:
    found, wanted = outputs.argmax(1) == 1, targets == 1
    return 2 * (found & wanted).sum() / (found.sum() + wanted.sum())


def test_a_function_that_is_no_mean_over_samples_is_refused_as_a_metric():
    wanted = torch.tensor([1, 0, 1, 1, 0, 1, 1])
    said = refused(crossed(Mean("f1", f1)), spec(2), wanted)
    assert said.startswith("metric f1 of 7 samples is not what those of its parts add up to: a function must")
    right = Mean("right", lambda outputs, targets: (outputs.argmax(1) == targets).double().mean())
    try_task(crossed(right), spec(2), "head", wanted, None)


def test_of_what_was_not_counted_there_is_no_metric():
    """Neither of the first samples, where that may be by chance, nor of all."""
    task = Task(functional.mse_loss, [Own(torch.zeros(2))])
    try_task(task, spec(4), "head", randn(7, 4), None)
    assert math.isnan(task.values(Tally())["own"])
    assert math.isnan(task.values(tally(1.0, own=[0.0, 0.0]))["own"])


def test_a_large_model_s_task_is_proven_on_few_samples(monkeypatch):
    """The outputs that are made up stay small, whatever one sample gives."""
    seen = []

    def loss(outputs: Value, targets: Value) -> Tensor:
        seen.append(tuple(outputs.shape))
        return outputs.mean() + 0 * targets.sum()

    monkeypatch.setattr(trial, "MOST_TRIED", 2**10)
    try_task(Task(loss), spec(2**8), "head", torch.zeros(7), None)
    assert seen[0] == (4, 2**8)
