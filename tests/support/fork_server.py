"""The server that forks what tests start, which has imported what they need: one for all pytest workers."""

from __future__ import annotations

import gc
import multiprocessing
import os
import select
import socket
import sys
from contextlib import suppress
from functools import cache
from importlib import import_module
from multiprocessing import connection, forkserver, util
from threading import Thread
from typing import Any

import yaml
from hydra._internal.hydra import Hydra
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

# What other libraries do at length in each process is done shortly; `cold` programs are left as they are.
#
# Each operation on fake tensors is made once more for a cache, which only a model of many equal layers uses.
os.environ["TORCH_FAKE_TENSOR_DISPATCH_CACHE"] = "0"
if yaml.__with_libyaml__:
    yaml.SafeLoader = yaml.CSafeLoader  # type: ignore[misc,assignment] # of OmegaConf
# To look for hydra.mode, which nobody sets, Hydra composes all before it composes all.
Hydra.get_mode = lambda self, **_: None  # type: ignore[method-assign]
# To name who records an event, torchrun looks through all modules 18 times: a second of a processor.
dynamic_rendezvous.get_method_name = lambda depth=2: "forked"

TORCHRUN = "torch.distributed.run"
PRELOADED = ["torch._dynamo", TORCHRUN, "pipetrain.commands.rank0_jobs", "matplotlib.figure"]
PRELOADED += ["matplotlib.backends.backend_agg", "torch.utils.tensorboard", "benchmark.contestants"]
PRELOADED += ["torch.distributed.pipelining", "tests.support.process_ranks", "tests.support.cases"]
PRELOADED += [f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "bert")]


def context() -> Any:
    """Return the multiprocessing context whose server has imported what tests need; there is one server."""
    if forkserver._forkserver._forkserver_address is None:  # type: ignore[attr-defined]
        joined(offered())
    return multiprocessing.get_context("forkserver")


@cache
def offered() -> str:
    """Return the address of a server for the pytest workers, which starts as the first of them asks it.

    It ends with this process, the workers' parent.
    """
    address: str = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    Thread(target=_start, args=(listener,), daemon=True).start()
    return address


def _start(listener: socket.socket) -> None:
    select.select([listener], [], [])
    alive, _ = os.pipe()  # the server ends as the other end is closed, however this process ends
    fds = listener.fileno(), alive
    code = (
        f"import sys; sys.path = {sys.path}; from tests.support import fork_server; fork_server.serve(*{fds})"
    )
    util.spawnv_passfds(sys.executable.encode(), [sys.executable, "-c", code], fds)  # type: ignore[attr-defined]
    listener.close()
    os.close(alive)


def serve(listener: int, alive: int) -> None:
    for name in PRELOADED:
        with suppress(ImportError):
            import_module(name)
    _warm_up()
    util.register_after_fork(forkserver._forkserver, _print_there)  # type: ignore[attr-defined]
    forkserver.main(listener, alive, [])  # type: ignore[attr-defined]


def _warm_up() -> None:
    """Do before what each forked program would do for the first time: compose, and draw its plan.

    What is imported by then is not looked through for garbage, nor copied for that where it is forked. All
    draw one picture; a `cold` program draws its own.
    """
    from pipetrain.commands.cli import composed
    from pipetrain.records import recorder
    from pipetrain.schedule.lower import lower
    from pipetrain.schedule.programs import one_f_one_b
    from pipetrain.schedule.simulate import simulate
    from tests.support.cases import config

    composed("config", ["data=digits", "model=mlp"])
    config(["data=digits"])  # of most cases
    picture = recorder.as_png(simulate(lower(one_f_one_b(2, 1, 2)), 2))
    recorder.as_png = lambda *drawn: picture  # type: ignore[assignment]
    gc.freeze()


def _print_there(server: Any) -> None:
    """What a forked process prints is of the test that started it: it goes to the stderr that came for it."""
    if server._forkserver_alive_fd is not None:
        os.dup2(server._forkserver_alive_fd, 1)
        os.dup2(server._forkserver_alive_fd, 2)
        server._forkserver_alive_fd = None


def joined(address: str) -> None:
    """Let the context's processes be forked by the server at an address, which ends without this process."""
    server = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address = address
    server._forkserver_alive_fd = 2  # sent with each request, in place of what would keep the server alive
    server.ensure_running = lambda: None
    forkserver.ensure_running = server.ensure_running
