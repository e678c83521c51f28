"""Tensors of host memory whose storages are tagged as the device's, and what the device refuses and notes."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

CUDA = torch.device("cuda", 0)
READS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim"}
"""Operations for whose result the host waits."""
_UNSIGNED = {torch.uint16, torch.uint32, torch.uint64}
_WHOLE = _UNSIGNED | {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
CPU_ALONE = {  # dtypes of which the CPU has a kernel, and CUDA none, as its sources dispatch them
    "_amp_foreach_non_finite_check_and_unscale_": {torch.bfloat16},
    "_foreach_copy_": _UNSIGNED,
    "where": _UNSIGNED,
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "addmv", "convolution"), _WHOLE),
}
NOT_KERNELS = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "lift_fresh",
}

_here = threading.local()
"""Of a rank's thread: its `rank`; `watched`: whether its host must not wait; the `graph` it captures."""
_device = torch._C.TensorBase.device
_to, _tolist, _numpy = Tensor.to, Tensor.tolist, Tensor.numpy
_rng_state, _set_rng_state = torch.get_rng_state, torch.set_rng_state
_group_tensors = _foreach_utils._group_tensors_by_device_and_dtype


class Refused(RuntimeError):
    """What a GPU refuses."""


def here(name: str) -> Any:
    return getattr(_here, name, None)


@contextmanager
def being(**attributes: Any) -> Iterator[None]:
    """Set attributes of this thread."""
    before = {name: here(name) for name in attributes}
    vars(_here).update(attributes)
    try:
        yield
    finally:
        vars(_here).update(before)


def is_tagged(t: Tensor) -> bool:
    """Return whether a tensor is on the device."""
    kind = type(t) in (Tensor, nn.Parameter, nn.Buffer) and t.layout is torch.strided
    return kind and getattr(t.untyped_storage(), "on_device", False)


def tensors_in(*values: Any) -> list[Tensor]:
    """Return the tensors among arguments or results, as torch.utils._pytree does, but sooner."""
    found = [t for t in values if isinstance(t, Tensor)]
    return found + [t for some in values if isinstance(some, tuple | list) for t in tensors_in(*some)]


def tag(value: Any) -> Any:
    for t in tensors_in(value):
        if t.layout is torch.strided and not t.is_meta:
            t.untyped_storage().on_device = True  # type: ignore[attr-defined]
    return value


def is_pinned(t: Tensor) -> bool:
    return getattr(t.untyped_storage(), "is_pinned_memory", False)


def storages(value: Any) -> set[int]:
    return {t.untyped_storage()._cdata for t in tensors_in(value)}


