"""A model whose function is called on every rank, though no rank holds all of its parameters.

While the function runs, a parameter goes to the meta device as soon as a module registers it, as with
accelerate's `init_empty_weights`; buffers and other tensors are made as always. A rank then makes the
parameters of its own stages by what their modules define for that: `reset_parameters()`, `init_weights()`, or
`_init_weights(module)` of a module around them. Each call is seeded by the run's seed and the module's name,
so that the numbers depend on neither cuts nor ranks.

A function may do something else to a parameter, which these calls would not. So what it does to each is
compared with what they do, both on the meta device, where neither takes time or memory. That a tensor was
asked whether it is there counts too: `trunc_normal_` and others of torch.nn.init then do nothing.
"""

from __future__ import annotations

import inspect
import random
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipetrain.errors import ConfigError, one_line
from pipetrain.network.draws import Beginning, seed_of
from pipetrain.network.places import in_place_of, named_tensors, on_meta, standing_in
from pipetrain.network.tensors import storage_of, strided

Factory = Callable[[], nn.Module]
WAY_OUT = "or let every rank make the whole model, by Pipeline(model) or build=whole"
_OWN = ("reset_parameters", "_reset_parameters", "init_weights", "_init_weights")
_COPIES = {"aten::clone", "aten::_to_copy"}  # as of deepcopy and Module.to
_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]
_OVERWRITING = {"aten::copy_", "aten::fill_", "aten::zero_"}


def build(factory: Factory, seed: int) -> tuple[nn.Module, Initial]:
    """Call a factory; return its model with all parameters on the meta device, and their initial numbers.

    Raises ConfigError for a factory that fails.
    """
    hook = register_module_parameter_registration_hook(_put_on_meta)
    try:
        with Beginning().again(), _Written() as written, _Asked(written):
            _seed(seed)
            model = factory()
    except ConfigError:
        raise
    except Exception as error:  # a factory may raise anything
        raise ConfigError(
            f"{getattr(factory, '__qualname__', factory)}, which was called to make the model, failed: "
            f"{type(error).__name__}: {one_line(error)}; if it needs the numbers of parameters, let it do "
            f"without, {WAY_OUT}"
        ) from error
    finally:
        hook.remove()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the model's factory must return an nn.Module, not {type(model).__name__}")
    return model, Initial(model, seed, written)


def _put_on_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    if type(parameter) is nn.Parameter and not _is_on_meta(parameter):
        # Also where the factory has it already.
        torch.utils.swap_tensors(parameter, on_meta(parameter))  # type: ignore[no-untyped-call]


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@dataclass(frozen=True, slots=True)
class _Operation:
    """What was done to a tensor, and to its copies. `overwrites`: what it held before is lost."""

    text: str
    overwrites: bool


class _Written(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is done to tensors on the meta device, by storage."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: dict[int, list[_Operation]] = defaultdict(list)
        self._held: list[torch.UntypedStorage] = []  # so that no address is used twice

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        if schema.name in _COPIES and _is_on_meta(result):
            self.of(result).extend(self.of(args[0]))
        named = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **(kwargs or {})}
        written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        for tensor in strided([named.get(name) for name in written]):
            if _is_on_meta(tensor):
                plain = [leaf for leaf in tree_leaves(named) if not isinstance(leaf, Tensor)]
                whole = tensor.nbytes == tensor.untyped_storage().nbytes()
                new = torch.Tag.nondeterministic_seeded in func.tags or schema.name in _OVERWRITING
                self.of(tensor).append(_Operation(f"{schema.name}{plain}", whole and new))
        return result

    def of(self, tensor: Tensor) -> list[_Operation]:
        self._held.append(tensor.untyped_storage())
        return self.operations[storage_of(tensor)]


class _Asked(TorchFunctionMode):
    """Notes which tensors are asked whether they are on the meta device."""

    def __init__(self, written: _Written) -> None:
        super().__init__()
        self._written = written

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _IS_META and _is_on_meta(args[0]):
            self._written.of(args[0]).append(_Operation("is_meta", overwrites=False))
        return func(*args, **(kwargs or {}))


def _is_on_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"  # not .is_meta, which is noted


def _lasting(operations: list[_Operation]) -> list[_Operation]:
    """Return the operations on which the numbers of a tensor depend."""
    last = max((n for n, one in enumerate(operations) if one.overwrites), default=0)
    return operations[last:]


def _texts(operations: list[_Operation]) -> list[str]:
    return [one.text for one in _lasting(operations)]


@dataclass(frozen=True, slots=True)
class _Initialiser:
    """A method that gives a module's parameters their numbers."""

    method: str
    name: str  # of the module
    module: nn.Module
    call: Callable[[], object]


