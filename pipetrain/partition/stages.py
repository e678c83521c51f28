"""Predicts the time per batch and the memory of a stage from profiled layers.

A stage's time is that of its layers, its optimizer step, and every message to or from another rank, in full
at both ends, because the processor that copies a message does not compute meanwhile. PipeDream's partitioner
(Narayanan et al., "PipeDream", 2019, section 3.1), which this follows otherwise, treats the messages over a
cut as a stage that overlaps with all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from pipetrain.partition.profile import PROFILE, Profile
from pipetrain.schedule.actions import Op
from pipetrain.schedule.timeline import Costs


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The schedule's part in the cost of a stage, independent of its layers. Lists are by stage."""

    microbatches: int
    buffer_size: int
    placement: Sequence[int]  # ranks
    activations: Sequence[int]  # peaks
    versions: Sequence[int]
    # With codecs: bytes on the wire over a cut behind each layer, forward and back; coding is free.
    wire_bytes: Sequence[tuple[int, int]] | None = None


@dataclass(frozen=True, slots=True)
class StageTime:
    """The predicted times of a stage: F, B and messages per microbatch, STEP and the sum per batch."""

    forward_s: float
    backward_s: float
    messages_s: float
    step_s: float
    batch_s: float
    held_bytes: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """A profile's predictions; `choices`: each strategy's cuts, and their slowest stage's seconds a batch."""

    profile: Profile
    stages: Sequence[StageTime]
    choices: dict[str, tuple[list[int], float]]

    @property
    def slowest_s(self) -> float:
        return self.choices[PROFILE][1]


class Predictor:
    """Predicts layers `start` to `end` (exclusive) as stage number `stage` of a pipeline."""

    def __init__(self, profile: Profile, pipeline: Pipeline) -> None:
        self.layers = profile.layers
        self.stages = len(pipeline.placement)
        self.profile = profile
        self._pipeline = pipeline
        # Prefix sums over the layers, so that the time of a slice needs no sum.
        self._compute_s = [0.0, *accumulate(layer.forward_s + layer.backward_s for layer in self.layers)]
        self._step_s = [0.0, *accumulate(layer.step_s for layer in self.layers)]

    def batch_s(self, stage: int, start: int, end: int) -> float:
        """Return the seconds of a batch."""
        compute_s = self._compute_s[end] - self._compute_s[start] + self._messages_s(stage, start, end)
        return self._pipeline.microbatches * compute_s + self._step_s[end] - self._step_s[start]

    def stage_time(self, stage: int, start: int, end: int) -> StageTime:
        held = self.layers[start:end]
        return StageTime(
            forward_s=sum(layer.forward_s for layer in held),
            backward_s=sum(layer.backward_s for layer in held),
            messages_s=self._messages_s(stage, start, end),
            step_s=sum(layer.step_s for layer in held),
            batch_s=self.batch_s(stage, start, end),
            held_bytes=self.held_bytes(stage, start, end),
        )

    def held_bytes(self, stage: int, start: int, end: int) -> int:
        """Return the memory of a stage in bytes: weights, activations, messages and working memory.

        Weights: a gradient, all versions, and the optimizer's state. Activations: the input and the saved
        tensors of every open microbatch. Messages: `buffer_size` on each edge. Working memory: the largest
        peak of a layer, which counts some activations twice.
        """
        held, pipeline = self.layers[start:end], self._pipeline
        weights = sum(
            layer.param_bytes * (pipeline.versions[stage] + 1) + layer.state_bytes + layer.fixed_bytes
            for layer in held
        )
        entry = self.layers[start - 1].output_bytes if start else self.profile.input_bytes
        saved = entry + sum(layer.saved_bytes for layer in held)
        crossing = sum(sum(self._messages(cut)) for cut in self._crossed(stage, start, end))
        work = max(layer.peak_bytes for layer in held)
        return weights + pipeline.activations[stage] * saved + pipeline.buffer_size * crossing + work

    def stage_times(self, cuts: Sequence[int]) -> list[StageTime]:
        ends = pairwise([0, *cuts, len(self.layers)])
        return [self.stage_time(stage, start, end) for stage, (start, end) in enumerate(ends)]

    def slowest_s(self, cuts: Sequence[int]) -> float:
        return max(stage.batch_s for stage in self.stage_times(cuts))

    def costs(self, cuts: Sequence[int]) -> Costs:
        """Return the costs for `simulate`, in seconds; each half of a split backward costs half of it."""
        seconds: dict[tuple[int, Op], float] = {}
        for stage, taken in enumerate(self.stage_times(cuts)):
            seconds[stage, Op.F] = taken.forward_s
            seconds[stage, Op.B] = taken.backward_s
            seconds[stage, Op.I] = seconds[stage, Op.W] = taken.backward_s / 2
            seconds[stage, Op.STEP] = taken.step_s
            seconds[stage, Op.NORM] = self.profile.latency_s  # a message of one number
        for stage, cut in enumerate(cuts):
            forward, back = self._messages(cut)
            seconds[stage, Op.SEND_F] = self._travel_s(forward)
            seconds[stage + 1, Op.SEND_B] = self._travel_s(back)
        return Costs(seconds)

    def _crossed(self, stage: int, start: int, end: int) -> list[int]:
        """Return the cuts at a stage's ends that are between two ranks."""
        ranks, neighbours = self._pipeline.placement, ((stage - 1, start), (stage + 1, end))
        return [cut for other, cut in neighbours if 0 <= other < self.stages and ranks[other] != ranks[stage]]

    def _messages(self, cut: int) -> tuple[int, int]:
        if self._pipeline.wire_bytes is not None:
            return self._pipeline.wire_bytes[cut - 1]
        before = self.layers[cut - 1]
        return before.output_bytes, before.gradient_bytes

    def _messages_s(self, stage: int, start: int, end: int) -> float:
        crossed = self._crossed(stage, start, end)
        return sum(self._travel_s(nbytes) for cut in crossed for nbytes in self._messages(cut))

    def _travel_s(self, nbytes: int) -> float:
        return self.profile.latency_s + nbytes * self.profile.s_per_byte
