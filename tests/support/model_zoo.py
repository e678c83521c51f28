"""Models of many forms with data for three updates, to be trained in two ways.

Hugging Face's are tiny and have random weights; `of`: the module transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest import SkipTest

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipetrain.model.specs import Value, as_tuple, on_each
from pipetrain.models import unet
from pipetrain.tasks import Classification, LanguageModelling, Segmentation, Task
from tests.support.parity import Subject, cut_batches

VOCABULARY = 50
TEXT = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "use_cache": False}
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
POSITIONS = {"max_position_embeddings": 16}
CONVOLUTIONS = {"hidden_sizes": [8, 16], "depths": [1, 2]}
SEGFORMER = {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16]}
SEGFORMER |= {"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}
SEGFORMER |= {"decoder_hidden_size": 16, "num_labels": 5, "drop_path_rate": 0.5}


def _tiny(family: str, head: str, sizes: dict[str, Any], of: Any, **options: Any) -> nn.Module:
    return getattr(of, family + head)(getattr(of, f"{family}Config")(**(sizes | options)))


GPT2 = TEXT | {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 16}
tiny_gpt2 = partial(_tiny, "GPT2", "LMHeadModel", GPT2)
tiny_llama = partial(_tiny, "Llama", "ForCausalLM", SMALL | TEXT | POSITIONS | {"num_key_value_heads": 1})
tiny_bert = partial(
    _tiny, "Bert", "ForSequenceClassification", SMALL | POSITIONS | {"vocab_size": VOCABULARY}
)
tiny_vit = partial(_tiny, "ViT", "ForImageClassification", SMALL | {"image_size": 16, "patch_size": 8})
RESNET = CONVOLUTIONS | {"embedding_size": 8, "num_labels": 5, "layer_type": "bottleneck"}
tiny_resnet = partial(_tiny, "ResNet", "ForImageClassification", RESNET)
CONVNEXT = CONVOLUTIONS | {"num_stages": 2, "num_labels": 5, "drop_path_rate": 0.5}
tiny_convnext = partial(_tiny, "ConvNext", "ForImageClassification", CONVNEXT)
tiny_segformer = partial(_tiny, "Segformer", "ForSemanticSegmentation", SEGFORMER)

SIZES = (7, 7, 6)  # samples of each batch; microbatches have some of unequal size
PADDED = -100
DOUBLE = torch.float64


def subject(
    model: nn.Module, inputs: Value, targets: Value, task: Task, factory: Any = None, whole: bool = False
) -> Subject:
    """Cut the data of a whole pass into batches."""
    batches = zip(*(cut_batches(value, SIZES) for value in (inputs, targets)), strict=True)
    return Subject(model.double(), [*batches], task, whole, factory)


def random(*shape: int) -> Tensor:
    return torch.randn(sum(SIZES), *shape, dtype=DOUBLE)


def numbers(below: int, *shape: int) -> Tensor:
    return torch.randint(below, (sum(SIZES), *shape))


# Layers in a row


def accuracy(outputs: Value, targets: Value) -> Tensor:
    assert isinstance(outputs, Tensor)
    return (outputs.argmax(1) == targets).double().mean()


def mlp() -> nn.Sequential:
    layers = [layer for _ in range(3) for layer in (nn.Linear(6, 6), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(6, 5)).to(DOUBLE)


def classified(model: nn.Module, whole: bool = False, factory: Any = None) -> Subject:
    task = Task(functional.cross_entropy, {"acc": accuracy})
    return subject(model, random(6), numbers(5), task, factory, whole)


def normed() -> nn.Sequential:
    layers = [layer for _ in range(2) for layer in (nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(6, 5))


class Attention(nn.Module):
    """A causal block of a transformer, of one head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def gpt() -> Subject:
    """Sequences of 7 tokens, of which 1 to 6 count, unevenly; in some none does."""
    blocks = (Attention(8) for _ in range(4))
    model = nn.Sequential(nn.Embedding(11, 8), *blocks, nn.LayerNorm(8), nn.Linear(8, 11))
    tokens = numbers(11, 8)
    x, y = tokens[:, :-1], tokens[:, 1:].clone()
    for row, targets in enumerate(y):
        targets[row * row % 8 :] = PADDED
    return subject(model, x, y, LanguageModelling(), whole=True)


LENGTHS = (7, 4, 7)  # of each batch


def of_lengths(make: Callable[[], Subject]) -> Subject:
    """Cut each batch of texts to a length of its own, or of images to a height and a width."""

    def cut(length: int, value: Value) -> Value:
        return on_each(value, lambda t: t[..., : 2 * length, : 16 - length] if t.dim() > 2 else t[:, :length])

    whole = make()
    pairs = zip(LENGTHS, whole.batches, strict=True)
    return replace(
        whole, batches=[(cut(n, x), cut(n, y) if as_tuple(y)[0].dim() > 1 else y) for n, (x, y) in pairs]
    )


class Mixing(nn.Module):
    """Takes two tensors and gives two."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(3, 3)

    def forward(self, both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        a, b = (torch.tanh(layer(x)) for layer, x in zip((self.a, self.b), both, strict=True))
        return a + both[1].sum(-1, keepdim=True), b * both[0].mean(-1, keepdim=True)


class Both(Task):
    """The mean over samples of the squared errors of two outputs, each sample with a weight of its own."""

    def loss(self, outputs: Value, targets: Value) -> Tensor:
        (a, b), (first, second, weight) = as_tuple(outputs), as_tuple(targets)
        errors = ((a - first) ** 2).sum(-1) + ((b - second) ** 2).sum(-1)
        return (errors * weight).sum() / weight.sum()

    def weight(self, targets: Value) -> Tensor | float:
        return as_tuple(targets)[2].sum()


def tuples() -> Subject:
    targets = random(4), random(3), random().abs() + 0.1
    model = nn.Sequential(*(Mixing() for _ in range(6)))
    return subject(model, (random(4), random(3)), targets, Both(), whole=True)


def u_net() -> Subject:
    """With Stash and Pop."""
    model = unet(num_classes=3, levels=3, convolutions=1, width=4)
    return subject(model, random(3, 8, 8), numbers(3, 8, 8), Segmentation())


# Factories: the weights are made on each rank for its stages


class Scaled(nn.Linear):
    """A layer with a constant buffer, that is initialised in a way of its own."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, inputs), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.orthogonal_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


