"""A run on paper: the cut model, every program that will run, and the proof of each.

Made before a process group exists, by every rank from the same configuration. Nothing runs that is not in
here: programs are lowered, checked and simulated at the buffer size that the channel will enforce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pipetrain.boundary import Boundary, TensorSpec, named_layers
from pipetrain.config import Settings
from pipetrain.data.loader import pieces
from pipetrain.errors import ConfigError
from pipetrain.numerics import Numerics
from pipetrain.partition.balance import GIB, STRATEGIES, balance_times, choose_cuts
from pipetrain.partition.estimate import Layer, estimate
from pipetrain.partition.profile import PROFILE, Profile, refuse_other_layers
from pipetrain.partition.stages import Pipeline, Prediction, Predictor
from pipetrain.places import places
from pipetrain.runtime.order import Decided, Listed, Order
from pipetrain.schedule.actions import Program, Schedule, ScheduleError, placement
from pipetrain.schedule.check import check
from pipetrain.schedule.lower import edges, lower
from pipetrain.schedule.policy import Bounds, Policy, compute_program
from pipetrain.schedule.programs import forward_only
from pipetrain.schedule.simulate import simulate
from pipetrain.schedule.timeline import Costs, Timeline

Edges = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Window:
    """The program of a window of so many batches, lowered, and what it was proved to do."""

    program: Program
    simulation: Timeline
    bounds: list[Bounds]  # by stage: what it may hold


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is known of a run before it starts. Stages count over all ranks, virtual ones too."""

    settings: Settings
    numerics: Numerics
    layers: list[Layer]  # as estimated for a full microbatch
    cuts: list[int]
    placement: list[int]  # the rank of each stage
    windows: Mapping[int, Window]  # by the number of batches
    evaluation: Program
    boundaries: Mapping[int, list[Boundary]]  # what enters each stage, by samples of a microbatch
    evaluated: Mapping[int, list[Boundary]]  # likewise in an evaluation
    costs: Costs | None = None  # what each action takes, where a profile says so
    prediction: Prediction | None = None  # likewise
    policy: Policy | None = None  # decides the order as it runs; the windows' programs are then examples

    @property
    def stages(self) -> int:
        """How many slices the model is cut into."""
        return len(self.placement)

    @property
    def pipeline(self) -> dict[str, object]:
        """How the model is cut and placed."""
        return {"cuts": list(self.cuts), "placement": list(self.placement)}

    @property
    def edges(self) -> Edges:
        """The pairs of stages that send to each other, in one fixed order."""
        return edges(self.window.program)

    @property
    def window(self) -> Window:
        """The longest window."""
        return self.windows[max(self.windows)]

    def slice(self, stage: int) -> slice:
        """Return which layers a stage holds."""
        ends = [0, *self.cuts, len(self.layers)]
        return slice(ends[stage], ends[stage + 1])

    def copies_input(self, stage: int) -> bool:
        """Whether a stage's layers work in place on what enters it."""
        return _writes_input(self.layers[self.slice(stage)])

    def copies_output(self, stage: int) -> bool:
        """Whether what leaves a stage may change before it is sent."""
        return _keeps_output(self.layers[self.slice(stage)])

    def wire_bytes(self, stage: int, size: int) -> tuple[int, int]:
        """Return the bytes on the wire over the cut before a stage, forward and back, of `size` samples."""
        return _wire_bytes(self.settings, self.boundaries[size][stage])

    def peaks(self, stage: int) -> tuple[int, int, int]:
        """Return the peaks of activations, weight versions and staleness that any window has at a stage."""
        return _peaks(self.windows, stage)

    def order(self, batches: int, rank: int) -> Order:
        """Return what a rank does in a window of so many batches, for one run of it."""
        if self.policy is None:
            return Listed(self.windows[batches].program[rank], batches, self.settings.microbatches)
        return Decided(self.policy, rank, self.stages, batches, self.settings.microbatches)


