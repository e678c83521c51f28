"""Weights of plain PyTorch are those of the model, or refused in one sentence."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from pipetrain import ConfigError
from pipetrain.checkpoint.resume import open_weights
from pipetrain.model.deferred_init import build
from pipetrain.model.tensor_places import named_tensors


def tied(width: int = 4) -> nn.Sequential:
    """An embedding and a head of one weight, and a buffer that is not in the state_dict."""
    model = nn.Sequential(nn.Embedding(6, width), nn.BatchNorm1d(width), nn.Linear(width, 6))
    model[2].weight = model[0].weight
    model[1].register_buffer("table", torch.arange(3.0), persistent=False)
    return model


@pytest.fixture
def state():
    torch.manual_seed(5)
    halves = tied().bfloat16().state_dict()
    return {key: tensor.clone() for key, tensor in halves.items()}


def as_torch(folder, state):
    torch.save(state, folder / "weights.pt")
    return folder / "weights.pt"


def as_safetensors(folder, state):
    save_file({key: tensor for key, tensor in state.items() if key != "2.weight"}, folder / "w.safetensors")
    return folder / "w.safetensors"


def as_folder(folder, state):
    return as_safetensors(folder, state).rename(folder / "model.safetensors").parent


def as_index(folder, state):
    files = {key: f"part-{number % 2}.safetensors" for number, key in enumerate(state)}
    for file in set(files.values()):
        save_file({key: state[key] for key in files if files[key] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


@pytest.mark.parametrize("write", [as_torch, as_safetensors, as_folder, as_index])
def test_each_form_is_read(tmp_path, state, write):
    model, _ = build(tied, 0)
    loaded = open_weights(write(tmp_path, state), model)
    made = loaded.tensors(named_tensors(model))
    assert made.keys() == state.keys() - {"2.weight"}
    assert all(torch.equal(tensor, state[name]) for name, tensor in made.items())  # halves lose nothing
    made["0.weight"].zero_()
    assert torch.equal(loaded.tensors(["0.weight"])["0.weight"], state["0.weight"])


def test_a_tied_tensor_is_found_under_any_name_and_two_different_ones_are_refused(tmp_path, state):
    other = {key: tensor for key, tensor in state.items() if key != "0.weight"}
    loaded = open_weights(as_torch(tmp_path, other), tied())
    assert torch.equal(loaded.tensors(["0.weight"])["0.weight"], state["2.weight"])
    loaded = open_weights(as_torch(tmp_path, state | {"2.weight": state["2.weight"] + 1}), tied())
    with pytest.raises(ConfigError, match=r"has two different tensors for 0.weight"):
        loaded.tensors(["0.weight"])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"2.bias": None, "1.bias": None}, "is of another model: it lacks 1.bias and others"),
        ({"mask": torch.zeros(1)}, "is of another model: it has also mask; give weights= whose names"),
        ({"2.bias": torch.zeros(6).double()}, r"has float64\[6\] as 2.bias, which is float32\[6\] here"),
        ({"lr": 0.1}, "cannot be read as a state_dict: it has other values than tensors; save one by"),
        (tied, "weights.pt cannot be read as a state_dict: Weights only load failed"),
        ("none.pt", "weights=.*none.pt is no file, and no folder with model.safetensors"),
        ("a.safetensors", "a.safetensors cannot be read"),
        ("model.safetensors.index.json", "index.json: its weight_map must be of type dict"),
    ],
)
def test_what_is_not_the_models_or_cannot_be_read_is_refused_in_one_sentence(
    tmp_path, state, change, sentence
):
    if isinstance(change, str):
        path = tmp_path if "index" in change else tmp_path / change
        if change != "none.pt":
            (tmp_path / change).write_text("{}")
    else:
        changed = {**state, **change} if isinstance(change, dict) else change
        if isinstance(changed, dict):
            changed = {key: t for key, t in changed.items() if t is not None}
        path = as_torch(tmp_path, changed)
    with pytest.raises(ConfigError, match=sentence) as raised:
        open_weights(path, tied())
    assert "\n" not in str(raised.value)
