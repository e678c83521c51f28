"""The table of costs: the time and memory of each layer, and so of any slice of layers.

The times are measured (a profile) or estimated by work. A stage's time is that of its layers, its optimizer
step, the sum of its gradient over its replicas, and every message to or from another rank, in full at both
ends, because the processor that copies a message does not compute meanwhile. Otherwise this follows
PipeDream's partitioner (Narayanan et al., "PipeDream", 2019, section 3.1), which treats the messages over a
cut as a stage that overlaps with all others.

A profile's file records its conditions. Those that affect the measurement must match the run that reads it;
the machine is recorded for information only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any

from pipetrain.codec import Codecs
from pipetrain.config.settings import Mode, Settings
from pipetrain.correction import Correction
from pipetrain.errors import ConfigError
from pipetrain.model.network import INPUT, ValueId
from pipetrain.model.specs import Size, TensorSpec, ValueSpec, name_of
from pipetrain.plan.cost_estimate import Layer, origin
from pipetrain.plan.cut import Cut, copies_input, entering, requires_grad
from pipetrain.plan.operation_costs import Kept
from pipetrain.schedule.actions import Op, Placement
from pipetrain.schedule.memory import Items
from pipetrain.schedule.timeline import Costs, Kind
from pipetrain.typed_json import read_as

VERSION = 5
ANEW = "make one with partition=profile"
SMALL_GRADIENT = 2**22  # bytes: a GPU takes longer to add a larger one than the host to launch that
Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LayerTime:
    """The times of one layer for one microbatch: measured, in seconds, or estimated, in units of work."""

    name: str
    output_bytes: int
    forward_s: float
    recorded_s: float  # a forward for a split backward
    kept_s: float  # a forward that keeps the results of expensive operations, and
    again_s: float  # the recompute that uses them, see runtime/stage/recompute.py
    backward_s: float  # for the gradients of inputs and parameters
    input_s: float  # the half for the inputs, with all that is not deferred; 0 if no input needs a gradient
    weight_s: float  # the other half
    step_s: float  # the optimizer's step, once a batch; a shared parameter counts at its first layer


SECONDS = tuple(field.name for field in fields(LayerTime) if field.name.endswith("_s"))
NO_TIME = LayerTime("", 0, **dict.fromkeys(SECONDS, 0.0))


@dataclass(frozen=True, slots=True)
class Profile:
    """The times of a whole model and of messages: measured on all ranks at once, or estimated."""

    conditions: Facts  # must match the run's; none if not measured
    machine: Facts
    latency_s: float  # per message; 0 if not measured
    s_per_byte: float
    layers: list[LayerTime]
    stage: LayerTime = NO_TIME  # what a stage takes in addition to its layers

    @property
    def alone(self) -> float:
        """The part of its time that a rank takes while all others wait: below 1 if they slow each other."""
        return float(self.machine.get("alone", 1.0))

    def to_json(self) -> dict[str, Any]:
        return {"pipetrain_profile": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, data: Any) -> Profile:
        """Read what `to_json` returned; version 4 had no times of a stage. Raises ValueError."""
        values = dict(data) if isinstance(data, dict) else {}
        if (version := values.pop("pipetrain_profile", None)) not in (4, VERSION):
            raise ValueError(f"it is no profile of version {VERSION}")
        values |= {"stage": asdict(NO_TIME)} if version == 4 else {}
        return read_as(cls, values, "its content")  # type: ignore[no-any-return]


def profile_conditions(settings: Settings, optim: Mapping[Any, Any]) -> Facts:
    """Return the conditions that a profile and the run that reads it must share; `optim`: the optimizer's."""
    no_work = ("_target_", "_partial_", "lr")  # options that do not affect the optimizer's time
    options = (f" {key}={value}" for key, value in optim.items() if key not in no_work)
    return {
        "model": settings.model,
        "microbatch": settings.full.samples,
        **({"lengths": [*settings.lengths]} if settings.lengths else {}),
        "dtype": name_of(settings.dtype),
        "precision": settings.precision,
        "memory_format": settings.memory_format,
        "optimizer": str(optim["_target_"]).rsplit(".", 1)[-1] + "".join(options),
    }


