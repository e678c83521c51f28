"""A task of your own: a loss in which some targets do not count, and a metric."""

import torch
from torch import nn
from torch.nn import functional

import pipetrain

MISSING = -1.0  # a number that was not measured


class Close(pipetrain.Metric):
    """The share of numbers that are right to 0.1."""

    name, title, higher, percent = "close", "close_to_0.1", True, True

    def sums(self, outputs, targets):  # of a microbatch; they add up
        counts = targets != MISSING
        return torch.stack([(((outputs - targets).abs() < 0.1) & counts).sum(), counts.sum()])

    def value(self, sums, loss):
        return sums[0] / sums[1]


class SomeMissing(pipetrain.Task):
    def __init__(self):
        super().__init__(metrics=[Close()])

    def loss(self, outputs, targets):  # the mean over what counts
        counts = targets != MISSING
        return functional.mse_loss(outputs[counts], targets[counts])

    def weight(self, targets):  # how much the targets of a microbatch count for
        return (targets != MISSING).sum()


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))
inputs = torch.rand(256, 8)
targets = torch.stack([inputs.mean(1), inputs.amax(1)], 1)
targets[torch.rand(targets.shape) < 0.3] = MISSING
batches = list(zip(inputs.split(64), targets.split(64), strict=True))

pipe = pipetrain.Pipeline(model, SomeMissing(), lambda p: torch.optim.Adam(p, 1e-2))
for epoch in range(10):
    for loss in pipe.train(batches):
        pass
if pipe.rank == 0:
    print(f"loss {pipe.metrics['loss']:.4f}, close {pipe.metrics['close']:.1%}")
