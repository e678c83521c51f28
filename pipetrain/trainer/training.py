"""A model and the ranks that train it: agreed on at once, planned with the first batch, then run by windows.

Pipeline, fit and the command line all work on a Training.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from pipetrain.checkpoint.rank_state import restore
from pipetrain.checkpoint.resume import Source, open_weights, tensors_of
from pipetrain.config.parameter_groups import title
from pipetrain.config.settings import AUTO, PROFILE, Settings
from pipetrain.data.loader_facts import known_sizes
from pipetrain.data.reader import Form, Loader, NamedTargets, Reader
from pipetrain.data.sampling import Sampled
from pipetrain.errors import ConfigError, of_all
from pipetrain.model.chain import network_of
from pipetrain.model.factory import Initial
from pipetrain.model.network import Network, Values
from pipetrain.model.requirements import give_memory, refuse_without_numbers, tensor_attributes
from pipetrain.model.specs import Size, TensorSpec, ValueSpec, as_tuple, cast_floats
from pipetrain.model.tensor_access import named_tensors
from pipetrain.plan.cost_estimate import estimate_short
from pipetrain.plan.costs import Profile, profile_conditions, read_profile
from pipetrain.plan.make_plan import Measure, Uses, make_plan
from pipetrain.plan.memory_fit import optimizer_state
from pipetrain.plan.parity import compare_loss, compare_stages, parity
from pipetrain.plan.plan import Plan, Samples, check_targets
from pipetrain.plan.program import Draft
from pipetrain.records.progress_bar import Bar
from pipetrain.rules import PATH
from pipetrain.runtime.comm.collective_guard import (
    CollectiveGuard,
    broadcast_from_rank0,
    compare_ranks,
    conditions,
    digest,
)
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.runtime.comm.ranks import World
from pipetrain.runtime.device import choose_device
from pipetrain.runtime.engine import Tick
from pipetrain.runtime.feed import Batches
from pipetrain.runtime.loader_feed import LoaderBatches
from pipetrain.runtime.numbered_feed import NumberedBatches
from pipetrain.runtime.profile import measure, twin_of
from pipetrain.runtime.session import Session, make_stages
from pipetrain.runtime.stage.stage import Stage
from pipetrain.runtime.whole_model import WholeModel, owners
from pipetrain.schedule.lower import edges
from pipetrain.schedule.lower import links as links_of
from pipetrain.tasks import ModelLoss, Task
from pipetrain.tasks.running_sums import Tally, summed
from pipetrain.tasks.trial import choose_weight, spare, used_outputs
from pipetrain.trainer.arguments import Arguments
from pipetrain.trainer.windows import NO_BATCH
from pipetrain.typed_json import read_as

log = logging.getLogger("pipetrain")


class Training:
    """What the ranks have agreed to train; from the first batch on its `session` trains it.

    `record`: of the factory that made the model; `weights`: a file or folder to begin with; `seed`: of the
    program, None: as torch is seeded on rank 0. Raises ConfigError, ChannelError and Refused.
    """

    def __init__(
        self,
        model: nn.Module,
        record: Initial | None,
        task: Task,
        named: NamedTargets | None,
        request: Arguments,
        weights: str | Path | None,
        seed: int | None,
    ) -> None:
        self.model, self.task, self.request, self.settings = model, task, request, request.draft.settings
        self._named = named
        self.groups = _meet(World.current(), request.draft)
        self.bar = Bar()
        self.session: Session | None = None
        self._updates = 0  # where an error has ended the session
        self.source: Source | None = None  # what was loaded before the first batch
        self.guard = CollectiveGuard(self.groups, self._ended)
        with self.guard():
            initial = self._agree(record, weights)
            if seed is None:
                seed = self.groups.broadcast("the seed", torch.initial_seed() % 2**31)
                self.settings = replace(self.settings, seed=seed)
        self._form: Form | None = None
        self.stopping = False  # as agreed after the last window
        self.metrics: dict[str, float] = {}  # of the last pass that was trained
        self.closed = False
        self._apart = ""  # why microbatches would train otherwise than a batch
        self.conditions = tensors_of(model) | {"optimizer": title(request.made)}
        self.whole = WholeModel(model, self.groups, initial)

    @property
    def rank(self) -> int:
        return self.groups.world.rank

    @property
    def begun(self) -> Session:
        """The session. Raises ConfigError before the first batch, and after the end."""
        self.refuse_ended()
        if self.session is None:
            raise ConfigError("the plan is made with the first batch: give Pipeline sample=(inputs, targets)")
        return self.session

    @property
    def updates(self) -> int:
        if self.session is None:
            return self._updates or (self.source.manifest.position.update if self.source else 0)
        return self.session.updates

    def refuse_ended(self) -> None:
        """Refuse to go on after `close` (ConfigError), or an error of what all ranks do (TrainingStopped)."""
        if self.closed:
            raise ConfigError("this Pipeline has been closed: call close() last, or make another one")
        self.guard.refuse_ended()

    # The start

    def _agree(self, record: Initial | None, weights: str | Path | None) -> Values | None:
        """Compare what the ranks have, and give them the model of rank 0; return what its weights begin with.

        `record`: of the factory that made it. Raises Refused and ConfigError.
        """
        groups, model = self.groups, self.model
        drawn = {"how the model's factory makes its parameters": record.digest} if record else {}
        request, draft = self.request, self.request.draft
        given = conditions(draft.settings, request.made, draft.program, request.rate)
        compare_ranks(groups, "the settings", given | drawn)
        if draft.settings.replicas != AUTO:  # whose links are those of the plan
            groups.open(links_of(edges(draft.program), draft.placement))
        refuse_without_numbers(groups.broadcast("the model", [] if record else give_memory(model)))
        broadcast_from_rank0(groups, "the model", named_tensors(model) | tensor_attributes(model))
        return record if weights is None else open_weights(PATH.read("weights", weights), model)

    def begin(self, reader: Reader | Sampled | None, known: Samples | None = None) -> None:
        """Plan for the first batch of rank 0, prove the task on it, and make this rank's stages.

        `known`: the sizes of all batches, else others may come.
        """
        first = self.guard.on_first("the first batch", partial(_first, reader))
        if first is None:
            raise of_all(ConfigError(NO_BATCH), self.rank)
        (data, size, smallest), model, settings = first, self.model, self.settings
        form, size, m = Form.from_json(data), Size.from_json(size), settings.microbatches
        if known is None:
            settings = replace(settings, samples=max(m, size.samples // m * m))
        inputs = self._known(reader, form.inputs, min(size, settings.full))

        def planned() -> tuple[Network, Plan]:
            network = network_of(model, inputs, self.settings.precision == "bf16")
            network.values = self.whole.values
            if isinstance(self.task, ModelLoss):
                choose_weight(self.task, network, inputs)
            plan = self._plan(settings, network, inputs, known, partial(self._uses, reader))
            if smallest is not None and Size.from_json(smallest).pieces(m)[-1] == Size(1) < settings.full:
                estimate_short(network.spare(), plan.example.of(Size(1)), plan.numerics)
            return network, plan

        network, plan = self.guard.on_all("the plan", planned)
        if network.kept and not self.rank:
            log.warning(
                "pipetrain: the model's forward sets %s: a traced model does not run these statements in "
                "training, so what the program reads there stays as it is",
                ", ".join(network.kept),
            )
        prove = partial(_prove_task, plan, self.task, network, reader)
        self._apart = self.guard.on_first("the task", prove)
        self.settings, self._form = plan.settings, form
        with self.guard():
            self.groups.placement = plan.placement  # of which only a draft was known with replicas=auto
            self.groups.open(plan.links, plan.ties)
            owned = owners(network, plan)
            optimizer, rate = self.request.optimizer, self.request.rate
            stages = make_stages(plan, network, self.task, optimizer, rate, self.groups)
            self.session = Session(plan, stages, self.task, self.groups, self.whole)
        self.whole.attach_stages(network, self.session.stages.values(), owned)
        if self.source is not None:
            restore(self.source, self.session, self.groups)

    def _plan(
        self, settings: Settings, network: Network, inputs: ValueSpec, samples: Samples | None, uses: Uses
    ) -> Plan:
        """Return the plan for batches like the first one, the same on every rank.

        `settings`: with the batch's size; `samples`: the sizes of all batches, None: others may come.
        """
        request, groups, guard = self.request, self.groups, self.guard
        profile: Profile | Measure | None = None
        if settings.partition == PROFILE:
            known = profile_conditions(settings, request.optim)
            if settings.profile is not None:
                read = partial(read_profile, settings.profile, known)
                profile = Profile.from_json(guard.on_first("the profile", lambda: read().to_json()))
            else:
                measured = groups, settings, known, twin_of(network), request.optimizer
                profile = guard()(partial(measure, *measured))
        state_of, draft = optimizer_state(request.optimizer), replace(request.draft, settings=settings)
        plan = make_plan(draft, network.spare(), inputs, samples, profile, state_of, self.task, uses)
        with guard():
            kinds = [type(module).__name__ for module in network.modules]
            layers = {
                f"layer {one.name}": [kind, *one.weights, str(one.output), f"operations {one.operations:x}"]
                for kind, one in zip(kinds, plan.layers, strict=True)
            }
            compare_ranks(
                groups, "the plan", {**plan.pipeline, "program": digest(plan.window.program), **layers}
            )
            broadcast_from_rank0(groups, "the tensors of the layers", plan.foreign)
        return plan

    def _known(self, reader: Reader | Sampled | None, inputs: ValueSpec, size: Size) -> ValueSpec:
        """Return the inputs with the whole numbers of the first batch, on which sizes may depend."""
        known: dict[int, Tensor] = {}
        for number, spec in enumerate(inputs.of(size).specs):
            if not (spec.dtype.is_floating_point or spec.dtype.is_complex):
                known[number] = torch.zeros(spec.shape, dtype=spec.dtype)
                if first := reader and reader.first():
                    known[number].copy_(as_tuple(first[0])[number][: len(known[number])])
                with self.guard():
                    self.groups.copy_from_first("the first batch", known[number])
        return replace(inputs, known=known)

    def _uses(self, reader: Reader | Sampled | None, outputs: ValueSpec) -> list[bool]:
        """Return which of the model's outputs the loss of the first batch uses."""
        task, of, dtype = spare(self.task, self.model), cast(Any, reader), self.settings.data_dtype
        read = partial(used_outputs, task, outputs)
        return self.guard.on_first("the loss", lambda: read(cast_floats(of.first()[1], dtype)))  # type: ignore[no-any-return]

    def begin_by_number(self, train: Sampled, test: Sampled) -> None:
        """Plan for samples by number; prove the task on both."""
        self.begin(None if self.rank else train, Samples.of(train.sizes, test.sizes))

        def prove() -> None:
            _, targets = test.first()
            check_targets(self.begun.plan, spare(self.task, self.model), targets, test.classes)

        self.guard.on_first("the task", prove)
        self._refuse_apart()

    # Passes

    def batches(
        self,
        source: Loader | Sampled,
        trains: bool = False,
        labelled: bool = True,
        epoch: int = 0,
        done: int = 0,
    ) -> Batches:
        """Return the batches of a pass over a loader, whose first one decides the plan, or over samples.

        `labelled`: whether targets are read. `epoch`: of samples by number; `done`: the batches to leave out.
        """
        self.refuse_ended()
        if isinstance(source, Sampled):
            return NumberedBatches(source, self.task, self.groups, self.begun.plan, epoch, done)
        form = self._form
        if form is not None and not labelled:
            form = replace(form, targets=ValueSpec((TensorSpec((), torch.float32),)))
        weight = self.task.weight if trains else None
        reader = None
        if not self.rank:
            m = self.settings.microbatches if trains else 1
            how = self._named, weight, labelled, self.groups.world.size, m
            reader = Reader(source, "batch", form, *how)
        if self.session is None:
            self.begin(reader)
            form = self._form
        assert form is not None
        if trains:
            self._refuse_apart()

        def begin(reader: Reader) -> None:
            if self.whole.guard:
                self.whole.guard.refuse_changes(trains)
            if done:
                reader.skip(done, self.settings.window)

        return LoaderBatches(self.groups, reader, form, begin)

    def ticks(self, what: str) -> Callable[[int], Tick]:
        """Return what shows rank 0's progress in a window of many batches."""
        return lambda batches: partial(self._tick, what, batches)

    def _tick(self, what: str, batches: int, stage: int) -> None:
        if not self.rank and batches > 1 and stage == min(self.begun.stages):
            self.bar.tick(what, batches)

    def values(self, what: str, take: Callable[[Stage], Tally], **more: float) -> dict[str, float]:
        """Return what the last stage has counted, and `more` of its first rank, on every rank."""
        with self.guard():
            mine = self.take(take)
            received = self.groups.gather(what, mine and [asdict(mine), more])
        (tallies, (more, *_)) = zip(*(received[rank] for rank in self.begun.plan.placement[-1]), strict=True)
        tally = summed([read_as(Tally, one, what) for one in tallies])
        return {"loss": tally.mean_loss, **self.task.values(tally), **more}

    def take(self, count: Callable[[Stage], Tally]) -> Tally | None:
        """Return and reset this rank's tally of the last stage; None if others hold it."""
        return count(self.session.last) if self.session and self.session.last else None

    def _refuse_apart(self) -> None:
        """Refuse to train what microbatches train otherwise than a batch; to evaluate it is right."""
        if self._apart:
            raise ConfigError(self._apart)

    def _ended(self) -> None:
        """Stop training after an error of what all ranks do together."""
        self._updates = self.updates
        self.bar.close()
        self.session = None

    def settle(self, what: str) -> None:
        """Let all ranks end what they do, to tell their tensors."""
        self.refuse_ended()
        with self.guard():
            if self.session is not None:
                self.session.engine.synchronize()
                self.session.average_buffers()
            self.groups.broadcast(what)

    def close(self) -> None:
        """Leave the process groups. All ranks call it."""
        if not self.closed:
            self.whole.end(failed=self.session is None)
            if not self.guard.stopped:
                self.groups.close()
        self.closed = True