@dataclass(frozen=True, slots=True)
class Samples:
    """How many samples there are: of each batch of an epoch, and of each microbatch of an evaluation."""

    batches: list[int]
    evaluation: list[int]
    resumed: int = 0  # batches that are already done of the first epoch


def make_plan(
    settings: Settings,
    schedule: Schedule,
    model: nn.Sequential,
    example: Sequence[int],
    classes: int,
    samples: Samples,
    profile: Profile | None = None,
) -> Plan:
    """Cut the model, make every program and prove it.

    `model` is spoilt and must not train. `example` is the shape of one sample, `classes` how many the last
    layer must tell apart, `profile` what partition=profile cuts by. Raises ConfigError and ScheduleError in
    one sentence for what cannot work.
    """
    m = settings.microbatches
    epoch = len(samples.batches)
    lengths = {n for done in (0, samples.resumed) for n in window_lengths(epoch, settings.window, done)}
    windows = {n: prove(settings, schedule, n) for n in sorted(lengths, reverse=True)}
    where = placement(next(iter(windows.values())).program)

    training_sizes = {size for batch in set(samples.batches) for size in pieces(batch, m)}
    full = settings.batch_size // m
    estimates = _Estimates(model, example)
    numerics = _choose_numerics(settings, estimates)
    layers = estimates(numerics, training_sizes | {full}, train=True)
    costs = prediction = None
    if settings.partition == PROFILE:
        assert profile is not None, "partition=profile cuts by a profile"
        pipeline = _pipeline(settings, where, windows, layers[full])
        cuts, costs, prediction = _cut_by_times(settings, model, layers[full], profile, pipeline)
    else:
        cuts = choose_cuts(settings.partition, layers[full], len(where))
    _refuse_cuts(model, layers[full], cuts)
    _refuse_output(layers[full], full, classes)
    evaluated = estimates(numerics, set(samples.evaluation), train=False)
    _refuse_changing([*layers.values(), *evaluated.values()], cuts)
    program = lower(forward_only(where, len(samples.evaluation)))
    simulate(program, 1, buffer_size=settings.buffer_size)
    return Plan(
        settings=settings,
        numerics=numerics,
        layers=layers[full],
        cuts=cuts,
        placement=where,
        windows=windows,
        evaluation=program,
        boundaries=_entries(numerics, example, layers, cuts),
        evaluated=_entries(numerics, example, evaluated, cuts),
        costs=costs,
        prediction=prediction,
        policy=schedule if isinstance(schedule, Policy) else None,
    )


def _peaks(windows: Mapping[int, Window], stage: int) -> tuple[int, int, int]:
    bounds = [window.bounds[stage] for window in windows.values()]
    return (
        max(of.activations for of in bounds),
        max(of.versions for of in bounds),
        max(of.staleness for of in bounds),
    )


def _pipeline(
    settings: Settings, where: list[int], windows: Mapping[int, Window], layers: Sequence[Layer]
) -> Pipeline:
    activations, versions, _ = zip(*(_peaks(windows, stage) for stage in range(len(where))), strict=True)
    wire_bytes = None
    if not settings.codecs.plain:
        wire_bytes = [_wire_bytes(settings, layer.output) for layer in layers]
    return Pipeline(settings.microbatches, settings.buffer_size, where, activations, versions, wire_bytes)


def _wire_bytes(settings: Settings, boundary: Boundary) -> tuple[int, int]:
    codecs = settings.codecs
    return codecs.wire_bytes(boundary.specs, True), codecs.wire_bytes(boundary.gradients, False)


def _cut_by_times(
    settings: Settings, model: nn.Sequential, layers: list[Layer], profile: Profile, pipeline: Pipeline
) -> tuple[list[int], Costs, Prediction]:
    """Cut by what was measured, and hold it against what the other strategies would have chosen."""
    refuse_other_layers(profile, layers)
    predictor = Predictor(profile, pipeline)
    choices = {name: choose_cuts(name, layers, predictor.stages) for name in STRATEGIES}
    allowed = [cut for cut in range(1, len(layers)) if _can_cut(model, layers, cut)]
    limit = None if settings.memory_limit is None else settings.memory_limit * GIB
    cuts = balance_times(predictor, allowed, limit)
    slowest = {
        name: (other, predictor.slowest_s(other)) for name, other in ({PROFILE: cuts} | choices).items()
    }
    prediction = Prediction(profile, predictor.stage_times(cuts), slowest)
    return cuts, predictor.costs(cuts), prediction


