"""The model's tensors, and a prediction's outputs, brought to rank 0 from the ranks that have them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from pipetrain.network.model import cast_exactly
from pipetrain.network.network import Network, Values
from pipetrain.network.places import named_tensors
from pipetrain.network.values import TensorSpec, bytes_of
from pipetrain.plan.cut import homes
from pipetrain.plan.plan import Plan
from pipetrain.runtime.mesh import Mesh
from pipetrain.runtime.session import Session


def owners(network: Network, plan: Plan) -> dict[str, int]:
    """Return the rank of the first stage that holds each tensor, by its name in the model."""
    return {name: plan.placement[stage] for name, stage in homes(network, plan.cuts).items()}


def initial(model: nn.Module, values: Values | None, names: Collection[str]) -> dict[str, Tensor]:
    """Return tensors of a model that has not been trained, by name, with `values` before its own."""
    tensors = {name: tensor for name, tensor in named_tensors(model).items() if name in names}
    given = values.tensors(names) if values is not None else {}
    return {
        name: cast_exactly(name, given[name], mine.dtype) if name in given else mine
        for name, mine in tensors.items()
    }


def own_tensors(runner: Session, names: Mapping[str, str], ema: bool = False) -> dict[str, Tensor]:
    """Return the tensors of this rank's stages by name; `names`: see `all_names`.

    `ema`: with the moving average of the weights.
    """
    found: dict[str, Tensor] = {}
    for stage in runner.stages.values():
        with stage.weights.averaged() if ema else nullcontext():
            for name, tensor in _all_named(stage.module):
                if name in names:  # not one that a layer has made as it ran
                    found.setdefault(names[name], tensor)
    return found


def all_names(model: nn.Module) -> dict[str, str]:
    """Return the name of each tensor of a model by all names that it has."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in _all_named(model)}


def _all_named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def merged(
    own: Mapping[str, Tensor], mesh: Mesh, specs: Mapping[str, TensorSpec], owners: Mapping[str, int]
) -> dict[str, Tensor]:
    """Return all tensors of the model by name, in host memory, on rank 0; none on the others.

    `own`: those of this rank's stages. Raises ChannelError.
    """
    found = {}
    for name, spec in specs.items():
        tensor = _on_first(f"{name} of the model", own.get(name), spec, mesh, owners[name])
        if tensor is not None:
            found[name] = tensor
    return found


def _on_first(what: str, mine: Tensor | None, spec: TensorSpec, mesh: Mesh, owner: int) -> Tensor | None:
    """Return on rank 0, in host memory, the tensor that its `owner` has; None on the others."""
    rank = mesh.world.rank
    if rank == owner:
        assert mine is not None
        if rank == 0:
            return mine.cpu()
        work = mesh.post_tensor(bytes_of(mine.detach().cpu()), 0)
        assert work is not None
        work.wait()
    elif rank == 0:
        sent = TensorSpec((spec.nbytes,), torch.uint8)
        return mesh.take_tensor(what, sent, owner).view(spec.dtype).reshape(spec.shape)
    return None


def brought(outputs: Sequence[tuple[Tensor, ...]], mesh: Mesh, owner: int) -> list[tuple[Tensor, ...]]:
    """Return on rank 0 the outputs that their `owner` has, in host memory; none on the others."""
    own = [[[list(t.shape), str(t.dtype).removeprefix("torch.")] for t in tensors] for tensors in outputs]
    told = mesh.tell("the forms of the outputs", own, owner)
    found = []
    for number, forms in enumerate(told):
        specs = [TensorSpec(tuple(shape), getattr(torch, dtype)) for shape, dtype in forms]
        mine = outputs[number] if outputs else [None] * len(specs)
        tensors = [_on_first("the outputs", t, s, mesh, owner) for t, s in zip(mine, specs, strict=True)]
        found.append(tuple(t for t in tensors if t is not None))
    return found
