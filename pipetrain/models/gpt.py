"""GPT-2 as layers between which it can be cut: the embedding, the blocks, the final norm and the head.

Source: Radford et al., "Language models are unsupervised multitask learners", 2019, and its published code
(github.com/openai/gpt-2): norms before each branch, GELU with tanh, and biases everywhere but in the head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipetrain.errors import ConfigError
from pipetrain.models.layers import NormalEmbedding, NormalLinear, stack
from pipetrain.rules import COUNT

STD = 0.02  # of the weights; that of those added to a stream of 2 depth such is smaller


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
        COUNT.read(name, size)
    if width % heads:
        raise ConfigError(
            f"model.width={width} must be a multiple of model.heads={heads}: change one of them"
        )
    if not 0 <= dropout < 1:
        raise ConfigError(f"model.dropout must be a fraction, at least 0 and less than 1; got {dropout}")
    embedding = Embedding(vocabulary, sequence, width, dropout)
    blocks = {
        f"block{index}": TransformerBlock(width, heads, dropout, depth) for index in range(1, depth + 1)
    }
    head = NormalLinear(width, vocabulary, std=STD, bias=False)
    model = stack(embedding=embedding, **blocks, norm=nn.LayerNorm(width), head=head)
    if tied:
        head.weight = embedding.tokens.weight
    return model


class Embedding(nn.Module):
    """The sum of the embeddings of tokens and positions: int64 (n, t) to (n, t, width)."""

    def __init__(self, vocabulary: int, sequence: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = NormalEmbedding(vocabulary, width, std=STD)
        self.positions = NormalEmbedding(sequence, width, std=STD)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        length, sequence = tokens.shape[1], self.positions.num_embeddings
        if length > sequence:
            raise ValueError(f"{length} tokens are more than the model's sequence of {sequence}")
        positions = torch.arange(length, device=tokens.device)
        out: Tensor = self.dropout(self.tokens(tokens) + self.positions(positions))
        return out


class TransformerBlock(nn.Module):
    """Causal attention and a perceptron, each added to its input: (n, t, width) to (n, t, width).

    `depth`: of the model.
    """

    def __init__(self, width: int, heads: int, dropout: float, depth: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout, depth)
        self.norm2 = nn.LayerNorm(width)
        self.expand = NormalLinear(width, 4 * width, std=STD)
        self.contract = NormalLinear(4 * width, width, std=STD / math.sqrt(2 * depth))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        hidden = functional.gelu(self.expand(self.norm2(x)), approximate="tanh")
        out: Tensor = x + self.dropout(self.contract(hidden))
        return out


class Attention(nn.Module):
    """Self-attention of several heads, in which a token sees itself and those before it."""

    def __init__(self, width: int, heads: int, dropout: float, depth: int) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.project = NormalLinear(width, 3 * width, std=STD)  # queries, keys and values
        self.contract = NormalLinear(width, width, std=STD / math.sqrt(2 * depth))

    def forward(self, x: Tensor) -> Tensor:
        split = self.project(x).unflatten(-1, (3, self.heads, -1))  # (n, t, 3, heads, width / heads)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        seen = functional.scaled_dot_product_attention(
            queries, keys, values, dropout_p=dropout, is_causal=True
        )
        out: Tensor = self.contract(seen.transpose(1, 2).flatten(2))
        return out
