"""The plan of a run: costs, cut, programs, proof; each is made once, and every rank makes the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import fmean

import torch
from torch import Tensor, nn

from pipetrain.codec import Identity
from pipetrain.errors import ConfigError
from pipetrain.network.chain import network_of
from pipetrain.network.network import Network
from pipetrain.network.numerics import Numerics
from pipetrain.network.values import Size, TensorSpec, Value, ValueSpec, cast_floats
from pipetrain.plan.balance import Choice, choose_cuts, cut_by_times, prove_layers
from pipetrain.plan.costs import Profile, Table, by_work, refuse_other_layers
from pipetrain.plan.cut import (
    Cut,
    cut_layers,
    cuts_that_may_be,
    refuse_cuts,
    shared_weights,
)
from pipetrain.plan.estimate import Layer, estimates
from pipetrain.plan.memory import refuse_above
from pipetrain.plan.program import (
    Draft,
    ProvenWindows,
    Window,
    modes_of,
    prove,
    recomputing,
    refuse_ties,
    window_lengths,
)
from pipetrain.plan.replicas import Way, choose_replicas, longest_part
from pipetrain.schedule.actions import Op, Placement, Tie, asks_for, splits
from pipetrain.schedule.lower import Link, links
from pipetrain.schedule.memory import Memory, over_time
from pipetrain.schedule.policy import Bounds
from pipetrain.schedule.simulate import Deadlock, simulate
from pipetrain.schedule.timeline import Costs, StageTimes, Timeline
from pipetrain.settings import AUTO, PROFILE, UNLIKE_GRAPHS, Mode, Settings
from pipetrain.tasks import Task
from pipetrain.tasks.trial import prove_task

Measure = Callable[[list[Layer], ValueSpec, Numerics], Profile]
"""Measures a model's layers, as they were estimated for an input as each sample has it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything known of a run before it starts. Stages are numbered over all ranks, virtual ones too.

    `samples`: None where only the first batch is known: others may have any size, and the windows any length.
    """

    draft: Draft
    samples: Samples | None
    numerics: Numerics
    example: ValueSpec  # of the input
    table: Table  # the costs of the layers for a full microbatch
    cut: Cut
    evaluation_cut: Cut
    windows: ProvenWindows  # by the number of batches
    modes: Sequence[Mode]  # of recomputation, of each stage
    costs: Costs | None = None  # from a profile
    choices: Mapping[str, Choice] = field(default_factory=dict)  # the cuts of each strategy, by a profile
    ways: Mapping[str, Way | None] = field(default_factory=dict)  # with replicas=auto, see `choose_replicas`
    text: Callable[[Plan], str] = field(default=repr, compare=False, repr=False)  # how it prints

    def __str__(self) -> str:
        return self.text(self)

    @property
    def settings(self) -> Settings:
        return self.draft.settings

    @property
    def placement(self) -> Placement:
        """The ranks of each stage."""
        return self.draft.placement

    @property
    def firsts(self) -> list[int]:
        """The first rank of each stage, which speaks for it."""
        return [first for first, *_ in self.placement]

    @property
    def links(self) -> list[Link]:
        """The links that windows and evaluations use."""
        return links(self.cut.bounds, self.placement)

    @property
    def ties(self) -> list[Tie]:
        """The stages whose ranks sum something up: those of shared weights, or one with replicas."""
        return [*self.cut.ties, *((stage,) for stage, ranks in enumerate(self.placement) if len(ranks) > 1)]

    @property
    def layers(self) -> Sequence[Layer]:
        return self.table.layers

    def not_captured(self, stage: int) -> str:
        """Say why the passes of a stage are not to be captured as CUDA graphs, or nothing."""
        settings, slice = self.settings, self.cut.slices[stage]
        for name in settings.unlike_graphs:
            return f"{name}={getattr(settings, name)} {UNLIKE_GRAPHS}"
        drawing = [layer.name for layer in self.layers[slice.start : slice.end] if layer.draws]
        return f"layer {drawing[0]} draws random numbers, which they would repeat" if drawing else ""

    @property
    def by_costs(self) -> bool:
        """Whether the order was made for the costs of the stages."""
        return "costs" in asks_for(self.draft.schedule)

    @property
    def stage_costs(self) -> Costs:
        """The costs of all stages: from a profile, or else by their estimated work."""
        return self.costs or self.table.costs(self.cut, self.modes, False, self.settings.full, self.placement)

    @property
    def recompute(self) -> list[Mode]:
        """What each stage recomputes: nothing if all its backwards directly follow their forwards."""
        programs = (window.program for window in self.windows.values())
        recomputed = {a.stage for program in programs for actions in program for a in actions if a.op is Op.R}
        return [mode if stage in recomputed else Mode.NEVER for stage, mode in enumerate(self.modes)]

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def cuts(self) -> list[int]:
        """The first layers of stages 1, 2, ..."""
        return [slice.start for slice in self.cut.slices[1:]]

    @property
    def pipeline(self) -> dict[str, list[int]]:
        """The cuts, the first ranks and the numbers of the modes of recomputation, for a checkpoint.

        With replicas also `ranks`, those of all stages in turn.
        """
        recompute = [[*Mode].index(mode) for mode in self.modes]
        pipeline = {"cuts": self.cuts, "placement": self.firsts, "recompute": recompute}
        return pipeline | ({"ranks": [*chain.from_iterable(self.placement)]} if self.replicated else {})

    @property
    def replicated(self) -> bool:
        """Whether a stage has replicas."""
        return any(len(ranks) > 1 for ranks in self.placement)

    @property
    def window(self) -> Window:
        return self.windows[max(self.windows)]

    @property
    def foreign(self) -> dict[str, Tensor]:
        """The tensors that layers use and that are no weights or buffers, by a layer's name and a number."""
        return {
            f"tensor {k} of layer {layer.name}": t
            for layer in self.layers
            for k, t in enumerate(layer.foreign)
        }

    @property
    def unit_of_time(self) -> str:
        ranks = self.settings.ranks
        part = f"1/{ranks} of the model" if ranks > 1 else "the model"
        return "s" if self.costs else f"forwards of {part}"

    def stage_layers(self, stage: int) -> Sequence[Layer]:
        slice = self.cut.slices[stage]
        return self.layers[slice.start : slice.end]

    def layers_on(self, rank: int) -> list[int]:
        """Return the numbers of the layers of a rank's stages, ascending."""
        mine = (slice for slice, on in zip(self.cut.slices, self.placement, strict=True) if rank in on)
        return [number for slice in mine for number in range(slice.start, slice.end)]

    def memory(self, run: Timeline) -> Memory:
        """Return what the stages hold after each action of a timeline."""
        coded = not isinstance(self.settings.codecs.forward, Identity)
        copied = [n for n, slice in enumerate(self.cut.slices) if coded or slice.copies_output]
        return over_time(run, self.table.stage_sizes(self.cut, self.modes), self.settings.buffer_size, copied)

    def peaks(self, stage: int) -> Bounds:
        """Return the peaks of activations, weight versions and staleness of a stage over all windows."""
        most = (window.bounds[stage] for window in self.windows.values())
        return Bounds(*map(max, *most, Bounds(0, 0, 0)))

    def timeline(self) -> Timeline:
        """Return the longest window, simulated at the costs of its stages."""
        return simulate(
            self.window.program,
            self.settings.microbatches,
            buffer_size=self.cut.bounds,
            cost=self.stage_costs,
            routes=self.cut.edges,
            ties=self.cut.ties,
        )

    def stage_times(self, run: Timeline) -> list[StageTimes]:
        """Return the predicted times of each stage, by its `timeline`; of replicas the means."""
        waited, bubbles = run.waits(repeated=self.settings.window is not None), run.bubble_per_rank
        return [
            StageTimes(
                bubble=fmean(bubbles[rank] for rank in ranks),
                stage_time_s=run.stages[stage].busy_s / max(self.windows) if self.costs else None,
                wait=fmean(waited[rank] for rank in ranks) / run.makespan,
            )
            for stage, ranks in enumerate(self.placement)
        ]


