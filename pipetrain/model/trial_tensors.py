"""Tensors for trial runs: made-up inputs, trees of values, storages, and comparison of results."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipetrain.errors import one_line
from pipetrain.model.specs import TensorSpec, ValueSpec, leaves_of

ALIGNED = 64  # bytes, to which an allocator of torch aligns
TOLERANCE = 1e-3  # relative: a gradient may be summed in another order

GRADIENT = "the gradient of "
Results = dict[str, Tensor]  # outputs, gradients and buffers, by description


def made_up(spec: TensorSpec, device: torch.device | str = "cpu") -> Tensor:
    """Return a tensor of ordinary numbers; integers are 0, which every embedding accepts."""
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        return torch.rand(spec.shape, dtype=spec.dtype, device=device)
    return torch.zeros(spec.shape, dtype=spec.dtype, device=device)


def made_up_samples(inputs: ValueSpec, device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
    """Return made-up inputs [n, ...]; an input with known samples repeats these."""

    def made(number: int, spec: TensorSpec) -> Tensor:
        if (samples := inputs.known.get(number)) is None:
            return made_up(spec, device)
        return samples[torch.arange(spec.shape[0]) % len(samples)].to(device)

    return tuple(made(number, spec) for number, spec in enumerate(inputs.specs))


def storage_of(tensor: Tensor) -> int:
    """Return the address of the storage that a tensor shares with its views."""
    return int(tensor.untyped_storage()._cdata)


def strided(*values: Any) -> list[Tensor]:
    """Return all tensors in a tree of values, except sparse ones."""
    return [t for t in tree_leaves(values) if isinstance(t, Tensor) and t.layout is torch.strided]


def layout_of(tensor: Tensor, like: Tensor) -> list[int]:
    """Return a tensor's strides, and its offset, in numbers, from an aligned address.

    [] if both are those of a new tensor: like `like` if it has the same shape, else contiguous.
    """
    if any(stride == 0 < size - 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return []  # an expanded tensor, which nothing writes to
    same_shape = like.shape == tensor.shape
    usual = torch.empty_like(like, device="meta") if same_shape else torch.empty(tensor.shape, device="meta")
    start = tensor.data_ptr() % ALIGNED // tensor.element_size()
    return [*tensor.stride(), start] if start or tensor.stride() != usual.stride() else []


def laid_out(values: Tensor, layout: Sequence[int]) -> Tensor:
    """Return a copy of values with the layout of `layout_of`."""
    *strides, start = layout
    size = start + 1 + sum(max(n - 1, 0) * stride for n, stride in zip(values.shape, strides, strict=True))
    return values.new_empty(size).as_strided(values.shape, strides, start).copy_(values)


def graph_of(*roots: Tensor) -> set[Any]:
    """Return the autograd nodes that a backward of tensors would visit."""
    nodes, todo = set(), [root.grad_fn for root in roots]
    while todo:
        node = todo.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            todo += [before for before, _ in node.next_functions]
    return nodes


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress torch's traceback of an error that is reported otherwise."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled


def results(
    run: Callable[[], Any], modules: Sequence[nn.Module], training: bool, names: Mapping[str, str]
) -> Results:
    """Return the results of a run of modules; the gradients are those of a weighted sum of the outputs.

    `names`: the names of parameters in the results; gradients with the same name are summed.
    """
    torch.default_generator.manual_seed(0)
    with torch.set_grad_enabled(training):
        outputs = leaves_of(run())
        results = {f"output {number}": tensor.detach() for number, tensor in enumerate(outputs)}
        named = {p: name for module in modules for name, p in module.named_parameters() if p.requires_grad}
        differentiated = [tensor for tensor in outputs if tensor.requires_grad]
        if differentiated and named:
            torch.default_generator.manual_seed(1)
            weights = [_drawn(tensor) for tensor in differentiated]
            grads = torch.autograd.grad(differentiated, list(named), weights, allow_unused=True)
            for name, grad in zip(named.values(), grads, strict=True):
                if grad is not None:
                    what = f"{GRADIENT}{names[name]}"
                    results[what] = grad.to_dense() + results.get(what, 0)
    for module in modules:
        results |= {f"buffer {name}": buffer.clone() for name, buffer in module.named_buffers()}
    return results


def _drawn(tensor: Tensor) -> Tensor:
    """Return random numbers like a tensor, the same in every precision, as autocast may choose another."""
    exact = torch.complex128 if tensor.is_complex() else torch.float64
    return torch.rand_like(tensor, dtype=exact).to(tensor.dtype)


def difference(expected: Results, actual: Results, tolerance: float = TOLERANCE, dtypes: bool = True) -> str:
    """Return what differs by more than a tolerance, relative to its largest number; "" if nothing does.

    A gradient that is tiny compared with the largest one, as of a bias before a BatchNorm, is rounding noise.
    """
    scales = {name: _scale(tensor) for name, tensor in expected.items()}
    largest = max((scale for name, scale in scales.items() if name.startswith(GRADIENT)), default=0.0)
    for name in dict.fromkeys([*expected, *actual]):  # in order
        left, right = expected.get(name), actual.get(name)
        if left is None or right is None:
            return f"{name} is not there {'in one process' if left is None else 'over stages'}"
        scale = max(scales[name], tolerance * largest if name.startswith(GRADIENT) else 0.0)
        close = partial(torch.testing.assert_close, equal_nan=True, check_dtype=dtypes)
        try:
            close(right, left, rtol=tolerance, atol=tolerance * scale)
        except AssertionError as error:
            return f"{name} differs ({one_line(error)[:150]})"
    return ""


def _scale(tensor: Tensor) -> float:
    counts = tensor.numel() and tensor.dtype != torch.bool
    return float(tensor.abs().nan_to_num(0, 0, 0).max()) if counts else 0.0
