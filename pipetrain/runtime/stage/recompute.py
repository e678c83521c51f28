"""Recompute: a forward saves nothing for its backward, and runs a second time before it.

The second forward has the same inputs, weight version, buffers and random numbers, so its results are the
same to the last bit. Its changes of buffers are dropped, so that statistics count once.

A selective recompute keeps the results of expensive operations: products and convolutions with a weight,
about half of what a network saves and most of its work. The second forward reuses them and computes only
norms, activations and attention (Korthikanti et al. 2022, arXiv 2205.05198). A result that a later layer
overwrites is not kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from pipetrain.model.matrix_products import EXPENSIVE, Watching
from pipetrain.model.numerics import numbers_of
from pipetrain.model.random_numbers import RngSnapshot
from pipetrain.model.specs import differentiable
from pipetrain.model.trial_tensors import storage_of
from pipetrain.runtime.stage.buffers import Copies


class Recompute:
    """The state of a forward for its recompute. `buffers`: before it; `keep`: expensive results."""

    def __init__(self, buffers: Copies, keep: bool) -> None:
        self.buffers = buffers
        self.results: deque[Tensor | None] = deque()
        """Expensive results, in the order of their operations; None: overwritten."""
        self._keeps = keep
        self._rng = RngSnapshot()
        self._sums: list[Tensor] = []

    @property
    def tensors(self) -> list[Tensor]:
        return [*(copied for _, copied in self.buffers), *(t for t in self.results if t is not None)]

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Let a forward save only expensive results."""
        results = _Results()
        nothing = saved_tensors_hooks(lambda tensor: None, _no_backward)
        with nothing, _SavesExpensive(results) if self._keeps else nullcontext():
            yield
        self.results = deque(None if passed_on._version else result for result, passed_on in results.recorded)

    def end(self, outputs: Sequence[Tensor]) -> None:
        """End the first forward, including the loss. `outputs`: to be compared with those of the second."""
        self._rng.end()
        self._sums = _sums(outputs)

    def equals(self, outputs: Sequence[Tensor]) -> bool:
        """Return whether the second forward has the outputs of the first, if those were recorded.

        A GPU may add numbers in another order each time.
        """
        pairs = zip(self._sums, _sums(outputs), strict=True) if self._sums else ()
        tolerance = 1e-3 if outputs and outputs[0].is_cuda else 0.0
        return all(torch.allclose(a, b, rtol=tolerance, atol=0.0, equal_nan=True) for a, b in pairs)

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Let a forward draw the same random numbers, and reuse the expensive results."""
        with self._rng.replayed(), _SavesExpensive(_Results(self.results)) if self._keeps else nullcontext():
            yield


def _no_backward(packed: None) -> Tensor:
    raise RuntimeError(
        "a layer differentiates its own forward, and a stage that recomputes saves nothing in its first one: "
        "choose recompute=never for this stage"
    )


def _sums(outputs: Sequence[Tensor]) -> list[Tensor]:
    numbers = [numbers_of(t.detach()) for t in outputs if differentiable(t)]
    return [t.abs().sum(dtype=torch.float64) for t in numbers]


class _SavesExpensive(Watching):
    """Runs operations with a weight under another mode, which sees the products inside them."""

    def __init__(self, results: _Results) -> None:
        super().__init__()
        self._results = results

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if func in EXPENSIVE and any(isinstance(t, nn.Parameter) for t in tree_leaves((args, kwargs))):
            with self._results:
                output = func(*args, **kwargs)
            self._results.add_output(output.detach())  # with the same version counter
            return output
        return func(*args, **kwargs)


class _Results(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the results of products and convolutions or, if some are `results`, returns those instead.

    A layer may get another view of a result, with its own version counter. So each result is recorded
    together with what the layer got: nothing has written to it as long as its version is 0.
    """

    def __init__(self, saved: deque[Tensor | None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._saved = saved
        self._of_operation: list[Tensor] = []  # results of the running operation
        self.recorded: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        expensive = func.overloadpacket in flop_registry
        if expensive and self._saved and (saved := self._saved.popleft()) is not None:
            return saved
        result = func(*args, **(kwargs or {}))
        if expensive and self._saved is None:
            self._of_operation.append(result.detach())  # without a graph
        return result

    def add_output(self, output: Tensor) -> None:
        for result in self._of_operation:
            shares_storage = storage_of(result) == storage_of(output)
            self.recorded.append((result, output if shares_storage else result))
        self._of_operation = []
