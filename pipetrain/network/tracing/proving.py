"""Tries a model alone before it is traced, and compares the trace with it where that is cheap.

A trace holds operations on tensors. What is none of its own, such as a backward that the user has written, it
leaves out; what a forward changes beside tensors, it fixes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from pipetrain.errors import ConfigError, one_line
from pipetrain.network import draws
from pipetrain.network.network import INPUT, Made, Tensors, evaluating
from pipetrain.network.places import standing_in
from pipetrain.network.tensors import SIZES, TOLERANCE, Results, difference, made_up
from pipetrain.network.tracing.exporting import (
    WAY_OUT,
    as_arguments,
    bound,
    device_of,
    without_numbers,
)
from pipetrain.network.tracing.traced import Traced
from pipetrain.network.values import ValueSpec, differentiable, leaves_of

MOST_WORK = 4e10  # floating-point operations of a forward: some seconds for all runs on one core
COARSE = 5e-2  # relative, in half precision; a module may choose another kernel for the same function
_HALF = (torch.bfloat16, torch.float16)

Buffers = list[tuple[Tensor, Tensor]]  # with the numbers that they had


def try_alone(model: nn.Module, example: ValueSpec) -> int:
    """Run a model on tensors without numbers; return the floating-point operations of a forward.

    Raises ConfigError for what a trace would leave out or fix: gradients by the user's code, attributes that
    a forward changes, and random numbers that are not torch's. (What cannot run so says more when exported.)
    """
    counter, work, before = FlopCounterMode(display=False), 0, _random_states()
    seen, functions = dict[str, str](), list[str]()
    with without_numbers(model):
        bound(model, *as_arguments(example, example.specs))
        for samples in SIZES:
            seen = _attributes(model)  # the first runs may complete a model
            for training in (True, False):
                args, kwargs = as_arguments(example, [made_up(spec) for spec in example.of(samples).specs])
                with nullcontext() if training else evaluating(model), suppress(Exception), counter:
                    functions += _functions(model(*args, **kwargs))
                work = max(work, counter.get_total_flops())
        now = _attributes(model)
    if functions:
        raise ConfigError(
            f"the model uses the autograd Function {functions[0]}, whose backward a trace would leave out: "
            f"{WAY_OUT}"
        )
    if changed := [name for name, value in seen.items() if now.get(name) != value]:
        raise ConfigError(
            f"the model changes its attribute {changed[0]} when it runs, and a trace would fix its value: "
            f"keep such state in a buffer, or {WAY_OUT}"
        )
    if before != _random_states():
        raise ConfigError(
            f"the model draws from Python's or NumPy's random numbers, and a trace would fix what it drew: "
            f"draw by torch, or {WAY_OUT}"
        )
    return work


def _attributes(model: nn.Module) -> dict[str, str]:
    """Return the numbers, strings and collections that a model's modules keep, as text by name."""
    plain = (bool, int, float, str, list, dict, set, tuple)
    return {
        f"{name}.{key}".lstrip("."): repr(value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in vars(_BARE) and type(value) in plain
    }


_BARE = nn.Module()


def _random_states() -> tuple[Any, str]:
    return random.getstate(), repr(np.random.get_state(legacy=False))


def _functions(outputs: Any) -> Iterator[str]:
    """Yield the autograd Functions of the user's on the way back from what a model returns."""
    todo = [t.grad_fn for t in tree_leaves(outputs) if isinstance(t, Tensor)]
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if issubclass(type(node), BackwardCFunction):
            yield type(node).__name__.removesuffix("Backward")
        todo += [before for before, _ in node.next_functions]


def prove(network: Traced, example: ValueSpec, autocast: bool = False) -> None:
    """Compare a network with its module, in training and in evaluation, for two sizes. Raises ConfigError.

    `autocast`: under bf16 autocast, in which code that asks for a dtype may go another way than in the trace.
    """
    model, device = network.model, device_of(network.model)
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    cast = torch.autocast(device.type, torch.bfloat16, enabled=autocast)
    try:
        with torch.random.fork_rng([]), draws.drawing(None), standing_in(model, {}), cast:
            for samples in SIZES:
                tensors, whole = _alone(model, example.of(samples), device, before)
                for training in (True, False):
                    with nullcontext() if training else network.evaluating():
                        layers = _run(model, partial(_chain, network, tensors), training, before)
                    half = any(t.dtype in _HALF for t in layers.values())
                    tolerance = COARSE if autocast or half else TOLERANCE
                    if why := difference(whole[training], layers, tolerance, dtypes=not autocast):
                        mode = "training" if training else "evaluation"
                        raise ConfigError(
                            f"in {mode} {why} between the model and its trace, which holds only operations "
                            f"of torch's: {WAY_OUT}"
                        )
    finally:
        _restore(before)


def _restore(buffers: Buffers) -> None:
    with torch.no_grad():
        for buffer, old in buffers:
            buffer.copy_(old)


def _alone(
    model: nn.Module, spec: ValueSpec, device: torch.device, before: Buffers
) -> tuple[list[Tensor], dict[bool, Results]]:
    """Return a microbatch that a model takes, and what it makes of it in training and in evaluation.

    Whole numbers are 0 or 1, or 0 if it does not take 1.
    """
    for end in (2, 1):
        torch.default_generator.manual_seed(0)
        tensors = [made_up(each, device) for each in spec.specs]
        tensors = [t if differentiable(t) else torch.randint_like(t, end) for t in tensors]
        args, kwargs = as_arguments(spec, tensors)
        found = {}
        try:
            for training in (True, False):
                with nullcontext() if training else evaluating(model):
                    found[training] = _run(model, partial(model, *args, **kwargs), training, before)
        except Exception as error:  # the user's forward may raise anything
            refused = error
        else:
            return tensors, found
    raise ConfigError(
        f"the model cannot take {spec} in one process either: {one_line(refused)[:300]}"
    ) from refused


def _chain(network: Traced, tensors: Sequence[Tensor]) -> Tensors:
    values = {Made(INPUT, number): tensor for number, tensor in enumerate(tensors)}
    outputs: Tensors = ()
    for index, layer in enumerate(network.modules):
        outputs = layer(*[values[made] for made in network.takes(index, ())])
        values |= {Made(index, number): tensor for number, tensor in enumerate(outputs)}
    return outputs


def _run(model: nn.Module, call: Callable[[], Any], training: bool, before: Buffers) -> Results:
    """Return the outputs, the gradients and the buffers of a run that begins with the buffers of before."""
    torch.default_generator.manual_seed(0)
    _restore(before)
    with torch.set_grad_enabled(training):
        outputs = leaves_of(call())
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        wanted = [t for t in outputs if t.requires_grad]
        grads: Sequence[Tensor | None] = ()
        if trained and wanted:
            ones = [torch.ones_like(t) for t in wanted]
            grads = torch.autograd.grad(wanted, list(trained.values()), ones, allow_unused=True)
    found = {f"output {number}": tensor.detach() for number, tensor in enumerate(outputs)}
    found |= {f"the gradient of {n}": g for n, g in zip(trained, grads, strict=False) if g is not None}
    return found | {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
