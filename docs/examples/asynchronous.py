"""PipeDream: a step after every batch, without draining the pipeline; gradients are late by some updates."""

import torch
from torch import nn

import pipetrain

torch.manual_seed(0)
inputs = torch.randn(512, 20)
targets = inputs[:, :5].argmax(1)
batches = list(zip(inputs.split(32), targets.split(32), strict=True))
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
pipe = pipetrain.Pipeline(
    model,
    nn.functional.cross_entropy,
    lambda p: torch.optim.SGD(p, 0.1),
    schedule="pipedream",
    lr_schedule=lambda update: min(1.0, (update + 1) / 8),  # a late gradient wants a low rate at first
    sample=batches[0],  # so that the plan is there before the first pass
)
if pipe.rank == 0:
    print(f"staleness of stage 0: {pipe.plan.window.bounds[0].staleness} update")
for _ in pipe.train(batches):  # a whole pass is one window: the pipeline drains at its end
    pass
losses = pipe.train(batches, window=4)  # drains after every 4 batches, and then yields their losses
for number, loss in enumerate(losses):
    if pipe.rank == 0 and number % 4 == 3:
        print(f"update {pipe.updates}: {loss:.3f}")
