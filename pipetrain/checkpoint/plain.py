"""Weights to begin with, read tensor by tensor: of a file of safetensors or torch.save, or a folder.

A folder is one of Hugging Face's or has our checkpoints. The names and forms of all tensors are compared with
the model's before one is read, so that a file of another model is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from pipetrain.checkpoint.files import CHECKPOINTS, MANIFEST
from pipetrain.checkpoint.source import Source, find_source
from pipetrain.errors import ConfigError, one_line
from pipetrain.network.model import state_names
from pipetrain.network.network import Values
from pipetrain.network.places import named_tensors
from pipetrain.network.values import TensorSpec, specs_of
from pipetrain.untrusted import DamagedCheckpoint, opened, read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MOST_BYTES = 2**26  # of an index
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


class Loaded:
    """The tensors of a file as the Values of a model; those that no file has come from `rest`.

    `keys`: the names that each of the model's tensors may have in the file: several if it is tied. Raises
    ConfigError for a tensor that is missing, one that the model does not have, and one of another form.
    """

    def __init__(
        self,
        path: Path,
        entries: Mapping[str, _Entry],
        model: nn.Module,
        keys: Mapping[str, Sequence[str]],
        rest: Values | None,
    ) -> None:
        self._path = path
        self._rest = rest
        missing = [names[0] for names in keys.values() if entries.keys().isdisjoint(names)]
        if missing:
            raise _other_model(path, "lacks", missing)
        if more := entries.keys() - {key for names in keys.values() for key in names}:
            raise _other_model(path, "has also", sorted(more))
        for name, tensor in named_tensors(model).items():
            for key in entries.keys() & keys.get(name, ()):
                _refuse_other(path, key, entries[key].spec, specs_of([tensor])[0])
        self._entries = {
            name: [entries[key] for key in names if key in entries] for name, names in keys.items()
        }

        self.prove(named_tensors(model))

    def prove(self, names: Collection[str]) -> None:
        if self._rest is not None:
            self._rest.prove([name for name in names if name not in self._entries])

    def tensors(self, names: Collection[str]) -> dict[str, Tensor]:
        others = [name for name in names if name not in self._entries]
        found = self._rest.tensors(others) if self._rest is not None and others else {}
        for name in names:
            for entry in self._entries.get(name, ()):
                read = entry.read()
                if name not in found:
                    found[name] = read.clone()  # in memory of its own rather than the file's
                elif not torch.equal(found[name], read):
                    raise ConfigError(
                        f"{self._path} has two different tensors for {name}, which the model uses in several "
                        f"places: give it one, or a model that does not tie them"
                    )
        return found


def _other_model(path: Path, has: str, names: Sequence[str]) -> ConfigError:
    listed = f"{names[0]} and {len(names) - 1} others" if names[1:] else names[0]
    return ConfigError(
        f"{path} is of another model: it {has} {listed}; give weights= whose names are those of the model's "
        f"state_dict"
    )


def _refuse_other(path: Path, key: str, theirs: TensorSpec, mine: TensorSpec) -> None:
    if theirs.shape != mine.shape:
        raise ConfigError(
            f"{path} is of another model: it has {theirs} as {key}, which is {mine} here; give other weights="
        )
    kinds = [(d.is_floating_point, d.is_complex) for d in (theirs.dtype, mine.dtype)]
    if kinds[0] != kinds[1] or torch.promote_types(theirs.dtype, mine.dtype) != mine.dtype:
        raise ConfigError(
            f"{path} has {theirs} as {key}, which would be rounded to {mine}: choose a dtype= that holds it, "
            f"or convert the file"
        )


def read_weights(path: str | Path, model: nn.Module, rest: Values | None = None) -> Loaded:
    """Open the weights of a model. Raises ConfigError for what is not of it, or cannot be read."""
    path = Path(path).expanduser().absolute()
    if not path.exists():
        raise ConfigError(f"weights={path} does not exist: give a file or a folder with weights")
    if not path.is_dir():
        entries = _safetensors(path) if path.suffix == ".safetensors" else _saved(path)
    elif (path / INDEX).exists():
        entries = _indexed(path)
    elif (path / SINGLE).exists():
        entries = _safetensors(path / SINGLE)
    elif (path / CHECKPOINTS).is_dir() or (path / MANIFEST).exists():
        source = find_source(str(path), path)
        assert source is not None
        return of_checkpoint(source, model)
    else:
        raise ConfigError(f"weights={path} has neither {SINGLE}, nor {INDEX}, nor a checkpoint: give a file")
    keys: dict[str, list[str]] = {}
    for key, name in state_names(model).items():
        keys.setdefault(name, []).append(key)
    return Loaded(path, entries, model, keys, rest)


def of_checkpoint(source: Source, model: nn.Module) -> Loaded:
    """Return the weights of one of our checkpoints, which has all parameters and buffers by their names."""
    entries: dict[str, _Entry] = {}
    for file in source.manifest.parts:
        entries |= _safetensors(source.folder / file)
    tensors = named_tensors(model)
    mine = {key.removeprefix("model/"): entry for key, entry in entries.items() if key.startswith("model/")}
    for name, entry in mine.items():
        if name in tensors and tensors[name].is_complex():
            spec = TensorSpec(entry.spec.shape[:-1], entry.spec.dtype.to_complex())
            mine[name] = _Entry(spec, partial(_complex, entry.read))
    return Loaded(source.folder, mine, model, {name: [name] for name in tensors}, None)


def _complex(read: Callable[[], Tensor]) -> Tensor:
    return torch.view_as_complex(read())


def _safetensors(path: Path) -> dict[str, _Entry]:
    from safetensors import SafetensorError, safe_open

    with opened(path):  # refuses a FIFO, for which the library would wait
        pass
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


def _indexed(folder: Path) -> dict[str, _Entry]:
    """Return the tensors of the files that an index lists."""
    data = read_json(folder / INDEX, MOST_BYTES)
    files = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(files, dict) or not all(
        isinstance(file, str) and Path(file).name == file for file in files.values()
    ):
        raise DamagedCheckpoint(f"{folder / INDEX} has no weight_map of names to files beside it")
    parts = {file: _safetensors(folder / file) for file in sorted(set(files.values()))}
    for key, file in files.items():
        if key not in parts[file]:
            raise DamagedCheckpoint(f"{folder / file} has no {key}, which {INDEX} says")
    return {key: parts[file][key] for key, file in files.items()}


def _saved(path: Path) -> dict[str, _Entry]:
    """Return the tensors of a state_dict that torch.save has written."""
    with opened(path):
        pass
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # unpickling may raise anything
        raise ConfigError(
            f"{path} cannot be read as a state_dict: {one_line(error)[:200]}; save one by "
            f"torch.save(model.state_dict(), FILE)"
        ) from error
    wrong = state if not isinstance(state, Mapping) else None
    wrong = wrong or next((v for v in state.values() if not isinstance(v, Tensor)), None)
    if wrong is not None:
        raise ConfigError(
            f"{path} holds a {type(wrong).__name__}, and a state_dict holds tensors by name: save one by "
            f"torch.save(model.state_dict(), FILE)"
        )
    return {key: _Entry(specs_of([t])[0], partial(state.__getitem__, key)) for key, t in state.items()}
