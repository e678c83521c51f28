"""`python -m pipetrain.export`: the merged weights of a checkpoint, for plain PyTorch.

    python -m pipetrain.export runs/my-run --out weights   # its newest whole checkpoint
    python -m pipetrain.export runs/my-run/checkpoints/update-00000046 --out weights

writes `weights.safetensors` and `weights.pt`, a state_dict that the model's factory loads.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torch import Tensor

from pipetrain.building import make_model
from pipetrain.checkpoint.files import CHECKPOINTS, Tensors, best
from pipetrain.config import DTYPES
from pipetrain.errors import ConfigError
from pipetrain.launch import guarded
from pipetrain.runtime.tally import numbers_of
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
    if of_best:
        checkpoints = Path(checkpoint) / CHECKPOINTS
        name = best(checkpoints)
        if name is None:
            raise ConfigError(
                f"{checkpoint} has no best checkpoint: it has evaluated none, or is no run's folder"
            )
        checkpoint = str(checkpoints / name)
    source = find_source(checkpoint, Path(checkpoint))
    assert source is not None
    state = merged(source)
    out.parent.mkdir(parents=True, exist_ok=True)
    position = source.manifest.position
    metadata = {"run": source.manifest.run, "update": str(position.update)}
    save_file({name: tensor.clone() for name, tensor in state.items()}, f"{out}.safetensors", metadata)
    torch.save(state, f"{out}.pt")
    print(f"{len(state)} tensors of update {position.update} in {out}.safetensors and {out}.pt")
    return 0


def merged(source: Source) -> dict[str, Tensor]:
    """Return the state_dict of the whole model that a checkpoint holds."""
    cfg = OmegaConf.create(dict(source.manifest.config))
    model = make_model(cfg, 0, DTYPES[str(cfg.dtype)])
    tensors = Tensors(source.folder, list(source.manifest.parts))
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in named.items():
        numbers_of(tensor.data).copy_(tensors[f"model/{name}"])
    return model.state_dict()


if __name__ == "__main__":
    sys.exit(main())
