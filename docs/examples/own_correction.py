"""A correction of your own: an update whose gradient is late is made at a lower rate than one on time."""

import torch
from torch import nn

import pipetrain
from pipetrain.correction import Correction


class Slower(Correction):
    """The rate of an update whose gradient is `delay` updates late is divided by 1 + delay."""

    name = "slower"
    rates = True  # which of the questions it answers

    def rate(self, update, delay):
        return 1 / (1 + delay)


torch.manual_seed(0)
inputs = torch.randn(512, 20)
targets = inputs[:, :5].argmax(1)
batches = list(zip(inputs.split(32), targets.split(32), strict=True))
for correction in ("none", Slower()):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
    loss, sgd = nn.functional.cross_entropy, lambda p: torch.optim.SGD(p, 0.3)
    with pipetrain.Pipeline(model, loss, sgd, schedule="pipedream", correction=correction) as pipe:
        first, *_, last = pipe.train(batches)
    if pipe.rank == 0:
        print(f"{correction}: {first:.3f} to {last:.3f}")
