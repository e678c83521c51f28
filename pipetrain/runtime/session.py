"""One rank's stages and their engine, which run the windows of a plan."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy

import torch
from torch import Tensor, nn

from pipetrain.config.rate import LearningRate
from pipetrain.config.settings import Mode
from pipetrain.errors import ActionFailed, ConfigError
from pipetrain.model.chain import network_of
from pipetrain.model.network import Network
from pipetrain.model.requirements import materialise
from pipetrain.model.specs import Size
from pipetrain.plan.cut import homes
from pipetrain.plan.memory_fit import explained, gpu_bytes, is_out_of_memory, no_room_sentence, peaks_by_rank
from pipetrain.plan.plan import Plan
from pipetrain.runtime.buffer_average import BufferAverager
from pipetrain.runtime.clock import Clock, Observe
from pipetrain.runtime.comm.channel import Channel
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.runtime.engine import Engine, Take, Tick
from pipetrain.runtime.feed import Batches, WindowFeed, WindowPart
from pipetrain.runtime.mailbox import Coding, Mailbox
from pipetrain.runtime.order import Order, StopCheck, order_of
from pipetrain.runtime.rehearsal import LoopbackChannel, Rehearsal, rehearses
from pipetrain.runtime.stage.batchnorm import BatchStatistics
from pipetrain.runtime.stage.buffers import Buffers
from pipetrain.runtime.stage.cuda_graphs import GraphedStage
from pipetrain.runtime.stage.finite import SkipOnNaN, StopOnNaN
from pipetrain.runtime.stage.loss_comparison import BatchLoss
from pipetrain.runtime.stage.microbatch import Observer
from pipetrain.runtime.stage.parameter_store import OptimizerFactory
from pipetrain.runtime.stage.stage import Stage
from pipetrain.runtime.whole_model import WholeModel
from pipetrain.schedule.actions import ALL, Edge
from pipetrain.tasks import Task

log = logging.getLogger("pipetrain")


class Session:
    """Trains and evaluates windows with this rank's stages.

    `whole`: the program's model, which may have been collected.
    """

    def __init__(
        self,
        plan: Plan,
        stages: dict[int, Stage],
        task: Task,
        groups: ProcessGroups,
        whole: WholeModel | None = None,
    ) -> None:
        self.plan, self.stages, self._task, self._groups, self._whole = plan, stages, task, groups, whole
        self._copies = copies_of(stages)
        self.engine = make_engine(plan, stages, groups)
        self._buffer_averager = BufferAverager(self.stages, groups)
        self.last = self.stages.get(plan.stages - 1)
        """The last stage, which counts; None if another rank holds it."""

    @property
    def updates(self) -> int:
        return next(iter(self.stages.values())).weights.updates

    def take_rates(self) -> list[float]:
        """Return the rate of each update since it was last called, where a stage has what is shown."""
        taken = [stage.weights.rates.take() for stage in self.stages.values()]
        return next(filter(None, taken), [])

    @contextmanager
    def keeping_options(self) -> Iterator[None]:
        """Put back what a program changes of the optimizers' parameter groups, rates among them."""
        before = [pair for stage in self.stages.values() for pair in stage.weights.rates.options()]
        yield
        for group, options in before:
            group.update(options)

    def is_leader(self, stage: int) -> bool:
        """Return whether this rank is the first of a stage, which speaks for all replicas."""
        return self.plan.firsts[stage] == self._groups.world.rank

    def average_buffers(self) -> None:
        """Make the buffers of a stage's replicas equal. All ranks call it, between windows."""
        self._buffer_averager.average()

    def train(
        self,
        sizes: Sequence[Size],
        batches: Batches,
        tick: Tick = lambda stage: None,
        observe: Observe | None = None,
        stop_check: StopCheck | None = None,
    ) -> int:
        """Train a window on batches of these `sizes`; return how many: fewer if `stop_check` ended it early.

        See Engine.train for `tick` and `observe`.
        """
        m = self.plan.settings.microbatches
        order = order_of(self.plan, len(sizes), self._groups.world.rank, stop_check)
        if self._whole is not None:
            self._whole.restore_stages()
        self._level_copies()
        self._buffer_averager.before_window()
        with self._feed(sizes, batches, order) as feed:
            self.engine.train(order, feed, m, tick, observe)
            for stage, mb in order.forwards(self._buffer_averager.stages):
                self._buffer_averager.count(stage, feed.size(mb).samples)
        return order.batches

    def evaluate(
        self,
        sizes: Sequence[Size],
        batches: Batches,
        tick: Tick = lambda stage: None,
        stop_check: StopCheck | None = None,
        take: Take | None = None,
    ) -> int:
        """Evaluate batches of these `sizes` with the newest weights; the last stage counts. Return how many.

        Each is one microbatch: a model may look at the whole batch. `take` gets the outputs of a prediction,
        which has no targets.
        """
        order = order_of(self.plan, len(sizes), self._groups.world.rank, stop_check, trains=False)
        self._level_copies()
        self.average_buffers()
        with (
            self._feed(sizes, batches, order, targets=take is None) as feed,
            nullcontext() if self._whole is None else self._whole.stages_in_place(),
        ):
            self.engine.evaluate(order, feed, tick, take)
        return order.batches

    def predict(
        self, sizes: Sequence[Size], batches: Batches, tick: Tick = lambda stage: None
    ) -> list[tuple[Tensor, ...]]:
        """Return the outputs for batches of these `sizes`, in host memory, on the last stage's rank."""
        kept: list[tuple[Tensor, ...]] = []
        self.evaluate(
            sizes, batches, tick, take=lambda outputs: kept.append(tuple(t.detach().cpu() for t in outputs))
        )
        return kept

    def _level_copies(self) -> None:
        """Give copies of a weight the numbers of the first, which a program may have changed since."""
        for first, copy in self._copies:
            copy.data.copy_(first.data)

    @contextmanager
    def _feed(
        self, sizes: Sequence[Size], batches: Batches, order: Order, targets: bool = True
    ) -> Iterator[WindowFeed]:
        """Yield the microbatches of a window; of an error for want of memory, say what was predicted."""
        mbs, rank, device = (
            range(len(sizes) * order.microbatches),
            self._groups.world.rank,
            self._groups.device,
        )
        first, last = ([order.home(stage, mb) for mb in mbs] for stage in (0, self.plan.stages - 1))
        part = WindowPart(
            sizes,
            order.microbatches,
            first,
            last if targets else None,
            rank,
            self._task.weight,
            device,
            self.plan.settings.data_dtype,
        )
        feed = batches.open(part)
        # Each rank has one microbatch, for a rehearsal.
        feed.deal(max(ranks.index(rank) for ranks in (first, last) for rank in set(ranks)))
        try:
            yield feed
        except ActionFailed as error:
            if not is_out_of_memory(error.__cause__):
                raise
            stage_bytes = self.plan.memory()
            raise explained(error, stage_bytes, rank, device) from error.__cause__
        feed.finish(order.batches)