def read_profile(path: str, conditions: Facts) -> Profile:
    """Read a profile measured under `conditions`. Raises ConfigError."""
    try:
        profile = Profile.from_json(json.loads(Path(path).expanduser().read_text()))
    except (OSError, ValueError) as error:  # not readable, not JSON, not text, or not a profile
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"partition.profile={path} cannot be read: {why}; {ANEW}") from error
    for key in sorted(conditions.keys() | profile.conditions.keys()):
        profiled, actual = profile.conditions.get(key), conditions.get(key)
        if profiled != actual:
            raise ConfigError(
                f"partition.profile={path} was taken with {key}={profiled}, and this run has {key}={actual}; "
                f"{ANEW}"
            )
    return profile


def refuse_other_layers(profile: Profile, layers: Sequence[Layer]) -> None:
    """Refuse a profile whose layers have other names or outputs than the model's. Raises ConfigError."""
    profiled = [(layer.name, layer.output_bytes) for layer in profile.layers]
    actual = [(layer.name, layer.output.nbytes) for layer in layers]
    for index, (there, here) in enumerate(zip_longest(profiled, actual)):
        if there != here:
            raise ConfigError(
                f"the profile is of another model: its layer {index} (name, bytes of the output) is {there}, "
                f"and the model's is {here}; {ANEW}"
            )