@dataclass(frozen=True, slots=True)
class Samples:
    """The numbers of samples: of each batch of an epoch, and of each microbatch of an evaluation."""

    batches: list[int]
    evaluation: list[int]

    @classmethod
    def like(cls, settings: Settings) -> Samples:
        """Return two sizes, from which those of any other follow: that of a full microbatch and one more."""
        two = [settings.full.samples, settings.full.samples + 1]
        return cls([n * settings.microbatches for n in two], two)

    def microbatches(self, pieces_of_each: int) -> set[Size]:
        """Return the sizes of microbatches, of so many in each batch."""
        return {size for batch in set(self.batches) for size in Size(batch).pieces(pieces_of_each)}

    def windows(self, window: int | None) -> list[int]:
        """Return all lengths of windows, the longest first."""
        return sorted(set(window_lengths(len(self.batches), window)), reverse=True)


def make_plan(
    draft: Draft,
    model: nn.Module | Network | list[Layer],
    example: ValueSpec,
    samples: Samples | None,
    profile: Profile | Measure | None = None,
    state_of: Callable[[TensorSpec], float] = lambda spec: 0,
    task: Task | None = None,
) -> Plan:
    """Cut the model, and make and check every program. Raises ConfigError and ScheduleError.

    This changes `model`, which must not be trained afterwards; or there is none, but its layers. `example`:
    of the input; `samples`: None for a first batch of the settings' size, after which others may come;
    `profile`: its times, or what measures them, without which partition=profile is a draft: cut by flops,
    whatever the memory_limit; `state_of`: the bytes of the optimizer's state of a parameter; `task`: of which
    there are targets. A rank that is predicted to hold more than memory_limit= is refused; the cuts of
    partition=profile keep to it, by what was measured.
    """
    if draft.settings.partition == PROFILE and profile is None:
        replicas = None if draft.settings.replicas == AUTO else draft.settings.replicas
        by_flops = replace(draft.settings, partition="flops", memory_limit=None, replicas=replicas)
        draft = replace(draft, settings=by_flops)
    settings = draft.settings
    example = _cast("inputs", example, settings.data_dtype)
    known = samples or Samples.like(settings)
    cutting = model if isinstance(model, list) else network_of(model, example, settings.precision == "bf16")
    network = None if isinstance(cutting, list) else cutting
    sizes = known.microbatches(settings.microbatches), [*map(Size, known.evaluation)]
    numerics, trained, evaluated = estimates(settings, cutting, example, *sizes)
    layers = trained[settings.full]
    if callable(profile):
        stages = 1 if settings.replicas == AUTO else len(draft.placement)
        prove_layers(stages, [layer.name for layer in layers])
        profile = profile(layers, example, numerics)
    table = _table(settings, layers, example, network is not None, profile, state_of, task)
    counts = samples, len(known.evaluation)
    uncut = _Uncut(network, trained, evaluated, example, *counts, numerics, table, profile is not None)
    ways: dict[str, Way | None] = {}
    if settings.replicas == AUTO:
        draft, ways = choose_replicas(draft, table, cuts_that_may_be(network, layers), uncut.way)
    lengths = samples.windows(settings.window) if samples else [draft.shown]
    plan = replace(uncut.plan(draft, lengths), ways=ways)
    if settings.memory_limit is not None and settings.partition != PROFILE:
        refuse_above(settings.memory_limit, plan.memory(plan.timeline()))
    return plan


