"""U-Net: its published size, its skips, what it refuses, and that it learns."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipetrain.config.build import build
from pipetrain.errors import ConfigError
from pipetrain.model.chain import Stash
from pipetrain.model.specs import Size, TensorSpec, ValueSpec
from pipetrain.models import unet
from pipetrain.models.unet import Concatenate
from pipetrain.plan.cost_estimate import estimate
from tests.support.cases import Case, compare, options_of
from tests.support.thread_ranks import run_in_threads

SMALL = {"num_classes": 3, "levels": 3, "convolutions": 2, "width": 4}


def small(**changed) -> nn.Sequential:
    torch.manual_seed(0)
    return unet(**(SMALL | changed))


def images(n: int, height: int = 16, width: int = 16) -> torch.Tensor:
    return torch.rand(n, 3, height, width, generator=torch.Generator().manual_seed(1))


def classifying() -> nn.Sequential:
    """The mean score of each of ten classes, over all pixels."""
    scores = unet(num_classes=10, levels=3, convolutions=1, width=2)
    return nn.Sequential(*scores, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def test_the_paper_s_sizes_have_the_parameters_of_the_usual_implementation():
    """github.com/milesial/Pytorch-UNet: padded, with BatchNorm, transposed convolutions, 3 channels."""
    with torch.device("meta"):
        model = build(options_of(["model=unet", "data=shapes", "task=segmentation"]), "model")
    assert sum(p.numel() for p in model.parameters()) == 31_037_633 + 2 * 65  # of two more classes


@torch.no_grad()
def test_a_score_of_each_class_for_each_pixel_and_no_layer_writes_its_input():
    model = small().double()
    out = images(2, 4, 12).double()
    whole = model(out)
    assert whole.shape == (2, 3, 4, 12)
    for layer in model:
        given = out if isinstance(out, tuple) else (out,)
        before = [t.clone() for t in given]
        out = layer(out)
        assert all(map(torch.equal, given, before))
    torch.testing.assert_close(out, whole)


def test_each_level_joins_what_it_made_on_the_way_down():
    """What a Stash was given is the second half of the channels that its Pop's level begins with."""
    model, seen = small().eval(), {}
    for name, layer in model.named_modules():
        if isinstance(layer, Stash | Concatenate):
            layer.register_forward_hook(lambda _, given, out, name=name: seen.update({name: out}))
    model(images(2))
    for level, channels in ((1, 4), (2, 8)):
        skip, joined = seen[f"down{level}_skip"], seen[f"up{level}_skip.join"]
        assert skip.shape[1] == channels
        assert torch.equal(joined[:, channels:], skip)


def test_activations_keep_their_scale_and_gradients_reach_every_weight():
    model, scales = small(levels=4, width=16).train(), {}
    for name, layer in model.named_children():
        layer.register_forward_hook(lambda _, given, out, name=name: scales.update({name: out.std()}))
    model(images(8, 32, 32)).square().mean().backward()
    assert all(0.3 < scale < 3 for scale in scales.values()), scales
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_a_shape_that_cannot_be_is_refused_and_an_image_before_the_start():
    with pytest.raises(ConfigError, match=r"levels=1 must be a whole number of at least 2"):
        unet(levels=1)
    says = r"layer 11 \(up2_skip\) of the model cannot take .*: Sizes of tensors must match"
    with pytest.raises(ConfigError, match=says):
        estimate(small(), ValueSpec((TensorSpec((3, 18, 16), torch.float32),)).of(Size(2)))


def test_stages_train_it_as_one_process_does():
    """Cut behind the Stash of level 1, and behind the Pop of level 2; its gradients are two updates late."""
    words = (f"model._target_={__name__}.classifying", "partition=[2,9]", "microbatches=3", "epochs=1")
    case = Case("pipedream", 3, words)
    compare(case, *run_in_threads(case))
