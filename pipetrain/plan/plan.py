"""The plan of a run: everything that is determined before it starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from statistics import fmean

import torch
from torch import Tensor

from pipetrain.codec import Identity
from pipetrain.config.settings import UNLIKE_GRAPHS, Mode, Settings
from pipetrain.errors import ConfigError
from pipetrain.model.numerics import Numerics
from pipetrain.model.specs import Size, Value, ValueSpec, cast_floats
from pipetrain.plan.cost_estimate import Layer
from pipetrain.plan.costs import Table
from pipetrain.plan.cut import Cut
from pipetrain.plan.partition import Choice
from pipetrain.plan.replica_partition import Way
from pipetrain.plan.verification import Draft, VerifiedWindows, Window
from pipetrain.plan.window_lengths import WindowLengths
from pipetrain.schedule.actions import Edge, Op, Placement, Tie, asks_for
from pipetrain.schedule.early_stop_points import StopPoints, stop_points_of
from pipetrain.schedule.lower import Link, links
from pipetrain.schedule.memory import Memory, over_time
from pipetrain.schedule.simulate import simulate
from pipetrain.schedule.timeline import Bounds, Costs, StageTimes, Timeline
from pipetrain.tasks import Task
from pipetrain.tasks.trial import try_task


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything determined before a run starts. Stages are numbered over all ranks, including virtual ones.

    `samples`: None if only the first batch is known: others may have any size, and windows any length.
    """

    draft: Draft
    samples: Samples | None
    numerics: Numerics
    example: ValueSpec  # of the input
    table: Table  # the costs of the layers for a full microbatch
    cut: Cut
    evaluation_cut: Cut
    windows: VerifiedWindows  # of training, by the number of batches
    evaluations: VerifiedWindows
    modes: Sequence[Mode]  # of recomputation, of each stage
    text: Callable[[Plan], str] = field(compare=False, repr=False)  # how it prints
    costs: Costs | None = None  # from a profile
    choices: Mapping[str, Choice] = field(default_factory=dict)  # the cuts of each strategy, by a profile
    ways: Mapping[str, Way | None] = field(default_factory=dict)  # with replicas=auto, see `choose_replicas`

    _timelines: dict[int, Timeline] = field(default_factory=dict, init=False, compare=False, repr=False)
    _stop_points: dict[int, list[StopPoints]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def __str__(self) -> str:
        return self.text(self)

    @property
    def settings(self) -> Settings:
        return self.draft.settings

    @property
    def placement(self) -> Placement:
        return self.draft.placement

    @property
    def firsts(self) -> list[int]:
        """The first rank of each stage, which sends and receives for it."""
        return [first for first, *_ in self.placement]

    @property
    def links(self) -> list[Link]:
        return links(self.cut.bounds, self.placement)

    @property
    def ties(self) -> list[Tie]:
        """The stages whose ranks sum something: those of a shared weight, or one with replicas."""
        return [*self.cut.ties, *((stage,) for stage, ranks in enumerate(self.placement) if len(ranks) > 1)]

    @property
    def layers(self) -> Sequence[Layer]:
        return self.table.layers

    def not_captured(self, stage: int) -> str:
        """Return why the passes of a stage are not to be captured as CUDA graphs, or nothing."""
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
        return self.costs or self.table.costs(
            self.cut, self.modes, False, self.settings.timed, self.placement
        )

    @property
    def recompute(self) -> list[Mode]:
        """The recompute mode of each stage: NEVER if all its backwards directly follow their forwards."""
        programs = (window.program for window in self.windows.values())
        recomputed = {a.stage for program in programs for actions in program for a in actions if a.op is Op.R}
        return [mode if stage in recomputed else Mode.NEVER for stage, mode in enumerate(self.modes)]

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def cuts(self) -> list[int]:
        return [slice.start for slice in self.cut.slices[1:]]

    @property
    def pipeline(self) -> dict[str, list[int]]:
        """The cuts, the first ranks and the numbers of the recompute modes, for a checkpoint.

        With replicas also `ranks`: those of all stages, one after the other.
        """
        recompute = [[*Mode].index(mode) for mode in self.modes]
        pipeline = {"cuts": self.cuts, "placement": self.firsts, "recompute": recompute}
        return pipeline | ({"ranks": [*chain.from_iterable(self.placement)]} if self.replicated else {})

    @property
    def replicated(self) -> bool:
        return any(len(ranks) > 1 for ranks in self.placement)

    @property
    def silent(self) -> set[Edge | int]:
        """The edges whose messages are empty, and the stages that train no weight."""
        empty = {edge for edge in self.cut.bounds if not self.cut.tensors(edge)}
        return empty | {
            n for n in range(self.stages) if not any(layer.weights for layer in self.stage_layers(n))
        }

    @property
    def window(self) -> Window:
        return self.windows[max(self.windows)]

    def training(self, batches: int) -> Window:
        """Return a window of training. Raises ScheduleError and ConfigError for an impossible one."""
        return self.windows.verified(batches)

    def evaluation(self, batches: int) -> Window:
        return self.evaluations.verified(batches)

    @property
    def foreign(self) -> dict[str, Tensor]:
        """The tensors that layers use and that are no weights or buffers, by layer name and number."""
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
        slices = (slice for slice, on in zip(self.cut.slices, self.placement, strict=True) if rank in on)
        return [number for slice in slices for number in range(slice.start, slice.end)]

    def memory(self) -> Memory:
        """Return what the stages hold after each action of the `timeline`."""
        coded = not isinstance(self.settings.codecs.forward, Identity)
        copied = [n for n, slice in enumerate(self.cut.slices) if coded or slice.copies_output]
        sizes = self.table.stage_sizes(self.cut, self.modes)
        return over_time(self.timeline(), sizes, self.settings.buffer_sizes, copied)

    def graph_bytes(self, stage: int) -> int:
        """Return the most bytes that the CUDA graphs of a stage hold beyond passes without them."""
        sizes, most = self.table.stage_sizes(self.cut, self.modes)[stage], self.peaks(stage)
        # Each slot holds what a pass saves and its outputs' gradients, and with several versions the outputs.
        slot = max(sizes.saved, sizes.after_i) + sizes.arrived * (1 + (most.versions > 1))
        return most.activations * slot + sizes.returned

    def peaks(self, stage: int) -> Bounds:
        """Return the peaks of activations, weight versions and staleness of a stage over all windows."""
        most = (window.bounds[stage] for window in self.windows.values())
        return Bounds(*map(max, *most, Bounds(0, 0, 0)))

    def timeline(self, batches: int | None = None) -> Timeline:
        """Return a window of so many batches, or else the longest one, simulated at its stages' costs."""
        n, window = batches or max(self.windows), self.training(batches) if batches else self.window
        if n not in self._timelines:
            run = partial(simulate, window.program, self.settings.microbatches, cost=self.stage_costs)
            self._timelines[n] = run(buffer_size=self.cut.bounds, routes=self.cut.edges, ties=self.cut.ties)
        return self._timelines[n]

    def stop_points(self, batches: int) -> list[StopPoints]:
        """Return where ranks check whether a window of training ends early: see `stop_points_of`."""
        if batches not in self._stop_points:
            window = self.training(batches)
            assert window.posts is not None, "there are replicas only where the order is fixed"
            self._stop_points[batches] = stop_points_of(window.simulation, window.posts, self.silent)
        return self._stop_points[batches]

    def stage_times(self) -> list[StageTimes]:
        """Return the predicted times of each stage, by the `timeline`; for replicas the means."""
        run = self.timeline()
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
    """The sizes of each batch of an epoch, and of each microbatch of an evaluation."""

    batches: Sequence[Size]
    evaluation: Sequence[Size]

    @classmethod
    def of(cls, batches: Iterable[int], evaluation: Iterable[int]) -> Samples:
        """Return those of so many samples each, which all are as the example is."""
        return cls([*map(Size, batches)], [*map(Size, evaluation)])

    @classmethod
    def like(cls, settings: Settings) -> Samples:
        """Return the samples of a full microbatch and of a larger one, which give the specs of any other."""
        two = settings.full.neighbours
        return cls([Size.joined([size] * settings.microbatches) for size in two], two)

    def microbatches(self, pieces_of_each: int) -> set[Size]:
        """Return the sizes of microbatches, for so many per batch."""
        return {size for batch in set(self.batches) for size in batch.pieces(pieces_of_each)}

    def windows(self, window: int | None) -> list[int]:
        """Return all lengths of windows, the longest first."""
        return sorted(set(WindowLengths(window).lengths(len(self.batches))), reverse=True)


# What is done with a plan before it runs


def given_to_task(outputs: ValueSpec, numerics: Numerics, dtype: torch.dtype) -> ValueSpec:
    """Return the specs of the last layer's outputs as the task gets them."""
    if not numerics.autocast:
        return outputs
    specs = (replace(s, dtype=dtype) if s.dtype.is_floating_point else s for s in outputs.specs)
    return replace(outputs, specs=tuple(specs))


def check_targets(
    plan: Plan, task: Task, targets: Value, classes: int | None = None, after_forward: bool = False
) -> None:
    """Refuse targets [n, ...] that would be rounded, and a task that cannot use them. Raises ConfigError.

    `classes`: of the data set, None if unknown; `after_forward`: see `try_task`.
    """
    dtype = plan.settings.data_dtype
    cast_spec("targets", ValueSpec.in_batch(targets), dtype)
    targets, m, last = cast_floats(targets, dtype), plan.settings.microbatches, plan.layers[-1]
    given = given_to_task(last.output, plan.numerics, plan.settings.dtype)
    try_task(task, given, last.name, targets, classes, m, after_forward)


def cast_spec(what: str, example: ValueSpec, dtype: torch.dtype | None) -> ValueSpec:
    """Return a spec in a dtype, None: unchanged. Raises ConfigError if that would round. `what`: its name."""
    try:
        return example.cast(dtype)
    except ValueError as error:
        raise ConfigError(
            f"the {what} are {example} a sample, and with dtype={str(dtype).removeprefix('torch.')} {error}: "
            f"let the data set give others, or set dtype=float64"
        ) from error
