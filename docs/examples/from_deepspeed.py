import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pipetrain

layers = nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)
net = nn.Sequential(*layers)
inputs = torch.randn(640, 20)
targets = inputs[:, :5].argmax(1)
train_set = TensorDataset(inputs, targets)

pipe = pipetrain.Pipeline(
    net,
    nn.CrossEntropyLoss(),
    lambda p: torch.optim.AdamW(p, lr=1e-3),
    microbatches=4,
    partition="params",
)
loader = DataLoader(train_set, batch_size=64, shuffle=True)
for loss in pipe.train(loader):
    if pipe.rank == 0:
        print(loss)
pipe.save("runs/from_deepspeed")
