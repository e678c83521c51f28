"""Builds a model of a factory without its numbers.

The factory runs on tensors without data that look like those of one process: on the CPU, with shapes, so that
a library that leaves out the initialisation of a model on the meta device does not. What it does to them is
recorded, and the model is then put on the meta device.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from pipetrain.errors import ConfigError, one_line
from pipetrain.network.chain import is_chain
from pipetrain.network.deferred import WAY_OUT, Constant, Deferred, Ref
from pipetrain.network.materialise import named_tensors
from pipetrain.network.places import places, replace
from pipetrain.network.tensors import quiet

Factory = Callable[[], nn.Module]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, record: Deferred) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record = record

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None:
            raise ConfigError(
                f"the model's factory draws from a generator of its own ({func}), and each rank draws the "
                f"numbers of its own stages: leave out generator=, {WAY_OUT}"
            )
        given = tree_map(self._record.described, (args, kwargs))
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):  # as of Tensor.item or nonzero
            with _disable_current_modes():
                args, kwargs = tree_map(self._real, given)
                return func(*args, **kwargs)
        self._record.add(func, given, result)
        return result

    def _real(self, value: Any) -> Any:
        if isinstance(value, Constant):
            return value.tensor
        return self._record.repeated([value])[0] if isinstance(value, Ref) else value


def build(factory: Factory, seed: int) -> tuple[nn.Module, Deferred]:
    """Call a factory; return its model, on the meta device, and the source of its tensors' numbers.

    Tensors that the factory has not made itself stay as they are, and those that are neither parameters nor
    buffers have their numbers at once. Raises ConfigError for a factory that cannot be recorded.
    """
    record = Deferred(seed)
    try:
        with _seeded(seed), _without_data(record):
            model = factory()
    except ConfigError:
        raise
    except Exception as error:  # a factory may raise anything
        raise ConfigError(
            f"{getattr(factory, '__qualname__', factory)}, which was called to make the model, failed: "
            f"{type(error).__name__}: {one_line(error)}; if it needs the numbers of tensors, let it do "
            f"without, {WAY_OUT}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the model's factory must return an nn.Module, not {type(model).__name__}")
    _put_on_meta(model, record)
    return model, record


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed Python's and NumPy's generators for a while."""
    before = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


@contextmanager
def _without_data(record: Deferred) -> Iterator[None]:
    """Let tensors be made without data, and record what is done to them."""

    def swap(old: Tensor, new: Tensor) -> None:  # nn.Module.to calls torch's own, which refuses them
        old.data = new.data

    with patch.object(torch.utils, "swap_tensors", swap), quiet():  # noqa: SIM117
        with FakeTensorMode(allow_non_fake_inputs=True), _Recorder(record):
            yield


def _put_on_meta(model: nn.Module, record: Deferred) -> None:
    """Put tensors on the meta device in the places of those without data, and name them in the record."""
    named = {name: t for name, t in named_tensors(model).items() if isinstance(t, FakeTensor)}
    record.name(named)
    bases: dict[int, torch.UntypedStorage] = {}
    others: dict[int, Tensor] = {id(t): _on_meta(t, record, bases) for t in named.values()}
    attributes: dict[int, tuple[FakeTensor, Ref]] = {}
    for place in places(model):
        tensor = place.tensor
        if not isinstance(tensor, FakeTensor) or id(tensor) in others:
            continue
        ref = record.described(tensor)
        if ref.storage in bases:
            raise ConfigError(
                f"{place.name} of the model shares the memory of a parameter or buffer, which it does not "
                f"when each rank makes its own: compute it in forward, {WAY_OUT}"
            )
        if not is_chain(model) and tensor.dim():
            raise ConfigError(
                f"{place.name} of the model is a tensor, but neither a parameter nor a buffer, and the model "
                f"is traced without its numbers: register it as a buffer, {WAY_OUT}"
            )
        attributes[id(tensor)] = tensor, ref
    made = record.repeated([ref for _, ref in attributes.values()])
    for (tensor, _), value in zip(attributes.values(), made, strict=True):
        others[id(tensor)] = value.requires_grad_(tensor.requires_grad)
    replace([model], others)


def _on_meta(tensor: FakeTensor, record: Deferred, bases: dict[int, torch.UntypedStorage]) -> Tensor:
    ref = record.described(tensor)
    if ref.storage not in bases:
        nbytes = tensor.untyped_storage().nbytes()
        bases[ref.storage] = torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()
    made = torch.empty(0, dtype=ref.dtype, device="meta")
    made.set_(bases[ref.storage], ref.offset, ref.shape, ref.stride)
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, tensor.requires_grad)
        own = vars(tensor.fake_mode.from_tensor(torch.empty(0)))  # of torch
        kept = {key: value for key, value in vars(tensor).items() if key not in own and key != "_is_param"}
        vars(made).update(kept)
    return made
