"""Starts the processes of a run as torchrun does, and ends as they end.

    python -m pipetrain.launcher --nproc_per_node=2 -m pipetrain model=vgg16

takes torchrun's own arguments. torchrun reports every failure by a traceback of its own, after what the
ranks have said, and ends with 1 when it is stopped by a signal, however well its ranks ended. This says only
what they cannot say themselves, and ends with 0 where all went well, a stop that was saved too; with 128 and
the signal's number (143 for SIGTERM) where a signal ended it before there was anything to save; otherwise
with the status of the rank that failed first.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from pipetrain.launch import ENDED, FAILED

SHUTDOWN_S = (
    "120"  # that ranks have to save after a signal, where torchrun gives 30 seconds, and torch knows how
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Start and wait; return the status."""
    logging.disable()  # torch's: the ranks speak for themselves
    with TemporaryDirectory() as folder:
        os.environ[ENDED] = folder
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_S)
        options = parse_args(sys.argv[1:] if arguments is None else arguments)  # type: ignore[no-untyped-call]
        try:
            run(options)  # type: ignore[no-untyped-call]
        except SignalException as stop:
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