class Initial:
    """The initial numbers of a factory's model: its Values. `made`: what the factory did to its tensors."""

    def __init__(self, model: nn.Module, seed: int, made: _Written) -> None:
        self._model = model
        self._seed = seed
        self._tensors = {name: t for name, t in named_tensors(model).items() if t.is_meta}
        self._made = {name: made.operations[storage_of(t)] for name, t in self._tensors.items()}
        self._initialisers = _initialisers(model)
        self._owners: dict[int, list[nn.Module]] = defaultdict(list)  # several of a tied tensor
        for module in model.modules():
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                self._owners[id(tensor)].append(module)
        self._first_copy = self._copies()

    def _copies(self) -> dict[str, str]:
        """Return the name of the first of the modules that were copied from one and are still equal to each.

        So they begin alike, as those of nn.TransformerEncoder, or a teacher and its student.
        """
        first: dict[tuple[int, ...], str] = {}
        found: dict[str, str] = {}
        for name, module in self._model.named_modules():
            own = (self._made.get(f"{name}.{key}".lstrip("."), []) for key in module._parameters)
            made = tuple(id(operation) for operations in own for operation in _lasting(operations))
            found[name] = first.setdefault(made, name) if made else name
        return found

    @property
    def digest(self) -> int:
        """A checksum of how the parameters are made, equal on ranks whose factories did the same."""
        return zlib.crc32(repr({name: _texts(done) for name, done in self._made.items()}).encode())

    def prove(self) -> None:
        """Refuse parameters that their modules would not make as the factory did. Raises ConfigError."""
        for name in self._tensors:
            self._initialisers_of(name)

    def tensors(self, names: Collection[str]) -> dict[str, Tensor]:
        wanted = {name: self._initialisers_of(name) for name in names if name in self._tensors}
        now = named_tensors(self._model)  # others, where these numbers have been collected
        found: dict[str, Tensor] = {}
        with Beginning().again():
            for number in sorted({number for chosen in wanted.values() for number in chosen}):
                others = {}
                for name in self._written[number]:  # those not wanted too: all are drawn one after another
                    real = found.get(name)
                    if real is None or number not in wanted[name]:
                        real = in_place_of(self._tensors[name], _empty(self._tensors[name]))
                    if number in wanted.get(name, ()):
                        found[name] = real
                    others[id(now[name])] = real
                self._run(self._initialisers[number], others)
        return {name: tensor.data for name, tensor in found.items()}

    def _initialisers_of(self, name: str) -> list[int]:
        """Return the numbers of the initialisers that together do what the factory did to a tensor.

        Where modules share it, one of them has made it. Raises ConfigError if there are none.
        """
        owners = self._owners[id(self._tensors[name])]
        writers = [number for number, written in enumerate(self._written) if name in written]
        for owner in owners:
            chosen = [n for n in writers if self._initialisers[n].module not in {*owners} - {owner}]
            done = [operation for n in chosen for operation in self._written[n][name]]
            if chosen and _texts(done) == _texts(self._made[name]):
                return chosen
        kind = type(owners[0]).__name__
        which = "these do not do what the model's function does to it" if writers else "there is none"
        raise ConfigError(
            f"{name} of the model cannot be made by the rank that trains it alone, which calls {kind}'s "
            f"reset_parameters() or init_weights(), or _init_weights(module) of a module around it: {which}; "
            f"let one do all of it, give weights=, {WAY_OUT}"
        )

    @cached_property
    def _written(self) -> list[dict[str, list[_Operation]]]:
        """What each initialiser does to each tensor."""
        names = {storage_of(tensor): name for name, tensor in self._tensors.items()}
        found = []
        for initialiser in self._initialisers:
            with _Written() as written, _Asked(written):
                self._run(initialiser, {})
            found.append({names[key]: done for key, done in written.operations.items() if key in names})
        return found

    def _run(self, initialiser: _Initialiser, others: dict[int, Tensor]) -> None:
        """Let a module initialise these tensors in place of its own; all that are real keep their numbers."""
        real = [t for t in named_tensors(initialiser.module).values() if not _is_on_meta(t)]
        _seed(seed_of(self._seed, initialiser.method, self._first_copy[initialiser.name]))
        try:
            with torch.no_grad(), standing_in(initialiser.module, {id(t): t.clone() for t in real} | others):
                initialiser.call()
        except Exception as error:  # a user's method may raise anything
            raise ConfigError(
                f"{initialiser.method} of module {initialiser.name} of the model failed: "
                f"{type(error).__name__}: {one_line(error)}; if it needs the numbers of other modules' "
                f"parameters, let it do without, {WAY_OUT}"
            ) from error


def _empty(tensor: Tensor) -> Tensor:
    """Return memory for a tensor that shows where it has been left as it is."""
    fill = torch.nan if tensor.is_floating_point() or tensor.is_complex() else 0
    return torch.full_like(tensor, fill, device="cpu")


def _initialisers(model: nn.Module) -> list[_Initialiser]:
    """Return the methods that initialise modules: first their own, then those of modules around them.

    Each kind is in the order of nn.Module.apply, the children first, as constructors call them.
    """
    own: list[_Initialiser] = []
    around: list[_Initialiser] = []
    for name, module, outer in _walk(model, "", None, set()):
        for method in _OWN:
            call: Any = getattr(module, method, None)
            if _takes(call) and not (method == "init_weights" and outer is module):  # it calls _init_weights
                own.append(_Initialiser(method, name, module, call))
                break
        if outer is not None:
            call = partial(getattr(outer, "_init_weights"), module)  # noqa: B009
            around.append(_Initialiser("_init_weights", name, module, call))
    return own + around


def _walk(
    module: nn.Module, name: str, outer: nn.Module | None, met: set[nn.Module]
) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
    """Yield modules, children first, with the innermost one around each that has _init_weights(module)."""
    met.add(module)
    outer = module if _takes(getattr(module, "_init_weights", None), module) else outer
    for key, child in module.named_children():
        if child not in met:
            yield from _walk(child, f"{name}.{key}", outer, met)
    yield name.lstrip("."), module, outer


def _takes(method: Any, *arguments: object) -> bool:
    try:
        inspect.signature(method).bind(*arguments)
    except (TypeError, ValueError):  # no function, or one that takes others
        return False
    return True
