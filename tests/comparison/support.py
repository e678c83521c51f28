"""Comparisons whose runs are made by `fake.py`, and outcomes of runs that nobody made."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from comparison import cli, request
from comparison.request import Method, Spec
from comparison.runs import Outcome

FAKE = (sys.executable, str(Path(__file__).with_name("fake.py")))
ALIKE: dict[str, Any] = {
    "model": "vgg16",
    "data": "cifar10",
    "device": "2 x 2080ti",
    "lr": 0.01,
    "epochs": 90,
}
ALIKE |= {"batch_size": 64, "data_workers": 0, "buffer_size": 2, "updates": 70380, "best_epoch": 1}
METRICS = {"acc": {"name": "acc", "higher": True, "percent": True}}
METRICS |= {name: {"name": name, "higher": False, "percent": False} for name in ("ppl", "mse")}


def compare(*arguments: str) -> int:
    return cli.main(arguments, FAKE)


def asked(*arguments: str) -> list[Spec]:
    """The runs that a command line asks for."""
    return request.read(arguments).specs


def started(out: Path) -> list[str]:
    """The runs that were started so far, in order."""
    return (out / "runs" / "started.txt").read_text().split()


def spec_of(method: str, seed: int = 0, model: str | None = "vgg16") -> Spec:
    return Spec(Method(method, (f"schedule={method}",)), seed, model, (), 2)


def failed(method: str, seed: int = 0) -> Outcome:
    return Outcome(spec_of(method, seed), 1.0, failure="status 1")


STAGE = {"memory_bytes": 2**20, "mean_staleness": 0.0, "max_staleness": 0, "peak_versions": 1}


def staged(*stages: dict[str, Any], on_paper: float = 0.2) -> dict[str, Any]:
    """What a summary says of its stages."""
    return {"per_stage": [STAGE | stage for stage in stages], "simulated_bubble": on_paper}


def outcome(
    method: str, seed: int = 0, *curve: float, metric: str = "acc", model: str = "vgg16", **more: Any
) -> Outcome:
    """A run whose metric is, epoch by epoch, as said."""
    epochs = [float(epoch) for epoch in range(1, len(curve) + 1)]
    curves = {"epoch": epochs, f"val_{metric}": [*curve], "elapsed_s": [10 * epoch for epoch in epochs]}
    best = max(curve) if METRICS[metric]["higher"] else min(curve)
    summary = ALIKE | {"model": model, "metrics": [METRICS[metric]], "epoch_s": 5.0}
    summary |= {f"val_{metric}": curve[-1], f"best_val_{metric}": best, "best_epoch": curve.index(best) + 1}
    return Outcome(spec_of(method, seed, model), 1.0, summary | more, curves)


if __name__ == "__main__":
    sys.exit(compare(*sys.argv[1:]))
