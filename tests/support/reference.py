"""The reference: one process, one loop, the weight delays that the theory gives. No schedule, no engine.

It keeps the weights after every update of a window and lets each stage of each microbatch read the version
that the theory says, all at once in one pass over the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pipetrain.data import Draw
from pipetrain.network.chain import Pop, Stash
from pipetrain.network.draws import Seeds, begin, drawing
from pipetrain.network.values import as_tuple, named_layers
from pipetrain.schedule.actions import has_norms
from pipetrain.settings import Settings
from tests.support.runs import Run

IGNORED = -100  # a label that does not count

Delay = Callable[[int, int], int]
"""(stage, microbatch of the window) -> the version that it reads, counted from the window's start."""


def flush(stages: int, m: int) -> Delay:
    """layer_dist, GPipe, 1F1B: every batch reads what the batch before left."""
    return lambda stage, mb: mb // m


def pipedream(stages: int, m: int) -> Delay:
    """PipeDream (SOSP 2019): S-1-s microbatches are ahead of the newest finished backward."""
    return lambda stage, mb: max(0, mb - (stages - 1 - stage)) // m


def pipedream_2bw(stages: int, m: int) -> Delay:
    """PipeDream-2BW (ICML 2021): one update late, everywhere."""
    return lambda stage, mb: max(0, mb // m - 1)


FLUSH = ("layer_dist", "gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zbv", "v_half", "v_min")
DELAYS = dict.fromkeys(FLUSH, flush) | {"pipedream": pipedream, "pipedream_2bw": pipedream_2bw}


@dataclass(frozen=True)
class Outcome:
    """What a training leaves: the whole state, and (train loss, val loss, val accuracy) of each epoch."""

    state: dict[str, Tensor]
    epochs: list[tuple[float, float, float]]


Read = Mapping[str, tuple[str, Callable[[int], int]]]
"""What a forward calls a weight -> the weight's name, and which version each microbatch reads."""


@dataclass
class Loop:
    """Trains a model, microbatch by microbatch with delayed weights.

    `loss_of`(weights, *more of a piece) is its mean loss; `rate`: of an update, as a fraction of the peak;
    `clip`: the most that the norm of the gradients of each of the lists `together` may be; `average` follows
    the weights; `skip`: an update whose gradient is not finite is left out, with all that its batch changed.
    """

    model: nn.Module
    optimizer: Optimizer
    loss_of: Callable[..., Tensor]
    rate: Callable[[int], float] = lambda update: 1.0
    clip: float | None = None
    together: Sequence[Sequence[nn.Parameter]] = ()
    average: AveragedModel | None = None
    skip: bool = False
    updates: int = 0

    def __post_init__(self) -> None:
        self._live = dict(self.model.named_parameters())
        self._peaks = [group["lr"] for group in self.optimizer.param_groups]

    def window(
        self, read: Read, batches: Iterable[Iterable[tuple[float, *tuple[Any, ...]]]]
    ) -> list[list[float]]:
        """Train on some batches of pieces, each of which begins with its share; return their losses."""
        history, mb, losses = [copied(self._live)], 0, []
        for batch in batches:
            buffers = copied(dict(self.model.named_buffers()))
            losses.append([])
            for share, *more in batch:
                versions = {name: (of, history[version(mb)][of]) for name, (of, version) in read.items()}
                losses[-1].append(self._differentiate(share, versions, more))
                mb += 1
            self._step(buffers)
            history.append(copied(self._live))
        return losses

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
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        return loss.item()

    def _step(self, buffers: Mapping[str, Tensor]) -> None:
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * self.rate(self.updates)
        grads = [p.grad for p in self._live.values() if p.grad is not None]
        if self.skip and not all(grad.isfinite().all() for grad in grads):
            for name, buffer in self.model.named_buffers():
                buffer.copy_(buffers[name])
        else:
            for parameters in self.together if self.clip is not None else ():
                nn.utils.clip_grad_norm_(parameters, self.clip)
            self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update_parameters(self.model)
        self.updates += 1


def drops(module: nn.Module) -> bool:
    """Whether it draws random numbers in training."""
    return any(isinstance(inner, nn.Dropout) and inner.p for inner in module.modules())


def average_of(model: nn.Module, decay: float | None) -> AveragedModel | None:
    return None if decay is None else AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))


def by_stage(names: Iterable[str], cuts: Sequence[int], delay: Delay) -> Read:
    """Return what the layers of an nn.Sequential read."""
    return {name: (name, partial(delay, stage_of(name, cuts))) for name in names}