def _meet(world: World, draft: Draft) -> ProcessGroups:
    """Return the ranks that have met, with a line where their messages go through host memory."""
    settings, decides = draft.settings, draft.policy is not None
    how = choose_device(world.local_rank, settings.device), None, settings.timeout, decides
    groups = ProcessGroups(world, draft.placement, [], *how)
    if (groups.obstacle or groups.staged) and world.size > 1 and not world.rank:
        why = groups.obstacle or f"{settings.schedule} decides its order as it runs"
        log.warning("pipetrain: %s, so messages go through host memory over gloo", why)
    return groups


def _first(reader: Any) -> list[Any] | None:
    """Return what the other ranks need to know of the first batch; None if there is none.

    Its form, its size, and that of the smallest batch to train, if known.
    """
    first = reader.first()
    sizes = known_sizes(reader.loader) if isinstance(reader, Reader) and reader.weight else None
    smallest = min(sizes).to_json() if sizes else None
    return first and [
        Form(*map(ValueSpec.in_batch, first)).to_json(),
        Size.of(first[0]).to_json(),
        smallest,
    ]


def _prove_task(plan: Plan, task: Task, network: Network, reader: Any) -> str:
    """Prove a task, and the stages, on the first batch; return why microbatches would train otherwise."""
    inputs, targets = reader.first()
    task = spare(task, network.model)
    after_forward = compare_loss(plan, network, task, inputs, targets)
    compare_stages(plan, network, inputs)
    check_targets(plan, task, targets, getattr(reader, "classes", None), after_forward)
    return parity(plan, network, task, inputs, targets)