def scaled() -> nn.Sequential:
    layers = [Scaled(6, 6), nn.BatchNorm1d(6), nn.Tanh(), Scaled(6, 6), nn.BatchNorm1d(6), nn.Tanh()]
    return nn.Sequential(*layers, Scaled(6, 5)).to(DOUBLE)


class Ways(nn.Module):
    """Traced: two ways, of which the second needs what entered the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 6))
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.second(self.first(x) * self.scale), x], dim=1))


def ways() -> nn.Module:
    return Ways().to(DOUBLE)


# Modules that are traced


def hugging(
    make: Callable[..., nn.Module], inputs: Value, targets: Tensor, task: Task, **more: Any
) -> Subject:
    if find_spec("transformers") is None:
        raise SkipTest("transformers is not installed")
    return subject(make(import_module("transformers"), **more), inputs, targets, task)


def text(make: Callable[..., nn.Module], **options: Any) -> Subject:
    """Tokens by keyword; some of the targets are padding."""
    ids, targets = numbers(VOCABULARY, 8), numbers(VOCABULARY, 8)
    targets[::2, 5:] = PADDED
    return hugging(make, {"input_ids": ids}, targets, LanguageModelling(), **options)


def bert(**options: Any) -> Subject:
    """A mask by keyword beside the tokens."""
    mask = (torch.arange(8) < 3 + numbers(6, 1)).long()
    given = {"attention_mask": mask, "input_ids": numbers(VOCABULARY, 8)}
    return hugging(tiny_bert, given, numbers(3), Classification(), num_labels=3, **options)


def images(make: Callable[..., nn.Module], **options: Any) -> Subject:
    pixels, labels = {"pixel_values": random(3, 16, 16)}, numbers(5)
    return hugging(make, pixels, labels, Classification(), num_labels=5, **options)


def segformer(**options: Any) -> Subject:
    given = {"pixel_values": random(3, 32, 32)}
    return hugging(tiny_segformer, given, numbers(5, 8, 8), Segmentation(), **options)


def transformer() -> Subject:
    model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
    return subject(model, (random(3, 8), random(4, 8)), random(4, 8), Task(functional.mse_loss))


class TwoInputs(nn.Module):
    """An image and some numbers, which are used in the last layers alone; frozen and shared weights."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
            for a in (3, 4, 4)
        )
        self.convolutions[2][0].weight = self.convolutions[1][0].weight
        self.embed = nn.Linear(6, 8)
        self.embed.bias.requires_grad_(False)
        self.head = nn.Linear(4 + 8, 5)

    def forward(self, image: Tensor, table: Tensor) -> Tensor:
        for layer in self.convolutions:
            image = layer(image)
        return self.head(torch.cat([image.mean((2, 3)), torch.tanh(self.embed(table))], 1))


def two_inputs() -> Subject:
    given = (random(3, 8, 8), random(6))
    return subject(TwoInputs(), given, numbers(5), Classification())


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
    return subject(Branches(dropout), random(8), numbers(5), Task(_of_dict))


class Encoder(nn.Module):
    """A recurrent layer, attention with its weights as a second output, and weights that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, batch_first=True)
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
    targets = random(4, 3), random(4, 4)
    return subject(Encoder(), random(4, 8), targets, Task(_of_tuple, weight=lambda y: len(y[0])))


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout_prob": 0.0}
NO_PDROP = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
SUBJECTS: dict[str, Callable[[], Subject]] = {
    "gpt2": partial(text, tiny_gpt2, **NO_PDROP),
    "gpt2 untied, with dropout": partial(text, tiny_gpt2, n_layer=1, tie_word_embeddings=False),
    "llama": partial(text, tiny_llama, num_hidden_layers=1, num_key_value_heads=1, tie_word_embeddings=True),
    "bert": partial(bert, **NO_DROPOUT),
    "vit": partial(images, tiny_vit, num_hidden_layers=1),
    "resnet": partial(images, tiny_resnet, depths=[1, 1], embedding_size=4),
    "convnext": partial(images, tiny_convnext, depths=[1, 1], drop_path_rate=0.0),
    "segformer": partial(segformer, drop_path_rate=0.0, **NO_DROPOUT),
    "transformer": transformer,
    "two inputs": two_inputs,
    "branches": branches,
    "branches with dropout": partial(branches, 0.3),
    "encoder": encoder,
    "unet": u_net,
    "bert, lengths": partial(of_lengths, partial(bert, **NO_DROPOUT)),
    "resnet, lengths": partial(of_lengths, partial(images, tiny_resnet, depths=[1, 1], embedding_size=4)),
    "mlp": lambda: classified(mlp(), whole=True),
    "normed": lambda: classified(normed()),
    "gpt": gpt,
    "gpt, lengths": partial(of_lengths, gpt),
    "tuples": tuples,
    "factory": lambda: classified(scaled(), factory=scaled),
    "traced factory": lambda: classified(ways(), factory=ways),
}


def make(name: str) -> Subject:
    """Make a subject, the same every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return SUBJECTS[name]()
