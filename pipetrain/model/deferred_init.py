"""A model whose function is called on every rank, though no rank holds all of its parameters.

While the function runs, each parameter goes to the meta device when a module registers it, as with
accelerate's `init_empty_weights`; buffers and other tensors are made as usual. To get the values of some
parameters, the function is called again: these, and those that they are computed from, then stay in memory.

The generator that draws a parameter is seeded by the run's seed, the position of the parameter among all
registered ones, and how often it was drawn before. So the values depend on neither cuts nor ranks.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from pipetrain.errors import ConfigError, failing
from pipetrain.model.random_numbers import RngSnapshot, seed_of
from pipetrain.model.tensor_places import named_tensors, on_meta
from pipetrain.model.trial_tensors import strided

Factory = Callable[[], nn.Module]
_WAY_OUT = "or let every rank make the whole model, by Pipeline(model) or build=whole"
_COPIES = {"aten::clone", "aten::_to_copy"}  # as of deepcopy and Module.to

Key = tuple[int, ...]
"""The number of a registered parameter, and of its copy: (3, 0) is the first copy of parameter 3.

Other tensors computed from it have the same key.
"""


def build(factory: Factory, seed: int) -> tuple[nn.Module, Initial]:
    """Return a factory's model, with parameters on the meta device, and their values. Raises ConfigError."""
    call = _Call(seed, in_memory=())
    model = call.run(factory)
    return model, Initial(factory, seed, model, call)


class _Call(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A call of a factory that keeps some parameters.

    `sources`: for each key, the keys that it is computed from; `digest`: a checksum of all operations.
    """

    def __init__(self, seed: int, in_memory: Collection[Key]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sources: dict[Key, set[Key]] = defaultdict(set)
        self.digest = 0
        self._seed = seed
        self._in_memory = in_memory
        self._keys = WeakKeyDictionary[torch.UntypedStorage, Key]()
        self._registered = 0
        self._copies: Counter[Key] = Counter()
        self._draws: Counter[Key] = Counter()
        self._last: Key = ()
        self._makes_tensors = False  # whether this class itself makes tensors

    def run(self, factory: Factory) -> nn.Module:
        hook = register_module_parameter_registration_hook(self._register)
        try:
            with (
                failing(
                    f"{getattr(factory, '__qualname__', factory)}, called to make the model, failed",
                    f"; if it needs the numbers of parameters, let it do without, {_WAY_OUT}",
                ),
                RngSnapshot().replayed(),
                self,
            ):
                random.seed(self._seed)
                np.random.seed(self._seed % 2**32)
                if not isinstance(model := factory(), nn.Module):
                    raise ConfigError(
                        f"the model's factory must return an nn.Module, not {type(model).__name__}"
                    )
                return model
        finally:
            hook.remove()

    def key_of(self, tensor: Tensor) -> Key | None:
        return self._keys.get(tensor.untyped_storage())

    def _register(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if type(parameter) is not nn.Parameter:
            return
        key, before = (self._registered,), self.key_of(parameter)
        self._registered += 1
        self.sources[key] |= set() if before is None else {before}
        if key not in self._in_memory and not parameter.is_meta:
            self._makes_tensors = True
            # By swapping, so that references that the factory holds already change too.
            torch.utils.swap_tensors(parameter, on_meta(parameter))  # type: ignore[no-untyped-call]
            self._makes_tensors = False
        self._keys[parameter.untyped_storage()] = key

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        keys = [key for key in map(self.key_of, strided(args, kwargs)) if key is not None]
        if self._makes_tensors:
            return func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._seed_generator(kwargs.get("generator"), keys)
        if not keys:
            if kwargs.get("device") == torch.device("meta"):  # as of a parameter
                kwargs["device"] = torch.device("cpu")
            return func(*args, **kwargs)
        plain = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, bool | int | float)]
        self.digest = zlib.crc32(f"{keys}{func}{plain}".encode(), self.digest)
        result_key = keys[0]
        for key in keys if func._schema.is_mutable else [result_key]:
            self.sources[key].update(keys)
        if func._schema.name in _COPIES:
            result_key = (*keys[0], self._copies[keys[0]])
            self._copies[keys[0]] += 1
            self.sources[result_key].add(keys[0])
        if result_key not in self._in_memory or any(key not in self._in_memory for key in keys):
            args, kwargs = tree_map_only(
                Tensor, lambda t: t if self.key_of(t) is None else on_meta(t), (args, kwargs)
            )
        result = func(*args, **kwargs)
        for tensor in strided(result):
            self._keys.setdefault(tensor.untyped_storage(), result_key)
        return result

    def _seed_generator(self, generator: torch.Generator | None, keys: list[Key]) -> None:
        """Seed the next draw, for a parameter, or as a continuation of the last one's."""
        self._last = keys[0] if keys else self._last
        seed = seed_of(self._seed, self._last, self._draws[self._last])
        (generator or torch.default_generator).manual_seed(seed)
        self._draws[self._last] += 1


class Initial:
    """The initial values of a factory's model.

    `digest`: a checksum of the operations, equal on ranks whose factories did the same.
    """

    def __init__(self, factory: Factory, seed: int, model: nn.Module, call: _Call) -> None:
        self._factory = factory
        self._seed = seed
        self._sources = call.sources
        tensors = named_tensors(model).items()
        self._keys = {name: call.key_of(tensor) or () for name, tensor in tensors if tensor.is_meta}
        self.digest = call.digest

    def tensors(self, names: Collection[str]) -> dict[str, Tensor]:
        requested = [name for name in names if name in self._keys]
        if not requested:
            return {}
        keys = dict.fromkeys(self._keys[name] for name in requested)
        todo = [*keys]
        for key in todo:  # grows
            todo += [source for source in self._sources.get(key, ()) if source not in keys]
            keys |= dict.fromkeys(todo)
        numbers = named_tensors(_Call(self._seed, keys).run(self._factory))
        for name in requested:
            if name not in numbers or numbers[name].is_meta:
                raise ConfigError(
                    f"{name} of the model has no numbers when the function that makes the model is called "
                    f"again: let it make all that it uses each time, and the same, {_WAY_OUT}"
                )
        return {name: numbers[name].detach() for name in requested}
