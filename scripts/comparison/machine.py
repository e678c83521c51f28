"""What a run runs on, to be said beside its figures: found without importing torch."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def describe() -> dict[str, str]:
    """Return the date, and what the machine and its software are called."""
    return {"date": f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}", **_lasting()}


@cache
def _lasting() -> dict[str, str]:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return {
        "machine": f"{_cpu()}, {os.cpu_count()} cores, {memory:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": _version("torch"),
        "pipetrain": _revision(),
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _revision() -> str:
    """Return the checkout's commit, or the version where pipetrain is installed."""
    root = Path(__file__).resolve().parents[2]
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    try:
        if (root / ".git").exists():
            done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=10)
            return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        pass
    return _version("pipetrain")
