"""A model of Hugging Face trained from Python by some ranks, saved, and trained on by others; and by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipetrain import Pipeline
from pipetrain.tasks import LanguageModelling
from tests.support import hugging_face
from tests.support.hugging_face import VOCABULARY
from tests.support.plain import evaluated, plainly

UPDATES, SAVED, SAMPLES = 3, 2, 7


@dataclass(frozen=True)
class Ended:
    """What a rank knows at the end; the state on rank 0."""

    losses: list[float]
    evaluated: dict[str, float]
    state: dict[str, Any]  # arrays, which go from process to process


def model() -> nn.Module:
    """Llama with one weight for the embedding and the head, and with tables that all blocks use."""
    import transformers

    torch.manual_seed(4)
    return hugging_face.llama(transformers, tie_word_embeddings=True).double()


def batches() -> list[tuple[dict[str, Tensor], Tensor]]:
    """Tokens with a mask, by keyword; what is masked is no target."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for _ in range(UPDATES):
        tokens = torch.randint(VOCABULARY, (SAMPLES, 9), generator=generator)
        mask = (torch.arange(8) < torch.randint(3, 9, (SAMPLES, 1), generator=generator)).long()
        inputs = {"attention_mask": mask, "input_ids": tokens[:, :-1]}
        made.append((inputs, tokens[:, 1:].masked_fill(mask == 0, -100)))
    return made


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def pipeline(schedule: str) -> Pipeline:
    return Pipeline(
        model(), LanguageModelling(), sgd, schedule, microbatches=3, device="cpu", threads=1, partition="even"
    )


def arrays(state: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in state.items()}


def trained(pipe: Pipeline, some: list[Any]) -> Ended:
    losses = [pipe.step(*batch) for batch in some]
    return Ended(losses, pipe.evaluate(batches()), arrays(pipe.state_dict()))


def begun(folder: str) -> Ended:
    """Train all batches, and save on the way."""
    pipe = pipeline("1f1b")
    first = [pipe.step(*batch) for batch in batches()[:SAVED]]
    pipe.save(folder)
    ended = trained(pipe, batches()[SAVED:])
    return Ended([*first, *ended.losses], ended.evaluated, ended.state)


def gone_on(folder: str) -> Ended:
    """Train the rest with other ranks and another schedule."""
    with pipeline("gpipe") as pipe:
        pipe.load(folder)
        return trained(pipe, batches()[SAVED:])


def plain() -> tuple[nn.Module, Ended]:
    """Train in one process as transformers' users do."""
    one = model()

    def loss_of(one: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        return functional.cross_entropy(one(**inputs).logits.flatten(0, 1), targets.flatten())

    losses = plainly(one, sgd(one.parameters()), loss_of, batches())
    names = ("attention_mask", "input_ids")
    inputs = {name: torch.cat([given[name] for given, _ in batches()]) for name in names}
    (loss,) = evaluated(one, loss_of, [(inputs, torch.cat([targets for _, targets in batches()]))])
    return one, Ended(losses, {"loss": loss}, arrays(one.state_dict()))
