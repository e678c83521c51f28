"""PipeDream's plans: replicas and cuts from its authors' profiles, and what they gain."""

from __future__ import annotations

from typing import Any

from pipetrain.plan.published import Comparison, compared
from published.record import Chart, Check, Figure, Findings, How, Line, Record, Results, Step

NEAR = 0.25  # of a published speed-up


def steps(quick: bool) -> dict[str, Step]:
    """Choose all plans: it takes seconds."""
    return {"plans": Step(plans)}


def plans() -> list[dict[str, Any]]:
    """Return the published plans, and those that are chosen here from the same profiles."""
    return [of._asdict() for of in compared()]


def show(results: Results) -> Findings:
    """Hold plans and speed-ups against the published ones."""
    figures, checks, points = [], [], []
    for number, of in enumerate((Comparison(**values) for values in results["plans"]), 1):
        what = f"{of.model} on {of.machines}"
        figures += [
            Figure(f"{what}: {of.published}", of.speedup, of.predicted, How.PLANNED, unit="x"),
            Figure(f"{what}: {of.chosen} (chosen here)", None, of.best, How.PLANNED, unit="x"),
        ]
        near = abs(of.predicted / of.speedup - 1) <= NEAR
        checks += [
            Check(f"{what}: plan", of.published, of.chosen, of.chosen == of.published),
            Check(f"{what}: speed-up", f"{of.speedup:.2f}", f"{of.predicted:.2f}, bound by {of.bound}", near),
        ]
        points.append((number, of))
    lines = [
        Line("published", How.PUBLISHED, [(n, of.speedup) for n, of in points]),
        Line("of the same plan", How.PLANNED, [(n, of.predicted) for n, of in points]),
        Line("16 ranks", How.BOUND, [(n, 16) for n, _ in points]),
    ]
    names = ", ".join(f"{n} {of.model} {of.machines}" for n, of in points)
    chart = Chart("Speed-up over data parallelism", "row of the table", "x data parallel", lines, "y")
    return Findings(
        figures, checks, [chart], [f"Rows of the chart: {names}. Why plans differ: docs/results/replicas.md."]
    )


RECORD = Record(
    "Plans of PipeDream's optimizer, from the profiles of its authors",
    "Narayanan et al., PipeDream, SOSP 2019, table 1; cluster A: 4 x 4 V100, PCIe, 10 Gbit/s; B: 2 x 8 V100, "
    "NVLink, 25 Gbit/s.",
    steps,
    show,
    "The ratios of GNMT do not fit its weights and links, see docs/results/replicas.md. The runtime refused "
    "replica counts that its planner had chosen.",
)
