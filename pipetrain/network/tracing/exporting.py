"""Exports a module by torch.export, and says in one sentence why one cannot be."""

from __future__ import annotations

import inspect
import io
import logging
import re
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributions import Distribution
from torch.export import Dim, ExportedProgram, export
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from pipetrain.errors import ConfigError, one_line
from pipetrain.network.places import standing_in
from pipetrain.network.tensors import made_up
from pipetrain.network.tracing.watching import Watch, watching
from pipetrain.network.values import ValueSpec

SAMPLES = 3  # of a microbatch; the trace holds for any number


def arguments(example: ValueSpec, device: torch.device) -> tuple[Any, dict[str, Any]]:
    """Return the positional and keyword arguments of a model for a made-up microbatch."""
    return as_arguments(example, [made_up(spec, device) for spec in example.of(SAMPLES).specs])


def as_arguments(example: ValueSpec, tensors: list[Any]) -> tuple[Any, dict[str, Any]]:
    """Return tensors, or something for each, as the positional and keyword arguments of a model."""
    if example.names is not None:
        return (), dict(zip(example.names, tensors, strict=True))
    return tuple(tensors), {}


def exported(model: nn.Module, example: ValueSpec) -> tuple[ExportedProgram, torch.device]:
    """Return a model as torch.export traces it in its present mode, and the device. Raises ConfigError.

    A model on the meta device is traced as if it were on the CPU, so that the tensors that its forward makes
    are on one device with its weights.
    """
    named = [*model.parameters(), *model.buffers()]
    device = next((t.device for t in named), torch.device("cpu"))
    if device.type != "meta":
        return _exported(model, example, device), device
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with mode:
        others = {id(t): _on_cpu(t) for t in named}
    with standing_in(model, others):
        return _exported(model, example, torch.device("cpu")), torch.device("cpu")


