"""Pipeline's arguments in the terms of the configuration."""

from __future__ import annotations

import re

import pytest
from torch import nn
from torch.nn.functional import mse_loss

from pipetrain import Classification, ConfigError
from pipetrain.schedule.actions import format_program
from pipetrain.schedule.lower import lower
from pipetrain.schedule.programs import gpipe, one_f_one_b, pipedream
from pipetrain.trainer.arguments import (
    read_draft,
    read_model,
    read_optimizer,
    read_options,
    read_schedule,
    read_targets,
    read_task,
)

MODEL = nn.Linear(2, 2)


def read(schedule="1f1b", model=MODEL, **given):
    name, _, defaults = read_schedule(schedule)
    return read_options(given, model, name, defaults, 1)


@pytest.mark.parametrize(
    ("schedule", "given", "is_read"),
    [
        ("1f1b", {}, (4, 1)),
        ("pipedream", {}, (1, None)),
        ("pipedream", {"microbatches": 3, "window": 2}, (3, 2)),
        (gpipe, {}, (1, 1)),
        (pipedream, {}, (1, None)),
        (pipedream, {"window": 1}, (1, 1)),
        (pipedream, {"microbatches": 4, "window": 3, "clip_grad_norm": 1.0}, (4, 3)),
    ],
)
def test_a_schedule_brings_its_microbatches_and_window_and_an_argument_replaces_them(
    schedule, given, is_read
):
    """A function of one's own has the window that follows from its program."""
    draft = read_draft(schedule, None, given, MODEL, 2)
    assert (draft.settings.microbatches, draft.settings.window) == is_read
    assert draft.settings.samples is None  # until the first batch
    assert read_draft(schedule, draft.settings, {}, MODEL, 2).settings == draft.settings
    assert draft.settings.clip_grad_norm_over == ("stage" if "clip_grad_norm" in given else "auto")


def of_one_batch(ranks, batches, microbatches):
    return one_f_one_b(ranks, 1, microbatches)


@pytest.mark.parametrize(
    ("schedule", "ranks", "given"), [(of_one_batch, 2, {}), ("zb_h1", 1, {"compile": True})]
)
def test_a_draft_is_sound_if_what_runs_of_it_is(schedule, ranks, given):
    """A window of a flush has one batch; in one process each I is joined with its W, which may compile."""
    draft = read_draft(schedule, None, {"microbatches": 4, **given}, MODEL, ranks)
    draft.refuse_unsound()
    with pytest.raises(ConfigError, match="splits backwards, and compile runs them whole"):
        read_draft("zb_h1", None, {"microbatches": 4, "compile": True}, MODEL, 2).refuse_unsound()


def test_a_program_file_is_read_without_its_messages(tmp_path):
    program = one_f_one_b(2, 1, 4)
    path = tmp_path / "mine.txt"
    path.write_text(format_program(lower(program)))
    name, schedule, _ = read_schedule(path)
    assert (name, schedule(2, 1, 4)) == ("mine", program)


def test_a_task_is_itself_and_a_function_makes_a_model_without_numbers():
    task = Classification()
    assert read_task(task, None, (), None) is read_task(None, task, (), None) is task
    model, record = read_model(lambda: nn.Linear(2, 2), 3)
    assert model.weight.is_meta
    assert record is not None


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: read(num_epochs=1), "Pipeline takes no num_epochs: give epochs to pipetrain.fit"),
        (
            lambda: read(lr=1),
            r"takes no lr: give lr to the optimizer, as in optimizer=lambda p: torch.optim.S",
        ),
        (lambda: read(batch_size=1), "takes no batch_size: give batch_size to the DataLoader"),
        (lambda: read(n_microbatches=1), "takes no n_microbatches; did you mean microbatches"),
        (
            lambda: read_optimizer("adam", None),
            r"needs optimizer=, such as lambda p: torch.optim.Adam\(p, ...\)",
        ),
        (lambda: read(codec="half"), "takes no codec; did you mean codec_forward or codec_backward"),
        (lambda: read(bufer_size=1), "takes no bufer_size; did you mean buffer_size"),
        (lambda: read_schedule("none.txt"), "schedule=none.txt is neither a function, a file nor one of"),
        (lambda: read_task(mse_loss, Classification(), (), None), "a Task has its loss, metrics and weight"),
        (lambda: read_task(mse_loss, None, 5, None), "metrics must be a list of Metric"),
        (lambda: read_task("modle", None, (), None), "loss='model' where the model computes it; got 'modle'"),
    ],
)
def test_what_is_no_argument_is_refused(call, says):
    with pytest.raises(ConfigError, match=says):
        call()


@pytest.mark.parametrize(
    "targets", ["", [], 5, b"label", ["label", 1], {"first", "second"}, {"label": 1}, iter(["label"])]
)
def test_targets_are_a_name_or_names_in_an_order(targets):
    """A set has another order in each process."""
    with pytest.raises(ConfigError, match=re.escape(f"targets={targets!r} must be the name")) as raised:
        read_targets(targets, Classification())
    assert raised.type is ConfigError
