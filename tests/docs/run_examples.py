"""Runs examples as they stand, one after the other, on the ranks that torchrun started: OUT EXAMPLE...

What rank 0 prints goes to OUT/NAME. To import torch in processes of each example's own would take minutes.
"""

from __future__ import annotations

import os
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

import torch.distributed as dist

out = Path(sys.argv[1])
dist.init_process_group("gloo")
for example in sys.argv[2:]:
    path, *arguments = example.split()
    sys.argv = [path, *arguments]
    to = out / Path(path).stem if dist.get_rank() == 0 else Path(os.devnull)
    with to.open("a") as said, redirect_stdout(said):
        names = runpy.run_path(path, run_name="__main__")
    names["pipe"].close()
dist.destroy_process_group()
