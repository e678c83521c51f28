"""Runs a model layer by layer, a few times, and measures what each layer takes.

Each layer gets a graph of its own: its input is cut off from the layer before, as it is at a cut, and its
backward starts from its own output taken for a gradient, which has the right shape and ordinary numbers. All
layers run forward, then all backward from the last to the first, so that each meets a cache that the others
have used, as in training. Times and bytes are taken in passes apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipetrain.boundary import Value, as_tuple, named_layers
from pipetrain.errors import ConfigError
from pipetrain.numerics import Numerics
from pipetrain.partition.estimate import Layer
from pipetrain.partition.profile import LayerTime
from pipetrain.runtime.clock import Clock, Mark
from pipetrain.runtime.weights import OptimizerFactory

WARM_UP, REPEATS = 2, 7

Watch = Callable[[str, int], AbstractContextManager[None]]
"""(forward, backward or step; layer) -> what is wrapped around it."""


def measure_layers(
    model: nn.Sequential,
    x: Tensor,
    layers: Sequence[Layer],
    optimizer: OptimizerFactory,
    numerics: Numerics | None = None,
) -> list[LayerTime]:
    """Measure every layer for the microbatch `x`, in training mode, on the device of both.

    The model is spoilt and must not train; the caller keeps the random generators. `layers`: what is
    estimated of them. Raises ConfigError with the layer's name where one fails.
    """
    numerics = numerics or Numerics()
    numerics.arrange_weights(model)
    bench = _Bench(model, layers, optimizer, numerics)
    for _ in range(WARM_UP):
        bench.run(x, _unwatched)
    watch = _Stopwatch(x.device, len(model))
    for _ in range(REPEATS):
        bench.run(x, watch)
    forward_s, backward_s, step_s = watch.medians()
    saved = bench.saved_bytes(x)
    peaks = bench.peak_bytes(x)
    return [
        LayerTime(
            name=layer.name,
            forward_s=forward_s[i],
            backward_s=backward_s[i],
            step_s=step_s[i],
            saved_bytes=saved[i],
            peak_bytes=peaks[i],
            output_bytes=layer.output.nbytes,
            gradient_bytes=sum(spec.nbytes for spec in layer.output.gradients),
            param_bytes=bench.param_bytes(i),
            state_bytes=bench.state_bytes(i),
            fixed_bytes=bench.fixed_bytes(i),
        )
        for i, layer in enumerate(layers)
    ]


class _Bench:
    """The layers of a model, each to be run by itself."""

    def __init__(
        self,
        model: nn.Sequential,
        layers: Sequence[Layer],
        optimizer: OptimizerFactory,
        numerics: Numerics,
    ) -> None:
        self._model = model.train()
        self._numerics = numerics
        self.layers = named_layers(model)
        self._estimated = layers
        self._params: list[list[nn.Parameter]] = []
        self._fixed: list[list[Tensor]] = []
        met: set[int] = set()
        for _, module in self.layers:
            held = [t for t in (*module.parameters(), *module.buffers()) if id(t) not in met]
            met.update(map(id, held))
            self._params.append([t for t in held if isinstance(t, nn.Parameter) and t.requires_grad])
            self._fixed.append([t for t in held if not t.requires_grad])
        self._optimizers = [optimizer(params) if params else None for params in self._params]
        for taken in filter(None, self._optimizers):
            for group in taken.param_groups:
                group["lr"] = 0.0  # as much work, and the numbers stay ordinary

    def run(self, x: Tensor, watch: Watch) -> None:
        """Run a batch of one microbatch. Gradients add up, as they do over a batch's microbatches."""
        value: Value = x
        graphs: list[tuple[Tensor, ...]] = []
        for index in range(len(self.layers)):
            outputs, value = self._forward(index, value, watch)
            graphs.append(outputs)
        for index in reversed(range(len(self.layers))):
            self._backward(index, graphs.pop(), watch)
        for index, optimizer in enumerate(self._optimizers):
            if optimizer is not None:
                with self._blame(index), watch("step", index):
                    optimizer.step()

    def _forward(self, index: int, value: Value, watch: Watch) -> tuple[tuple[Tensor, ...], Value]:
        """Return a layer's outputs with their graph, and what to hand on."""
        given = tuple(self._numerics.arrange(t.detach()) for t in as_tuple(value))
        if index > 0:
            needs = self._estimated[index - 1].output.needs_grad or (False,) * len(given)
            given = tuple(t.requires_grad_(need) for t, need in zip(given, needs, strict=True))
        if self._estimated[index].writes_input:
            given = tuple(t.clone() for t in given)
        run = self.layers[index][1]
        with self._blame(index), watch("forward", index), self._numerics.context(given[0].device.type):
            result: Value = run(given[0] if isinstance(value, Tensor) else given)
        outputs = as_tuple(result)
        handed = tuple(t.detach() for t in outputs)
        return outputs, handed[0] if isinstance(result, Tensor) else handed

    def _backward(self, index: int, outputs: tuple[Tensor, ...], watch: Watch) -> None:
        wanted = [t for t in outputs if t.requires_grad]
        if wanted:
            grads = [t.detach() for t in wanted]
            with self._blame(index), watch("backward", index):
                torch.autograd.backward(wanted, grads)

    @contextmanager
    def _blame(self, index: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise ConfigError(
                f"layer {index} ({self.layers[index][0]}) of the model cannot be profiled: "
                f"{type(error).__name__}: {' '.join(str(error).split())}"
            ) from error

    def saved_bytes(self, x: Tensor) -> list[int]:
        """Count what autograd saves in a forward, each storage once, at the layer that made it."""
        sizes = [0] * len(self.layers)
        held = {_key(t) for t in (*self._model.parameters(), *self._model.buffers(), x)}
        value: Value = x
        graphs = []  # keep what is saved alive, so that no two storages have one key
        for index in range(len(self.layers)):
            saved: list[Tensor] = []
            given = {_key(t) for t in as_tuple(value)}
            with saved_tensors_hooks(_keeping(saved), lambda tensor: tensor):
                outputs, value = self._forward(index, value, _unwatched)
            graphs.append((saved, outputs))
            for tensor in saved:
                if _key(tensor) not in held:
                    sizes[index - (_key(tensor) in given)] += tensor.untyped_storage().nbytes()
                    held.add(_key(tensor))
        return sizes

    def peak_bytes(self, x: Tensor) -> list[int]:
        """Find what is alive at most as each layer runs forward and backward."""
        peaks = []
        value: Value = x
        for index in range(len(self.layers)):
            with _Live() as live:
                outputs, value = self._forward(index, value, _unwatched)
                self._backward(index, outputs, _unwatched)
            peaks.append(live.peak)
        return peaks

    def param_bytes(self, index: int) -> int:
        """Size of the parameters that a layer trains."""
        return sum(p.nbytes for p in self._params[index])

    def fixed_bytes(self, index: int) -> int:
        """Size of a layer's frozen parameters and buffers."""
        return sum(t.nbytes for t in self._fixed[index])

    def state_bytes(self, index: int) -> int:
        """Size of what the optimizer remembers for a layer's parameters."""
        optimizer = self._optimizers[index]
        held = tree_leaves(list(optimizer.state.values())) if optimizer is not None else []
        return sum(t.nbytes for t in held if isinstance(t, Tensor))


class _Stopwatch:
    """Times what is wrapped in it."""

    def __init__(self, device: torch.device, layers: int) -> None:
        self._clock = Clock(device)
        self._layers = layers
        self._spans: dict[str, list[tuple[int, Mark, Mark]]] = {"forward": [], "backward": [], "step": []}

    @contextmanager
    def __call__(self, part: str, index: int) -> Iterator[None]:
        start = self._clock.mark()
        yield
        self._spans[part].append((index, start, self._clock.mark()))

    def medians(self) -> list[list[float]]:
        """Return the median seconds of each layer's forwards, backwards and steps; 0 where it has none."""
        return [self._medians(spans) for spans in self._spans.values()]

    def _medians(self, spans: list[tuple[int, Mark, Mark]]) -> list[float]:
        seconds: list[list[float]] = [[] for _ in range(self._layers)]
        for index, taken in self._clock.durations(spans):
            seconds[index].append(taken)
        return [median(taken) if taken else 0.0 for taken in seconds]


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors that are made and still alive, whatever the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._now = 0
        self._met: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._meet((args, kwargs), made=False)
        result = func(*args, **(kwargs or {}))
        self._meet(result, made=True)
        self.peak = max(self.peak, self._now)
        return result

    def _meet(self, values: Any, made: bool) -> None:
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                if id(storage) not in self._met:
                    size = storage.nbytes() * made
                    self._now += size
                    self._met[id(storage)] = weakref.ref(storage, partial(self._forget, id(storage), size))

    def _forget(self, key: int, size: int, _: object) -> None:
        self._now -= size
        del self._met[key]


def _unwatched(part: str, index: int) -> AbstractContextManager[None]:
    return nullcontext()


def _keeping(kept: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    return keep


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
