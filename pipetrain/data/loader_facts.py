"""Facts about a user's loader before it is read: its parts, its length, its batch sizes."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from types import FunctionType, ModuleType, NoneType
from typing import Any

from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, default_collate

from pipetrain.model.specs import Size

_TORCHS_SAMPLERS = {"torch.utils.data.sampler", "torch.utils.data.distributed"}
MOST_PARTS, MOST_LISTED = 1000, 64  # limits of the search: in all, and in one list or dict
_NO_PARTS = (type, FunctionType, ModuleType, Tensor, nn.Module, str, bytes, int, float, NoneType)
_COUNTS = ("num_replicas", "world_size", "num_processes", "num_ranks", "nranks")  # of readers that share data
_READING, _ASKING = ("__iter__", "__getitem__", "__len__"), {"get_world_size", "WORLD_SIZE"}


def parts_of(loader: object) -> dict[str, Any]:
    """Return a loader and the objects that it holds, by their paths, such as "sampler.generator".

    The nearest come first. A begun iterator does not count: it is not read again.
    """
    parts: dict[str, Any] = {}
    seen, left = set[int](), deque[tuple[str, Any]]([("", loader)])
    while left and len(seen) < MOST_PARTS:
        path, part = left.popleft()
        if id(part) in seen or isinstance(part, _NO_PARTS) or (path and hasattr(part, "__next__")):
            continue
        seen.add(id(part))
        if isinstance(part, list | tuple):
            inner: Mapping[Any, Any] = dict(enumerate(part))
        elif isinstance(part, Mapping):
            inner = part
        else:
            parts[path] = part
            inner = getattr(part, "__dict__", {})
        if len(inner) <= MOST_LISTED:
            left += [(f"{path}.{name}".lstrip("."), value) for name, value in inner.items()]
    return parts


def share_in(loader: object) -> str:
    """Return the name of a part that limits this rank to a share of the data, as a DistributedSampler; or "".

    It reads or numbers samples, and has a count of readers above 1, or reads the number of ranks.
    """
    for part in parts_of(loader).values():
        if not (hasattr(part, "__iter__") or hasattr(part, "__getitem__")):
            continue
        for holder in (part, getattr(part, "_distributed", None)):  # the second of a Hugging Face data set
            counts = (getattr(holder, "__dict__", {}).get(name) for name in _COUNTS)
            if any(isinstance(count, int) and count > 1 for count in counts):
                return type(part).__name__
        codes = (getattr(getattr(type(part), name, None), "__code__", None) for name in _READING)
        if any(code and not _ASKING.isdisjoint((*code.co_names, *code.co_consts)) for code in codes):
            return type(part).__name__
    return ""


def has_length(loader: Any) -> bool:
    """Return whether a loader has a number of batches."""
    try:
        return len(loader) >= 0
    except TypeError:  # a DataLoader has none for an IterableDataset without one
        return False


def known_sizes(loader: object) -> list[Size] | None:
    """Return the size of each batch if known without reading, else None.

    Only for torch's own DataLoader, samplers and default_collate: others may give other numbers of samples.
    """
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler:
        return None
    if type(loader).__iter__ is not DataLoader.__iter__:
        return None
    batches = loader.batch_sampler
    if loader.collate_fn is not default_collate or type(batches.sampler).__module__ not in _TORCHS_SAMPLERS:
        return None
    whole, rest = divmod(len(batches.sampler), batches.batch_size)  # type: ignore[arg-type]
    return [Size(batches.batch_size)] * whole + [Size(rest)] * (rest > 0 and not batches.drop_last)
