"""Makes the engine for a rank's stages: its mailboxes with the plan's codecs, its rehearsal, CUDA graphs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import chain

import torch

from pipetrain.errors import ConfigError
from pipetrain.plan.memory_fit import gpu_bytes, no_room_sentence, peaks_by_rank
from pipetrain.plan.plan import Plan
from pipetrain.runtime.clock import Clock
from pipetrain.runtime.comm.channel import Channel
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.runtime.engine import Engine
from pipetrain.runtime.mailbox import Coding, Mailbox
from pipetrain.runtime.rehearsal import LoopbackChannel, Rehearsal, rehearses
from pipetrain.runtime.stage.cuda_graphs import GraphedStage
from pipetrain.runtime.stage.stage import Stage
from pipetrain.schedule.actions import ALL

log = logging.getLogger("pipetrain")


def make_engine(
    plan: Plan, stages: Mapping[int, Stage], groups: ProcessGroups, channel: Channel | None = None
) -> Engine:
    """Make the engine for a rank's stages, over `channel` or else a new one, with the plan's codecs."""
    channels_last, bounds = plan.numerics.channels_last, {stage: plan.peaks(stage) for stage in stages}
    channel, rank = channel or groups.channel(plan.cut.bounds, channels_last), groups.world.rank

    def mailbox(channel: Channel, training: bool) -> Mailbox:
        if not training:
            return Mailbox(channel, plan.evaluation_cut, plan.placement, rank)
        return Mailbox(channel, plan.cut, plan.placement, rank, Coding(plan.settings.codecs, channels_last))

    def loopback(training: bool) -> Mailbox:
        options = plan.cut.bounds, plan.settings.timeout, groups.device, groups.staged, channels_last
        ties = dict.fromkeys([ALL, *plan.ties])
        return mailbox(LoopbackChannel(dict.fromkeys(plan.links), *options, ties), training)

    uncaptured: list[str] = []  # why stages of this rank are

    def meet(norms: bool) -> None:
        if norms and groups.world.size > 1:
            channel.all_reduce(ALL, torch.zeros(plan.stages, dtype=torch.float64))
            channel.reduced(ALL)
        reasons = [*chain.from_iterable(groups.gather("the rehearsal", uncaptured))]
        uncaptured.clear()
        if reasons and not groups.world.rank:
            log.info("pipetrain: not all passes are CUDA graphs (cuda_graphs=auto): %s", reasons[0])

    def capture() -> None:
        requested, room = plan.settings.cuda_graphs, gpu_bytes(groups.device.type, groups.ranks_on_gpu)
        planned_bytes = peaks_by_rank(plan.memory())[rank] if requested and room else 0
        for index, stage in stages.items() if requested else ():
            reason, graphs = plan.not_captured(index), plan.graph_bytes(index)
            if isinstance(stage, GraphedStage):
                reason = ""
                if room and requested is not True:
                    reason = no_room_sentence(graphs, planned_bytes, room)
                reason = stage.capture(bounds[index].activations, bounds[index].versions, reason)
                if reason and requested is True:
                    what = f"the passes of stage {index} cannot be captured"
                    raise ConfigError(f"cuda_graphs: {what}: {reason}; leave cuda_graphs out")
            if reason:
                uncaptured.append(reason)
            else:
                planned_bytes += graphs

    return Engine(
        stages,
        mailbox(channel, True),
        mailbox(channel, False),
        plan.peaks,
        Clock(groups.device),
        plan.settings.seed,
        Rehearsal(loopback, meet, capture) if rehearses(groups.device) else None,
    )
