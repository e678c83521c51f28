"""The merged weights of a checkpoint load into the plain model."""

from __future__ import annotations

import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipetrain import Pipeline
from pipetrain.checkpoint.files import CHECKPOINTS
from pipetrain.commands.export import main
from tests.support import edge_case_models
from tests.support.cases import Case, make_run
from tests.support.models import with_norm
from tests.support.run_files import forge, put
from tests.support.thread_ranks import Saved, run_in_threads


def test_it_loads_into_the_model_that_was_trained_and_so_does_its_moving_average(tmp_path, capsys):
    case = Case("1f1b", 2, ("microbatches=2", "epochs=1", "ema=0.75"), 24)
    wanted, _ = run_in_threads(case, saved=Saved(tmp_path / "run"))
    out, model = tmp_path / "deep" / "weights", with_norm().double()

    def exported(folder: Path, *words: str) -> dict[str, torch.Tensor]:
        assert main([str(folder), *words, "--out", str(out)]) == 0
        model.load_state_dict(load_file(f"{out}.safetensors"))
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    states = [exported(path) for path in sorted((tmp_path / "run" / CHECKPOINTS).glob("update-*"))]
    assert len(states) == 2
    assert "of update 2 in" in capsys.readouterr().out
    averaged, parameters = exported(tmp_path / "run", "--ema"), dict(model.named_parameters())
    for name, tensor in wanted.items():
        assert torch.equal(states[1][name], tensor)
        mean = 0.75 * states[0][name] + 0.25 * tensor if name in parameters else tensor  # of a buffer
        torch.testing.assert_close(averaged[name], mean, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "factory", [edge_case_models.tied_registered, edge_case_models.fourier, edge_case_models.unsaved]
)
def test_shared_complex_and_left_out_ones_come_back_as_they_are(factory, tmp_path):
    case = Case("1f1b", 2, (f"model._target_={factory.__module__}.{factory.__name__}", "partition=[1]"))
    wanted, _ = run_in_threads(case, saved=Saved(tmp_path / "run"))
    assert main([str(tmp_path / "run"), "--out", str(tmp_path / "weights")]) == 0
    model = make_run(case).take_network().model
    out = tmp_path / "weights"
    complex = factory is edge_case_models.fourier
    state = torch.load(f"{out}.pt") if complex else load_file(f"{out}.safetensors")
    assert state.keys() == model.state_dict().keys()
    model.load_state_dict(state)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.named_parameters())


# Epoch 3 is the best, which two others equal.
BEST_OF_FIVE = Case("1f1b", 1, ("microbatches=2", "epochs=5", "seed=1"), 48)


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    run_in_threads(BEST_OF_FIVE, saved=Saved(tmp_path / "run", every=2, unit="epochs"))
    return tmp_path / "run"


def refusal(capsys, *arguments: str) -> str:
    """What an export is refused with: one line."""
    assert main(list(arguments)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_one_checkpoint_or_the_best_or_none_that_is_not_there_and_no_code_of_it_is_run(run, capsys):
    for path in (run / CHECKPOINTS).glob("update-*"):
        for place in ("config", "conditions"):
            forge(path, put(place, "model", to={"_target_": "os.mkdir", "path": "made"}))
    first = min((run / CHECKPOINTS).glob("update-*"))
    assert main([str(first), "--out", "first"]) == 0
    assert main(["run", "--best", "--out", "best.safetensors"]) == 0
    assert Path("best.safetensors").stat().st_mode == (first / "manifest.json").stat().st_mode
    said = capsys.readouterr().out
    assert f"of update {int(first.name.removeprefix('update-'))} in first.safetensors" in said
    assert "of update 12 in best.safetensors" in said
    assert not Path("made").exists()
    shutil.rmtree(run / CHECKPOINTS / "update-00000012")
    says = "run has no checkpoint of the best epoch: update 12 was not saved, or is in the folder of the run"
    assert says in refusal(capsys, "run", "--best")
    for path in (run / CHECKPOINTS).glob("update-*"):
        forge(path, put("progress", "history", to=[]))
    assert "run has no checkpoint of the best epoch: no epoch has a score" in refusal(capsys, "run", "--best")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere", "--best"], "nowhere is no checkpoint: give the folder of a run"),
        (["run", "--ema"], "has no moving average of the weights: train with ema=0.999, or leave --ema"),
        (["run", "--out", "run/config.json/weights"], "--out run/config.json/weights cannot be written"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(arguments, says, run, capsys):
    Path("run/config.json").touch()
    assert says in refusal(capsys, *arguments)


@pytest.mark.slow
def test_a_model_of_transformers_is_a_folder_that_from_pretrained_reads(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=8, n_embd=16, n_layer=1, n_head=2, use_cache=False
    )
    ids = torch.arange(32).reshape(4, 8)
    model = transformers.GPT2LMHeadModel(config).train()
    with Pipeline(model, "model", lambda p: torch.optim.SGD(p, 0.1), threads=1) as pipe:
        pipe.step({"input_ids": ids, "labels": ids})
        pipe.save(tmp_path / "run")
    assert main([str(tmp_path / "run"), "--out", str(tmp_path / "weights")]) == 0
    assert capsys.readouterr().out.endswith(f"of update 1 in {tmp_path / 'weights'}\n")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "weights")
    assert type(read) is type(model)
    assert torch.equal(read.eval()(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize("module", ["pipetrain.export", "pipetrain.timelines"])
def test_a_command_runs_by_the_name_that_is_documented(module, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module(module, run_name="__main__")
    assert end.value.code == 0
    assert f"python -m {module}" in capsys.readouterr().out
