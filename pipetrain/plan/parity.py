"""Compares, before anything is trained, the stages with the model, and a batch with its microbatches.

Some samples of the first batch run through the model as it was given and through its stages, which must make
the same of them: layers of one process may share more than what they return, and a trace holds
nothing but operations. Then they run through the stages as one batch and in pieces, whose loss and gradients
must be equal. So it is only where no layer and no loss looks at several samples at once: not x - x.mean(0), a
term over the batch, or an embedding that scales by frequency. There BatchNorm and dropout are held, as in
evaluation, and other draws the same: in training each microbatch has its own, as every pipeline's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipetrain.errors import ConfigError, one_line
from pipetrain.model.chain import Chain
from pipetrain.model.network import Network, Part, evaluating, run_parts
from pipetrain.model.random_numbers import RngSnapshot
from pipetrain.model.specs import Value, as_tuple, cast_floats, on_each
from pipetrain.model.tensor_access import named_tensors, names_by_id, places, replace, standing_in
from pipetrain.model.trial_tensors import TOLERANCE, Results, difference, graph_of, results
from pipetrain.plan.cost_estimate import fake_mode
from pipetrain.plan.plan import Plan
from pipetrain.tasks import Task
from pipetrain.tasks.trial import part_of, pieces_differ

MOST_WORK = 2e9  # floating-point operations of a sample's forward: a second in all
MOST_OF_A_CHAIN, MOST_OF_A_TRACE = 5e8, 1e10  # where stages are compared with the model
ENOUGH_WORK = 2e9  # of all samples, for which there are more than two
MOST_SAMPLES = 8
COARSE = 5e-2  # relative, in half precision; a module may choose another kernel for the same function
_HALF = (torch.bfloat16, torch.float16)


def compare_stages(plan: Plan, network: Network, inputs: Value) -> None:
    """Refuse stages that do not make what the model does of two samples. Raises ConfigError.

    `inputs`: of the first batch, in host memory. Outputs, gradients and buffers are compared, in training and
    in evaluation, where the model is here as a whole, is not too dear, and runs alone.
    """
    chain = isinstance(network, Chain)
    twin, work = network.spare(), _work(plan)
    if _on_meta(network) or work > (MOST_OF_A_CHAIN if chain else MOST_OF_A_TRACE):
        return
    if chain and (twin is network or not plan.cuts):
        return
    model, parts = twin.model, _parts(plan, twin)
    try:
        stages = [deepcopy(part) for part in parts] if chain else parts
    except Exception:  # a layer may hold anything
        return
    tensors = as_tuple(_some_of(inputs, 2, plan))
    own = {id(weight): name for name, weight in model.named_parameters()}
    names = {name: own[id(weight)] for name, weight in model.named_parameters(remove_duplicate=False)}
    both = nn.ModuleList([model, *stages])
    buffers = {id(buffer): buffer for buffer in both.buffers()}
    held = [(*place, place.tensor) for place in places(both) if id(place.tensor) in buffers]

    def of(run: Callable[[list[Tensor]], Any], modules: Sequence[nn.Module], training: bool) -> Results:
        copies = {key: buffer.clone() for key, buffer in buffers.items()}
        for container, key, buffer in held:
            container[key] = copies[id(buffer)]
        mode = nullcontext() if training else evaluating(*modules)
        with RngSnapshot().replayed(), mode, plan.numerics.context("cpu"):
            return results(lambda: run([t.clone() for t in tensors]), modules, training, names)

    with standing_in(both, {}):
        for training in (True, False):
            try:
                whole = of(partial(twin.run, plan.example), [model], training)
            except Exception:  # it does not take these, or not on this device
                return
            try:
                over = of(partial(run_parts, stages, enters=Tensor.clone), stages, training)
                coarse = plan.numerics.autocast or any(t.dtype in _HALF for t in over.values())
                tolerance = COARSE if coarse else TOLERANCE
                why = difference(whole, over, tolerance, dtypes=not plan.numerics.autocast)
            except Exception as error:
                why = one_line(error)[:200]
            if why:
                mode = "training" if training else "evaluation"
                raise ConfigError(
                    f"over stages the model would not compute in {mode} what it does in one process: {why}; "
                    f"{network.way_out}"
                )


def compare_loss(plan: Plan, network: Network, task: Task, inputs: Value, targets: Value) -> bool:
    """Refuse a loss that depends on more than the model's outputs and its stage has. Raises ConfigError.

    Return whether it could be computed, of an own one.

    After a forward it gets the outputs without their graph. Behind the layers of its stage it may read from
    the model what they keep of their forward, unless they are traced, and the weights that they have. A
    forward that is dear runs without numbers.
    """
    model, parts, traced = network.model, _parts(plan, network), not isinstance(network, Chain)
    if task.is_known or _on_meta(network):
        return False
    mode = fake_mode() if _work(plan) > MOST_OF_A_TRACE else None

    def like(tensor: Tensor) -> Tensor:
        other = mode.from_tensor(tensor.detach()) if mode else tensor.detach()
        return other.requires_grad_() if tensor.requires_grad else other.clone()  # it may be a buffer

    names = names_by_id(model)
    here = {id(p) for p in parts[-1].parameters()}
    kept, read = ({id(t): like(t) for t in named_tensors(model).values()} for _ in range(2))
    few = [_some_of(value, 2, plan) for value in (inputs, targets)]
    try:
        with RngSnapshot().replayed(), standing_in(model, kept), mode or nullcontext():
            tensors, wanted = as_tuple(on_each(few[0], like)), on_each(few[1], like)
            if traced:
                outputs = network.run(plan.example, tensors)
            else:
                outputs = parts[-1].pack(run_parts(parts, tensors, enters=lambda t: t.detach().clone()))
            replace([model], {id(kept[key]): other for key, other in read.items()})
            loss = task.loss(on_each(outputs, Tensor.detach), wanted)
        leaves = {id(getattr(node, "variable", None)) for node in graph_of(loss)}
    except Exception:  # the model may run on another device alone, and a user's code may raise anything
        return False
    for key, name in names.items():
        if id(kept[key]) in leaves and (traced or key not in here):
            where = "a trace does not keep" if traced else "another stage has"
            raise ConfigError(
                f"the loss depends on what a layer keeps of its forward, such as an auxiliary loss in an "
                f"attribute (by the weight {name}), which {where}: let the model return it beside its "
                f"outputs, and the loss take it from there"
            )
        if id(read[key]) in leaves and key not in here:
            raise ConfigError(
                f"the loss has a term of the weight {name}, and the last stage, which computes it, does not "
                f"have that: let the model compute the term and return it beside its outputs, or train in "
                f"one stage"
            )
        if key in leaves:
            raise ConfigError(
                f"the loss holds the parameter {name} itself, and each weight version is a parameter of its "
                f"own: let it read that from the model whenever it is called, as by model.parameters()"
            )
    return not loss.dim()


def parity(plan: Plan, network: Network, task: Task, inputs: Value, targets: Value) -> str:
    """Say why microbatches would train a model otherwise than a batch; "" if they would not.

    `inputs`, `targets`: of the first batch, in host memory. What is too large, is not here as a whole, or
    does not run alone on a CPU is not compared.
    """
    work = _work(plan)
    n = min(len(as_tuple(targets)[0]), max(2, min(MOST_SAMPLES, int(ENOUGH_WORK / max(1.0, work)))))
    if plan.settings.microbatches == 1 or n < 2 or _on_meta(network) or work > MOST_WORK:
        return ""
    network = network if isinstance(network, Chain) else network.spare()  # a loss may read a chain's layers
    parts, buffers = _parts(plan, network), {id(t): t.clone() for t in network.model.buffers()}
    inputs, targets = (_some_of(value, n, plan) for value in (inputs, targets))
    leaves: dict[Tensor, str] = {
        p: name for part in parts for name, p in part.named_parameters() if p.requires_grad
    }

    def loss_of(start: int, end: int) -> Tensor:
        outputs = run_parts(parts, [t.clone() for t in as_tuple(part_of(inputs, start, end))])
        return task.loss(parts[-1].pack(outputs), part_of(targets, start, end))

    try:
        with standing_in(network.model, buffers), evaluating(*parts):
            differs = pieces_differ(loss_of, task.weight, targets, leaves)
    except Exception:  # a model may run on another device alone, and a user's code may raise anything
        return ""
    return differs and f"of {n} samples of the first batch {differs}"


def _work(plan: Plan) -> float:
    """Return the floating-point operations of a sample's forward."""
    return sum(layer.flops for layer in plan.layers) / plan.settings.full.samples


def _some_of(value: Value, samples: int, plan: Plan) -> Value:
    """Return the first samples of a batch as the model gets them."""
    return cast_floats(part_of(value, 0, samples), plan.settings.data_dtype)


def _on_meta(network: Network) -> bool:
    return any(tensor.is_meta for tensor in named_tensors(network.model).values())


def _parts(plan: Plan, network: Network) -> list[Part]:
    return [network.part(*both) for both in zip(plan.cut.slices, plan.evaluation_cut.slices, strict=True)]
