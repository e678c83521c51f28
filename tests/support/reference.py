"""The reference: one process, one loop, the weight delays that the theory gives. No schedule, no engine.

It keeps the weights after every update of a window and lets each stage of each microbatch read the version
that the theory says, all at once in one pass over the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pipetrain.data import Data, Draw, Sampler
from pipetrain.network.chain import Pop, Stash
from pipetrain.network.draws import Seeds, begin, drawing
from pipetrain.network.values import as_tuple, named_layers
from pipetrain.runtime.weights import OptimizerFactory

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


DELAYS = {
    "layer_dist": flush,
    "gpipe": flush,
    "1f1b": flush,
    "interleaved_1f1b": flush,
    "zb_h1": flush,
    "zb_h2": flush,
    "zbv": flush,
    "v_half": flush,
    "v_min": flush,
    "pipedream": pipedream,
    "pipedream_2bw": pipedream_2bw,
}


@dataclass(frozen=True)
class Outcome:
    """What a training leaves: the whole state, and (train loss, val loss, val accuracy) of each epoch."""

    state: dict[str, Tensor]
    epochs: list[tuple[float, float, float]]


@dataclass(frozen=True)
class Recipe:
    """What to train and how; `cuts` are the first layers of stages 1, 2, ..."""

    data: Data
    seed: int
    sampler: Sampler
    epochs: int
    microbatches: int
    window: int | None
    early: Mapping[int, int]  # epochs of which a window was left after so many batches of the epoch
    cuts: Sequence[int]
    optimizer: OptimizerFactory
    rate: Callable[[int], float]  # as a fraction of the peak
    label_smoothing: float = 0.0
    bf16: bool = False  # layers under autocast, and what crosses a cut cast to bf16
    clip: float | None = None  # the most that the norm of a gradient may be
    clip_by_stage: bool = False
    ema: float | None = None  # the decay of the average that is evaluated
    skip: bool = False  # an update whose gradient is not finite is left out, with all that its batch changed


Read = Mapping[str, tuple[str, Callable[[int], int]]]
"""What a forward calls a weight -> the weight's name, and which version each microbatch reads."""


def window(
    live: Mapping[str, nn.Parameter],
    read: Read,
    batches: Iterable[Iterable[tuple[float, *tuple[Any, ...]]]],
    loss_of: Callable[..., Tensor],
) -> Iterator[list[float]]:
    """Make the gradients of each batch of a window, which the caller then uses up; give its pieces' losses.

    Each piece begins with its share of the batch; `loss_of`(weights, *more) is its mean loss.
    """
    history, mb = [_copied(live)], 0
    for batch in batches:
        losses = []
        for share, *more in batch:
            weights = {
                alias: history[version(mb)][name].clone().requires_grad_(live[name].requires_grad)
                for alias, (name, version) in read.items()
            }
            loss = loss_of(weights, *more)
            leaves = {alias: w for alias, w in weights.items() if w.requires_grad and share}
            made = torch.autograd.grad(loss * share, [*leaves.values()], allow_unused=True) if share else ()
            for alias, grad in zip(leaves, made, strict=True):
                parameter = live[read[alias][0]]
                if grad is not None:
                    parameter.grad = grad if parameter.grad is None else parameter.grad + grad
            losses.append(loss.item())
            mb += 1
        yield losses
        history.append(_copied(live))


def by_stage(names: Iterable[str], cuts: Sequence[int], delay: Delay) -> Read:
    """Return what the layers of an nn.Sequential read."""
    return {name: (name, partial(delay, stage_of(name, cuts))) for name in names}


def stage_of(name: str, cuts: Sequence[int]) -> int:
    return sum(cut <= int(name.split(".", 1)[0]) for cut in cuts)


