"""A model that no process holds whole: each rank makes the weights of its own stages."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import pipetrain

torch.manual_seed(0)
inputs = torch.randn(256, 64)
targets = inputs[:, :5].argmax(1)
batches = list(zip(inputs.split(64), targets.split(64), strict=True))


def large():
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(64, 5))


pipe = pipetrain.Pipeline(large, cross_entropy, lambda p: torch.optim.AdamW(p, 3e-3), seed=1)
for loss in pipe.train(batches):
    if pipe.rank == 0:
        print(f"{loss:.4f}")
weights = pipe.state_dict()
pipe.close()

if pipe.rank == 0:
    torch.save(weights, "weights.pt")
pipe = pipetrain.Pipeline(large, cross_entropy, lambda p: torch.optim.AdamW(p, 3e-3), weights="weights.pt")
again = pipe.evaluate(batches)["loss"]
if pipe.rank == 0:
    print(f"from the file {again:.4f}")
