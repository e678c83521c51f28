"""Each a bug that was found by breaking it: what the model was, and what went wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pipetrain.errors import ConfigError, TrainingStopped
from pipetrain.model.specs import Size
from tests.support.cases import Case, compare, make_run
from tests.support.thread_ranks import Saved, run_in_threads

pytestmark = pytest.mark.slow


def _case(schedule: str, model: str, *words: str, **more: Any) -> Case:
    return Case(schedule, 2, (f"model._target_=tests.support.{model}", *words), **more)


def _equals_the_reference(case: Case) -> None:
    compare(case, *run_in_threads(case))


LAYERS = [
    # `named_children` names an object once: every further use of a shared activation was left out.
    ("pipedream", "reused", "[4]"),
    # Only a stage's first layer was asked whether it writes: a Flatten or an Identity before it hid it.
    *(("pipedream", "in_place_behind_a_view", cut) for cut in ("[2]", "[4]")),
    # The estimate ran over the model that trains, and left a tensor without data in it.
    ("1f1b", "caching", "[2]"),
    # Nothing to train in the last stage.
    ("pipedream", "frozen_end", "[8]"),
    # A complex number is not floating-point: its gradient was left out. It may lie inside a stage.
    ("1f1b", "complex_inside", "[3]"),
]


@pytest.mark.parametrize(("schedule", "model", "cut"), LAYERS)
def test_layers_train_as_one_process_would_train_them(schedule, model, cut):
    case = _case(schedule, f"models.{model}", f"partition={cut}")
    assert model != "reused" or len(make_run(case).plan.layers) == 7
    _equals_the_reference(case)


@pytest.mark.parametrize(
    ("model", "cut", "says"),
    [
        # Each stage counted into a copy of its own.
        ("shared_statistics", "[1]", r"layer 2 \(2\) of stage 1 shares its 0.3.running_mean with stage 0"),
        # A version of the weight has no hook: it was not called.
        ("hooked", "even", r"parameter 1\.0\.weight of the model has a hook"),
        ("complex_inside", "[2]", "complex tensors cannot cross a cut"),
    ],
)
def test_what_a_cut_would_change_is_refused(model, cut, says):
    with pytest.raises(ConfigError, match=says):
        make_run(_case("1f1b", f"models.{model}", f"partition={cut}"))


def test_a_boundary_that_is_another_in_training():
    """Where a microbatch of an evaluation had the size of one in training, it got that one's boundary."""
    words = ("partition=[2]", "microbatches=1", "batch_size=11")
    case = _case("1f1b", "models.wider_in_training", *words, train_samples=33)
    plan = make_run(case).plan
    assert plan.cut.entering(1, Size(11)) != plan.evaluation_cut.entering(1, Size(11))
    _equals_the_reference(case)


def test_a_message_that_is_not_what_was_planned_is_not_sent():
    """The receiver of a shorter message would have gone on with what lay in its buffer."""
    says = r"stage 0 made float64\[3, 6\] for the activation of microbatch 0"
    with pytest.raises(TrainingStopped, match=says):
        run_in_threads(_case("1f1b", "models.fickle", "partition=[2]"))


# The edge of the engine: each was trained otherwise than by one process, or stopped, or was refused


EDGES = [
    ("masked", "[2]"),  # made to require a gradient, the mask stopped the run
    ("masked", "[3]"),
    ("unused", "[2]"),  # an output that nobody uses got zeros, and its weights decayed
    ("half_a_gradient", "[2]"),
    ("hands_on_a_buffer", "[2]"),  # the buffer was overwritten while it was being sent
    ("recurrent", "[2]"),  # a list of weights read the live ones, and `reduce` lost their gradient
    ("recurrent", "[3]"),
    ("tied", "[4]"),
    ("fourier", "[3]"),  # the cast to the run's dtype dropped imaginary parts
    ("sparse", "[2]"),  # refused by the fused optimizer
    ("reads", "[2]"),  # reading a number was refused
]
NEEDS = {"sparse": ["optim.weight_decay=0"], "reads": ["optim.fused=false"]}
"""Without which the reference itself would fail."""


@pytest.mark.parametrize(
    ("schedule", "model", "cut"),
    [("pipedream_2bw", *edge) for edge in EDGES]
    # Where weights and messages keep their storage.
    + [("gpipe", name, "[2]") for name in ("hands_on_a_buffer", "recurrent")],
)
def test_a_model_at_the_edge_trains_as_one_process_would_train_it(schedule, model, cut):
    words = ["microbatches=4", f"partition={cut}", "buffer_size=4", "epochs=2", *NEEDS.get(model, [])]
    twin = "edge_case_models.tied_registered" if model == "tied" else ""
    _equals_the_reference(_case(schedule, f"edge_case_models.{model}", *words, reference_model=twin))


def test_complex_weights_go_on_from_a_checkpoint(tmp_path):
    words = ("optim=adamw", "partition=[2]", "window=2", "optim.lr=0.01", "epochs=2")
    case = _case("pipedream", "edge_case_models.fourier", *words)
    wanted, _ = run_in_threads(case, saved=Saved(tmp_path))
    source = sorted((tmp_path / "checkpoints").glob("update-*"))[3]
    state, _ = run_in_threads(case, source=source)
    assert all(state[name].equal(tensor) for name, tensor in wanted.items())
    assert state["2.weight"].dtype == torch.complex128


def test_only_gradients_that_are_needed_travel():
    for model, cut in (("masked", "[3]"), ("unused", "[2]")):
        joined = make_run(_case("1f1b", f"edge_case_models.{model}", f"partition={cut}")).plan.cut
        assert len(joined.message((0, 1), Size(3))) == 2
        assert [spec.shape for spec in joined.message((1, 0), Size(3))] == [(3, 12)]


@pytest.mark.parametrize(
    ("schedule", "cut"), [("1f1b", "[1]"), ("gpipe", "[3]"), ("pipedream", "[2,3]"), ("fbp", "[2,3]")]
)
def test_a_skipped_update_leaves_no_trace_in_running_statistics(schedule, cut):
    """One infinite microbatch left NaN there for good. Without a flush, which one it meets is no theory's.

    Then later forwards lose what they have changed, but of their counts.
    """
    case = _case(
        schedule, "edge_case_models.strikes", f"partition={cut}", "microbatches=4", "on_nan=skip", "epochs=3"
    )
    case = replace(case, ranks=cut.count(",") + 2)
    state, figures = run_in_threads(case)
    assert all(tensor.isfinite().all() for tensor in state.values())
    if schedule in ("1f1b", "gpipe"):
        compare(case, state, figures)
    made = 12 - sum(epoch.stages[0].skipped for epoch in figures)
    counted = [int(tensor) for name, tensor in state.items() if name.endswith("num_batches_tracked")]
    assert (counted, made < 11) == ([4 * made] * 3, True)
