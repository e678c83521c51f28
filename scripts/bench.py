"""Benchmark pipetrain beside everything else, in one Markdown table. Works without installing.

python scripts/bench.py [SUITE ...] --out FILE
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmark.cli import main

if __name__ == "__main__":  # the ranks import this file too
    sys.exit(main())
