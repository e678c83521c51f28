"""A schedule of your own, as a function or as the file of a program, and what its plan says."""

import sys

import torch
from torch import nn

import pipetrain
from pipetrain import Action, Op


def by_twos(ranks, batches, microbatches):
    """Two forwards, then their backwards, and so on; a stage holds two microbatches at most."""

    def batch(stage, n):
        first, last = n * microbatches, (n + 1) * microbatches
        pairs = [range(mb, min(mb + 2, last)) for mb in range(first, last, 2)]
        work = [Action(stage, op, mb, version=n) for pair in pairs for op in (Op.F, Op.B) for mb in pair]
        return [*work, Action(stage, Op.STEP, version=n + 1)]

    return [[action for n in range(batches) for action in batch(stage, n)] for stage in range(ranks)]


torch.manual_seed(0)
inputs = torch.randn(64, 20)
batch = inputs, inputs[:, :5].argmax(1)
pipe = pipetrain.Pipeline(
    nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)),
    nn.functional.cross_entropy,
    lambda p: torch.optim.SGD(p, 0.1),
    schedule=sys.argv[1] if len(sys.argv) > 1 else by_twos,
    microbatches=4,
    sample=batch,
)
if pipe.rank == 0:
    print(pipe.plan)  # proven, before anything is trained
losses = [pipe.step(*batch) for _ in range(2)]
if pipe.rank == 0:
    print(*losses)
