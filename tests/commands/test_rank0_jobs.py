"""Which data set a run takes where the one that was asked for can't be had."""

from __future__ import annotations

import re
import socket
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetrain.commands.rank0_jobs import obtain_data
from pipetrain.data import DataMissing
from pipetrain.data.sampling import even
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


def test_a_data_set_that_is_there_is_taken_as_it_was_asked_for():
    cfg = config(["data=digits", "data.train_limit=50", "data.test_limit=20"])
    used, data = obtain_data(cfg, torch.float64)
    assert used is cfg
    assert data.train.inputs(torch.arange(1), None).dtype is torch.float64
    assert (data.name, len(data.train), len(data.test), data.note) == ("digits", 50, 20, "")


def test_the_fallback_says_what_was_missing_and_brings_its_recipe(closed, tmp_path, caplog):
    cfg = absent(closed, tmp_path)
    used, data = obtain_data(cfg, torch.float32)
    assert (used.data.name, data.name, len(data.train), len(data.test)) == ("digits", "digits", 1437, 360)
    assert (used.epochs, used.optim.lr, used.warmup) == (6, 0.005, 0.05)
    assert (cfg.data.name, cfg.epochs) == ("cifar10", 150)  # what was composed is left alone
    assert caplog.messages == [f"pipetrain: {data.note}"]
    assert re.fullmatch(rf".* {tmp_path}.* {closed}: .*; using digits instead", data.note)
    again, same = obtain_data(used, torch.float32)  # on the other ranks
    assert (again, same.fingerprint, same.note) == (used, data.fingerprint, "")


def test_what_was_overridden_by_hand_is_kept(closed, tmp_path):
    words = ["epochs=9", "optim.lr=0.3", "data.train_limit=70", "data.workers=2", "optim=adamw"]
    used, data = obtain_data(absent(closed, tmp_path, *words), torch.float32)
    assert (used.epochs, used.optim.lr, len(data.train), used.data.workers) == (9, 0.3, 70, 2)
    assert (used.warmup, used.data.augment.flip) == (0.05, False)  # a mirrored digit is another sign
    assert (used.data.root, used.data.fallback) == (None, None)


def test_without_another_data_set_the_error_names_the_ways_out_and_an_unknown_one_is_refused(
    closed, tmp_path
):
    with pytest.raises(DataMissing, match=r"^(?=.*data.root)(?=.*data.source.url)(?=.*data=digits).*$"):
        obtain_data(absent(closed, tmp_path, "data.fallback=null"), torch.float32)
    with pytest.raises(
        ConfigError, match=r"^data.fallback=cifar100 is unknown; choose one of cifar10, custom, "
    ):
        obtain_data(config(["data=digits", "data.fallback=cifar100"]), torch.float32)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.integers(1, 3000), st.integers(1, 300))
def test_an_evaluation_has_every_sample_once_in_even_pieces(samples, most):
    sizes = even(samples, most)
    assert list(accumulate(sizes))[-1] == samples
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == -(-samples // most)
