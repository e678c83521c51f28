"""Makes a plan: costs, cut, programs, verification; each is made once, and every rank makes the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from pipetrain.config.settings import AUTO, PROFILE, Mode, Settings, modes_of
from pipetrain.errors import ConfigError
from pipetrain.model.chain import network_of
from pipetrain.model.network import Network
from pipetrain.model.numerics import Numerics
from pipetrain.model.specs import Size, TensorSpec, ValueSpec
from pipetrain.plan.cost_estimate import Layer, estimates, with_gradients
from pipetrain.plan.costs import Profile, Table, by_work, refuse_other_layers
from pipetrain.plan.cut import Shapes, cut_layers, cuts_that_may_be, refuse_cuts, shared_weights
from pipetrain.plan.layer_shapes import LayerShapes
from pipetrain.plan.memory_fit import refuse_above
from pipetrain.plan.partition import Choice, choose_cuts, cut_by_times
from pipetrain.plan.plan import Plan, Samples, cast_spec, given_to_task
from pipetrain.plan.replica_partition import Way, choose_replicas, longest_part
from pipetrain.plan.text import describe
from pipetrain.plan.verification import Draft, refuse_ties, verify
from pipetrain.schedule.actions import splits
from pipetrain.schedule.simulate import Deadlock
from pipetrain.tasks import Task


@dataclass(frozen=True, slots=True)
class Estimated:
    """A model with its estimates, before it is cut. `network`: None for layers alone."""

    network: Network | None
    trained: Mapping[Size, list[Layer]]  # for each size of a microbatch
    evaluated: Mapping[Size, list[Layer]]
    layers: list[Layer]  # of a full microbatch
    example: ValueSpec
    samples: Samples | None
    evaluations: int  # microbatches of one evaluation
    numerics: Numerics
    outputs: ValueSpec  # that the task is given

    def with_used(self, used: Sequence[bool]) -> Estimated:
        """Return what is estimated where the loss uses these outputs, and no others."""
        trained = {size: with_gradients(layers, used) for size, layers in self.trained.items()}
        full = next(size for size, layers in self.trained.items() if layers is self.layers)
        return replace(self, trained=trained, layers=trained[full])


def estimate_model(
    settings: Settings,
    model: nn.Module | Network | list[Layer],
    example: ValueSpec,
    samples: Samples | None,
) -> Estimated:
    """Estimate a model, which is changed and must not be trained afterwards, or take its layers.

    `example`: of the input; `samples`: None if only the first batch is known, which has the settings' size.
    """
    example = cast_spec("inputs", example, settings.data_dtype)
    expected = samples or Samples.like(settings)
    cutting = model if isinstance(model, list) else network_of(model, example, settings.precision == "bf16")
    sizes = expected.microbatches(settings.microbatches), expected.evaluation
    numerics, trained, evaluated = estimates(settings, cutting, example, *sizes)
    layers, network = trained[settings.full], None if isinstance(cutting, list) else cutting
    outputs = given_to_task(layers[-1].output, numerics, settings.dtype)
    evaluations = len(expected.evaluation)
    return Estimated(network, trained, evaluated, layers, example, samples, evaluations, numerics, outputs)


def make_plan(
    draft: Draft,
    estimated: Estimated,
    profile: Profile | None = None,
    state_of: Callable[[str, TensorSpec], float] = lambda name, spec: 0,
    task: Task | None = None,
) -> Plan:
    """Cut the model, and make and check every program. Raises ConfigError and ScheduleError.

    `profile`: the times; without them partition=profile gives a draft: cut by flops, without memory_limit;
    `state_of`: the bytes of the optimizer's state for a parameter; `task`: whose targets are counted. A rank
    that is predicted to hold more than memory_limit= is refused; the measured cuts of partition=profile keep
    the limit.
    """
    if draft.settings.partition == PROFILE and profile is None:
        draft = replace(draft, settings=replace(draft.settings, partition="flops", memory_limit=None))
    settings, samples = draft.settings, estimated.samples
    table = _table(settings, estimated, profile, state_of, task)
    uncut, ways = _Uncut(estimated, table, profile is not None), dict[str, Way | None]()
    if settings.replicas == AUTO:
        may_be = cuts_that_may_be(estimated.network, estimated.layers)
        draft, ways = choose_replicas(draft, table, may_be, uncut.way)
    lengths = samples.windows(settings.window) if samples else [draft.shown]
    planned = uncut.made.get(str(draft.settings.replicas)) if lengths == [draft.shown] else None
    plan = replace(planned or uncut.plan(draft, lengths), ways=ways)
    if settings.memory_limit is not None and settings.partition != PROFILE:
        refuse_above(settings.memory_limit, plan.memory())
    return plan


@dataclass(frozen=True, slots=True)
class _Uncut:
    """A model that is to be cut, see `make_plan`."""

    model: Estimated
    table: Table
    timed: bool  # by a profile
    made: dict[str, Plan] = field(default_factory=dict)  # the plans of tried replicas, by these

    def plan(self, draft: Draft, lengths: Sequence[int]) -> Plan:
        """Cut the model for a draft, and verify windows of these lengths. Raises as `make_plan` does."""
        model, table, open_ = self.model, self.table, self.model.samples is None
        cuts, modes, choices = _cuts(draft, lengths, model.network, table)
        shared = shared_weights(model.network, cuts) if model.network else {}
        shapes: list[Shapes | None] = [None, None]  # in training and in evaluation
        if model.network:
            by_mode = ((True, model.trained), (False, model.evaluated))
            how = model.example, model.numerics
            shapes = [LayerShapes(model.network, next(iter(of.values())), *how, mode) for mode, of in by_mode]
        cut = cut_layers(model.trained, cuts, model.example, shared, open_, shapes[0])
        refuse_ties(draft, cut)
        stage_costs = table.costs(cut, modes, splits(draft.program), draft.settings.timed, draft.placement)
        rest = model.evaluations, stage_costs, modes, open_
        try:
            bounded, windows, evaluations = verify(draft, cut, lengths, *rest)
        except ConfigError as error:
            if not (open_ and isinstance(error.__cause__, Deadlock) and draft.shown > draft.least):
                raise
            bounded, windows, evaluations = verify(draft, cut, [draft.least], *rest)  # a shorter one may do
        return Plan(
            draft=draft,
            samples=model.samples,
            numerics=model.numerics,
            example=model.example,
            table=table,
            cut=bounded,
            evaluation_cut=cut_layers(model.evaluated, cuts, model.example, any_size=open_, shapes=shapes[1]),
            windows=windows,
            evaluations=evaluations,
            modes=modes,
            costs=stage_costs if self.timed else None,
            choices=choices,
            text=describe,
        )

    def way(self, draft: Draft) -> Way:
        """Return the cost of a draft in a typical window."""
        plan = self.made[str(draft.settings.replicas)] = self.plan(draft, [draft.shown])
        run, replicas = plan.timeline(), [*map(len, draft.settings.places)]
        batch_s = run.makespan / max(plan.windows)
        return Way(replicas, plan.cuts, batch_s, longest_part(run, plan.stage_costs))


def _table(
    settings: Settings,
    model: Estimated,
    profile: Profile | None,
    state_of: Callable[[str, TensorSpec], float],
    task: Task | None,
) -> Table:
    """Return the costs of the layers, from a profile or else by their work. Raises ConfigError."""
    layers, dtype = model.layers, settings.data_dtype
    outputs = layers[-1].output
    # As a cross-entropy saves:
    loss = sum(spec.numel * (dtype or spec.dtype).itemsize for spec in outputs.specs) if model.network else 0
    classes = task and task.classes_of(outputs)
    if profile is not None:
        refuse_other_layers(profile, layers)
    return Table(
        layers,
        model.example.of(settings.full),
        profile or by_work(layers, settings.ranks),
        codecs=settings.codecs,
        state_of=state_of,
        loss=loss,
        targets=8 * outputs.specs[0].numel // classes if classes else loss,  # labels, or numbers as outputs
        averaged=settings.ema is not None,
        correction=settings.correction,
        on_gpu=settings.on_gpu,
    )


def _cuts(
    draft: Draft, lengths: Sequence[int], network: Network | None, table: Table
) -> tuple[list[int], list[Mode], dict[str, Choice]]:
    """Choose the first layers of stages 1, 2, ..., and each stage's recompute mode. Raises ConfigError."""
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
    if settings.cuda_graphs is True and (drawing := [layer.name for layer in layers if layer.draws]):
        raise ConfigError(
            f"layer {drawing[0]} draws random numbers, which cuda_graphs would repeat: leave cuda_graphs "
            f"out, or set its dropout to 0"
        )
