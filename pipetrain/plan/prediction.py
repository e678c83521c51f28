"""The plan's prediction of each stage's time and memory, to compare with the measured run.

Times are based on `plan.costs` if known, otherwise on the estimated work of each stage; then only fractions
of time are predicted. Memory follows from the order of the actions, and from what the estimated layers save.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pipetrain.codec import Identity
from pipetrain.network.boundary import TensorSpec
from pipetrain.plan.blueprint import Plan
from pipetrain.plan.recompute import Mode
from pipetrain.plan.sizes import loss_sizes, microbatch, tensors_of, weights_of
from pipetrain.plan.stages import costs_by_work
from pipetrain.schedule.memory import Moment, Sizes, over_time
from pipetrain.schedule.simulate import simulate
from pipetrain.schedule.timeline import Timeline
from pipetrain.tasks import Task


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
    ranks = len(plan.window.program)
    return simulate(
        plan.window.program,
        plan.settings.microbatches,
        buffer_size=plan.cut.bounds,
        cost=plan.costs or costs_by_work(plan.layers, plan.cut, ranks),
        routes=plan.cut.edges,
        ties=plan.cut.ties,
    )


def unit_of_time(plan: Plan) -> str:
    """Return the unit of the times of a plan that is `played`."""
    ranks = len(plan.window.program)
    part = f"1/{ranks} of the model" if ranks > 1 else "the model"
    return "s" if plan.costs else f"forwards of {part}"


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


def sized(plan: Plan, task: Task, state_of: Callable[[TensorSpec], int]) -> Plan:
    """Return a plan with the bytes of its stages. `state_of`: of the optimizer's state of a parameter."""
    loss = loss_sizes(task, plan.layers[-1].output, plan.settings.data_dtype)
    messages = [(edge, plan.cut.message(edge, plan.full)) for edge in plan.cut.message_edges]
    sizes = []
    for stage in range(plan.stages):
        slice, held = plan.cut.slices[stage], plan.stage_layers(stage)
        parameters, _ = tensors_of(held)
        weights = weights_of(held)
        of_one = microbatch(
            plan.layers,
            plan.example.of(plan.full),
            slice.start,
            slice.end,
            loss,
            copies_input=slice.copies_input,
            selective=plan.modes[stage] is Mode.SELECTIVE,
        )
        sizes.append(
            Sizes(
                saved=of_one.saved,
                before_r=of_one.before_r,
                after_i=of_one.after_i,
                weights=weights.trained * (1 + (plan.settings.ema is not None)) + weights.fixed,
                version=weights.trained,
                gradient=weights.trained,
                optimizer=sum(map(state_of, parameters.values())),
                tied=sum(parameters[name].nbytes for name, tie in plan.cut.shared.items() if stage in tie),
                wire={edge: plan.settings.codecs.wire_bytes(s, edge[0] < edge[1]) for edge, s in messages},
                raw={edge: sum(spec.nbytes for spec in s) for edge, s in messages},
            )
        )
    return replace(plan, sizes=sizes)


def memory(plan: Plan, run: Timeline) -> list[list[Moment]]:
    """Return, by rank, what the stages of a plan that is `sized` hold after each action of a timeline."""
    coded = not isinstance(plan.settings.codecs.forward, Identity)
    copied = [edge for edge in plan.cut.edges if coded or plan.cut.slices[edge[0]].copies_output]
    return over_time(run, plan.sizes, plan.cut.bounds, plan.cut.edges, copied)
