"""Builds the stages and the engine of one rank from a plan."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import torch
from torch import nn

from pipetrain.blueprint import Plan
from pipetrain.boundary import named_layers
from pipetrain.rate import Rate
from pipetrain.runtime.channel import Channel
from pipetrain.runtime.clock import Clock
from pipetrain.runtime.coded import CodedChannel, Feedback, Slot
from pipetrain.runtime.engine import Engine
from pipetrain.runtime.mesh import Mesh
from pipetrain.runtime.stage import Stage
from pipetrain.runtime.weights import OptimizerFactory
from pipetrain.tasks import Task


def make_stages(
    plan: Plan, model: nn.Sequential, task: Task, optimizer: OptimizerFactory, rate: Rate, mesh: Mesh
) -> dict[int, Stage]:
    """Make this rank's stages of a whole model, by number, on its device."""
    settings = plan.settings
    ends = [*plan.boundaries[settings.batch_size // settings.microbatches], None]
    return {
        index: Stage(
            index,
            nn.Sequential(OrderedDict(named_layers(model)[plan.slice(index)])).to(mesh.device),
            optimizer,
            rate,
            task=task.to(mesh.device) if index == plan.stages - 1 else None,
            entry=ends[index],
            exit=ends[index + 1],
            copy_input=plan.copies_input(index),
            copy_output=plan.copies_output(index),
            numerics=plan.numerics,
            compile=settings.compile,
            skip_not_finite=settings.on_nan == "skip",
            ema=settings.ema,
            clip_grad_norm=settings.clip_grad_norm,
        )
        for index, rank in enumerate(plan.placement)
        if rank == mesh.world.rank
    }


def make_engine(
    plan: Plan,
    stages: Mapping[int, Stage],
    mesh: Mesh,
    channel: Channel | None = None,
    clock: Clock | None = None,
    feedback: Feedback | None = None,
) -> Engine:
    """Make the engine for a rank's stages, over `channel` or else the mesh's, with the plan's codecs."""
    codecs, channels_last = plan.settings.codecs, plan.numerics.channels_last
    plain = coded = channel or mesh.channel(plan.settings.buffer_size, channels_last)
    if not codecs.plain:
        coded = CodedChannel(plain, codecs, feedback or Feedback(), channels_last)
    return Engine(
        stages,
        coded,
        plan.placement,
        plan.boundaries,
        plan.evaluated,
        {stage: plan.peaks(stage) for stage in stages},
        clock or Clock(mesh.device),
        plain,
    )


def slots(plan: Plan, rank: int) -> dict[Slot, torch.dtype]:
    """Return the residuals that a rank keeps, with dtypes: one per sent tensor with feedback, and shape."""
    codecs = plan.settings.codecs
    sent = [
        (edge, boundaries[max(edge)].specs if edge[0] < edge[1] else boundaries[max(edge)].gradients)
        for edge in plan.edges
        if plan.placement[edge[0]] == rank
        and (codecs.forward if edge[0] < edge[1] else codecs.backward).error_feedback
        for boundaries in plan.boundaries.values()
    ]
    return {
        (edge, number, spec.shape): torch.promote_types(spec.dtype, torch.float32)
        for edge, specs in sent
        for number, spec in enumerate(specs)
    }
