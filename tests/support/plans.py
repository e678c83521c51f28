"""Plans of the configuration, and what is read of their text."""

from __future__ import annotations

import re

import torch

from pipetrain.config.build import make_model, make_schedule
from pipetrain.config.settings import Settings
from pipetrain.model.specs import TensorSpec, ValueSpec
from pipetrain.plan.make_plan import make_plan
from pipetrain.plan.plan import Plan, Samples
from pipetrain.plan.program import Draft
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
    samples = Samples([read.batch_size] * batches, [read.batch_size])
    return make_plan(Draft.of(read, make_schedule(cfg)), model, IMAGE, samples)


def figures(text: str) -> dict[str, tuple[str, str]]:
    """The table of figures: name -> (simulated, at most)."""
    rows = re.findall(r"^(bubble|activations|versions|staleness) +(\S.*?)(?:  +(\S.*))?$", text, re.MULTILINE)
    return {name: (simulated, most) for name, simulated, most in rows}
