"""A training that is saved. The second start of this program continues where the first one ended."""

from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import pipetrain

folder = Path("runs/saving")  # all ranks share it
torch.manual_seed(0)
inputs = torch.randn(256, 20)
targets = inputs[:, :5].argmax(1)
batches = list(zip(inputs.split(64), targets.split(64), strict=True))
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))

pipe = pipetrain.Pipeline(model, cross_entropy, lambda p: torch.optim.AdamW(p, 1e-2), sample=batches[0])
if folder.exists():
    pipe.load(folder)  # the newest checkpoint: weights, optimizer, number of updates
for loss in pipe.train(batches):
    pass
pipe.save(folder)

weights = pipe.state_dict()  # every rank calls it; rank 0 gets the whole model's
predicted = pipe.evaluate(batches)["loss"]
if pipe.rank == 0:
    plain = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
    plain.load_state_dict(weights)
    loss = cross_entropy(plain(inputs), targets)
    print(f"after {pipe.updates} updates {predicted:.4f}; in plain PyTorch {loss:.4f}")
