"""Runs a module or a script as one of torchrun's ranks that share a GPU and talk over NCCL all the same.

torchrun gives all ranks one environment, and each needs a host id of its own before CUDA starts.

    torchrun --nproc_per_node=2 tests/gpu/over_nccl.py pipetrain model=vgg16
    torchrun --nproc_per_node=2 tests/gpu/over_nccl.py docs/examples/mlp.py
"""

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.path[:1] = [str(root), str(root / "scripts")]
    from benchmark.worlds import share_gpu

    share_gpu(int(os.environ["RANK"]))
    _, what, *sys.argv[1:] = sys.argv
    if what.endswith(".py"):
        runpy.run_path(what, run_name="__main__")
    else:
        runpy.run_module(what, run_name="__main__", alter_sys=True)
