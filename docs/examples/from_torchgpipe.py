import torch
from torch import nn
from torch.nn.functional import cross_entropy

import pipetrain

layers = nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)
model = nn.Sequential(*layers)
inputs = torch.randn(256, 20)
targets = inputs[:, :5].argmax(1)
loader = zip(inputs.split(64), targets.split(64), strict=True)

pipe = pipetrain.Pipeline(
    model,
    cross_entropy,
    lambda p: torch.optim.SGD(p, lr=0.1),
    schedule="gpipe",
    microbatches=4,
    partition=[2],
)
for loss in pipe.train(loader):
    if pipe.rank == 0:
        print(loss)
state = pipe.state_dict()
