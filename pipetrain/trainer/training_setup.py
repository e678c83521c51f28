"""A model and the ranks that train it: agreed on at once, planned with the first batch, then run by windows.

Pipeline, fit and the command line all work on a Training.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pipetrain.checkpoint.rank_state import restore, restore_random
from pipetrain.checkpoint.resume import (
    Source,
    open_weights,
    refuse_other,
    tensors_of,
    transformers_config,
    weights_of,
)
from pipetrain.config.parameter_groups import title
from pipetrain.config.settings import AUTO
from pipetrain.data.batch import Form, NamedTargets
from pipetrain.data.reader import Loader, Reader
from pipetrain.data.sampling import Sampled
from pipetrain.errors import ConfigError
from pipetrain.model.deferred_init import Initial
from pipetrain.model.materialise import give_memory, refuse_without_numbers
from pipetrain.model.network import Limits, Values
from pipetrain.model.requirements import tensor_attributes
from pipetrain.model.specs import TensorSpec, ValueSpec
from pipetrain.model.tensor_places import named_tensors
from pipetrain.plan.plan import Samples
from pipetrain.plan.verification import Draft
from pipetrain.records.progress_bar import Bar
from pipetrain.rules import PATH
from pipetrain.runtime.comm.collective_guard import (
    CollectiveGuard,
    broadcast_from_rank0,
    compare_ranks,
    values_to_compare,
)
from pipetrain.runtime.comm.collectives import World
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.runtime.device import choose_device
from pipetrain.runtime.loader_feed import LoaderBatches
from pipetrain.runtime.microbatch_feed import Batches
from pipetrain.runtime.sample_index_feed import SampleIndexBatches
from pipetrain.runtime.session import Session
from pipetrain.runtime.stage.stage import Stage
from pipetrain.runtime.stage.stage_factory import make_stages
from pipetrain.runtime.whole_model import WholeModel, owners
from pipetrain.schedule.lower import edges, links
from pipetrain.tasks.running_sums import Tally, summed
from pipetrain.trainer.arguments import Arguments
from pipetrain.trainer.planning import plan_for, refuse_targets
from pipetrain.typed_json import read_as

log = logging.getLogger("pipetrain")


class Training:
    """What the ranks have agreed to train; from the first batch on its `session` trains it.

    `record`: of the factory that made the model; `weights`: a file or folder to begin with; `seed`: of the
    program, None: as torch is seeded on rank 0. Raises ConfigError, ChannelError and Refused.
    """

    def __init__(
        self,
        request: Arguments,
        record: Initial | None,
        named: NamedTargets | None,
        weights: str | Path | None,
        seed: int | None,
    ) -> None:
        self.request, self.settings = request, request.draft.settings
        self._named = named
        self.groups = connect(request.draft)
        self.bar = Bar()
        self.session: Session | None = None
        self._updates = 0  # where an error has ended the session
        self._source: Source | None = None  # what was loaded before the first batch
        self.guard = CollectiveGuard(self.groups, self._ended)
        with self.guard():
            initial = share_model(self.groups, request, record, weights)
            if seed is None:
                seed = self.groups.broadcast("the seed", torch.initial_seed() % 2**31)
                self.settings = replace(self.settings, seed=seed)
        self._form: Form | None = None
        self._limits: Sequence[Limits] = ()
        self.stopping = False  # as agreed after the last window
        self.metrics: dict[str, float] = {}  # of the last pass that was trained
        self.closed = False
        self._apart = ""  # why microbatches would train otherwise than a batch
        self.conditions = tensors_of(request.model) | {"optimizer": title(request.whole_optimizer)}
        self.whole = WholeModel(request.model, self.groups, initial)

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
    def config(self) -> dict[str, Any]:
        """What a checkpoint has for information: the seed, and what `from_pretrained` needs."""
        return {"seed": self.begun.engine.seed, **transformers_config(self.request.model)}

    @property
    def updates(self) -> int:
        if self.session is None:
            return self._updates or (self._source.manifest.position.update if self._source else 0)
        return self.session.updates

    def refuse_ended(self) -> None:
        """Refuse to go on after `close` (ConfigError), or an error of what all ranks do (TrainingStopped)."""
        if self.closed:
            raise ConfigError("this Pipeline has been closed: call close() last, or make another one")
        self.guard.refuse_ended()

    def begin(self, reader: Reader | Sampled | None, samples: Samples | None = None) -> None:
        """Plan for the first batch of rank 0, and make this rank's stages. `samples`: see `plan_for`."""
        request, groups, whole = self.request, self.groups, self.whole
        network, plan, self._form, self._apart = plan_for(
            reader, request, self.settings, whole.values, samples, self.guard
        )
        self.settings, self._limits = plan.settings, network.limits
        if isinstance(reader, Reader):
            reader.limits = self._limits
        with self.guard():
            groups.open(plan.links, plan.ties, plan.placement)
            owned = owners(network, plan)
            stages = make_stages(plan, network, request.task, request.optimizer, request.rate, groups)
            self.session = Session(plan, stages, request.task, groups, whole)
        whole.attach_stages(network, stages.values(), owned)
        if self._source is not None:
            restore(self._source, self.session, groups)

    def restore(self, source: Source) -> None:
        """Go on from a checkpoint; before the first batch with its weights, and with it with the rest."""
        refuse_other(source, self.conditions)
        restore_random(source, self.groups)
        if self.whole.attached:
            self.whole.restore_stages()
            restore(source, self.begun, self.groups)
        else:
            self.whole.set_initial_values(weights_of(source, self.request.model))
            self._source = source

    def begin_by_number(self, train: Sampled, test: Sampled) -> None:
        """Plan for samples by number; hold the task against the targets of both."""
        self.begin(None if self.rank else train, Samples.of(train.sizes, test.sizes))
        targets = partial(refuse_targets, self.begun.plan, self.request, test)
        self.guard.on_first("the task", targets)
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
            plan = self.begun.plan
            return SampleIndexBatches(source, self.request.task, self.groups, plan, epoch, done, self._limits)
        form = self._form
        if form is not None and not labelled:
            form = replace(form, targets=ValueSpec((TensorSpec((), torch.float32),)))
        weight = self.request.task.weight if trains else None
        reader = None
        if not self.rank:
            m = self.settings.microbatches if trains else 1
            how = self._named, weight, labelled, self.groups.world.size, m
            lengths = self.settings.max_length or (), self._limits
            reader = Reader(source, "batch", form, *how, *lengths)
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

    def values(self, what: str, take: Callable[[Stage], Tally], **more: float) -> dict[str, float]:
        """Return what the last stage has counted, and `more` of its first rank, on every rank."""
        with self.guard():
            counted = self.take(take)
            received = self.groups.gather(what, counted and [asdict(counted), more])
        (tallies, (more, *_)) = zip(*(received[rank] for rank in self.begun.plan.placement[-1]), strict=True)
        tally = summed([read_as(Tally, data, what) for data in tallies])
        return {"loss": tally.mean_loss, **self.request.task.values(tally), **more}

    def note_metrics(self, metrics: dict[str, float]) -> None:
        """Keep what a pass that was trained has counted."""
        self.metrics = metrics

    def note_stop(self, stopping: bool) -> None:
        """Keep whether a rank is asked to stop, as all know since the last window."""
        self.stopping = stopping

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
        """Let all ranks end what they do, before their tensors are gathered."""
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


