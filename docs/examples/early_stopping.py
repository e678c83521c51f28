"""A training that ends when three epochs in a row were no better than the best."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import pipetrain

torch.manual_seed(0)
inputs = torch.randn(640, 20)
targets = inputs[:, :5].argmax(1)
train = DataLoader(TensorDataset(inputs[:512], targets[:512]), batch_size=64, shuffle=True)
test = DataLoader(TensorDataset(inputs[512:], targets[512:]), batch_size=64)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
losses = []


def stop_early(row):  # after each epoch, on all ranks
    losses.append(row["val_loss"])
    return "stop" if min(losses) < min(losses[-3:]) else None


pipe = pipetrain.Pipeline(model, cross_entropy, lambda p: torch.optim.AdamW(p, 1e-2))
rows = pipetrain.fit(pipe, train, test, epochs=100, run_dir="runs/early", after_epoch=stop_early)
if pipe.rank == 0:
    print(f"best epoch {losses.index(min(losses)) + 1} of {len(rows)}")
