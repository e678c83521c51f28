"""Compares, before anything is trained, the stages with the model, and a batch with its microbatches.

Some samples of the first batch run through the model as it was given and through its stages, which must make
the same of them: layers of one process may share more than what they return, and a trace holds nothing but
operations. A loss may read what its stage has. Then the samples run through the stages as one batch and in
pieces, whose loss and gradients must be equal. So it is only where no layer and no loss looks at several
samples at once: not x - x.mean(0), a term over the batch, or an embedding that scales by frequency. There
BatchNorm and dropout are held, as in evaluation, and other draws the same: in training each microbatch has
its own, as every pipeline's.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from copy import deepcopy
from functools import partial
from operator import setitem
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipetrain.errors import ConfigError, one_line
from pipetrain.model.chain import Chain
from pipetrain.model.network import Network, Part, evaluating, run_parts
from pipetrain.model.packing import state_of
from pipetrain.model.random_numbers import RngSnapshot
from pipetrain.model.results import Results, add_gradients, difference
from pipetrain.model.specs import Value, as_tuple, cast_floats, leaves_of, on_each
from pipetrain.model.tensor_places import (
    Held,
    attributes_of,
    in_place_of,
    named_tensors,
    names_by_id,
    places,
    replace,
    standing_in,
)
from pipetrain.model.trial_tensors import graph_of
from pipetrain.plan.cost_estimate import fake_mode
from pipetrain.plan.plan import Plan
from pipetrain.tasks import Task
from pipetrain.tasks.trial import APART, part_of, pieces_differ

MOST_WORK = 2e9  # floating-point operations of a sample's forward: a second in all
MOST_OF_A_CHAIN, MOST_OF_A_TRACE = 5e8, 1e10  # where stages are compared with the model by numbers
ENOUGH_WORK = 2e9  # of all samples, for which there are more than two
MOST_SAMPLES = 8
COARSE = 5e-2  # relative, in half precision: a trace may choose another kernel for the same function


def compare_stages(plan: Plan, network: Network, inputs: Value) -> None:
    """Refuse stages that do not make what the model does of two samples. Raises ConfigError.

    `inputs`: of the first batch, in host memory. Outputs, gradients and buffers are compared, in training and
    in evaluation, where the model is here as a whole, is not too expensive, and runs alone on a CPU; of an
    nn.Sequential copies run, as its layers may keep anything, so it has to be one that can be copied.
    """
    chain = isinstance(network, Chain)
    twin = network.spare()
    if _on_meta(network) or _work(plan) > (MOST_OF_A_CHAIN if chain else MOST_OF_A_TRACE):
        return
    if chain and (twin is network or not plan.cuts):
        return
    model, parts = twin.model, _parts(plan, twin)
    try:
        stages = [deepcopy(part) for part in parts] if chain else parts
    except Exception:  # a layer may hold anything
        return
    tensors = as_tuple(_some_of(inputs, 2, plan))
    first = {id(weight): name for name, weight in model.named_parameters()}
    names = {name: first[id(weight)] for name, weight in model.named_parameters(remove_duplicate=False)}
    both = nn.ModuleList([model, *stages])
    buffers = {id(buffer): buffer for buffer in both.buffers()}
    buffer_places = [(*place, place.tensor) for place in places(both) if id(place.tensor) in buffers]

    def results_of(
        run: Callable[[list[Tensor]], Any], modules: Sequence[nn.Module], training: bool
    ) -> Results:
        copies = {key: buffer.clone() for key, buffer in buffers.items()}
        for container, key, buffer in buffer_places:
            container[key] = copies[id(buffer)]
        mode = nullcontext() if training else evaluating(*modules)
        with RngSnapshot().replayed(), mode, plan.numerics.context("cpu"):
            return _results(lambda: run([t.clone() for t in tensors]), modules, training, names)

    with standing_in(both, {}):
        for training in (True, False):
            try:
                whole = results_of(partial(twin.run, plan.example), [model], training)
            except Exception:  # it does not take these, or not on this device
                return
            try:
                over_stages = results_of(partial(run_parts, stages, enters=Tensor.clone), stages, training)
                why = difference(whole, over_stages, lowered=plan.numerics.autocast, most=COARSE)
            except Exception as error:
                why = one_line(error)[:200]
            if why:
                mode = "training" if training else "evaluation"
                over, given = "over stages", "it does in one process"
                if not plan.cuts:
                    over, given = "layer by layer", "its own forward does"
                raise ConfigError(
                    f"{over} the model would not compute in {mode} what {given}: {why}; {network.way_out}"
                )


def _results(
    run: Callable[[], Any], modules: Sequence[nn.Module], training: bool, names: Mapping[str, str]
) -> Results:
    """Return the results of a run of modules; the gradients are those of a weighted sum of the outputs.

    `names`: the names of parameters in the results.
    """
    torch.default_generator.manual_seed(0)
    with torch.set_grad_enabled(training):
        outputs = leaves_of(run())
        results = {f"output {number}": tensor.detach() for number, tensor in enumerate(outputs)}
        roots = [tensor for tensor in outputs if tensor.requires_grad]
        weights: dict[Tensor, str] = {
            p: names[name] for module in modules for name, p in module.named_parameters() if p.requires_grad
        }
        torch.default_generator.manual_seed(1)
        add_gradients(results, roots, weights, list(map(_drawn, roots)))
    for module in modules:
        results |= {f"buffer {name}": buffer.clone() for name, buffer in module.named_buffers()}
    return results


def _drawn(tensor: Tensor) -> Tensor:
    """Return random numbers like a tensor, the same in every precision, as autocast may choose another."""
    exact = torch.complex128 if tensor.is_complex() else torch.float64
    return torch.rand_like(tensor, dtype=exact).to(tensor.dtype)


def compare_loss(plan: Plan, network: Network, task: Task, inputs: Value, targets: Value) -> bool:
    """Refuse a loss that depends on more than the model's outputs and its stage has. Raises ConfigError.

    Return whether it could be computed, of an own one.

    After a forward it gets the outputs without their graph. Behind the layers of its stage it may read from
    the model what they keep of their forward, unless they are traced, and the weights that they have. An
    expensive forward runs without numbers.
    """
    model, parts, traced = network.model, _parts(plan, network), not isinstance(network, Chain)
    if task.is_known or _on_meta(network):
        return False
    mode = fake_mode() if _work(plan) > MOST_OF_A_TRACE else None

    def as_leaf(other: Tensor, tensor: Tensor) -> Tensor:
        other = other.detach().requires_grad_(tensor.requires_grad)
        return in_place_of(tensor, other) if isinstance(tensor, nn.Parameter) else other

    def like(tensor: Tensor) -> Tensor:
        other = mode.from_tensor(tensor.detach()) if mode else tensor.detach()
        written = not (traced and tensor.requires_grad)  # perhaps; a trace that writes a weight is refused
        return as_leaf(other.clone() if written else other, tensor)

    names = names_by_id(model)
    here = {id(p) for p in parts[-1].parameters()}
    tensors_of_model = {id(place.tensor): place.tensor for place in places(model)}
    forward_leaves = {
        key: like(tensor) for key, tensor in tensors_of_model.items() if tensor.is_leaf or key in names
    }
    loss_leaves = {key: as_leaf(forward_leaves[key], tensors_of_model[key]) for key in names}
    few = [_some_of(value, 2, plan) for value in (inputs, targets)]
    try:
        with (
            RngSnapshot().replayed(),
            standing_in(model, forward_leaves),
            mode or nullcontext(),
            ExitStack() as stack,
        ):
            _hold_back(model, stack)
            tensors, wanted = as_tuple(on_each(few[0], like)), on_each(few[1], like)
            if traced:
                outputs = network.run(plan.example, tensors)
            else:
                outputs = parts[-1].pack(run_parts(parts, tensors, enters=lambda t: t.detach().clone()))
            replace([model], {id(forward_leaves[key]): other for key, other in loss_leaves.items()})
            loss = task.loss(on_each(outputs, Tensor.detach), wanted)
        leaves = {id(getattr(node, "variable", None)) for node in graph_of(loss)}
    except Exception:  # the model may run on another device alone, and a user's code may raise anything
        return False
    for key, name in names.items():
        if id(forward_leaves[key]) in leaves and (traced or key not in here):
            where = "a trace does not keep" if traced else "another stage has"
            raise ConfigError(
                f"the loss depends on what a layer keeps of its forward, such as an auxiliary loss in an "
                f"attribute (by the weight {name}), which {where}: let the model return it beside its "
                f"outputs, and the loss take it from there"
            )
        if id(loss_leaves[key]) in leaves and key not in here:
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


def _hold_back(module: nn.Module, stack: ExitStack) -> None:
    """Let forwards not advance the generators, arrays and iterators that layers keep, beyond the stack.

    An iterator in a tuple, or one that cannot be copied, is advanced.
    """
    copies: dict[int, Any] = {}  # what is shared stays shared
    for container in Held(attributes_of(module)).containers:
        if not isinstance(container, dict | list | deque):
            continue
        for key, value in [*(container.items() if isinstance(container, dict) else enumerate(container))]:
            for part in value if isinstance(value, tuple) else (value,):
                if (generator := state_of(part)) is not None:
                    stack.callback(generator.set, generator.get())
                elif isinstance(part, bytearray):
                    stack.callback(setitem, part, slice(None), part.copy())
                elif (
                    isinstance(part, np.ndarray) and part.flags.writeable and not isinstance(part, np.memmap)
                ):
                    stack.callback(np.copyto, part, part.copy())
            if isinstance(value, Iterator):
                with suppress(Exception), warnings.catch_warnings(action="ignore"):  # of itertools
                    container[key] = deepcopy(value, copies)


def compare_microbatches(plan: Plan, network: Network, task: Task, inputs: Value, targets: Value) -> str:
    """Say why microbatches would train a model otherwise than a batch; "" if they would not.

    `inputs`, `targets`: of the first batch, in host memory. What is too large, is not here as a whole, or
    does not run alone on a CPU is not compared.
    """
    work = _work(plan)
    n = min(len(as_tuple(targets)[0]), max(2, min(MOST_SAMPLES, int(ENOUGH_WORK / max(1.0, work)))))
    if plan.settings.microbatches == 1 or n < 2 or _on_meta(network) or work > MOST_WORK:
        return ""
    parts = _parts(plan, network)
    modules = nn.ModuleList([network.model, *parts])
    batch = [_some_of(value, n, plan) for value in (inputs, targets)]
    differs = ""
    with suppress(Exception):  # a model may run on another device alone, and a user's code may raise anything
        if (differs := _microbatches_differ(modules, parts, task, *batch)).endswith(APART):
            exact = [cast_floats(value, torch.float64) for value in batch]
            with standing_in(modules, {id(t): _exact(t) for t in named_tensors(network.model).values()}):
                differs = _microbatches_differ(modules, parts, task, *exact)  # it may be rounding
    return differs and f"of {n} samples of the first batch {differs}"


def _microbatches_differ(
    modules: nn.Module, parts: Sequence[Part], task: Task, inputs: Value, targets: Value
) -> str:
    buffers = {id(t): t.clone() for t in modules.buffers()}
    weights: dict[Tensor, str] = {
        p: name for part in parts for name, p in part.named_parameters() if p.requires_grad
    }

    def loss_of(start: int, end: int) -> Tensor:
        outputs = run_parts(parts, as_tuple(part_of(inputs, start, end)))
        return task.loss(parts[-1].pack(outputs), part_of(targets, start, end))

    with standing_in(modules, buffers), evaluating(*parts), ExitStack() as stack:
        _hold_back(modules, stack)
        return pieces_differ(loss_of, task.weight, targets, weights)


def _exact(tensor: Tensor) -> Tensor:
    return in_place_of(tensor, tensor.detach().double()) if tensor.is_floating_point() else tensor


def _work(plan: Plan) -> float:
    """Return the floating-point operations of a sample's forward."""
    return sum(layer.flops for layer in plan.layers) / plan.settings.full.samples


def _some_of(value: Value, samples: int, plan: Plan) -> Value:
    """Return the first samples of a batch as the model gets them."""
    return cast_floats(part_of(value, 0, samples), plan.settings.data_dtype)


def _on_meta(network: Network) -> bool:
    return any(tensor.is_meta for tensor in named_tensors(network.model).values())


def _parts(plan: Plan, network: Network) -> list[Part]:
    return [network.part(*slices) for slices in zip(plan.cut.slices, plan.evaluation_cut.slices, strict=True)]
