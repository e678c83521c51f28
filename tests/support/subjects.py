"""Models of many forms with data for three updates and a loss by torch alone, to be trained in two ways."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest import SkipTest

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipetrain.models import unet
from pipetrain.tasks import Classification, LanguageModelling, Segmentation, Task
from tests.support import hugging_face
from tests.support.hugging_face import VOCABULARY
from tests.support.parity import SAMPLES, Subject, Weight

N = sum(SAMPLES)
PADDED = -100


def cross_entropy(outputs: Any, labels: Tensor) -> Tensor:
    """The mean over labels that count; classes are along dimension 1, or the last one of tokens [n, t]."""
    scores = outputs["logits"] if isinstance(outputs, dict) else outputs
    return functional.cross_entropy(scores.movedim(-1, 1) if scores.dim() == 3 else scores, labels)


def counting(labels: Tensor) -> float:
    return float((labels != PADDED).sum())


def random(*shape: int) -> Tensor:
    return torch.randn(N, *shape, dtype=torch.float64)


def numbers(below: int, *shape: int) -> Tensor:
    return torch.randint(below, (N, *shape))


def text(make: Callable[..., nn.Module], **options: Any) -> Subject:
    """Tokens by keyword; some of the targets are padding."""
    ids, targets = numbers(VOCABULARY, 8), numbers(VOCABULARY, 8)
    targets[::2, 5:] = PADDED
    return hugging(make, {"input_ids": ids}, targets, LanguageModelling(), counting, **options)


def bert(**options: Any) -> Subject:
    """A mask by keyword beside the tokens."""
    mask = (torch.arange(8) < 3 + numbers(6, 1)).long()
    given = {"attention_mask": mask, "input_ids": numbers(VOCABULARY, 8)}
    return hugging(hugging_face.bert, given, numbers(3), Classification(), num_labels=3, **options)


def images(make: Callable[..., nn.Module], size: int, **options: Any) -> Subject:
    given = {"pixel_values": random(3, size, size)}
    return hugging(make, given, numbers(5), Classification(), num_labels=5, **options)


def segformer(**options: Any) -> Subject:
    given = {"pixel_values": random(3, 32, 32)}
    return hugging(hugging_face.segformer, given, numbers(5, 8, 8), Segmentation(), counting, **options)


def hugging(
    make: Callable[..., nn.Module],
    inputs: dict[str, Tensor],
    targets: Tensor,
    task: Task,
    weight: Weight = len,
    **options: Any,
) -> Subject:
    if find_spec("transformers") is None:
        raise SkipTest("transformers is not installed")
    model = make(import_module("transformers"), **options)
    return Subject.of(model, inputs, targets, task, cross_entropy, weight)


def transformer() -> Subject:
    model = nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True)
    loss = functional.mse_loss
    return Subject.of(model, (random(3, 8), random(4, 8)), random(4, 8), Task(loss), loss)


class TwoInputs(nn.Module):
    """An image and some numbers, which are used in the last layers alone; frozen weights, BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
            for a in (3, 4, 4)
        )
        self.embed = nn.Linear(6, 8)
        self.embed.bias.requires_grad_(False)
        self.head = nn.Linear(4 + 8, 5)

    def forward(self, image: Tensor, table: Tensor) -> Tensor:
        for layer in self.convolutions:
            image = layer(image)
        return self.head(torch.cat([image.mean((2, 3)), torch.tanh(self.embed(table))], 1))


def two_inputs() -> Subject:
    given = (random(3, 8, 8), random(6))
    return Subject.of(TwoInputs(), given, numbers(5), Classification(), cross_entropy)


class Branches(nn.Module):
    """Branches, a value that several later layers use, BatchNorm, and a dict with what is no tensor."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 16)
        self.left = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.drop = nn.Dropout(dropout)
        self.right = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = torch.tanh(self.trunk(x))
        left = h
        for layer in self.left:
            left = self.drop(torch.tanh(layer(left))) + h
        right = self.norm(self.right(h))
        return {"y": self.head(torch.cat([left, right], 1)), "extra": {"h": h, "none": None}, "k": 3}


def _of_dict(outputs: dict[str, Any], labels: Tensor) -> Tensor:
    assert outputs["k"] == 3
    assert outputs["extra"]["none"] is None
    return functional.cross_entropy(outputs["y"], labels) + 0.1 * outputs["extra"]["h"].square().mean()


def branches(dropout: float = 0.0) -> Subject:
    return Subject.of(Branches(dropout), random(8), numbers(5), Task(_of_dict), _of_dict)


class Encoder(nn.Module):
    """Recurrent layers, attention with its weights as a second output, and weights that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, 2, batch_first=True)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.dense = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, _ = self.lstm(x)
        z, weights = self.attention(y, y, y, need_weights=True)
        return self.head(torch.tanh(self.dense(y + z))), weights


def _of_tuple(outputs: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor]) -> Tensor:
    return sum(map(functional.mse_loss, outputs, targets))


def encoder() -> Subject:
    return Subject.of(
        Encoder(), random(4, 8), (random(4, 3), random(4, 4)), Task(_of_tuple), _of_tuple, lambda y: len(y[0])
    )


def u_net() -> Subject:
    """An nn.Sequential, with Stash and Pop."""
    model = unet(num_classes=3, levels=3, convolutions=1, width=4)
    return Subject.of(model, random(3, 8, 8), numbers(3, 8, 8), Segmentation(), cross_entropy, counting)


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout_prob": 0.0}
NO_PDROP = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
RESNET50 = {"hidden_sizes": [8, 8, 16, 16], "depths": [3, 4, 6, 3], "embedding_size": 4}
SUBJECTS: dict[str, Callable[[], Subject]] = {
    "gpt2": partial(text, hugging_face.gpt2, **NO_PDROP),
    "gpt2 untied, with dropout": partial(text, hugging_face.gpt2, tie_word_embeddings=False),
    "llama": partial(text, hugging_face.llama, num_key_value_heads=1),
    "llama tied": partial(text, hugging_face.llama, num_key_value_heads=1, tie_word_embeddings=True),
    "bert": partial(bert, **NO_DROPOUT),
    "vit": partial(images, hugging_face.vit, 16),
    "resnet50": partial(images, hugging_face.resnet, 32, **RESNET50),
    "convnext": partial(images, hugging_face.convnext, 32, drop_path_rate=0.0),
    "segformer": partial(segformer, drop_path_rate=0.0, **NO_DROPOUT),
    "transformer": transformer,
    "two inputs": two_inputs,
    "branches": branches,
    "branches with dropout": partial(branches, 0.3),
    "encoder": encoder,
    "unet": u_net,
}
"""Each makes its model and traces it, which takes up to seconds."""


def make(name: str) -> Subject:
    """Make a subject, the same every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return SUBJECTS[name]()
