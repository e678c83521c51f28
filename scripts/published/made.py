"""How a record was made: by what command and code, when, on what, and beside which other programs."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from comparison.verdict import BUSY

Steps = Mapping[str, Mapping[str, Any]]
"""By step: what is kept of it, see cli.Made."""


def how_made(results: Steps, command: str) -> tuple[str, str]:
    """Say by what command and when, and on what."""
    machines = [step["machine"] for step in results.values()]
    dates = sorted(machine["date"].split()[0] for machine in machines)
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    kinds = {f"{m['machine']}, torch {m['torch']}, Python {m['python']}": None for m in machines}
    revisions = {machine["pipetrain"]: None for machine in machines}
    total = sum(step["wall_s"] for step in results.values())
    said = f"`{command}`: {total:.0f} s, {when}{_beside(results)}"
    since = ", whose code has changed since" if any(map(other_code, revisions)) else ""
    return f"{said}, pipetrain {', '.join(revisions)}{since}", f"Made on: {'; '.join(kinds)}."


def _beside(results: Steps) -> str:
    """Say what other programs did beside the steps that are timed, and which of these they disturbed."""
    machines = {key: step["machine"] for key, step in results.items()}
    others = {key: float(machine["others"]) for key, machine in machines.items() if "others" in machine}
    if not others:
        return ""
    said = f", other programs on {max(others.values()):.1f} cores at most"
    disturbed = [key for key, cores in others.items() if cores > BUSY]
    return said + f", which make these times uncertain: {', '.join(disturbed)}" * bool(disturbed)


def other_code(revision: str) -> bool:
    """Return whether the package is another one than at a commit, as far as git knows."""
    command = ["git", "diff", "--quiet", revision, "--", "pipetrain"]
    with suppress(OSError):
        return subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True).returncode == 1
    return False