@dataclass(frozen=True, slots=True)
class _Uncut:
    """What is known of a model before it is cut, see `make_plan`. `network`: None for layers without one."""

    network: Network | None
    trained: Mapping[Size, list[Layer]]  # for each size of a microbatch
    evaluated: Mapping[Size, list[Layer]]
    example: ValueSpec
    samples: Samples | None
    evaluations: int  # the microbatches of one
    numerics: Numerics
    table: Table
    timed: bool  # by a profile

    def plan(self, draft: Draft, lengths: Sequence[int]) -> Plan:
        """Cut the model for a draft, and prove windows of these lengths. Raises as `make_plan` does."""
        table, open_ = self.table, self.samples is None
        cuts, modes, choices = _cuts(draft, lengths, self.network, table)
        shared = shared_weights(self.network, cuts) if self.network else {}
        cut = cut_layers(self.trained, cuts, self.example, shared, open_)
        refuse_ties(draft, cut)
        stage_costs = table.costs(cut, modes, splits(draft.program), draft.settings.full, draft.placement)
        known = self.evaluations, stage_costs, recomputing(modes), open_
        try:
            bounded, windows = prove(draft, cut, lengths, *known)
        except ConfigError as error:
            if not (open_ and isinstance(error.__cause__, Deadlock) and draft.shown > draft.least):
                raise
            bounded, windows = prove(draft, cut, [draft.least], *known)  # a shorter window may do
        return Plan(
            draft=draft,
            samples=self.samples,
            numerics=self.numerics,
            example=self.example,
            table=table,
            cut=bounded,
            evaluation_cut=cut_layers(self.evaluated, cuts, self.example, any_size=open_),
            windows=windows,
            modes=modes,
            costs=stage_costs if self.timed else None,
            choices=choices,
        )

    def way(self, draft: Draft) -> Way:
        """Return what a draft takes in a window that is like others."""
        plan = self.plan(draft, [draft.shown])
        run, replicas = plan.timeline(), [*map(len, draft.settings.places)]
        batch_s = run.makespan / max(plan.windows)
        return Way(replicas, plan.cuts, batch_s, longest_part(run, plan.stage_costs))


