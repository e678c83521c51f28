"""Prove on one GPU what only a GPU can prove, within so many minutes. Needs no installing.

python scripts/gpu_check.py [--minutes 9] [--list] [--only NAME ...] [--out docs/results]
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # of every rank, and of the reference: what is trained is tiny
    paths = [str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.execv(sys.executable, [sys.executable, "-P", "-m", "tests.gpu", *sys.argv[1:]])