def _can_cut(model: nn.Sequential, layers: Sequence[Layer], cut: int) -> bool:
    try:
        _refuse_cuts(model, layers, [cut])
    except ConfigError:
        return False
    return True


def window_lengths(batches: int, window: int | None, done: int = 0) -> list[int]:
    """Return the lengths of the windows that an epoch still has after so many batches.

    They end where those of the whole epoch end, also when one of these was left early.
    """
    size = window or batches
    ends = [done, *range(done - done % size + size, batches, size), batches]
    return [end - start for start, end in pairwise(ends) if end > start]


def prove(settings: Settings, schedule: Schedule, batches: int) -> Window:
    """Make the program of one window, and prove it sound and free of deadlock. Raises ScheduleError.

    Of a policy, the program that it decides on at even times; what it is bound to is its own word.
    """
    try:
        size = settings.ranks, batches, settings.microbatches
        compute = compute_program(schedule, *size, buffer_size=settings.buffer_size)
    except ScheduleError:
        raise
    except (
        Exception
    ) as error:  # a wrong argument in its YAML or on the command line, or a function's own fault
        raise ConfigError(
            f"schedule {settings.schedule} cannot be made: {type(error).__name__}: {error}"
        ) from error
    placement(compute)  # one rank a stage: the engine has no replicas yet
    program = lower(compute)
    check(program, batches, settings.microbatches)
    run = simulate(program, settings.microbatches, buffer_size=settings.buffer_size)
    if isinstance(schedule, Policy):
        stages = len(program)
        bounds = [schedule.bounds(stage, stages, batches, settings.microbatches) for stage in range(stages)]
    else:
        bounds = [*map(Bounds, run.activations, run.versions, run.staleness)]
    return Window(program, run, bounds)


class _Estimates:
    """The layers of a model as estimated for each size of a microbatch, each once."""

    def __init__(self, model: nn.Sequential, example: Sequence[int]) -> None:
        self._model, self._example = model, example
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[tuple[Numerics, int, bool], list[Layer]] = {}

    def __call__(self, numerics: Numerics, sizes: Iterable[int], train: bool) -> dict[int, list[Layer]]:
        """Return the layers by size. Raises ConfigError."""
        self._model.train(train)
        try:
            return {size: self._of(numerics, size, train) for size in sorted(sizes)}
        finally:
            self._model.train()

    def _of(self, numerics: Numerics, size: int, train: bool) -> list[Layer]:
        key = numerics, size, train
        if key not in self._known:
            entry = _input(numerics, self._example, size)
            self._known[key] = estimate(self._model, entry, self._mode, numerics)
        return self._known[key]


