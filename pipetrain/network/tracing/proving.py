"""Compares a traced model with the module itself, where that is cheap: outputs and gradients.

A trace leaves out what is no operation of its own, such as a backward that the user has written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils.flop_counter import FlopCounterMode

from pipetrain.errors import ConfigError, one_line
from pipetrain.network import draws
from pipetrain.network.network import INPUT, Made, Tensors
from pipetrain.network.tensors import made_up
from pipetrain.network.tracing.exporting import as_arguments
from pipetrain.network.tracing.traced import Traced
from pipetrain.network.tracing.watching import watching
from pipetrain.network.values import ValueSpec, as_tuple, cast_floats, leaves_of, specs_of

SAMPLES = 2
MOST_WORK = 4e10  # floating-point operations of a forward: some seconds for all runs on one core
# Relative, in float32 and in half precision; a module may choose another kernel for the same function.
TOLERANCE, COARSE = 1e-3, 5e-2


def prove(network: Traced, example: ValueSpec, autocast: bool = False) -> None:
    """Compare a network with its module, in training and in evaluation. Raises ConfigError.

    `autocast`: under bf16 autocast, in which code that asks for a dtype may go another way than in the trace.
    The outputs are float32 then, as a task gets them.
    """
    model = network.model
    device = next((t.device for t in [*model.parameters(), *model.buffers()]), torch.device("cpu"))
    if device.type == "meta" or _work(network, example) > MOST_WORK:
        return

    def given(outputs: Tensors) -> Tensors:
        return as_tuple(cast_floats(outputs, torch.float32)) if autocast else outputs

    cast = torch.autocast(device.type, torch.bfloat16, enabled=autocast)
    with torch.random.fork_rng([]), draws.drawing(None), cast:
        tensors = _inputs(model, example, device)
        args, kwargs = as_arguments(example, tensors)
        for mode in (True, False):
            with nullcontext() if mode else network.evaluating():
                try:
                    whole = _run(model, lambda: given(leaves_of(model(*args, **kwargs))), mode)
                except RuntimeError as error:
                    what = "train on" if mode else "evaluate"
                    raise ConfigError(
                        f"the model cannot {what} {example.of(SAMPLES)} in one process either: "
                        f"{one_line(error)[:300]}"
                    ) from error
                layers = _run(model, lambda: given(_chain(network, tensors)), mode)
            tolerance = COARSE if autocast or _is_half(whole) else TOLERANCE
            _compare(whole, layers, mode, network.names[-1], tolerance)


def _is_half(made: dict[str, Tensor]) -> bool:
    """Return whether an output is of half precision."""
    half = (torch.bfloat16, torch.float16)
    return any(t.dtype in half for name, t in made.items() if name.startswith("output "))


def _work(network: Traced, example: ValueSpec) -> int:
    """Return the floating-point operations of a forward."""
    fake, counter = FakeTensorMode(allow_non_fake_inputs=True), FlopCounterMode(display=False)
    # Up to a number that is read, which has no value, or a tensor of so many numbers.
    unread = suppress(DataDependentOutputException, DynamicOutputShapeException)
    with _restored(network.model), torch.random.fork_rng([]), unread, fake, counter:
        _chain(network, [made_up(spec) for spec in example.of(SAMPLES).specs])
    return int(counter.get_total_flops())


def _inputs(model: nn.Module, example: ValueSpec, device: torch.device) -> list[Tensor]:
    """Return a microbatch that the model takes; whole numbers are 0 or 1, or 0 if it does not take 1."""
    torch.default_generator.manual_seed(0)
    zeros = [made_up(spec, device) for spec in example.of(SAMPLES).specs]
    varied = [
        t
        if t.is_floating_point() or t.is_complex()
        else torch.randint(0, 2, t.shape, device=device).to(t.dtype)
        for t in zeros
    ]
    error: Exception
    for tensors in (varied, zeros):
        args, kwargs = as_arguments(example, list(tensors))
        try:
            with torch.no_grad(), _restored(model), watching(model) as watch:
                model(*args, **kwargs)
        except ConfigError:
            raise
        except Exception as raised:  # the user's forward may raise anything
            error = raised
        else:
            if watch.refused:  # what torch.export has undone, such as a list that grows
                raise ConfigError(watch.refused)
            return list(tensors)
    raise ConfigError(
        f"the model cannot take {example.of(SAMPLES)}: {type(error).__name__}: {one_line(error)[:300]}"
    ) from error


def _chain(network: Traced, tensors: Sequence[Tensor]) -> Tensors:
    values = {Made(INPUT, number): tensor for number, tensor in enumerate(tensors)}
    outputs: Tensors = ()
    for index, layer in enumerate(network.modules):
        outputs = layer(*[values[made] for made in network.takes(index, ())])
        values |= {Made(index, number): tensor for number, tensor in enumerate(outputs)}
    return outputs


def _run(model: nn.Module, call: Callable[[], Tensors], mode: bool) -> dict[str, Tensor]:
    """Return the outputs, the gradients and the buffers of a run, and restore the buffers."""
    torch.default_generator.manual_seed(0)
    with _restored(model), torch.set_grad_enabled(mode):
        outputs = call()
        found = {f"output {number}": tensor.detach() for number, tensor in enumerate(outputs)}
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        wanted = [t for t in outputs if t.requires_grad]
        if mode and trained and wanted:
            ones = [torch.ones_like(t) for t in wanted]
            made = torch.autograd.grad(wanted, list(trained.values()), ones, allow_unused=True)
            found |= {f"the gradient of {n}": g for n, g in zip(trained, made, strict=True) if g is not None}
        found |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    return found


def _compare(
    whole: dict[str, Tensor], layers: dict[str, Tensor], mode: bool, last: str, tolerance: float
) -> None:
    """Compare what a module and its layers made. `last`: the layer that makes the outputs."""
    for name in dict.fromkeys([*whole, *layers]):  # in order, outputs first
        one, other = whole.get(name), layers.get(name)
        if one is None or other is None or not _close(one, other, tolerance):
            made = f" (layer {last})" if name.startswith("output ") else ""
            raise ConfigError(
                f"{name}{made} of the model in {'training' if mode else 'evaluation'} is not that of its "
                f"trace{_apart(one, other)}, which holds only operations of torch's: make the model an "
                f"nn.Sequential of its layers, and code of another kind stays inside one"
            )


def _apart(one: Tensor | None, other: Tensor | None) -> str:
    """Return how two tensors differ."""
    if one is None or other is None:
        return " (only one of them has it)"
    specs = specs_of([one, other])
    if specs[0] != specs[1]:
        return f" ({specs[0]} and {specs[1]})"
    if one.dtype.is_complex:
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    one, other = one.double(), other.double()
    return f" ({specs[0]}, by {(one - other).abs().max():.2g} of {one.abs().max():.2g})"


def _close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    scale = one.abs().nan_to_num(0, 0, 0).max().item() if one.numel() else 0.0
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Restore the values of a model's buffers."""
    before: list[tuple[Any, Tensor]] = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, old in before:
                buffer.copy_(old)
