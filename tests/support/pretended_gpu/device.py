"""What runs on a pretended device: over one memory alone, where CUDA has kernels; when the host waits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils, _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.support.pretended_gpu.graphs import Graph, Pool, capture
from tests.support.pretended_gpu.streams import Event, Gpu, Refused, _here, being, here
from tests.support.pretended_gpu.tensors import (
    CPU_ALONE,
    is_pinned,
    is_tagged,
    storages,
    tag,
    tensors_in,
    written,
)

CUDA = torch.device("cuda", 0)
READS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim"}
"""Operations for whose result the host waits."""
NOT_KERNELS = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "lift_fresh",
}

_device = torch._C.TensorBase.device
_to, _tolist, _numpy = Tensor.to, Tensor.tolist, Tensor.numpy
_rng_state, _set_rng_state = torch.get_rng_state, torch.set_rng_state
_group_tensors = _foreach_utils._group_tensors_by_device_and_dtype


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
            if gpu.host.copies_open and not func.is_view:
                gpu.host.refuse_pinned(storages(off), storages(written(func, args, kwargs)))
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
        if name != "copy_":
            indexes = name in ("index", "index_put_") and is_tagged(args[0])
            if any(t.dim() or name in ("cat", "stack") for t in off) and not indexes and name != "set_":
                raise Refused(f"Expected all tensors to be on the same device, but {name} got cuda:0 and cpu")
        if writes := written(func, args, kwargs):
            gpu.on_write(writes)
        if here("graph") is None and is_kernel:
            gpu.launch(on, writes)
        if name == "copy_" and off:
            return self._copied(func, args, kwargs)
        if here("graph") is not None:
            return here("graph").note(func, args, kwargs)
        made = func(*args, **kwargs)
        return made if name == "_local_scalar_dense" else tag(made)

    def _copied(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Copy between the memories."""
        target, source = args[:2]
        no_wait = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        waits = _note_copy(self._gpu, source, target, no_wait)
        if not waits and is_tagged(source):
            self._gpu.host.copies(target, source.detach().clone())
            return target
        if not waits:
            self._gpu.host.copies(source, None)
        return func(*args, **kwargs)


def _note_copy(gpu: Gpu, source: Tensor, target: Tensor | None, no_wait: bool) -> bool:
    """Return whether the host waits for a copy between the memories; `target` None: not a pinned one."""
    to_device = not is_tagged(source)
    pinned = is_pinned(source) if to_device else target is not None and is_pinned(target)
    if waits := not (no_wait and pinned):
        gpu.wait(f"a copy {'to' if to_device else 'from'} the device of {list(source.shape)}")
    return waits


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
        waits = _note_copy(gpu, self, None, bool(words.get("non_blocking")))
        with _disable_current_modes():
            moved = _to(self, dtype or self.dtype, copy=True)
        moved.untyped_storage().on_device = there  # type: ignore[attr-defined]
        gpu.launch([moved], [moved]) if there else gpu.launch([self], [])
        if not waits:
            gpu.host.copies(self, None)
        return moved

    return to


@contextmanager
def on_device(gpu: Gpu, rank: int = 0) -> Iterator[None]:
    """Let this thread be a rank with the device."""
    with being(rank=rank, stream=None, watched=False), _Factories(gpu), _Kernels(gpu):
        yield


@contextmanager
def pretended() -> Iterator[Gpu]:
    """Let this process have a GPU; its threads use it within `on_device`."""
    gpu = Gpu()

    def graph(one: Graph, pool: Pool | None = None, capture_error_mode: str = "global") -> capture:
        return capture(gpu, one, pool, capture_error_mode)

    cuda: dict[str, Any] = {
        "Event": type("Event", (Event,), {"gpu": gpu}),
        "Stream": lambda *_: gpu.stream(),
        "CUDAGraph": Graph,
        "graph": graph,
        "graph_pool_handle": Pool,
        "current_stream": lambda *_: gpu.host.stream,
        "default_stream": lambda *_: gpu.host.default,
        "stream": lambda stream: being(stream=stream or here("stream")),
        "set_stream": lambda stream: vars(_here).update(stream=stream),
        "synchronize": gpu.synchronize,
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
        "get_sync_debug_mode": lambda: here("sync_debug"),
        "set_sync_debug_mode": lambda mode: vars(_here).update(sync_debug=mode),  # of the process, on a GPU
        "reset_peak_memory_stats": lambda *_: None,
        "max_memory_allocated": lambda *_: 0,
    }

    def numpy(t: Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_tagged(t):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        gpu.host.refuse_pinned(storages(t), set())
        return _numpy(t, *args, **kwargs)

    def tolist(t: Tensor) -> Any:
        if is_tagged(t):
            gpu.wait("tolist")
        else:
            gpu.host.refuse_pinned(storages(t), set())
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
        "record_stream": lambda t, stream: None,
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
        stack.enter_context(patch.object(torch, "is_autocast_enabled", lambda kind="cuda": is_enabled("cpu")))
        stack.enter_context(patch.object(torch, "get_autocast_dtype", lambda kind: dtype_of("cpu")))
        for flag in ("_is_in_torch_dispatch_mode", "_is_in_non_infra_torch_dispatch_mode"):
            # Of the process: threads that leave their modes in another order leave it set.
            stack.enter_context(patch.object(_python_dispatch, flag, getattr(_python_dispatch, flag)))
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
