"""GPT-2 as layers between which it can be cut: the embedding, the blocks, the final norm and the head.

Source: Radford et al., "Language models are unsupervised multitask learners", 2019, and its published code
(github.com/openai/gpt-2): norms before each branch, GELU with tanh, and biases everywhere but in the head.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipetrain.errors import ConfigError
from pipetrain.rules import COUNT


def gpt(
    depth: int = 12,
    heads: int = 12,
    width: int = 768,
    sequence: int = 1024,
    vocabulary: int = 50257,
    dropout: float = 0.0,
    tied: bool = False,
) -> nn.Sequential:
    """GPT: tokens, int64 (n, t), to logits (n, t, vocabulary), in depth + 3 layers; t is at most `sequence`.

    The defaults are GPT-2 small (124,439,808 parameters if `tied`). The published sizes as (depth, heads,
    width): medium 24, 16, 1024; large 36, 20, 1280; xl 48, 25, 1600. `dropout`: fraction of activations, of
    the embedding and of each branch, set to zero (GPT-2 trained with 0.1). `tied`: the head uses the
    embedding's parameter, so that both must be in one stage. Raises ConfigError.
    """
    sizes = {"depth": depth, "heads": heads, "width": width, "sequence": sequence, "vocabulary": vocabulary}
    for name, size in sizes.items():
        COUNT.read(f"model.{name}", size)
    if width % heads:
        raise ConfigError(
            f"model.width={width} must be a multiple of model.heads={heads}: change one of them"
        )
    if not 0 <= dropout < 1:
        raise ConfigError(f"model.dropout must be a fraction, at least 0 and less than 1; got {dropout}")
    embedding = Embedding(vocabulary, sequence, width, dropout)
    blocks = {f"block{index}": Block(width, heads, dropout) for index in range(1, depth + 1)}
    head = nn.Linear(width, vocabulary, bias=False)
    layers = OrderedDict(embedding=embedding, **blocks, norm=nn.LayerNorm(width), head=head)
    model = nn.Sequential(layers)
    _initialise(model, depth)
    if tied:
        head.weight = embedding.tokens.weight
    return model


class Embedding(nn.Module):
    """The sum of the embeddings of tokens and positions: int64 (n, t) to (n, t, width)."""

    def __init__(self, vocabulary: int, sequence: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(sequence, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        length, sequence = tokens.shape[1], self.positions.num_embeddings
        if length > sequence:
            raise ValueError(f"{length} tokens are more than the model's sequence of {sequence}")
        positions = torch.arange(length, device=tokens.device)
        out: Tensor = self.dropout(self.tokens(tokens) + self.positions(positions))
        return out


class Block(nn.Module):
    """Causal attention and a perceptron, each added to its input: (n, t, width) to (n, t, width)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        hidden = functional.gelu(self.expand(self.norm2(x)), approximate="tanh")
        out: Tensor = x + self.dropout(self.contract(hidden))
        return out


class Attention(nn.Module):
    """Self-attention of several heads, in which a token sees itself and those before it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.project = nn.Linear(width, 3 * width)  # queries, keys and values
        self.contract = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        split = self.project(x).unflatten(-1, (3, self.heads, -1))  # (n, t, 3, heads, width / heads)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        seen = functional.scaled_dot_product_attention(
            queries, keys, values, dropout_p=dropout, is_causal=True
        )
        out: Tensor = self.contract(seen.transpose(1, 2).flatten(2))
        return out


def _initialise(model: nn.Sequential, depth: int) -> None:
    """Draw the weights in the order of the layers, smaller where a branch is added to its input."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            scale = math.sqrt(2 * depth) if name.endswith("contract") else 1
            nn.init.normal_(module.weight, std=0.02 / scale)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
