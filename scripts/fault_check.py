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

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from safetensors.torch import load_file  # noqa: E402
from torch import Tensor  # noqa: E402

from pipetrain.checkpoint.files import CHECKPOINTS, newest_first  # noqa: E402
from pipetrain.checkpoint.untrusted import DamagedCheckpoint  # noqa: E402

COMMAND = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
COMMAND += ["--max-restarts=3", "-m", "pipetrain"]
RUN = ["model=mlp", "data=digits", "device=cpu", "threads=1", "epochs=60", "schedule=pipedream", "window=4"]
RUN += ["checkpoint.every=5", "checkpoint.unit=updates", "resume=auto"]
DEADLINE_S = 180.0
MISSES = 5  # runs that may end before they are killed, for one that is
MARK = "PIPETRAIN_FAULT_CHECK"


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
        status, _ = train(Path(folder, "whole"), options.overrides)
        whole_s = time.monotonic() - start
        if status:
            print("the run that nobody kills fails by itself")
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
    run_dir: Path, words: Sequence[str], whole_s: float, chance: random.Random, wanted: dict[str, Tensor]
) -> tuple[bool, str]:
    """Kill one rank of one run, which takes about `whole_s` seconds; say whether all came back."""
    for attempt in range(MISSES):
        folder = run_dir / str(attempt)
        rank, after = chance.randrange(2), chance.uniform(0.3, 0.95) * whole_s
        status, hit = train(folder, words, rank, after)
        if hit:  # otherwise it was over before
            equal = not status and same(weights(folder), wanted)
            how = "came back with the same weights"
            if not equal:
                how = f"LOST: exit status {status}\n{folder.with_suffix('.log').read_text(errors='replace')}"
            return equal, f"rank {rank} killed after {after:.1f} s: {how}"
    return False, f"over {MISSES} times before it could be killed"


def train(run_dir: Path, words: Sequence[str], rank: int = 0, kill_after: float = 0.0) -> tuple[int, bool]:
    """Train once; kill a rank after so many seconds, if not 0. Returns the status and whether it was hit."""
    mark = uuid.uuid4().hex
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), MARK: mark}
    run_dir.parent.mkdir(exist_ok=True)
    with run_dir.with_suffix(".log").open("w") as log:
        command = [*COMMAND, *RUN, f"run_dir={run_dir}", *words]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    hit = False
    try:
        if kill_after:
            time.sleep(kill_after)
            for pid in pids(mark, str(rank)):
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, signal.SIGKILL)
                    hit = True
        return process.wait(DEADLINE_S), hit
    except subprocess.TimeoutExpired:
        return -1, hit
    finally:
        for pid in pids(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def pids(mark: str, rank: str = "") -> list[int]:
    """Return the processes of a run, or that of one rank: torchrun gives each a session of its own."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            variables = (path / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if f"{MARK}={mark}" in variables and (not rank or f"RANK={rank}" in variables):
            found.append(int(path.name))
    return found


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
