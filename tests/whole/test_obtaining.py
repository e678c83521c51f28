"""Which data set a run takes where the one that was asked for can't be had."""

from __future__ import annotations

import socket
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetrain.data import DataMissing, obtain_data
from pipetrain.data.loader import even
from pipetrain.errors import ConfigError
from tests.support.cases import config


@pytest.fixture
def closed() -> str:
    """An address of this machine where nobody answers: a port that is bound, and not listened at."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}/cifar-10-python.tar.gz"


def absent(closed: str, tmp_path: Path, *overrides: str):
    """A configuration of CIFAR-10 that can't be had."""
    return config([f"data.source.url={closed}", f"data.root={tmp_path}/sets", "model=mlp", *overrides])


# The data set really used


def test_a_data_set_that_is_there_is_taken_as_it_was_asked_for():
    cfg = config(["data=digits", "data.train_limit=50", "data.test_limit=20"])
    used, data = obtain_data(cfg, torch.float64)
    assert used is cfg
    assert data.train.inputs(torch.arange(1), None).dtype is torch.float64
    assert (data.name, len(data.train), len(data.test), data.note) == ("digits", 50, 20, "")


def test_the_fallback_says_what_was_missing_and_why(closed, tmp_path, caplog):
    used, data = obtain_data(absent(closed, tmp_path), torch.float32)
    assert (used.data.name, data.name, len(data.train), len(data.test)) == ("digits", "digits", 1437, 360)
    (record,) = [record for record in caplog.records if record.name == "pipetrain"]
    said = record.getMessage()
    assert record.levelname == "WARNING"
    assert said == f"pipetrain: {data.note}"
    assert said.endswith("; using digits instead")
    assert "\n" not in said
    assert str(tmp_path) in said
    assert closed in said


def test_the_recipe_goes_with_the_data_set_really_used(closed, tmp_path):
    cfg = absent(closed, tmp_path)
    assert (cfg.epochs, cfg.optim.lr, cfg.lr_schedule) == (150, 0.05, "cosine")
    used, _ = obtain_data(cfg, torch.float32)
    assert (used.epochs, used.optim.lr, used.warmup) == (6, 0.005, 0.05)
    assert (cfg.data.name, cfg.epochs) == ("cifar10", 150)  # what was composed is left alone
    adam, _ = obtain_data(absent(closed, tmp_path, "optim=adamw"), torch.float32)
    assert adam.optim.lr == config(["data=digits"]).data.recipe.adamw_lr


def test_what_was_overridden_by_hand_is_kept(closed, tmp_path):
    used, _ = obtain_data(
        absent(closed, tmp_path, "epochs=9", "optim.lr=0.3", "lr_schedule=constant", "label_smoothing=0.2"),
        torch.float32,
    )
    assert (used.epochs, used.optim.lr, used.lr_schedule, used.label_smoothing) == (9, 0.3, "constant", 0.2)
    assert used.warmup == 0.05


def test_limits_and_the_loader_s_settings_are_carried_over(closed, tmp_path):
    used, data = obtain_data(
        absent(
            closed,
            tmp_path,
            *("data.train_limit=70", "data.test_limit=30", "data.workers=2", "data.drop_last=true"),
        ),
        torch.float32,
    )
    assert (len(data.train), len(data.test)) == (70, 30)
    assert (used.data.workers, used.data.drop_last) == (2, True)
    assert used.data.augment.flip is False  # a mirrored digit is another sign
    assert (used.data.root, used.data.fallback) == (None, None)


def test_what_rank_0_found_the_others_find_without_asking(closed, tmp_path):
    used, data = obtain_data(absent(closed, tmp_path, "data.train_limit=70"), torch.float32)
    again, same = obtain_data(used, torch.float32)
    assert again is used
    assert same.fingerprint == data.fingerprint
    assert same.note == ""


def test_without_a_fallback_the_error_names_the_ways_out(closed, tmp_path):
    with pytest.raises(DataMissing) as error:
        obtain_data(absent(closed, tmp_path, "data.fallback=null"), torch.float32)
    said = str(error.value)
    assert "\n" not in said
    for way in ("data.root", "data.source.url", "data=digits"):
        assert way in said


@pytest.mark.parametrize("name", ["foo", "cifar100", "''", "3"])
def test_an_unknown_fallback_is_refused_whether_it_is_needed_or_not(name):
    with pytest.raises(ConfigError, match=r"is unknown; choose one of cifar10, custom, digits, .*, or null"):
        obtain_data(config(["data=digits", f"data.fallback={name}"]), torch.float32)


def test_a_data_set_is_no_fallback_of_itself(closed, tmp_path):
    with pytest.raises(DataMissing):
        obtain_data(absent(closed, tmp_path, "data.fallback=cifar10"), torch.float32)


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 300))
def test_an_evaluation_has_every_sample_once_in_even_pieces(samples, most):
    sizes = even(samples, most)
    assert list(accumulate(sizes))[-1] == samples
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == -(-samples // most)
