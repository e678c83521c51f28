"""Predicts the time per batch and the memory of a stage from profiled layers.

A stage's time is that of its layers, its optimizer step, and every message to or from another rank, in full
at both ends, because the processor that copies a message does not compute meanwhile. PipeDream's partitioner
(Narayanan et al., "PipeDream", 2019, section 3.1), which this follows otherwise, treats the messages over a
cut as a stage that overlaps with all others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from pipetrain.network.boundary import ValueSpec
from pipetrain.network.network import INPUT
from pipetrain.plan.cut import Cut
from pipetrain.plan.estimate import Layer
from pipetrain.plan.profile import Profile
from pipetrain.plan.recompute import Mode
from pipetrain.plan.sizes import (
    NO_LOSS,
    LossSizes,
    Microbatch,
    WeightBytes,
    microbatch,
    weights_of,
)
from pipetrain.schedule.actions import Edge, Op
from pipetrain.schedule.memory import Counts, Sizes, in_bytes
from pipetrain.schedule.timeline import Costs, Kind
from pipetrain.settings import PROFILE


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The schedule's part in the cost of a stage, independent of its layers. Lists are by stage."""

    microbatches: int
    buffer_size: int
    placement: Sequence[int]  # ranks
    counts: Sequence[Sequence[Counts]]  # what it holds where that may be the most, see memory.most
    values: Sequence[Traffic]
    model: Model
    split: bool = False  # whether backwards come in two halves
    again: Sequence[Recomputation] = ()  # if stages may recompute


@dataclass(frozen=True, slots=True)
class Recomputation:
    """What a stage may recompute: the `modes` to choose from, and how often and how much it then holds.

    `share`: of its microbatches that have an R; `counts`: as those of Pipeline, which are without any R.
    """

    modes: Sequence[Mode]
    share: float
    counts: Sequence[Counts]


@dataclass(frozen=True, slots=True)
class Model:
    """What the layers hold: their estimates, the model's input, and what the loss saves.

    `averaged`: a moving average of the weights is kept.
    """

    layers: Sequence[Layer]
    inputs: ValueSpec
    loss: LossSizes = NO_LOSS
    averaged: bool = False


@dataclass(frozen=True, slots=True)
class Traffic:
    """A value that layers behind its maker use. `layer`: that maker; INPUT (-1) for the data.

    Bytes on the wire, forward and back, and of the tensor itself; with codecs, coding is free.
    """

    layer: int
    users: tuple[int, ...]  # layers
    forward: int
    back: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StageTime:
    """The predicted times of a stage: F, R, B, I, W and messages per microbatch, STEP and the sum per batch.

    The sum is with B, or with I and W in a schedule that splits backwards; with R for the microbatches that
    have one.
    """

    mode: Mode
    forward_s: float
    again_s: float
    backward_s: float
    input_s: float
    weight_s: float
    messages_s: float
    step_s: float
    batch_s: float
    held_bytes: int


class Choice(NamedTuple):
    """A strategy's cuts, as predicted, each stage in its fastest mode that fits."""

    cuts: list[int]
    slowest_s: float  # of the slowest stage a batch
    held_bytes: int  # of the fullest stage
    fits: bool = True  # whether each stage keeps to memory_limit


@dataclass(frozen=True, slots=True)
class Prediction:
    """A profile's predictions; `choices`: by strategy."""

    profile: Profile
    stages: Sequence[StageTime]
    choices: dict[str, Choice]
    reasons: Sequence[str] = ()  # why stages recompute, in sentences

    @property
    def slowest_s(self) -> float:
        return self.choices[PROFILE].slowest_s


