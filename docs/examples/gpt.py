"""A GPT of your own layers, which learns to predict the next character of a text."""

import torch
from torch import nn
from torch.nn import functional

import pipetrain

WIDTH, HEADS, LENGTH = 32, 4, 32


class Embedding(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens):  # int64 [n, t] -> [n, t, width]
        return self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):  # [n, t, width] -> [n, t, width]
        n, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).reshape(n, t, WIDTH))
        return x + self.mlp(self.norm2(x))


text = "The quick brown fox jumps over the lazy dog. " * 60
letters = sorted(set(text))
tokens = torch.tensor([letters.index(letter) for letter in text])
blocks = tokens.unfold(0, LENGTH + 1, 8)  # [blocks, t + 1]: the targets are the inputs, one place on
batches = [(block[:, :-1], block[:, 1:]) for block in blocks.split(64)]

torch.manual_seed(0)
layers = [Embedding(len(letters)), Block(), Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(letters))]
pipe = pipetrain.Pipeline(
    nn.Sequential(*layers),
    pipetrain.LanguageModelling(),
    lambda p: torch.optim.AdamW(p, 1e-2),
    microbatches=4,
    param_groups={"norms_and_biases": {"weight_decay": 0}},
)
for epoch in range(4):
    for loss in pipe.train(batches):
        pass
    if pipe.rank == 0:
        print(f"epoch {epoch}: perplexity {pipe.metrics['ppl']:.2f}")
