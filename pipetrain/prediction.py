"""The plan's prediction of each stage's time, to compare with the measured run.

It is based on `plan.costs` if known, otherwise on the estimated work of each stage; then only fractions of
time are predicted.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipetrain.blueprint import Plan
from pipetrain.partition.stages import costs_by_work
from pipetrain.schedule.simulate import simulate
from pipetrain.schedule.timeline import Timeline


@dataclass(frozen=True, slots=True)
class StageTimes:
    """The time of a stage, measured or predicted.

    `bubble`: the fraction of training in which its rank does not compute, `wait`: in which its rank is
    blocked. `stage_time_s`: seconds of computing per batch; None if unknown.
    """

    bubble: float
    stage_time_s: float | None
    wait: float


def played(plan: Plan) -> Timeline:
    """Return the longest window, simulated with `plan.costs` in seconds, or else with the estimated work."""
    return simulate(
        plan.window.program,
        plan.settings.microbatches,
        buffer_size=plan.links.bounds,
        cost=plan.costs or costs_by_work(plan.layers, plan.cuts, plan.seams.entries),
        routes=plan.routes,
        ties=plan.ties,
    )


def predict(plan: Plan, run: Timeline) -> list[StageTimes]:
    """Predict the times of each stage, by the plan's longest window as `played`."""
    waited = run.waits(repeated=plan.settings.window is not None)
    return [
        StageTimes(
            bubble=run.bubble_per_rank[rank],
            stage_time_s=run.stages[stage].busy_s / max(plan.windows) if plan.costs else None,
            wait=waited[rank] / run.makespan,
        )
        for stage, rank in enumerate(plan.placement)
    ]
