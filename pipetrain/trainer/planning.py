"""From the first batch to the plan: network, costs, cut, programs, and the task held against them.

Only rank 0 has the batch. What follows from it is alike on all ranks, and an error of one is that of all.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from pipetrain.config.settings import AUTO, PROFILE, Settings
from pipetrain.data.batch import Form, Pair
from pipetrain.data.loader_facts import known_sizes
from pipetrain.data.reader import Reader
from pipetrain.data.sampling import Sampled
from pipetrain.errors import ConfigError, of_all
from pipetrain.model.chain import network_of
from pipetrain.model.network import Network, Values
from pipetrain.model.specs import Size, ValueSpec, as_tuple, cast_floats, repeated, repeated_to
from pipetrain.plan.comparison import compare_loss, compare_microbatches, compare_stages
from pipetrain.plan.cost_estimate import estimate_short
from pipetrain.plan.costs import Profile, profile_conditions, read_profile
from pipetrain.plan.make_plan import estimate_model, make_plan
from pipetrain.plan.memory_fit import optimizer_state
from pipetrain.plan.partition import require_layers
from pipetrain.plan.plan import Plan, Samples, check_targets
from pipetrain.runtime.comm.collective_guard import (
    CollectiveGuard,
    broadcast_from_rank0,
    compare_ranks,
    digest,
)
from pipetrain.runtime.layer_profile import copy_to_measure, measure
from pipetrain.tasks import ModelLoss
from pipetrain.tasks.trial import choose_weight, spare, used_outputs
from pipetrain.trainer.arguments import Arguments
from pipetrain.trainer.window_loop import NO_BATCH

log = logging.getLogger("pipetrain")
MOST_AVERAGED = 1000  # batches


def plan_for(
    reader: Reader | Sampled | None,
    request: Arguments,
    settings: Settings,
    values: Values | None,
    samples: Samples | None,
    guard: CollectiveGuard,
) -> tuple[Network, Plan, Form, str]:
    """Plan for the first batch of rank 0, whose `reader` it is. All ranks call it.

    Return also the form of batches, and why microbatches would train otherwise than a batch. `values`: with
    which the weights begin. `samples`: the sizes of all batches; None: others may come.
    """
    facts = guard.on_first("the first batch", partial(_facts_of, reader))
    if facts is None:
        raise of_all(ConfigError(NO_BATCH), guard.groups.world.rank)
    data, batch, smallest, mean_lengths = facts
    form, size = Form.from_json(data), Size.from_json(batch)
    bounded = samples is not None or settings.max_length is not None
    if samples is None or size.lengths:
        samples, settings = None, settings.fitted_to(size, tuple(mean_lengths))
    inputs = replace(form.inputs, longest=settings.lengths, bounded=bounded)
    inputs = _with_whole_numbers(reader, inputs, min(size, settings.full), guard)

    def planned() -> tuple[Network, Plan]:
        network = network_of(request.model, inputs, settings.precision == "bf16").with_values(values)
        if isinstance(request.task, ModelLoss):
            choose_weight(request.task, network, inputs)
        plan = _plan(reader, request, settings, network, inputs, samples, guard)
        shortest = smallest and Size.from_json(smallest).pieces(settings.microbatches)[-1].samples
        if shortest == 1 < settings.full.samples:
            alone = plan.example.of(replace(settings.full, samples=1))
            estimate_short(network.spare(), alone, plan.numerics)
        return network, plan

    network, plan = guard.on_all("the plan", planned)
    if network.set_attributes and not guard.groups.world.rank:
        log.warning(
            "pipetrain: the model's forward sets %s: a traced model does not run these statements in "
            "training, so what the program reads there stays as it is",
            ", ".join(network.set_attributes),
        )
    apart = guard.on_first("the task", partial(_compare, plan, request, network, reader))
    return network, plan, form, apart


def _facts_of(reader: Any) -> list[Any] | None:
    """Return what the other ranks need to know of the first batch; None if there is none.

    Its form, its size with the largest lengths, that of the smallest batch to train, if known, and the
    lengths that are nearest to the mean of known batches.
    """
    first = reader.first()
    if not first:
        return None
    form = reader.form or Form.of(first)
    size = form.size(*first)
    if isinstance(reader, Sampled):
        sizes = [Size(n) for n in reader.sizes] if size.lengths else None  # others are planned one by one
        known = [reader.size(batch).lengths for batch in reader.epoch(0)[:MOST_AVERAGED]]
    else:
        size = replace(size, lengths=reader.largest)
        sizes = known_sizes(reader.loader) if reader.weight else None
        known = reader.known_lengths
    return [form.to_json(), size.to_json(), min(sizes).to_json() if sizes else None, _mean_of(known)]


def _mean_of(known: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return those lengths that are nearest to the mean ones; a model may not take all between them."""
    means = [*map(fmean, zip(*known, strict=True))]
    return min(sorted(known, reverse=True), key=lambda lengths: math.dist(lengths, means), default=())


