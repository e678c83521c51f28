"""Plans of the configuration, what is read of their text, and profiles with times that a test chooses."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipetrain.config.build import make_model, make_schedule
from pipetrain.config.settings import Mode, Settings
from pipetrain.model.network import INPUT, ValueId
from pipetrain.model.specs import TensorSpec, ValueSpec
from pipetrain.plan.cost_estimate import Layer, estimate
from pipetrain.plan.costs import LayerTime, Profile, Table
from pipetrain.plan.make_plan import estimate_model, make_plan
from pipetrain.plan.operation_costs import Kept
from pipetrain.plan.partition import Prices, StageWork
from pipetrain.plan.plan import Plan, Samples
from pipetrain.plan.verification import Draft
from pipetrain.schedule.actions import Op
from pipetrain.schedule.memory import Items
from tests.support.cases import options_of

IMAGE = ValueSpec((TensorSpec((3, 32, 32), torch.float32),))

ALONE = """
import sys
from pipetrain.commands import plan
plan.SILENCE_S = 1e6  # on a slow machine too
try:
    plan.main()
finally:
    unwanted = ("pipetrain.runtime", "pipetrain.checkpoint")
    unwanted += ("torch._dynamo", "torchvision")
    print([name for name in sys.modules if name.startswith(unwanted)], file=sys.stderr)
"""
"""A program that is the command, and names what it should not have loaded."""


def planned(schedule: str, stages: int, microbatches: int, batches: int, *overrides: str) -> Plan:
    words = [f"schedule={schedule}", f"stages={stages}", f"microbatches={microbatches}", *overrides]
    cfg = options_of(["data=digits", *words])
    read = Settings.composed(cfg, schedule, None)
    model = make_model(cfg, read.seed, read.dtype)
    samples = Samples.of([read.batch_size] * batches, [read.batch_size])
    return make_plan(
        Draft.from_settings(read, make_schedule(cfg)), estimate_model(read, model, IMAGE, samples)
    )


def figures(text: str) -> dict[str, tuple[str, str]]:
    """The table of figures: name -> (simulated, at most)."""
    rows = re.findall(r"^(bubble|activations|versions|staleness) +(\S.*?)(?:  +(\S.*))?$", text, re.MULTILINE)
    return {name: (simulated, most) for name, simulated, most in rows}


def layer(name: str = "layer", forward_s: float = 1, backward_s: float = 2, **others: Any) -> LayerTime:
    """A layer that takes nothing but what is said."""
    forwards = {"recorded_s": forward_s, "kept_s": forward_s, "again_s": forward_s / 4}
    halves = {"input_s": backward_s / 2, "weight_s": backward_s / 2}
    times = {"forward_s": forward_s, "backward_s": backward_s, "step_s": 0, **forwards, **halves}
    return LayerTime(name, **{"output_bytes": 0, **times, **others})


def profile(layers: Sequence[LayerTime], latency_s: float = 0, s_per_byte: float = 0) -> Profile:
    return Profile({"model": "fake"}, {"device": "paper"}, latency_s, s_per_byte, list(layers))


@dataclass(frozen=True)
class Skip:
    """A value that layers behind the next one take; `maker`: the layer that makes it, or INPUT."""

    maker: int
    users: tuple[int, ...]
    nbytes: int
    needs_grad: bool = True


def bytes_of(n: int) -> TensorSpec:
    return TensorSpec((n,), torch.uint8)


def table_of(
    layers: Sequence[LayerTime],
    saved: Sequence[int] = (),
    trained: Sequence[int] = (),
    inputs: int = 0,
    skips: Sequence[Skip] = (),
    without_gradient: Collection[int] = (),
    **others: Any,
) -> Table:
    """A chain of layers of these outputs that save so many bytes each, with weights of so many."""
    made = {maker: [skip for skip in skips if skip.maker == maker] for maker in range(INPUT, len(layers))}

    def estimated(index: int, one: LayerTime) -> Layer:
        needs = (index not in without_gradient, *(skip.needs_grad for skip in made[index]))
        far = [
            (ValueId(maker, number), skip.needs_grad)
            for maker, of in made.items()
            for number, skip in enumerate(of, 1)
            if index in skip.users
        ]
        outputs = (one.output_bytes, *(skip.nbytes for skip in made[index]))
        before = index > 0 and index - 1 not in without_gradient
        return Layer(
            one.name,
            0,
            1,
            ValueSpec(tuple(map(bytes_of, outputs)), not made[index]),
            requires_grad=needs,
            takes=(ValueId(index - 1, 0), *(value for value, _ in far)),
            reached=(before, *(needs for _, needs in far)),
            saved=Kept({}, saved[index] if saved else 0),
            weights={f"{index}.weight": bytes_of(trained[index])} if trained else {},
        )

    entry = ValueSpec(tuple(map(bytes_of, (inputs, *(skip.nbytes for skip in made[INPUT])))))
    times = profile(layers, others.pop("latency_s", 0), others.pop("s_per_byte", 0))
    return Table([estimated(index, one) for index, one in enumerate(layers)], entry, times, **others)


def prices_of(
    table: Table,
    placement: Sequence[int],
    open_ones: Sequence[int],
    microbatches: int = 4,
    split: bool = False,
) -> Prices:
    """The prices of stages that each send to the next, and hold so many microbatches."""
    last = len(placement) - 1

    def doing(stage: int) -> StageWork:
        before = stage > 0 and placement[stage - 1] != placement[stage]
        behind = stage < last and placement[stage + 1] != placement[stage]
        ops = [Op.F, *([Op.I, Op.W] if split else [Op.B])]
        ops += [Op.RECV_F, Op.SEND_B] * before + [Op.SEND_F, Op.RECV_B] * behind
        items = Items(open_ones[stage], weights=1, gradients=1, inputs=1, grads=1)
        return StageWork({**dict.fromkeys(ops, microbatches), Op.STEP: 1}, [items])

    return Prices(table, [{Mode.NEVER: doing(stage)} for stage in range(last + 1)])


def profile_of(
    model: nn.Sequential, entry: ValueSpec, seconds: Sequence[float], latency_s: float = 0
) -> Profile:
    """A profile of a real model's layers: `seconds` for each one's forward, and twice that backward."""
    layers = [
        layer(estimated.name, forward_s, 2 * forward_s, output_bytes=estimated.output.nbytes)
        for estimated, forward_s in zip(estimate(model, entry), seconds, strict=True)
    ]
    return profile(layers, latency_s)