@dataclass(frozen=True)
class Table:
    """The costs of a model's layers for one microbatch.

    `inputs`: of the model; `state_of`: the bytes of the optimizer's state for a parameter; `loss`, `targets`:
    the bytes that the loss saves, and of the targets; `averaged`: a moving average of the weights is held;
    `correction`: of late gradients; `on_gpu`: whether the model is on a GPU.
    """

    layers: Sequence[Layer]
    inputs: ValueSpec
    times: Profile
    codecs: Codecs = field(default_factory=Codecs)
    state_of: Callable[[str, TensorSpec], float] = lambda name, spec: 0
    loss: int = 0
    targets: int = 0
    averaged: bool = False
    correction: Correction = field(default_factory=Correction)
    on_gpu: bool = False
    _entering: dict[tuple[int, int], dict[ValueId, bool]] = field(default_factory=dict, init=False)
    _sizes: dict[tuple[int, int, Mode], Items] = field(default_factory=dict, init=False)

    # Times

    @cached_property
    def _until(self) -> dict[str, list[float]]:
        """The sums of each time over the layers before each layer."""
        return {
            name: [0.0, *accumulate(getattr(layer, name) for layer in self.times.layers)] for name in SECONDS
        }

    def seconds(self, start: int, end: int, split: bool, mode: Mode) -> dict[Op, float]:
        """Return the times of the actions of layers `start` to `end`; `split`: backwards are split.

        If no value that enters needs a gradient, W is the whole backward.
        """
        times = {
            name: getattr(self.times.stage, name) + until[end] - until[start]
            for name, until in self._until.items()
        }
        hands_back = any(self.entering(start, end).values())
        recorded = times["recorded_s" if split and hands_back else "forward_s"]
        forward, again = (recorded if mode is Mode.NEVER else times["forward_s"]), recorded
        if mode is Mode.SELECTIVE:
            forward, again = times["kept_s"], times["again_s"] + recorded - times["forward_s"]
        return {
            Op.F: forward,
            Op.R: again,
            Op.B: times["backward_s"],
            Op.I: times["input_s"] if hands_back else 0.0,
            Op.W: times["weight_s" if hands_back else "backward_s"],
            Op.STEP: times["step_s"],
        }

    def message_s(self, nbytes: float) -> float:
        return self.times.latency_s + nbytes * self.times.s_per_byte

    def reduce_s(self, nbytes: float, replicas: int) -> float:
        """Return the time in which replicas sum a gradient of so many bytes."""
        steps = 2 * (replicas - 1)
        return steps * self.times.latency_s + ring_bytes(replicas) * nbytes * self.times.s_per_byte

    def costs(self, cut: Cut, modes: Sequence[Mode], split: bool, size: Size, placement: Placement) -> Costs:
        """Return the costs of a cut model with this placement for `simulate`; `size`: of a microbatch.

        In a stage that recomputes, an F without R costs as much as one with R.
        """
        costs: dict[Kind, float] = {}
        for stage, (slice, mode) in enumerate(zip(cut.slices, modes, strict=True)):
            seconds = self.seconds(slice.start, slice.end, split, mode)
            costs |= {(stage, op): time for op, time in seconds.items()}
            weights = _named(self.layers[slice.start : slice.end], "weights")
            costs[stage, Op.REDUCE] = self.reduce_s(_nbytes(weights), len(placement[stage]))
            costs[stage, Op.NORM] = self.times.latency_s  # a message of one number
            if shared := [weights[name].nbytes for name, stages in cut.shared.items() if stage in stages]:
                costs[stage, Op.TIE] = self.message_s(sum(shared))
        for route in cut.routes:
            there, back = (cut.message(edge, size) for edge in (route.edge, route.way_back))
            costs[route.source, Op.SEND_F, route.target] = self.message_s(self.codecs.wire_bytes(there, True))
            costs[route.target, Op.SEND_B, route.source] = self.message_s(self.codecs.wire_bytes(back, False))
        return Costs(costs)

    def stage_sizes(self, cut: Cut, modes: Sequence[Mode]) -> list[Items]:
        """Return, by stage, the bytes of one of each item that a stage of a cut model may hold."""
        sizes = []
        for stage, (slice, mode) in enumerate(zip(cut.slices, modes, strict=True)):
            span, routes = (slice.start, slice.end), [r for r in cut.routes if stage in r.edge and r.bounds]
            sent = {value for route in routes for value in route.values}  # others stay on the rank, uncopied
            enters, leaves = (
                {value: needs for value, needs in values.items() if value in sent}
                for values in (self.entering(*span), self.leaving(*span))
            )
            copies = {"outputs": self.wire_bytes(leaves)[0], "returned": self.wire_bytes(enters)[1]}
            sizes.append(self.sizes(*span, mode)._replace(**copies))
        return sizes

    # Values that cross cuts

    def entering(self, start: int, end: int) -> dict[ValueId, bool]:
        """Return the values that layers `start` to `end` use from before, and which get a gradient."""
        if (start, end) not in self._entering:
            self._entering[start, end] = entering(self.layers, start, end) if start else {}
        return self._entering[start, end]

    def leaving(self, start: int, end: int) -> dict[ValueId, bool]:
        """Return what later layers use of layers `start` to `end`, and whether they return gradients."""
        behind = self.entering(end, len(self.layers)) if end < len(self.layers) else {}
        return {value: needs for value, needs in behind.items() if max(value.layer, 0) >= start}

    def wire_bytes(self, values: Mapping[ValueId, bool]) -> tuple[int, int]:
        """Return the bytes on the wire of values, and of the gradients that come back."""
        there = self.codecs.wire_bytes([self.spec(value) for value in values], True)
        returned = [self.spec(value) for value, needs in values.items() if needs]
        return there, self.codecs.wire_bytes(returned, False)

    def spec(self, value: ValueId) -> TensorSpec:
        output = self.inputs if value.layer == INPUT else self.layers[value.layer].output
        return output.specs[value.number]

    # Bytes

    def sizes(self, start: int, end: int, mode: Mode) -> Items:
        """Return the bytes of one of each item that a stage of layers `start` to `end` may hold."""
        if (start, end, mode) not in self._sizes:  # the stage's number does not matter
            self._sizes[start, end, mode] = self._sizes_of(start, end, mode)
        return self._sizes[start, end, mode]

    def _sizes_of(self, start: int, end: int, mode: Mode) -> Items:
        layers, last = self.layers[start:end], end == len(self.layers)
        enters, leaves = self.entering(start, end), self.leaving(start, end)
        used = enters if start else {ValueId(INPUT, n): False for n in range(len(self.inputs.specs))}
        inputs, targets = sum(self.spec(value).nbytes for value in used), self.targets * last
        arrived = sum(self.spec(value).nbytes for value, needs in leaves.items() if needs)
        ends = {origin(self.layers, value): self.spec(value).nbytes for value in (*leaves, *used)}
        saved = together((layer.saved for layer in layers), ends) + self.loss * last + targets
        saved += inputs * copies_input(self.layers, used, start, end)
        after_i = together(layer.for_w for layer in layers) + targets
        if not any(requires_grad(self.layers, value) for value in enters):  # W is then the whole backward
            after_i = saved + arrived
        weights, buffers, frozen = (_named(layers, kind) for kind in ("weights", "buffers", "frozen"))
        products = together(layer.products for layer in layers) if mode is Mode.SELECTIVE else 0
        elsewhere = _named([*self.layers[:start], *self.layers[end:]], "weights")
        return Items(
            saved=saved,
            before_r=inputs + _nbytes(buffers) + targets + products,
            after_i=after_i,
            weights=_nbytes(weights) * (1 + self.averaged) + _nbytes(buffers | frozen),
            versions=_nbytes(weights),
            gradients=_nbytes(weights),
            optimizer=round(sum(self.state_of(*weight) for weight in weights.items()))
            + self.correction.copies * _nbytes(weights),
            inputs=self.wire_bytes(enters)[0],
            grads=self.wire_bytes(leaves)[1],
            arrived=arrived,
            outputs=self.wire_bytes(leaves)[0],
            returned=self.wire_bytes(enters)[1],
            tied=_nbytes({name: spec for name, spec in weights.items() if name in elsewhere}),
            adding=sum(n for spec in weights.values() if (n := spec.nbytes) <= SMALL_GRADIENT) * self.on_gpu,
            reduced=_nbytes(weights),
            apart=_nbytes(weights) * self.correction.weighs,
        )


