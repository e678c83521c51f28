"""What the plan says that each stage's time goes to, to hold the measured run against.

From `plan.costs` where what the actions cost is known. Otherwise from the estimated work of each stage, its
backward twice its forward: that has no unit of time, so only shares of time are then predicted.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipetrain.blueprint import Plan
from pipetrain.schedule.actions import Op
from pipetrain.schedule.simulate import simulate
from pipetrain.schedule.timeline import Costs, Timeline


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Where a stage's time goes, measured or predicted.

    `bubble`: the share of training in which its rank does not compute, `wait`: in which its rank is blocked.
    `stage_time_s`: seconds that the stage computes for a batch; None where seconds are not known.
    """

    bubble: float
    stage_time_s: float | None
    wait: float


def played(plan: Plan) -> Timeline:
    """Return the longest window at what its stages cost: in seconds where `plan.costs` says them.

    Otherwise by their estimated work, where a forward of the mean stage takes 1.
    """
    m, buffer_size = plan.settings.microbatches, plan.settings.buffer_size
    cost = plan.costs or estimated_costs(plan)
    return simulate(plan.window.program, m, buffer_size=buffer_size, cost=cost)


def predict(plan: Plan, run: Timeline) -> list[StageTimes]:
    """Predict the times of each stage, by the plan's longest window as it was `played`."""
    waited = run.waits(repeated=plan.settings.window is not None)
    return [
        StageTimes(
            bubble=run.bubble_per_rank[rank],
            stage_time_s=run.stages[stage].busy_s / max(plan.windows) if plan.costs else None,
            wait=waited[rank] / run.makespan,
        )
        for stage, rank in enumerate(plan.placement)
    ]


def estimated_costs(plan: Plan) -> Costs:
    """Price each stage's actions by its work beside that of the mean stage; updates and messages are free."""
    flops = [sum(layer.flops for layer in plan.layers[plan.slice(stage)]) for stage in range(plan.stages)]
    mean = sum(flops) / len(flops)
    times = {Op.F: 1, Op.B: 2, Op.I: 1, Op.W: 1}
    return Costs(
        {(stage, op): n * work / mean for stage, work in enumerate(flops) for op, n in times.items()}
    )