def copies_of(stages: Mapping[int, Stage]) -> list[tuple[Tensor, Tensor]]:
    """Return the weights that stages of a rank share: that of the first, which a program sees, and a copy."""
    firsts: dict[str, Tensor] = {}
    pairs = [(firsts.setdefault(name, t), t) for stage in stages.values() for name, t in stage.named()]
    return [(first, copy) for first, copy in pairs if first is not copy]


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
    mine = [index for index, rank in enumerate(plan.placement) if groups.world.rank in rank]
    home = homes(network, plan.cuts)
    known = {id(p): name for name, p in network.model.named_parameters()}
    wanted = settings.cuda_graphs and groups.device.type == "cuda"
    stages: dict[int, Stage] = {}
    for index in mine:
        part = network.part(plan.cut.slices[index], plan.evaluation_cut.slices[index])
        names = {own: known[id(p)] for own, p in part.named_parameters() if known[id(p)] != own}
        if any(index in tie and not stages.keys().isdisjoint(tie) for tie in plan.cut.ties):
            part = deepcopy(part)  # each stage has copies of the weights that it shares
        kind = GraphedStage if wanted and not plan.not_captured(index) else Stage
        stages[index] = stage = kind(
            index,
            part.to(groups.device),
            optimizer,
            rate,
            device=groups.device.type,
            task=task.to(groups.device) if index == plan.stages - 1 else None,
            numerics=plan.numerics,
            compile=settings.compile,
            selective=plan.modes[index] is Mode.SELECTIVE,
            ema=settings.ema,
            correction=settings.correction,
            clip_grad_norm=settings.clip_grad_norm,
            names=names,
            elsewhere={name for name, first in home.items() if first != index},
            model=network.model if index == plan.stages - 1 else None,
        )
        stage.observers = observers_of(stage, settings.on_nan == "skip", settings.batchnorm == "batch")
        if index == plan.stages - 1 and settings.microbatches > 1 and len(plan.placement[index]) == 1:
            stage.observers[:0] = [BatchLoss(stage)] if not task.is_known else []
    return stages


