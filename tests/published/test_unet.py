"""torchgpipe's U-Net: its published size and layers, that it mixes no samples, and that it trains."""

from __future__ import annotations

import torch
from torch import nn

from pipetrain.config.build import build
from published.experiments.torchgpipe_unet import MASKS, unet_instancenorm
from tests.support.cases import Case, compare, options_of
from tests.support.thread_ranks import run_in_threads


def normed() -> nn.Sequential:
    scores = unet_instancenorm(num_classes=10, depth=2, convolutions=2, width=4)
    return nn.Sequential(*scores, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def test_torchgpipe_s_u_net_has_its_241_layers_and_parameters():
    with torch.device("meta"):
        model = unet_instancenorm()
        assert model(torch.empty(2, 3, 192, 192)).shape == (2, 1, 192, 192)
        raced = build(options_of([*MASKS, "data=shapes"]), "model")
    assert (len(model), sum(p.numel() for p in model.parameters())) == (241, 232_687_328)
    assert sum(p.numel() for p in raced.parameters()) == 232_687_328
    names = list(model._modules)
    assert [names[cut - 1]  for cut in (16, 43, 104, 197, 224)] == [
        "down1_relu4", "down2_skip", "down5_relu4", "up2_grow", "up1_relu1",
    ]  # fmt: skip


def test_samples_of_a_u_net_with_instancenorm_do_not_depend_on_each_other():
    model = unet_instancenorm(depth=2, convolutions=2, width=4).double().eval()
    x = torch.rand(3, 3, 8, 12, dtype=torch.float64)
    torch.testing.assert_close(model(x)[1:], model(x[1:]))


def test_stages_train_a_u_net_with_instancenorm_as_one_process_does():
    """The skip of level 1 goes past the stage between; each stage drops channels."""
    words = (
        f"model._target_={__name__}.normed",
        "partition=[14,31]",
        "microbatches=2",
        "epochs=1",
    )
    case = Case("1f1b", 3, words)
    compare(case, *run_in_threads(case))
