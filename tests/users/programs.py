"""What these programs share: a model, batches, and one process that a Pipeline is held against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from pipetrain import Pipeline
from tests.support.parity import evaluated, of_pairs, plainly


def mlp(*more: nn.Module) -> nn.Sequential:
    """Layers from 6 to 5 numbers in float64, always the same; some more after the fourth."""
    torch.manual_seed(0)
    first = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()]
    return nn.Sequential(*first, *more, nn.Linear(8, 5)).double()


def batch(size: int = 8, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 6, generator=generator).double(), torch.randint(5, (size,), generator=generator)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def ended(program: Callable[[], object]) -> str:
    """What a program ends with."""
    try:
        program()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def trained(
    model: Any, loss: Any, batches: Any, *schedule: Any, window: int | None = None, **options: Any
) -> tuple[list[float], str]:
    """Train a copy of a model for a pass; return the losses, and what ended it before the end."""
    model, losses = deepcopy(model), []

    def program() -> None:
        with Pipeline(model, loss, sgd, *schedule, device="cpu", **options) as pipe:
            for number in pipe.train(batches, window):
                losses.append(number)

    return losses, ended(program)


def apart(
    model: nn.Module,
    loss: Callable[..., Tensor],
    batches: Sequence[tuple[Any, Tensor]],
    between: Callable[[nn.Module], object] = lambda model: None,
    microbatches: int = 2,
    **options: Any,
) -> float:
    """Train two passes with an evaluation between them, in which the program may change the model.

    Returns the most by which losses, weights and buffers are off those of one process. Modes are kept.
    """
    twin, modes = deepcopy(model), [module.training for module in model.modules()]
    with Pipeline(model, loss, sgd, microbatches=microbatches, device="cpu", **options) as pipe:
        found = [*pipe.train(batches), pipe.evaluate(batches)["loss"]]
        assert [module.training for module in model.modules()] == modes
        between(model)
        found += pipe.train(batches)
        state = pipe.state_dict()
    optimizer, whole, once = sgd(twin.parameters()), of_pairs(loss, microbatches), of_pairs(loss)
    if isinstance(batches[0][0], tuple):

        def whole(model: nn.Module, given: Any) -> Tensor:
            return loss(model(*given[0]), given[1])

        once = whole
    wanted = plainly(twin, optimizer, whole, batches)
    wanted.append(sum(evaluated(twin, once, batches)) / len(batches))
    between(twin)
    wanted += plainly(twin, optimizer, whole, batches)
    other, differences = twin.state_dict(), [abs(a - b) for a, b in zip(found, wanted, strict=True)]
    return max(*differences, *(float((state[name] - other[name]).abs().max()) for name in state))
