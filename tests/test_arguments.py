"""Pipeline's arguments in the terms of the configuration."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipetrain import Classification, ConfigError, Task
from pipetrain.arguments import read_model, read_options, read_schedule, read_task
from pipetrain.schedule.actions import format_program, parse_program
from pipetrain.schedule.programs import gpipe, one_f_one_b

MODEL = nn.Linear(2, 2)


def read(schedule="1f1b", model=MODEL, **given):
    name, _, defaults = read_schedule(schedule)
    return read_options(given, model, name, defaults, 1)


def test_a_shipped_schedule_brings_its_microbatches_and_window_and_an_argument_replaces_them():
    sizes = [(one.microbatches, one.window) for one in (read(), read("pipedream"), read(gpipe))]
    assert sizes == [(4, 1), (1, None), (1, 1)]
    given = read("pipedream", microbatches=3, window=2)
    assert (given.microbatches, given.window) == (3, 2)


def test_options_have_the_defaults_of_the_command_line():
    plain = read()
    assert (plain.partition, plain.buffer_size, plain.timeout, plain.on_nan) == ("flops", 2, 300, "stop")
    assert read(partition=[1], buffer_size=5).partition == [1]
    assert read(codec_forward="half").codecs != plain.codecs


def test_the_dtype_is_that_of_the_model():
    assert read().dtype is torch.float32
    assert read(model=nn.Linear(2, 2).double()).dtype is torch.float64
    assert read(dtype=torch.float64).dtype is torch.float64
    assert read(model=nn.Linear(2, 2).half()).data_dtype is None


def test_what_the_arguments_stand_for_is_no_option():
    for key in ("batch_size", "epochs", "optim", "warmup"):
        with pytest.raises(ConfigError, match=f"Pipeline takes no {key}"):
            read(**{key: 1})


def test_a_loss_and_a_task_are_given_once():
    task = Classification()
    assert read_task(task, None, (), None) is task
    assert read_task(None, task, (), None) is task
    assert isinstance(read_task(functional.mse_loss, None, (), None), Task)
    with pytest.raises(ConfigError, match="a Task has its loss, metrics and weight"):
        read_task(functional.mse_loss, task, (), None)
    with pytest.raises(ConfigError, match="loss='model' where the model computes it; got 'modle'"):
        read_task("modle", None, (), None)


def test_a_program_file_is_read_with_or_without_its_messages(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text(format_program(one_f_one_b(2, 1, 4)))
    name, schedule, _ = read_schedule(path)
    assert (name, schedule(2, 1, 4)) == ("mine", parse_program(path.read_text()))
    with pytest.raises(ConfigError, match=r"schedule=none.txt is neither a function, a file nor one of 1f1b"):
        read_schedule("none.txt")


def test_a_function_is_called_to_make_the_model():
    model, record = read_model(lambda: nn.Linear(2, 2), 3)
    assert model.weight.is_meta
    assert record is not None