def ring_bytes(replicas: int) -> float:
    """Return the bytes that each replica sends and receives to sum a gradient, as a multiple of its bytes.

    In a ring each replica passes on 1 / replicas of it, 2 (replicas - 1) times. Both directions count,
    whereas a message counts in its one direction at either end.
    """
    return 4 * (replicas - 1) / replicas


def _named(layers: Iterable[Layer], kind: str) -> dict[str, TensorSpec]:
    """Return the weights, frozen parameters or buffers of layers, each once, by name."""
    return {name: spec for layer in layers for name, spec in getattr(layer, kind).items()}


def _nbytes(tensors: Mapping[str, TensorSpec]) -> int:
    return sum(spec.nbytes for spec in tensors.values())


def together(parts: Iterable[Kept], values: Mapping[ValueId, int] | None = None) -> int:
    """Return the bytes that layers save, plus those of `values`; each value counts once."""
    sizes, inside = dict(values or {}), 0
    for saved in parts:
        inside += saved.inside
        for value, nbytes in saved.values.items():
            sizes[value] = max(nbytes, sizes.get(value, 0))
    return inside + sum(sizes.values())


def by_work(layers: Sequence[Layer], ranks: int) -> Profile:
    """Return the times of layers by their work, in forwards of the mean rank.

    So the unit is the same for all schedules, however many stages a rank has.
    """
    mean = sum(layer.flops for layer in layers) / ranks

    def times(layer: Layer) -> LayerTime:
        forward, weight = layer.flops / mean, layer.weight_flops / mean
        forwards = dict.fromkeys(("forward_s", "recorded_s", "kept_s", "again_s"), forward)
        halves = {"input_s": 2 * forward - weight, "weight_s": weight, "backward_s": 2 * forward}
        return LayerTime(layer.name, layer.output.nbytes, **forwards, **halves, step_s=0.0)

    return Profile({}, {}, 0.0, 0.0, list(map(times, layers)))
