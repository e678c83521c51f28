"""Exports a module by torch.export as one flat torch.fx graph of its operations, in one mode.

torch.export gives a graph of ATen operations with the weights as inputs. Here the weights are places in the
user's module, regions without gradients or under autocast, which are graphs within it, are unfolded so that a
cut may lie inside, and assertions are left out. Why a module cannot be exported is said in one sentence.
"""

from __future__ import annotations

import inspect
import io
import logging
import operator
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._higher_order_ops.wrap import wrap_with_autocast, wrap_with_set_grad_enabled
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributions import Distribution
from torch.export import Dim, ExportedProgram, export
from torch.export.graph_signature import ConstantArgument, InputKind, InputSpec, OutputKind
from torch.fx.experimental.symbolic_shapes import (
    ConstraintViolationError,
    GuardOnDataDependentSymNode,
    ShapeEnv,
)
from torch.utils._pytree import TreeSpec, tree_leaves, tree_map

from pipetrain.errors import ConfigError, one_line
from pipetrain.network.network import evaluating
from pipetrain.network.places import named_tensors, standing_in
from pipetrain.network.tensors import graph_of, made_up
from pipetrain.network.values import Size, ValueSpec

_ATEN = torch.ops.aten
_ASSERTIONS = {
    _ATEN._assert_async,
    _ATEN._assert_scalar,
    _ATEN._assert_tensor_metadata,
    _ATEN.sym_constrain_range,
    _ATEN.sym_constrain_range_for_size,
}
SAMPLES = 3  # of a microbatch in the trace, which holds for any number
WAY_OUT = "make the model an nn.Sequential of its layers, and what cannot be traced stays inside one"


