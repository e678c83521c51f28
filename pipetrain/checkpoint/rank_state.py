"""The state of one rank as tensors by name, and back: its stages, random numbers and codecs' residuals.

The same state for torch.distributed.checkpoint, with the names of plain PyTorch: `model.NAME` of the model's
state_dict, `state.NAME.KEY` of the optimizer's state for a parameter, and `updates`. Each rank gives the
tensors of its stages; a tensor on several ranks is written once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipetrain.checkpoint.files import rank_file, stage_file
from pipetrain.checkpoint.resume import Source
from pipetrain.checkpoint.tensor_reader import ATTRIBUTE, EMA, MODEL, OPTIMIZER, NamedTensors, names_of
from pipetrain.model.numerics import numbers_of
from pipetrain.plan.plan import Plan
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.runtime.session import Session
from pipetrain.runtime.stage.stage import Stage
from pipetrain.schedule.actions import Edge


def snapshot(
    session: Session, groups: ProcessGroups, random: Mapping[str, Tensor]
) -> dict[str, dict[str, Tensor]]:
    """Return copies, in host memory, of a rank's state between two windows, by file.

    A stage's state is saved by its first rank. `random`: further random states. Raises TypeError for an
    optimizer with a state that cannot be saved.
    """
    session.average_buffers()
    for stage in session.stages.values():
        stage.check()
    files = {stage_file(n): state_of(stage) for n, stage in session.stages.items() if session.is_leader(n)}
    rank, device = groups.world.rank, groups.device
    own_state = {f"random/{rank}/cpu": torch.get_rng_state(), **random}
    if device.type == "cuda":
        own_state[f"random/{rank}/cuda"] = torch.cuda.get_rng_state(device)
    residuals = {
        f"{_prefix(session, rank, edge, number)}{'x'.join(map(str, shape))}": _copy(residual)
        for (edge, number, shape), residual in session.engine.coding.residuals.items()
    }
    name = next(iter(files), rank_file(rank))
    return files | {name: files.get(name, {}) | own_state | residuals}


def state_of(stage: Stage) -> dict[str, Tensor]:
    """Return copies, in host memory, of a stage's state between two windows.

    Keys use the layer names of the whole model: `model/NAME` for parameters and buffers (complex ones as
    pairs of real numbers), `optimizer/NAME/NUMBER` for the optimizer's state, `ema/NAME` for the moving
    average of the weights, `attribute/STAGE/PATH/NUMBER` for attributes. What several stages share is in the
    state of the first one.
    """
    tensors = {MODEL + name: numbers_of(tensor.detach()) for name, tensor in stage.tensors_by_name()}
    tensors |= {OPTIMIZER + path: tensor for path, tensor in stage.weights.optimizer_state().items()}
    tensors |= {EMA + name: numbers_of(tensor) for name, tensor in stage.store.average().items()}
    for path, tree in stage.attributes.changed().items():
        tensors |= {f"{ATTRIBUTE}{stage.index}/{path}/{number}": t for number, t in enumerate(tree)}
    return {
        path: _copy(tensor) for path, tensor in tensors.items() if _weight_of(path) not in stage.elsewhere
    }


def restore(source: Source, session: Session, groups: ProcessGroups) -> None:
    """Load a rank's stages, the seed and, for the same pipeline, its residuals. All ranks call it."""
    session.average_buffers()  # the replicas' separate buffers are from before
    tensors = source.tensors()
    session.engine.draw_by(source.manifest.config.get("seed", session.engine.seed))
    same_cuts = source.manifest.pipeline["cuts"] == session.plan.pipeline["cuts"]
    with source.used():
        for stage in session.stages.values():
            stage.attributes.restore(_attributes(tensors, stage.index if same_cuts else None))
            _load(stage, tensors, source.manifest.position.update)
    if source.manifest.pipeline == session.plan.pipeline:
        session.engine.coding.restore(
            {
                (edge, number, tuple(tensors[name].shape)): tensors[name].clone().to(groups.device)
                for edge, number in _owing(session.plan, groups.world.rank)
                for name in tensors  # of any shape: later sizes too
                if name.startswith(_prefix(session, groups.world.rank, edge, number))
            }
        )


