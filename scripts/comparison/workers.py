"""The process that a comparison keeps between its runs: it imports torch and the trainer once, and forks.

A small run spends nine tenths of its time on imports. They are made here once, and the ranks of each run are
forks of a process that does nothing else: it has no threads of torch, no GPU and no memory of a run that a
rank could inherit. A rank runs what `torchrun -m pipetrain` would, and is told its place in the same way.

A line of JSON on the input asks for a run, `{"words": [...], "nproc": 2, "log": path}`, and one answers it:
`status`, the exit status of the rank that failed first or 0, and `cpu_s`, the seconds computed until now.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress

from torch.distributed import TCPStore  # type: ignore[attr-defined]

PATIENCE_S = 10.0  # that ranks have to end after another one failed
HEAVY = ["torch._dynamo", "pipetrain.train", "pipetrain.records.tensorboard", "matplotlib.figure"]


def main() -> None:
    """Make the runs that the input asks for, until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is no answer
    sys.path.insert(0, os.getcwd())  # as -m has it: a model of one's own may stand there
    for module in HEAVY:
        importlib.import_module(module)
    for line in sys.stdin:
        status = run(**json.loads(line))
        usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        cpu_s = sum(one.ru_utime + one.ru_stime for one in usage)
        print(json.dumps({"status": status, "cpu_s": cpu_s}), file=answers, flush=True)


def run(words: Sequence[str], nproc: int, log: str) -> int:
    """Make one run with its output in `log`; return the exit status."""
    with open(log, "ab") as output:
        for descriptor in (1, 2):  # which the ranks inherit
            os.dup2(output.fileno(), descriptor)
    told, telling = os.pipe()
    ranks = {_fork(words, rank, nproc, told) for rank in range(nproc)}
    # Its thread looks names up, and a fork meanwhile would inherit the resolver's lock, held for good.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(telling, b"".join(store.port.to_bytes(4, "big") for _ in ranks))
    for end in (told, telling):
        os.close(end)
    failed, deadline = 0, float("inf")
    while ranks:
        pid, waited = os.waitpid(-1, os.WNOHANG)
        if not pid:
            if time.monotonic() > deadline:
                _signal(ranks, signal.SIGKILL)
            time.sleep(0.02)
            continue
        ranks.discard(pid)
        status = os.waitstatus_to_exitcode(waited)
        if status and not failed:
            failed, deadline = status, time.monotonic() + PATIENCE_S
            _signal(ranks, signal.SIGTERM)
    return failed


def _fork(words: Sequence[str], rank: int, nproc: int, told: int) -> int:
    """Start a rank, which reads the store's port from the pipe `told`; return its process."""
    if pid := os.fork():
        return pid
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        port = int.from_bytes(os.read(told, 4), "big")
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": str(port)}
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # rank 0 shall not make one
        sys.argv[1:] = words
        runpy.run_module("pipetrain", run_name="__main__", alter_sys=True)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # the trainer leaves by itself


def _signal(ranks: Iterable[int], number: int) -> None:
    for pid in ranks:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


if __name__ == "__main__":
    main()