def _on_cpu(tensor: Tensor) -> Tensor:
    """Return a tensor of the same form on the CPU; under a FakeTensorMode, one without values."""
    other = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return nn.Parameter(other, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else other


def _exported(model: nn.Module, example: ValueSpec, device: torch.device) -> ExportedProgram:
    with torch.random.fork_rng([]):
        args, kwargs = arguments(example, device)
    _refuse_names(model, args, kwargs)
    batch = Dim("batch")
    shapes = as_arguments(example, [{0: batch} for _ in example.specs])
    before: Watch | None = None
    while True:
        program, watch = _watched(model, args, kwargs, shapes[1] or shapes[0], example)
        if not watch.refused:
            return program
        if before is not None:  # in the second run as well
            before.assign(new=False)
            raise ConfigError(watch.refused)
        before = watch
        before.assign(new=True)  # torch.export has undone it; a module may complete itself when it first runs


def _refuse_names(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(model.forward)
        taken = signature.bind(*args, **kwargs).arguments
    except ValueError:  # some callables have no signature
        return
    except TypeError as error:
        given = f"a dict of {', '.join(kwargs)}" if kwargs else f"{len(args)} without names"
        raise ConfigError(
            f"the forward of {type(model).__name__} cannot take the data's inputs, {given}: {error}; choose "
            f"and name them as it does, on the command line by data.columns="
        ) from error
    for name, values in taken.items():
        if signature.parameters[name].kind in (
            inspect.Parameter.VAR_KEYWORD,
            inspect.Parameter.VAR_POSITIONAL,
        ):
            raise ConfigError(
                f"the forward of {type(model).__name__} takes{_those(values)} inputs by "
                f"{signature.parameters[name]}, which torch.export does not trace: name each of them in its "
                f"signature, or leave it out of the data"
            )


def _those(values: object) -> str:
    return f" {', '.join(values)} of the" if isinstance(values, dict) else ""


def _watched(
    model: nn.Module, args: Any, kwargs: Any, shapes: Any, example: ValueSpec
) -> tuple[ExportedProgram, Watch]:
    guards: list[str] = []
    with (
        _quiet(),
        _places_of_guards(guards),
        _unvalidated(),
        watching(model) as watch,
        torch.random.fork_rng([]),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            return export(model, args, kwargs, dynamic_shapes=shapes, strict=False), watch
        except ConfigError:
            raise
        except Exception as error:  # the user's forward may raise anything
            raise _refusal(model, example, error, guards) from error


@contextmanager
def _places_of_guards(found: list[str]) -> Iterator[None]:
    """Add the file and line of the user's code wherever the trace depends on a size that should vary."""
    name = "_log_guard"
    original = getattr(ShapeEnv, name, None)

    def log_guard(shapes: ShapeEnv, *args: Any, **kwargs: Any) -> None:
        frames = [f for f in traceback.extract_stack() if not _is_machinery(f.filename)]
        found.extend(f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in frames[-1:])
        if original is not None:
            original(shapes, *args, **kwargs)

    if original is not None:
        setattr(ShapeEnv, name, log_guard)
    try:
        yield
    finally:
        if original is not None:
            setattr(ShapeEnv, name, original)


@contextmanager
def _unvalidated() -> Iterator[None]:
    """Let torch.distributions not look at the values that they are given, which a trace cannot."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def _is_machinery(file: str) -> bool:
    return "/torch/" in file or "pipetrain/network/" in file or file.startswith("<")


def _refusal(model: nn.Module, example: ValueSpec, error: Exception, guards: list[str]) -> ConfigError:
    text, kind = one_line(error), type(error).__name__
    where = _place(error)
    at = f" at {where}" if where else ""
    way = "make the model an nn.Sequential of its layers, and what cannot be traced stays inside one"
    if any(frame.name == "_detect_is_causal_mask" for frame in traceback.extract_tb(error.__traceback__)):
        return ConfigError(
            f"nn.Transformer looks at the values of its mask{at}, which a trace cannot: pass is_causal "
            f"beside mask, tgt_is_causal beside tgt_mask, and memory_is_causal beside memory_mask"
        )
    if "data-dependent" in text or kind in ("GuardOnDataDependentSymNode", "DataDependentOutputException"):
        return ConfigError(
            f"the model decides on its data{at}, which cannot be cut into stages: compute both ways and "
            f"choose by torch.where, or {way}"
        )
    if "specialized it to be a constant" in text or "Constraints violated" in text:
        at = f" at {guards[0]}" if guards else ""
        if found := re.search(r"batch = Dim\('batch', (min|max)=(\d+)", text):
            limit = f"{'fewer' if found[1] == 'min' else 'more'} than {found[2]}"
            return ConfigError(
                f"the model goes another way{at} where a microbatch has {limit} samples, which a trace "
                f"cannot: let it not depend on their number (torch.cdist by compute_mode="
                f"'donot_use_mm_for_euclid_dist'), or {way}"
            )
        return ConfigError(
            f"the model's code fixes the number of samples{at}: write no number, len(x), comparison or loop, "
            f"but x.shape[0] as it is, e.g. x.view(x.shape[0], -1)"
        )
    if found := re.search(r"Found <class '([^']+)'> in output", text):
        return ConfigError(
            f"the model returns what is no tensor, {found[1]}: return tensors only (for a Hugging Face model "
            f"with a cache: config.use_cache=False)"
        )
    return ConfigError(
        f"the model {type(model).__name__} cannot be traced for {example}{at}: {kind}: "
        f"{text[:200].rstrip('.')}; {way}"
    )


def _place(error: BaseException) -> str:
    """Return the file and line of the user's code in an error's traceback, or ""."""
    stack = re.findall(r'File "([^"]+)", line (\d+)', str(error))
    frames = [frame for frame in stack if not _is_machinery(frame[0])]
    if not frames:
        found = traceback.extract_tb(error.__traceback__)
        frames = [(f.filename, str(f.lineno)) for f in found if not _is_machinery(f.filename)]
    return f"{frames[-1][0].rpartition('/')[2]}:{frames[-1][1]}" if frames else ""


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from writing what is reported otherwise."""
    names = ("", "._subclasses.fake_tensor", ".export", ".fx.experimental.symbolic_shapes")
    loggers = [logging.getLogger(f"torch{name}") for name in names]
    disabled = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        with redirect_stderr(io.StringIO()):  # where torch.export prints a graph
            yield
    finally:
        for logger, value in zip(loggers, disabled, strict=True):
            logger.disabled = value