def observers_of(stage: Stage, skips: bool = False, by_batch: bool = False) -> list[Observer]:
    """Return what looks at a stage. `skips`: on_nan=skip; `by_batch`: batchnorm=batch."""
    moved = [BatchStatistics(stage.module, only_finite=skips)] if by_batch else []
    if not skips:
        return [StopOnNaN(stage), *moved]
    return [SkipOnNaN(stage, Buffers(stage.module, without=moved[0].buffers if moved else ())), *moved]


def make_engine(
    plan: Plan, stages: Mapping[int, Stage], groups: ProcessGroups, channel: Channel | None = None
) -> Engine:
    """Make the engine for a rank's stages, over `channel` or else a new one, with the plan's codecs."""
    channels_last, bounds = plan.numerics.channels_last, {stage: plan.peaks(stage) for stage in stages}
    channel, rank = channel or groups.channel(plan.cut.bounds, channels_last), groups.world.rank

    def mailbox(over: Channel, training: bool) -> Mailbox:
        if not training:
            return Mailbox(over, plan.evaluation_cut, plan.placement, rank)
        return Mailbox(over, plan.cut, plan.placement, rank, Coding(plan.settings.codecs, channels_last))

    def loopback(training: bool) -> Mailbox:
        how = plan.cut.bounds, plan.settings.timeout, groups.device, groups.staged, channels_last
        ties = dict.fromkeys([ALL, *plan.ties])
        return mailbox(LoopbackChannel(dict.fromkeys(plan.links), *how, ties), training)

    uncaptured: list[str] = []  # why stages of this rank are

    def meet(norms: bool) -> None:
        if norms and groups.world.size > 1:
            channel.all_reduce(ALL, torch.zeros(plan.stages, dtype=torch.float64))
            channel.reduced(ALL)
        eager = [one for of_rank in groups.gather("the rehearsal", uncaptured) for one in of_rank]
        uncaptured.clear()
        if eager and not groups.world.rank:
            log.info("pipetrain: not all passes are CUDA graphs (cuda_graphs=auto): %s", eager[0])

    def capture() -> None:
        chosen, room = plan.settings.cuda_graphs, gpu_bytes(groups.device.type, groups.sharing)
        held = peaks_by_rank(plan.memory())[rank] if chosen and room else 0
        for index, stage in stages.items() if chosen else ():
            why, graphs = plan.not_captured(index), plan.graph_bytes(index)
            if isinstance(stage, GraphedStage):
                why = no_room_sentence(graphs, held, room) if room and chosen is not True else ""
                why = stage.capture(bounds[index].activations, bounds[index].versions, why)
                if why and chosen is True:
                    raise ConfigError(
                        f"cuda_graphs: the passes of stage {index} cannot be captured: {why}; leave "
                        f"cuda_graphs out"
                    )
            if why:
                uncaptured.append(why)
            else:
                held += graphs

    return Engine(
        stages,
        mailbox(channel, True),
        mailbox(channel, False),
        plan.peaks,
        Clock(groups.device),
        plan.settings.seed,
        Rehearsal(loopback, meet, capture) if rehearses(groups.device) else None,
    )


def owing(plan: Plan, rank: int) -> list[tuple[Edge, int]]:
    """Return the tensors that a rank sends with error feedback: the edge, and its number in the message."""
    return [
        (edge, number)
        for edge in plan.cut.bounds
        if rank in plan.placement[edge[0]] and plan.settings.codecs.for_edge(edge).error_feedback
        for number in range(plan.cut.tensors(edge))
    ]
