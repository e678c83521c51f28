"""Trains a model over several processes, from Python.

    pipe = pipetrain.Pipeline(model, loss=cross_entropy, optimizer=lambda p: AdamW(p, 3e-4), schedule="1f1b")
    for loss in pipe.train(loader): ...
    print(pipe.evaluate(test_loader))

Every process of torchrun runs the same program, and each holds the stages of its rank; without torchrun there
is one process. The command line's trainer is a caller of this class: `Pipeline.of_run`.
"""

from __future__ import annotations

import itertools
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipetrain.arguments import (
    FixedProgram,
    bytes_of,
    configuration,
    copied,
    level,
    read_schedule,
    read_task,
    refuse_elsewhere,
)
from pipetrain.blueprint import AnySize, Plan, Samples, make_plan, prove, settle_clipping
from pipetrain.boundary import Example, Value, as_tuple, cast_floats, specs_of
from pipetrain.building import prove_model
from pipetrain.checkpoint import direct
from pipetrain.checkpoint.resume import tensors_of
from pipetrain.cli import conf_dir
from pipetrain.config import read_settings, share_of_cores
from pipetrain.data import pieces
from pipetrain.errors import ConfigError, TrainingStopped
from pipetrain.optimizer import prove_optimizer
from pipetrain.rate import Rate
from pipetrain.runtime.allocator import keep_freed_memory
from pipetrain.runtime.coded import Feedback
from pipetrain.runtime.engine import Ends, Observer
from pipetrain.runtime.engine import Progress as Tick
from pipetrain.runtime.mesh import Mesh, World, choose_device
from pipetrain.runtime.order import Listed, Order
from pipetrain.runtime.stage import Stage
from pipetrain.runtime.weights import OptimizerFactory, optimizer_over
from pipetrain.schedule.actions import Schedule, placement
from pipetrain.schedule.lower import edges, lower
from pipetrain.schedule.programs import forward_only
from pipetrain.tally import Tally
from pipetrain.tasks import LossFunction, Metric, Task, prove_task
from pipetrain.tasks.metrics import MetricFunction
from pipetrain.training.assembly import make_engine, make_stages
from pipetrain.training.feed import WindowFeed
from pipetrain.training.loading import BadBatch, Batches, Form, Reader, WindowSource, pair
from pipetrain.training.run import Run

EVALUATED_AT_ONCE = 16  # batches of a window of an evaluation
_open: weakref.ReferenceType[Pipeline] | None = None  # the pipeline of this process


def schedules() -> dict[str, str]:
    """Return the schedules that ship with pipetrain, by name, with what each is."""
    files = sorted((conf_dir() / "schedule").glob("*.yaml"))
    return {path.stem: path.read_text().splitlines()[1].removeprefix("# ") for path in files}


