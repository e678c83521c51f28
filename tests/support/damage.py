"""A checkpoint's manifest that is other than a run has written it, with the right checksum."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipetrain.checkpoint import files


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
