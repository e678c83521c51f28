"""Kill a rank of a training run at a random moment, again and again, and see that nothing is lost.

python scripts/fault_check.py [--times 20] [--seed 0] [-- OVERRIDES]

Each time torchrun starts two ranks with --max-restarts=3 and resume=auto, one rank is killed by SIGKILL at a
random moment, and the weights at the end must be those of a run that nobody killed, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from safetensors.torch import load_file
from torch import Tensor

from comparison.processes import kill_marked, marked
from pipetrain.checkpoint.files import CHECKPOINTS, newest_first
from pipetrain.untrusted import DamagedCheckpoint

ROOT = Path(__file__).resolve().parents[1]
MARK = "PIPETRAIN_FAULT_CHECK"
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=3"]
RUN = ["model=mlp", "data=digits", "batch_size=64", "device=cpu", "threads=1"]
RUN += ["data.train_limit=null", "data.test_limit=null", "epochs=60", "schedule=pipedream", "window=4"]
RUN += ["checkpoint.every=5", "checkpoint.unit=updates", "resume=auto"]
DEADLINE_S = 600.0
MISSES = 5  # runs that may end before they are killed, for one that is


def main() -> int:
    """Try, tell, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--times", type=int, default=20, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", help="of the configuration")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        status, _, said = train(Path(folder, "whole"), options.overrides)
        whole_s = time.monotonic() - start
        if status:
            print(f"the run that nobody kills fails by itself\n{said}")
            return 1
        wanted = weights(Path(folder, "whole"))
        print(f"whole: {whole_s:.1f} s; killed {options.times} times, seed {options.seed}", flush=True)
        for number in range(1, options.times + 1):
            equal, what = strike(Path(folder, str(number)), options.overrides, whole_s, chance, wanted)
            survived += equal
            print(f"{number:2d}  {what}", flush=True)
    print(f"{survived} of {options.times} came back")
    return int(survived < options.times)


def strike(
    folder: Path, words: Sequence[str], whole_s: float, chance: random.Random, wanted: dict[str, Tensor]
) -> tuple[bool, str]:
    """Kill one rank of one run, which takes about `whole_s` seconds; say whether all came back."""
    for attempt in range(MISSES):
        run_dir = folder.with_name(f"{folder.name}-{attempt}")
        rank, after = chance.randrange(2), chance.uniform(0.3, 0.95) * whole_s
        status, hit, said = train(run_dir, words, rank, after)
        if hit:  # otherwise it was over before
            equal = not status and same(weights(run_dir), wanted)
            how = "came back with the same weights" if equal else f"LOST: exit status {status}\n{said}"
            return equal, f"rank {rank} killed after {after:.1f} s: {how}"
    return False, f"over {MISSES} times before it could be killed"


def train(
    run_dir: Path, words: Sequence[str], rank: int = 0, kill_after: float | None = None
) -> tuple[int, bool, str]:
    """Train once; kill a rank after so many seconds. Returns the status, if it was hit, what was said."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-m", *TORCHRUN, "-m", "pipetrain", *RUN, f"run_dir={run_dir}", *words],
        cwd=run_dir.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    hit = False
    try:
        try:
            said, _ = process.communicate(timeout=kill_after)
        except subprocess.TimeoutExpired:
            hit = kill(marked(f"{MARK}={mark}") & marked(f"RANK={rank}"))
            said, _ = process.communicate(timeout=DEADLINE_S)
    finally:  # ranks outlive a torchrun that is killed
        kill_marked(f"{MARK}={mark}")
    return process.returncode, hit, said


def kill(pids: set[int]) -> bool:
    """Kill processes; return whether any was there to be killed."""
    hit = False
    for pid in pids:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, signal.SIGKILL)
            hit = True
    return hit


def weights(run_dir: Path) -> dict[str, Tensor]:
    """Return all tensors of a run's newest checkpoint."""
    for folder, found in newest_first(run_dir / CHECKPOINTS):
        if not isinstance(found, DamagedCheckpoint):
            return {key: t for name in found.parts for key, t in load_file(folder / name).items()}
    return {}


def same(mine: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    """Whether two checkpoints are equal, bit for bit."""
    return mine.keys() == wanted.keys() and all(mine[name].equal(wanted[name]) for name in wanted)


if __name__ == "__main__":
    sys.exit(main())