def _attributes(tensors: NamedTensors, stage: int | None) -> dict[str, list[list[Tensor]]]:
    """Return the saved attributes of stages, or of this one: by path, for each stage that has them."""
    by_path: dict[str, dict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
    names = names_of(tensors, ATTRIBUTE if stage is None else f"{ATTRIBUTE}{stage}/")
    for name in sorted(names, key=lambda name: int(name.rpartition("/")[2])):
        number_of_stage, path = name.split("/", 1) if stage is None else (str(stage), name)
        by_path[path.rpartition("/")[0]][number_of_stage].append(
            tensors[f"{ATTRIBUTE}{number_of_stage}/{path}"]
        )
    return {path: list(by_stage.values()) for path, by_stage in by_path.items()}


@torch.no_grad()
def _load(stage: Stage, tensors: NamedTensors, updates: int) -> None:
    """Restore a stage from `state_of`, of this stage or of others that held these layers."""
    for name, tensor in stage.tensors_by_name():
        numbers_of(tensor.data).copy_(tensors[MODEL + name])
    parameters = stage.store.names
    paths = [path for path in names_of(tensors, OPTIMIZER) if path.rpartition("/")[0] in parameters]
    state = {path: tensors[OPTIMIZER + path].clone() for path in paths}
    stage.weights.load_optimizer_state(state, updates)
    stage.weights.load_average({name: tensors[EMA + name] for name in parameters if EMA + name in tensors})


def _weight_of(path: str) -> str:
    kind, _, name = path.partition("/")
    return name.rpartition("/")[0] if kind + "/" == OPTIMIZER else name


def _copy(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


def restore_random(source: Source, groups: ProcessGroups) -> None:
    """Restore this rank's random state, if the rank with its number has saved one.

    Rank 0's state decides how a DataLoader shuffles, so this comes before the first batch is read.
    """
    tensors, rank = source.tensors(), groups.world.rank
    with source.used():
        if f"random/{rank}/cpu" in tensors:
            torch.set_rng_state(tensors[f"random/{rank}/cpu"])
        if groups.device.type == "cuda" and f"random/{rank}/cuda" in tensors:
            torch.cuda.set_rng_state(tensors[f"random/{rank}/cuda"], groups.device)


def _prefix(session: Session, rank: int, edge: Edge, number: int) -> str:
    """Return the prefix for the names of a rank's residuals of a tensor; later replicas include the rank."""
    replica = "" if session.is_leader(edge[0]) else f"{rank}/"
    return f"residual/{replica}{edge[0]}-{edge[1]}/{number}/"


def _owing(plan: Plan, rank: int) -> list[tuple[Edge, int]]:
    """Return the tensors that a rank sends with error feedback: the edge, and its number in the message."""
    return [
        (edge, number)
        for edge in plan.cut.bounds
        if rank in plan.placement[edge[0]] and plan.settings.codecs.for_edge(edge).error_feedback
        for number in range(plan.cut.tensors(edge))
    ]


# torch.distributed.checkpoint


@dataclass(frozen=True, slots=True)
class StatefulPart:
    """A Stateful of torch.distributed.checkpoint, which overwrites the result of `state_dict` in place."""

    state_dict: Callable[[], Any]
    load_state_dict: Callable[[Any], None]


def parts_of(session: Session, keys: Mapping[str, str]) -> dict[str, StatefulPart]:
    """Return the parts to save or load. `keys`: the tensor behind each entry of the model's state_dict."""
    stages = session.stages.values()

    def model() -> dict[str, Tensor]:
        by_name = {name: tensor.detach() for stage in stages for name, tensor in stage.tensors_by_name()}
        return {key: by_name[name] for key, name in keys.items() if name in by_name}

    @torch.no_grad()
    def load_model(tensors: Mapping[str, Tensor]) -> None:
        loaded = {keys[key]: tensor for key, tensor in tensors.items()}
        for stage in stages:
            for name, tensor in stage.tensors_by_name():  # stages that share a weight have one copy each
                tensor.data.copy_(loaded.get(name, tensor))
            stage.weights.load_average({})

    def state() -> dict[str, dict[str, Any]]:
        return {name: values for stage in stages for name, values in stage.weights.named_state().items()}

    def load_state(by_name: Mapping[str, Mapping[str, Any]]) -> None:
        for stage in stages:
            stage.weights.load_named_state(by_name)

    def updates() -> Tensor:
        return torch.tensor(session.updates)

    def load_updates(number: Tensor) -> None:
        for stage in stages:
            stage.weights.count_from(int(number))

    return {
        "model": StatefulPart(model, load_model),
        "state": StatefulPart(state, load_state),
        "updates": StatefulPart(updates, load_updates),
    }
