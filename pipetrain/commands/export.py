"""`python -m pipetrain.export`: the merged weights of a checkpoint, for plain PyTorch and Hugging Face.

    python -m pipetrain.export runs/my-run --out weights   # its newest whole checkpoint
    python -m pipetrain.export runs/my-run/checkpoints/update-00000046 --out weights

writes `weights.safetensors`, a state_dict that the model's factory loads; with complex numbers `weights.pt`,
of torch.save. Of a model of transformers it writes a folder `weights`, which `from_pretrained` reads.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from pipetrain.checkpoint.epoch_record import best_update
from pipetrain.checkpoint.files import CHECKPOINTS, folder_name, write_tensors
from pipetrain.checkpoint.resume import Source, saved_in
from pipetrain.checkpoint.tensor_reader import EMA, SINGLE
from pipetrain.errors import ConfigError, one_line
from pipetrain.exit import guarded


def main(arguments: Sequence[str] | None = None) -> int:
    """Export, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pipetrain.export", description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path, help="the folder of a checkpoint, or of a run")
    parser.add_argument("--best", action="store_true", help="of a run, the one of the best epoch")
    parser.add_argument("--ema", action="store_true", help="the moving average of the weights, see ema=")
    says = "the file, without its ending, or for a model of transformers the folder (default: weights)"
    parser.add_argument("--out", default="weights", help=says)
    options = parser.parse_args(arguments)
    out = Path(options.out.removesuffix(".safetensors"))
    return guarded(lambda: export(options.checkpoint, options.best, out, options.ema))


def export(checkpoint: Path, of_best: bool, out: Path, ema: bool = False) -> int:
    """Write a checkpoint's weights. The model is neither built nor run. Raises ConfigError."""
    source = saved_in(checkpoint)
    if source is None:
        raise ConfigError(f"{checkpoint} is the folder of a run that has saved no checkpoint")
    if of_best:
        source = _best(checkpoint, source)
    tensors, keys = source.model(), source.manifest.conditions["state_dict"]
    if ema:
        averaged = source.model(EMA)  # of weights: buffers have no average
        if not averaged:
            raise ConfigError(
                f"{source.folder} has no moving average of the weights: train with ema=0.999, or leave --ema"
            )
        tensors |= averaged
    state = {key: tensors[name] for key, name in keys.items()}
    try:
        written = _written(state, out, source.manifest.config.get("transformers"))
    except (OSError, RuntimeError) as error:  # torch's error of the disk
        raise ConfigError(f"--out {out} cannot be written: {one_line(error)}; choose another") from error
    print(f"{len(state)} tensors of update {source.manifest.position.update} in {written}")
    return 0


def _best(run_dir: Path, newest: Source) -> Source:
    """Return the checkpoint of the best epoch in the newest one's history. Raises ConfigError if missing."""
    update = best_update(newest.manifest.progress.history)
    folder = run_dir / CHECKPOINTS / folder_name(update or 0)
    if not folder.is_dir():
        elsewhere = f"update {update} was not saved, or is in the folder of the run that it went on from"
        why = elsewhere if update is not None else "no epoch has a score"
        raise ConfigError(f"{run_dir} has no checkpoint of the best epoch: {why}")
    return saved_in(folder) or newest


def _written(state: dict[str, Tensor], out: Path, config: Mapping[str, object] | None) -> Path:
    (out if config else out.parent).mkdir(parents=True, exist_ok=True)
    if any(tensor.is_complex() for tensor in state.values()):  # some of which safetensors cannot hold
        path = out.with_name(out.name + ".pt")
        torch.save(state, path)
        return path
    path = out / SINGLE if config else out.with_name(out.name + ".safetensors")
    if config:
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_tensors(path, {name: tensor.clone() for name, tensor in state.items()}, {"format": "pt"})
    return out if config else path
