"""The command `pipetrain`: starts the processes of a run with torchrun, and returns their exit status.

    pipetrain                                              the quickstart: a few minutes, no download
    pipetrain model=resnet18 schedule=pipedream epochs=3   any override of the configuration
    pipetrain model=mlp data=digits seed=0,1,2 -m          a sweep, which ends with its table
    pipetrain --max-restarts=3 model=vgg16 resume=auto     torchrun's options, as --OPTION=VALUE
    pipetrain --nproc_per_node=2 -m pipetrain model=vgg16  torchrun's whole command line

The number of processes on this machine is NPROC, or what stages=, replicas= and placement= among the
overrides need, or one per GPU; two without a GPU and for the quickstart. They share the machine's cores,
unless threads= is set.

torchrun prints a traceback for every failure and exits with 1 after a signal, however well its ranks ended.
This command exits with 0 where all went well, a stop by SIGTERM that was saved included; with 130 after
Ctrl-C, saved or not; with 143 where SIGTERM ended it before all was saved; otherwise with the status of the
rank that failed first.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import get_args_parser, parse_args, run
from yaml import YAMLError, safe_load

from pipetrain.commands.cli import composed, in_order, values_of
from pipetrain.commands.help_text import completion
from pipetrain.commands.start import refuse_few_layers
from pipetrain.config import placement as placing
from pipetrain.config.placement import RULES
from pipetrain.config.settings import Settings, cores, share_of_cores
from pipetrain.errors import ConfigError
from pipetrain.exit import ENDED, FAILED, guarded, leave
from pipetrain.rules import decoded, whole
from pipetrain.signals import LIMIT
from pipetrain.version import __version__

LOOPBACK = "127.0.0.1"
SHUTDOWN_S = "120"  # for ranks to save after a signal; torchrun's default is 30, which older ones always take
QUICKSTART = ["experiment=quickstart"]
_stops: list[SignalException] = []  # hold torchrun's heartbeat, which may not be finalized in its own thread


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status. Without `words`, those of sys.argv, exit with it."""
    status = guarded(lambda: _main(sys.argv[1:] if words is None else words))
    if words is None:  # that heartbeat would abort a Python that ends while it is in C++
        leave(status)
    return status


def _main(words: Sequence[str]) -> int:
    if re.search(r"(^| )-m [\w.]+( |$)", " ".join(words)):  # and no override, before which -m is Hydra's
        return start(words)
    words = ["--multirun" if word == "-m" else word for word in words]
    if "--version" in words:
        print(f"pipetrain {__version__}")
        return 0
    if "--completion" in words:
        print(completion(), end="")
        return 0
    of_torchrun, of_ranks = split(words)
    count = processes(of_ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(share_of_cores(count)))
    if not any(word.startswith("--nproc") for word in of_torchrun):
        plain = not of_torchrun and not any(word.startswith("-") for word in of_ranks)
        if count > cores() and plain:  # so many take long to start
            cfg = values_of(composed("config", of_ranks))
            refuse_few_layers(cfg, len(Settings.composed(cfg, "", count).places))
        of_torchrun.append(f"--nproc_per_node={count}")
    if not any(word.startswith(("--nnodes", "--rdzv", "--master", "--standalone")) for word in of_torchrun):
        # Not --standalone, whose rendezvous unpickles what anybody on this machine writes to its store.
        # torchrun takes the server that this process has at a port already; its own would listen everywhere.
        listening = socket.create_server((LOOPBACK, 0))
        where = LOOPBACK, listening.getsockname()[1]
        how: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "multi_tenant": True}
        server = TCPStore(*where, **how, master_listen_fd=listening.detach())
        of_torchrun += [f"--master_addr={LOOPBACK}", f"--master_port={server.port}"]
    return start([*of_torchrun, "-m", "pipetrain", *of_ranks])


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate torchrun's options from the ranks' own arguments. Raises ConfigError for what is neither."""
    options = get_args_parser()._option_string_actions.keys() - {"-h", "--help"}
    of_torchrun = [word for word in words if word.partition("=")[0] in options]
    of_ranks = [word for word in words if word not in of_torchrun]
    in_order(of_ranks, "config")
    return of_torchrun, of_ranks or QUICKSTART


def processes(words: Sequence[str]) -> int:
    """Return how many processes to start. Raises ConfigError."""
    if given := os.environ.get("NPROC"):
        number: int = whole(1, 9999).read("NPROC", decoded(given))
        return number
    if needed := _processes_of(words):
        return needed
    if words == QUICKSTART or "device=cpu" in words:
        return 2
    return torch.cuda.device_count() or 2


def _processes_of(words: Sequence[str]) -> int | None:
    """Return how many processes stages=, replicas= and placement= need; None if none says so."""
    values: dict[str, Any] = dict.fromkeys(RULES)
    for word in words:
        name, _, text = word.lstrip("+").partition("=")
        with suppress(ConfigError, YAMLError):  # the ranks refuse it
            if name in RULES and text != "auto":
                values[name] = RULES[name].read(name, safe_load(text), null=True)
    with suppress(ConfigError):
        if any(values.values()):
            return placing.processes(**values, started=None)
    return None


def start(arguments: Sequence[str]) -> int:
    """Run torchrun with these arguments; return the exit status."""
    logging.disable()  # torchrun's own: the ranks report their errors
    with TemporaryDirectory() as folder:
        os.environ[ENDED] = folder
        signal.signal(signal.SIGUSR1, _pass_on)  # which torchrun does with other signals
        if "shutdown_timeout" in LaunchConfig.__dataclass_fields__:
            os.environ.setdefault(LIMIT, SHUTDOWN_S)
        try:
            run(parse_args(arguments))  # type: ignore[no-untyped-call]
        except SignalException as stop:
            _stops.append(stop)
            for number in (signal.SIGTERM, signal.SIGINT):  # what is left to do takes no time
                signal.signal(number, signal.SIG_IGN)
            ended = [path.read_text() for path in Path(folder).iterdir()]
            if ended and set(ended) == {"0"}:
                return 0
            return 128 + int(stop.sigval)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if failure.exitcode >= 0:
                return failure.exitcode or FAILED
            name = signal.Signals(-failure.exitcode).name
            print(f"pipetrain: rank {rank} was ended by {name}", file=sys.stderr)
            return FAILED
        finally:
            _end_children()
    return 0


def _pass_on(number: int, frame: FrameType | None) -> None:
    """Send a signal to the ranks."""
    for pid in _children():
        with suppress(OSError):
            if b"\0RANK=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
                os.kill(pid, number)


def _end_children() -> None:
    """Kill remaining children: torchrun forgets a process that it is just starting when a signal comes."""
    for pid in _children():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _children() -> list[int]:
    tasks = Path("/proc/self/task").glob("*/children")
    return [int(pid) for path in tasks for pid in path.read_text().split()]


if __name__ == "__main__":
    sys.exit(main())
