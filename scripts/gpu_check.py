"""Prove on one GPU what only a GPU can prove; each group of checks in under 8 minutes. Needs no installing.

python scripts/gpu_check.py [--list] [--only NAME ...] [--out docs/results]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.gpu.cli import main

if __name__ == "__main__":  # the ranks import this file too
    sys.exit(main())
