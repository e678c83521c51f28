"""The program's model, while the ranks train its tensors.

Each rank has the tensors of its stages. The model's other tensors would show old numbers and take memory. So
they are on the meta device, where computing with them is an error, until `collect` brings the numbers of all
ranks to rank 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import cycle, islice

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pipetrain.errors import ConfigError
from pipetrain.model.model_guard import ModelGuard
from pipetrain.model.network import Network, Values
from pipetrain.model.requirements import cast_exactly, state_names
from pipetrain.model.tensor_places import in_place_of, named_tensors, on_meta, replace
from pipetrain.plan.cut import homes
from pipetrain.plan.plan import Plan
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.runtime.stage.stage import Stage


def owners(network: Network, plan: Plan) -> dict[str, int]:
    """Return the rank of the first stage that holds each tensor, by its name in the model."""
    return {name: plan.firsts[stage] for name, stage in homes(network, plan.cuts).items()}


class WholeModel:
    """A model and the tensors of its stages. `values`: those that it begins with in place of its own."""

    def __init__(self, model: nn.Module, groups: ProcessGroups, values: Values | None) -> None:
        self.values = values
        self.keys = state_names(model)
        """The name of the tensor behind each entry of the state_dict."""
        self.attached = False
        """Whether stages have its tensors."""
        self.guard: ModelGuard | None = None
        """What must not change of it from then on."""
        self._model = model
        self._groups = groups
        first_names: dict[int, str] = {}  # of all names that a tensor has
        self._names = {name: first_names.setdefault(id(tensor), name) for name, tensor in _all_named(model)}
        self._tensor_names = list(named_tensors(model))
        self._owners: dict[str, int] = {}
        self._stages: list[Stage] = []
        self._collected = False  # whether rank 0 has all numbers
        self._call_hook: RemovableHandle | None = None  # against a call of it where it has no numbers
        self._swapped: list[tuple[Tensor, Tensor]] = []  # what the stages need, and what was collected

    def set_initial_values(self, values: Values) -> None:
        """Begin with these in place of its own."""
        self.values = values

    def attach_stages(self, network: Network, stages: Iterable[Stage], owners: dict[str, int]) -> None:
        """Let these stages have their tensors, and release all others."""
        self._stages, self._owners, self.values, self.attached = list(stages), owners, None, True
        self._swapped, self._collected = [], False
        local, tensors = self._local_tensors(), named_tensors(self._model)
        replacements = {id(t): local[name] if name in local else on_meta(t) for name, t in tensors.items()}
        replace(network.modules, replacements)
        self._replace(replacements)
        if self._groups.world.size > 1:
            self._call_hook = self._model.register_forward_pre_hook(_refuse_without_numbers)
        self.guard = ModelGuard(self._model, network)

    def _replace(self, replacements: Mapping[int, Tensor]) -> None:
        replace([self._model], replacements, *(self.guard.held.content if self.guard else ()))

    def collect(self) -> nn.Module:
        """Put the tensors of all ranks into the model on rank 0, in host memory; return the model."""
        tensors = self._tensors(self._tensor_names)  # none but on rank 0
        self.restore_stages()
        current = named_tensors(self._model)
        received = {name: new for name, new in tensors.items() if new is not current[name]}
        self._swapped = [(current[name], in_place_of(current[name], new)) for name, new in received.items()]
        self._replace({id(old): new for old, new in self._swapped})
        self._collected = True
        return self._model

    def state_dict(self, ema: bool = False) -> dict[str, Tensor]:
        """Return the state_dict in host memory on rank 0; empty on the others. All ranks call it.

        `ema`: with the moving average of the weights.
        """
        tensors = self._tensors(set(self.keys.values()), ema)
        for name, tensor in tensors.items():
            if self._owners.get(name, 0) == 0:  # these are the stages' own
                tensors[name] = tensor.detach().clone()
        return {key: tensors[name] for key, name in self.keys.items() if tensors}

    def restore_stages(self) -> None:
        """Let the stages have their tensors again, before they train."""
        if self._swapped:
            self._install_stage_tensors()
        self._swapped = []
        self._collected = False

    @contextmanager
    def stages_in_place(self) -> Iterator[None]:
        """Let the stages have their tensors for a while, in which these do not change."""
        self._install_stage_tensors()
        try:
            yield
        finally:
            self._replace({id(trained): collected for trained, collected in self._swapped})

    def end(self, failed: bool) -> None:
        """Leave the model on rank 0 as collected, and elsewhere without numbers; one process has all."""
        rank, size = self._groups.world.rank, self._groups.world.size
        if self._call_hook is not None:
            self._call_hook.remove()
        if self.attached and size == 1 and not failed:
            self.collect()
        elif self.attached and size > 1 and not (self._collected and rank == 0):
            self._replace({id(t): on_meta(t) for t in named_tensors(self._model).values()})

    def _install_stage_tensors(self) -> None:
        self._replace({id(collected): trained for trained, collected in self._swapped})

    def _tensors(self, names: Collection[str], ema: bool = False) -> dict[str, Tensor]:
        """Return tensors by their names in the model, in host memory, on rank 0; none on the others."""
        if not self.attached:  # nothing has been trained
            return self._initial(names) if not self._groups.world.rank else {}
        with self.stages_in_place():
            local_tensors = self._local_tensors(ema)
        collected: dict[str, Tensor] = {}
        for owner in range(self._groups.world.size):
            owned = [name for name in self._owners if name in names and self._owners[name] == owner]
            tensors = [local_tensors[name] for name in owned] if owner == self._groups.world.rank else []
            collected |= zip(owned, self._groups.collect_on_rank0("the model", tensors, owner), strict=False)
        return {name: collected[name] for name in names if name in collected}

    def _initial(self, names: Collection[str]) -> dict[str, Tensor]:
        tensors = {name: tensor for name, tensor in named_tensors(self._model).items() if name in names}
        values = self.values.tensors(names) if self.values is not None else {}
        return {
            name: cast_exactly(name, values[name], tensor.dtype) if name in values else tensor
            for name, tensor in tensors.items()
        }

    def _local_tensors(self, ema: bool = False) -> dict[str, Tensor]:
        local_tensors: dict[str, Tensor] = {}
        for stage in self._stages:
            with stage.store.averaged() if ema else nullcontext():
                for name, tensor in _all_named(stage.module):
                    if name in self._names:  # not one that a layer has made as it ran
                        local_tensors.setdefault(self._names[name], tensor)
        return local_tensors


def _refuse_without_numbers(model: nn.Module, inputs: object) -> None:
    """Refuse a program's call of a model whose tensors other ranks have. Raises ConfigError."""
    if any(tensor.is_meta for tensor in named_tensors(model).values()):
        raise ConfigError(
            "the model is without its weights, which the ranks of its stages have: pipe.collect(), on all "
            "ranks, puts them into that of rank 0, and pipe.predict(loader) yields outputs for new data"
        )


def _all_named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def gather_outputs(
    outputs: Sequence[tuple[Tensor, ...]], batches: int, groups: ProcessGroups, owners: Sequence[int]
) -> list[tuple[Tensor, ...]]:
    """Return on rank 0, in host memory, the outputs for so many batches, which `owners` have in turn."""
    by_owner = []
    for owner in owners:
        local = [tensor for tensors in outputs for tensor in tensors] if owner == groups.world.rank else []
        by_owner.append(iter(groups.collect_on_rank0("the outputs", local, owner)))
    size = groups.broadcast("the tensors of an output", len(outputs[0]) if outputs else 0, owners[0])
    turns = islice(cycle(by_owner), 0 if groups.world.rank else batches)
    return [tuple(islice(tensors, size)) for tensors in turns]
