"""The merged weights of a checkpoint load into the plain model."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from pipetrain.checkpoint.files import CHECKPOINTS
from pipetrain.export import main
from tests.support.cases import Case, Saved, run_in_threads
from tests.support.models import with_norm

CONFIG = {"model": {"_target_": "tests.support.models.with_norm"}, "dtype": "float64"}


def test_both_files_load_into_the_model_that_was_trained(tmp_path, capsys):
    case = Case("pipedream", 2, ("microbatches=1", "window=2", "epochs=2"))
    wanted, _ = run_in_threads(case, saved=Saved(tmp_path / "run", config=CONFIG))
    out = tmp_path / "deep" / "weights"
    assert main([str(tmp_path / "run"), "--out", str(out)]) == 0
    assert "of update 8 in" in capsys.readouterr().out
    for state in (load_file(f"{out}.safetensors"), torch.load(f"{out}.pt", weights_only=True)):
        model = with_norm().double()
        model.load_state_dict(state)
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in wanted.items())


def test_one_checkpoint_or_the_best(tmp_path, capsys):
    run_in_threads(Case("1f1b", 2, ("microbatches=2",)), saved=Saved(tmp_path / "run", config=CONFIG))
    first = sorted((tmp_path / "run" / CHECKPOINTS).glob("update-*"))[0]
    assert main([str(first), "--out", str(tmp_path / "first")]) == 0
    assert main([str(tmp_path / "run"), "--best", "--out", str(tmp_path / "best")]) == 0
    assert (tmp_path / "best.pt").exists()


@pytest.mark.parametrize("arguments", [["nowhere"], ["nowhere", "--best"]])
def test_what_is_none_is_refused(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("pipetrain: ")
