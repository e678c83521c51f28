"""Builds the stages and the engine of one rank from a plan."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy

import torch
from torch import nn

from pipetrain.network.materialise import materialise
from pipetrain.network.network import Network, Part, network_of
from pipetrain.plan.blueprint import Plan
from pipetrain.plan.crossing import homes
from pipetrain.plan.recompute import Mode
from pipetrain.rate import Rate
from pipetrain.runtime.channel import Channel
from pipetrain.runtime.clock import Clock
from pipetrain.runtime.coded import CodedChannel, Feedback, Slot
from pipetrain.runtime.engine import Engine
from pipetrain.runtime.joints import Joints
from pipetrain.runtime.mesh import Mesh
from pipetrain.runtime.rehearsal import Rehearsal, rehearses
from pipetrain.runtime.stage import Stage
from pipetrain.runtime.weights import OptimizerFactory
from pipetrain.tasks import Task


def make_stages(
    plan: Plan,
    model: nn.Module | Network,
    task: Task,
    optimizer: OptimizerFactory,
    rate: Rate,
    mesh: Mesh,
) -> dict[int, Stage]:
    """Make this rank's stages of a whole model, by number, on its device.

    They get the `values` of the network, if it has some; the rest of it does not.
    """
    settings, network = plan.settings, network_of(model, plan.example)
    layers = plan.layers_on(mesh.world.rank)
    materialise(network, layers, {name for layer in layers for name in plan.layers[layer].borrows})
    mine = [index for index, rank in enumerate(plan.placement) if rank == mesh.world.rank]
    home = homes(network, plan.cuts)
    known = {id(p): name for name, p in network.model.named_parameters()}
    parts: dict[int, Part] = {}
    names: dict[int, dict[str, str]] = {}
    for index in mine:
        part = network.part(plan.seams.slices[index], plan.evaluated_seams.slices[index])
        names[index] = {own: known[id(p)] for own, p in part.named_parameters() if known[id(p)] != own}
        if any(index in tie and not parts.keys().isdisjoint(tie) for tie in plan.ties):
            part = deepcopy(part)  # each stage has copies of the weights that it shares
        parts[index] = part.to(mesh.device)
    return {
        index: Stage(
            index,
            parts[index],
            optimizer,
            rate,
            task=task.to(mesh.device) if index == plan.stages - 1 else None,
            entry=plan.seams.entries[index],
            exit=plan.seams.exits[index] if index < plan.stages - 1 else None,
            copy_input=plan.copies_input(index),
            copy_output=plan.copies_output(index),
            numerics=plan.numerics,
            compile=settings.compile,
            cuda_graphs=settings.cuda_graphs,
            selective=plan.recompute[index] is Mode.SELECTIVE,
            batch_statistics=settings.batchnorm == "batch",
            skip_not_finite=settings.on_nan == "skip",
            ema=settings.ema,
            clip_grad_norm=settings.clip_grad_norm,
            names=names[index],
            shared={name: tie for name, tie in plan.links.shared.items() if index in tie},
            elsewhere={name for name, stage in home.items() if stage != index},
        )
        for index in mine
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
    plain = channel or mesh.channel(plan.links.bounds, channels_last)

    def encoding(channel: Channel, feedback: Feedback) -> Channel:
        return channel if codecs.plain else CodedChannel(channel, codecs, feedback, channels_last)

    def loopback(training: bool) -> Channel:
        made = mesh.loopback(plan.edges, plan.ties, plan.links.bounds, channels_last)
        return encoding(made, Feedback()) if training else made

    return Engine(
        stages,
        encoding(plain, feedback or Feedback()),
        plan.placement,
        plan.boundaries,
        plan.evaluated,
        Joints(plan.seams),
        Joints(plan.evaluated_seams),
        {stage: plan.peaks(stage) for stage in stages},
        clock or Clock(mesh.device),
        plain,
        plan.settings.seed,
        max(plan.links.bounds.values(), default=0),
        Rehearsal(loopback, mesh.meet, plan.settings.cuda_graphs) if rehearses(mesh.device) else None,
    )


def slots(plan: Plan, rank: int) -> dict[Slot, torch.dtype]:
    """Return the residuals that a rank keeps, with dtypes: one per sent tensor with feedback, and shape."""
    codecs, joints = plan.settings.codecs, Joints(plan.seams)
    sent = [
        (edge, joints.specs(edge, entries[max(edge)]))
        for edge in plan.edges
        if plan.placement[edge[0]] == rank
        and (codecs.forward if edge[0] < edge[1] else codecs.backward).error_feedback
        for entries in plan.boundaries.values()
    ]
    return {
        (edge, number, spec.shape): torch.promote_types(spec.dtype, torch.float32)
        for edge, specs in sent
        for number, spec in enumerate(specs)
    }