def train(model: nn.Sequential, recipe: Recipe, delays: Iterable[Delay]) -> Outcome:
    """Train in one plain loop; each window has a delay of its own."""
    if recipe.bf16:
        _narrow_at(model, recipe.cuts)
    for number, (_, layer) in enumerate(named_layers(model)):
        if any(isinstance(inner, nn.Dropout) and inner.p for inner in layer.modules()):
            layer.register_forward_pre_hook(partial(_draw, number))
    live = dict(model.named_parameters())
    optimizer = recipe.optimizer(live.items())
    peaks = [group["lr"] for group in optimizer.param_groups]
    delay_of = iter(delays)
    averaged = (
        None if recipe.ema is None else AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(recipe.ema))
    )
    update = 0
    outcomes = []
    for epoch in range(recipe.epochs):
        draw = Draw(recipe.seed, epoch)
        of = recipe.data.train.targets
        batches = [b for b in recipe.sampler.epoch(epoch) if _counting(of(torch.cat(b), draw))]
        length = recipe.window or len(batches)
        loss_sum, counted = 0.0, 0
        starts = sorted({*range(0, len(batches), length), recipe.early.get(epoch, 0)})
        for start, end in pairwise([*starts, len(batches)]):
            read = by_stage(live, recipe.cuts, next(delay_of))
            pieces = [_pieces(recipe, batch, draw, update + n) for n, batch in enumerate(batches[start:end])]
            buffers = _copied(dict(model.named_buffers()))
            each = window(live, read, pieces, partial(_loss_of, model, recipe))
            for batch, losses in zip(pieces, each, strict=True):
                for (share, _, y, _), loss in zip(batch, losses, strict=True):
                    if share and (isfinite(loss) or not recipe.skip):
                        loss_sum += loss * _counting(y)
                        counted += _counting(y)
                for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                    group["lr"] = peak * recipe.rate(update)
                grads = [p.grad for p in live.values() if p.grad is not None]
                if recipe.skip and not all(grad.isfinite().all() for grad in grads):
                    for name, buffer in model.named_buffers():
                        buffer.copy_(buffers[name])
                else:
                    if recipe.clip is not None:
                        for parameters in _clipped_together(live, recipe):
                            torch.nn.utils.clip_grad_norm_(parameters, recipe.clip)
                    optimizer.step()
                optimizer.zero_grad()
                if averaged is not None:
                    averaged.update_parameters(model)
                update += 1
                buffers = _copied(dict(model.named_buffers()))
        if averaged is not None:
            averaged.module.load_state_dict(dict(model.named_buffers()), strict=False)
        val_loss, val_acc = _evaluate(averaged.module if averaged is not None else model, recipe)
        outcomes.append((loss_sum / counted, val_loss, val_acc))
    return Outcome({name: t.detach().clone() for name, t in model.state_dict().items()}, outcomes)


def _pieces(recipe: Recipe, batch: Sequence[Tensor], draw: Draw, update: int) -> list[Any]:
    """(share, inputs, labels, seeds) of each microbatch."""
    inputs, targets = recipe.data.train.inputs, recipe.data.train.targets
    whole = _counting(targets(torch.cat(list(batch)), draw))
    parts = [(inputs(ids, draw), targets(ids, draw)) for ids in batch]
    return [(_counting(y) / whole, x, y, Seeds(recipe.seed, update, n)) for n, (x, y) in enumerate(parts)]


def _loss_of(model: nn.Module, recipe: Recipe, weights: Any, x: Any, y: Tensor, seeds: Seeds) -> Tensor:
    with drawing(seeds), torch.autocast("cpu", torch.bfloat16, enabled=recipe.bf16):
        scores = functional_call(model, weights, (x,))
    return _loss(scores.float() if recipe.bf16 else scores, y, recipe.label_smoothing)


def _clipped_together(live: dict[str, nn.Parameter], recipe: Recipe) -> list[list[nn.Parameter]]:
    stages: dict[int, list[nn.Parameter]] = {}
    for name, parameter in live.items():
        stages.setdefault(stage_of(name, recipe.cuts if recipe.clip_by_stage else ()), []).append(parameter)
    return list(stages.values())


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


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _evaluate(model: nn.Sequential, recipe: Recipe) -> tuple[float, float]:
    model.eval()
    ids = torch.arange(len(recipe.data.test))
    x, labels = recipe.data.test.inputs(ids, None), recipe.data.test.targets(ids, None)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=recipe.bf16):
        output = model(x)
    output = output.float() if recipe.bf16 else output
    model.train()
    right = output.argmax(1 if labels.dim() == 1 else -1) == labels
    return _loss(output, labels).item(), right[labels != IGNORED].double().mean().item()


def _counting(labels: Tensor) -> int:
    return int((labels != IGNORED).sum())


def _loss(scores: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """The mean over labels [n], or tokens [n, t], that are not padding."""
    classes = scores.shape[-1]
    return functional.cross_entropy(scores.view(-1, classes), labels.flatten(), label_smoothing=smoothing)
