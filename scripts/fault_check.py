"""Kill a rank of a training run at a random moment, again and again, and see that nothing is lost.

python scripts/fault_check.py [--times 20] [--seed 0] [-- OVERRIDES]

Each time torchrun starts the ranks with --max-restarts=3 and resume=auto, one rank is killed by SIGKILL at a
random moment, and the weights at the end must be those of a run that nobody killed, bit for bit. By turns
these are two ranks, and three of which two are replicas of the first stage.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torch import Tensor

from comparison.processes import marked, run
from pipetrain.checkpoint.resume import AUTO, find_source

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
TORCHRUN += ["--standalone", "--max-restarts=3"]
CASES: dict[int, list[str]] = {2: [], 3: ["replicas=[2,1]"]}  # by the number of ranks
RUN = ["model=mlp", "data=digits", "batch_size=64", "device=cpu", "threads=1"]
RUN += ["data.train_limit=null", "data.test_limit=null", "epochs=60", "schedule=pipedream", "window=4"]
RUN += ["checkpoint.every=5", "checkpoint.unit=updates", "resume=auto"]


def main() -> int:
    """Try, tell, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--times", type=int, default=20, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", help="of the configuration")
    options = parser.parse_args()
    chance, killed, survived = random.Random(options.seed), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        whole_s, wanted = dict[int, float](), dict[int, dict[str, Tensor]]()
        for ranks in CASES:
            start, whole = time.monotonic(), Path(folder, f"whole-{ranks}")
            if train(whole, ranks, options.overrides)[0]:
                print(f"the run that nobody kills fails by itself\n{said(whole)}")
                return 1
            whole_s[ranks], wanted[ranks] = time.monotonic() - start, weights(whole)
            print(f"whole, {ranks} ranks: {whole_s[ranks]:.1f} s", flush=True)
        print(f"killed {options.times} times, seed {options.seed}", flush=True)
        for attempt in range(5 * options.times):
            ranks = [*CASES][killed % len(CASES)]
            run_dir, rank = Path(folder, str(attempt)), chance.randrange(ranks)
            after = chance.uniform(0.3, 0.95) * whole_s[ranks]
            status, hit = train(run_dir, ranks, options.overrides, rank, after)
            if not hit:  # it was over before
                continue
            killed += 1
            equal = not status and same(weights(run_dir), wanted[ranks])
            survived += equal
            what = "came back with the same weights" if equal else f"LOST: status {status}\n{said(run_dir)}"
            print(f"{killed:2d}  rank {rank} of {ranks} killed after {after:.1f} s: {what}", flush=True)
            if killed == options.times:
                break
    print(f"{survived} of {options.times} came back")
    return int(survived < options.times)


def train(
    run_dir: Path, ranks: int, words: Sequence[str], rank: int = 0, after: float | None = None
) -> tuple[int, bool]:
    """Train once, and kill a rank `after` seconds; return the exit status, and whether it was hit."""
    hit: list[int] = []

    def kill() -> None:
        for pid in marked(f"FAULT_CHECK={run_dir}") & marked(f"RANK={rank}"):
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, signal.SIGKILL)
                hit.append(pid)

    os.environ |= {"FAULT_CHECK": str(run_dir), "OMP_NUM_THREADS": "1"}
    timer = threading.Timer(after or 0, kill)
    if after:
        timer.start()
    command = [*TORCHRUN, f"--nproc_per_node={ranks}", "-m", "pipetrain", *RUN, *CASES[ranks]]
    status = run([*command, f"run_dir={run_dir}", *words], ranks, run_dir.with_suffix(".log"))
    timer.cancel()
    return status, bool(hit)


def said(run_dir: Path) -> str:
    """Return what a run has said."""
    return run_dir.with_suffix(".log").read_text(errors="replace")


def weights(run_dir: Path) -> dict[str, Tensor]:
    """Return all tensors of a run's newest checkpoint."""
    source = find_source(AUTO, run_dir)
    return {} if source is None else dict(source.tensors())


def same(mine: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    """Whether two checkpoints are equal, bit for bit."""
    return mine.keys() == wanted.keys() and all(mine[name].equal(wanted[name]) for name in wanted)


if __name__ == "__main__":
    sys.exit(main())
