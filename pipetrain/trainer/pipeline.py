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
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing import current_process
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pipetrain.checkpoint.epoch_record import Progress
from pipetrain.checkpoint.files import Manifest, Position
from pipetrain.checkpoint.rank_state import StatefulPart, parts_of, snapshot
from pipetrain.checkpoint.resume import read_source, saved_in
from pipetrain.checkpoint.writer import Writer
from pipetrain.config.build import Optim
from pipetrain.config.choices import conf_dir, names_of
from pipetrain.config.placement import spans
from pipetrain.config.rate import Rate
from pipetrain.config.settings import Settings
from pipetrain.data.reader import Loader, Reader
from pipetrain.errors import ConfigError
from pipetrain.exit import brief_methods
from pipetrain.model.deferred_init import Factory
from pipetrain.model.specs import Value
from pipetrain.plan.plan import Plan
from pipetrain.rules import COUNT, PATH
from pipetrain.runtime.comm.collectives import World
from pipetrain.runtime.stage.stage import Stage
from pipetrain.schedule.actions import Schedule
from pipetrain.schedule.text import counted
from pipetrain.schedule.timeline import StageStats
from pipetrain.signals import Stopping
from pipetrain.tasks import LossFunction, Metric, Task
from pipetrain.tasks.metrics import MetricFunction
from pipetrain.trainer.arguments import Arguments, read_draft, read_model, read_targets, read_task
from pipetrain.trainer.progress import ShowsProgress
from pipetrain.trainer.training_setup import Training
from pipetrain.trainer.window_loop import Pass, WindowResult, Windows

log = logging.getLogger("pipetrain")
PREDICTED_AT_ONCE = 8  # batches of a window of a prediction, whose outputs are kept until its end
_open: weakref.WeakSet[Pipeline] = weakref.WeakSet()  # the pipeline of this process, if it has one


def schedules() -> dict[str, str]:
    """Return the schedules that ship with pipetrain, by name, with what each is."""
    files = {name: conf_dir() / "schedule" / f"{name}.yaml" for name in names_of("schedule")}
    return {name: path.read_text().splitlines()[1].removeprefix("# ") for name, path in files.items()}


