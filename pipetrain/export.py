"""`python -m pipetrain.export`: the merged weights of a checkpoint, for plain PyTorch.

    python -m pipetrain.export runs/my-run --out weights   # its newest whole checkpoint
    python -m pipetrain.export runs/my-run/checkpoints/update-00000046 --out weights

writes `weights.safetensors` and `weights.pt`, a state_dict that the model's factory loads.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from safetensors.torch import save_file
from torch import Tensor

from pipetrain.building import make_model
from pipetrain.checkpoint.files import CHECKPOINTS, Tensors, best
from pipetrain.checkpoint.untrusted import DamagedCheckpoint
from pipetrain.config import DTYPES
from pipetrain.errors import ConfigError
from pipetrain.launch import guarded
from pipetrain.runtime.tally import numbers_of
from pipetrain.training.figures import most_accurate, read_progress
from pipetrain.training.resume import Source, find_source


def main(arguments: Sequence[str] | None = None) -> int:
    """Export, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pipetrain.export", description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", help="the folder of a checkpoint, or of a run for its newest whole one")
    parser.add_argument("--best", action="store_true", help="of a run, the one with the best accuracy")
    parser.add_argument("--out", type=Path, default=Path("weights"), help="without ending (default: weights)")
    options = parser.parse_args(arguments)
    return guarded(lambda: export(options.checkpoint, options.best, options.out))


def export(checkpoint: str, of_best: bool, out: Path) -> int:
    """Write a checkpoint's weights to `out`.safetensors and `out`.pt. Raises ConfigError."""
    source = find_source(checkpoint, Path(checkpoint))
    if source is None:  # the word auto, in a folder that has none
        raise ConfigError(
            f"{checkpoint} is no checkpoint: give the folder of a run or of one of its checkpoints"
        )
    if of_best:
        source = _best(Path(checkpoint), source)
    state = merged(source)
    out.parent.mkdir(parents=True, exist_ok=True)
    position = source.manifest.position
    metadata = {"run": source.manifest.run, "update": str(position.update)}
    save_file({name: tensor.clone() for name, tensor in state.items()}, f"{out}.safetensors", metadata)
    torch.save(state, f"{out}.pt")
    print(f"{len(state)} tensors of update {position.update} in {out}.safetensors and {out}.pt")
    return 0


def _best(run_dir: Path, newest: Source) -> Source:
    """Return the checkpoint of the epoch that a run's newest checkpoint calls the best.

    Raises ConfigError where it is not there: the newest one knows of epochs that were saved elsewhere.
    """
    history = read_progress(newest.manifest).history
    if not history:
        raise ConfigError(f"{run_dir} has no best checkpoint: it has evaluated none")
    wanted = most_accurate(history)
    accuracy = wanted.evaluated.accuracy
    if math.isnan(accuracy):
        raise ConfigError(f"{run_dir} has no best checkpoint: none of its epochs has an accuracy")
    name = best(run_dir / CHECKPOINTS)
    if name is not None and (run_dir / CHECKPOINTS / name).is_dir():
        source = find_source(str(run_dir / CHECKPOINTS / name), run_dir)
        assert source is not None
        mine = read_progress(source.manifest).history
        if mine and mine[-1].ended == wanted.ended and not source.manifest.position.batch:
            return source
    raise ConfigError(
        f"epoch {wanted.epoch} was the best of {run_dir}, with an accuracy of {accuracy:.2%}, and its "
        f"weights are not in this folder: not saved, or in the folder of the run that it went on from"
    )


def merged(source: Source) -> dict[str, Tensor]:
    """Return the state_dict of the whole model that a checkpoint holds. Raises ConfigError."""
    config = source.manifest.config
    if not isinstance(config.get("model"), dict) or str(config.get("dtype")) not in DTYPES:
        raise DamagedCheckpoint(f"{source.folder} does not say which model it is of, and its dtype")
    try:
        model = make_model(OmegaConf.create(dict(config)), 0, DTYPES[str(config["dtype"])])
    except OmegaConfBaseException as error:
        raise DamagedCheckpoint(f"the configuration of {source.folder} cannot be read: {error}") from error
    tensors = Tensors(source.folder, list(source.manifest.parts))
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors.prove({f"model/{name}": numbers_of(tensor.data) for name, tensor in named.items()})
    for name, tensor in named.items():
        numbers_of(tensor.data).copy_(tensors[f"model/{name}"])
    return model.state_dict()


if __name__ == "__main__":
    sys.exit(main())
