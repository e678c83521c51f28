"""A backward in two halves: I, the gradients of the inputs, and later W, those of the weights.

The stage before waits for I alone, so that W can fill waits (zero bubble, Qi et al. 2023, arXiv 2401.10241).
Differentiating the stage's graph once for each half would go through all its layers twice. Instead,
operations whose weight gradient is dear (matrix products and convolutions with a weight) get a small graph of
their own while the forward runs. In the stage's graph each stands as one node, which in I differentiates its
small graph to the input alone, and keeps the output's gradient; W differentiates all small graphs to the
weights. Kernels and the order of sums are those of a whole backward, so the gradients are equal to the last
bit. What is not put off (norms, embeddings, a weight that is computed from others) has its gradient in I, and
W adds it.

Between I and W only the inputs of these operations and the gradients of their outputs are held.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves

from pipetrain.partition.saved import DEAR


class Deferred:
    """The weight gradients of one microbatch's forward that are put off.

    Under `recording`, run the forward; `input_half` then is I, and `weight_half` W. `leaves`: of the weight
    version, which are distinct tensors.
    """

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self._ids = {id(leaf) for leaf in leaves if leaf.requires_grad}
        self._used: dict[int, Tensor] = {}  # the leaves of operations that were put off
        self._edges: list[GradientEdge] = []
        self._grads: list[Tensor] = []
        self._at_once: list[tuple[Tensor, Tensor]] = []  # leaves, with their gradients from I
        self._differentiating = False

    @property
    def held(self) -> list[Tensor]:
        """The gradients that are kept for W."""
        return [*self._grads, *(grad for _, grad in self._at_once)]

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
        self._differentiating = True
        try:
            torch.autograd.backward(outputs, grads)
            self._at_once = [(leaf, leaf.grad) for leaf in leaves if leaf.grad is not None]
        finally:
            self._differentiating = False
            for leaf, grad in zip(leaves, before, strict=True):
                leaf.grad = grad

    def weight_half(self) -> None:
        """Differentiate to the weights, and add their gradients to their `.grad`."""
        edges = [get_gradient_edge(leaf) for leaf, _ in self._at_once] + self._edges
        grads = [grad for _, grad in self._at_once] + self._grads
        wanted = {id(leaf): leaf for leaf, _ in self._at_once} | self._used
        if wanted:
            torch.autograd.backward(edges, grads, inputs=list(wanted.values()))
        self._edges, self._grads, self._at_once = [], [], []

    def put_off(self, function: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor | None:
        """Run an operation with a small graph of its own; None if it is none that can be put off."""
        if not torch.is_grad_enabled() or _recomputes():
            return None
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad]
        weights = [t for t in tensors if id(t) in self._ids]
        inputs = [t for t in tensors if id(t) not in self._ids]
        if not weights or len(inputs) != 1:
            return None
        (entering,) = inputs

        def run(leaf: Tensor) -> Tensor:
            replaced = [leaf if arg is entering else arg for arg in args]
            return function(*replaced, **{k: leaf if v is entering else v for k, v in kwargs.items()})

        self._used |= {id(weight): weight for weight in weights}
        result: Tensor = _PutOff.apply(self, entering, run)  # type: ignore[no-untyped-call]
        return result

    def keep(self, edge: GradientEdge, grad: Tensor) -> None:
        """Keep what W needs of an operation: its small graph, and the gradient of its output."""
        if self._differentiating:  # not where a layer differentiates within its forward
            self._edges.append(edge)
            self._grads.append(grad)


class _Recording(TorchFunctionMode):
    def __init__(self, deferred: Deferred) -> None:
        super().__init__()
        self._deferred = deferred

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in DEAR:
            result = self._deferred.put_off(func, args, kwargs or {})
            if result is not None:
                return result
        return func(*args, **(kwargs or {}))


class _PutOff(torch.autograd.Function):
    """An operation whose backward makes the gradient of its input only."""

    @staticmethod
    def forward(ctx: Any, deferred: Deferred, entering: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        leaf = entering.detach().requires_grad_()
        with torch.enable_grad():
            output = run(leaf)
        ctx.deferred, ctx.leaf, ctx.edge = deferred, leaf, get_gradient_edge(output)
        return output.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        (back,) = torch.autograd.grad([ctx.edge], [ctx.leaf], [grad], retain_graph=True)
        ctx.deferred.keep(ctx.edge, grad)
        return None, back, None


def _recomputes() -> bool:
    """Return whether torch.utils.checkpoint is at work, whose second forward would have no small graphs."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == checkpoint.__name__
