"""Ways in which a checkpoint's files may be other than a run has written them."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipetrain.checkpoint import files
from pipetrain.untrusted import MOST_NESTED


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as held:
        held.bind(os.path.relpath(path))  # a socket's path may not be long


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 20 * 2**30)


ODD: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a socket": listening,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a terminal": lambda path: path.symlink_to("/dev/tty"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "a link to a FIFO": lambda path: (os.mkfifo(path.with_name("fifo")), path.symlink_to("fifo")),
    "20 GiB of nothing": sparse,
    "nothing": lambda path: None,
}
NOT_JSON = {
    "nested deeply": b"[" * 100_000,
    "nested deeply, and closed": b"[" * 100_000 + b"]" * 100_000,
    "nested": b"[" * (MOST_NESTED + 1) + b"]" * (MOST_NESTED + 1),
    "a huge number": b"1" * 5000,
    "no UTF-8": b'"\xff"',
    "half a character": b'{"a": "\\ud800"}',
    "nothing": b"",
    "two things": b"1 2",
    "too much": b" " * 1_000_000,
}


def forge(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest, and let it have the right checksum."""
    path = folder / "manifest.json"
    data = json.loads(path.read_text())
    data.pop("sha256")
    change(data)
    path.write_text(json.dumps({**data, "sha256": files._digest(data)}))


def put(*keys: str, to: Any) -> Callable[[dict[str, Any]], None]:
    *outer, last = keys

    def change(data: dict[str, Any]) -> None:
        for key in outer:
            data = data[key]
        data[last] = to

    return change
