"""One rank's stages and their engine, which run the windows of a plan; how the engine is made."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from pipetrain.errors import ActionFailed, ConfigError
from pipetrain.model.network import Tensors
from pipetrain.model.specs import Size
from pipetrain.plan.memory_fit import explained, gpu_bytes, is_out_of_memory, no_room_sentence, peaks_by_rank
from pipetrain.plan.plan import Plan
from pipetrain.runtime.buffer_average import BufferAverager
from pipetrain.runtime.clock import Clock
from pipetrain.runtime.comm.channel import Channel
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.runtime.engine import Engine
from pipetrain.runtime.mailbox import Mailbox
from pipetrain.runtime.message_coding import Coding
from pipetrain.runtime.microbatch_feed import Batches, FeedSettings, WindowFeed, WindowPart
from pipetrain.runtime.rank_actions import Order, order_of
from pipetrain.runtime.rehearsal import LoopbackChannel, Rehearsal, rehearses
from pipetrain.runtime.stage.cuda_graphs import GraphedStage
from pipetrain.runtime.stage.memory_meter import Meter
from pipetrain.runtime.stage.stage import Stage
from pipetrain.runtime.whole_model import WholeModel, gather_outputs
from pipetrain.runtime.window_record import NO_HOOKS, WindowHooks, WindowRecord
from pipetrain.schedule.actions import ALL
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
        whole_model: WholeModel | None = None,
    ) -> None:
        self.plan, self.stages, self._groups, self._whole_model = plan, stages, groups, whole_model
        rank, dtype = groups.world.rank, plan.settings.data_dtype
        self._feed_settings = FeedSettings(rank, task.weight, groups.device, dtype)
        self._shared_copies = shared_weight_copies(stages)
        self.engine = make_engine(plan, stages, groups)
        self._buffer_averager = BufferAverager(self.stages, groups)
        self.last = self.stages.get(plan.stages - 1)
        """The last stage, which counts; None if another rank holds it."""

    @property
    def updates(self) -> int:
        return next(iter(self.stages.values())).weights.updates

    def take_learning_rates(self) -> list[float]:
        """Return the rate of each update since it was last called, where a stage has what is shown."""
        stage_rates = [stage.weights.rates.take() for stage in self.stages.values()]
        return next(filter(None, stage_rates), [])

    @contextmanager
    def keeping_options(self) -> Iterator[None]:
        """Put back what a program changes of the optimizers' parameter groups, rates among them."""
        saved = [pair for stage in self.stages.values() for pair in stage.weights.rates.options()]
        yield
        for group, options in saved:
            group.update(options)

    def is_leader(self, stage: int) -> bool:
        """Return whether this rank is the leader of a stage's replicas, the first one."""
        return self.plan.firsts[stage] == self._groups.world.rank

    def average_buffers(self) -> None:
        """Average the buffers of a stage's replicas. All ranks call it, between windows."""
        self._buffer_averager.average()

    def train(self, sizes: Sequence[Size], batches: Batches, hooks: WindowHooks = NO_HOOKS) -> WindowRecord:
        """Train a window on batches of these `sizes`; fewer if it is ended early."""
        order = order_of(self.plan, len(sizes), self._groups.world.rank, hooks.stop_check)
        if self._whole_model is not None:
            self._whole_model.restore_stages()
        self._copy_shared_weights()
        self._buffer_averager.before_window()
        measured = hooks.memory and not any(stage.shapes_captured for stage in self.stages.values())
        meter = Meter(self.stages, self._groups.device) if measured else None
        with self._feed(sizes, batches, order) as feed:
            row = self.engine.train(order, feed, hooks.progress, meter, hooks.times)
            for stage, mb in order.forwards(self._buffer_averager.stages):
                self._buffer_averager.count(stage, feed.size(mb).samples)
        return WindowRecord(sizes, order.batches, row, meter.close() if meter else None)

    def predict(self, sizes: Sequence[Size], batches: Batches, hooks: WindowHooks = NO_HOOKS) -> WindowRecord:
        """Evaluate batches without targets; gather the outputs for each, in host memory, on rank 0."""
        outputs: list[Tensors] = []
        ran, owners = self.evaluate(sizes, batches, hooks, outputs), self.plan.placement[-1]
        return replace(ran, outputs=gather_outputs(outputs, ran.done, self._groups, owners))

    def evaluate(
        self,
        sizes: Sequence[Size],
        batches: Batches,
        hooks: WindowHooks = NO_HOOKS,
        outputs: list[Tensors] | None = None,
    ) -> WindowRecord:
        """Evaluate batches of these `sizes` with the newest weights; the last stage counts.

        Each is one microbatch, as a model may look at the whole batch. `outputs`: gets those of a prediction,
        which has no targets.
        """
        rank = self._groups.world.rank
        order = order_of(self.plan, len(sizes), rank, hooks.stop_check, trains=False)
        self._copy_shared_weights()
        self.average_buffers()
        with (
            self._feed(sizes, batches, order, targets=outputs is None) as feed,
            nullcontext() if self._whole_model is None else self._whole_model.stages_in_place(),
        ):
            self.engine.evaluate(order, feed, hooks.progress, outputs)
        return WindowRecord(sizes, order.batches)

    def _copy_shared_weights(self) -> None:
        """Copy each weight that a program may have changed to the other stages of this rank that share it."""
        for first, copy in self._shared_copies:
            copy.data.copy_(first.data)

    @contextmanager
    def _feed(
        self, sizes: Sequence[Size], batches: Batches, order: Order, targets: bool = True
    ) -> Iterator[WindowFeed]:
        """Yield the microbatches of a window; of an error for want of memory, say what was predicted."""
        settings, mbs = self._feed_settings, range(len(sizes) * order.microbatches)
        ends = 0, self.plan.stages - 1
        input_ranks, target_ranks = ([order.rank_of(stage, mb) for mb in mbs] for stage in ends)
        part = WindowPart(sizes, order.microbatches, input_ranks, target_ranks if targets else None, settings)
        feed = batches.open(part)
        # For a rehearsal each rank needs one microbatch.
        feed.send_up_to(
            max(ranks.index(rank) for ranks in (input_ranks, target_ranks) for rank in set(ranks))
        )
        try:
            yield feed
        except ActionFailed as error:
            if not is_out_of_memory(error.__cause__):
                raise
            memory = self.plan.memory()
            raise explained(error, memory, settings.rank, settings.device) from error.__cause__
        feed.finish(order.batches)


