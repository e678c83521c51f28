"""A Pipeline's checkpoint: training goes on from it as if it had never ended."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from pipetrain import ConfigError, export, pipeline
from tests.support.programs import damaged_on_one_rank, first_half, going_on, loader_of, resumed, whole
from tests.support.worlds import run_world


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr(pipeline, "_open", None)


@pytest.mark.parametrize("begun", [False, True], ids=["before the first batch", "after it"])
def test_what_goes_on_is_what_would_have_been_to_the_last_bit(tmp_path, begun):
    losses, state = whole(tmp_path, "1f1b")
    again, restored = resumed(tmp_path, "1f1b", begun)
    assert again == losses[3:]
    assert all(torch.equal(restored[name], tensor) for name, tensor in state.items())


@pytest.mark.processes
def test_it_goes_on_with_other_processes_and_another_schedule_and_is_exported(tmp_path):
    (weights, known), (none, _) = run_world(first_half, 2, tmp_path)
    assert not none
    assert export.main([str(tmp_path), "--out", str(tmp_path / "weights")]) == 0
    weights = {name: torch.from_numpy(tensor) for name, tensor in weights.items()}
    exported = load_file(tmp_path / "weights.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in weights.items())
    pipe = pipeline_for_resuming(tmp_path)
    assert pipe.updates == 3
    assert all(torch.equal(pipe.state_dict()[name], tensor) for name, tensor in weights.items())
    assert pipe.evaluate(loader_of(19)) == pytest.approx(known, rel=1e-12)


@pytest.mark.processes
def test_a_rank_that_cannot_write_stops_all_of_them_and_leaves_nothing(tmp_path):
    first, second = run_world(damaged_on_one_rank, 2, tmp_path)
    assert first == second
    assert first.startswith("rank 1 cannot write ")
    assert first.endswith("No space left")
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    whole(tmp_path, "1f1b")
    with pytest.raises(ConfigError, match=r"it has tensors.0.bias=\['float64', 6\], and this run has"):
        pipeline_for_resuming(tmp_path, width=7)


def pipeline_for_resuming(folder, width=6):
    pipeline._open = None
    pipe = going_on("pipedream", width)
    pipe.load(folder)
    return pipe
