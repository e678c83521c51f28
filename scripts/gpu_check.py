"""Prove on one GPU what only a GPU can prove; each group of checks in under 8 minutes. Needs no installing.

python scripts/gpu_check.py [--list] [--only NAME ...] [--out docs/results]
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"  # of every rank, and of the reference: what is trained is tiny

from tests.gpu.cli import main

if __name__ == "__main__":  # the ranks import this file too
    sys.exit(main())