@brief_methods
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
    - `lr_schedule`: a function of the update number (0, 1, ...) -> fraction of the optimizer's rate; or of an
      optimizer -> torch scheduler of it, which is stepped once an update. None: as the program sets rates.
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
      of conf/codec), correction (a name of conf/correction, a Correction, or a list of them), and so on; and
      max_length, the largest length of batches that differ in one, or a list of those of each.
    - `settings`: all options, read before, in place of them.

    Raises ConfigError and ScheduleError for what cannot be trained as one process would train it.
    """

    def __init__(
        self,
        model: nn.Module | Factory,
        loss: LossFunction | Task | str | None = None,
        optimizer: Callable[[Any], Optimizer] | Optim | None = None,
        schedule: str | Path | Schedule = "1f1b",
        *,
        microbatches: int | None = None,
        window: int | None = None,
        task: Task | None = None,
        metrics: Sequence[Metric] | Mapping[str, MetricFunction] = (),
        weight: Callable[[Value], Tensor | float] | None = None,
        param_groups: Mapping[str, Mapping[str, Any]] | None = None,
        lr_schedule: Rate | Callable[[Optimizer], LRScheduler] | None = None,
        weights: str | Path | None = None,
        sample: Any = None,
        targets: str | Sequence[str] | None = None,
        dtype: torch.dtype | str | None = None,
        settings: Settings | None = None,
        **options: Any,
    ) -> None:
        _refuse_importing()
        _end_earlier()
        task = read_task(loss, task, metrics, weight, targets)
        named = read_targets(targets, task)
        seed = settings.seed if settings else options.get("seed")
        model, record = read_model(model, seed)
        keywords = {"microbatches": microbatches, "window": window, "dtype": dtype, **options}
        draft = read_draft(schedule, settings, keywords, model, World.current().size)
        request = Arguments.read(model, task, draft, optimizer, param_groups, lr_schedule)
        if draft.settings.threads is not None:
            torch.set_num_threads(draft.settings.threads)
        self._signals = Stopping(self, World.current().rank)
        self._training = Training(request, record, named, weights, seed)
        self._passes = 0  # of train
        _open.add(self)
        if sample is not None:
            try:
                self._training.begin(None if self.rank else Reader([sample], "sample= as batch", named=named))
            except Exception:  # on all ranks; nobody has this Pipeline to close it
                self.close()
                raise

    # What a program uses

    @property
    def plan(self) -> Plan:
        """The cuts, and the program of a window with what was proven of it; prints as pipetrain.plan does."""
        return (self._training.session or self._training.begun).plan

    def __repr__(self) -> str:
        training, settings, world = self._training, self._training.settings, self._training.groups.world
        state = "closed" if training.closed else counted(self.updates, "update")
        return (
            f"<Pipeline of {type(training.request.model).__name__}: {settings.schedule}, "
            f"{counted(settings.microbatches, 'microbatch')}, "
            f"stages on ranks {spans(training.groups.placement)}, rank {world.rank} of {world.size}, {state}>"
        )

    @property
    def rank(self) -> int:
        return self._training.rank

    @property
    def last_rank(self) -> int:
        """The rank of the last stage, which counts; of replicas the first."""
        return self._training.groups.placement[-1][0]

    @property
    def metrics(self) -> dict[str, float]:
        """Of the last pass of `train`: loss, the metrics, learning_rate and samples_per_s."""
        return self._training.metrics

    @property
    def updates(self) -> int:
        """The number of updates so far."""
        return self._training.updates

    @property
    def stopping(self) -> bool:
        """Whether a rank has got SIGTERM or Ctrl-C: the ranks exchange it after each window.

        From the first time that a program reads it these signals end it no longer: it is to save and to
        leave. A second Ctrl-C does, and `close` lets both do what they did before.
        """
        self._signals.listen()
        return self._training.stopping

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
        training = self._training
        window = COUNT.read("window", window, null=True) or training.settings.window
        samples, began, rate = 0, time.perf_counter(), self.metrics.get("learning_rate", training.request.lr)
        self._passes += 1
        with training.guard():
            training.take(Stage.take_trained)  # what steps, or a pass that was left, have counted
        for done in self._trained(loader, f"the training (pass {self._passes})", window):
            samples += sum(size.samples for size in done.sizes)
            rate = [rate, *done.rates][-1]
            yield from done.losses
        speed = samples / (time.perf_counter() - began)
        more = {"learning_rate": rate, "samples_per_s": speed}
        training.note_metrics(training.values("the metrics", Stage.take_trained, **more))

    def step(self, inputs: Any = None, targets: Any = None) -> float:
        """Train on one batch; return its mean loss on every rank. Only the tensors of rank 0 are read.

        `inputs` alone is a batch as a loader gives it: a pair, or a dict where `targets` names those.
        It is NaN where nothing in the batch counts, which is then skipped. Raises ConfigError for a schedule
        that does not flush, which needs several batches at once, and TrainingStopped as `train` does.
        """
        training = self._training
        if training.request.draft.reads_late:
            raise ConfigError(
                f"schedule {training.settings.schedule} is asynchronous, and a step of one batch would drain "
                f"it: use `for loss in pipe.train(loader)`, or a schedule that flushes, such as 1f1b"
            )
        batch = inputs if targets is None else (inputs, targets)
        for done in self._trained([batch], "the training by step()", 1):
            return done.losses[0]
        return math.nan

    def _trained(self, loader: Loader, what: str, window: int | None) -> Iterator[WindowResult]:
        """Train a pass of which the program looks at each window."""
        batches = self._training.batches(loader, trains=True)
        for done in self._run(Pass("training", what, batches, window)):
            self._training.note_stop(done.request == "stop")
            yield done

    def _run(self, this: Pass) -> Iterator[WindowResult]:
        training, session = self._training, self._training.begun
        shown = [] if self.rank else [ShowsProgress(training.bar, session, least=2)]
        return Windows(session, training.guard, self._signals, shown).run(this)

    def evaluate(self, loader: Loader) -> dict[str, float]:
        """Return the mean loss and the metrics over a loader, on every rank.

        With the newest weights, or with their moving average where the option `ema` keeps one.
        Raises ConfigError for a loader without batches, and TrainingStopped for a bad batch.
        """
        training, what = self._training, "the evaluation"
        with training.guard():
            training.take(Stage.take_evaluated)  # what an evaluation that failed has counted
        batches = training.batches(loader)
        window = batches.evaluated_at_once
        for _ in self._run(Pass("evaluation", what, batches, window, reads_ahead=True, look_every=1)):
            pass
        return training.values(what, Stage.take_evaluated)

    def predict(self, loader: Loader) -> Iterator[Any]:
        """Yield the model's outputs for each batch of a loader, in order and in host memory, on rank 0.

        The other ranks get None for each. `loader` yields inputs; targets beside them are not looked at. The
        model is in evaluation mode. Raises ConfigError for a loader without batches.
        """
        training = self._training
        pack, batches = training.begun.plan.layers[-1].output.pack, training.batches(loader, labelled=False)
        for done in self._run(Pass("prediction", "the prediction", batches, PREDICTED_AT_ONCE)):
            for window in done.windows:
                yield from [None] * window.done if self.rank else map(pack, window.outputs)

    # What is left of a training

    def state_dict(self, ema: bool = False) -> dict[str, Tensor]:
        """Return the model's state_dict in host memory on rank 0, for plain PyTorch; empty on the others.

        `ema`: with the moving average of the weights, where the option `ema` keeps one. All ranks must call
        it. Raises ConfigError for an average that is not there.
        """
        training = self._training
        if ema and (training.settings.ema is None or training.session is None or not self.updates):
            raise ConfigError("there is no moving average of the weights: give Pipeline ema=0.999, and train")
        training.settle("the state_dict")
        return training.whole.state_dict(ema)

    def collect(self) -> nn.Module:
        """Put the weights and buffers of all ranks into the model on rank 0, on the CPU; return the model.

        There it is whole, until training goes on, and another Pipeline may have it afterwards. On the other
        ranks it stays without numbers. All ranks must call it.
        """
        self._training.settle("what is collected")
        return self._training.whole.collect()

    def save(self, folder: str | Path, keep: int | None = None) -> Path:
        """Save the training's state under a folder that all ranks share; return the checkpoint's folder.

        `load` goes on from it, and `python -m pipetrain.export` makes plain weights of it. `keep`: how many
        of the newest checkpoints stay there, this one included; None: all. All ranks must call it. Raises
        TrainingStopped if a rank cannot write.
        """
        keep = COUNT.read("keep", keep, null=True)
        path, training = PATH.read("folder", folder).expanduser().absolute(), self._training
        session, groups = training.begun, training.groups
        with training.guard():
            session.engine.synchronize()
        with training.whole.stages_in_place():
            run = groups.broadcast("the name of what is saved", uuid.uuid4().hex)
            progress = Progress(stages={stage: StageStats() for stage in range(session.plan.stages)})
            at = Position(update=session.updates)
            pipeline = session.plan.pipeline
            manifest = Manifest(run, at, training.conditions, pipeline, training.config, progress)
            writer = Writer(path, groups, keep)
            writing = writer.save(manifest, partial(snapshot, session, groups, {}))
            writer.close()
        return writing.result()

    def load(self, folder: str | Path) -> None:
        """Go on from the newest checkpoint under a folder, or this one; of any cuts and schedule.

        Where a first save was cut short there is none to go on from, which a line says. Random numbers go on
        too: dropout draws by the seed of the training that was saved. All ranks must call it. Raises
        ConfigError, also for a checkpoint of another model.
        """
        training = self._training
        training.refuse_ended()
        path = PATH.read("folder", folder)

        def find() -> str | None:
            source = saved_in(path)
            if source is None:
                log.warning("pipetrain: %s has no whole checkpoint, so nothing is loaded", path)
            return str(source.folder) if source else None

        if newest := training.guard.on_first("the checkpoint to load", find):
            training.restore(read_source(Path(newest)))

    def dcp(self) -> dict[str, StatefulPart]:
        """Return what torch.distributed.checkpoint saves and loads: `dcp.save(pipe.dcp(), checkpoint_id=)`.

        Entries are `model`, `state` (of the optimizer) and `updates`, with the names of plain PyTorch.
        """
        training, session = self._training, self._training.begun
        session.engine.synchronize()
        session.average_buffers()
        training.whole.restore_stages()
        return parts_of(session, training.whole.keys)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *error: object) -> None:
        if isinstance(error[1], BaseException):
            self._training.guard.abandon(error[1])
        self.close()

    def close(self) -> None:
        """Leave the process groups, so that another Pipeline can be made. All ranks must call it.

        The weights of several ranks are lost but for what was collected or saved; one process leaves the
        model whole.
        """
        self._signals.close()
        if not self._training.closed:
            self._training.close()
            _open.discard(self)


def _refuse_importing() -> None:
    """Refuse a data worker that runs the whole program again as it starts. Raises ConfigError."""
    if getattr(current_process(), "_inheriting", False):  # as multiprocessing refuses to start one there
        raise ConfigError(
            f"{current_process().name} runs this program again as it starts, since a process that is not "
            f"forked, such as a data worker by spawn, imports the main file: put what trains under "
            f'`if __name__ == "__main__":`'
        )


def _end_earlier() -> None:
    """Close the Pipeline that this process has, as where a notebook's cell is run again.

    Raises ConfigError where there are several processes, which would have to do so together.
    """
    for earlier in list(_open):
        if World.current().size > 1:
            raise ConfigError(
                "this process has a Pipeline already: call close() of that one before making another"
            )
        earlier.close()
