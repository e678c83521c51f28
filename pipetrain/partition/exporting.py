"""Exports a module by torch.export, and says in one sentence why one cannot be."""

from __future__ import annotations

import logging
import random
import re
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from pipetrain.boundary import Example
from pipetrain.errors import ConfigError, one_line
from pipetrain.partition.estimate import made_up

SAMPLES = 3  # of a microbatch; the trace holds for any number


def arguments(example: Example, device: torch.device, samples: int = SAMPLES) -> tuple[Any, dict[str, Any]]:
    """Return the positional and keyword arguments of a model for a made-up microbatch."""
    return as_arguments(example, [made_up(spec, device) for spec in example.of(samples).specs])


def as_arguments(example: Example, tensors: list[Any]) -> tuple[Any, dict[str, Any]]:
    """Return tensors, or something for each, as the positional and keyword arguments of a model."""
    if example.names is not None:
        return (), dict(zip(example.names, tensors, strict=True))
    return tuple(tensors), {}


def exported(model: nn.Module, example: Example, device: torch.device) -> ExportedProgram:
    """Return a model as torch.export traces it in its present mode. Raises ConfigError."""
    args, kwargs = arguments(example, device)
    batch = Dim("batch")
    shapes = as_arguments(example, [{0: batch} for _ in example.specs])
    states = _random_states()
    for _ in range(2):  # a module may complete itself when it first runs
        before = _attributes(model)
        program = _export(model, args, kwargs, shapes[1] or shapes[0], example)
        changed = _changed(before, _attributes(model))
        if not changed:
            break
    else:
        raise ConfigError(
            f"the model changes its attribute {changed} whenever it runs, which a trace would fix: keep such "
            f"state in a buffer, or make the model an nn.Sequential of layers"
        )
    if states != _random_states():
        raise ConfigError(
            "the model draws from Python's or NumPy's random numbers when it runs, which a trace would fix: "
            "draw by torch, or make the model an nn.Sequential of layers"
        )
    return program


def _export(model: nn.Module, args: Any, kwargs: Any, shapes: Any, example: Example) -> ExportedProgram:
    with _quiet(), _watching(), torch.random.fork_rng([]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
        except ConfigError:
            raise
        except Exception as error:  # the user's forward may raise anything
            raise _refusal(model, example, error) from error


def _refusal(model: nn.Module, example: Example, error: Exception) -> ConfigError:
    text, kind = one_line(error), type(error).__name__
    where = _place(error)
    at = f" at {where}" if where else ""
    way = "make the model an nn.Sequential of its layers, and what cannot be traced stays inside one"
    if "data-dependent" in text or kind in ("GuardOnDataDependentSymNode", "DataDependentOutputException"):
        return ConfigError(
            f"the model decides on its data{at}, which cannot be cut into stages: compute both ways and "
            f"choose by torch.where, or {way}"
        )
    if "specialized it to be a constant" in text or "Constraints violated" in text:
        return ConfigError(
            f"the model's code fixes the number of samples{at}: take it from its input's shape, e.g. "
            f"x.view(x.shape[0], -1)"
        )
    if found := re.search(r"Found <class '([^']+)'> in output", text):
        return ConfigError(
            f"the model returns a {found[1].rpartition('.')[2]}, which holds what is no tensor: return "
            f"tensors only (for a Hugging Face model: config.use_cache=False)"
        )
    return ConfigError(
        f"the model {type(model).__name__} cannot be traced for {example}{at}: {kind}: {text[:300]}; {way}"
    )


def _place(error: BaseException) -> str:
    """Return the file and line of the user's code in an error's traceback, or ""."""
    stack = re.findall(r'File "([^"]+)", line (\d+)', str(error))
    frames = [(file, line) for file, line in stack if "/torch/" not in file]
    if not frames:
        found = traceback.extract_tb(error.__traceback__)
        frames = [
            (f.filename, str(f.lineno))
            for f in found
            if "/torch/" not in f.filename and "pipetrain/partition" not in f.filename
        ]
    frames = [frame for frame in frames if not frame[0].startswith("<")]
    return f"{frames[-1][0].rpartition('/')[2]}:{frames[-1][1]}" if frames else ""


@contextmanager
def _watching() -> Iterator[None]:
    """Refuse what a trace would leave out: gradients of the user's own."""
    apply, hook = torch.autograd.Function.apply, Tensor.register_hook

    def refuse_function(cls: type, *args: Any, **kwargs: Any) -> Any:
        raise ConfigError(
            f"the model uses the autograd Function {cls.__name__}{_caller()}, whose backward a trace would "
            f"leave out: make the model an nn.Sequential of layers"
        )

    def refuse_hook(tensor: Tensor, hook: Any) -> Any:
        raise ConfigError(
            f"the model registers a hook on a tensor{_caller()}, which a trace would leave out: make the "
            f"model an nn.Sequential of layers"
        )

    torch.autograd.Function.apply = classmethod(refuse_function)  # type: ignore[assignment,method-assign]
    Tensor.register_hook = refuse_hook  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        Tensor.register_hook = hook  # type: ignore[method-assign]


def _caller() -> str:
    frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename]
    own = [f for f in frames if not f.filename.endswith("partition/exporting.py")]
    return f" at {own[-1].filename.rpartition('/')[2]}:{own[-1].lineno}" if own else ""


def _attributes(model: nn.Module) -> dict[str, Any]:
    """Return the attributes of all modules that are no tensors, with copies of small collections."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in _REGISTRIES and not isinstance(value, Tensor):
                copied = value.copy() if type(value) in (list, dict, set) else value
                found[f"{name}.{key}".lstrip(".")] = copied
    return found


_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})


def _changed(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return the name of an attribute that has changed, or ""."""
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if name not in before or name not in after:
            return name
        if old is not new and not _equal(old, new):
            return name
    return ""


def _equal(old: Any, new: Any) -> bool:
    if type(old) is not type(new):
        return False
    if type(old) is list:
        return len(old) == len(new) and all(a is b or _equal(a, b) for a, b in zip(old, new, strict=True))
    if type(old) is dict:
        return old.keys() == new.keys() and all(old[k] is new[k] or _equal(old[k], new[k]) for k in old)
    try:
        return bool(old == new)
    except Exception:  # such as a comparison of tensors within
        return True


def _random_states() -> Any:
    return random.getstate(), repr(np.random.get_state(legacy=False))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from logging what is reported otherwise."""
    loggers = [logging.getLogger(name) for name in ("torch", "torch._subclasses.fake_tensor", "torch.export")]
    disabled = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, value in zip(loggers, disabled, strict=True):
            logger.disabled = value
