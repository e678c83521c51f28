"""The reference: one process, one loop, the weight delays that the theory gives. No schedule, no engine.

It keeps the weights after every update of a window and lets each stage of each microbatch read the version
that the theory says, all at once in one pass over the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pipetrain.config.rate import Rate
from pipetrain.correction import (
    Correction,
    GapAware,
    Joined,
    MomentumAhead,
    NesterovAhead,
    PipeMare,
    StepsAhead,
)
from pipetrain.data import Draw
from pipetrain.model.chain import Pop, Stash, network_of
from pipetrain.model.random_numbers import Seeds, drawing
from pipetrain.model.specs import Size, Value, as_tuple, named_layers
from pipetrain.plan.cut import cut_layers, homes
from pipetrain.plan.plan import Plan
from pipetrain.schedule.actions import has_norms
from pipetrain.tasks import Task

if TYPE_CHECKING:
    from tests.support.cases import Run
from tests.support.correction_equations import Late

Delay = Callable[[int, int], int]
"""(stage, microbatch of the window) -> the version that it reads, counted from the window's start."""
Piece = tuple[Value, Value]
"""The inputs and targets of a microbatch."""


def flush(stages: int, m: int) -> Delay:
    """layer_dist, GPipe, 1F1B: every batch reads what the batch before left."""
    return lambda stage, mb: mb // m


def pipedream(stages: int, m: int) -> Delay:
    """PipeDream (SOSP 2019): S-1-s microbatches are ahead of the newest finished backward."""
    return lambda stage, mb: max(0, mb - (stages - 1 - stage)) // m


