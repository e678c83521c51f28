"""Runs examples as they stand, one after the other, on ranks that are there already.

To import torch in processes of each example's own would take minutes.
"""

from __future__ import annotations

import runpy
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path

import torch.distributed as dist


def run(folder: Path, examples: Sequence[str]) -> dict[str, str]:
    """Run examples (PATH ARGUMENT...) in a folder; return what this rank prints, by their names."""
    said: dict[str, str] = defaultdict(str)
    if dist.is_initialized():  # by a program of another test
        dist.destroy_process_group()
    with chdir(folder):
        for example in examples:
            sys.argv = example.split()
            with redirect_stdout(StringIO()) as out:
                names = runpy.run_path(sys.argv[0], run_name="__main__")
            if "pipe" in names:
                names["pipe"].close()
            said[Path(sys.argv[0]).stem] += out.getvalue()
    return said
