"""Each a bug that was found by breaking it: what the model was, and what went wrong."""

from __future__ import annotations

import pytest

from pipetrain.errors import ConfigError, TrainingStopped
from tests.support.cases import Case, compare, make_run, run_in_threads


def _model(name: str) -> str:
    return f"model._target_=tests.support.models.{name}"


@pytest.mark.parametrize("cut", ["[2]", "[3]", "[4]"])
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_layer_that_is_used_twice_is_run_twice(schedule, cut):
    """`named_children` names an object once: every further use of a shared activation was left out."""
    case = Case(schedule, 2, (_model("reused"), f"partition={cut}"))
    assert len(make_run(case).plan.layers) == 7
    compare(case, *run_in_threads(case))


def test_statistics_that_two_stages_share_are_refused():
    """Each stage counted into a copy of its own."""
    with pytest.raises(ConfigError, match=r"layer 2 \(2\) of stage 1 shares its 1.running_mean with stage 0"):
        make_run(Case("1f1b", 2, (_model("shared_statistics"), "partition=[1]")))
    make_run(Case("1f1b", 2, (_model("shared_statistics"), "partition=[3]")))


@pytest.mark.parametrize("cut", ["[1]", "[2]", "[3]", "[4]", "[5]"])
def test_a_layer_that_works_in_place_behind_a_view(cut):
    """Only a stage's first layer was asked whether it writes: a Flatten or an Identity before it hid it."""
    case = Case("pipedream", 2, (_model("in_place_behind_a_view"), f"partition={cut}"))
    compare(case, *run_in_threads(case))


def test_a_layer_that_keeps_a_tensor_of_its_first_forward():
    """The estimate ran over the model that trains, and left a tensor without data in it."""
    case = Case("1f1b", 2, (_model("caching"), "partition=[2]"))
    compare(case, *run_in_threads(case))


def test_a_boundary_that_is_another_in_training():
    """Where a microbatch of an evaluation had the size of one in training, it got that one's boundary."""
    overrides = (_model("wider_in_training"), "partition=[2]", "microbatches=1", "batch_size=11")
    case = Case("1f1b", 2, overrides, train_samples=33)
    assert make_run(case).plan.boundaries[11] != make_run(case).plan.evaluated[11]
    compare(case, *run_in_threads(case))


def test_a_message_that_is_not_what_was_planned_is_not_sent():
    """The receiver of a shorter message would have gone on with what lay in its buffer."""
    case = Case("1f1b", 2, (_model("fickle"), "partition=[2]"))
    with pytest.raises(
        TrainingStopped, match=r"stage 0 made float64\[3, 6\] for the activation of microbatch 0"
    ):
        run_in_threads(case)


def test_a_last_stage_with_nothing_to_train():
    case = Case("pipedream", 2, (_model("frozen_end"), "partition=[8]"))
    compare_frozen(case)


def compare_frozen(case: Case) -> None:
    """The reference differentiates all parameters; here only what must stay is looked at."""
    state, _ = run_in_threads(case)
    before = make_run(case).build_model().state_dict()
    changed = {name for name in before if not before[name].equal(state[name])}
    assert changed
    assert not {name for name in changed if name.startswith(("8.", "9."))}


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("frozen", "the model has no parameter to train"),
        ("lazy", "layer 1.weight of the model is lazy: give it its sizes"),
        ("hooked", "parameter 1.0.weight of the model has a hook, which would not be called"),
    ],
)
def test_a_model_that_would_not_train_as_it_was_meant_is_refused(model, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make_run(Case("1f1b", 2, (_model(model),)))


def test_a_complex_boundary_is_refused_and_may_lie_inside_a_stage():
    """Its gradient was left out, in silence: no complex number is floating-point."""
    with pytest.raises(ConfigError, match="complex tensors cannot cross a cut"):
        make_run(Case("1f1b", 2, (_model("complex_inside"), "partition=[2]")))
    case = Case("1f1b", 2, (_model("complex_inside"), "partition=[3]"))
    compare(case, *run_in_threads(case))
