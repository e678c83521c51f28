"""A checkpoint of Pipeline that cannot be written, or is of another model; others: whole/test_any_module."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

import pytest
import torch
from torch.nn.functional import cross_entropy

from pipetrain import ConfigError, Pipeline, TrainingStopped
from pipetrain.checkpoint import writer
from tests.support.parity import MOMENTUM
from tests.support.subjects import mlp


def pipe_of() -> Pipeline:
    return Pipeline(mlp(), cross_entropy, MOMENTUM, microbatches=2, device="cpu", threads=1)


BATCHES = [(torch.ones(8, 6, dtype=torch.float64), torch.arange(8) % 5)] * 3


def full(*arguments: object) -> NoReturn:
    raise OSError("No space left")


def damaged_on_one_rank(folder: str) -> str:
    """Save where rank 1 cannot write; return what is told. The training can go on."""
    with pipe_of() as pipe:
        list(pipe.train(BATCHES))
        with (
            patch.object(writer, "write_part", full if pipe.rank else writer.write_part),
            pytest.raises(TrainingStopped) as stopped,
        ):
            pipe.save(folder)
        list(pipe.train(BATCHES))
        return str(stopped.value)


@pytest.mark.processes
def test_a_rank_that_cannot_write_stops_all_of_them_and_leaves_nothing(ranks, tmp_path):
    first, second = ranks(damaged_on_one_rank, str(tmp_path))
    assert first == second
    assert first.startswith("rank 1 cannot write ")
    assert first.endswith("No space left")
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path):
    with pipe_of() as pipe:
        list(pipe.train(BATCHES))
        pipe.save(tmp_path)
    wider = mlp()
    wider[0] = torch.nn.Linear(6, 7).double()
    wider[2] = torch.nn.Linear(7, 6).double()
    with (
        Pipeline(wider, cross_entropy, MOMENTUM, device="cpu", threads=1) as pipe,
        pytest.raises(ConfigError, match=r"it has tensors.0.bias=\['float64', 6\], and this run has"),
    ):
        pipe.load(tmp_path)
