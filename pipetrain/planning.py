"""The plan of a Pipeline, made with its first batch: the same on every rank."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from pipetrain.arguments import Asked
from pipetrain.data.loading import Form
from pipetrain.errors import ConfigError
from pipetrain.measure import measure, twin_of
from pipetrain.network.network import Network
from pipetrain.plan.costs import Facts, Profile, profile_conditions, read_profile
from pipetrain.plan.describe import OpenPlan
from pipetrain.plan.memory import optimizer_state, sized
from pipetrain.plan.plan import Plan, Samples, make_plan
from pipetrain.runtime.together import Together, digest, level, prove_same
from pipetrain.schedule.simulate import SHOWN, Deadlock
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
    state_of = optimizer_state(asked.optimizer)

    def of(settings: Settings, samples: Samples) -> Plan:
        return sized(_made(asked, settings, network, form, samples, together), task, state_of)

    if isinstance(samples, int):
        m = settings.microbatches
        full = max(1, samples // m)  # in a microbatch
        settings, sizes = replace(settings, batch_size=full * m), [full, full + 1]

        def of_windows(length: int) -> Plan:
            batches = Samples([size * m for size in sizes for _ in range(length)], sizes)
            return OpenPlan.of(of(replace(settings, window=length), batches), settings)

        whole = min(settings.window or SHOWN, SHOWN) if asked.asynchronous else 1
        try:
            plan: Plan = of_windows(max(whole, asked.least))
        except ConfigError as error:
            if not isinstance(error.__cause__, Deadlock) or whole <= asked.least:
                raise
            plan = of_windows(asked.least)  # a shorter window may do
    else:
        plan = of(settings, samples)
    mesh = together.mesh
    with together():
        layers = {f"layer {one.name}": [str(one.output), one.draws, *one.weights] for one in plan.layers}
        prove_same(mesh, "the plan", {**plan.pipeline, "program": digest(plan.window.program), **layers})
        level(mesh, "the tensors of the layers", plan.foreign)
    return plan


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
