"""The plan of a Pipeline, made with its first batch: the same on every rank."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from pipetrain.arguments import Asked
from pipetrain.data.loading import Form
from pipetrain.measure import measure, twin_of
from pipetrain.network.network import Network
from pipetrain.plan.costs import Facts, Profile, profile_conditions, read_profile
from pipetrain.plan.describe import OpenPlan
from pipetrain.plan.memory import optimizer_state, sized
from pipetrain.plan.plan import Plan, Samples, make_plan
from pipetrain.runtime.together import Together, digest, level, prove_same
from pipetrain.schedule.simulate import SHOWN
from pipetrain.settings import PROFILE, Settings
from pipetrain.tasks import Task


def first_plan(
    asked: Asked,
    settings: Settings,
    task: Task,
    network: Network,
    form: Form,
    samples: Samples | int,
    together: Together,
) -> Plan:
    """Return the plan for batches like the first one.

    `samples`: the sizes of all batches; or the number of the first one's, then others may come, and a pass
    that is an asynchronous window is planned as if it had SHOWN batches. Raises ConfigError, ScheduleError.
    """
    tried = settings
    if isinstance(samples, int):
        m = settings.microbatches
        full = max(1, samples // m)  # in a microbatch
        settings = replace(settings, batch_size=full * m)
        length = min(settings.window or SHOWN, SHOWN) if asked.asynchronous else 1
        length = max(length, asked.least)
        sizes = [size * m for size in (full, full + 1) for _ in range(length)]
        samples, tried = Samples(sizes, [full, full + 1]), replace(settings, window=length)
    plan = sized(
        _made(asked, tried, network, form, samples, together), task, optimizer_state(asked.optimizer)
    )
    mesh = together.mesh
    with together():
        layers = {f"layer {one.name}": [str(one.output), one.draws, *one.weights] for one in plan.layers}
        prove_same(mesh, "the plan", {**plan.pipeline, "program": digest(plan.window.program), **layers})
        level(mesh, "the tensors of the layers", plan.foreign)
    return plan if tried is settings else OpenPlan.of(plan, settings)


def _made(
    asked: Asked, settings: Settings, network: Network, form: Form, samples: Samples, together: Together
) -> Plan:
    """Return the plan; for partition=profile, by a profile that is read or measured now."""
    state_of = optimizer_state(asked.optimizer)
    make = partial(
        make_plan, schedule=asked.schedule, example=form.inputs, samples=samples, state_of=state_of
    )
    profile, mesh = None, together.mesh
    if settings.partition == PROFILE:
        conditions = profile_conditions(settings, asked.optim)
        if settings.profile is not None:
            read = partial(_profile_in, settings.profile, conditions)
            profile = Profile.from_json(together.on_one(0, "the profile", read))
        else:
            twin = twin_of(network)
            draft = make(settings, model=network.spare())
            with together():
                profile = measure(mesh, draft, conditions, lambda: (twin, asked.optimizer))
    return make(settings, model=network.spare(), profile=profile)


def _profile_in(path: str, conditions: Facts) -> Any:
    return read_profile(path, conditions).to_json()
