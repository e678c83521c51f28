"""torchgpipe's ResNet-101: its 370 layers, which compute what a ResNet's blocks do, and train."""

from __future__ import annotations

import torch
from torch import nn

from pipetrain.models import resnet18, resnet50
from published.experiments.torchgpipe_resnet101 import flat_resnet101, flattened
from tests.support.cases import Case, compare
from tests.support.thread_ranks import run_in_threads


def narrow_and_flat() -> nn.Sequential:
    return flattened(resnet18(width=4))


def test_flat_resnet101_has_the_370_layers_of_torchgpipe_and_its_parameters():
    """Its published cuts are ours: 140 and 135 of two stages lie in the twelfth and thirteenth block."""
    with torch.device("meta"):
        model = flat_resnet101(1000)
    assert (len(model), sum(p.numel() for p in model.parameters())) == (370, 44_549_160)
    names = list(model._modules)
    assert [names[cut - 1] for cut in (4, 15, 135, 140)] == [
        "stem_pool",
        "layer1_0_relu",
        "layer3_4_sum",
        "layer3_5_relu1",
    ]


@torch.no_grad()
def test_a_flat_resnet_computes_what_its_blocks_do():
    whole = resnet50(width=4).double()
    flat = flattened(resnet50(width=4)).double()
    for parameter, other in zip(whole.parameters(), flat.parameters(), strict=True):
        other.copy_(parameter)
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    assert torch.equal(flat(x), whole(x))


def test_stages_train_a_flat_resnet_as_one_process_does():
    """Cut between the sum and the ReLU of a block with a projection, and within the next one."""
    words = (f"model._target_={__name__}.narrow_and_flat", "partition=[18,23]", "microbatches=2", "epochs=1")
    case = Case("1f1b", 3, words)
    compare(case, *run_in_threads(case))
