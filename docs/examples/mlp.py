import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pipetrain

inputs = torch.randn(640, 20)
data = TensorDataset(inputs, inputs[:, :5].argmax(1))
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
pipe = pipetrain.Pipeline(model, nn.functional.cross_entropy, lambda p: torch.optim.AdamW(p, 3e-3))
for epoch in range(3):
    for loss in pipe.train(DataLoader(data, batch_size=64, shuffle=True)):
        pass  # the loss of each update
    test = pipe.evaluate(DataLoader(data, batch_size=64))
    if pipe.rank == 0:
        print(f"epoch {epoch}: last update {loss:.3f}, all samples {test['loss']:.3f}")