def _table(
    settings: Settings,
    layers: Sequence[Layer],
    example: ValueSpec,
    has_loss: bool,
    profile: Profile | None,
    state_of: Callable[[TensorSpec], float],
    task: Task | None,
) -> Table:
    """Return the costs of the layers, by a profile or else by their work. Raises ConfigError."""
    dtype, outputs = settings.data_dtype, layers[-1].output
    # As a cross-entropy saves:
    loss = sum(spec.numel * (dtype or spec.dtype).itemsize for spec in outputs.specs) if has_loss else 0
    classes = task and task.classes_of(outputs)
    if profile is not None:
        refuse_other_layers(profile, layers)
    return Table(
        layers,
        example.of(settings.full),
        profile or by_work(layers, settings.ranks),
        codecs=settings.codecs,
        state_of=state_of,
        loss=loss,
        targets=8 * outputs.specs[0].numel // classes if classes else loss,  # labels, or numbers as outputs
        averaged=settings.ema is not None,
        on_gpu=settings.on_gpu,
    )


def _cuts(
    draft: Draft,
    lengths: Sequence[int],
    network: Network | None,
    table: Table,
) -> tuple[list[int], list[Mode], dict[str, Choice]]:
    """Choose the first layers of stages 1, 2, ..., and what each stage recomputes. Raises ConfigError."""
    settings, where, layers = draft.settings, draft.placement, table.layers
    choices: dict[str, Choice] = {}
    modes = modes_of(settings.recompute, len(where))
    if settings.partition == PROFILE:
        choices = cut_by_times(draft, max(lengths), table, cuts_that_may_be(network, layers))
        cuts, modes = choices[PROFILE].cuts, [stage.mode for stage in choices[PROFILE].stages]
    else:
        cuts = choose_cuts(settings.partition, layers, where)
    refuse_cuts(network, layers, cuts)
    _refuse_drawing(settings, layers)
    return cuts, modes, choices


def _refuse_drawing(settings: Settings, layers: Sequence[Layer]) -> None:
    """Refuse layers whose random numbers a CUDA graph would repeat. Raises ConfigError."""
    if settings.cuda_graphs is True and (drawing := [layer.name for layer in layers if layer.draws]):
        raise ConfigError(
            f"layer {drawing[0]} draws random numbers, which cuda_graphs would repeat: leave cuda_graphs "
            f"out, or set its dropout to 0"
        )


def _cast(what: str, example: ValueSpec, dtype: torch.dtype | None) -> ValueSpec:
    try:
        return example.cast(dtype)
    except ValueError as error:
        raise ConfigError(
            f"the {what} are {example} a sample, and with dtype={str(dtype).removeprefix('torch.')} {error}: "
            f"let the data set give others, or set dtype=float64"
        ) from error


# What is done with a plan before it runs


def outputs_of(plan: Plan) -> ValueSpec:
    """Return what a task gets of the model, for some number of samples."""
    outputs, dtype = plan.layers[-1].output, plan.settings.dtype
    if not plan.numerics.autocast:
        return outputs
    specs = (replace(s, dtype=dtype) if s.dtype.is_floating_point else s for s in outputs.specs)
    return replace(outputs, specs=tuple(specs))


def prove_targets(plan: Plan, task: Task, targets: Value, classes: int | None = None) -> None:
    """Refuse targets [n, ...] that would be rounded, and a task that cannot use them. Raises ConfigError.

    `classes`: of the data set, None if unknown.
    """
    dtype = plan.settings.data_dtype
    _cast("targets", ValueSpec.in_batch(targets), dtype)
    targets, m = cast_floats(targets, dtype), plan.settings.microbatches
    prove_task(task, outputs_of(plan), plan.layers[-1].name, targets, classes, m)
