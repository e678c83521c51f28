"""What the ranks share before the first batch: that they are asked for the same, and rank 0's model."""

from __future__ import annotations

import logging
from pathlib import Path

from pipetrain.checkpoint.resume import open_weights
from pipetrain.config.settings import AUTO
from pipetrain.model.factory import Initial
from pipetrain.model.network import Values
from pipetrain.model.requirements import give_memory, refuse_without_numbers, tensor_attributes
from pipetrain.model.tensor_access import named_tensors
from pipetrain.plan.program import Draft
from pipetrain.rules import PATH
from pipetrain.runtime.comm.collective_guard import broadcast_from_rank0, compare_ranks, conditions
from pipetrain.runtime.comm.collectives import World
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.runtime.device import choose_device
from pipetrain.schedule.lower import edges, links
from pipetrain.trainer.arguments import Arguments

log = logging.getLogger("pipetrain")


def connect(draft: Draft) -> ProcessGroups:
    """Return the ranks that have met, with a line where their messages go through host memory."""
    world, settings, decides = World.current(), draft.settings, draft.policy is not None
    how = choose_device(world.local_rank, settings.device), None, settings.timeout, decides
    groups = ProcessGroups(world, draft.placement, [], *how)
    if (groups.obstacle or groups.staged) and world.size > 1 and not world.rank:
        why = groups.obstacle or f"{settings.schedule} decides its order as it runs"
        log.warning("pipetrain: %s, so messages go through host memory over gloo", why)
    return groups


def share_model(
    groups: ProcessGroups, request: Arguments, record: Initial | None, weights: str | Path | None
) -> Values | None:
    """Compare what the ranks are asked for, and give them the model of rank 0; return its weights' begin.

    `record`: of the factory that made it. Raises Refused and ConfigError.
    """
    model, draft = request.model, request.draft
    drawn = {"how the model's factory makes its parameters": record.digest} if record else {}
    given = conditions(draft.settings, request.made, draft.program, request.rate)
    compare_ranks(groups, "the settings", given | drawn)
    if draft.settings.replicas != AUTO:  # whose links are those of the plan
        groups.open(links(edges(draft.program), draft.placement))
    refuse_without_numbers(groups.broadcast("the model", [] if record else give_memory(model)))
    broadcast_from_rank0(groups, "the model", named_tensors(model) | tensor_attributes(model))
    return record if weights is None else open_weights(PATH.read("weights", weights), model)