class Pipeline:
    """A model cut into stages over the processes of torchrun, and its training.

    - `model`: an nn.Sequential on the CPU. It is cut between its layers, which are trained in place. All
      ranks start from the weights of rank 0.
    - `loss`: a function (outputs, targets) -> mean; or `task`, a Task with its `metrics` and `weight`.
    - `optimizer`: a function of parameters, such as `lambda p: AdamW(p, 3e-4)`. `param_groups`: options for
      some of them, as `optim.groups` of the configuration.
    - `schedule`: a name of `schedules()`, a function (ranks, batches, microbatches) -> program, or the path
      of a program's file.
    - `microbatches`: pieces that a batch is cut into; `window`: batches between two drains of the pipeline.
      None: as the schedule's file says.
    - `lr_schedule`: a function of the update number (0, 1, ...) -> fraction of the optimizer's rate.
    - `sample`: a batch (inputs, targets) for which the plan is made and proven at once. Without it, that is
      done with the first batch.
    - `dtype`: of weights and floating-point data; None: the model's.
    - `options`: any other key of the configuration, with its default there: partition, buffer_size, timeout,
      device, precision, memory_format, compile, threads, on_nan, clip_grad_norm, ema, seed (of dropout; None
      leaves torch's generator as it is), codec_forward, codec_backward (a name of conf/codec), and so on.

    Raises ConfigError and ScheduleError for what cannot be trained as one process would train it.
    """

    def __init__(
        self,
        model: nn.Sequential,
        loss: LossFunction | Task | None = None,
        optimizer: OptimizerFactory | None = None,
        schedule: str | Path | Schedule = "1f1b",
        *,
        microbatches: int | None = None,
        window: int | None = None,
        task: Task | None = None,
        metrics: Sequence[Metric] | Mapping[str, MetricFunction] = (),
        weight: Callable[[Value], Tensor | float] | None = None,
        param_groups: Mapping[str, Mapping[str, Any]] | None = None,
        lr_schedule: Rate | None = None,
        sample: tuple[Any, Any] | None = None,
        dtype: torch.dtype | str | None = None,
        **options: Any,
    ) -> None:
        _refuse_second()
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
        keep_freed_memory()
        if optimizer is None:
            raise ConfigError("Pipeline needs optimizer=, such as lambda p: torch.optim.SGD(p, 0.01)")
        self._task = read_task(loss, task, metrics, weight)
        world = World.from_environment()
        cfg, name = configuration(model, schedule, microbatches, window, dtype, options)
        self._schedule = read_schedule(cfg, schedule)
        self._settings = replace(read_settings(cfg, name, world.size), model=type(model).__name__)
        refuse_elsewhere(model)
        prove_model(model, "Pipeline needs", self._settings.dtype)
        model.train()
        # A window of several batches tells whether weights are read late.
        batches = self._schedule.batches if isinstance(self._schedule, FixedProgram) else 4
        self._settings = settle_clipping(self._settings, self._schedule, batches)
        window_of = prove(self._settings, self._schedule, batches)
        self._asynchronous = any(bounds.staleness for bounds in window_of.bounds)
        where = placement(window_of.program)
        self._optimizer = prove_optimizer(optimizer, param_groups, model, len(where))
        self._rate = lr_schedule or (lambda update: 1.0)
        groups = optimizer_over(self._optimizer, model.named_parameters()).param_groups
        self._peak = float(groups[0].get("lr", 0.0))
        torch.set_num_threads(self._settings.threads or share_of_cores(world.local_size))
        device = choose_device(world, self._settings.device)
        mesh = Mesh(world, where, edges(window_of.program), device, None, self._settings.timeout)
        level(model, mesh)
        if options.get("seed") is not None:
            torch.manual_seed((self._settings.seed + 1_000_003 * (world.rank + 1)) % 2**63)
        self._model: nn.Sequential | None = model
        self._mesh = mesh
        self._form: Form | None = None
        self._plan: Plan | None = None
        self.stages: dict[int, Stage] = {}
        self.feedback = Feedback()
        self._conditions = tensors_of(model)
        self._facts = {key: (tuple(t.shape), t.dtype) for key, t in model.state_dict().items()}
        self._layers = list(model._modules)
        self.metrics: dict[str, float] = {}
        """Of the last pass of `train`: loss, the metrics, learning_rate and samples_per_s."""
        global _open
        _open = weakref.ref(self)
        if sample is not None:
            self._begin(pair(sample, "sample"))

    # What the trainer of the command line uses

    @classmethod
    def of_run(cls, run: Run, mesh: Mesh) -> Pipeline:
        """Return the pipeline of a planned run."""
        pipe = cls.__new__(cls)
        pipe._task, pipe._settings, pipe._mesh = run.task, run.settings, mesh
        pipe._optimizer, pipe._rate = run.optimizer, run.settings.rate(run.updates)
        pipe.feedback = Feedback()
        # The whole model is built, as its initial weights depend on the order of layers, and then dropped.
        pipe._assemble(run.plan, run.build_model())
        return pipe

    def _assemble(self, plan: Plan, model: nn.Sequential) -> None:
        self._plan = plan
        self.stages = make_stages(plan, model, self._task, self._optimizer, self._rate, self._mesh)
        self.engine = make_engine(plan, self.stages, self._mesh, feedback=self.feedback)

    def train_window(
        self,
        order: Order,
        sizes: Sequence[Sequence[int]],
        inputs: Iterator[Value] | None,
        targets: Iterator[Value] | None,
        tick: Tick = lambda stage: None,
        observe: Observer | None = None,
        ends: Ends | None = None,
    ) -> list[float]:
        """Train the batches of one window; return the mean loss of each update on the last stage's rank.

        `sizes`: the samples of each microbatch of each batch; `inputs`, `targets`: those of each microbatch,
        on the ranks of the first and the last stage. The others return nothing. See Engine.train for the
        rest.
        """
        feed = self._feed(sizes, inputs, targets)
        self.engine.train(order, feed, self._settings.microbatches, tick, observe, ends)
        last = self.stages.get(self.plan.stages - 1)
        return [] if last is None else last.take_losses()

    def evaluate_window(
        self,
        order: Order,
        sizes: Sequence[int],
        inputs: Iterator[Value] | None,
        targets: Iterator[Value] | None,
        tick: Tick = lambda stage: None,
        ends: Ends | None = None,
    ) -> None:
        """Predict microbatches of these `sizes` with the newest weights; the last stage counts."""
        self.engine.evaluate(order, self._feed([[size] for size in sizes], inputs, targets), tick, ends)

    def _feed(
        self, sizes: Sequence[Sequence[int]], inputs: Iterator[Value] | None, targets: Iterator[Value] | None
    ) -> WindowFeed:
        dtype = self._settings.dtype
        return WindowFeed(sizes, inputs, targets, self._task.weight, self._mesh.device, dtype)

    # What a program uses

    @property
    def plan(self) -> Plan:
        """The cuts, and the program of a window with what was proven of it; prints as pipetrain.plan does."""
        if self._plan is None:
            raise ConfigError("the plan is made with the first batch: give Pipeline sample=(inputs, targets)")
        return self._plan

    @property
    def rank(self) -> int:
        return self._mesh.world.rank

    @property
    def updates(self) -> int:
        """The number of updates so far."""
        return next(iter(self.stages.values())).weights.updates if self.stages else 0

    def train(self, loader: Batches, window: int | None = None) -> Iterator[float]:
        """Train one pass over a loader; yield the mean loss of each update, on every rank.

        `loader` yields (inputs, targets), tensors [n, ...] or tuples of them; only that of rank 0 is read.
        `window`: batches between two drains; by default that of the schedule: one batch where a schedule
        flushes, the whole pass where it does not. The losses of a window come at its end. Raises
        TrainingStopped for a batch that cannot be trained on, and if numbers are not finite.
        """
        if window is not None and (type(window) is not int or window < 1):
            raise ConfigError(f"window={window} must be a whole number of batches, 1 or more")
        return self._pass(loader, window or self._settings.window)

    def _pass(self, loader: Batches, window: int | None) -> Iterator[float]:
        reader, samples, began = self._reader(loader, "batch", window), 0, time.perf_counter()
        while sizes := self._next_window(reader, window):
            losses = self._train(sizes, reader)
            samples += sum(sizes)
            yield from losses
        last = self.stages.get(self.plan.stages - 1) if self._plan else None
        tally = self._told("the metrics", lambda: None if last is None else last.take_trained())
        if tally is not None:
            rate = self._rate(max(0, self.updates - 1))
            seconds = time.perf_counter() - began
            self.metrics = self._values(tally)
            self.metrics |= {"learning_rate": self._peak * rate, "samples_per_s": samples / seconds}

    def step(self, inputs: Value | None = None, targets: Value | None = None) -> float:
        """Train on one batch; return its mean loss on every rank. Only the tensors of rank 0 are read.

        Raises ConfigError for a schedule that does not flush, which needs several batches at once.
        """
        if self._asynchronous:
            raise ConfigError(
                f"schedule {self._settings.schedule} is asynchronous, and a step of one batch would drain "
                f"it: use `for loss in pipe.train(loader)`, or a schedule that flushes, such as 1f1b"
            )
        reader = self._reader([(inputs, targets)], "batch", 1)
        (loss,) = self._train(self._next_window(reader, 1), reader)
        return loss

    def evaluate(self, loader: Batches) -> dict[str, float]:
        """Return the mean loss and the metrics over a loader, with the newest weights, on every rank."""
        reader = self._reader(loader, "batch", EVALUATED_AT_ONCE)
        while sizes := self._next_window(reader, EVALUATED_AT_ONCE):
            full = self._settings.batch_size // self._settings.microbatches
            cut = [pieces(size, -(-size // full)) for size in sizes]
            flat = list(itertools.chain.from_iterable(cut))
            source = self._source(cut, reader)
            program = lower(forward_only(self.plan.placement, len(flat)))
            order = Listed(program[self.rank], len(flat))
            self.evaluate_window(order, flat, source.inputs, source.targets)
            source.close()
        last = self.stages.get(self.plan.stages - 1) if self._plan else None
        tally = self._told("the evaluation", lambda: None if last is None else last.take_evaluated())
        if tally is None:
            raise ConfigError("the loader to evaluate has no batch")
        return self._values(tally)

    def _values(self, tally: Tally) -> dict[str, float]:
        return {"loss": tally.mean_loss, **self._task.values(tally)}

    # One pass over a loader

    def _reader(self, loader: Batches, what: str, window: int | None) -> Reader | None:
        """Return rank 0's reader; begin with the first batch, together with all ranks."""
        if self._mesh.world.rank:
            reader, error = None, self._mesh.tell("the loader")
        else:
            reader, error = Reader(loader, what), None
            if window is None and reader.length is None:
                error = (
                    f"schedule {self._settings.schedule} trains a whole pass as one window, and a loader "
                    f"without length does not say how long that is: give train(loader, window=...)"
                )
            self._mesh.tell("the loader", error)
        if error:
            raise ConfigError(error)
        if self._plan is None:
            self._begin(None if reader is None else self._tried(reader.first))
        return reader

    def _tried(self, read: Callable[[], Any]) -> Any:
        """Return what rank 0 reads, or its error, which the others are told."""
        try:
            return read()
        except Exception as error:
            return error

    def _next_window(self, reader: Reader | None, window: int | None) -> list[int]:
        """Return the samples of each batch of the next window, as rank 0 reads them; empty at the end."""
        m = self._settings.microbatches

        def read() -> list[int]:
            assert reader is not None
            sizes = reader.window(window)
            if small := [size for size in sizes if size < m]:
                raise BadBatch(
                    f"a batch of {small[0]} samples cannot be cut into microbatches={m}: leave it out, as "
                    f"DataLoader(drop_last=True) does, or choose another batch size"
                )
            return sizes

        found = self._tried(read) if reader is not None else None
        told = self._mesh.tell("the next window", str(found) if isinstance(found, Exception) else found)
        if isinstance(found, Exception):
            raise found
        if isinstance(told, str):
            raise TrainingStopped(f"rank 0 stopped: {told}")
        sizes: list[int] = told
        return sizes

    def _train(self, sizes: Sequence[int], reader: Reader | None) -> list[float]:
        plan, m = self.plan, self._settings.microbatches
        self._prove(len(sizes))
        cut = [pieces(size, m) for size in sizes]
        source = self._source(cut, reader)
        order = plan.order(len(sizes), self.rank)
        losses = self.train_window(order, cut, source.inputs, source.targets)
        source.close()
        told: list[float] = self._mesh.tell("the losses", losses, plan.placement[-1])
        return told

    def _source(self, cut: Sequence[Sequence[int]], reader: Reader | None) -> WindowSource:
        assert self._form is not None
        return WindowSource(self._mesh, self.plan.placement[-1], cut, self._form, reader)

    def _prove(self, batches: int) -> None:
        """Prove the program of a window of so many batches, if that has not been done."""
        plan = self.plan
        if batches not in plan.windows:
            assert isinstance(plan.windows, dict)
            plan.windows[batches] = prove(self._settings, self._schedule, batches)
            self.engine.bounds = {stage: plan.peaks(stage) for stage in self.stages}

    def _told(self, what: str, tally: Callable[[], Tally | None]) -> Tally | None:
        """Return the tally of the last stage's rank on every rank; None if nothing was counted."""
        if self._plan is None:
            return None
        mine = tally()
        data = None if mine is None else [mine.loss, mine.weight, mine.samples, mine.sums]
        told = Tally(*self._mesh.tell(what, data, self.plan.placement[-1]))
        return told if told.samples else None

    # The start

    def _begin(self, batch: tuple[Value, Value] | Exception | None) -> None:
        """Plan for the first batch (of rank 0), prove the task on it, and make this rank's stages."""
        told: Any = None
        if isinstance(batch, Exception):
            told = str(batch)
        elif batch is not None:
            form = Form(*map(Example.in_batch, batch))
            told = [form.to_json(), len(as_tuple(batch[0])[0])]
        told = self._mesh.tell("the first batch", told)
        if isinstance(batch, Exception):
            raise batch
        if told is None:
            return  # the loader is empty
        if isinstance(told, str):
            raise TrainingStopped(f"rank 0 stopped: {told}")
        form, size = Form.from_json(told[0]), told[1]
        m, model = self._settings.microbatches, self._model
        assert model is not None
        if size % m:
            raise ConfigError(
                f"microbatches={m} does not divide the first batch of {size} samples; choose a divisor of "
                f"it, or another batch size"
            )
        settings = replace(self._settings, batch_size=size)
        samples = Samples([size, size + m], [size // m, size // m + 1])
        plan = make_plan(replace(settings, window=1), self._schedule, copied(model), form.inputs, samples)
        error = ""
        if isinstance(batch, tuple):
            layer = plan.layers[-1]
            try:
                prove_task(self._task, layer.output, layer.name, cast_floats(batch[1], settings.dtype), None)
            except ConfigError as wrong:
                error = str(wrong)
        if error := self._mesh.tell("the task", error):
            raise ConfigError(error)
        self._settings, self._form = settings, form
        plan = replace(
            plan,
            settings=settings,
            boundaries=AnySize(plan.boundaries),
            evaluated=AnySize(plan.evaluated),
            windows=dict(plan.windows),
        )
        self._assemble(plan, model)
        self._model = None

    # What is left of a training

    def state_dict(self) -> dict[str, Tensor]:
        """Return the model's state_dict in host memory on rank 0, for plain PyTorch; empty on the others.

        All ranks must call it.
        """
        if self._model is not None:  # nothing has been trained
            return (
                {key: t.detach().clone() for key, t in self._model.state_dict().items()}
                if not self.rank
                else {}
            )
        mine: dict[str, Tensor] = {}
        for stage in self.stages.values():
            mine |= stage.module.state_dict()
        state = {}
        for key, (shape, dtype) in self._facts.items():
            owner = self.plan.placement[self._stage_of(key)]
            if owner == 0 and self.rank == 0:
                state[key] = mine[key].detach().cpu().clone()
            elif self.rank == 0:
                state[key] = self._receive(key, shape, dtype, owner)
            elif self.rank == owner:
                work = self._mesh.post_tensor(bytes_of(mine[key].detach().cpu()), 0)
                assert work is not None
                work.wait()
        return state

    def _receive(self, key: str, shape: tuple[int, ...], dtype: torch.dtype, owner: int) -> Tensor:
        made = torch.empty(shape, dtype=dtype)
        spec = bytes_of(made)
        got = self._mesh.take_tensor(f"{key} of the model", specs_of([spec])[0], owner)
        return got.view(dtype).reshape(shape)

    def _stage_of(self, key: str) -> int:
        layer = self._layers.index(key.partition(".")[0])
        return sum(cut <= layer for cut in self.plan.cuts)

    def save(self, folder: str | Path) -> Path:
        """Save the training's state under a folder that all ranks share; return the checkpoint's folder.

        `load` goes on from it, and `python -m pipetrain.export` makes plain weights of it. All ranks must
        call it. Raises TrainingStopped if a rank cannot write.
        """
        where = self._mesh, self.plan, self._conditions, self.feedback
        return direct.save(Path(folder), self.stages, *where, self.updates)

    def load(self, folder: str | Path) -> None:
        """Go on from the newest checkpoint under a folder, of any cuts and schedule, after the first batch.

        All ranks must call it. Raises ConfigError for a checkpoint of another model.
        """
        where = self._mesh, self.plan, self._conditions, self.feedback
        direct.restore(Path(folder), self.stages, *where, self._optimizer)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:  # after an error the other ranks may not come
            self.close()

    def close(self) -> None:
        """Leave the process groups, so that another Pipeline can be made. All ranks must call it."""
        global _open
        self._mesh.close()
        _open = None


def _refuse_second() -> None:
    if _open is not None and _open() is not None:
        raise ConfigError(
            "this process has a Pipeline already: call close() of that one before making another"
        )
