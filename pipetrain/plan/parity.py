"""Compares some samples as one batch with the same samples in microbatches: loss and gradients must agree.

A batch trains by the sum of what its microbatches make, each weighted by what it counts for. That is what one
process makes of it only where no layer and no loss looks at several samples at once: not x - x.mean(0), a
term over the batch, or an embedding that scales by frequency. So some samples of the first batch run through
the whole model both ways, before anything is trained. BatchNorm and dropout are held, as in evaluation: in
training each microbatch has its own, as every pipeline's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pipetrain.network.draws import Beginning, Seeds, drawing
from pipetrain.network.network import Network, Part, evaluating, run_parts
from pipetrain.network.places import named_tensors
from pipetrain.network.values import Value, as_tuple, cast_floats
from pipetrain.plan.plan import Plan
from pipetrain.tasks import ModelLoss, Task, WeightFunction, counted_for
from pipetrain.tasks.trial import part_of

MOST_WORK = 2e9  # floating-point operations of a sample's forward: a second in all
ENOUGH_WORK = 2e9  # of all samples, for which there are more than two
MOST_SAMPLES = 8
LOSS = "the loss"
FLOAT32 = torch.finfo(torch.float32).eps

Made = dict[str, Tensor]
"""The loss, and gradients by the names of parameters."""


def parity(plan: Plan, network: Network, task: Task, inputs: Value, targets: Value) -> str:
    """Say why microbatches would train a model otherwise than a batch; "" if they would not.

    `inputs`, `targets`: of the first batch, in host memory. What is too large, is not here as a whole, or
    does not run alone on a CPU is not compared.
    """
    work = sum(layer.flops for layer in plan.layers) / plan.settings.full
    n = min(len(as_tuple(targets)[0]), max(2, min(MOST_SAMPLES, int(ENOUGH_WORK / max(1.0, work)))))
    meta = any(tensor.is_meta for tensor in named_tensors(network.model).values())
    if plan.settings.microbatches == 1 or n < 2 or meta or work > MOST_WORK:
        return ""
    twin = network.spare()
    parts = [twin.part(*both) for both in zip(plan.cut.slices, plan.evaluation_cut.slices, strict=True)]
    dtype = plan.settings.data_dtype
    inputs, targets = (cast_floats(part_of(value, 0, n), dtype) for value in (inputs, targets))
    found: list[str] = []
    for weight in task.weights if isinstance(task, ModelLoss) else [task.weight]:
        try:
            with Beginning().again(), drawing(Seeds(0, 0, 0)), evaluating(*parts):
                whole = _made(parts, task, weight, inputs, targets, [n])
                pieces = _made(parts, task, weight, inputs, targets, [n // 2, n - n // 2])
        except Exception:  # a model may run on another device alone, and a user's code may raise anything
            continue
        if not (differs := _difference(whole, pieces)):
            return ""
        found.append(differs)
    if not found:
        return ""
    return (
        f"of {n} samples of the first batch {found[0]}: a layer or the loss looks at several samples at "
        f"once, as x - x.mean(0), a term over the batch or scale_grad_by_freq=True does, or the loss is no "
        f"mean over what counts. Let each sample count for itself, and give weight=, a function of the "
        f"targets that says what they count for; or set microbatches=1"
    )


def _made(
    parts: Sequence[Part], task: Task, weight: WeightFunction, inputs: Value, targets: Value, sizes: list[int]
) -> Made:
    """Return what microbatches of these sizes make together."""
    named = {p: name for part in parts for name, p in part.named_parameters() if p.requires_grad}
    total, made, start = counted_for(weight, targets), Made(), 0
    for size in sizes:
        some, wanted = (part_of(value, start, start + size) for value in (inputs, targets))
        start += size
        share = counted_for(weight, wanted) / total if total else 0.0
        if not share:
            continue
        outputs = run_parts(parts, [t.clone() for t in as_tuple(some)])
        loss = share * task.loss(parts[-1].pack(outputs), wanted)
        grads = torch.autograd.grad(loss, list(named), allow_unused=True)
        made[LOSS] = made.get(LOSS, 0) + loss.detach()
        for name, grad in zip(named.values(), grads, strict=True):
            if grad is not None:
                made[name] = made.get(name, 0) + grad.to_dense()
    return made


def _difference(whole: Made, pieces: Made) -> str:
    """Say what differs by more than rounding; "" if nothing does, or nothing can be told."""
    if not all(t.isfinite().all() for made in (whole, pieces) for t in made.values()):
        return ""
    sizes = {name: float(t.abs().max()) for name, t in whole.items() if t.numel()}
    largest = max((size for name, size in sizes.items() if name != LOSS), default=0.0)
    for name, size in sizes.items():
        one, other = whole[name], pieces.get(name, torch.zeros_like(whole[name]))
        rounding = math.sqrt(max(torch.finfo(one.dtype).eps, FLOAT32))  # a model may compute a part in it
        # Of a weight whose gradient is next to nothing, as a key's bias, there is only rounding to see.
        limit = 0.3 * rounding * size if name == LOSS else 3 * rounding * max(size, 1e-3 * largest)
        off = float((one - other).abs().max())
        if off > limit:
            what = LOSS if name == LOSS else f"the gradient of {name}"
            return f"{what} as one batch and in microbatches differ by {off:.3g}, of {size:.3g}"
    return ""
