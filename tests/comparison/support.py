"""Comparisons whose runs are made by `fake.py`."""

from __future__ import annotations

import sys
from pathlib import Path

from comparison import cli, request
from comparison.request import Method, Spec

FAKE = (sys.executable, str(Path(__file__).with_name("fake.py")))


def compare(*arguments: str) -> int:
    return cli.main(arguments, FAKE)


def asked(*arguments: str) -> list[Spec]:
    """The runs that a command line asks for."""
    return request.read(arguments).specs


def of_schedule(name: str) -> Method:
    return Method(name, (f"schedule={name}",))


def started(out: Path) -> list[str]:
    """The runs that were started so far, in order."""
    return (out / "runs" / "started.txt").read_text().split()


if __name__ == "__main__":
    sys.exit(compare(*sys.argv[1:]))
