"""A backward in two halves: I, the gradients of the inputs, and later W, those of the weights.

The previous stage waits only for I, so W can fill idle time (zero bubble, Qi et al. 2023, arXiv 2401.10241).
Differentiating the stage's graph once per half would go through all its layers twice. Instead, each operation
with an expensive weight gradient (matrix product, convolution, embedding) gets its own small graph during the
forward. In the stage's graph it is one node. In I this node differentiates its small graph to the input only,
and saves the output's gradient; W differentiates all small graphs to the weights. Kernels and the order of
sums are those of a whole backward, so the gradients are equal to the last bit. Between I and W only the
inputs of these operations and the gradients of their outputs are held.

Other weights get their gradient in I, and W adds it: those of norms, of torch's recurrent layers (one
operation for all their steps), of layers that recompute inside, and weights computed from others, as by
weight_norm. The gradients of views of weights are deferred too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge
from torch.utils import checkpoint

from pipetrain.model.matrix_products import EXPENSIVE, LOWERED, Watching

_CAST = {torch.float32, torch.float16, torch.bfloat16}  # by autocast


class Deferred(Watching):
    """The deferred weight gradients of one microbatch's forward.

    The forward runs in it as a context; then `input_half` is I, and `weight_half` W. `leaves`: of the weight
    version, which are distinct tensors.
    """

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        super().__init__()
        self._ids = {id(leaf) for leaf in leaves if leaf.requires_grad}
        self.operations: list[_Operation] = []
        self._at_once: list[tuple[Tensor, Tensor]] = []  # leaves, with their gradients from I
        self._graph_task: int | None = None  # autograd's graph task that is I

    def input_half(
        self, leaves: Sequence[Tensor], outputs: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> None:
        """Differentiate to the inputs. Gradients of `leaves` found on the way are held for W."""
        # Autograd would add these gradients to the batch's sum now; W must add them, in its order. So the
        # sums are set aside, and restored afterwards.
        before = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        for output in outputs:
            output.register_hook(self._begin)  # type: ignore[no-untyped-call]
        try:
            differentiate(outputs, grads)
            self._at_once = [(leaf, leaf.grad) for leaf in leaves if leaf.grad is not None]
        finally:
            self._graph_task = None
            for leaf, grad in zip(leaves, before, strict=True):
                leaf.grad = grad

    def _begin(self, grad: Tensor) -> None:
        self._graph_task = torch._C._current_graph_task_id()

    def is_under_way(self) -> bool:
        """Return whether autograd runs I, not a differentiation inside a layer."""
        return self._graph_task is not None and self._graph_task == torch._C._current_graph_task_id()

    def weight_half(self) -> None:
        """Differentiate to the weights, and add their gradients to their `.grad`."""
        # All small graphs in one backward. A leaf with a gradient from I, too, is an extra root, so that
        # autograd makes one sum for the microbatch, as in a whole backward, before it adds that to `.grad`.
        operations, at_once = self.operations, self._at_once
        self.operations, self._at_once = [], []
        weights = {id(weight): weight for operation in operations for weight in operation.weights}
        edges, grads = [op.edge for op in operations], [op.grad for op in operations]
        for leaf, grad in at_once:
            if id(leaf) in weights:  # one sum for the microbatch, as in a whole backward
                edges.insert(0, get_gradient_edge(leaf))
                grads.insert(0, grad)
            elif leaf.grad is None or leaf.grad.is_sparse:
                leaf.grad = grad if leaf.grad is None else grad + leaf.grad
            else:  # in place, as autograd would copy what is held here
                leaf.grad += grad
        if edges:
            _run(edges, grads, list(weights.values()), accumulate=True)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors held between I and W: inputs of operations, and gradients. They may share storage."""
        tensors = [tensor for operation in self.operations for tensor in (*operation.inputs, operation.grad)]
        return [*(tensor for tensor in tensors if tensor is not None), *(grad for _, grad in self._at_once)]

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if func is torch.einsum and len(args) == 2 and isinstance(args[1], list | tuple):
            args = (args[0], *args[1])  # the operands may be given as a list
        result = self._defer(func, args, kwargs) if func in EXPENSIVE else None
        return func(*args, **kwargs) if result is None else result

    def _defer(
        self, function: Callable[..., Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor | None:
        """Run an operation with its own small graph; None if it cannot be deferred."""
        if not torch.is_grad_enabled() or _recomputes() or torch._C._are_functorch_transforms_active():
            return None
        operands = [*args, *kwargs.values()]
        # `leaf`: the weight that an operand is, or is a view of.
        tensors = [(n, t, self._leaf_of(t)) for n, t in enumerate(operands) if isinstance(t, Tensor)]
        trained = [t for _, t, leaf in tensors if leaf is not None]
        # Deferring needs a weight of two or more dimensions and another tensor.
        if len(trained) == len(tensors) or all(t.dim() < 2 for t in trained):
            return None
        entering, inputs = [], []
        for position, tensor, leaf in tensors:  # the small graph begins at copies of the inputs
            if leaf is None and tensor.requires_grad:
                entering.append(_cast(tensor) if function in LOWERED else tensor)
                operands[position] = entering[-1].detach().requires_grad_()
                inputs.append(operands[position])
        named = dict(zip(kwargs, operands[len(args) :], strict=True))
        output = function(*operands[: len(args)], **named)
        weights = [leaf for *_, leaf in tensors if leaf is not None]
        operation = _Operation(self, get_gradient_edge(output), inputs, trained, weights, output.detach())
        result: Tensor = _InputGradientsOnly.apply(operation, *entering, *trained)  # type: ignore[no-untyped-call]
        return result

    def _leaf_of(self, operand: Tensor) -> Tensor | None:
        """Return the leaf that an operand is, or is a view of."""
        base = operand if id(operand) in self._ids else operand._base
        return base if base is not None and id(base) in self._ids else None


@dataclass(slots=True, eq=False)
class _Operation:
    """A deferred operation: its small graph, which holds the inputs, and its weights.

    `inputs`: leaves in the small graph that stand for the inputs; `trained`: weights or views of weights;
    `weights`: the weights themselves.
    """

    deferred: Deferred
    edge: GradientEdge
    inputs: Sequence[Tensor]
    trained: Sequence[Tensor]
    weights: Sequence[Tensor]
    output: Tensor | None  # until it is in the stage's graph, which refers to this
    grad: Tensor | None = None  # of the output, once known

    def differentiate(self, tensors: Sequence[Tensor], grad: Tensor) -> Sequence[Tensor]:
        """Return the gradients of some inputs and weights; those of others may be requested later."""
        return _run([self.edge], [grad], tensors, accumulate=False) if tensors else ()


class _InputGradientsOnly(torch.autograd.Function):
    """An operation whose backward makes only the gradients of its inputs."""

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
            raise RuntimeError(
                "a layer differentiates its own forward with create_graph=True, which a schedule that splits "
                "backwards cannot train: choose a schedule without I and W"
            )
        if not operation.deferred.is_under_way():
            return None, *operation.differentiate([*operation.inputs, *operation.trained], grad)
        operation.grad = grad
        operation.deferred.operations.append(operation)
        return None, *operation.differentiate(operation.inputs, grad), *nothing


def differentiate(outputs: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Run a whole backward, which adds to the gradients of all leaves."""
    _run(outputs, grads, (), accumulate=True)


def _run(
    edges: Sequence[GradientEdge | Tensor],
    grads: Sequence[Tensor | None],
    to: Sequence[Tensor],
    accumulate: bool,
) -> Sequence[Tensor]:
    """Run torch.autograd.backward, or grad and keep the graph.

    Without the checks of their arguments, which take 6 to 9 us.
    """
    gradients: Sequence[Tensor] = _engine_run_backward(
        tuple(edges), tuple(grads), not accumulate, False, tuple(to), accumulate, accumulate_grad=accumulate
    )
    return gradients


def _cast(tensor: Tensor) -> Tensor:
    """Cast as autocast would, so that the small graph does not hold both precisions."""
    device = tensor.device.type
    if torch.is_autocast_enabled(device) and tensor.dtype in _CAST:
        return tensor.to(torch.get_autocast_dtype(device))
    return tensor


def _recomputes() -> bool:
    """Return whether torch.utils.checkpoint is active; its second forward would have no small graphs."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", None) == checkpoint.__name__
