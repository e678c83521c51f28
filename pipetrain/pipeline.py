"""Trains a model over several processes, from Python.

    pipe = pipetrain.Pipeline(model, loss=cross_entropy, optimizer=lambda p: AdamW(p, 3e-4), schedule="1f1b")
    for loss in pipe.train(loader): ...
    print(pipe.evaluate(test_loader))

Every process of torchrun runs the same program, and each holds the stages of its rank; without torchrun there
is one process. What runs the windows is Session, as for the command line.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipetrain.arguments import Asked, read_draft, read_model, read_targets, read_task
from pipetrain.building import Function, Optim
from pipetrain.checkpoint.resume import (
    Source,
    open_weights,
    read_source,
    refuse_other,
    saved_in,
    tensors_of,
    transformers_config,
    weights_of,
)
from pipetrain.checkpoint.state import StatefulPart, parts_of, restore, restore_random
from pipetrain.checkpoint.writer import save_now
from pipetrain.choices import conf_dir
from pipetrain.data.loader import Sampled
from pipetrain.data.loading import Form, Loader, Reader
from pipetrain.errors import ConfigError
from pipetrain.network.chain import network_of
from pipetrain.network.factory import Factory, Initial
from pipetrain.network.model import give_memory, refuse_without_numbers, tensor_attributes
from pipetrain.network.network import Network, Values
from pipetrain.network.places import named_tensors
from pipetrain.network.values import TensorSpec, Value, ValueSpec, as_tuple
from pipetrain.plan.parity import parity, prove_stages
from pipetrain.plan.plan import Plan, Samples, outputs_of, prove_targets
from pipetrain.plan.program import Draft
from pipetrain.planning import first_plan
from pipetrain.rate import Rate
from pipetrain.records.bar import Bar
from pipetrain.rules import COUNT, PATH
from pipetrain.runtime.engine import Tick
from pipetrain.runtime.feed import Batches, OfLoader, OfNumbers
from pipetrain.runtime.mesh import Mesh, choose_device
from pipetrain.runtime.ranks import World
from pipetrain.runtime.session import Session
from pipetrain.runtime.stage import Stage
from pipetrain.runtime.together import Together, level, prove_same
from pipetrain.runtime.whole import WholeModel, owners
from pipetrain.runtime.windows import NO_BATCH, Done, Windows
from pipetrain.schedule.actions import Schedule
from pipetrain.schedule.draw import counted
from pipetrain.schedule.lower import edges
from pipetrain.settings import Settings
from pipetrain.signals import Stopping
from pipetrain.tasks import LossFunction, Metric, ModelLoss, Task
from pipetrain.tasks.metrics import MetricFunction
from pipetrain.tasks.tally import Tally
from pipetrain.tasks.trial import choose_weight

log = logging.getLogger("pipetrain")
PREDICTED_AT_ONCE = 8  # batches of a window of a prediction, whose outputs are kept until its end
_open: weakref.ReferenceType[Pipeline] | None = None  # the pipeline of this process


def schedules() -> dict[str, str]:
    """Return the schedules that ship with pipetrain, by name, with what each is."""
    files = sorted((conf_dir() / "schedule").glob("*.yaml"))
    return {path.stem: path.read_text().splitlines()[1].removeprefix("# ") for path in files}


class Pipeline:
    """A model cut into stages over the processes of torchrun, and its training.

    - `model`: an nn.Module on the CPU. An nn.Sequential is cut between its layers; another module is traced
      into layers. All ranks start from the weights of rank 0. From the first batch on each rank has those of
      its own stages, and the rest of the model is on the meta device; `collect` puts all into it again, on
      rank 0. One process trains it in place. For a large one, a function that makes it: then each rank makes
      the weights of its own stages only, by the option `seed`.
    - `loss`: a function (outputs, targets) -> mean; "model" for a model that takes a dict with `labels` in it
      and computes its loss, as those of Hugging Face; or `task`, a Task with its `metrics` and `weight`.
    - `optimizer`: a function of parameters, such as `lambda p: AdamW(p, 3e-4)`. `param_groups`: options for
      some of them, as `optim.groups` of the configuration.
    - `schedule`: a name of `schedules()`, a function (ranks, batches, microbatches) -> program, or the path
      of a program's file.
    - `microbatches`: pieces that a batch is cut into; `window`: batches between two drains of the pipeline.
      None: as the file of the schedule's name says; for one of your own 1 microbatch, and a window of one
      batch, or of the whole pass where the schedule is asynchronous.
    - `lr_schedule`: a function of the update number (0, 1, ...) -> fraction of the optimizer's rate.
    - `weights`: a file (.safetensors, or of torch.save) or a folder (of Hugging Face's safetensors, or with
      our checkpoints) with the weights to begin with. Each rank reads those of its own stages.
    - `sample`: a batch for which the plan is made and proven at once. Without it, that is done with the
      first batch.
    - `targets`: where batches are dicts, the name of the targets in them, or names, which make a tuple. The
      rest are the model's inputs, by their names, or if one is left, that tensor.
    - `dtype`: of weights and floating-point data. None: each parameter and buffer keeps its own, and data
      take that of the parameters, or keep theirs if the parameters have several (or less than float32).
    - `options`: any other key of the configuration, with its default there: partition, buffer_size, timeout,
      device, precision, memory_format, compile, threads, on_nan, clip_grad_norm, ema, seed (of dropout, None:
      as torch is seeded on rank 0; of a factory's weights, None: 0), codec_forward, codec_backward (a name
      of conf/codec), and so on.
    - `settings`: all options, read before, in place of them.

    Raises ConfigError and ScheduleError for what cannot be trained as one process would train it.
    """

    def __init__(
        self,
        model: nn.Module | Factory,
        loss: LossFunction | Task | str | None = None,
        optimizer: Function | Optim | None = None,
        schedule: str | Path | Schedule = "1f1b",
        *,
        microbatches: int | None = None,
        window: int | None = None,
        task: Task | None = None,
        metrics: Sequence[Metric] | Mapping[str, MetricFunction] = (),
        weight: Callable[[Value], Tensor | float] | None = None,
        param_groups: Mapping[str, Mapping[str, Any]] | None = None,
        lr_schedule: Rate | None = None,
        weights: str | Path | None = None,
        sample: Any = None,
        targets: str | Sequence[str] | None = None,
        dtype: torch.dtype | str | None = None,
        settings: Settings | None = None,
        **options: Any,
    ) -> None:
        _end_earlier()
        self._task = read_task(loss, task, metrics, weight, targets)
        self._named = read_targets(targets, self._task)
        world = World.current()
        seed = settings.seed if settings else options.get("seed")
        model, record = read_model(model, seed)
        given = {"microbatches": microbatches, "window": window, "dtype": dtype, **options}
        draft = read_draft(schedule, settings, given, model, world.size)
        self._asked = Asked.read(model, draft, optimizer, param_groups, lr_schedule)
        self._settings = draft.settings
        if self._settings.threads is not None:
            torch.set_num_threads(self._settings.threads)
        self._mesh = mesh = _meet(world, draft)
        self._bar = Bar()
        self._signals = Stopping(self, world.rank)
        self._stopping = False  # as agreed after the last window
        self._session: Session | None = None  # from the first batch on
        self._loop: Windows | None = None
        self._together = Together(mesh, self._ended)
        with self._together():
            initial = self._agree(model, record, weights)
            if seed is None:  # dropout as the program has seeded torch on rank 0
                told = mesh.tell("the seed", torch.initial_seed() % 2**31)
                self._settings = replace(self._settings, seed=told)
        self._model = model
        self._form: Form | None = None
        self._source: Source | None = None  # what was loaded before it
        self._closed = False
        self._passes = 0  # of train
        self._apart = ""  # why microbatches would train otherwise than a batch
        self._conditions = tensors_of(model) | {"optimizer": type(self._asked.made).__name__}
        self._whole = WholeModel(model, mesh, initial)
        self.metrics: dict[str, float] = {}
        """Of the last pass of `train`: loss, the metrics, learning_rate and samples_per_s."""
        _remember(self)
        if sample is not None:
            try:
                self._begin(None if self.rank else Reader([sample], "sample= as batch", named=self._named))
            except Exception:  # on all ranks; nobody has this Pipeline to close it
                self.close()
                raise

    # What a program uses

    @property
    def plan(self) -> Plan:
        """The cuts, and the program of a window with what was proven of it; prints as pipetrain.plan does."""
        return (self._session or self._begun).plan

    def __repr__(self) -> str:
        settings, world = self._settings, self._mesh.world
        state = "closed" if self._closed else counted(self.updates, "update")
        return (
            f"<Pipeline of {type(self._model).__name__}: {settings.schedule}, "
            f"{counted(settings.microbatches, 'microbatch')}, stages on ranks {self._mesh.placement}, "
            f"rank {world.rank} of {world.size}, {state}>"
        )

    @property
    def rank(self) -> int:
        return self._mesh.world.rank

    @property
    def last_rank(self) -> int:
        """The rank of the last stage, which reads targets and counts."""
        return self._mesh.placement[-1]

    @property
    def updates(self) -> int:
        """The number of updates so far."""
        if self._session is None:
            return self._source.manifest.position.update if self._source else 0
        return next(iter(self._session.stages.values())).weights.updates

    @property
    def stopping(self) -> bool:
        """Whether a rank has got SIGTERM or Ctrl-C: on all ranks alike, as they agree after each window.

        From the first time that a program reads it these signals end it no longer: it is to save and to
        leave. A second Ctrl-C does, and `close` lets both do what they did before.
        """
        self._signals.listen()
        return self._stopping

    def train(self, loader: Loader, window: int | None = None) -> Iterator[float]:
        """Train one pass over a loader; yield the mean loss of each update, on every rank.

        `loader` yields (inputs, targets), tensors [n, ...] or tuples or dicts of them; or dicts, where
        `targets` names those. Only that of rank 0 is read.
        `window`: batches between two drains; by default that of the schedule: one batch where a schedule
        flushes, the whole pass where it does not. The losses of a window come at its end. A batch in which
        nothing counts, such as one of ignored labels, is skipped with a line: no update. Raises ConfigError
        for a loader without batches, and TrainingStopped for a batch that cannot be trained on, and if
        numbers are not finite.
        """
        window = COUNT.read("window", window, null=True) or self._settings.window
        samples, began = 0, time.perf_counter()
        self._passes += 1
        with self._together():
            self._counted(Stage.take_trained)  # what steps, or a pass that was left, have counted
        for done in self._trained(loader, f"the training (pass {self._passes})", window):
            samples += sum(done.sizes)
            yield from done.losses
        self.metrics = self._values(
            "the metrics",
            Stage.take_trained,
            learning_rate=self._asked.rate(max(0, self.updates - 1)),
            samples_per_s=samples / (time.perf_counter() - began),
        )

    def step(self, inputs: Any = None, targets: Any = None) -> float:
        """Train on one batch; return its mean loss on every rank. Only the tensors of rank 0 are read.

        `inputs` alone is a batch as a loader gives it: a pair, or a dict where `targets` names those.
        It is NaN where nothing in the batch counts, which is then skipped. Raises ConfigError for a schedule
        that does not flush, which needs several batches at once, and TrainingStopped as `train` does.
        """
        if self._asked.draft.reads_late:
            raise ConfigError(
                f"schedule {self._settings.schedule} is asynchronous, and a step of one batch would drain "
                f"it: use `for loss in pipe.train(loader)`, or a schedule that flushes, such as 1f1b"
            )
        batch = inputs if targets is None else (inputs, targets)
        for done in self._trained([batch], "the training by step()", 1):
            return done.losses[0]
        return math.nan

    def _trained(self, loader: Loader, what: str, window: int | None) -> Iterator[Done]:
        """Train a pass of which the program looks at each window."""
        batches = self._batches(loader, trains=True)
        tick = partial(self._tick, "training")
        for done in self._windows.train(what, batches, lambda done: window, tick):
            self._stopping = done.asked == "stop"
            yield done

    def evaluate(self, loader: Loader) -> dict[str, float]:
        """Return the mean loss and the metrics over a loader, on every rank.

        With the newest weights, or with their moving average where the option `ema` keeps one.
        Raises ConfigError for a loader without batches, and TrainingStopped for a bad batch.
        """
        with self._together():
            self._counted(Stage.take_evaluated)  # what an evaluation that failed has counted
        batches = self._batches(loader)
        tick = partial(self._tick, "evaluation")
        self._windows.evaluate("the evaluation", batches, batches.evaluated_at_once, tick)
        return self._values("the evaluation", Stage.take_evaluated)

    def predict(self, loader: Loader) -> Iterator[Any]:
        """Yield the model's outputs for each batch of a loader, in order and in host memory, on rank 0.

        The other ranks get None for each. `loader` yields inputs; targets beside them are not looked at. The
        model is in evaluation mode. Raises ConfigError for a loader without batches.
        """
        pack, batches = outputs_of(self._begun.plan).pack, self._batches(loader, labelled=False)
        tick = partial(self._tick, "prediction")
        for outputs in self._windows.predict("the prediction", batches, PREDICTED_AT_ONCE, tick):
            yield outputs and pack(outputs)

    def _values(self, what: str, take: Callable[[Stage], Tally], **more: float) -> dict[str, float]:
        """Return what the last stage has counted, and `more` of its rank, on every rank."""
        last = self.plan.placement[-1]
        with self._together():
            tally = self._counted(take)
            values = tally and {"loss": tally.mean_loss, **self._task.values(tally), **more}
            told: dict[str, float] = self._mesh.tell(what, values, last)
        return told

    def _counted(self, take: Callable[[Stage], Tally]) -> Tally | None:
        """Return and reset a tally of the last stage; None if another rank holds it."""
        return take(self._session.last) if self._session and self._session.last else None

    # One pass

    def _batches(
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
        self._refuse_stopped()
        if isinstance(source, Sampled):
            return OfNumbers.of(source, self._task, self._mesh, self.plan.placement, epoch, done)
        form = self._form
        if form is not None and not labelled:
            form = replace(form, targets=ValueSpec((TensorSpec((), torch.float32),)))
        weight = self._task.weight if trains else None
        reader = None if self.rank else Reader(source, "batch", form, self._named, weight, labelled)
        if self._session is None:
            self._begin(reader)
            form = self._form
        assert form is not None
        if trains:
            self._refuse_apart()

        def begin(reader: Reader) -> None:
            if self._whole.given:
                self._whole.given.prove(trains)
            if done:
                reader.skip(done, self._settings.window)

        return OfLoader(self._mesh, reader, form, begin)

    @property
    def _windows(self) -> Windows:
        """The loop over the windows of a program's passes."""
        self._refuse_stopped()
        assert self._loop is not None, "a pass begins with its batches"
        return self._loop

    def _tick(self, what: str, total: int) -> Tick:
        """Return what shows rank 0's progress in a window of many steps."""
        if self.rank or total == 1:
            return lambda stage: None
        first = min(self._begun.stages)
        return lambda stage: self._bar.tick(what, total) if stage == first else None

    def _refuse_apart(self) -> None:
        """Refuse to train what microbatches train otherwise than a batch; to evaluate it is right."""
        if self._apart:
            raise ConfigError(self._apart)

    def _ended(self) -> None:
        """Stop training after an error of what all ranks do together."""
        self._bar.close()
        self._session = self._loop = None

    def _refuse_stopped(self) -> None:
        if self._closed:
            raise ConfigError("this Pipeline has been closed: call close() last, or make another one")
        self._together.prove()

    @property
    def _begun(self) -> Session:
        self._refuse_stopped()
        if self._session is None:
            raise ConfigError("the plan is made with the first batch: give Pipeline sample=(inputs, targets)")
        return self._session

    # The start

    def _agree(self, model: nn.Module, record: Initial | None, weights: str | Path | None) -> Values | None:
        """Compare what the ranks have, and give them the model of rank 0; return what its weights begin with.

        `record`: of the factory that made it. Raises Refused and ConfigError.
        """
        mesh = self._mesh
        drawn = {"how the model's factory makes its parameters": record.digest} if record else {}
        prove_same(mesh, "the settings", self._asked.conditions() | drawn)
        mesh.open(edges(self._asked.draft.program))
        refuse_without_numbers(mesh.tell("the model", [] if record else give_memory(model)))
        level(mesh, "the model", named_tensors(model) | tensor_attributes(model))
        return record if weights is None else open_weights(PATH.read("weights", weights), model)

    def _begin(self, reader: Reader | Sampled | None, known: Samples | None = None) -> None:
        """Plan for the first batch of rank 0, prove the task on it, and make this rank's stages.

        `known`: the sizes of all batches, else others may come.
        """
        first = self._together.on_first("the first batch", reader, _first)
        if first is None:
            raise ConfigError(NO_BATCH)
        form, model = Form.from_json(first[0]), self._model
        network = network_of(model, form.inputs, self._settings.precision == "bf16")
        network.values = self._whole.values
        if isinstance(self._task, ModelLoss):
            choose_weight(self._task, network, form.inputs)
        settings = self._settings
        if known is None:
            m = settings.microbatches
            settings = replace(settings, batch_size=max(m, first[1] // m * m))
        draft = replace(self._asked.draft, settings=settings)
        plan = first_plan(self._asked, draft, self._task, network, form, known, self._together)
        self._together.on_first("the task", reader, partial(_prove_task, plan, self._task))
        compare = partial(_compare, plan, network, self._task)
        self._apart = self._together.on_first("the comparison", reader, compare)
        self._settings, self._form = plan.settings, form
        with self._together():
            self._mesh.open(list(plan.cut.bounds), plan.cut.ties)
            owned = owners(network, plan)
            optimizer, rate = self._asked.optimizer, self._asked.rate.fraction
            self._session = Session(plan, network, self._task, optimizer, rate, self._mesh)
        self._session.whole = self._whole
        self._loop = Windows(self._session, self._together, self._signals.take)
        self._whole.lend(network, self._session.stages.values(), owned)
        if self._source is not None:
            restore(self._source, self._session, self._mesh)

    def _begin_by_number(self, train: Sampled, test: Sampled, done: int) -> None:
        """Plan for samples by number, of which so many batches are done; prove the task on both."""
        if self._session is None:
            self._begin(None if self.rank else train, Samples(train.sizes, test.sizes))
            self._together.on_first("the task", test, partial(_prove_task, self.plan, self._task))
            self._refuse_apart()

    # What is left of a training

    def state_dict(self, ema: bool = False) -> dict[str, Tensor]:
        """Return the model's state_dict in host memory on rank 0, for plain PyTorch; empty on the others.

        `ema`: with the moving average of the weights, where the option `ema` keeps one. All ranks must call
        it. Raises ConfigError for an average that is not there.
        """
        if ema and (self._settings.ema is None or self._session is None or not self.updates):
            raise ConfigError("there is no moving average of the weights: give Pipeline ema=0.999, and train")
        self._settle("the state_dict")
        return self._whole.state_dict(ema)

    def collect(self) -> nn.Module:
        """Put the weights and buffers of all ranks into the model on rank 0, on the CPU; return the model.

        There it is whole, until training goes on, and another Pipeline may have it afterwards. On the other
        ranks it stays without numbers. All ranks must call it.
        """
        self._settle("what is collected")
        return self._whole.collect()

    def _settle(self, what: str) -> None:
        """Let all ranks end what they do, to tell their tensors."""
        self._refuse_stopped()
        with self._together():
            if self._session is not None:
                self._session.engine.settle()
            self._mesh.tell(what)

    def save(self, folder: str | Path, keep: int | None = None) -> Path:
        """Save the training's state under a folder that all ranks share; return the checkpoint's folder.

        `load` goes on from it, and `python -m pipetrain.export` makes plain weights of it. `keep`: how many
        of the newest checkpoints stay there, this one included; None: all. All ranks must call it. Raises
        TrainingStopped if a rank cannot write.
        """
        keep = COUNT.read("keep", keep, null=True)
        path, session = PATH.read("folder", folder), self._begun
        with self._together():
            session.engine.settle()
        config = {"seed": session.engine.seed, **transformers_config(self._model)}
        with self._whole.suspended():
            return save_now(path.expanduser().absolute(), session, self._mesh, self._conditions, config, keep)

    def load(self, folder: str | Path) -> None:
        """Go on from the newest checkpoint under a folder, or this one; of any cuts and schedule.

        Where a first save was cut short there is none to go on from, which a line says. Random numbers go on
        too: dropout draws by the seed of the training that was saved. All ranks must call it. Raises
        ConfigError, also for a checkpoint of another model.
        """
        self._refuse_stopped()
        find = partial(_saved_in, PATH.read("folder", folder))
        found = self._together.on_one(0, "the checkpoint to load", find)
        if found is None:
            return
        source = read_source(Path(found))
        refuse_other(source, self._conditions)
        restore_random(source, self._mesh)
        if not self._whole.lent:
            self._whole.values = weights_of(source, self._model)
            self._source = source  # the rest follows at the first batch
        else:
            self._whole.take_back()
            restore(source, self._begun, self._mesh)

    def dcp(self) -> dict[str, StatefulPart]:
        """Return what torch.distributed.checkpoint saves and loads: `dcp.save(pipe.dcp(), checkpoint_id=)`.

        Entries are `model`, `state` (of the optimizer) and `updates`, with the names of plain PyTorch.
        """
        session = self._begun
        session.engine.settle()
        self._whole.take_back()
        return parts_of(session, self._whole.keys, self._asked.optimizer)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *error: object) -> None:
        if isinstance(error[1], BaseException):
            self._together.abandon(error[1])
        self.close()

    def close(self) -> None:
        """Leave the process groups, so that another Pipeline can be made. All ranks must call it.

        The weights of several ranks are lost but for what was collected or saved; one process leaves the
        model whole.
        """
        self._signals.close()
        if self._closed:
            return
        self._whole.end(failed=self._session is None)
        if not self._together.stopped:
            self._mesh.close()
        self._closed = True
        _remember(None)


def _remember(pipe: Pipeline | None) -> None:
    global _open
    _open = None if pipe is None else weakref.ref(pipe)


def _end_earlier() -> None:
    """Close the Pipeline that this process has, as where a notebook's cell is run again.

    Raises ConfigError where there are several processes, which would have to do so together.
    """
    if _open is not None and (earlier := _open()) is not None:
        if World.current().size > 1:
            raise ConfigError(
                "this process has a Pipeline already: call close() of that one before making another"
            )
        earlier.close()


def _meet(world: World, draft: Draft) -> Mesh:
    """Return the ranks that have met, with a line where their messages go through host memory."""
    settings, decides = draft.settings, draft.policy is not None
    how = choose_device(world, settings.device), None, settings.timeout, decides or None
    mesh = Mesh(world, draft.placement, [], *how)
    if mesh.staged and world.size > 1 and not world.rank:
        why = f"{settings.schedule} decides its order as it runs" if decides else "ranks share a GPU"
        log.warning("pipetrain: %s, so messages go through host memory over gloo", why)
    return mesh


def _first(reader: Reader | Sampled) -> list[Any] | None:
    """Return what the other ranks need to know of the first batch; None if there is none."""
    first = reader.first()
    return first and [Form(*map(ValueSpec.in_batch, first)).to_json(), len(as_tuple(first[0])[0])]


def _prove_task(plan: Plan, task: Task, reader: Reader | Sampled) -> None:
    first = reader.first()
    assert first is not None
    prove_targets(plan, _spare(task), first[1], getattr(reader, "classes", None))


def _compare(plan: Plan, network: Network, task: Task, reader: Reader | Sampled) -> str:
    first = reader.first()
    assert first is not None
    prove_stages(plan, network, first[0])
    return parity(plan, network, _spare(task), *first)


def _spare(task: Task) -> Task:
    """Return a copy of a task, which may count its calls, if it can be copied."""
    try:
        return deepcopy(task)
    except Exception:  # a user's loss may hold anything
        return task


def _saved_in(path: Path) -> str | None:
    source = saved_in(path)
    if source is None:
        log.warning("pipetrain: %s has no whole checkpoint, so nothing is loaded", path)
    return str(source.folder) if source else None