def _choose_numerics(settings: Settings, estimates: _Estimates) -> Numerics:
    numerics = Numerics(
        settings.dtype, settings.precision == "bf16", settings.memory_format == "channels_last"
    )
    if settings.memory_format != "auto" or settings.dtype != torch.float32:
        return numerics
    inner = replace(numerics, channels_last=True)
    try:
        for train in (True, False):
            estimates(inner, {settings.batch_size // settings.microbatches}, train)
    except ConfigError:  # such as a view that wants the channels outermost
        return numerics
    return inner


def _input(numerics: Numerics, example: Sequence[int], size: int) -> TensorSpec:
    return TensorSpec((size, *example), numerics.dtype)


def _entries(
    numerics: Numerics, example: Sequence[int], layers: Mapping[int, list[Layer]], cuts: Sequence[int]
) -> dict[int, list[Boundary]]:
    return {
        size: [
            Boundary((_input(numerics, example, size),), needs_grad=(False,), requires_grad=(False,)),
            *(estimated[cut - 1].output for cut in cuts),
        ]
        for size, estimated in layers.items()
    }


def _writes_input(layers: Sequence[Layer]) -> bool:
    """Whether layers work in place on what enters them."""
    return _reached(layers, lambda layer: layer.writes_input)


def _keeps_output(layers: Sequence[Layer]) -> bool:
    """Whether layers keep what leaves them."""
    return _reached(reversed(layers), lambda layer: layer.keeps_output)


def _reached(layers: Iterable[Layer], wanted: Callable[[Layer], bool]) -> bool:
    """Whether there is a layer that is `wanted`, maybe behind some that only hand through."""
    for layer in layers:
        if wanted(layer):
            return True
        if not layer.hands_through:
            return False
    return False


def _refuse_cuts(model: nn.Sequential, layers: Sequence[Layer], cuts: Sequence[int]) -> None:
    """Refuse a cut over which layers would not do as they do in one process. Raises ConfigError."""
    for cut in cuts:
        output, where = layers[cut - 1].output, f"layer {cut - 1} ({layers[cut - 1].name})"
        elsewhere = f"choose a partition that does not cut before layer {cut}"
        if any(spec.dtype.is_complex for spec in output.specs):
            raise ConfigError(
                f"{where} returns {output}, and complex tensors cannot cross a cut; {elsewhere}"
            )
        if _writes_input(layers[cut:]) and _keeps_output(layers[:cut]):
            raise ConfigError(f"what {where} returns and keeps is written into behind it; {elsewhere}")
    _refuse_sharing(model, layers, cuts)


def _refuse_changing(sizes: Sequence[Sequence[Layer]], cuts: Sequence[int]) -> None:
    """Refuse a cut over which other things go for another microbatch size, or in an evaluation."""
    for cut in cuts:
        outputs = [layers[cut - 1].output for layers in sizes]
        kinds = {output.single for output in outputs}
        needs = {output.needs_grad for output in outputs if output.needs_grad is not None}
        if len(kinds) > 1 or len(needs) > 1:
            what = "gradients are needed there" if len(kinds) == 1 else "it is one tensor or a tuple"
            raise ConfigError(
                f"whether {what} behind layer {cut - 1} ({sizes[0][cut - 1].name}) changes with the size of "
                f"a microbatch, or in evaluation; choose a partition that does not cut before layer {cut}"
            )


def _refuse_sharing(model: nn.Sequential, layers: Sequence[Layer], cuts: Sequence[int]) -> None:
    """Refuse a parameter or a buffer that two stages use: each would have a copy of its own."""
    registered = {_address(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
    user: dict[str, int] = {}
    for index, (name, layer) in enumerate(named_layers(model)):
        stage = sum(cut <= index for cut in cuts)
        used = [(place.name, registered.get(_address(place.tensor), "")) for place in places(layer)]
        used += [(tensor, tensor) for tensor in layers[index].borrows]
        for said, tensor in used:
            if tensor and user.setdefault(tensor, stage) != stage:
                raise ConfigError(
                    f"layer {index} ({name}) of stage {stage} shares its {said} with stage {user[tensor]}; "
                    f"choose a partition that keeps both layers in one stage"
                )


def _address(tensor: Tensor) -> tuple[str, int]:
    """Return what tells a tensor's memory from others'."""
    if tensor.layout is not torch.strided or not tensor.data_ptr():
        return "object", id(tensor)
    return "memory", tensor.data_ptr()


def _refuse_output(layers: Sequence[Layer], size: int, classes: int) -> None:
    output = layers[-1].output
    shape = output.specs[0].shape
    if not output.single or len(shape) != 2 or shape[0] != size or shape[1] < classes:
        raise ConfigError(
            f"the last layer ({layers[-1].name}) returns {output} for {size} samples; it must return one "
            f"tensor [{size}, at least {classes}]: a score for each class"
        )