def shared_weight_copies(stages: Mapping[int, Stage]) -> list[tuple[Tensor, Tensor]]:
    """Return each weight that stages of a rank share: that of the first, which a program sees, and a copy."""
    originals: dict[str, Tensor] = {}
    pairs = [
        (originals.setdefault(name, t), t) for stage in stages.values() for name, t in stage.tensors_by_name()
    ]
    return [(first, copy) for first, copy in pairs if first is not copy]


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

    requested, said = plan.settings.cuda_graphs, list[str]()
    uncaptured = [*filter(None, map(plan.not_captured, stages if requested else ()))]  # why

    def say_one(reasons: Sequence[str]) -> None:
        if reasons and not said and not rank:
            log.info(
                "pipetrain: not all passes are CUDA graphs (cuda_graphs=%s): %s",
                str(requested).lower(),
                reasons[0],
            )
            said.append(reasons[0])

    def meet(norms: bool) -> None:
        if norms and groups.world.size > 1:
            channel.all_reduce(ALL, torch.zeros(plan.stages, dtype=torch.float64))
            channel.reduced(ALL)
        say_one([*chain.from_iterable(groups.gather("the rehearsal", uncaptured))])
        uncaptured.clear()

    def capture() -> None:
        room = gpu_bytes(groups.device.type, groups.ranks_on_gpu) if requested is not True else None
        graphed = {index: stage for index, stage in stages.items() if isinstance(stage, GraphedStage)}
        for index, stage in graphed.items():
            while stage.capture_due:
                reason = ""
                if room:
                    held = sum(plan.graph_bytes(n) * graphed[n].shapes_captured for n in graphed)
                    held += peaks_by_rank(plan.memory())[rank]
                    reason = no_room_sentence(plan.graph_bytes(index), held, room)
                reason = stage.capture(bounds[index].activations, bounds[index].versions, reason)
                if reason and requested is True and not stage.shapes_captured:
                    finding = f"the passes of stage {index} cannot be captured"
                    raise ConfigError(f"cuda_graphs: {finding}: {reason}; leave cuda_graphs out")
                uncaptured.extend([reason] if reason else [])
        say_one(uncaptured)  # those of other ranks when these meet

    return Engine(
        stages,
        mailbox(channel, True),
        mailbox(channel, False),
        plan.peaks,
        Clock(groups.device),
        plan.settings.seed,
        Rehearsal(loopback, meet, capture) if rehearses(groups.device) else None,
    )
