import torch
from torch import nn

import pipetrain

torch.manual_seed(0)
inputs = torch.randn(256, 20).double()
targets = inputs[:, :5].argmax(1)
layers = nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)
model = nn.Sequential(*layers).double()

pipe = pipetrain.Pipeline(
    model,
    nn.functional.cross_entropy,
    lambda p: torch.optim.AdamW(p, 3e-3),
    schedule="gpipe",
    microbatches=4,
    partition=[2],
)
for x, y in zip(inputs.split(64), targets.split(64), strict=True):
    loss = pipe.step(x, y)
    if pipe.rank == 0:
        print(loss)
