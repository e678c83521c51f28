"""Exports a module by torch.export, and says in one sentence why one cannot be."""

from __future__ import annotations

import inspect
import io
import logging
import re
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributions import Distribution
from torch.export import Dim, ExportedProgram, export
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_map

from pipetrain.errors import ConfigError, one_line
from pipetrain.network.network import evaluating
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

    def fake(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return mode.from_tensor(tensor, static_shapes=True)
        other = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        return nn.Parameter(other, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else other

    with mode:
        return {id(tensor): fake(tensor) for tensor in (*model.parameters(), *model.buffers())}


def exported(model: nn.Module, example: ValueSpec, training: bool, autocast: bool) -> ExportedProgram:
    """Return a model as torch.export traces it in a mode. Raises ConfigError."""
    device, others, batch = device_of(model), dict[int, Tensor](), Dim("batch")
    if device.type == "meta":
        device = torch.device("cpu")
        others = _fakes(model, FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()))
    zeros = nullcontext() if autocast else _zeros_of_the_fast_path(model, training)
    try:
        with (
            nullcontext() if training else evaluating(model),
            zeros,
            torch.random.fork_rng([]),
            standing_in(model, others),
            quietly(),
        ):
            args, kwargs = as_arguments(example, [made_up(t, device) for t in example.of(SAMPLES).specs])
            shapes = tree_map(lambda _: {0: batch}, bound(model, args, kwargs))
            return export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
    except ConfigError:
        raise
    except Exception as error:  # the user's forward may raise anything
        raise _refusal(model, example, error) from error


def bound(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments by the names in a forward's signature. Raises ConfigError if it takes others."""
    try:
        signature = inspect.signature(model.forward)
        taken = signature.bind(*args, **kwargs).arguments
        if open_ended := [
            p for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD and p.name in taken
        ]:
            raise TypeError(f"torch.export traces no {open_ended[0]}")
        return taken
    except TypeError as error:
        given = f"a dict of {', '.join(kwargs)}" if kwargs else f"{len(args)} without names"
        raise ConfigError(
            f"the forward of {type(model).__name__} cannot take the data's inputs, {given}: {error}; choose "
            f"and name them as it does, on the command line by data.columns="
        ) from error


def _refusal(model: nn.Module, example: ValueSpec, error: Exception) -> ConfigError:
    """Return why a model cannot be traced, as one sentence."""
    text, kind, where = one_line(error), type(error).__name__, _place(error)
    at = f" at {where}" if where else ""
    if "data-dependent" in text or kind in ("GuardOnDataDependentSymNode", "DataDependentOutputException"):
        return ConfigError(
            f"the model decides on its data{at}, which cannot be cut into stages: compute both ways and "
            f"choose by torch.where (for nn.Transformer pass is_causal beside mask), or {WAY_OUT}"
        )
    if "specialized it to be a constant" in text or "Constraints violated" in text:
        found = re.search(r"batch = Dim\('batch', (min|max)=(\d+)", text)
        other = f" where it has {'fewer' if found[1] == 'min' else 'more'} than {found[2]}" if found else ""
        return ConfigError(
            f"the forward of {type(model).__name__} depends on the samples of a microbatch{other}, which a "
            f"trace cannot: write no number, len(x), comparison or loop, but x.shape[0] as it is "
            f"(torch.cdist by compute_mode='donot_use_mm_for_euclid_dist'), or {WAY_OUT}"
        )
    return ConfigError(
        f"the model {type(model).__name__} cannot be traced for {example}{at}: {kind}: "
        f"{text[:200].rstrip('.')}; {WAY_OUT}"
    )


def _place(error: BaseException) -> str:
    """Return the file and line of the user's code in an error's traceback, or ""."""
    stack = re.findall(r'File "([^"]+)", line (\d+)', str(error))
    stack += [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    machinery = ("/torch/", "pipetrain/network/", "<")
    own = [
        f"{file.rpartition('/')[2]}:{line}" for file, line in stack if not any(m in file for m in machinery)
    ]
    return own[-1] if own else ""


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


@contextmanager
def _zeros_of_the_fast_path(model: nn.Module, training: bool) -> Iterator[None]:
    """Let the nn.TransformerEncoders of a model make the zeros that PyTorch's fast path makes.

    Without gradients one in evaluation mode runs on nested tensors if the padding of all samples is to their
    right, and its padded places become 0. torch.export takes the other way, on which they are numbers like
    others. (Under autocast there is no such path on a GPU, and on a CPU it fails.)
    """
    encoders = [module for module in model.modules() if isinstance(module, nn.TransformerEncoder)]
    hooks = [
        encoder.layers[-1].register_forward_hook(partial(_with_zeros, encoder, training), with_kwargs=True)
        for encoder in encoders
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _with_zeros(
    encoder: nn.TransformerEncoder, training: bool, layer: nn.Module, args: Any, given: Any, output: Tensor
) -> Tensor:
    """Return the output of the last layer as one process has it: the conditions are those of `forward`."""
    padding, mask = given.get("src_key_padding_mask"), given.get("src_mask")
    nested = encoder.use_nested_tensor and torch.backends.mha.get_fastpath_enabled() and output.dim() == 3
    if not nested or encoder.layers[0].training or padding is None or mask is not None:
        return output
    if training and torch.is_grad_enabled() and output.requires_grad:
        return output
    kept = padding.logical_not()  # of a mask of 0 and -inf
    zero = kept.logical_not()
    if getattr(encoder, "mask_check", True):
        zero = zero & (kept[:, 1:] <= kept[:, :-1]).all()
    return output.masked_fill(zero.unsqueeze(-1), 0.0)
