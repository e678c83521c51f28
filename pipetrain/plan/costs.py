"""What stages cost: the time per batch and the memory of any layers, by a profile or by their work.

A stage's time is that of its layers, its optimizer step, and every message to or from another rank, in full
at both ends, because the processor that copies a message does not compute meanwhile. PipeDream's partitioner
(Narayanan et al., "PipeDream", 2019, section 3.1), which this follows otherwise, treats the messages over a
cut as a stage that overlaps with all others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from pipetrain.codec import Codecs
from pipetrain.network.network import INPUT, Made
from pipetrain.network.values import ValueSpec
from pipetrain.plan.cut import Cut
from pipetrain.plan.estimate import Layer
from pipetrain.plan.profile import LayerTime, Profile
from pipetrain.plan.sizes import NO_LOSS, LossSizes, stage_sizes
from pipetrain.schedule.actions import Edge, Op
from pipetrain.schedule.memory import Counts, Sizes, in_bytes
from pipetrain.schedule.timeline import Costs, Kind
from pipetrain.settings import PROFILE, Mode


@dataclass(frozen=True, slots=True)
class Recomputation:
    """What a stage may recompute: the `modes` to choose from, and how often and how much it then holds.

    `share`: of its microbatches that have an R; `counts`: as those of Predictor, which are without any R.
    """

    modes: Sequence[Mode]
    share: float
    counts: Sequence[Counts]


class _Bytes(NamedTuple):
    """Of values that cross a cut: on the wire, there and back, and of the tensors themselves."""

    there: int
    back: int
    raw_there: int
    raw_back: int


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
    costs: Costs
    reasons: Sequence[str] = ()  # why stages recompute, in sentences

    @property
    def cuts(self) -> list[int]:
        return self.choices[PROFILE].cuts

    @property
    def modes(self) -> list[Mode]:
        """The mode of recomputation of each stage."""
        return [stage.mode for stage in self.stages]

    @property
    def slowest_s(self) -> float:
        return self.choices[PROFILE].slowest_s


@dataclass(frozen=True)
class Predictor:
    """Predicts layers `start` to `end` (exclusive) as stage number `stage` of a pipeline.

    Of the model it knows what its layers took (`profile`), what they make and hold, its `inputs`, what its
    `loss` saves, and whether a moving average of the weights is kept (`averaged`). Of the schedule, in lists
    by stage: the `placement` on ranks; the `counts` of what a stage holds where that may be the most, see
    memory.most; what it may `recompute`, if anything; and whether backwards come in two halves (`split`).
    """

    profile: Profile
    layers: Sequence[Layer]
    inputs: ValueSpec
    placement: Sequence[int]
    counts: Sequence[Sequence[Counts]]
    microbatches: int
    buffer_size: int
    recompute: Sequence[Recomputation] = ()
    split: bool = False
    codecs: Codecs = field(default_factory=Codecs)
    loss: LossSizes = NO_LOSS
    averaged: bool = False
    _exchanged: dict[tuple[int, int, int], list[list[Made]]] = field(default_factory=dict, init=False)
    _held: dict[tuple[int, int, bool], Sizes] = field(default_factory=dict, init=False)
    _needed: dict[tuple[int, int], bool] = field(default_factory=dict, init=False)

    @property
    def stages(self) -> int:
        return len(self.placement)

    @cached_property
    def _bounds(self) -> list[int]:
        """The bound of a skip that begins at each stage, see schedule/bounds.py."""
        most = (max(sum(one[:3]) for one in counts) for counts in self.counts)
        return [max(self.buffer_size, -(-one // 2)) for one in most]

    @cached_property
    def _sums(self) -> dict[str, list[float]]:
        """The times of the first 0, 1, 2, ... layers, by their name, so that those of a slice need no sum."""
        times = self.profile.layers
        names = [one.name for one in fields(LayerTime) if one.name.endswith("_s")]
        return {name: [0.0, *accumulate(getattr(layer, name) for layer in times)] for name in names}

    @cached_property
    def _users(self) -> dict[Made, list[int]]:
        """The layers that take each value."""
        users: dict[Made, list[int]] = {}
        for index, layer in enumerate(self.layers):
            for value in layer.takes:
                users.setdefault(value, []).append(index)
        return users

    @cached_property
    def _sizes(self) -> dict[Made, _Bytes]:
        """The bytes of each value; with codecs, coding is free."""
        found = {}
        for value in self._users:
            maker = None if value.layer == INPUT else self.layers[value.layer]
            spec = (maker.output if maker else self.inputs).specs[value.number]
            there, back = (self.codecs.wire_bytes([spec], forward) for forward in (True, False))
            returned = maker is not None and maker.needs(value.number)
            found[value] = _Bytes(there, back * returned, spec.nbytes, spec.nbytes * returned)
        return found

    def _bytes(self, values: Iterable[Made]) -> _Bytes:
        return _Bytes(*map(sum, zip(*(self._sizes[value] for value in values), (0,) * 4, strict=True)))

    def modes(self, stage: int) -> Sequence[Mode]:
        """Return the modes that a stage may have."""
        return self.recompute[stage].modes if self.recompute else (Mode.NEVER,)

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
        compute_s = forward_s + (input_s + weight_s if self.split else backward_s)
        if mode is not Mode.NEVER:
            compute_s += self.recompute[stage].share * again_s
        each_s = compute_s + self._messages_s(stage, start, end)
        steps = self._sums["step_s"]
        return self.microbatches * each_s + steps[end] - steps[start]

    def _compute_s(self, start: int, end: int, mode: Mode) -> tuple[float, float, float, float, float]:
        """Return the seconds of F, R, B, I and W."""

        def of(name: str) -> float:
            return self._sums[name][end] - self._sums[name][start]

        recorded_s = forward_s = of("forward_s")
        backward_s = of("backward_s")
        halves = 0.0, backward_s  # W is all of it
        if self._hands_back(start, end):
            recorded_s = of("recorded_s") if self.split else forward_s
            halves = of("input_s"), of("weight_s")
        if mode is Mode.NEVER:
            return recorded_s, recorded_s, backward_s, *halves
        if mode is Mode.ALWAYS:
            return forward_s, recorded_s, backward_s, *halves
        return of("kept_s"), of("again_s") + recorded_s - forward_s, backward_s, *halves

    def _hands_back(self, start: int, end: int) -> bool:
        """Return whether layers before these need a gradient of them."""
        key = start, end
        if key not in self._needed:
            self._needed[key] = bool(self._bytes(self._entering(start, end)).back)
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
            step_s=self._sums["step_s"][end] - self._sums["step_s"][start],
            batch_s=self.batch_s(stage, start, end, mode),
            held_bytes=self.held_bytes(stage, start, end, mode),
        )

    def held_bytes(self, stage: int, start: int, end: int, mode: Mode | None = None) -> int:
        """Return the most bytes that a stage holds, with the working memory of a layer.

        That is the largest additional peak of a layer, which counts some activations twice.
        """
        mode = mode or self.modes(stage)[0]
        sizes = self.sizes(stage, start, end, mode is Mode.SELECTIVE)
        counts = self.counts[stage] if mode is Mode.NEVER else self.recompute[stage].counts
        held = max(in_bytes(one, sizes).total for one in counts)
        return (
            held
            + self._skips_bytes(stage, start, end)
            + max(layer.peak_bytes for layer in self.profile.layers[start:end])
        )

    def sizes(self, stage: int, start: int, end: int, selective: bool = False) -> Sizes:
        """Return the bytes of a stage, with the messages to and from its neighbours."""
        key = start, end, selective
        if key not in self._held:
            own = self.layers, self.inputs, start, end, self.loss
            self._held[key] = stage_sizes(*own, averaged=self.averaged, selective=selective)
        before, _, behind, _ = self._exchanged_by(stage, start, end)
        wire: dict[Edge, int] = {}
        raw: dict[Edge, int] = {}
        for edge, values in (((stage - 1, stage), before), ((stage, stage + 1), behind)):
            size = self._bytes(values)
            wire |= {edge: size.there, edge[::-1]: size.back}
            raw |= {edge: size.raw_there, edge[::-1]: size.raw_back}
        optimizer = sum(layer.state_bytes for layer in self.profile.layers[start:end])
        return replace(self._held[key], optimizer=optimizer, wire=wire, raw=raw)

    def _skips_bytes(self, stage: int, start: int, end: int) -> int:
        """Return the bytes of messages that skip stages, with as many on an edge as its bound may be."""
        _, before, _, behind = self._exchanged_by(stage, start, end)
        earlier = self._bounds[: max(0, stage - 1)]
        entering = self._bytes(before)
        received = max(earlier, default=0) * (entering.there + entering.back)
        return received + self._bounds[stage] * self._bytes(behind).back

    def stage_times(self, cuts: Sequence[int], modes: Sequence[Mode] = ()) -> list[StageTime]:
        ends = pairwise([0, *cuts, len(self.layers)])
        return [
            self.stage_time(stage, start, end, modes[stage] if modes else None)
            for stage, (start, end) in enumerate(ends)
        ]

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
            if values := self._between(spans[stage], spans[to]):
                size = self._bytes(values)
                seconds[stage, Op.SEND_F, to] = self._travel_s(size.there)
                seconds[to, Op.SEND_B, stage] = self._travel_s(size.back)
        for stage, nbytes in (tied or {}).items():
            seconds[stage, Op.TIE] = self._travel_s(nbytes)
        return Costs(seconds)

    def _entering(self, start: int, end: int) -> list[Made]:
        """Return the values that layers `start` to `end` take from layers before them."""
        return self._between((0, start), (start, end)) if start else []

    def _between(self, source: tuple[int, int], to: tuple[int, int]) -> list[Made]:
        """Return the values made in layers `source` (start, end) and used in layers `to`."""
        start = source[0] if source[0] else INPUT
        return [
            value
            for value, users in self._users.items()
            if start <= value.layer < source[1] and any(to[0] <= user < to[1] for user in users)
        ]

    def _exchanged_by(self, stage: int, start: int, end: int) -> list[list[Made]]:
        """Return what a stage exchanges with the one before it, with earlier ones, the next and later ones.

        Which stages the earlier and later ones are depends on other cuts.
        """
        key = stage, start, end
        if key not in self._exchanged:
            mine = (start, end)
            entering = self._entering(start, end)
            leaving = self._between(mine, (end, len(self.layers)))
            before = [value for value in entering if value.layer == start - 1 or stage == 1]
            behind = [value for value in leaving if end in self._users[value] or stage + 2 == self.stages]
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
        ranks = self.placement
        if len(set(ranks)) == 1:
            return []
        before, earlier, behind, later = self._exchanged_by(stage, start, end)
        groups = [
            before if stage and ranks[stage - 1] != ranks[stage] else [],
            earlier,
            behind if stage + 1 < self.stages and ranks[stage + 1] != ranks[stage] else [],
            later,
        ]
        return [self._bytes(group)[:2] for group in groups if group]

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
        if slice.enters_grad is None or not any(slice.enters_grad.needs):
            weights = 2 * forward
        times = {Op.F: forward, Op.R: forward, Op.B: 2 * forward, Op.I: 2 * forward - weights, Op.W: weights}
        costs |= {(stage, op): seconds for op, seconds in times.items()}
    return Costs(costs)
