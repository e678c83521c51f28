"""The outputs of a model for new data, from the stages that have it."""

import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipetrain

torch.manual_seed(0)
inputs = torch.randn(256, 4)
batches = [(x, x.sum(1, keepdim=True)) for x in inputs.split(32)]
model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

pipe = pipetrain.Pipeline(model, mse_loss, lambda p: torch.optim.AdamW(p, 2e-2))
for _ in range(15):
    for _loss in pipe.train(batches):
        pass
new = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.5, -0.5, 0.0, 0.0]])
for outputs in pipe.predict([new]):  # every rank calls it; rank 0 gets the outputs, the others None
    if pipe.rank == 0:
        print(f"4 and 0 are {outputs[0].item():.2f} and {outputs[1].item():.2f}")
