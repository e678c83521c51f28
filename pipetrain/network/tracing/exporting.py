"""Exports a module by torch.export, and says in one sentence why one cannot be."""

from __future__ import annotations

import inspect
import io
import logging
import re
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributions import Distribution
from torch.export import Dim, ExportedProgram, export
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_map

from pipetrain.errors import ConfigError, one_line
from pipetrain.network.places import standing_in
from pipetrain.network.tensors import made_up
from pipetrain.network.tracing.dataflow import SAMPLES
from pipetrain.network.values import ValueSpec

WAY_OUT = "make the model an nn.Sequential of its layers, and what cannot be traced stays inside one"


def as_arguments(example: ValueSpec, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return tensors, or something for each, as the positional and keyword arguments of a model."""
    if example.names is not None:
        return (), dict(zip(example.names, tensors, strict=True))
    return tuple(tensors), {}


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's tensors."""
    return next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))


@contextmanager
def without_numbers(model: nn.Module) -> Iterator[None]:
    """Let a model run on tensors without numbers, quietly, and restore what it changes."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.random.fork_rng([]), standing_in(model, _fakes(model, mode)), quietly(), mode:
        yield


def _fakes(model: nn.Module, mode: FakeTensorMode) -> dict[int, Tensor]:
    """Return tensors without numbers in place of a model's, by id; on the CPU for those on the meta device.

    So the tensors that a forward makes are on one device with its weights.
    """
    with mode:
        named = (*model.parameters(), *model.buffers())
        return {id(t): _on_cpu(t) if t.is_meta else mode.from_tensor(t, static_shapes=True) for t in named}


def _on_cpu(tensor: Tensor) -> Tensor:
    other = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return nn.Parameter(other, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else other


def exported(model: nn.Module, example: ValueSpec) -> tuple[ExportedProgram, torch.device]:
    """Return a model as torch.export traces it in its present mode, and the device. Raises ConfigError."""
    device, others, batch = device_of(model), dict[int, Tensor](), Dim("batch")
    if device.type == "meta":
        device = torch.device("cpu")
        others = _fakes(model, FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()))
    try:
        with torch.random.fork_rng([]), standing_in(model, others), quietly():
            args, kwargs = as_arguments(example, [made_up(t, device) for t in example.of(SAMPLES).specs])
            shapes = tree_map(lambda _: {0: batch}, bound(model, args, kwargs))
            return export(model, args, kwargs, dynamic_shapes=shapes, strict=False), device
    except ConfigError:
        raise
    except Exception as error:  # the user's forward may raise anything
        raise _refusal(model, example, error) from error


def bound(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments by the names in a forward's signature. Raises ConfigError if it takes others."""
    signature = inspect.signature(model.forward)
    try:
        taken = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        given = f"a dict of {', '.join(kwargs)}" if kwargs else f"{len(args)} without names"
        raise ConfigError(
            f"the forward of {type(model).__name__} cannot take the data's inputs, {given}: {error}; choose "
            f"and name them as it does, on the command line by data.columns="
        ) from error
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD and parameter.name in taken:
            raise ConfigError(
                f"the forward of {type(model).__name__} takes {', '.join(taken[parameter.name])} by "
                f"{parameter}, which torch.export does not trace: name each in its signature, or leave it "
                f"out of the data"
            )
    return taken


def _refusal(model: nn.Module, example: ValueSpec, error: Exception) -> ConfigError:
    """Return why a model cannot be traced, as one sentence."""
    text, kind, where = one_line(error), type(error).__name__, _place(error)
    at = f" at {where}" if where else ""
    if any(frame.name == "_detect_is_causal_mask" for frame in traceback.extract_tb(error.__traceback__)):
        return ConfigError(
            f"nn.Transformer looks at the values of its mask{at}, which a trace cannot: pass is_causal "
            f"beside mask, tgt_is_causal beside tgt_mask, and memory_is_causal beside memory_mask"
        )
    if "data-dependent" in text or kind in ("GuardOnDataDependentSymNode", "DataDependentOutputException"):
        return ConfigError(
            f"the model decides on its data{at}, which cannot be cut into stages: compute both ways and "
            f"choose by torch.where, or {WAY_OUT}"
        )
    if "specialized it to be a constant" in text or "Constraints violated" in text:
        found = re.search(r"batch = Dim\('batch', (min|max)=(\d+)", text)
        other = f" where it has {'fewer' if found[1] == 'min' else 'more'} than {found[2]}" if found else ""
        return ConfigError(
            f"the forward of {type(model).__name__} depends on the samples of a microbatch{other}"
            f"{_failing_at(model, example)}, which a trace cannot: write no number, len(x), comparison or "
            f"loop, but x.shape[0] as it is (torch.cdist by compute_mode='donot_use_mm_for_euclid_dist'), or "
            f"{WAY_OUT}"
        )
    if found := re.search(r"Found <class '([^']+)'> in output", text):
        return ConfigError(
            f"the model returns what is no tensor, {found[1]}: return tensors only (for a Hugging Face model "
            f"with a cache: config.use_cache=False)"
        )
    return ConfigError(
        f"the model {type(model).__name__} cannot be traced for {example}{at}: {kind}: "
        f"{text[:200].rstrip('.')}; {WAY_OUT}"
    )


def _failing_at(model: nn.Module, example: ValueSpec) -> str:
    """Return where a model fails with fewer samples than those of the trace, or ""."""
    try:
        with without_numbers(model):
            args, kwargs = as_arguments(example, [made_up(spec) for spec in example.of(SAMPLES - 1).specs])
            model(*args, **kwargs)
    except Exception as error:  # the user's forward may raise anything
        return f" at {_place(error)}"
    return ""


def _place(error: BaseException) -> str:
    """Return the file and line of the user's code in an error's traceback, or ""."""
    stack = re.findall(r'File "([^"]+)", line (\d+)', str(error))
    stack += [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    own = [f"{file.rpartition('/')[2]}:{line}" for file, line in stack if not _is_machinery(file)]
    return own[-1] if own else ""


def _is_machinery(file: str) -> bool:
    return "/torch/" in file or "pipetrain/network/" in file or file.startswith("<")


@contextmanager
def quietly() -> Iterator[None]:
    """Keep torch from writing what is reported otherwise, and torch.distributions from looking at values."""
    disabled, validates = logging.root.manager.disable, Distribution._validate_args
    logging.disable()
    Distribution.set_default_validate_args(False)
    try:
        with redirect_stderr(io.StringIO()), warnings.catch_warnings():  # where torch.export prints a graph
            warnings.simplefilter("ignore")
            yield
    finally:
        Distribution.set_default_validate_args(validates)
        logging.disable(disabled)
