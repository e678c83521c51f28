"""`python -m pipetrain.export`: the merged weights of a checkpoint, for plain PyTorch.

    python -m pipetrain.export runs/my-run --out weights   # its newest whole checkpoint
    python -m pipetrain.export runs/my-run/checkpoints/update-00000046 --out weights

writes `weights.safetensors` and `weights.pt`, a state_dict that the model's factory loads.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from pipetrain.checkpoint.files import CHECKPOINTS, Tensors, best
from pipetrain.checkpoint.progress import best_epoch, read_progress
from pipetrain.checkpoint.source import Source, find_source
from pipetrain.ending import guarded
from pipetrain.errors import ConfigError, one_line
from pipetrain.untrusted import DamagedCheckpoint, read_as

_COMPLEX = {torch.float16: "complex32", torch.float32: "complex64", torch.float64: "complex128"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Export, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pipetrain.export", description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", help="the folder of a checkpoint, or of a run for its newest whole one")
    parser.add_argument("--best", action="store_true", help="of a run, the one of the best epoch")
    parser.add_argument("--ema", action="store_true", help="the moving average of the weights, see ema=")
    parser.add_argument("--out", type=Path, default=Path("weights"), help="without ending (default: weights)")
    options = parser.parse_args(arguments)
    return guarded(lambda: export(options.checkpoint, options.best, options.out, options.ema))


def export(checkpoint: str, of_best: bool, out: Path, ema: bool = False) -> int:
    """Write a checkpoint's weights to `out`.safetensors and `out`.pt, complex ones to the latter only.

    The model is neither built nor run. Raises ConfigError.
    """
    source = find_source(checkpoint, Path(checkpoint))
    if source is None:  # "auto" in a folder without checkpoints
        raise ConfigError(
            f"{checkpoint} is no checkpoint: give the folder of a run or of one of its checkpoints"
        )
    if of_best:
        source = _best(Path(checkpoint), source)
    state = merged(source, ema)
    update = source.manifest.position.update
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        written = list(_written(state, out, {"run": source.manifest.run, "update": str(update)}))
    except (OSError, RuntimeError, SafetensorError) as error:  # three libraries' errors of the disk
        raise ConfigError(f"--out {out} cannot be written: {one_line(error)}; choose another") from error
    print(f"{len(state)} tensors of update {update} in {' and '.join(written)}")
    return 0


def _written(state: dict[str, Tensor], out: Path, metadata: dict[str, str]) -> Iterator[str]:
    """Write the files, and yield their names. Not every version of safetensors supports complex numbers."""
    if not any(tensor.is_complex() for tensor in state.values()):
        save_file({name: tensor.clone() for name, tensor in state.items()}, f"{out}.safetensors", metadata)
        yield f"{out}.safetensors"
    torch.save(state, f"{out}.pt")
    yield f"{out}.pt"


def _best(run_dir: Path, newest: Source) -> Source:
    """Return the checkpoint of the best epoch in the newest one's history. Raises ConfigError if missing."""
    history = read_progress(newest.manifest).history
    if not history:
        raise ConfigError(f"{run_dir} has no best checkpoint: it has evaluated none")
    wanted = best_epoch(history)
    if math.isnan(wanted.score):
        raise ConfigError(f"{run_dir} has no best checkpoint: no epoch's metric is a number")
    name = best(run_dir / CHECKPOINTS)
    if name is not None and (run_dir / CHECKPOINTS / name).is_dir():
        source = find_source(str(run_dir / CHECKPOINTS / name), run_dir)
        assert source is not None
        mine = read_progress(source.manifest).history
        if mine and mine[-1].ended == wanted.ended and not source.manifest.position.batch:
            return source
    raise ConfigError(
        f"epoch {wanted.epoch} was the best of {run_dir}, and its "
        f"weights are not in this folder: not saved, or in the folder of the run that it went on from"
    )


def merged(source: Source, ema: bool = False) -> dict[str, Tensor]:
    """Return the state_dict of the whole model of a checkpoint, with averaged weights if `ema`.

    Raises ConfigError.
    """
    terms, where = source.manifest.conditions, str(source.folder)
    names = read_as(dict[str, str], terms.get("state_dict"), f"{where}: state_dict")
    forms = read_as(dict[str, list[Any]], terms.get("tensors"), f"{where}: tensors")
    tensors = Tensors(source.folder, list(source.manifest.parts))
    if ema and not tensors.names("ema/"):
        raise ConfigError(
            f"{where} has no moving average of the weights: train with ema=0.999, or leave --ema"
        )
    found: dict[str, Tensor] = {}
    for name in names.values():
        dtype, *shape = forms.get(name) or [None]
        kind = "ema" if ema and f"ema/{name}" in tensors else "model"  # buffers have no average
        tensor = tensors[f"{kind}/{name}"]
        if dtype == _COMPLEX.get(tensor.dtype) and tensor.shape[-1:] == (2,):
            tensor = torch.view_as_complex(tensor)
        if [str(tensor.dtype), *tensor.shape] != [f"torch.{dtype}", *shape]:
            raise DamagedCheckpoint(
                f"{where} has a {tensor.dtype} of {list(tensor.shape)} as {name}, not a {dtype} of {shape}"
            )
        found[name] = tensor
    return {key: found[name] for key, name in names.items()}


if __name__ == "__main__":
    sys.exit(main())
