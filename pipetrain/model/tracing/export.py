"""Exports a module by torch.export, in one mode, with one-sentence errors for what cannot be exported."""

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
from torch.utils._pytree import tree_leaves

from pipetrain.errors import ConfigError, one_line
from pipetrain.model.network import evaluating
from pipetrain.model.specs import Size, ValueSpec
from pipetrain.model.tensor_places import OTHERS, Held, named_tensors, origin, standing_in
from pipetrain.model.trial_tensors import graph_of, made_up_samples

SAMPLES = 3  # of a microbatch in the trace, which is valid for any number
LIBRARIES = {*OTHERS, "transformers"}  # their modules and hooks can be traced
WAY_OUT = "make the model an nn.Sequential of its layers, and what cannot be traced stays inside one"


def as_arguments(example: ValueSpec, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return tensors, or something for each, as positional and keyword arguments of a model."""
    if example.names is not None:
        return (), dict(zip(example.names, tensors, strict=True))
    return tuple(tensors), {}


def _fakes(model: nn.Module, mode: FakeTensorMode) -> dict[int, Tensor]:
    """Return tensors without data, on the CPU, to replace a model's, by id.

    So the tensors that a forward makes are on the same device as its weights.
    """

    def fake(tensor: Tensor) -> Tensor:
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty

    with mode:
        return {id(tensor): fake(tensor) for tensor in named_tensors(model).values()}


@contextmanager
def adapted(model: nn.Module, example: ValueSpec) -> Iterator[None]:
    """Make a model traceable: its inputs have names in its forward, and it returns no cache.

    torch.export does not accept forward(**batch); use_cache=True, the default of Hugging Face, is for
    generation.
    """
    config, own_forward, forward = getattr(model, "config", None), vars(model).get("forward"), model.forward
    caches = getattr(config, "use_cache", None) is True
    signature, collects = inspect.signature(forward), False
    with suppress(TypeError):  # the forward takes other inputs
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
            vars(model).update({} if own_forward is None else {"forward": own_forward})


def exported(
    model: nn.Module, example: ValueSpec, training: bool, autocast: bool
) -> tuple[ExportedProgram, list[str]]:
    """Return a model exported in a mode, and the attributes of its own modules that a forward sets.

    The attributes are restored. (torch's weight_norm sets `weight` from weight_g; that does not count.)
    Raises ConfigError for a model that cannot be exported.
    """
    fakes = dict[int, Tensor]()
    if any(tensor.device.type != "cpu" for tensor in named_tensors(model).values()):
        fakes = _fakes(model, FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()))
    try:
        with (
            nullcontext() if training else evaluating(model),
            torch.random.fork_rng([]),
            standing_in(model, fakes),
            adapted(model, example),
            quietly(),
        ):
            if not autocast:
                _make_zeros_of_the_fast_path(model, training)
            model.register_forward_hook(_refuse_backward)
            _write_buffers_at_the_end(model)
            args, kwargs = as_arguments(example, made_up_samples(example.of(Size(SAMPLES, example.longest))))
            bound(model, args, kwargs)  # refuses wrong ones
            shapes = bound(model, *as_arguments(example, _dynamic(example)))
            own_modules = (
                (name, inner) for name, inner in model.named_modules() if origin(type(inner)) not in LIBRARIES
            )
            before = Held([(name, vars(module)) for name, module in own_modules])
            changed = dict[str, None]()  # changes at the end of a forward, as export restores some
            model.register_forward_hook(
                lambda *_: changed.update((name, None) for name, *_ in before.changes())
            )
            program = export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
            weights = dict(model.named_parameters())
            public = (name for name in changed if "._" not in f".{name}")
            return program, [
                name for name in public if not any(key.startswith(f"{name}_") for key in weights)
            ]
    except ConfigError:
        raise
    except Exception as error:  # the user's forward may raise anything
        raise _refusal(model, example, error) from error


def _dynamic(example: ValueSpec) -> list[dict[int, Any]]:
    """Return of each input the dimensions that may have any size: its samples, and its lengths."""
    batch, most = Dim("batch"), example.longest if example.bounded else [None] * len(example.longest)
    lengths = [Dim.DYNAMIC(max=n) for n in most]
    return [
        {0: batch} | {d: lengths[-n - 1] for d, n in enumerate(spec.shape, 1) if n < 0}
        for spec in example.specs
    ]


def _write_buffers_at_the_end(model: nn.Module) -> None:
    """Write what submodules assign to their buffers; torch.export does so only for the model's own."""
    inner = [module._buffers for module in model.modules() if module is not model]
    before: list[tuple[Any, str, Tensor]] = []

    def begin(*_: object) -> None:
        before[:] = [
            (registry, name, buffer)
            for registry in inner
            for name, buffer in registry.items()
            if buffer is not None
        ]

    def end(*_: object) -> None:
        changed = [(registry, name, old) for registry, name, old in before if registry[name] is not old]
        numbers = [registry[name].detach().clone() for registry, name, _ in changed]  # two may be swapped
        for (registry, name, old), new in zip(changed, numbers, strict=True):
            registry[name] = old.copy_(new)

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(end)


def _refuse_backward(model: nn.Module, args: Any, outputs: Any) -> None:
    """Refuse outputs whose gradient uses an autograd Function, as the trace has only its forward.

    A torch.library operator is accepted: torch makes its Function, and the trace has the operator itself.
    """
    for node in graph_of(*(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor))):
        function: Any = getattr(node, "_forward_cls", None)
        if function is not None and function.forward.__globals__ is not vars(torch._library.autograd):
            raise ConfigError(
                f"the model uses the autograd Function {function.__name__}, whose backward a trace would "
                f"leave out: write it with torch's operations, or {WAY_OUT}"
            )


def bound(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments by the names in a forward's signature. Raises ConfigError for wrong ones."""
    try:
        return inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except TypeError as error:
        inputs = f"a dict of {', '.join(kwargs)}" if kwargs else f"{len(args)} without names"
        raise ConfigError(
            f"the forward of {type(model).__name__} cannot take the data's inputs, {inputs}: {error}; choose "
            f"and name them as it does, on the command line by data.columns="
        ) from error


def _refusal(model: nn.Module, example: ValueSpec, error: Exception) -> ConfigError:
    text, where = one_line(error), _place(error)
    at = f" at {where}" if where else ""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    if any(isinstance(value, PackedSequence) for frame in frames for value in frame.f_locals.values()):
        why = f"the model packs sequences{at}, whose sizes depend on the data: leave them padded"
    elif isinstance(error, GuardOnDataDependentSymNode | DataDependentOutputException):
        why = (
            f"the model decides on its data{at}, which cannot be cut into stages: compute both ways and "
            f"choose by torch.where (for nn.Transformer pass is_causal beside mask)"
        )
    elif isinstance(error.__cause__ or error.__context__, ConstraintViolationError):
        limit = re.search(r"batch = Dim\('batch', (min|max)=(\d+)", text)
        where = f" where it has {'fewer' if limit[1] == 'min' else 'more'} than {limit[2]}" if limit else ""
        fixed = re.search(r"\.size\(\)\[(\d+)\] as dynamic but your code specialized", text)
        what = f"dimension {fixed[1]} of a batch" if fixed else "the samples of a microbatch"
        why = (
            f"the forward of {type(model).__name__} depends on {what}{where}, which a trace cannot: write no "
            f"number, len(x), comparison or loop, but x.shape[{fixed[1] if fixed else 0}] as it is "
            f"(torch.cdist by compute_mode='donot_use_mm_for_euclid_dist')"
        )
    else:
        lengths = f" of up to {' x '.join(map(str, example.longest))}" if example.longest else ""
        why = (
            f"the model {type(model).__name__} cannot be traced for {example}{lengths}{at}: "
            f"{type(error).__name__}: {text[:200].rstrip('.')}: write it otherwise"
        )
    return ConfigError(f"{why}, or {WAY_OUT}")


def _place(error: BaseException) -> str:
    """Return the file and line of the user's code in an error's traceback, or ""."""
    stack = traceback.extract_tb(error.__traceback__)
    machinery = ("/torch/", "pipetrain/model/", "<")
    user_frames = [frame for frame in stack if not any(folder in frame.filename for folder in machinery)]
    return f"{Path(user_frames[-1].filename).name}:{user_frames[-1].lineno}" if user_frames else ""


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress output of torch that is reported otherwise, and value checks of torch.distributions."""
    disabled, validates = logging.root.manager.disable, Distribution._validate_args
    logging.disable()
    Distribution.set_default_validate_args(False)
    try:
        with redirect_stderr(io.StringIO()), warnings.catch_warnings():  # torch.export prints a graph there
            warnings.simplefilter("ignore")
            yield
    finally:
        Distribution.set_default_validate_args(validates)
        logging.disable(disabled)


def _make_zeros_of_the_fast_path(model: nn.Module, training: bool) -> None:
    """Let the nn.TransformerEncoders of a model make the zeros that PyTorch's fast path makes.

    In evaluation mode without gradients, an encoder runs on nested tensors if the padding of all samples is
    on the right, and padded positions become 0. torch.export takes the other path, where they are ordinary
    numbers. (Under autocast there is no such path on a GPU, and on a CPU it fails.)
    """
    for encoder in [module for module in model.modules() if isinstance(module, nn.TransformerEncoder)]:
        zeros = partial(_with_zeros, encoder, training)
        encoder.layers[-1].register_forward_hook(zeros, with_kwargs=True)


def _with_zeros(
    encoder: nn.TransformerEncoder, training: bool, layer: nn.Module, args: Any, kwargs: Any, output: Tensor
) -> Tensor:
    """Return the last layer's output as in one process; the conditions are those of `forward`."""
    padding, mask = kwargs.get("src_key_padding_mask"), kwargs.get("src_mask")
    nested = encoder.use_nested_tensor and torch.backends.mha.get_fastpath_enabled() and output.dim() == 3
    if not nested or encoder.layers[0].training or padding is None or mask is not None:
        return output
    if training and torch.is_grad_enabled() and output.requires_grad:
        return output
    unpadded = padding.logical_not()  # for a mask of 0 and -inf
    zero = unpadded.logical_not()
    if getattr(encoder, "mask_check", True):
        zero = zero & (unpadded[:, 1:] <= unpadded[:, :-1]).all()
    return output.masked_fill(zero.unsqueeze(-1), 0.0)
