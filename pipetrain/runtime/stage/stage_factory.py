"""Makes a rank's stages of a model, as a plan cuts it."""

from __future__ import annotations

from copy import deepcopy

from torch import nn

from pipetrain.config.rate import LearningRate
from pipetrain.config.settings import Mode
from pipetrain.model.chain import network_of
from pipetrain.model.materialise import materialise
from pipetrain.model.network import Network
from pipetrain.plan.cut import homes
from pipetrain.plan.plan import Plan
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.runtime.stage.batchnorm import BatchStatistics
from pipetrain.runtime.stage.buffers import Buffers
from pipetrain.runtime.stage.cuda_graphs import GraphedStage
from pipetrain.runtime.stage.loss_comparison import BatchLoss
from pipetrain.runtime.stage.nonfinite import SkipOnNaN, StopOnNaN
from pipetrain.runtime.stage.observer import Observer
from pipetrain.runtime.stage.parameter_store import OptimizerFactory
from pipetrain.runtime.stage.stage import Stage
from pipetrain.runtime.stage.stage_options import StageOptions
from pipetrain.tasks import Task


def make_stages(
    plan: Plan,
    model: nn.Module | Network,
    task: Task,
    optimizer: OptimizerFactory,
    rate: LearningRate,
    groups: ProcessGroups,
) -> dict[int, Stage]:
    """Make this rank's stages of a whole model, by number, on its device.

    They get the `values` of the network, if it has some; the rest of it does not.
    """
    settings, network = plan.settings, network_of(model, plan.example)
    layers = plan.layers_on(groups.world.rank)
    materialise(network, layers, {name for layer in layers for name in plan.layers[layer].borrows})
    local = [index for index, rank in enumerate(plan.placement) if groups.world.rank in rank]
    first_stages = homes(network, plan.cuts)
    full_names = {id(p): name for name, p in network.model.named_parameters()}
    wants_graphs = settings.cuda_graphs and groups.device.type == "cuda"
    stages: dict[int, Stage] = {}
    for index in local:
        part = network.part(plan.cut.slices[index], plan.evaluation_cut.slices[index])
        by_name = {name: full_names[id(p)] for name, p in part.named_parameters()}
        names = {name: full_name for name, full_name in by_name.items() if full_name != name}
        if any(index in tie and not stages.keys().isdisjoint(tie) for tie in plan.cut.ties):
            part = deepcopy(part)  # each stage has copies of the weights that it shares
        kind = GraphedStage if wants_graphs and not plan.not_captured(index) else Stage
        options = StageOptions(
            device=groups.device.type,
            numerics=plan.numerics,
            compile=settings.compile,
            lengths=bool(settings.lengths),
            selective=plan.modes[index] is Mode.SELECTIVE,
            ema=settings.ema,
            correction=settings.correction,
            clip_grad_norm=settings.clip_grad_norm,
        )
        last = index == plan.stages - 1
        stages[index] = stage = kind(
            index,
            part.to(groups.device),
            optimizer,
            rate,
            options,
            task.to(groups.device) if last else None,
            names,
            elsewhere={name for name, first in first_stages.items() if first != index},
            model=network.model if last else None,
        )
        stage.add_observers(*observers_of(stage, settings.on_nan == "skip", settings.batchnorm == "batch"))
        replicated = len(plan.placement[index]) > 1
        if last and not task.is_known and settings.microbatches > 1 and not replicated:
            stage.add_observers(BatchLoss(stage))
    return stages


def observers_of(stage: Stage, skips: bool = False, by_batch: bool = False) -> list[Observer]:
    """Return the observers of a stage. `skips`: on_nan=skip; `by_batch`: batchnorm=batch."""
    statistics = [BatchStatistics(stage.module, only_finite=skips)] if by_batch else []
    if not skips:
        return [StopOnNaN(stage), *statistics]
    without = statistics[0].buffers if statistics else ()
    return [SkipOnNaN(stage, Buffers(stage.module, without)), *statistics]
