"""What a layer's forward does, operation by operation: its work, what it uses, and what it saves.

Autograd saves storages, each once, however many tensors share it. A split backward (see
runtime/stage/split_backward.py) defers the weight gradients of products: what products save, and the
gradients of their results, are held from I until W. A selective recompute (see runtime/stage/recompute.py)
keeps their results.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from pipetrain.model.matrix_products import EXPENSIVE, Watching, overloads
from pipetrain.model.network import ValueId
from pipetrain.model.trial_tensors import storage_of, strided

_ATEN = torch.ops.aten
# PyTorch has no formula for the CPU's fused attention; it multiplies as much as the GPU's.
_COUNTED_AS = {_ATEN._scaled_dot_product_flash_attention_for_cpu: _ATEN._scaled_dot_product_flash_attention}
# Not kept by a selective recompute, as they cost nothing:
_NOT_KEPT = {F.embedding, *overloads(_ATEN.embedding)}


class Spy(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts a layer's work, and finds the tensors that it uses besides the `known` ones.

    `names`: by storage, the name of each tensor of the model, and whether it is trained.
    """

    def __init__(
        self, names: Mapping[int, tuple[str, bool]], known: Sequence[Tensor], trained: Sequence[Tensor]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names
        self._known = {storage_of(t) for t in known}
        self._trained = {storage_of(t) for t in trained}  # and of their casts
        self.flops = 0
        self.weight_flops = 0
        self.digest = 0  # of all operations with their numbers, the same for tensors on the meta device
        self.draws = False
        self.wrong = ""
        self.borrowed: set[str] = set()
        self.foreign: dict[object, Tensor] = {}  # by storage

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # avoids loading torch's compiler

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in strided(args, kwargs):
            if storage_of(tensor) not in self._known:
                self._look_at(tensor)
        if func.namespace != "prim" and func is not _ATEN.detach.default:  # these differ between the devices
            plain = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, bool | int | float)]
            words = [f"{number:.6g}" for number in plain]  # a mean may differ by its rounding
            self.digest = zlib.crc32(f"{func}{words}".encode(), self.digest)
        result = func(*args, **(kwargs or {}))
        self.draws = self.draws or _draws(func, args, kwargs or {})
        if formula := flop_registry.get(_COUNTED_AS.get(func._overloadpacket, func._overloadpacket)):
            flops = formula(*args, **(kwargs or {}), out_val=result)
            self.flops += flops
            self.weight_flops += flops if self._trains(args) else 0
        elif func is _ATEN._to_copy.default and self._trains(args):
            self._trained.add(storage_of(result))
        self._known.update(map(storage_of, strided(result)))
        return result

    def _trains(self, args: tuple[Any, ...]) -> bool:
        return any(isinstance(t, Tensor) and storage_of(t) in self._trained for t in args)

    def _look_at(self, tensor: Tensor) -> None:
        name, trained = self._names.get(storage_of(tensor), ("", False))
        if name and not trained:
            self.borrowed.add(name)
        elif name or (tensor.requires_grad and tensor.is_leaf):
            what = f"parameter {name}" if name else f"a parameter {list(tensor.shape)} of no layer"
            self.wrong = (
                f"uses {what}, which is not registered in it and would not be trained as in one process; "
                f"make it an attribute of the layer"
            )
        elif tensor.requires_grad:
            self.wrong = (
                f"uses a tensor {list(tensor.shape)} that a layer before it has made and not returned: hand "
                f"it on from layer to layer, as one of a tuple"
            )
        elif not isinstance(tensor, FakeTensor):
            self.foreign[storage_of(tensor)] = tensor


def _draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation draws random numbers; the tag also marks attention without dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = (argument.name for argument in func._schema.arguments)
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    return bool(named.get("dropout_p", 1.0))


class Kept(NamedTuple):
    """Bytes that a forward saves: of values, which a stage holds once, and `inside` the layer."""

    values: Mapping[ValueId, int]
    inside: int


NOTHING = Kept({}, 0)


class SavedWatch(Watching):
    """A context that records what a forward with these `weights` saves, without the weights themselves."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        weights = list(weights)
        self._weights = {id(t) for t in weights if t.requires_grad}
        self._apart = {storage_of(t) for t in strided(weights)}
        self._saved: list[Tensor] = []  # referenced, so that no address is used twice
        self._by_products: list[Tensor] = []
        self._results: list[tuple[Tensor, int]] = []  # of products, with their version counters
        self._within = False  # a product
        self._hooks: list[saved_tensors_hooks] = []  # one per entry of the context, as within attention

    def __enter__(self) -> SavedWatch:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._hooks.append(saved_tensors_hooks(self._pack, lambda tensor: tensor))
        self._hooks[-1].__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.pop().__exit__(*error)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        operands = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        trained = [t for t in operands if id(t) in self._weights or id(t._base) in self._weights]
        # The same condition as in Deferred.put_off:
        alone = len(trained) == len(operands) or all(t.dim() < 2 for t in trained)
        if func not in EXPENSIVE or self._within or alone:
            return func(*args, **kwargs)
        self._within = True
        try:
            result = func(*args, **kwargs)
        finally:
            self._within = False
        self._results.append((result, result._version if func not in _NOT_KEPT else -1))
        return result

    def _pack(self, tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided and storage_of(tensor) not in self._apart:
            (self._by_products if self._within else self._saved).append(tensor)
        return tensor.detach()  # a node that saves its own output would keep itself alive

    def kept(self, names: Mapping[int, ValueId]) -> tuple[Kept, Kept, Kept]:
        """Return what autograd saves, what W needs after I, and the results that nothing overwrites.

        `names`: by storage, of values. The gradients that W needs have the size of the results.
        """
        by_products = _kept(self._by_products, names)
        gradients = sum(result.nbytes for result, _ in self._results)
        saved = (
            _kept([*self._saved, *self._by_products], names),
            Kept(by_products.values, by_products.inside + gradients),
            _kept([t for t, version in self._results if t._version == version], names),
        )
        for tensors in (self._saved, self._by_products, self._results):
            tensors.clear()  # they refer to the graph, which refers to this object
        return saved


def _kept(tensors: Iterable[Tensor], names: Mapping[int, ValueId]) -> Kept:
    sizes = {storage_of(t): t.untyped_storage().nbytes() for t in tensors}
    values = {names[key]: nbytes for key, nbytes in sizes.items() if key in names}
    return Kept(values, sum(sizes.values()) - sum(values.values()))
