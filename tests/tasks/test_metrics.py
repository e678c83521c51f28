"""Metrics: their sums over unequal parts give what a plain computation over all samples gives."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pipetrain.model.specs import Value
from pipetrain.tasks import Accuracy, Mean, MeanIoU, Metric, Perplexity, SquaredError, Task
from pipetrain.tasks.running_sums import Accumulator

N, CLASSES = 23, 6
PARTS = (1, 9, 4, 7, 2)
IGNORED = -100


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


def labels(*shape: int, classes: int = CLASSES, ignore: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    made = torch.randint(0, classes, shape, generator=generator)
    return made.where(torch.rand(shape, generator=generator) > 0.3, IGNORED) if ignore else made


def over_parts(metric: Metric, outputs: Tensor, targets: Tensor) -> float:
    """The metric, counted as a run does."""
    counter = Accumulator()
    for made, wanted in zip(outputs.split(PARTS), targets.split(PARTS), strict=True):
        counter.add(torch.zeros(()), len(made), len(made), {metric.name: metric.sums(made, wanted)})
    return Task(metrics=[metric]).values(counter.take())[metric.name]


@pytest.mark.parametrize(("ignore", "index"), [(False, IGNORED), (True, IGNORED), (False, 2)])
@pytest.mark.parametrize(("shape", "top"), [((), 1), ((2, 3), 1), ((4,), 3)])
def test_accuracy_is_the_share_of_labels_among_the_highest_scores(shape, top, ignore, index):
    scores, wanted = randn(N, CLASSES, *shape), labels(N, *shape, ignore=ignore)
    above = (scores > scores.gather(1, wanted.clamp(min=0)[:, None])).sum(1)
    right = (above < top)[(wanted != index) & (wanted != IGNORED)].double().mean().item()
    assert over_parts(Accuracy(index, top=top), scores, wanted) == pytest.approx(right, abs=1e-15)
    tokens, metric = scores.movedim(1, -1), Accuracy(index, axis=-1, top=top)
    assert over_parts(metric, tokens, wanted) == pytest.approx(right, abs=1e-15)
    assert (metric.name, metric.title) == {1: ("acc", "accuracy"), 3: ("top3", "top3_accuracy")}[top]
    assert over_parts(Accuracy(top=9), scores, labels(N, *shape)) == 1  # more than there are classes


def test_the_label_of_probabilities_is_the_most_probable_class():
    scores, wanted = torch.eye(3), torch.tensor([[0.8, 0.1, 0.1], [0.5, 0.3, 0.2], [0.0, 0.4, 0.6]])
    assert Accuracy().sums(scores, wanted).tolist() == [2, 3]


def test_mean_iou_leaves_out_classes_that_never_occur():
    scores, wanted = randn(N, CLASSES, 3, 2), labels(N, 3, 2, classes=4, ignore=True)
    scores[:, 5] = -9  # is neither predicted nor wanted
    scores[:, 3] = -9  # is wanted, and never predicted
    found, counted = scores.argmax(1), wanted != IGNORED
    shares = []
    for label in range(5):
        is_found, is_wanted = (found == label) & counted, (wanted == label) & counted
        shares.append(((is_found & is_wanted).sum() / (is_found | is_wanted).sum()).item())
    assert shares[3] == 0
    assert over_parts(MeanIoU(), scores, wanted) == pytest.approx(sum(shares) / 5)


def test_perplexity_is_of_the_mean_loss_over_tokens():
    scores, tokens = randn(N, 4, CLASSES), labels(N, 4, ignore=True)
    metric, counter = Perplexity(), Accumulator()
    for made, wanted in zip(scores.split(PARTS), tokens.split(PARTS), strict=True):
        loss = functional.cross_entropy(made.flatten(0, 1), wanted.flatten())
        sums = metric.sums(made, wanted)
        assert sums.untyped_storage().nbytes() == 0  # a view would keep the outputs until they are added up
        counter.add(loss, int((wanted != IGNORED).sum()), len(made), {"ppl": sums})
    whole = functional.cross_entropy(scores.flatten(0, 1), tokens.flatten())
    assert Task(metrics=[metric]).values(counter.take()) == {"ppl": pytest.approx(whole.exp().item())}
    assert [metric.value([], loss) for loss in (0.0, 800.0, math.inf)] == [1.0, math.inf, math.inf]
    assert math.isnan(metric.value([], math.nan))


def mean_distance(outputs: Value, targets: Value) -> float:
    return (outputs - targets).abs().mean().item()


def test_squared_error_is_over_all_numbers_and_a_function_s_mean_over_samples():
    outputs, targets = randn(N, 3, 2), randn(N, 3, 2) * 2
    wanted = functional.mse_loss(outputs, targets).item()
    assert over_parts(SquaredError(), outputs, targets) == pytest.approx(wanted)
    metric = Mean("distance", mean_distance, higher=False)
    assert over_parts(metric, outputs, targets) == pytest.approx(mean_distance(outputs, targets))
    assert (metric.title, metric.higher, metric.percent) == ("distance", False, False)
    for none in (Accuracy(), MeanIoU(), SquaredError(), metric):
        assert math.isnan(none.value([0.0, 0.0], math.nan))