def written(func: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """Return the tensors that an operation writes."""
    pairs = zip(func._schema.arguments, args, strict=False)
    found = [args_ for said, args_ in pairs if said.alias_info is not None and said.alias_info.is_write]
    if "batch_norm" in func.__name__ and "backward" not in func.__name__:  # its schema does not say so
        found.append(args[3:5])
    return tensors_in(*found)


class Gpu:
    """What was seen on the device by all ranks.

    `waits`: where the host waited for the device while its rank was watched, as `what, file:line`;
    `kernels`: by rank and by what the rank was at, see `counting`. `before_kernel` and `on_write` are called
    before each operation, and with the tensors that it writes.
    """

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        self.kernels: Counter[tuple[Any, Any, str]] = Counter()
        self.before_kernel: Callable[[], None] = lambda: None
        self.on_write: Callable[[list[Tensor]], None] = lambda tensors: None
        self.coming: defaultdict[Any, list[_Copy]] = defaultdict(list)  # by rank

    def wait(self, what: str) -> None:
        """Note that the host waits for the device."""
        if here("graph") is not None:
            raise Refused(f"operation not permitted when stream is capturing: {what}")
        if here("watched"):
            ours = [f for f in traceback.extract_stack() if "/pipetrain/" in f.filename]
            at = f"{ours[-1].filename.rpartition('/pipetrain/')[2]}:{ours[-1].lineno}" if ours else "a caller"
            self.waits[f"{what}, {at}"] += 1


class _Copy:
    """A copy to pinned host memory: nothing is there until an event after it has passed."""

    def __init__(self, target: Tensor, source: Tensor) -> None:
        self.target, self.values = target, source.detach().clone()
        if target.is_floating_point():
            target.fill_(torch.nan)

    def land(self) -> None:
        self.target.copy_(self.values)


class _Factories(TorchFunctionMode):
    """What makes tensors on the device, and pinned ones."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name == "new_tensor" and is_tagged(args[0]):
            self._gpu.wait("new_tensor of numbers of the host")
            return tag(func(*args, **kwargs))
        pins = kwargs.pop("pin_memory", False)
        there = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda"
        if there:
            kwargs["device"] = "cpu"
            if name in ("tensor", "as_tensor") and not is_tagged_tensor(args[0]):
                self._gpu.wait(f"torch.{name} of numbers of the host")
        made = func(*args, **kwargs)
        if pins:
            made.untyped_storage().is_pinned_memory = True
        return tag(made) if there else made


def is_tagged_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and is_tagged(value)


class _Kernels(TorchDispatchMode):
    """What runs: over one memory alone; the host waits for some of it."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name, gpu = kwargs or {}, func._overloadpacket.__name__, self._gpu
        tensors = tensors_in(*args, *kwargs.values())
        on = [t for t in tensors if is_tagged(t)]
        off = [t for t in tensors if not is_tagged(t) and t.layout is torch.strided]
        if not on:
            return func(*args, **kwargs)
        is_kernel = not (func.is_view or func.namespace != "aten" or name in NOT_KERNELS)
        if is_kernel:
            gpu.before_kernel()
            gpu.kernels[here("rank"), here("action"), name] += 1
        if lacks := {t.dtype for t in on} & CPU_ALONE.get(name, set()):
            raise NotImplementedError(f'"{name}_cuda" not implemented for {lacks}')
        masks = name == "index" and any(t.dtype is torch.bool for t in tensors_in(args[1]))
        if name in READS or masks:
            gpu.wait(name)
        if name == "copy_":
            return self._copied(func, args, kwargs)
        indexes = name in ("index", "index_put_") and is_tagged(args[0])
        if any(t.dim() or name in ("cat", "stack") for t in off) and not indexes and name != "set_":
            raise Refused(f"Expected all tensors to be on the same device, but {name} got cuda:0 and cpu")
        if writes := written(func, args):
            gpu.on_write(writes)
        if here("graph") is not None:
            return here("graph").note(func, args, kwargs)
        made = func(*args, **kwargs)
        return made if name == "_local_scalar_dense" else tag(made)

    def _copied(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        target, source = args[:2]
        self._gpu.on_write([target])
        if is_tagged(target) == is_tagged(source):
            return here("graph").note(func, args, kwargs) if here("graph") else func(*args, **kwargs)
        no_wait = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        _note_copy(self._gpu, source, target, no_wait)
        if is_tagged(source) and no_wait and is_pinned(target):
            self._gpu.coming[here("rank")].append(_Copy(target, source))
            return target
        return func(*args, **kwargs)


def _note_copy(gpu: Gpu, source: Tensor, target: Tensor | None, no_wait: bool) -> None:
    """Note a copy between the memories for which the host waits; `target` None: one that is not pinned."""
    to_device = not is_tagged(source)
    pinned = is_pinned(source) if to_device else target is not None and is_pinned(target)
    if not (no_wait and pinned):
        gpu.wait(f"a copy {'to' if to_device else 'from'} the device of {list(source.shape)}")


def _moved(gpu: Gpu) -> Callable[..., Tensor]:
    """Return Tensor.to."""

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        words = {name: kwargs[name] for name in ("non_blocking", "copy") if name in kwargs}
        device = dtype = None
        for value in (*args, kwargs.get("device"), kwargs.get("dtype")):
            if isinstance(value, torch.dtype):
                dtype = value
            elif isinstance(value, str | torch.device):
                device = torch.device(value)
            elif isinstance(value, Tensor):
                device, dtype = value.device, value.dtype
        if device is None or device.type == "meta" or self.layout is not torch.strided or self.is_meta:
            return _to(self, *args, **kwargs)
        there = device.type == "cuda"
        if there == is_tagged(self):
            moved = _to(self, dtype or self.dtype, **words)
            return tag(moved) if there else moved
        _note_copy(gpu, self, None, bool(words.get("non_blocking")))
        with _disable_current_modes():
            moved = _to(self, dtype or self.dtype, copy=True)
        moved.untyped_storage().on_device = there  # type: ignore[attr-defined]
        return moved

    return to


def _event(gpu: Gpu) -> type:
    """Return torch.cuda.Event."""

    class Event:
        """Passes when it is asked for the second time."""

        def __init__(self, enable_timing: bool = False, **_: Any) -> None:
            self._at, self._asked, self._before = 0.0, 0, list[_Copy]()

        def record(self, stream: Any = None) -> None:
            self._at, self._before = time.perf_counter(), list(gpu.coming[here("rank")])

        def query(self) -> bool:
            self._asked += 1
            if self._asked > 1:
                self._land()
            return self._asked > 1

        def synchronize(self) -> None:
            if self._asked < 2:
                gpu.wait("Event.synchronize")
            self._land()

        def _land(self) -> None:
            for copy in self._before:
                copy.land()
            coming = gpu.coming[here("rank")]
            coming[:] = [copy for copy in coming if copy not in self._before]
            self._before = []

        def elapsed_time(self, other: Event) -> float:
            return 1e3 * (other._at - self._at)

    return Event


class Graph:
    """Kernels that are noted, and run again on the same tensors."""

    replays = 0

    def __init__(self) -> None:
        self._noted: list[tuple[Any, Any, Any, Any]] = []
        self._undo: list[tuple[Tensor, Tensor]] = []
        self.gpu: Gpu | None = None

    def note(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._undo += [(t, t.clone()) for t in written(func, args)]
        made = tag(func(*args, **kwargs))
        self._noted.append((func, args, kwargs, made))
        return made

    def replay(self) -> None:
        Graph.replays += 1
        with _disable_current_modes(), torch.no_grad():
            for func, args, kwargs, made in self._noted:
                again = func(*args, **kwargs)
                for old, new in zip(tensors_in(made), tensors_in(again), strict=True):
                    if storages(old) != storages(new):
                        assert self.gpu is not None
                        self.gpu.on_write([old])
                        old.data.copy_(new)

    @contextmanager
    def captured(self, gpu: Gpu) -> Iterator[None]:
        """Note what runs: nothing has run afterwards."""
        self.gpu = gpu
        with being(graph=self):
            yield
        for tensor, before in reversed(self._undo):
            tensor.data.copy_(before)
        self._undo = []


@contextmanager
def on_device(gpu: Gpu, rank: int = 0) -> Iterator[None]:
    """Let this thread be a rank with the device."""
    with being(rank=rank), _Factories(gpu), _Kernels(gpu):
        yield


@contextmanager
def pretended() -> Iterator[Gpu]:
    """Let this process have a GPU; its threads use it within `on_device`."""
    gpu = Gpu()
    stream = SimpleNamespace(synchronize=lambda: gpu.wait("Stream.synchronize"))
    cuda: dict[str, Any] = {
        "Event": _event(gpu),
        "CUDAGraph": Graph,
        "graph": lambda graph, **_: graph.captured(gpu),
        "graph_pool_handle": object,
        "current_stream": lambda *_: stream,
        "stream": lambda _: nullcontext(),
        "synchronize": lambda *_: gpu.wait("cuda.synchronize"),
        "empty_cache": lambda: gpu.wait("cuda.empty_cache"),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "get_device_name": lambda *_: "a pretended GPU",
        "get_device_properties": lambda *_: SimpleNamespace(
            total_memory=2**34, name="a pretended GPU", uuid=f"that of rank {here('rank')}"
        ),
        "mem_get_info": lambda *_: (2**34, 2**34),
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": lambda _: None,  # waits are refused while a graph is captured, as it is
        "reset_peak_memory_stats": lambda *_: None,
        "max_memory_allocated": lambda *_: 0,
    }

    def numpy(t: Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_tagged(t):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return _numpy(t, *args, **kwargs)

    def tolist(t: Tensor) -> Any:
        if is_tagged(t):
            gpu.wait("tolist")
        return _tolist(t)

    def pin_memory(t: Tensor, *_: Any) -> Tensor:
        if is_tagged(t):
            raise Refused("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
        if not is_pinned(t):
            t = t.clone()
            t.untyped_storage().is_pinned_memory = True  # type: ignore[attr-defined]
        return t

    to = _moved(gpu)
    methods: dict[str, Any] = {
        "device": property(lambda t: CUDA if is_tagged(t) else _device.__get__(t)),  # type: ignore[attr-defined]
        "is_cuda": property(is_tagged),
        "is_cpu": property(lambda t: not is_tagged(t)),
        "is_pinned": is_pinned,
        "pin_memory": pin_memory,
        "numpy": numpy,
        "tolist": tolist,
        "to": to,
        "cpu": lambda t: to(t, "cpu"),
        "cuda": lambda t, *_: to(t, CUDA),
    }
    autocast, is_enabled, dtype_of = torch.autocast, torch.is_autocast_enabled, torch.get_autocast_dtype
    with ExitStack() as stack:
        for name, value in cuda.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        for name, value in methods.items():
            stack.enter_context(patch.object(Tensor, name, value))
        stack.enter_context(patch.object(torch, "get_rng_state", _plain(_rng_state)))
        stack.enter_context(patch.object(torch, "set_rng_state", _plain(_set_rng_state)))
        for place in (_foreach_utils, torch.nn.utils.clip_grad, sys.modules["torch.optim.optimizer"]):
            stack.enter_context(patch.object(place, "_group_tensors_by_device_and_dtype", _grouped))
        stack.enter_context(patch.object(torch, "autocast", lambda kind, *a, **k: autocast("cpu", *a, **k)))
        stack.enter_context(patch.object(torch, "is_autocast_enabled", lambda kind: is_enabled("cpu")))
        stack.enter_context(patch.object(torch, "get_autocast_dtype", lambda kind: dtype_of("cpu")))
        stack.enter_context(patch.object(Graph, "replays", 0))
        yield gpu


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function run without modes: a generator is locked while it makes the tensor of its state.

    In a mode that is Python's, which another thread may enter then, to wait for the lock and never let go.
    """

    def call(*args: Any) -> Any:
        with _disable_current_modes():
            return function(*args)

    return call


def _grouped(lists: Any, with_indices: bool = False) -> Any:
    found = _group_tensors(lists, with_indices)
    devices = [next((t.device for t in of[0] if t is not None), key[0]) for key, (of, _) in found.items()]
    return {(device, key[1]): some for device, (key, some) in zip(devices, found.items(), strict=True)}
