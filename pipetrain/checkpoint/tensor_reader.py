"""Tensors by name, from files that are mapped into memory: safetensors, Hugging Face, torch.save.

Numbers are read when used. Initial weights are first compared with the model's names and forms, so a file of
another model is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipetrain.errors import ConfigError, one_line
from pipetrain.model.requirements import state_names
from pipetrain.model.specs import specs_of
from pipetrain.model.tensor_places import named_tensors
from pipetrain.typed_json import DamagedCheckpoint, read_as, read_json, refuse_device

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MODEL, OPTIMIZER, EMA = "model/", "optimizer/", "ema/"  # before names in our checkpoints
ATTRIBUTE = "attribute/"

NamedTensors = Mapping[str, Tensor]
"""Must not be changed or viewed as complex: a file's alignment may not suit complex tensors."""


def names_of(tensors: NamedTensors, prefix: str) -> list[str]:
    """Return the names that start with `prefix`, without it."""
    return [name.removeprefix(prefix) for name in tensors if name.startswith(prefix)]


class Loaded:
    """Tensors of a file as the Values of a model.

    `keys`: the parameter or buffer of each tensor; a tied one may have several. Raises ConfigError for a
    missing tensor, one that the model does not have, and one of another form.
    """

    def __init__(self, path: Path, tensors: NamedTensors, model: nn.Module, keys: Mapping[str, str]) -> None:
        self._path = path
        self._tensors = tensors
        self._keys: dict[str, list[str]] = {name: [] for name in keys.values()}
        for key in tensors.keys() & keys.keys():
            self._keys[keys[key]].append(key)
        lacks = [name for name, found_keys in self._keys.items() if not found_keys]
        for has, names in (("lacks", lacks), ("has also", sorted(tensors.keys() - keys.keys()))):
            if names:
                raise ConfigError(
                    f"{path} is of another model: it {has} {names[0]}{' and others' if names[1:] else ''}; "
                    f"give weights= whose names are those of the model's state_dict"
                )
        expected = named_tensors(model)
        for key, name in keys.items():
            if key in tensors:
                self._refuse_other(key, tensors[key], expected[name])

    def tensors(self, names: Collection[str]) -> dict[str, Tensor]:
        chosen = {}
        for name in self._keys.keys() & names:
            first, *copies = (self._tensors[key] for key in self._keys[name])
            if not all(torch.equal(first, other) for other in copies):
                raise ConfigError(
                    f"{self._path} has two different tensors for {name}, which the model uses in several "
                    f"places: give it one, or a model that does not tie them"
                )
            chosen[name] = first.clone()
        return chosen

    def _refuse_other(self, key: str, saved: Tensor, expected: Tensor) -> None:
        same_kind = saved.is_floating_point() == expected.is_floating_point()
        exact = same_kind and torch.promote_types(saved.dtype, expected.dtype) == expected.dtype
        if saved.shape != expected.shape or not exact:
            file, model = specs_of([saved, expected])
            raise ConfigError(
                f"{self._path} cannot be used: it has {file} as {key}, which is {model} here; give other "
                f"weights=, or a dtype= that holds them"
            )


def open_plain(path: Path, model: nn.Module) -> Loaded:
    """Open a file of torch.save or safetensors, or a folder of Hugging Face. Raises ConfigError."""
    if (path / INDEX).exists():
        index = read_json(path / INDEX)
        files = read_as(dict[str, Any], index, str(path / INDEX)).get("weight_map")
        files = read_as(dict[str, str], files, f"{path / INDEX}: its weight_map")
        tensors = read_files(path, sorted(set(files.values())))
    elif (path / SINGLE).exists():
        tensors = read_files(path, [SINGLE])
    elif path.is_file():
        tensors = read_files(path.parent, [path.name]) if path.suffix == ".safetensors" else _saved(path)
    else:
        raise ConfigError(
            f"weights={path} is no file, and no folder with {SINGLE}, {INDEX} or a checkpoint: give one"
        )
    return Loaded(path, tensors, model, state_names(model))


def read_files(folder: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the tensors of files of safetensors. Raises DamagedCheckpoint."""
    from safetensors import SafetensorError, safe_open  # here: a run without checkpoints works without it

    tensors: dict[str, Tensor] = {}
    for name in names:
        try:
            refuse_device(folder / name)
            with safe_open(folder / name, framework="pt") as file:
                tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise DamagedCheckpoint(f"{folder / name} cannot be read: {one_line(error)}") from error
    return tensors


def _saved(path: Path) -> dict[str, Tensor]:
    try:
        state: dict[str, Tensor] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        if not all(isinstance(tensor, Tensor) for tensor in state.values()):
            raise TypeError("it has other values than tensors")
    except Exception as error:  # unpickling may raise anything
        raise ConfigError(
            f"{path} cannot be read as a state_dict: {one_line(error)[:200]}; save one by "
            f"torch.save(model.state_dict(), FILE)"
        ) from error
    return state
