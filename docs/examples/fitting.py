"""Epochs with records and checkpoints. Started again, after a stop too, it goes on where it ended."""

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

pipe = pipetrain.Pipeline(model, cross_entropy, lambda p: torch.optim.AdamW(p, 1e-2))
rows = pipetrain.fit(pipe, train, test, epochs=3, run_dir="runs/fitting", resume="auto")
if pipe.rank == 0:
    print(f"epoch {rows[-1]['epoch']}: all test samples {rows[-1]['val_loss']:.4f}")
