"""A training that saves and ends at a signal, and continues when this program is started again."""

from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import pipetrain

folder = Path("runs/stopping")  # all ranks share it
torch.manual_seed(0)
inputs = torch.randn(256, 20)
loader = DataLoader(TensorDataset(inputs, inputs[:, :5].argmax(1)), batch_size=64, shuffle=True)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))

pipe = pipetrain.Pipeline(
    model, cross_entropy, lambda p: torch.optim.AdamW(p, 1e-2), sample=next(iter(loader))
)
if folder.exists():
    pipe.load(folder)
while pipe.updates < 40 and not pipe.stopping:  # after SIGTERM or Ctrl-C it is true, on all ranks
    for loss in pipe.train(loader):
        if pipe.stopping:
            break
    pipe.save(folder, keep=2)
if pipe.rank == 0:
    print(f"saved after {pipe.updates} updates")