def _with_whole_numbers(reader: Any, inputs: ValueSpec, size: Size, guard: CollectiveGuard) -> ValueSpec:
    """Return the inputs with the whole numbers of the first batch, on which sizes may depend."""
    values: dict[int, Tensor] = {}
    for number, spec in enumerate(inputs.of(size).specs):
        if not (spec.dtype.is_floating_point or spec.dtype.is_complex):
            tensor = values[number] = torch.zeros(spec.shape, dtype=spec.dtype)
            if first := reader and reader.first():
                tensor.copy_(repeated(as_tuple(first[0])[number], spec.shape))
            with guard():
                guard.groups.broadcast_tensor("the first batch", tensor)
    return replace(inputs, samples=values)


def _plan(
    reader: Any,
    request: Arguments,
    settings: Settings,
    network: Network,
    inputs: ValueSpec,
    samples: Samples | None,
    guard: CollectiveGuard,
) -> Plan:
    """Return the plan for batches like the first one, the same on every rank."""
    groups, task = guard.groups, request.task
    draft = replace(request.draft, settings=settings)
    estimated = estimate_model(settings, network.spare(), inputs, samples)
    loss, dtype, outputs = spare(task, request.model), settings.data_dtype, estimated.outputs
    estimated = estimated.with_used(
        guard.on_first(
            "the loss", lambda: used_outputs(loss, outputs, cast_floats(_longest(reader, settings)[1], dtype))
        )
    )
    profile = None
    if settings.partition == PROFILE:
        conditions = profile_conditions(settings, request.optim)
        if settings.profile is not None:
            read = partial(read_profile, settings.profile, conditions)
            profile = Profile.from_json(guard.on_first("the profile", lambda: read().to_json()))
        else:
            if settings.replicas != AUTO:
                require_layers(len(draft.placement), [layer.name for layer in estimated.layers])
            measured, known = (
                copy_to_measure(network),
                (estimated.layers, estimated.example, estimated.numerics),
            )
            with guard():
                profile = measure(groups, settings, conditions, measured, request.optimizer, *known)
    plan = make_plan(draft, estimated, profile, optimizer_state(request.optimizer), task)
    with guard():
        kinds = [type(module).__name__ for module in network.modules]
        layers = {
            f"layer {layer.name}": [
                kind, *layer.weights, str(layer.output), f"operations {layer.operations:x}"
            ]
            for kind, layer in zip(kinds, plan.layers, strict=True)
        }  # fmt: skip
        program = digest(plan.window.program)
        compare_ranks(groups, "the plan", {**plan.pipeline, "program": program, **layers})
        broadcast_from_rank0(groups, "the tensors of the layers", plan.foreign)
    return plan


def _compare(plan: Plan, request: Arguments, network: Network, reader: Any) -> str:
    """Hold the task and the stages against the model, on the first batch.

    Return why microbatches would train otherwise.
    """
    task = spare(request.task, network.model)
    inputs, targets = _longest(reader, plan.settings)
    after_forward = compare_loss(plan, network, task, inputs, targets)
    compare_stages(plan, network, reader.first()[0])
    check_targets(plan, task, targets, getattr(reader, "classes", None), after_forward)
    return compare_microbatches(plan, network, task, inputs, targets)


def _longest(reader: Any, settings: Settings) -> Pair:
    """Return the first batch, at the largest lengths."""
    batch: Pair = reader.first()
    if not settings.lengths:
        return batch
    size, forms = (
        replace(Size.of(batch[0]), lengths=settings.lengths),
        (reader.form.inputs, reader.form.targets),
    )
    inputs, targets = (repeated_to(size, half, form) for half, form in zip(batch, forms, strict=True))
    return inputs, targets


def refuse_targets(plan: Plan, request: Arguments, samples: Sampled) -> None:
    """Refuse targets that the task cannot take. Raises ConfigError."""
    _, targets = samples.first()
    check_targets(plan, spare(request.task, request.model), targets, samples.classes)
