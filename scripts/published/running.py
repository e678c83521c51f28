"""Makes the steps of a record, one after another, and keeps what each returned in one file.

A step that was made before with the same arguments is kept, so that a record can be stopped and goes on where
it was, and its page can be written again without measuring.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comparison.figures import duration
from comparison.runs import describe_machine
from pipetrain.errors import ConfigError
from published.record import Record, Step

Kept = dict[str, dict[str, Any]]
"""By step: `asked`, `result`, `wall_s`, and `machine`, with the date and the load at its start."""


def file_of(folder: Path, name: str) -> Path:
    """Return the file of a record's results."""
    return folder / f"{name}.json"


def read(folder: Path, name: str) -> Kept:
    """Return the steps of a record that are kept. Raises ConfigError."""
    path = file_of(folder, name)
    try:
        kept: Kept = json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}; remove it, or choose another --out") from error
    return kept


def make(name: str, record: Record, folder: Path, quick: bool) -> Kept:
    """Make the steps of a record that are not kept; return all. Raises whatever a step raises.

    What is done until an interruption or an error is kept.
    """
    steps, before = record.steps(quick), read(folder, name)
    kept: Kept = {}
    for number, (key, step) in enumerate(steps.items(), 1):
        print(f"[{number}/{len(steps)}] {name}: {key} ... ", end="", flush=True)
        asked = json.loads(json.dumps(step.asked))
        old = before.get(key)
        if old is not None and old["asked"] == asked:
            kept[key] = old
            print("kept from before")
            continue
        kept[key] = {"asked": asked, **_made(step)}
        _write(file_of(folder, name), before | kept)
        print(duration(kept[key]["wall_s"]), flush=True)
    _write(file_of(folder, name), kept)
    return kept


def _made(step: Step) -> dict[str, Any]:
    machine = {**describe_machine(), "load": f"{os.getloadavg()[0]:.1f}"}
    start = time.perf_counter()
    result = step.function(**step.arguments)
    return {"result": result, "wall_s": round(time.perf_counter() - start, 1), "machine": machine}


def _write(path: Path, kept: Mapping[str, Any]) -> None:
    """Write a file whole or not at all."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(kept, indent=1) + "\n")
    new.replace(path)
