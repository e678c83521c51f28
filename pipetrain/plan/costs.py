"""The table of costs: what each layer takes and leaves behind, and so what any slice of layers does.

The times are measured (a profile), or by the work that is estimated. A stage's time is that of its layers,
its optimizer step, and every message to or from another rank, in full at both ends, because the processor
that copies a message does not compute meanwhile. PipeDream's partitioner (Narayanan et al., "PipeDream",
2019, section 3.1), which this follows otherwise, treats the messages over a cut as a stage that overlaps with
all others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import torch

from pipetrain.codec import Codecs
from pipetrain.network.network import INPUT, Made
from pipetrain.network.values import TensorSpec, ValueSpec
from pipetrain.plan.cut import Cut, copies_input, entering
from pipetrain.plan.estimate import Layer, origin
from pipetrain.plan.observed import Kept
from pipetrain.plan.profile import SECONDS, LayerTime, Profile
from pipetrain.schedule.actions import Op
from pipetrain.schedule.memory import Items
from pipetrain.schedule.timeline import Costs, Kind
from pipetrain.settings import Mode


@dataclass(frozen=True)
class Table:
    """The costs of a model's layers for one microbatch.

    `inputs`: of the model; `times`: of each layer; a message takes `latency_s` and `s_per_byte`; `state_of`:
    the bytes of the optimizer's state of a parameter; `loss`, `targets`: the bytes that the loss saves, and
    those of the targets; `averaged`: a moving average of the weights is kept.
    """

    layers: Sequence[Layer]
    inputs: ValueSpec
    times: Sequence[LayerTime] = ()
    latency_s: float = 0.0
    s_per_byte: float = 0.0
    codecs: Codecs = field(default_factory=Codecs)
    state_of: Callable[[TensorSpec], float] = lambda spec: 0
    loss: int = 0
    targets: int = 0
    averaged: bool = False
    _entering: dict[tuple[int, int], dict[Made, bool]] = field(default_factory=dict, init=False)

    def measured(self, profile: Profile) -> Table:
        """Return the table with the times of a profile."""
        return replace(
            self,
            times=profile.layers,
            latency_s=profile.latency_s,
            s_per_byte=profile.s_per_byte,
            state_of=lambda spec: profile.state_ratio * spec.nbytes,
        )

    # Times

    @cached_property
    def _until(self) -> dict[str, list[float]]:
        """The sums of each time over the layers before each one."""
        return {name: [0.0, *accumulate(getattr(layer, name) for layer in self.times)] for name in SECONDS}

    def seconds(self, start: int, end: int, split: bool, mode: Mode) -> dict[Op, float]:
        """Return the times of the actions of layers `start` to `end`; `split`: the schedule splits backwards.

        Where nothing that enters needs a gradient, W is all of the backward.
        """

        def of(name: str) -> float:
            return self._until[name][end] - self._until[name][start]

        forward = again = of("forward_s")
        hands_back = any(self.entering(start, end).values())
        recorded = of("recorded_s") if split and hands_back else forward
        if mode is Mode.SELECTIVE:
            forward, again = of("kept_s"), of("again_s") + recorded - forward
        else:
            forward, again = (recorded if mode is Mode.NEVER else forward), recorded
        halves = (of("input_s"), of("weight_s")) if hands_back else (0.0, of("backward_s"))
        return {
            Op.F: forward,
            Op.R: again,
            Op.B: of("backward_s"),
            Op.I: halves[0],
            Op.W: halves[1],
            Op.STEP: of("step_s"),
        }

    def message_s(self, nbytes: float) -> float:
        """Return the time of a message."""
        return self.latency_s + nbytes * self.s_per_byte

    def costs(self, cut: Cut, modes: Sequence[Mode], split: bool, size: int) -> Costs:
        """Return the costs of a cut model for `simulate`; `size`: of a microbatch, in samples.

        An F that has no R, of a stage that recomputes others, is priced as these.
        """
        costs: dict[Kind, float] = {}
        for stage, (slice, mode) in enumerate(zip(cut.slices, modes, strict=True)):
            seconds = self.seconds(slice.start, slice.end, split, mode)
            costs |= {(stage, op): taken for op, taken in seconds.items()}
            costs[stage, Op.NORM] = self.latency_s  # a message of one number
        for route in cut.routes:
            there, back = (cut.message(edge, size) for edge in (route.edge, route.way_back))
            costs[route.source, Op.SEND_F, route.target] = self.message_s(self.codecs.wire_bytes(there, True))
            costs[route.target, Op.SEND_B, route.source] = self.message_s(self.codecs.wire_bytes(back, False))
        for name, stages in cut.shared.items():
            for stage in stages:
                nbytes = self.layers_of(cut, stage)[name].nbytes
                costs[stage, Op.TIE] = costs.get((stage, Op.TIE), self.latency_s) + nbytes * self.s_per_byte
        return Costs(costs)

    def layers_of(self, cut: Cut, stage: int) -> Mapping[str, TensorSpec]:
        """Return the trained parameters of a stage, by name."""
        return trained(self.layers[cut.slices[stage].start : cut.slices[stage].end])

    # Values that cross cuts

    def entering(self, start: int, end: int) -> dict[Made, bool]:
        """Return what layers `start` to `end` take from before them, and whether they return its gradient."""
        if (start, end) not in self._entering:
            self._entering[start, end] = entering(self.layers, start, end) if start else {}
        return self._entering[start, end]

    def leaving(self, start: int, end: int) -> dict[Made, bool]:
        """Return what layers behind take of layers `start` to `end`, and whether they return its gradient."""
        behind = self.entering(end, len(self.layers)) if end < len(self.layers) else {}
        return {value: needs for value, needs in behind.items() if max(value.layer, 0) >= start}

    def wire_bytes(self, values: Mapping[Made, bool]) -> tuple[int, int]:
        """Return the bytes on the wire of values, there, and of the gradients that come back."""
        there = self.codecs.wire_bytes([self.spec(value) for value in values], True)
        returned = [self.spec(value) for value, needs in values.items() if needs]
        return there, self.codecs.wire_bytes(returned, False)

    def spec(self, value: Made) -> TensorSpec:
        output = self.inputs if value.layer == INPUT else self.layers[value.layer].output
        return output.specs[value.number]

    # Bytes

    def sizes(self, start: int, end: int, mode: Mode, near: Collection[Made] = ()) -> Items:
        """Return the bytes of one of each item that a stage of layers `start` to `end` may hold.

        `near`: the values that it exchanges with stages of its own rank alone: no copies of them are sent.
        """
        layers, last = self.layers[start:end], end == len(self.layers)
        enters, leaves = self.entering(start, end), self.leaving(start, end)
        taken = enters if start else {Made(INPUT, n): False for n in range(len(self.inputs.specs))}
        held = {origin(self.layers, value): self.spec(value).nbytes for value in (*leaves, *taken)}
        inputs = sum(self.spec(value).nbytes for value in taken)
        saved = together((layer.saved for layer in layers), held)
        saved += inputs * copies_input(self.layers, taken, start, end)
        saved += (self.loss + self.targets) * last
        sent = [{v: needs for v, needs in of.items() if v not in near} for of in (enters, leaves)]
        after_i = together(layer.for_w for layer in layers) + self.targets * last
        if not any(self.requires_grad(value) for value in enters):  # W is then the whole backward
            after_i = saved + sum(self.spec(value).nbytes for value, needs in leaves.items() if needs)
        buffers = {name: spec for layer in layers for name, spec in layer.buffers.items()}
        frozen = {name: spec for layer in layers for name, spec in layer.frozen.items()}
        fixed = sum(spec.nbytes for spec in (buffers | frozen).values())
        before_r = inputs + sum(spec.nbytes for spec in buffers.values()) + self.targets * last
        if mode is Mode.SELECTIVE:
            before_r += together(layer.products for layer in layers)
        parameters = trained(layers)
        others = trained([*self.layers[:start], *self.layers[end:]])
        weights = sum(spec.nbytes for spec in parameters.values())
        return Items(
            saved=saved,
            before_r=before_r,
            after_i=after_i,
            weights=weights * (1 + self.averaged) + fixed,
            versions=weights,
            gradients=weights,
            optimizer=round(sum(map(self.state_of, parameters.values()))),
            inputs=self.wire_bytes(enters)[0],
            grads=self.wire_bytes(leaves)[1],
            arrived=sum(self.spec(value).nbytes for value, needs in leaves.items() if needs),
            outputs=self.wire_bytes(sent[1])[0],
            returned=self.wire_bytes(sent[0])[1],
            tied=sum(spec.nbytes for name, spec in parameters.items() if name in others),
        )

    def requires_grad(self, value: Made) -> bool:
        known = None if value.layer == INPUT else self.layers[value.layer].requires_grad
        return value.layer != INPUT and (known is None or known[value.number])


def trained(layers: Iterable[Layer]) -> dict[str, TensorSpec]:
    """Return the trained parameters of some layers, each once, by name."""
    return {name: spec for layer in layers for name, spec in layer.weights.items()}


def together(kept: Iterable[Kept], values: Mapping[Made, int] | None = None) -> int:
    """Return the bytes of what several layers keep, with those of some `values`; each value counts once."""
    sizes, inside = dict(values or {}), 0
    for one in kept:
        inside += one.inside
        for value, nbytes in one.values.items():
            sizes[value] = max(nbytes, sizes.get(value, 0))
    return inside + sum(sizes.values())


def loss_bytes(outputs: ValueSpec, dtype: torch.dtype | None) -> int:
    """Return what a loss saves of the outputs, which it gets as `dtype`: as much as a cross-entropy does."""
    return sum(spec.numel * (dtype or spec.dtype).itemsize for spec in outputs.specs)


def by_work(layers: Sequence[Layer], ranks: int) -> list[LayerTime]:
    """Return the times of layers by their work, in forwards of the mean rank.

    So the unit is the same for all schedules, however many stages they have on a rank.
    """
    mean = sum(layer.flops for layer in layers) / ranks

    def times(layer: Layer) -> LayerTime:
        forward, weight = layer.flops / mean, layer.weight_flops / mean
        forwards = dict.fromkeys(("forward_s", "recorded_s", "kept_s", "again_s"), forward)
        halves = {"input_s": 2 * forward - weight, "weight_s": weight, "backward_s": 2 * forward}
        return LayerTime(layer.name, layer.output.nbytes, **forwards, **halves, step_s=0.0)

    return list(map(times, layers))