def pipedream_2bw(stages: int, m: int) -> Delay:
    """PipeDream-2BW (ICML 2021): one update late, everywhere."""
    return lambda stage, mb: max(0, mb // m - 1)


def ssp(stages: int, m: int, buffer: Sequence[int] | None = None) -> Delay:
    """OneFlow's SSP: step t reads the weights after max(0, t - (buffer - 1)) updates; S-s versions."""
    held = buffer or range(stages, 0, -1)
    return lambda stage, mb: max(0, mb // m - (held[stage] - 1))


FLUSH = ("layer_dist", "gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zbv", "v_half", "v_min")
DELAYS = dict.fromkeys(FLUSH, flush) | {"pipedream": pipedream, "pipedream_2bw": pipedream_2bw, "ssp": ssp}

Read = Mapping[str, tuple[str, Callable[[int], int]]]
"""What a forward calls a weight -> the weight's name, and which version each microbatch reads."""


@dataclass
class Loop:
    """Trains a model, microbatch by microbatch with delayed weights.

    `loss_of`(weights, *more of a piece) is its mean loss; `rate`: of an update, as a fraction of the peak;
    `clip`: the most that the norm of the gradients of each of the lists `guard` may be; `average` follows
    the weights; `skip`: an update whose gradient is not finite is left out, with all that its batch changed.
    """

    model: nn.Module
    optimizer: Optimizer
    loss_of: Callable[..., Tensor]
    rate: Rate = lambda update: 1.0
    clip: float | None = None
    guard: Sequence[Sequence[nn.Parameter]] = ()
    average: AveragedModel | None = None
    skip: bool = False
    replicas: Replicas | None = None
    late: Late | None = None
    updates: int = 0

    def __post_init__(self) -> None:
        self._live = dict(self.model.named_parameters())
        self._peaks = [group["lr"] for group in self.optimizer.param_groups]
        self._parts: dict[str, Tensor] = {}  # of a microbatch's gradient, by the name that it has there

    def window(
        self, read: Read, batches: Iterable[Iterable[tuple[float, *tuple[Any, ...]]]]
    ) -> list[list[float]]:
        """Train on some batches of pieces, each of which begins with its share; return their losses."""
        history, mb, losses = [self._version()], 0, []
        for number_of_batch, batch in enumerate(batches):
            sums: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}  # by weight and version, for corrections
            delays = {}
            buffers = copied(dict(self.model.named_buffers()))
            kept = deepcopy(self.replicas and self.replicas.sets)
            losses.append([])
            for number, (share, *more) in enumerate(batch):
                delays = {
                    name: max(delays.get(name, 0), number_of_batch - version(mb))
                    for name, (_, version) in read.items()
                }
                versions = {
                    name: (of, history[version(mb)](of, number_of_batch - version(mb)))
                    for name, (of, version) in read.items()
                }
                if self.replicas:
                    self.replicas.enter(number, mb)
                losses[-1].append(self._differentiate(share, versions, more))
                if self.late:
                    self._take_apart(
                        versions, {name: version(mb) for name, (_, version) in read.items()}, sums
                    )
                if self.replicas:
                    self.replicas.leave(number, mb, len(as_tuple(more[0])[0]))
                mb += 1
            if self.late:
                self._put_together(sums)
            if not self._step(buffers, delays) and self.replicas:
                self.replicas.sets = kept
            history.append(self._version())
        return losses

    def _version(self) -> Callable[[str, int], Tensor]:
        """Return what gives a weight of now, as it is predicted some updates ahead."""
        if self.late:
            return self.late.after(self.updates)
        weights = copied(self._live)
        return lambda name, ahead: weights[name]

    def _take_apart(
        self,
        versions: Mapping[str, tuple[str, Tensor]],
        numbers: Mapping[str, int],
        sums: dict[tuple[str, int], tuple[Tensor, Tensor]],
    ) -> None:
        """Add the gradients to the sums of the versions that they are of."""
        for name, (of, used) in versions.items():
            gradient = self._parts.pop(name, None)
            if gradient is not None:
                key = of, numbers[name]
                sums[key] = (gradient + sums[key][0] if key in sums else gradient), used

    def _put_together(self, sums: Mapping[tuple[str, int], tuple[Tensor, Tensor]]) -> None:
        assert self.late is not None
        for (name, _), (gradient, used) in sums.items():
            weighed, p = self.late.weighed(name, gradient, used, self.updates), self._live[name]
            p.grad = weighed if p.grad is None else p.grad + weighed

    def _differentiate(
        self, share: float, versions: Mapping[str, tuple[str, Tensor]], piece: Iterable[Any]
    ) -> float:
        weights = {
            name: tensor.clone().requires_grad_(self._live[of].requires_grad)
            for name, (of, tensor) in versions.items()
        }
        loss = self.loss_of(weights, *piece)
        leaves = {name: w for name, w in weights.items() if w.requires_grad and share}
        grads = torch.autograd.grad(loss * share, [*leaves.values()], allow_unused=True) if share else ()
        for name, grad in zip(leaves, grads, strict=True):
            parameter = self._live[versions[name][0]]
            if grad is not None and self.late:
                self._parts[name] = grad
            elif grad is not None:
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        return loss.item()

    def _step(self, buffers: Mapping[str, Tensor], delays: Mapping[str, int]) -> bool:
        """Update; return False if it is left out. `delays`: of each weight's gradient."""
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * self.rate(self.updates)
        grads = [p.grad for p in self._live.values() if p.grad is not None]
        left_out = self.skip and not all(grad.isfinite().all() for grad in grads)
        if left_out:
            for name, buffer in self.model.named_buffers():
                buffer.copy_(buffers[name])
        else:
            for parameters in self.guard if self.clip is not None else ():
                nn.utils.clip_grad_norm_(parameters, self.clip)
            self._update(delays)
        if self.late:
            self.late.stepped(made=not left_out)
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update_parameters(self.model)
        self.updates += 1
        return not left_out

    def _update(self, delays: Mapping[str, int]) -> None:
        """Step, with the rate that each delay has."""
        if self.late is None:
            self.optimizer.step()
            return
        grads = {name: p.grad for name, p in self._live.items()}
        for delay in sorted({delays[name] for name in grads}):
            factor = self.late.factor(self.updates, delay)
            for name, p in self._live.items():
                p.grad = grads[name] if delays[name] == delay else None
                if delays[name] == delay:
                    self.late.factors[name] = factor
            for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
                group["lr"] = peak * self.rate(self.updates) * factor
            self.optimizer.step()


class Replicas:
    """The buffers of each replica of each stage, which sees its own microbatches.

    `counts`: of the stages, `homes`: the stage of each buffer. They take turns in each batch or, where
    forwards read old weights, in each window (`late`).
    """

    def __init__(self, model: nn.Module, counts: Sequence[int], homes: Mapping[str, int], late: bool) -> None:
        self._buffers = dict(model.named_buffers())
        self._counts, self._homes, self._late = counts, homes, late
        self._before = copied(self._buffers)
        self.sets = [[copied(self._buffers) for _ in range(count)] for count in counts]
        self._samples = [[0] * count for count in counts]

    def _turns(self, number: int, mb: int) -> list[int]:
        return [(mb if self._late else number) % count for count in self._counts]

    def enter(self, number: int, mb: int) -> None:
        turns = self._turns(number, mb)
        for name, buffer in self._buffers.items():
            stage = self._homes[name]
            buffer.copy_(self.sets[stage][turns[stage]][name])

    def leave(self, number: int, mb: int, samples: int) -> None:
        for stage, turn in enumerate(self._turns(number, mb)):
            self.sets[stage][turn] = copied(self._buffers)
            self._samples[stage][turn] += samples

    def level(self) -> None:
        """Before an evaluation: means weighted by samples, and sums of what counters have counted."""
        for name, buffer in self._buffers.items():
            stage = self._homes[name]
            sets, samples = [of[name] for of in self.sets[stage]], self._samples[stage]
            if buffer.is_floating_point():
                buffer.copy_(sum(t * n for t, n in zip(sets, samples, strict=True)) / sum(samples))
            else:
                buffer.copy_(self._before[name] + sum(t - self._before[name] for t in sets))
        self._before = copied(self._buffers)
        self.sets = [[copied(self._buffers) for _ in range(count)] for count in self._counts]
        self._samples = [[0] * count for count in self._counts]


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


class Reference:
    """A model trained as its plan says, in a Loop.

    A weight that several stages share is, in each of them, of that stage's version, and gets the sum of their
    gradients. With dropout the module is one part of all layers, which seeds them as every cut does.
    """

    def __init__(self, model: nn.Module, plan: Plan, task: Task, optimizer: Optimizer, rate: Rate) -> None:
        self.model, self.task, self._settings = model, task, plan.settings
        self._stages = stages_of(model, plan)
        self._part = None
        if any(isinstance(inner, nn.Dropout | nn.Dropout2d) and inner.p for inner in model.modules()):
            (whole,) = cut_layers({Size(1): plan.layers}, [], plan.example).slices
            self._part = network_of(model, plan.example).part(whole)
            self._takes = [made.number for made in whole.enters]
        guard: dict[int, list[nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            stage = 0 if has_norms(plan.window.program) else self._stages[name][1]
            guard.setdefault(stage, []).append(parameter)
        decay, clip = plan.settings.ema, plan.settings.clip_grad_norm
        self.average = decay and AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
        lists, skip = [*guard.values()], plan.settings.on_nan == "skip"
        counts, self.replicas = [len(ranks) for ranks in plan.placement], None
        if max(counts) > 1:
            stages = homes(network_of(model, plan.example), plan.cuts)
            self.replicas = Replicas(model, counts, stages, plan.draft.reads_late)
        how = rate, clip, lists, self.average or None, skip, self.replicas
        late, kind = None, kind_of(plan.settings.correction)
        if kind:
            late = Late(kind, dict(model.named_parameters()), optimizer, rate)
        self._loop = Loop(model, optimizer, self._loss_of, *how, late)

    def window(self, delay: Delay, batches: Sequence[Sequence[Piece]]) -> list[list[tuple[float, float]]]:
        """Train on batches of pieces; return the weight and the loss of each piece."""
        read = {alias: (name, partial(delay, stage)) for alias, (name, stage) in self._stages.items()}
        weights = [[float(self.task.weight(y)) for _, y in batch] for batch in batches]
        cut = [
            [
                (weight / sum(of), *piece, Seeds(self._settings.seed, update, number))
                for number, (weight, piece) in enumerate(zip(of, batch, strict=True))
            ]
            for update, (of, batch) in enumerate(zip(weights, batches, strict=True), self._loop.updates)
        ]
        losses = self._loop.window(read, cut)
        return [[*zip(*both, strict=True)] for both in zip(weights, losses, strict=True)]

    @torch.no_grad()
    def evaluated(self, batches: Iterable[Piece]) -> dict[str, float]:
        """Return the mean loss and the metrics, with averaged weights where there are some."""
        model, task = self.average.module if self.average else self.model, self.task
        if self.replicas:
            self.replicas.level()
            for own, level in zip(model.buffers(), self.model.buffers(), strict=True):
                own.copy_(level)
        loss, weight, sums = 0.0, 0.0, dict.fromkeys((metric.name for metric in task.metrics), 0)
        model.eval()
        for inputs, targets in batches:
            arguments, counts = _arguments(self.model, inputs), float(task.weight(targets))
            outputs = self._narrowed(lambda args, keywords: model(*args, **keywords), *arguments)
            loss += task.evaluation_loss(outputs, targets).item() * counts if counts else 0.0
            weight += counts
            for metric in task.metrics:
                sums[metric.name] += metric.sums(outputs, targets).double()
        model.train()
        mean = loss / weight
        return {"loss": mean} | {m.name: m.value(sums[m.name].tolist(), mean) for m in task.metrics}

    def _loss_of(self, weights: dict[str, Tensor], x: Value, y: Value, seeds: Seeds) -> Tensor:
        with drawing(seeds):
            if self._part is None:
                call = partial(functional_call, self.model, weights, tie_weights=False)
                outputs = self._narrowed(call, *_arguments(self.model, x))
            else:  # it has each weight once
                weights = {name: weights[name] for name, _ in self._part.named_parameters()}
                entered = tuple(as_tuple(x)[number] for number in self._takes)
                outputs = self._part.pack(functional_call(self._part.train(), weights, entered))
        return self.task.loss(outputs, y) if self.task.weight(y) else torch.zeros(())

    def _narrowed(self, call: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Tensor]) -> Any:
        narrow = self._settings.precision == "bf16"
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            outputs = call(args, keywords)
        return outputs.float() if narrow else outputs


def kind_of(correction: Correction) -> str:
    """Return the names of corrections as `Late` has them."""
    kinds = {StepsAhead: "steps", MomentumAhead: "momentum", NesterovAhead: "nesterov", PipeMare: "mare"}
    kinds |= {GapAware: "gap"}
    parts = correction.parts if isinstance(correction, Joined) else [correction]
    return "+".join(kinds[type(part)] for part in parts if type(part) in kinds)


def _arguments(model: nn.Module, inputs: Value) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    """Return with what a model is called; an nn.Sequential takes one value."""
    if isinstance(inputs, dict):
        return (), inputs
    one = isinstance(inputs, Tensor) or isinstance(model, nn.Sequential)
    return ((inputs,) if one else tuple(inputs)), {}


def stages_of(model: nn.Module, plan: Plan) -> dict[str, tuple[str, int]]:
    """Return the first name and the stage of each parameter; of a shared one by each of its names."""
    users: dict[str, list[int]] = {}
    for stage in range(plan.stages):
        layers = plan.stage_layers(stage)
        for name in dict.fromkeys(name for layer in layers for name in (*layer.weights, *layer.frozen)):
            users.setdefault(name, []).append(stage)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found = {}
    for aliases in names.values():
        using = users[aliases[0]]
        stages = using if len(using) > 1 else using * len(aliases)
        found |= {alias: (aliases[0], stage) for alias, stage in zip(aliases, stages, strict=True)}
    return found


@dataclass(frozen=True)
class Outcome:
    """What a training leaves: the whole state, and (train loss, val loss, score) of each epoch."""

    state: dict[str, Tensor]
    epochs: list[tuple[float, float, float]]


def train(model: nn.Sequential, run: Run, delays: Iterable[Delay], early: Mapping[int, int]) -> Outcome:
    """Train the epochs of a run; each window has a delay of its own.

    `early`: epochs of which a window was left after so many batches of the epoch.
    """
    settings, data, test = run.settings, run.data.train, run.data.test
    if settings.precision == "bf16":
        _narrow_at(model, run.plan.cuts)
    optimizer = run.optimizer(dict(model.named_parameters()).items())
    reference = Reference(model, run.plan, run.task, optimizer, settings.rate(run.updates))
    delay_of, outcomes = iter(delays), []
    ids = torch.arange(len(test))
    tested = [(test.inputs(ids, None), test.targets(ids, None))]
    for epoch in range(settings.epochs):
        draw = Draw(settings.seed, epoch)
        batches = [
            [(data.inputs(ids, draw), data.targets(ids, draw)) for ids in batch]
            for batch in run.sampler.epoch(epoch)
        ]
        batches = [batch for batch in batches if any(run.task.weight(y) for _, y in batch)]
        starts = {*range(0, len(batches), settings.window or len(batches)), early.get(epoch, 0)}
        starts = _shortened(starts, partial(_most, run, epoch * len(batches)), len(batches))
        found: list[tuple[float, float]] = []
        for start, end in pairwise([*starts, len(batches)]):
            found += chain(*reference.window(next(delay_of), batches[start:end]))
        counted = [both for both in found if both[0] and (isfinite(both[1]) or settings.on_nan != "skip")]
        loss = sum(weight * loss for weight, loss in counted) / sum(weight for weight, _ in counted)
        evaluated = reference.evaluated(tested)
        outcomes.append((loss, evaluated["loss"], evaluated[run.task.metrics[0].name]))
    return Outcome(copied(model.state_dict()), outcomes)


def _most(run: Run, first: int, done: int) -> int | None:
    return run.settings.correction.window(first + done, run.updates)


def _shortened(starts: Iterable[int], most: Callable[[int], int | None], end: int) -> list[int]:
    """Return where windows start that have at most so many batches, see Correction.window."""
    shorter, start = [], 0
    while start < end:
        shorter.append(start)
        start = min([end, *(n for n in starts if n > start), start + (most(start) or end)])
    return shorter


def _narrow_at(model: nn.Sequential, cuts: Sequence[int]) -> None:
    """Let what crosses a cut be in bf16: outputs of layers before it, and what is kept for a later stage."""
    layers = [layer for _, layer in named_layers(model)]
    for number, layer in enumerate(layers):
        if isinstance(layer, Pop):
            made = next(n for n, other in enumerate(layers) if other is layer.stash)
            if any(made < cut <= number for cut in cuts):
                layer.register_forward_pre_hook(_narrow_kept)
    for cut in cuts:
        layers[cut - 1].register_forward_hook(_narrow)
        if isinstance(layers[cut - 1], Stash):
            layers[cut - 1].register_forward_hook(_keep_narrow)


def _narrow_kept(pop: Pop, inputs: object) -> None:
    pop.stash._kept[:] = [_narrow(pop, inputs, kept) for kept in pop.stash._kept]  # type: ignore[arg-type]


def _keep_narrow(stash: Stash, inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
    """What the next layer and a later one use is narrowed once."""
    stash._kept[:] = [output]


def _narrow(layer: nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]) -> object:
    narrow = tuple(t.bfloat16() if t.dtype == torch.float32 else t for t in as_tuple(output))
    return narrow[0] if isinstance(output, Tensor) else narrow