def as_arguments(example: ValueSpec, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return tensors, or something for each, as the positional and keyword arguments of a model."""
    if example.names is not None:
        return (), dict(zip(example.names, tensors, strict=True))
    return tuple(tensors), {}


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


def _exported(model: nn.Module, example: ValueSpec, training: bool, autocast: bool) -> ExportedProgram:
    tensors, others, batch = (*model.parameters(), *model.buffers()), dict[int, Tensor](), Dim("batch")
    device = tensors[0].device if tensors else torch.device("cpu")
    if device.type == "meta":
        device = torch.device("cpu")
        others = _fakes(model, FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()))
    zeros = nullcontext() if autocast else _zeros_of_the_fast_path(model, training)
    looks = model.register_forward_hook(_refuse_backward)
    try:
        with (
            nullcontext() if training else evaluating(model),
            zeros,
            torch.random.fork_rng([]),
            standing_in(model, others),
            quietly(),
        ):
            few = example.of(Size(SAMPLES)).specs
            args, kwargs = as_arguments(example, [made_up(t, device) for t in few])
            shapes = tree_map(lambda _: {0: batch}, bound(model, args, kwargs))
            return export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
    except ConfigError:
        raise
    except Exception as error:  # the user's forward may raise anything
        raise _refusal(model, example, error) from error
    finally:
        looks.remove()


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
    """Return why a model cannot be traced, as one sentence."""
    text, kind, where = one_line(error), type(error).__name__, _place(error)
    at = f" at {where}" if where else ""
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
    machinery = ("/torch/", "pipetrain/network/", "<")
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


# The operations


class Input(NamedTuple):
    """The source of a placeholder that stands for a tensor of the model's input."""

    number: int


class ModelTensor(NamedTuple):
    """The source of a placeholder that stands for a parameter or buffer, under its first name."""

    name: str
    is_parameter: bool
    trained: bool


class Constant(NamedTuple):
    """The source of a placeholder that stands for another tensor that the trace has found."""

    name: str
    tensor: Tensor


class Region(NamedTuple):
    """What the user's code has set around an operation: gradients, and autocast; None: nothing."""

    grad: bool | None = None
    autocast: bool | None = None
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Operations:
    """The operations of a model in one mode. `outputs`: flat, nodes or constants.

    A placeholder has its `source` in meta, and an operation its `region`.
    """

    graph: fx.Graph
    outputs: list[Any]
    tree: TreeSpec


def operations_of(model: nn.Module, example: ValueSpec, training: bool, autocast: bool) -> Operations:
    """Return the operations of a model in a mode. Raises ConfigError for what cannot be trained so."""
    program, input_names = _exported(model, example, training, autocast), example.names
    spec: Any = program.call_spec.in_spec
    inputs = iter(
        range(len(example.specs)) if input_names is None else map(input_names.index, spec.child(1).context)
    )
    graph, env = fx.Graph(), dict[fx.Node, Any]()
    names = {id(tensor): name for name, tensor in named_tensors(model).items()}
    placeholders, tensors = program.graph.find_nodes(op="placeholder"), []
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if isinstance(spec.arg, ConstantArgument):
            env[node] = spec.arg.value
            continue
        env[node] = copy = graph.node_copy(node)
        if spec.kind is InputKind.USER_INPUT:
            copy.meta["source"] = Input(next(inputs))
        else:
            tensors.append((copy, spec))
    returned = _unfold(program.graph_module, graph, env, Region())
    for copy, spec in tensors:  # now: code that cannot be cut is named before the tensors that it makes
        copy.meta["source"] = _source(model, program, spec, names)
    outputs = [
        spec.arg.value if isinstance(spec.arg, ConstantArgument) else output
        for spec, output in zip(program.graph_signature.output_specs, returned, strict=True)
        if spec.kind is OutputKind.USER_OUTPUT
    ]
    graph.output(tuple(output for output in outputs if isinstance(output, fx.Node)))
    graph.eliminate_dead_code()
    tree = program.call_spec.out_spec
    assert tree is not None
    return Operations(graph, outputs, tree)


def _source(
    model: nn.Module, program: ExportedProgram, spec: InputSpec, names: Mapping[int, str]
) -> ModelTensor | Constant:
    """Return the tensor of the model, or that the trace has found, which a placeholder stands for."""
    target = str(spec.target)
    registered = spec.kind in (InputKind.PARAMETER, InputKind.BUFFER)
    tensor = attrgetter(target)(model) if registered else program.constants[target]
    if not isinstance(tensor, Tensor):
        raise ConfigError(
            f"the model makes a {type(tensor).__name__} when it runs, which a trace would keep: draw from "
            f"torch's own generator"
        )
    if id(tensor) in names:
        return ModelTensor(names[id(tensor)], isinstance(tensor, nn.Parameter), tensor.requires_grad)
    if tensor.requires_grad or tensor.is_meta:
        raise ConfigError(
            f"the model uses {target}, a tensor that is trained or on the meta device, and no parameter or "
            f"buffer of it: register it"
        )
    return Constant(target, tensor)


def _unfold(module: fx.GraphModule, graph: fx.Graph, env: dict[fx.Node, Any], region: Region) -> Any:
    """Copy a graph whose placeholders are in `env`, and the regions in it; return its outputs."""
    for node in module.graph.nodes:
        if node.op == "output":
            return fx.map_arg(node.args[0], env.__getitem__)
        if node.op == "get_attr":
            env[node] = getattr(module, node.target)
        elif node.op == "call_function":
            env[node] = _call(node, graph, env, region)
    raise AssertionError("a graph without output")


def _call(node: fx.Node, graph: fx.Graph, env: dict[fx.Node, Any], region: Region) -> Any:
    args: list[Any] = [env[arg] if isinstance(arg, fx.Node) else arg for arg in node.args]
    if getattr(node.target, "overloadpacket", None) in _ASSERTIONS:
        return None
    if node.target is wrap_with_set_grad_enabled:
        return _inside(args[1], args[2:], graph, region._replace(grad=args[0]))
    if node.target is wrap_with_autocast:
        _, dtype, enabled, _, inner, *inputs = args
        return _inside(inner, inputs, graph, region._replace(autocast=enabled, dtype=dtype))
    if node.target is operator.getitem and not isinstance(args[0], fx.Node):
        return args[0][args[1]]  # of what a region returns
    if node.target is _ATEN.detach_.default and args[0].target is _ATEN.lift_fresh_copy.default:
        return args[0]  # a copy of a constant, which has no gradient anyway
    in_functorch = getattr(node.target, "__module__", "").startswith("torch._functorch")
    if in_functorch or any(isinstance(leaf, fx.GraphModule) for leaf in tree_leaves(args)):
        what = "torch.vmap or torch.func" if in_functorch else str(node.target)
        calls = calls_of(node)
        inside = f" around {calls[-1]}" if calls else ""
        raise ConfigError(
            f"the model uses {what} at {place_of(node)}, which cannot be cut: write it for the whole batch, "
            f"or make the model an nn.Sequential of layers, so that the code{inside} stays inside one of them"
        )
    copy = graph.node_copy(node, env.__getitem__)
    is_tensor = any(isinstance(leaf, Tensor) for leaf in tree_leaves(node.meta.get("val")))
    copy.meta["region"] = region if is_tensor and node.target is not operator.getitem else Region()
    return copy


def _inside(inner: fx.GraphModule, inputs: Sequence[Any], graph: fx.Graph, region: Region) -> Any:
    placeholders = inner.graph.find_nodes(op="placeholder")
    return _unfold(inner, graph, dict(zip(placeholders, inputs, strict=True)), region)


def calls_of(node: fx.Node) -> tuple[str, ...]:
    """Return the calls of submodules in which a node was made, outermost first, as grouping.Item has them."""
    stack = node.meta.get("nn_module_stack") or {}
    named = ((path, key.partition("@")[2]) for key, (path, _) in stack.items())
    return tuple(f"{path}@{n}" if n else path for path, n in named if path and not path.startswith("_empty"))


def place_of(node: fx.Node) -> str:
    """Return the file and line of the user's code that made a node, as `model.py:12`, or ""."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if "/torch/" not in frame[0]] or frames
    return f"{own[-1][0].rpartition('/')[2]}:{own[-1][1]}" if own else ""
