"""The operations of a module in one mode, as one flat torch.fx graph.

torch.export gives a graph of ATen operations with the weights as inputs. Here the weights refer to the user's
module, regions without gradients or under autocast, which are nested graphs, are flattened so that a cut may
lie inside, and assertions are removed.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._higher_order_ops.wrap import wrap_with_autocast, wrap_with_set_grad_enabled
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, InputSpec, OutputKind
from torch.utils._pytree import TreeSpec, tree_leaves

from pipetrain.errors import ConfigError
from pipetrain.model.network import Limits
from pipetrain.model.specs import ValueSpec
from pipetrain.model.tensor_places import names_by_id
from pipetrain.model.tracing.export import exported
from pipetrain.model.trial_tensors import storage_of, strided

_ATEN = torch.ops.aten
_ASSERTIONS = {
    _ATEN._assert_async,
    _ATEN._assert_scalar,
    _ATEN._assert_tensor_metadata,
    _ATEN.sym_constrain_range,
    _ATEN.sym_constrain_range_for_size,
}


class Input(NamedTuple):
    """The source of a placeholder that stands for a tensor of the model's input."""

    number: int


class ModelTensor(NamedTuple):
    """The source of a placeholder that stands for a parameter or buffer, under its first name."""

    name: str
    is_parameter: bool
    trained: bool


class Constant(NamedTuple):
    """The source of a placeholder that stands for any other tensor in the trace."""

    name: str
    tensor: Tensor


class Region(NamedTuple):
    """Gradient and autocast modes that the user's code has set around an operation; None: none set."""

    grad: bool | None = None
    autocast: bool | None = None
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Operations:
    """The operations of a model in one mode. `outputs`: flat, nodes or constants.

    `set_attributes`: those that a forward sets; `limits`: the least and the most of each length. A
    placeholder has its `source` in meta, and an operation its `region`.
    """

    graph: fx.Graph
    outputs: list[Any]
    tree: TreeSpec
    set_attributes: list[str]
    limits: list[Limits]

    def described(self) -> str:
        """Return all that is computed, as text, with all numbers but those of the model's tensors."""
        used = [node for node in self.graph.nodes if node.users or node.op == "call_function"]
        order = {node: f"%{number}" for number, node in enumerate(used)}

        def named(value: Any) -> Any:
            return "" if isinstance(value, torch.device) else order.get(value, value)

        def described(node: fx.Node) -> Any:
            source = node.meta.get("source", node.meta.get("region"))
            numbers = source.tensor.tolist() if isinstance(source, Constant) else source
            target = node.target if node.op == "call_function" else ""
            return target, numbers, fx.node.map_aggregate((node.args, node.kwargs), named)

        outputs = fx.node.map_aggregate(tuple(self.outputs), named)
        return repr([*map(described, used), outputs, self.tree])


def operations_of(model: nn.Module, example: ValueSpec, autocast: bool, training: bool) -> Operations:
    """Return the operations of a model in a mode. Raises ConfigError for a model that cannot be trained."""
    (program, set_attributes), input_names = exported(model, example, training, autocast), example.names
    spec: Any = program.call_spec.in_spec
    inputs = iter(
        range(len(example.specs)) if input_names is None else map(input_names.index, spec.child(1).context)
    )
    graph, env = fx.Graph(), dict[fx.Node, Any]()
    names = names_by_id(model)
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
    for copy, spec in tensors:  # only now, so that code that cannot be cut is reported before its tensors
        copy.meta["source"] = _source(model, program, spec, names)
    outputs = [
        spec.arg.value if isinstance(spec.arg, ConstantArgument) else output
        for spec, output in zip(program.graph_signature.output_specs, returned, strict=True)
        if spec.kind is OutputKind.USER_OUTPUT
    ]
    _write_early(graph)
    graph.output(tuple(output for output in outputs if isinstance(output, fx.Node)))
    graph.eliminate_dead_code()
    tree = program.call_spec.out_spec
    assert tree is not None
    return Operations(graph, outputs, tree, set_attributes, _limits(program, graph, example))


def _limits(program: ExportedProgram, graph: fx.Graph, example: ValueSpec) -> list[Limits]:
    """Return the least and the most of each length for which the trace is valid."""
    limits = [(1.0, inf)] * len(example.longest)
    for node in graph.find_nodes(op="placeholder"):
        source = node.meta.get("source")
        shape = example.specs[source.number].shape if isinstance(source, Input) else ()
        for dimension, n in enumerate(shape, 1):
            if n < 0:
                of = program.range_constraints[node.meta["val"].shape[dimension].node.expr]
                low, high = (float(end) for end in (of.lower, of.upper))
                least, most = limits[-n - 1]
                # Of 1 torch assumes that it may be broadcast, as it does of one sample.
                limits[-n - 1] = max(least, low if low > 2 else 1.0), min(most, high)
    return limits


def _source(
    model: nn.Module, program: ExportedProgram, spec: InputSpec, names: Mapping[int, str]
) -> ModelTensor | Constant:
    """Return the tensor that a placeholder stands for, of the model or in the trace."""
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
    """Copy a graph whose placeholders are in `env`, with its nested regions; return its outputs."""
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
        return args[0][args[1]]  # of a region's outputs
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


def _write_early(graph: fx.Graph) -> None:
    """Move the buffer writes that torch.export puts at the end.

    Each goes after the last use of the buffer and of its new value, so that a cut may lie after it.
    """
    nodes = [*graph.nodes]
    memory = {node: {storage_of(tensor) for tensor in strided(node.meta.get("val"))} for node in nodes}
    for number, node in reversed([*enumerate(nodes)]):
        if node.target is not _ATEN.copy_.default or node.users or node.args[0].op != "placeholder":
            return
        storages = memory[node.args[0]] | memory[node.args[1]]
        before = [
            n
            for n in nodes[:number]
            if any(storages & memory[touched] for touched in (n, *n.all_input_nodes))
        ]
        if before[-1].op == "call_function":
            before[-1].append(node)
            node.meta["nn_module_stack"] = before[-1].meta.get("nn_module_stack")


def _inside(inner: fx.GraphModule, inputs: Sequence[Any], graph: fx.Graph, region: Region) -> Any:
    placeholders = inner.graph.find_nodes(op="placeholder")
    return _unfold(inner, graph, dict(zip(placeholders, inputs, strict=True)), region)


def calls_of(node: fx.Node) -> tuple[str, ...]:
    """Return the calls of submodules around a node, outermost first, as in grouping.Item."""
    stack = node.meta.get("nn_module_stack") or {}
    named = ((path, key.partition("@")[2]) for key, (path, _) in stack.items())
    return tuple(f"{path}@{n}" if n else path for path, n in named if path and not path.startswith("_empty"))


def place_of(node: fx.Node) -> str:
    """Return the file and line of the user's code that made a node, as `model.py:12`, or ""."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    user_frames = [frame for frame in frames if "/torch/" not in frame[0]] or frames
    return f"{user_frames[-1][0].rpartition('/')[2]}:{user_frames[-1][1]}" if user_frames else ""
