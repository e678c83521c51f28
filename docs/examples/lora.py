"""Fine-tuning by LoRA across stages: the weights stay as they are, small adapters learn on every stage."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import pipetrain


class LoRA(nn.Module):
    """A frozen linear layer, to which the product of two small matrices is added, at first 0."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


def with_adapters(model):
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, LoRA(child))
    return model


inputs = torch.randn(512, 20, generator=torch.Generator().manual_seed(0))
old, new = inputs[:, :5].argmax(1), inputs[:, :5].argmin(1)
batches = list(zip(inputs.split(64), new.split(64), strict=True))


def pretrained():  # in place of your model with its weights
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(30):
        cross_entropy(model(inputs), old).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


pipe = pipetrain.Pipeline(with_adapters(pretrained()), cross_entropy, lambda p: torch.optim.AdamW(p, 2e-2))
for epoch in range(6):
    for loss in pipe.train(batches):
        pass
    if pipe.rank == 0 and epoch in (0, 5):
        print(f"epoch {epoch}: {pipe.metrics['loss']:.4f}")
loss = pipe.evaluate(batches)["loss"]
weights = pipe.state_dict()  # every rank calls it; rank 0 gets the whole model's
if pipe.rank == 0:
    adapters = {name: w for name, w in weights.items() if name.endswith((".down", ".up"))}
    torch.save(adapters, "adapters.pt")
    plain = with_adapters(pretrained())  # without pipetrain
    plain.load_state_dict(torch.load("adapters.pt"), strict=False)
    print(f"all samples {loss:.4f}; in plain PyTorch {cross_entropy(plain(inputs), new):.4f}")
