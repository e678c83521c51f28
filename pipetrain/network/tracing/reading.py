"""Reads the operations of a model from what torch.export returns for one mode.

torch.export gives an FX graph of ATen operations with the weights as inputs. Here the weights are places in
the user's module, the regions without gradients or under autocast are unfolded into their operations, and
assertions are left out.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, TensorArgument
from torch.utils._pytree import tree_leaves, tree_map

from pipetrain.errors import ConfigError
from pipetrain.network.tracing.operations import (
    Autocast,
    Call,
    Constant,
    Device,
    Held,
    Input,
    Listing,
    Op,
    canonical,
)


def read(
    program: ExportedProgram, model: nn.Module, order: Sequence[int], training: bool, device: torch.device
) -> Listing:
    """Return the operations of a model that was exported on `device`.

    `order`: the number, among the tensors of a microbatch, of each tensor input of the program. Raises
    ConfigError for what cannot be trained.
    """
    _refuse_transforms(program)
    reader = _Reader(program, model, order, training, device)
    env = reader.sources()
    outputs = reader.run(program.graph_module, env, grad=True, autocast=None)
    flat: list[Any] = []
    for spec, output in zip(program.graph_signature.output_specs, outputs, strict=True):
        if isinstance(spec.arg, ConstantArgument):
            flat.append(spec.arg.value)
        elif isinstance(spec.arg, TensorArgument) and spec.kind.name == "USER_OUTPUT":
            flat.append(output)
        elif spec.kind.name == "USER_OUTPUT":
            raise ConfigError(
                f"the model returns {type(output.value).__name__} {output.value}, a number that changes with "
                f"the microbatch: return tensors only"
            )
    tree = program.call_spec.out_spec
    assert tree is not None
    return Listing(reader.ops, flat, tree, reader.constants)


def _refuse_transforms(program: ExportedProgram) -> None:
    """Refuse code of torch.func, whose operations are on tensors of its own. Raises ConfigError."""
    for graph in program.graph_module.modules():
        for node in graph.graph.nodes if isinstance(graph, fx.GraphModule) else ():
            if getattr(node.target, "__module__", "").startswith("torch._functorch"):
                raise ConfigError(
                    f"the model uses torch.vmap or torch.func at {place_of(node)}, which cannot be cut: "
                    f"write it for the whole batch, or {way_out(node)}"
                )


class _Reader:
    def __init__(
        self,
        program: ExportedProgram,
        model: nn.Module,
        order: Sequence[int],
        training: bool,
        device: torch.device,
    ) -> None:
        self._program = program
        self._names = canonical(model)
        self._model = model
        self._order = order
        self._modes = frozenset({training})
        self._device = device
        self.ops: list[Op] = []
        self.constants: dict[str, Tensor] = {}

    def sources(self) -> dict[str, Any]:
        """Return the operations that stand for the inputs of the program's graph, by name."""
        env: dict[str, Any] = {}
        inputs = iter(self._order)
        values = {
            node.name: node.meta.get("val") for node in self._program.graph.find_nodes(op="placeholder")
        }
        for spec in self._program.graph_signature.input_specs:
            source: Input | Held | Constant
            if spec.kind is InputKind.USER_INPUT:
                if isinstance(spec.arg, ConstantArgument):
                    env[spec.arg.name] = spec.arg.value
                    continue
                source = Input(next(inputs))
            elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                source = self._held(_tensor_at(self._model, str(spec.target)))
            else:
                source = self._constant(str(spec.target))
            env[spec.arg.name] = self._add(
                Op(None, source=source, value=values[spec.arg.name], modes=self._modes)
            )
        return env

    def _constant(self, name: str) -> Held | Constant:
        value = self._program.constants[name]
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"the model uses {name}, a {type(value).__name__}, which cannot be cut into stages: use "
                f"tensors only"
            )
        if id(value) in self._names:
            return self._held(value)
        if value.requires_grad:
            raise ConfigError(
                f"the model trains {name}, which is no parameter of it: make it an nn.Parameter"
            )
        if value.is_meta:
            raise ConfigError(
                f"the model uses {name}, a tensor on the meta device, which is no parameter or buffer "
                f"and so has no values: register it as a buffer"
            )
        self.constants[name] = value
        return Constant(name)

    def _held(self, tensor: Tensor) -> Held:
        return Held(self._names[id(tensor)], isinstance(tensor, nn.Parameter))

    def run(self, graph: fx.GraphModule, env: dict[str, Any], grad: bool, autocast: Autocast | None) -> Any:
        """Add the operations of a graph with its inputs `env`, and return its outputs."""
        for node in graph.graph.nodes:
            if node.op == "output":
                return fx.map_arg(node.args[0], lambda n: env[n.name])
            if node.op == "get_attr":
                env[node.name] = getattr(graph, node.target)
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n.name])
                env[node.name] = self._call(node, args, kwargs, grad, autocast)
        raise AssertionError("a graph without output")

    def _call(self, node: fx.Node, args: Any, kwargs: Any, grad: bool, autocast: Autocast | None) -> Any:
        name = str(node.target)
        if name.startswith("aten._assert") or name in _LEFT_OUT:
            return None
        if name == "wrap_with_set_grad_enabled":
            enabled, inner, *given = args
            return self._inline(inner, given, enabled, autocast)
        if name == "wrap_with_autocast":
            _, dtype, enabled, _, inner, *given = args
            return self._inline(inner, given, grad, Autocast(enabled, dtype))
        if node.target is operator.getitem and not isinstance(args[0], Op):
            return args[0][args[1]]
        if node.target is _ATEN.detach_.default and args[0].target is _ATEN.lift_fresh_copy.default:
            return args[0]  # a copy of a constant, which has no gradient anyway
        if any(isinstance(leaf, fx.GraphModule) for leaf in tree_leaves((args, kwargs))):
            raise ConfigError(
                f"the model uses {name} at {place_of(node)}, whose branches cannot be cut: {way_out(node)}"
            )
        if not grad:
            args, kwargs = self._detached((args, kwargs), node)
        args, kwargs = tree_map(self._on_device, (args, kwargs))
        scalar = isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool | int | float)
        op = Op(
            node.target,  # type: ignore[arg-type]
            tuple(args),
            dict(kwargs),
            value=node.meta.get("val"),
            calls=calls_of(node),
            where=place_of(node),
            autocast=None if scalar or node.target is operator.getitem else autocast,
            modes=self._modes,
        )
        return self._add(op)

    def _add(self, op: Op) -> Op:
        self.ops.append(op)
        return op

    def _inline(self, inner: fx.GraphModule, given: list[Any], grad: bool, autocast: Autocast | None) -> Any:
        names = [node.name for node in inner.graph.find_nodes(op="placeholder")]
        return self.run(inner, dict(zip(names, given, strict=True)), grad, autocast)

    def _detached(self, arguments: Any, node: fx.Node) -> Any:
        """Return arguments without gradients, as a node in a region under torch.no_grad takes them."""
        detach = _ATEN.detach.default

        def detached(leaf: Any) -> Any:
            value = leaf.value if isinstance(leaf, Op) else None
            if not isinstance(value, Tensor) or not value.is_floating_point() or leaf.target is detach:
                return leaf
            calls, where = calls_of(node), place_of(node)
            return self._add(Op(detach, (leaf,), value=value, calls=calls, where=where, modes=self._modes))

        return tree_map(detached, arguments)

    def _on_device(self, leaf: Any) -> Any:
        return Device() if isinstance(leaf, torch.device) and leaf.type == self._device.type else leaf


_ATEN = torch.ops.aten
_LEFT_OUT = ("aten.sym_constrain_range.default", "aten.sym_constrain_range_for_size.default")


def _tensor_at(model: nn.Module, name: str) -> Any:
    owner, _, attribute = name.rpartition(".")
    return getattr(model.get_submodule(owner), attribute)


def calls_of(node: fx.Node) -> tuple[Call, ...]:
    """Return the calls of submodules in which a node was made, outermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    return tuple(
        Call(key, path) for key, (path, _) in stack.items() if path and not path.startswith("_empty")
    )


def place_of(node: fx.Node) -> str:
    """Return the file and line of the user's code that made a node, as `model.py:12`, or ""."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if "/torch/" not in frame[0]] or frames
    return f"{own[-1][0].rpartition('/')[2]}:{own[-1][1]}" if own else ""


def way_out(node: fx.Node) -> str:
    """Return what a user can do about code that cannot be traced."""
    calls = calls_of(node)
    inside = f" around {calls[-1].path}" if calls else ""
    return f"make the model an nn.Sequential of layers, so that the code{inside} stays inside one of them"
