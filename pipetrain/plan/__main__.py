"""`python -m pipetrain.plan`: the same configuration, on paper.

Prints the cuts, the tensors that cross them, the timeline, and the schedule's memory and bubble beside the
formulas. With `cost=` a run's trace.json, predicts real times from the durations measured there; with
`compare=` several schedules stand in one table, for which torch is imported only if a model is given. Starts
no process, and reads no data set whose configuration declares a sample.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from omegaconf import DictConfig

from pipetrain.cli import compose
from pipetrain.ending import guarded, unread

WITHOUT_FOLDER = [
    "hydra.run.dir=.",
    "hydra.output_subdir=null",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
]


def main() -> None:
    """Print the plan of the command line's configuration; exit with its status."""
    # Insert among the other overrides, which Hydra needs to be adjacent.
    first = next((i for i, word in enumerate(sys.argv) if re.match(r"[+~\w]\S*=", word)), len(sys.argv))
    sys.argv[first:first] = WITHOUT_FOLDER
    try:
        sys.exit(guarded(lambda: compose("plan", show)))
    except BrokenPipeError:
        sys.exit(unread())


def show(cfg: DictConfig) -> None:
    """Print the plan of a configuration, or the table of several schedules."""
    if cfg.compare is not None:
        from pipetrain.plan.comparing import show_table

        show_table(cfg, _by_model)
    else:
        from pipetrain.plan.describe import show_plan

        show_plan(cfg)


def _by_model(name: str, cfg: DictConfig) -> tuple[str, Any]:
    from pipetrain.plan.describe import by_model  # imports torch

    return by_model(name, cfg)


if __name__ == "__main__":
    main()
