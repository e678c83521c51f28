"""Makes a network of layers from any nn.Module, by tracing it in training and in evaluation mode."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from difflib import SequenceMatcher
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.nn.utils.parametrize import ParametrizationList

from pipetrain.errors import ConfigError
from pipetrain.model.random_numbers import RngSnapshot
from pipetrain.model.specs import ValueSpec
from pipetrain.model.tensor_places import origin, standing_in
from pipetrain.model.tracing.dataflow import Dataflow
from pipetrain.model.tracing.export import LIBRARIES, WAY_OUT
from pipetrain.model.tracing.grouping import Item, group, module_of
from pipetrain.model.tracing.operations import ModelTensor, Operations, calls_of, operations_of, place_of
from pipetrain.model.tracing.traced_network import Traced


def trace(model: nn.Module, example: ValueSpec, autocast: bool = False) -> Traced:
    """Return a model as layers and the values between them.

    `example`: the spec of a sample's input; `autocast`: see network_of. The model may be on the meta device.
    Its tensors are shared, and its modes, values and the random generators do not change. Raises ConfigError
    with the place and advice for a model that cannot be traced or cut.
    """
    before, operations = RngSnapshot(), partial(operations_of, model, example, autocast)
    _refuse_unseen_hooks(model, lambda: [operations(mode).described() for mode in (True, False)])
    trained, evaluated = (Dataflow(operations(training)) for training in (True, False))
    if before.drawn():
        raise ConfigError(
            f"the model draws from Python's or NumPy's random numbers: draw by torch, or {WAY_OUT}"
        )
    _refuse_outputs(trained.operations, evaluated.operations)
    there = _places(trained, evaluated)
    elsewhere = evaluated.forbidden()
    forbidden = trained.forbidden() | {n for n, at in enumerate(there) if at in elsewhere}
    for name in trained.written | evaluated.written:  # by one mode, but perhaps used by the other
        uses = [*trained.uses_of(name), *(bisect_right(there, at) - 1 for at in evaluated.uses_of(name))]
        forbidden |= {*range(min(uses) + 1, max(uses) + 1)}
    evaluated_too = [at != behind for at, behind in pairwise(there)]  # the layer must do something there
    items = [
        Item(calls_of(node), tuple(trained.uses(node)), trained.nbytes(node), works and trained.works(node))
        for node, works in zip(trained.items, evaluated_too, strict=True)
    ]
    called = {module_of(call) for item in items for call in item.calls}
    starts = group(items, _elements(model) & called, forbidden, type(model).__name__)
    _, *cuts = starts.values()
    modes = {True: (trained, cuts), False: (evaluated, [there[cut] for cut in cuts])}
    return Traced(model, modes, list(starts), operations)


def _refuse_unseen_hooks(model: nn.Module, described: Callable[[], list[str]]) -> None:
    """Refuse hooks that leave no trace in the operations. Raises ConfigError.

    Of hooks with the same code, as on all layers, only the first is tried.
    """
    tried = set[object]()
    for name, module in model.named_modules():
        for kind in ("_backward_hooks", "_backward_pre_hooks", "_forward_pre_hooks", "_forward_hooks"):
            hooks = vars(module)[kind]
            for key, hook in list(hooks.items()):
                code, unseen = getattr(hook, "__code__", type(hook)), "backward" in kind
                if origin(hook) in LIBRARIES or code in tried:
                    continue
                tried.add(code)
                before = [] if unseen else described()
                with (
                    suppress(ConfigError),
                    standing_in(module, {}),
                ):  # the forward may need the hook's results
                    hooks[key] = lambda *_: None
                    unseen = unseen or before == described()
                if unseen:
                    raise ConfigError(
                        f"training would never call {getattr(hook, '__qualname__', code)}, a hook of "
                        f"{name or 'the model'}, of which a trace holds nothing: {WAY_OUT}, with its hooks"
                    )


def _refuse_outputs(training: Operations, evaluation: Operations) -> None:
    constants = [
        [out for out in operations.outputs if not isinstance(out, fx.Node)]
        for operations in (training, evaluation)
    ]
    if training.tree != evaluation.tree or constants[0] != constants[1]:
        raise ConfigError(
            "the model returns something else in evaluation than in training: let it return the same kind "
            "of value in both"
        )
    outputs = [(out, out.meta["val"]) for out in training.outputs if isinstance(out, fx.Node)]
    wrong = [
        f"{value} ({place_of(node)})"
        for node, value in outputs
        if not isinstance(value, Tensor) or free_unbacked_symbols(value)
    ]
    if wrong or not outputs:
        raise ConfigError(
            f"the model returns {', '.join(wrong) or 'None'}, which is no tensor, or one whose size depends "
            f"on its data: return tensors only, whole, and let the loss choose"
        )


def _places(trained: Dataflow, evaluated: Dataflow) -> list[int]:
    """Map each cut before an item in training to the item in evaluation that it comes before.

    Both modes mostly do the same with other constants (dropout's `train`, batch_norm's `training`). What only
    one mode does, such as a stochastic depth, belongs to the layer before it.
    """
    keys, evaluated_keys = ([_key(node) for node in flow.items] for flow in (trained, evaluated))
    there = [len(evaluated.items)] * (len(trained.items) + 1)
    for a, b, size in reversed(
        SequenceMatcher(None, keys, evaluated_keys, autojunk=False).get_matching_blocks()
    ):
        for position in range(a + size - 1, -1, -1):
            there[position] = b + max(0, position - a)
    return there


def _key(node: fx.Node) -> Any:
    sources = (input_node.meta.get("source") for input_node in node.all_input_nodes)
    return node.target, calls_of(node), tuple(source for source in sources if isinstance(source, ModelTensor))


def _elements(model: nn.Module) -> set[str]:
    """Return the names of the modules in lists of modules."""
    lists = nn.Sequential | nn.ModuleList | nn.ModuleDict
    return {
        f"{name}.{key}".lstrip(".")
        for name, module in model.named_modules()
        if isinstance(module, lists) and not isinstance(module, ParametrizationList)
        for key in module._modules
    }
