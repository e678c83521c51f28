"""Tensors by name, each read when it is asked for: of our checkpoints, safetensors, Hugging Face, torch.save.

As weights to begin with, the names and forms of all are compared with the model's before one is read, so that
a file of another model is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from pipetrain.checkpoint.files import MOST_BYTES
from pipetrain.documents import DamagedCheckpoint, read_as, read_json
from pipetrain.errors import ConfigError, one_line
from pipetrain.network.model import state_names
from pipetrain.network.places import named_tensors
from pipetrain.network.values import TensorSpec, specs_of

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MODEL, OPTIMIZER, EMA = "model/", "optimizer/", "ema/"  # before names in our checkpoints
_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of a file."""

    spec: TensorSpec
    read: Callable[[], Tensor]


class Tensors:
    """The tensors of `path` by name, read on access."""

    def __init__(self, path: Path, entries: Mapping[str, _Entry]) -> None:
        self.path = path
        self._entries = entries

    @classmethod
    def of_files(cls, path: Path, names: Iterable[str]) -> Tensors:
        """Open files of safetensors in a folder. Raises ConfigError."""
        entries: dict[str, _Entry] = {}
        for name in names:
            entries |= _safetensors(path / name)
        return cls(path, entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._entries:
            raise DamagedCheckpoint(f"{self.path} has no tensor {name}")
        # In memory of its own: in the file's, numbers may lie where complex ones must not.
        return self._entries[name].read().clone()

    def spec(self, name: str) -> TensorSpec:
        return self._entries[name].spec

    def names(self, prefix: str = "") -> list[str]:
        """Return all names that start with `prefix`, without it."""
        return [name.removeprefix(prefix) for name in self._entries if name.startswith(prefix)]

    def copy_to(self, tensor: Tensor, name: str) -> None:
        """Overwrite a tensor with one of the same shape and dtype. Raises DamagedCheckpoint."""
        read = self[name]
        if specs_of([read]) != specs_of([tensor]):
            theirs, mine = specs_of([read, tensor])
            raise DamagedCheckpoint(f"{self.path} has a {theirs} as {name}, which is a {mine} here")
        tensor.copy_(read)

    def of_model(self, model: nn.Module) -> Tensors:
        """Return those of a model in one of our checkpoints, where complex ones are pairs of real numbers."""
        tensors = named_tensors(model)
        entries = {name: self._entries[MODEL + name] for name in self.names(MODEL)}
        for name, entry in entries.items():
            if name in tensors and tensors[name].is_complex():
                spec = TensorSpec(entry.spec.shape[:-1], entry.spec.dtype.to_complex())
                entries[name] = _Entry(spec, partial(_complex, entry.read))
        return Tensors(self.path, entries)


class Loaded:
    """Tensors as the Values of a model.

    `ours`: whether they have the names of parameters and buffers rather than of the model's state_dict, where
    one that is tied has several. Raises ConfigError for a tensor that is missing, one that the model does not
    have, and one of another form.
    """

    def __init__(self, tensors: Tensors, model: nn.Module, ours: bool = False) -> None:
        self._tensors = tensors
        mine = named_tensors(model)
        keys: dict[str, list[str]] = {}
        for key, name in ({name: name for name in mine} if ours else state_names(model)).items():
            keys.setdefault(name, []).append(key)
        self._keys = {name: [key for key in known if key in tensors] for name, known in keys.items()}
        if missing := [keys[name][0] for name, known in self._keys.items() if not known]:
            raise self._other_model("lacks", missing)
        if more := set(tensors.names()) - {key for known in keys.values() for key in known}:
            raise self._other_model("has also", sorted(more))
        for name, known in self._keys.items():
            for key in known:
                self._refuse_other(key, tensors.spec(key), specs_of([mine[name]])[0])

    def tensors(self, names: Collection[str]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name in names:
            for key in self._keys.get(name, ()):
                read = self._tensors[key]
                if name not in found:
                    found[name] = read
                elif not torch.equal(found[name], read):
                    raise ConfigError(
                        f"{self._tensors.path} has two different tensors for {name}, which the model uses in "
                        f"several places: give it one, or a model that does not tie them"
                    )
        return found

    def _other_model(self, has: str, names: list[str]) -> ConfigError:
        listed = f"{names[0]} and {len(names) - 1} others" if names[1:] else names[0]
        return ConfigError(
            f"{self._tensors.path} is of another model: it {has} {listed}; give weights= whose names are "
            f"those of the model's state_dict"
        )

    def _refuse_other(self, key: str, theirs: TensorSpec, mine: TensorSpec) -> None:
        has = f"it has {theirs} as {key}, which"
        if theirs.shape != mine.shape:
            raise ConfigError(
                f"{self._tensors.path} is of another model: {has} is {mine} here; give other weights="
            )
        kinds = [(d.is_floating_point, d.is_complex) for d in (theirs.dtype, mine.dtype)]
        if kinds[0] != kinds[1] or torch.promote_types(theirs.dtype, mine.dtype) != mine.dtype:
            raise ConfigError(
                f"{self._tensors.path} cannot be used: {has} would be rounded to {mine}; choose a dtype= "
                f"that holds it, or convert the file"
            )


def open_plain(path: Path) -> Tensors:
    """Open a file of torch.save or safetensors, or a folder of Hugging Face. Raises ConfigError."""
    if not path.exists():
        raise ConfigError(f"weights={path} does not exist: give a file or a folder with weights")
    if not path.is_dir():
        return Tensors(path, _safetensors(path) if path.suffix == ".safetensors" else _saved(path))
    if (path / INDEX).exists():
        index = read_json(path / INDEX, MOST_BYTES)
        files = index.get("weight_map") if isinstance(index, dict) else None
        files = read_as(dict[str, str], files, f"{path / INDEX}: its weight_map")
        return Tensors.of_files(path, sorted(set(files.values())))
    if not (path / SINGLE).exists():
        raise ConfigError(f"weights={path} has neither {SINGLE}, nor {INDEX}, nor a checkpoint: give a file")
    return Tensors.of_files(path, [SINGLE])


def _complex(read: Callable[[], Tensor]) -> Tensor:
    return torch.view_as_complex(read().clone())


def _safetensors(path: Path) -> dict[str, _Entry]:
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="pt")
        found = {}
        for key in file.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118
            slice = file.get_slice(key)  # type: ignore[no-untyped-call]
            if slice.get_dtype() not in _TYPES:
                raise ConfigError(f"{path} has {slice.get_dtype()} numbers as {key}: convert the file")
            spec = TensorSpec(tuple(slice.get_shape()), _TYPES[slice.get_dtype()])
            found[key] = _Entry(spec, partial(file.get_tensor, key))
    except (OSError, SafetensorError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {one_line(error)}") from error
    return found


def _saved(path: Path) -> dict[str, _Entry]:
    """Return the tensors of a state_dict that torch.save has written."""
    advice = "save one by torch.save(model.state_dict(), FILE)"
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # unpickling may raise anything
        cause = one_line(error)[:200]
        raise ConfigError(f"{path} cannot be read as a state_dict: {cause}; {advice}") from error
    values = list(state.values()) if isinstance(state, Mapping) else [state]
    if wrong := [value for value in values if not isinstance(value, Tensor)]:
        raise ConfigError(
            f"{path} holds a {type(wrong[0]).__name__}, and a state_dict holds tensors by name: {advice}"
        )
    return {key: _Entry(specs_of([t])[0], partial(state.__getitem__, key)) for key, t in state.items()}
