"""A backward in two halves: I, the gradients of the inputs, and later W, those of the weights.

The stage before waits for I alone, so that W can fill waits (zero bubble, Qi et al. 2023, arXiv 2401.10241).
Differentiating the stage's graph once for each half would go through all its layers twice. Instead,
operations whose weight gradient is dear (matrix products, convolutions and embeddings) get a small graph of
their own while the forward runs. In the stage's graph each stands as one node, which in I differentiates its
small graph to the input alone, and keeps the output's gradient; W differentiates all small graphs to the
weights. Kernels and the order of sums are those of a whole backward, so the gradients are equal to the last
bit. Between I and W only the inputs of these operations and the gradients of their outputs are held.

What is not put off has its gradient in I, and W adds it: the weights of norms, of torch's recurrent layers
(one operation for all their steps), of layers that recompute inside, and weights computed from others, as by
weight_norm; views of weights are put off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from pipetrain.network.products import DEAR, LOWERED, Watching

_CAST = {torch.float32, torch.float16, torch.bfloat16}  # by autocast

# A layer that differentiates within its forward may do so twice.
_TWICE = (
    "a layer differentiates its own forward with create_graph=True, which a schedule that splits backwards "
    "cannot train: choose a schedule without I and W"
)


class Deferred:
    """The weight gradients of one microbatch's forward that are put off.

    Under `recording`, run the forward; `input_half` then is I, and `weight_half` W. `leaves`: of the weight
    version, which are distinct tensors.
    """

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self._ids = {id(leaf) for leaf in leaves if leaf.requires_grad}
        self._kept: list[_Operation] = []
        self._at_once: list[tuple[Tensor, Tensor]] = []  # leaves, with their gradients from I
        self._task: int | None = None  # the graph task of autograd that is I

    def recording(self) -> TorchFunctionMode:
        """Return a context in which a forward puts off the weight gradients of dear operations."""
        return _Recording(self)

    def input_half(
        self, leaves: Sequence[Tensor], outputs: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> None:
        """Differentiate to the inputs. Gradients of `leaves` that are found on the way are kept for W."""
        before = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        for output in outputs:
            output.register_hook(self._begin)  # type: ignore[no-untyped-call]
        try:
            torch.autograd.backward(outputs, grads)
            self._at_once = [(leaf, leaf.grad) for leaf in leaves if leaf.grad is not None]
        finally:
            self._task = None
            for leaf, grad in zip(leaves, before, strict=True):
                leaf.grad = grad

    def _begin(self, grad: Tensor) -> None:
        self._task = torch._C._current_graph_task_id()

    def weight_half(self) -> None:
        """Differentiate to the weights, and add their gradients to their `.grad`."""
        kept, at_once = self._kept, self._at_once
        self._kept, self._at_once = [], []
        wanted = {id(weight): weight for one in kept for weight in one.weights}
        edges = [one.edge for one in kept]
        grads = [one.grad for one in kept]
        for leaf, grad in at_once:
            if id(leaf) in wanted:  # one sum for the microbatch, as in a whole backward
                edges.insert(0, get_gradient_edge(leaf))
                grads.insert(0, grad)
            else:
                _accumulate(leaf, grad)
        if edges:
            _run(edges, grads, list(wanted.values()), keep=False, accumulate=True)

    @property
    def held(self) -> list[Tensor]:
        """What stays between I and W: the inputs of operations, and gradients. Tensors may share storage."""
        kept = [tensor for one in self._kept for tensor in (*one.inputs, one.grad)]
        return [*(tensor for tensor in kept if tensor is not None), *(grad for _, grad in self._at_once)]

    def put_off(
        self, function: Callable[..., Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor | None:
        """Run an operation with a small graph of its own; None if it is none that can be put off."""
        if not torch.is_grad_enabled() or _recomputes() or torch._C._are_functorch_transforms_active():
            return None
        operands = [*args, *kwargs.values()]
        inputs, trained, weights, others = [], [], [], False
        for position, operand in enumerate(operands):
            if isinstance(operand, Tensor):
                if (leaf := self._leaf_of(operand)) is not None:
                    trained.append(operand)
                    weights.append(leaf)
                else:
                    others = True
                    if operand.requires_grad:
                        inputs.append(position)
        if not others or all(operand.dim() < 2 for operand in trained):
            return None
        entering, leaves = [], []
        for position in inputs:
            tensor = _cast(operands[position]) if function in LOWERED else operands[position]
            entering.append(tensor)
            operands[position] = tensor.detach().requires_grad_()
            leaves.append(operands[position])
        named = dict(zip(kwargs, operands[len(args) :], strict=True))
        output = function(*operands[: len(args)], **named)
        operation = _Operation(self, get_gradient_edge(output), leaves, trained, weights)
        operation.output = output.detach()
        result: Tensor = _PutOff.apply(operation, *entering, *trained)  # type: ignore[no-untyped-call]
        return result

    def _leaf_of(self, operand: Tensor) -> Tensor | None:
        """Return the leaf that an operand is, or is a view of."""
        if id(operand) in self._ids:
            return operand
        base = operand._base
        return base if base is not None and id(base) in self._ids else None

    def is_under_way(self) -> bool:
        """Return whether autograd runs I, rather than what a layer differentiates by itself."""
        return self._task is not None and self._task == torch._C._current_graph_task_id()

    def keep(self, operation: _Operation) -> None:
        """Keep an operation for W, with the gradient of its output."""
        self._kept.append(operation)


class _Operation:
    """An operation that was put off: its small graph, which holds the inputs, and what it was made from.

    `inputs`: the leaves in the small graph that stand for the inputs; `trained`: weights or views of weights,
    and `weights`: those themselves.
    """

    __slots__ = ("deferred", "edge", "grad", "inputs", "output", "trained", "weights")

    def __init__(
        self,
        deferred: Deferred,
        edge: GradientEdge,
        inputs: Sequence[Tensor],
        trained: Sequence[Tensor],
        weights: Sequence[Tensor],
    ) -> None:
        self.deferred, self.edge = deferred, edge
        self.inputs, self.trained, self.weights = inputs, trained, weights
        self.output: Tensor | None = None  # until it is in the stage's graph, which refers to this
        self.grad: Tensor | None = None  # of the output, once it is known

    def differentiate(self, tensors: Sequence[Tensor], grad: Tensor) -> Sequence[Tensor]:
        """Return the gradients of some inputs and weights; those of others may be asked for later."""
        return _run([self.edge], [grad], tensors, keep=True, accumulate=False) if tensors else ()


class _Recording(Watching):
    def __init__(self, deferred: Deferred) -> None:
        super().__init__()
        self._deferred = deferred

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if func in DEAR:
            if func is torch.einsum and len(args) == 2 and isinstance(args[1], list | tuple):
                args = (args[0], *args[1])
            result = self._deferred.put_off(func, args, kwargs)
            if result is not None:
                return result
        return func(*args, **kwargs)


class _PutOff(torch.autograd.Function):
    """An operation whose backward makes the gradients of its inputs only."""

    @staticmethod
    def forward(ctx: Any, operation: _Operation, *operands: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.operation, output = operation, operation.output
        operation.output = None
        assert output is not None
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        operation: _Operation = ctx.operation
        nothing = (None,) * len(operation.trained)
        if grad is None:
            return None, *(None for _ in operation.inputs), *nothing
        if torch.is_grad_enabled():
            raise RuntimeError(_TWICE)
        if not operation.deferred.is_under_way():
            return None, *operation.differentiate([*operation.inputs, *operation.trained], grad)
        operation.grad = grad
        operation.deferred.keep(operation)
        return None, *operation.differentiate(operation.inputs, grad), *nothing


def _run(
    edges: Sequence[GradientEdge],
    grads: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    keep: bool,
    accumulate: bool,
) -> Sequence[Tensor]:
    """Run torch.autograd.grad or backward, without the checks of their arguments, which take 6 to 9 us."""
    found: Sequence[Tensor] = _engine_run_backward(
        tuple(edges), tuple(grads), keep, False, tuple(inputs), accumulate, accumulate_grad=accumulate
    )
    return found


def _cast(tensor: Tensor) -> Tensor:
    """Cast as autocast would, so that the small graph does not hold both precisions."""
    device = tensor.device.type
    if torch.is_autocast_enabled(device) and tensor.dtype in _CAST:
        return tensor.to(torch.get_autocast_dtype(device))
    return tensor


def _accumulate(leaf: Tensor, grad: Tensor) -> None:
    """Add to a leaf's gradient as autograd does, which would copy one that is held here."""
    if leaf.grad is None:
        leaf.grad = grad
    elif leaf.grad.is_sparse and not grad.is_sparse:
        leaf.grad = grad + leaf.grad
    else:
        leaf.grad += grad


def _recomputes() -> bool:
    """Return whether torch.utils.checkpoint is at work, whose second forward would have no small graphs."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", None) == checkpoint.__name__
