"""Tries a model alone before it is traced, and compares the trace with it where that is cheap.

A trace holds operations on tensors. What is none of its own, such as a backward that the user has written, it
leaves out; what a forward changes beside tensors, it fixes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from pipetrain.errors import ConfigError, one_line
from pipetrain.network import draws
from pipetrain.network.network import evaluating, run_parts
from pipetrain.network.places import standing_in
from pipetrain.network.tensors import SIZES, TOLERANCE, Results, difference, made_up, results
from pipetrain.network.tracing.exporting import WAY_OUT, as_arguments, bound, device_of, without_numbers
from pipetrain.network.tracing.traced import Traced
from pipetrain.network.values import ValueSpec, differentiable

MOST_WORK = 4e10  # floating-point operations of a forward: some seconds for all runs on one core
COARSE = 5e-2  # relative, in half precision; a module may choose another kernel for the same function
_HALF = (torch.bfloat16, torch.float16)


def try_alone(model: nn.Module, example: ValueSpec) -> int:
    """Run a model on tensors without numbers; return the floating-point operations of a forward.

    Raises ConfigError for what a trace would leave out or fix: gradients by the user's code, attributes that
    a forward changes, and random numbers that are not torch's. (What cannot run so says more when exported.)
    """
    counter, work, before = FlopCounterMode(display=False), 0, draws.Beginning()
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
    changed = [name for name, value in seen.items() if now.get(name) != value]
    if functions:
        why = f"uses the autograd Function {functions[0]}, whose backward a trace would leave out: "
        why += "write it with torch's operations"
    elif changed:
        why = f"changes its attribute {changed[0]} when it runs: keep such state in a buffer"
    elif before.drawn():
        why = "draws from Python's or NumPy's random numbers: draw by torch"
    else:
        return work
    raise ConfigError(f"the model {why}, or {WAY_OUT}")


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


def _functions(outputs: Any) -> Iterator[str]:
    """Yield the autograd Functions of the user's on the way back from what a model returns."""
    todo = [t.grad_fn for t in tree_leaves(outputs) if isinstance(t, Tensor)]
    seen: set[Any] = {None}
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

    def of(call: Callable[[], Any], training: bool) -> Results:
        _restore(before)
        with nullcontext() if training else network.evaluating():
            return results(call, [model], training)

    try:
        with torch.random.fork_rng([]), draws.drawing(None), standing_in(model, {}), cast:
            for samples in SIZES:
                tensors, whole = _alone(model, example.of(samples), device, of)
                for training in (True, False):
                    layers = of(partial(run_parts, network.modules, tensors), training)
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


def _restore(buffers: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for buffer, old in buffers:
            buffer.copy_(old)


def _alone(
    model: nn.Module, spec: ValueSpec, device: torch.device, of: Callable[[Callable[[], Any], bool], Results]
) -> tuple[list[Tensor], dict[bool, Results]]:
    """Return a microbatch that a model takes, and what it makes of it in training and in evaluation.

    Whole numbers and truth values are 0 or 1, or 0 if it does not take 1.
    """
    for end in (2, 1):
        torch.default_generator.manual_seed(0)
        tensors = [made_up(each, device) for each in spec.specs]
        tensors = [t if differentiable(t) else _mixed(t, end) for t in tensors]
        args, kwargs = as_arguments(spec, tensors)
        try:
            return tensors, {mode: of(lambda: model(*args, **kwargs), mode) for mode in (True, False)}  # noqa: B023
        except Exception as error:  # the user's forward may raise anything
            refused = error
    raise ConfigError(
        f"the model cannot take {spec} in one process either: {one_line(refused)[:300]}"
    ) from refused


def _mixed(tensor: Tensor, end: int) -> Tensor:
    """Return numbers below `end`, with the first and the last in each row: no mask hides a whole row."""
    mixed = torch.randint_like(tensor, end)
    if tensor.dim() > 1 and tensor.shape[-1] > 1:
        mixed[..., 0], mixed[..., -1] = 0, end - 1
    return mixed