def stage_of(name: str, cuts: Sequence[int]) -> int:
    return sum(cut <= int(name.split(".", 1)[0]) for cut in cuts)


def grouped(live: Mapping[str, nn.Parameter], stage_of: Callable[[str], int]) -> list[list[nn.Parameter]]:
    """Return the parameters of each stage."""
    stages: dict[int, list[nn.Parameter]] = {}
    for name, parameter in live.items():
        stages.setdefault(stage_of(name), []).append(parameter)
    return list(stages.values())


def train(model: nn.Sequential, run: Run, delays: Iterable[Delay], early: Mapping[int, int]) -> Outcome:
    """Train the epochs of a run; each window has a delay of its own.

    `early`: epochs of which a window was left after so many batches of the epoch.
    """
    settings, cuts, data = run.settings, run.plan.cuts, run.data.train
    if settings.precision == "bf16":
        _narrow_at(model, cuts)
    for number, (_, layer) in enumerate(named_layers(model)):
        if drops(layer):
            layer.register_forward_pre_hook(partial(_draw, number))
    live, average = dict(model.named_parameters()), average_of(model, settings.ema)
    norms = () if has_norms(run.plan.window.program) else cuts
    optimizer, rate = run.optimizer(live.items()), settings.rate(run.updates)
    loop = Loop(
        *(model, optimizer, partial(_loss_of, model, settings), rate, settings.clip_grad_norm),
        *(grouped(live, partial(stage_of, cuts=norms)), average, settings.on_nan == "skip"),
    )
    delay_of, outcomes = iter(delays), []
    for epoch in range(settings.epochs):
        draw = Draw(settings.seed, epoch)
        batches = [b for b in run.sampler.epoch(epoch) if _counting(data.targets(torch.cat(b), draw))]
        starts = sorted({*range(0, len(batches), settings.window or len(batches)), early.get(epoch, 0)})
        loss_sum, counted = 0.0, 0
        for start, end in pairwise([*starts, len(batches)]):
            first = loop.updates - start
            pieces = [
                _pieces(data, batches[n], draw, partial(Seeds, settings.seed, first + n))
                for n in range(start, end)
            ]
            found = loop.window(by_stage(live, cuts, next(delay_of)), pieces)
            for (share, _, y, _), loss in zip(chain(*pieces), chain(*found), strict=True):
                if share and (isfinite(loss) or not loop.skip):
                    loss_sum += loss * _counting(y)
                    counted += _counting(y)
        if average is not None:
            average.module.load_state_dict(dict(model.named_buffers()), strict=False)
        evaluated = _evaluate(model if average is None else average.module, run)
        outcomes.append((loss_sum / counted, *evaluated))
    return Outcome(copied(model.state_dict()), outcomes)


def _pieces(data: Any, batch: Sequence[Tensor], draw: Draw, seeds: Callable[[int], Seeds]) -> list[Any]:
    """(share, inputs, labels, seeds) of each microbatch."""
    whole = _counting(data.targets(torch.cat(list(batch)), draw))
    parts = [(data.inputs(ids, draw), data.targets(ids, draw)) for ids in batch]
    return [(_counting(y) / whole, x, y, seeds(n)) for n, (x, y) in enumerate(parts)]


def _loss_of(model: nn.Module, settings: Settings, weights: Any, x: Any, y: Tensor, seeds: Seeds) -> Tensor:
    with drawing(seeds):
        scores = _scores(partial(functional_call, model, weights), (x,), settings)
    return _loss(scores, y, settings.label_smoothing)


def _scores(call: Callable[..., Tensor], given: Any, settings: Settings) -> Tensor:
    narrow = settings.precision == "bf16"
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        scores = call(given)
    return scores.float() if narrow else scores


def _draw(number: int, layer: nn.Module, inputs: object) -> None:
    begin(number)


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


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _evaluate(model: nn.Sequential, run: Run) -> tuple[float, float]:
    model.eval()
    ids = torch.arange(len(run.data.test))
    labels = run.data.test.targets(ids, None)
    with torch.no_grad():
        output = _scores(model, run.data.test.inputs(ids, None), run.settings)
    model.train()
    right = output.argmax(1 if labels.dim() == 1 else -1) == labels
    return _loss(output, labels).item(), right[labels != IGNORED].double().mean().item()


def _counting(labels: Tensor) -> int:
    return int((labels != IGNORED).sum())


def _loss(scores: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """The mean over labels [n], or tokens [n, t], that are not padding."""
    classes = scores.shape[-1]
    return functional.cross_entropy(scores.view(-1, classes), labels.flatten(), label_smoothing=smoothing)
