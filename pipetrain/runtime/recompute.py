"""A forward that is run again before its backward, so that meanwhile it holds little.

The first forward computes as ever, but saves nothing for a backward. The second one has the same inputs,
weight version, buffers and random numbers, so all that it makes is the same to the last bit, and its changes
of buffers are dropped, so that statistics count once.

It may keep the results of dear operations (products and convolutions with a weight, about half of what a
network saves and most of its work), which the second forward then takes instead of computing them: norms,
activations and attention alone are made again (selective recomputation, Korthikanti et al. 2022, arXiv
2205.05198). A result that a later layer overwrites is not kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from pipetrain.network.draws import Beginning
from pipetrain.network.numerics import numbers_of
from pipetrain.network.products import DEAR, Watching
from pipetrain.network.tensors import storage_of
from pipetrain.network.values import differentiable
from pipetrain.runtime.buffers import Copies


class Recompute:
    """What a forward leaves for its recomputation. `buffers`: before it; `keep`: dear results."""

    def __init__(self, buffers: Copies, keep: bool) -> None:
        self.buffers = buffers
        self._beginning = Beginning()
        self._kept = _Kept() if keep else None
        self._sums: list[Tensor] = []

    @property
    def kept(self) -> list[Tensor]:
        """The results that are held until the recomputation."""
        return [] if self._kept is None else [one[0] for one in self._kept.results if one]

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Let a forward save nothing but dear results."""
        with saved_tensors_hooks(_nothing, _no_backward), self._dear(again=False):
            yield
        if self._kept is not None:
            self._kept.forget_changed()

    def end(self, outputs: Sequence[Tensor]) -> None:
        """End the first forward, the loss included; `outputs`: to be held against those of the second."""
        self._beginning.end()
        self._sums = _sums(outputs)

    def equals(self, outputs: Sequence[Tensor]) -> bool:
        """Return whether the second forward made what the first did, as far as that was noted.

        A GPU may add numbers in another order each time.
        """
        pairs = zip(self._sums, _sums(outputs), strict=True) if self._sums else ()
        apart = 1e-3 if outputs and outputs[0].is_cuda else 0.0
        return all(torch.allclose(a, b, rtol=apart, atol=0.0, equal_nan=True) for a, b in pairs)

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Let a forward draw the same random numbers, and take the dear results."""
        with self._beginning.again(), self._dear(again=True):
            yield

    def _dear(self, again: bool) -> AbstractContextManager[object]:
        return nullcontext() if self._kept is None else _Dear(self._kept, again)


def _nothing(tensor: Tensor) -> None:
    return None


def _no_backward(packed: None) -> Tensor:
    raise RuntimeError(
        "a layer differentiates its own forward, and a stage that recomputes saves nothing in its first one: "
        "choose recompute=never for this stage"
    )


def _sums(outputs: Sequence[Tensor]) -> list[Tensor]:
    numbers = [numbers_of(t.detach()) for t in outputs if differentiable(t)]
    return [t.abs().sum(dtype=torch.float64) for t in numbers]


class _Kept:
    """Results in the order of their operations; None: it was overwritten.

    What a layer gets may be another view of a result, with a version counter of its own. So each result
    stands with what the layer got, to which nothing has written as long as its version is 0.
    """

    def __init__(self) -> None:
        self.results: deque[tuple[Tensor, Tensor] | None] = deque()
        self._made: list[Tensor] = []  # by the operation that runs

    def put(self, result: Tensor) -> None:
        self._made.append(result.detach())  # without a graph

    def got(self, output: Tensor) -> None:
        """Note what a layer got of an operation."""
        output = output.detach()  # with the same version counter
        for result in self._made:
            same = storage_of(result) == storage_of(output)
            self.results.append((result, output if same else result))
        self._made = []

    def forget_changed(self) -> None:
        self.results = deque(None if one is None or one[1]._version else one for one in self.results)

    def take(self) -> Tensor | None:
        if not self.results:  # a forward that is longer than the first makes other outputs
            return None
        one = self.results.popleft()
        return None if one is None or one[1]._version else one[0]


class _Dear(Watching):
    """Runs operations with a weight under another mode, which keeps or takes what they consist of."""

    def __init__(self, kept: _Kept, again: bool) -> None:
        super().__init__()
        self._kept, self._inner = kept, _Within(kept, again)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if func in DEAR and any(isinstance(t, nn.Parameter) for t in tree_leaves((args, kwargs))):
            with self._inner:
                result = func(*args, **kwargs)
            self._kept.got(result)
            return result
        return func(*args, **kwargs)


class _Within(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the results of products and convolutions or, `again`, takes them in place of computing."""

    def __init__(self, kept: _Kept, again: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept, self._again = kept, again

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        dear = func.overloadpacket in flop_registry
        if dear and self._again and (kept := self._kept.take()) is not None:
            return kept
        result = func(*args, **(kwargs or {}))
        if dear and not self._again:
            self._kept.put(result)
        return result
