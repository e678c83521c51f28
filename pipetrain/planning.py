"""The plan of a Pipeline, made with its first batch: the same on every rank."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from pipetrain.arguments import Asked
from pipetrain.data.loading import Form
from pipetrain.network.network import Network
from pipetrain.plan.costs import Facts, Profile, profile_conditions, read_profile
from pipetrain.plan.describe import describe
from pipetrain.plan.memory import optimizer_state
from pipetrain.plan.plan import Measure, Plan, Samples, make_plan
from pipetrain.plan.program import Draft
from pipetrain.runtime.profile import measure, twin_of
from pipetrain.runtime.together import Together, digest, level, prove_same
from pipetrain.settings import PROFILE
from pipetrain.tasks import Task


def first_plan(
    asked: Asked,
    draft: Draft,
    task: Task,
    network: Network,
    form: Form,
    samples: Samples | None,
    together: Together,
) -> Plan:
    """Return the plan for batches like the first one, whose size is in the draft's settings.

    `samples`: the sizes of all batches; None: others may come. Raises ConfigError and ScheduleError.
    """
    state_of, mesh, settings = optimizer_state(asked.optimizer), together.mesh, draft.settings
    profile: Profile | Measure | None = None
    if settings.partition == PROFILE:
        conditions = profile_conditions(settings, asked.optim)
        if settings.profile is not None:
            read = partial(_profile_in, settings.profile, conditions)
            profile = Profile.from_json(together.on_one(0, "the profile", read))
        else:
            known = mesh, settings, conditions, twin_of(network), asked.optimizer
            profile = together()(partial(measure, *known))
    plan = make_plan(draft, network.spare(), form.inputs, samples, profile, state_of, task)
    with together():
        layers = {f"layer {one.name}": [str(one.output), one.draws, *one.weights] for one in plan.layers}
        prove_same(mesh, "the plan", {**plan.pipeline, "program": digest(plan.window.program), **layers})
        level(mesh, "the tensors of the layers", plan.foreign)
    return replace(plan, text=describe)


def _profile_in(path: str, conditions: Facts) -> Any:
    return read_profile(path, conditions).to_json()
