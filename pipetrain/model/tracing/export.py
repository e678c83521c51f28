"""Exports a module by torch.export, in one mode. Why it cannot be exported is said in one sentence."""

from __future__ import annotations

import inspect
import io
import logging
import re
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributions import Distribution
from torch.export import Dim, ExportedProgram, export
from torch.fx.experimental.symbolic_shapes import (
    ConstraintViolationError,
    GuardOnDataDependentSymNode,
    ShapeEnv,
)
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map

from pipetrain.errors import ConfigError, one_line
from pipetrain.model.network import evaluating
from pipetrain.model.specs import Size, ValueSpec
from pipetrain.model.tensor_access import OTHERS, Held, named_tensors, origin, standing_in
from pipetrain.model.trial_tensors import graph_of, made_up_samples

SAMPLES = 3  # of a microbatch in the trace, which holds for any number
LIBRARIES = {*OTHERS, "transformers"}  # whose modules and hooks are made to be traced
WAY_OUT = "make the model an nn.Sequential of its layers, and what cannot be traced stays inside one"


def as_arguments(example: ValueSpec, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return tensors, or something for each, as the positional and keyword arguments of a model."""
    if example.names is not None:
        return (), dict(zip(example.names, tensors, strict=True))
    return tuple(tensors), {}


def _fakes(model: nn.Module, mode: FakeTensorMode) -> dict[int, Tensor]:
    """Return tensors without numbers, on the CPU, in place of a model's, by id.

    So the tensors that a forward makes are on one device with its weights.
    """

    def fake(tensor: Tensor) -> Tensor:
        other = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        return nn.Parameter(other, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else other

    with mode:
        return {id(tensor): fake(tensor) for tensor in named_tensors(model).values()}


@contextmanager
def adapted(model: nn.Module, example: ValueSpec) -> Iterator[None]:
    """Let a model run as it can be traced: its inputs have names in its forward, and it returns no cache.

    torch.export does not take a forward(**batch); use_cache=True, the default of Hugging Face, is for
    generation.
    """
    config, own, forward = getattr(model, "config", None), vars(model).get("forward"), model.forward
    caches = getattr(config, "use_cache", None) is True
    signature, collects = inspect.signature(forward), False
    with suppress(TypeError):  # where it takes others
        bound = signature.bind(**dict.fromkeys(example.names or ())).arguments
        collects = any(signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD for name in bound)

    def named(**inputs: Any) -> Any:
        return forward(**inputs)

    if collects:
        ours = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in example.names or ()]
        named.__signature__ = inspect.Signature(ours)  # type: ignore[attr-defined]
        vars(model)["forward"] = named
    try:
        if caches:
            config.use_cache = False  # type: ignore[union-attr]
        yield
    finally:
        if caches:
            config.use_cache = True  # type: ignore[union-attr]
        if vars(model).get("forward") is named:
            del vars(model)["forward"]
            vars(model).update({} if own is None else {"forward": own})


def exported(
    model: nn.Module, example: ValueSpec, training: bool, autocast: bool
) -> tuple[ExportedProgram, list[str]]:
    """Return a model in a mode as torch.export has it, and the attributes of its own that a forward sets.

    These are then as before. (A forward of torch's weight_norm sets `weight` by weight_g, which is none.)
    Raises ConfigError for what it cannot have.
    """
    others, batch = dict[int, Tensor](), Dim("batch")
    if any(tensor.device.type != "cpu" for tensor in named_tensors(model).values()):
        others = _fakes(model, FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()))
    try:
        with (
            nullcontext() if training else evaluating(model),
            torch.random.fork_rng([]),
            standing_in(model, others),
            adapted(model, example),
            quietly(),
        ):
            if not autocast:
                _make_zeros_of_the_fast_path(model, training)
            model.register_forward_hook(_refuse_backward)
            _write_buffers_at_the_end(model)
            args, kwargs = as_arguments(example, made_up_samples(example.of(Size(SAMPLES))))
            shapes = tree_map(lambda _: {0: batch}, bound(model, args, kwargs))
            own = ((name, of) for name, of in model.named_modules() if origin(type(of)) not in LIBRARIES)
            held = Held([(name, vars(module)) for name, module in own])
            now = dict[str, None]()  # at a forward's end: export puts some back
            model.register_forward_hook(lambda *_: now.update((name, None) for name, *_ in held.changes()))
            program = export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
            weights = dict(model.named_parameters())
            kept = (name for name in now if "._" not in f".{name}")
            return program, [name for name in kept if not any(key.startswith(f"{name}_") for key in weights)]
    except ConfigError:
        raise
    except Exception as error:  # the user's forward may raise anything
        raise _refusal(model, example, error) from error


def _write_buffers_at_the_end(model: nn.Module) -> None:
    """Write what submodules assign to their buffers, as torch.export does of the model's own alone."""
    inner = [module._buffers for module in model.modules() if module is not model]
    held: list[tuple[Any, str, Tensor]] = []

    def begin(*_: object) -> None:
        held[:] = [(of, name, buffer) for of in inner for name, buffer in of.items() if buffer is not None]

    def end(*_: object) -> None:
        changed = [(of, name, old) for of, name, old in held if of[name] is not old]
        numbers = [of[name].detach().clone() for of, name, _ in changed]  # two may be exchanged
        for (of, name, old), new in zip(changed, numbers, strict=True):
            of[name] = old.copy_(new)

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(end)


def _refuse_backward(model: nn.Module, args: Any, outputs: Any) -> None:
    """Refuse outputs whose gradient goes through a Function, of which the trace has the forward alone.

    That of an operator of torch.library's is made by torch, and the trace has the operator itself.
    """
    for node in graph_of(*(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor))):
        function: Any = getattr(node, "_forward_cls", None)
        if function is not None and function.forward.__globals__ is not vars(torch._library.autograd):
            raise ConfigError(
                f"the model uses the autograd Function {function.__name__}, whose backward a trace would "
                f"leave out: write it with torch's operations, or {WAY_OUT}"
            )


def bound(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments by the names in a forward's signature. Raises ConfigError if it takes others."""
    try:
        return inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except TypeError as error:
        inputs = f"a dict of {', '.join(kwargs)}" if kwargs else f"{len(args)} without names"
        raise ConfigError(
            f"the forward of {type(model).__name__} cannot take the data's inputs, {inputs}: {error}; choose "
            f"and name them as it does, on the command line by data.columns="
        ) from error


def _refusal(model: nn.Module, example: ValueSpec, error: Exception) -> ConfigError:
    text, kind, where = one_line(error), type(error).__name__, _place(error)
    at = f" at {where}" if where else ""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    if any(isinstance(value, PackedSequence) for frame in frames for value in frame.f_locals.values()):
        return ConfigError(
            f"the model packs sequences{at}, whose sizes depend on the data: leave them padded, or {WAY_OUT}"
        )
    if isinstance(error, GuardOnDataDependentSymNode | DataDependentOutputException):
        return ConfigError(
            f"the model decides on its data{at}, which cannot be cut into stages: compute both ways and "
            f"choose by torch.where (for nn.Transformer pass is_causal beside mask), or {WAY_OUT}"
        )
    if isinstance(error.__cause__ or error.__context__, ConstraintViolationError):
        limit = re.search(r"batch = Dim\('batch', (min|max)=(\d+)", text)
        other = f" where it has {'fewer' if limit[1] == 'min' else 'more'} than {limit[2]}" if limit else ""
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
    stack = traceback.extract_tb(error.__traceback__)
    machinery = ("/torch/", "pipetrain/model/", "<")
    own = [frame for frame in stack if not any(folder in frame.filename for folder in machinery)]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""


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


def _make_zeros_of_the_fast_path(model: nn.Module, training: bool) -> None:
    """Let the nn.TransformerEncoders of a model make the zeros that PyTorch's fast path makes.

    Without gradients one in evaluation mode runs on nested tensors if the padding of all samples is to their
    right, and its padded places become 0. torch.export takes the other way, on which they are numbers like
    others. (Under autocast there is no such path on a GPU, and on a CPU it fails.)
    """
    for encoder in [module for module in model.modules() if isinstance(module, nn.TransformerEncoder)]:
        zeros = partial(_with_zeros, encoder, training)
        encoder.layers[-1].register_forward_hook(zeros, with_kwargs=True)


def _with_zeros(
    encoder: nn.TransformerEncoder, training: bool, layer: nn.Module, args: Any, kwargs: Any, output: Tensor
) -> Tensor:
    """Return the output of the last layer as one process has it: the conditions are those of `forward`."""
    padding, mask = kwargs.get("src_key_padding_mask"), kwargs.get("src_mask")
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