def connect(draft: Draft) -> ProcessGroups:
    """Return the ranks that have met, with a line where their messages go through host memory."""
    world, settings, decides = World.current(), draft.settings, draft.policy is not None
    how = choose_device(world.local_rank, settings.device), None, settings.timeout, decides
    groups = ProcessGroups(world, draft.placement, [], *how)
    if (groups.nccl_obstacle or groups.staged) and world.size > 1 and not world.rank:
        why = groups.nccl_obstacle or f"{settings.schedule} decides its order as it runs"
        log.warning("pipetrain: %s, so messages go through host memory over gloo", why)
    return groups


def share_model(
    groups: ProcessGroups, request: Arguments, record: Initial | None, weights: str | Path | None
) -> Values | None:
    """Compare what the ranks are asked for, and give them the model of rank 0; return its weights' begin.

    `record`: of the factory that made it. Raises Refused and ConfigError.
    """
    model, draft = request.model, request.draft
    drawn = {"how the model's factory makes its parameters": record.digest} if record else {}
    given = values_to_compare(draft.settings, request.whole_optimizer, draft.program, request.rate)
    compare_ranks(groups, "the settings", given | drawn)
    if draft.settings.replicas != AUTO:  # whose links are those of the plan
        groups.open(links(edges(draft.program), draft.placement))
    refuse_without_numbers(groups.broadcast("the model", [] if record else give_memory(model)))
    broadcast_from_rank0(groups, "the model", named_tensors(model) | tensor_attributes(model))
    return record if weights is None else open_weights(PATH.read("weights", weights), model)
