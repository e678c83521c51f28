"""Compares, before anything is trained, the stages with the model, and a batch with its microbatches.

Some samples of the first batch run through the model as it was given and through its stages, which must make
the same of them: layers of one process may share more than what they return, a loss may read more than the
last stage has, and a trace holds nothing but operations. Then they run through the stages as one batch and in
pieces, whose loss and gradients must be equal. So it is only where no layer and no loss looks at several
samples at once: not x - x.mean(0), a term over the batch, or an embedding that scales by frequency. There
BatchNorm and dropout are held, as in evaluation, and other draws the same: in training each microbatch has
its own, as every pipeline's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipetrain.errors import ConfigError, one_line
from pipetrain.model.chain import Chain
from pipetrain.model.network import INPUT, Network, Part, ValueId, evaluating, run_parts
from pipetrain.model.packing import state_of
from pipetrain.model.random_numbers import RngSnapshot
from pipetrain.model.results import LOSS, Results, add_gradients, difference
from pipetrain.model.specs import Value, as_tuple, cast_floats, leaves_of, on_each
from pipetrain.model.tensor_places import (
    Held,
    attributes_of,
    in_place_of,
    named_tensors,
    places,
    replace,
    standing_in,
)
from pipetrain.model.trial_tensors import graph_of
from pipetrain.plan.cost_estimate import fake_mode
from pipetrain.plan.plan import Plan
from pipetrain.tasks import Task
from pipetrain.tasks.trial import APART, part_of, pieces_differ

MOST_WORK = 2e9  # floating-point operations of a sample's forward: a second in all
MOST_OF_A_CHAIN, MOST_OF_A_TRACE = 5e8, 1e10  # where stages are compared with the model by numbers
ENOUGH_WORK = 2e9  # of all samples, for which there are more than two
MOST_SAMPLES = 8
COARSE = 5e-2  # relative, in half precision: a trace may choose another kernel for the same function
_AT_A_CUT = ("CloneBackward0", "ToCopyBackward0")  # operations that stages have and the model has not
OF_A_LOSS = (
    "a loss may read from the model what the last stage has: its weights, whenever it is called, as by "
    "model.parameters(), and of an nn.Sequential what its layers keep of their forward. Let the model return "
    "the rest beside its outputs"
)


def compare_stages(plan: Plan, network: Network, task: Task, inputs: Value, targets: Value) -> bool:
    """Refuse stages, with the loss behind them, that do not make what the model does. Raises ConfigError.

    Return whether an own loss could be computed. `inputs`, `targets`: of the first batch, in host memory.

    Of two samples, outputs, gradients and buffers are compared, in training and in evaluation, and of which
    weights the loss has terms beside the outputs. What is expensive runs for the latter alone, without
    numbers. Not compared is a model that is not here as a whole, or does not run alone on a CPU.
    """
    chain = isinstance(network, Chain)
    expensive = _work(plan) > (MOST_OF_A_CHAIN if chain else MOST_OF_A_TRACE)
    by_numbers = not expensive and not (chain and not plan.cuts)
    if _on_meta(network) or (task.is_known and not by_numbers):
        return False
    runs = _Runs(plan, network, task, inputs, targets, expensive)
    with standing_in(runs.modules, {}):
        for training in (True, False) if by_numbers else (True,):
            try:
                whole = runs.results([network.model], training)
            except Exception:  # it does not take these, or not on this device; it may raise anything
                break
            try:
                over_stages = runs.results(runs.parts, training)
                why = difference(whole, over_stages, lowered=plan.numerics.autocast, most=COARSE)
            except Exception as error:
                why = one_line(error)[:200]
            if why:
                raise ConfigError(_refusal(plan, network, training, why))
    return runs.computed_loss


def _refusal(plan: Plan, network: Network, training: bool, why: str) -> str:
    over, given = "layer by layer", "its own forward does"
    way_out = OF_A_LOSS if why.startswith(LOSS) else network.way_out
    if plan.cuts:
        over, given = "over stages", "it does in one process"
        if way_out is OF_A_LOSS:
            way_out += ", or train in one stage"
    mode = "training" if training else "evaluation"
    return f"{over} the model would not compute in {mode} what {given}: {why}; {way_out}"


class _Runs:
    """Runs two samples through a model, or through its stages, on copies of its tensors."""

    def __init__(
        self, plan: Plan, network: Network, task: Task, inputs: Value, targets: Value, expensive: bool
    ) -> None:
        self.parts, self.computed_loss = _parts(plan, network), False
        self._plan, self._network, self._task = plan, network, task
        self._inputs, self._targets = _some_of(inputs, 2, plan), _some_of(targets, 2, plan)
        self._mode = fake_mode() if expensive else None
        self.modules = nn.ModuleList([network.model, *self.parts])
        self._places = [(*place, place.tensor) for place in places(self.modules) if place.tensor.is_leaf]
        self._weights: dict[Tensor, str] = {p: name for name, p in network.model.named_parameters()}

    def results(self, modules: Sequence[nn.Module], training: bool) -> Results:
        """Return the results of the model as it was given, or of its stages.

        Each module has tensors and attributes of its own, as on a rank of its own; what a traced model keeps
        stays, as its next forward may use it. The gradients are those of a weighted sum of the outputs.
        """
        copies = {id(tensor): self._copy(tensor) for *_, tensor in self._places}
        weights = {copies[id(weight)]: name for weight, name in self._weights.items()}
        outputs: Any = ()
        extra = Results()
        with (
            ExitStack() as stack,
            RngSnapshot().replayed(),
            nullcontext() if training else evaluating(self.modules),
            standing_in(self.modules, {}) if isinstance(self._network, Chain) else nullcontext(),
            self._mode or nullcontext(),
            torch.set_grad_enabled(training),
        ):
            for container, key, tensor in self._places:
                container[key] = copies[id(tensor)]
            resets = self._resets()
            for reset in resets:
                stack.callback(reset)
            tensors = map(self._copy, as_tuple(self._inputs))
            values = {ValueId(INPUT, number): tensor for number, tensor in enumerate(tensors)}
            for module in modules:
                held = {id(of.tensor): of.tensor for of in places(self.modules) if of.tensor.is_leaf}
                fresh = {key: tensor.clone() for key, tensor in held.items() if tensor not in weights}
                for reset in resets:  # each stage has its own
                    reset()
                entering: list[Tensor] = []
                with standing_in(self.modules, fresh) if isinstance(module, Part) else nullcontext():
                    with self._plan.numerics.context("cpu"):
                        if isinstance(module, Part):
                            entering = [values[value].clone() for value in module.slice.enters]
                            outputs = module(*entering)
                            values |= zip(module.slice.leaves, outputs, strict=True)
                        else:
                            outputs = self._network.run(self._plan.example, tuple(values.values()))
                    extra |= {f"buffer {name}": buffer.clone() for name, buffer in module.named_buffers()}
                    if training and module is modules[-1] and not self._task.is_known:
                        extra |= self._terms(module, entering, outputs, weights)
            if self._mode:
                return {name: tensor for name, tensor in extra.items() if name.startswith(LOSS)}
            outputs = leaves_of(outputs)
            results = {f"output {number}": tensor.detach() for number, tensor in enumerate(outputs)}
            roots = [tensor for tensor in outputs if tensor.requires_grad]
            torch.default_generator.manual_seed(0)
            leaves = {weight: name for weight, name in weights.items() if weight.requires_grad}
            add_gradients(results, roots, leaves, list(map(_drawn, roots)))
            return results | extra

    def _resets(self) -> list[Callable[[], None]]:
        """Return what sets the generators and iterators that layers keep to where they are now."""
        resets: list[Callable[[], None]] = []
        iterators: list[tuple[Any, Any, Any]] = []
        for container in Held(attributes_of(self.modules)).containers:
            for key, value in [*(container.items() if isinstance(container, dict) else enumerate(container))]:
                if (generator := state_of(value)) is not None:
                    resets.append(partial(generator.set, generator.get()))
                elif isinstance(value, Iterator) and not isinstance(container, set):
                    iterators.append((container, key, value))
        return [*resets, partial(_put_copies, iterators)]

    def _terms(
        self, module: nn.Module, entering: Sequence[Tensor], outputs: Any, weights: Mapping[Tensor, str]
    ) -> Results:
        """Return of which weights the loss has terms beside the outputs, and the size of their graph.

        `entering`: what the last stage gets; of weights of other stages a loss may have terms only by that.
        """
        of_model = not isinstance(module, Part)
        if not of_model and not self.computed_loss:
            return {}
        here = set(map(id, module.parameters()))
        if isinstance(module, Part):
            outputs = module.pack(outputs)
            replace([self._network.model], {id(w): w.detach() for w in weights if id(w) not in here})
        else:
            held = {weight: f"{name}, a parameter that it holds," for weight, name in self._weights.items()}
            weights = {**weights, **held}
        if self._plan.numerics.autocast:
            outputs = cast_floats(outputs, self._plan.settings.dtype)
        try:
            loss = self._task.loss(on_each(outputs, Tensor.detach), self._targets)
            if loss.dim():
                raise ValueError(f"it returns {list(loss.shape)}")
            graph = graph_of(loss)
        except Exception as error:
            if of_model:
                return {}
            raise RuntimeError(f"{LOSS} failed: {one_line(error)}") from error
        self.computed_loss = True
        leaves = {id(getattr(node, "variable", None)) for node in graph}
        terms = {f"{LOSS}'s term of {name}": torch.ones(()) for w, name in weights.items() if id(w) in leaves}
        if not of_model:  # what an earlier stage has left in a list, it leaves on another rank
            near = {id(getattr(node, "variable", None)) for node in graph_of(loss, until=entering)}
            away = [name for w, name in weights.items() if id(w) in near and id(w) not in here]
            terms |= {f"{LOSS}'s term of {name}, which another stage has,": torch.ones(()) for name in away}
        operations = [node for node in graph if node.name() not in _AT_A_CUT]
        return terms | {f"{LOSS}'s graph beside its outputs": torch.ones(len(operations))}

    def _copy(self, tensor: Tensor) -> Tensor:
        """Return a tensor that may be changed; a trace writes no parameter."""
        other = tensor.detach()
        if self._mode:
            other = self._mode.from_tensor(other)
        elif isinstance(self._network, Chain) or not isinstance(tensor, nn.Parameter):
            other = other.clone()
        return other.requires_grad_(tensor.requires_grad)


def _put_copies(places: Sequence[tuple[Any, Any, Any]]) -> None:
    """Put copies into containers, at once, so that what they share stays shared. Raises TypeError."""
    copies = deepcopy([value for *_, value in places])
    for (container, key, _), value in zip(places, copies, strict=True):
        container[key] = value


def _drawn(tensor: Tensor) -> Tensor:
    """Return random numbers like a tensor, the same in every precision, as autocast may choose another."""
    exact = torch.complex128 if tensor.is_complex() else torch.float64
    return torch.rand_like(tensor, dtype=exact).to(tensor.dtype)


def compare_microbatches(plan: Plan, network: Network, task: Task, inputs: Value, targets: Value) -> str:
    """Say why microbatches would train a model otherwise than a batch; "" if they would not.

    `inputs`, `targets`: of the first batch, in host memory. What is too large, is not here as a whole, or
    does not run alone on a CPU is not compared.
    """
    work = _work(plan)
    n = min(len(as_tuple(targets)[0]), max(2, min(MOST_SAMPLES, int(ENOUGH_WORK / max(1.0, work)))))
    if plan.settings.microbatches == 1 or n < 2 or _on_meta(network) or work > MOST_WORK:
        return ""
    parts = _parts(plan, network)
    modules = nn.ModuleList([network.model, *parts])
    batch = [_some_of(value, n, plan) for value in (inputs, targets)]
    differs = ""
    with suppress(Exception):  # a model may run on another device alone, and a user's code may raise anything
        if (differs := _microbatches_differ(network.model, parts, task, *batch)).endswith(APART):
            exact = [cast_floats(value, torch.float64) for value in batch]
            with standing_in(modules, {id(t): _exact(t) for t in named_tensors(network.model).values()}):
                differs = _microbatches_differ(network.model, parts, task, *exact)  # it may be rounding
    return differs and f"of {n} samples of the first batch {differs}"


def _microbatches_differ(
    model: nn.Module, parts: Sequence[Part], task: Task, inputs: Value, targets: Value
) -> str:
    buffers = {id(t): t.clone() for t in model.buffers()}
    weights: dict[Tensor, str] = {
        p: name for part in parts for name, p in part.named_parameters() if p.requires_grad
    }

    def loss_of(start: int, end: int) -> Tensor:
        outputs = run_parts(parts, [t.clone() for t in as_tuple(part_of(inputs, start, end))])
        return task.loss(parts[-1].pack(outputs), part_of(targets, start, end))

    with standing_in(model, buffers), evaluating(*parts):
        return pieces_differ(loss_of, task.weight, targets, weights)


def _exact(tensor: Tensor) -> Tensor:
    return in_place_of(tensor, tensor.detach().double()) if tensor.is_floating_point() else tensor


def _work(plan: Plan) -> float:
    """Return the floating-point operations of a sample's forward."""
    return sum(layer.flops for layer in plan.layers) / plan.settings.full.samples


def _some_of(value: Value, samples: int, plan: Plan) -> Value:
    """Return the first samples of a batch as the model gets them."""
    return cast_floats(part_of(value, 0, samples), plan.settings.data_dtype)


def _on_meta(network: Network) -> bool:
    return any(tensor.is_meta for tensor in named_tensors(network.model).values())


def _parts(plan: Plan, network: Network) -> list[Part]:
    return [network.part(*slices) for slices in zip(plan.cut.slices, plan.evaluation_cut.slices, strict=True)]