class Predictor:
    """Predicts layers `start` to `end` (exclusive) as stage number `stage` of a pipeline."""

    def __init__(self, profile: Profile, pipeline: Pipeline) -> None:
        self.layers = profile.layers
        self.stages = len(pipeline.placement)
        self.profile = profile
        self._pipeline = pipeline
        self._exchanged: dict[tuple[int, int, int], list[list[Traffic]]] = {}
        self._held: dict[tuple[int, int, bool], tuple[Microbatch, WeightBytes]] = {}
        # Of a skip that begins at each stage, see schedule/bounds.py.
        self._bounds = [
            max(pipeline.buffer_size, -(-max(sum(one[:3]) for one in counts) // 2))
            for counts in pipeline.counts
        ]
        self._needed: dict[tuple[int, int], bool] = {}
        # Prefix sums over the layers, so that the time of a slice needs no sum.
        self._forward_s = _sums(layer.forward_s for layer in self.layers)
        self._recorded_s = _sums(layer.recorded_s for layer in self.layers)
        self._kept_s = _sums(layer.kept_s for layer in self.layers)
        self._again_s = _sums(layer.again_s for layer in self.layers)
        self._backward_s = _sums(layer.backward_s for layer in self.layers)
        self._input_s = _sums(layer.input_s for layer in self.layers)
        self._weight_s = _sums(layer.weight_s for layer in self.layers)
        self._step_s = _sums(layer.step_s for layer in self.layers)

    def modes(self, stage: int) -> Sequence[Mode]:
        """Return the modes that a stage may have."""
        return self._pipeline.again[stage].modes if self._pipeline.again else (Mode.NEVER,)

    def mode(self, stage: int, start: int, end: int, limit: float | None) -> Mode | None:
        """Return the fastest mode of a stage with which it holds at most `limit` bytes; None if none fits."""
        fitting = [
            mode
            for mode in self.modes(stage)
            if limit is None or self.held_bytes(stage, start, end, mode) <= limit
        ]
        return min(fitting, key=lambda mode: self.batch_s(stage, start, end, mode), default=None)

    def least(self, stage: int, start: int, end: int) -> Mode:
        """Return the mode with which a stage holds the least."""
        return min(self.modes(stage), key=lambda mode: self.held_bytes(stage, start, end, mode))

    def modes_of(self, cuts: Sequence[int], limit: float | None) -> list[Mode]:
        """Return the mode of each stage within the limit; where none fits, that which holds the least."""
        spans = enumerate(pairwise([0, *cuts, len(self.layers)]))
        return [self.mode(stage, *span, limit) or self.least(stage, *span) for stage, span in spans]

    def batch_s(self, stage: int, start: int, end: int, mode: Mode | None = None) -> float:
        """Return the seconds of a batch. `mode`: None for the first one that the stage may have."""
        mode = mode or self.modes(stage)[0]
        forward_s, again_s, backward_s, input_s, weight_s = self._compute_s(start, end, mode)
        compute_s = forward_s + (input_s + weight_s if self._pipeline.split else backward_s)
        if mode is not Mode.NEVER:
            compute_s += self._pipeline.again[stage].share * again_s
        each_s = compute_s + self._messages_s(stage, start, end)
        return self._pipeline.microbatches * each_s + self._step_s[end] - self._step_s[start]

    def _compute_s(self, start: int, end: int, mode: Mode) -> tuple[float, float, float, float, float]:
        """Return the seconds of F, R, B, I and W."""

        def of(sums: Sequence[float]) -> float:
            return sums[end] - sums[start]

        recorded_s = forward_s = of(self._forward_s)
        backward_s = of(self._backward_s)
        halves = 0.0, backward_s  # W is all of it
        if self._hands_back(start, end):
            recorded_s = of(self._recorded_s) if self._pipeline.split else forward_s
            halves = of(self._input_s), of(self._weight_s)
        if mode is Mode.NEVER:
            return recorded_s, recorded_s, backward_s, *halves
        if mode is Mode.ALWAYS:
            return forward_s, recorded_s, backward_s, *halves
        return of(self._kept_s), of(self._again_s) + recorded_s - forward_s, backward_s, *halves

    def _hands_back(self, start: int, end: int) -> bool:
        """Return whether layers before these need a gradient of them."""
        key = start, end
        if key not in self._needed:
            self._needed[key] = any(value.back for value in self._entering(start, end))
        return self._needed[key]

    def stage_time(self, stage: int, start: int, end: int, mode: Mode | None = None) -> StageTime:
        mode = mode or self.modes(stage)[0]
        forward_s, again_s, backward_s, input_s, weight_s = self._compute_s(start, end, mode)
        return StageTime(
            mode=mode,
            forward_s=forward_s,
            again_s=again_s,
            backward_s=backward_s,
            input_s=input_s,
            weight_s=weight_s,
            messages_s=self._messages_s(stage, start, end),
            step_s=self._step_s[end] - self._step_s[start],
            batch_s=self.batch_s(stage, start, end, mode),
            held_bytes=self.held_bytes(stage, start, end, mode),
        )

    def held_bytes(self, stage: int, start: int, end: int, mode: Mode | None = None) -> int:
        """Return the most bytes that a stage holds, with the working memory of a layer.

        That is the largest additional peak of a layer, which counts some activations twice.
        """
        mode = mode or self.modes(stage)[0]
        sizes = self.sizes(stage, start, end, mode is Mode.SELECTIVE)
        counts = self._pipeline.counts if mode is Mode.NEVER else [one.counts for one in self._pipeline.again]
        held = max(in_bytes(one, sizes).total for one in counts[stage])
        return (
            held
            + self._skips_bytes(stage, start, end)
            + max(layer.peak_bytes for layer in self.layers[start:end])
        )

    def sizes(self, stage: int, start: int, end: int, selective: bool = False) -> Sizes:
        """Return the bytes of a stage, with the messages to and from its neighbours."""
        model = self._pipeline.model
        key = start, end, selective
        if key not in self._held:
            of_one = microbatch(model.layers, model.inputs, start, end, model.loss, selective=selective)
            self._held[key] = of_one, weights_of(model.layers[start:end])
        of_one, weights = self._held[key]
        before, _, behind, _ = self._crossing(stage, start, end)
        wire: dict[Edge, int] = {}
        raw: dict[Edge, int] = {}
        for edge, values in (((stage - 1, stage), before), ((stage, stage + 1), behind)):
            wire |= {edge: sum(v.forward for v in values), edge[::-1]: sum(v.back for v in values)}
            back = sum(v.nbytes for v in values if v.back)
            raw |= {edge: sum(v.nbytes for v in values), edge[::-1]: back}
        return Sizes(
            saved=of_one.saved,
            before_r=of_one.before_r,
            after_i=of_one.after_i,
            weights=weights.trained * (1 + model.averaged) + weights.fixed,
            version=weights.trained,
            gradient=weights.trained,
            optimizer=sum(layer.state_bytes for layer in self.layers[start:end]),
            wire=wire,
            raw=raw,
        )

    def _skips_bytes(self, stage: int, start: int, end: int) -> int:
        """Return the bytes of messages that skip stages, with as many on an edge as its bound may be."""
        _, before, _, behind = self._crossing(stage, start, end)
        earlier = self._bounds[: max(0, stage - 1)]
        received = max(earlier, default=0) * sum(value.forward + value.back for value in before)
        return received + self._bounds[stage] * sum(value.back for value in behind)

    def stage_times(self, cuts: Sequence[int], modes: Sequence[Mode] = ()) -> list[StageTime]:
        ends = pairwise([0, *cuts, len(self.layers)])
        return [
            self.stage_time(stage, start, end, modes[stage] if modes else None)
            for stage, (start, end) in enumerate(ends)
        ]

    def slowest_s(self, cuts: Sequence[int], limit: float | None = None) -> float:
        """Return the seconds of a batch at the slowest stage, each in its fastest mode within the limit."""
        return self.choice(cuts, limit).slowest_s

    def choice(self, cuts: Sequence[int], limit: float | None = None) -> Choice:
        """Return what cuts would take and hold, each stage in its fastest mode within the limit."""
        stages = self.stage_times(cuts, self.modes_of(cuts, limit))
        held = max(stage.held_bytes for stage in stages)
        slowest_s = max(stage.batch_s for stage in stages)
        return Choice(list(cuts), slowest_s, held, limit is None or held <= limit)

    def costs(
        self, cuts: Sequence[int], tied: Mapping[int, int] | None = None, modes: Sequence[Mode] = ()
    ) -> Costs:
        """Return the costs for `simulate`, in seconds.

        `tied`: the bytes of the weights that a stage shares with others, by stage. An F that has no R, of a
        stage that recomputes others, is priced as these.
        """
        seconds: dict[Kind, float] = {}
        for stage, taken in enumerate(self.stage_times(cuts, modes)):
            seconds[stage, Op.F] = taken.forward_s
            seconds[stage, Op.R] = taken.again_s
            seconds[stage, Op.B] = taken.backward_s
            seconds[stage, Op.I] = taken.input_s
            seconds[stage, Op.W] = taken.weight_s
            seconds[stage, Op.STEP] = taken.step_s
            seconds[stage, Op.NORM] = self.profile.latency_s  # a message of one number
        ends = [0, *cuts, len(self.layers)]
        spans = list(pairwise(ends))
        for stage, to in itertools.combinations(range(len(spans)), 2):
            crossing = self._between(spans[stage], spans[to])
            if crossing:
                seconds[stage, Op.SEND_F, to] = self._travel_s(sum(value.forward for value in crossing))
                seconds[to, Op.SEND_B, stage] = self._travel_s(sum(value.back for value in crossing))
        for stage, nbytes in (tied or {}).items():
            seconds[stage, Op.TIE] = self._travel_s(nbytes)
        return Costs(seconds)

    def _entering(self, start: int, end: int) -> list[Traffic]:
        """Return the values that layers `start` to `end` take from layers before them."""
        return self._between((0, start), (start, end)) if start else []

    def _between(self, source: tuple[int, int], to: tuple[int, int]) -> list[Traffic]:
        """Return the values made in layers `source` (start, end) and used in layers `to`."""
        start = source[0] if source[0] else INPUT
        made = [value for value in self._pipeline.values if start <= value.layer < source[1]]
        return [value for value in made if any(to[0] <= user < to[1] for user in value.users)]

    def _crossing(self, stage: int, start: int, end: int) -> list[list[Traffic]]:
        """Return what a stage exchanges with the one before it, with earlier ones, the next and later ones.

        Which stages the earlier and later ones are depends on other cuts.
        """
        key = stage, start, end
        if key not in self._exchanged:
            mine = (start, end)
            entering = self._entering(start, end)
            leaving = self._between(mine, (end, len(self.layers)))
            before = [value for value in entering if value.layer == start - 1 or stage == 1]
            behind = [value for value in leaving if end in value.users or stage + 2 == self.stages]
            self._exchanged[key] = [
                before,
                [value for value in entering if value not in before],
                behind,
                [value for value in leaving if value not in behind],
            ]
        return self._exchanged[key]

    def _messages(self, stage: int, start: int, end: int) -> list[tuple[int, int]]:
        """Return (forward, back) bytes of the messages that a stage exchanges with other ranks.

        Values from before the stage before come as one message, as do those for layers behind the next stage.
        """
        ranks = self._pipeline.placement
        if len(set(ranks)) == 1:
            return []
        before, earlier, behind, later = self._crossing(stage, start, end)
        groups = [
            before if stage and ranks[stage - 1] != ranks[stage] else [],
            earlier,
            behind if stage + 1 < self.stages and ranks[stage + 1] != ranks[stage] else [],
            later,
        ]
        return [
            (sum(value.forward for value in group), sum(value.back for value in group))
            for group in groups
            if group
        ]

    def _messages_s(self, stage: int, start: int, end: int) -> float:
        messages = self._messages(stage, start, end)
        return sum(self._travel_s(nbytes) for message in messages for nbytes in message)

    def _travel_s(self, nbytes: int) -> float:
        return self.profile.latency_s + nbytes * self.profile.s_per_byte


def costs_by_work(layers: Sequence[Layer], cut: Cut, ranks: int) -> Costs:
    """Return each stage's costs by its estimated work, in forwards of the mean rank; messages are free.

    So the unit is the same for all schedules, however many stages they have on a rank.
    Where nothing that enters a stage needs a gradient, W is all of the backward.
    """
    mean = sum(layer.flops for layer in layers) / ranks
    costs: dict[Kind, float] = {}
    for stage, slice in enumerate(cut.slices):
        mine = layers[slice.start : slice.end]
        forward = sum(layer.flops for layer in mine) / mean
        weights = sum(layer.weight_flops for layer in mine) / mean
        if not any(cut.inputs(stage).needs):
            weights = 2 * forward
        times = {Op.F: forward, Op.R: forward, Op.B: 2 * forward, Op.I: 2 * forward - weights, Op.W: weights}
        costs |= {(stage, op): seconds for op, seconds in times.items()}
    return Costs(costs)


def _sums(values: Iterable[float]) -> list[float]:
    """Return the sum of the first 0, 1, 2, ... values."""
    return [0.0, *accumulate(values)]
