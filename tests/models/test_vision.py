"""The models of images: their published sizes, and that they can be cut anywhere."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from pipetrain import models
from pipetrain.building import make_model
from pipetrain.errors import ConfigError
from pipetrain.settings import Settings
from tests.support.cases import config

pytestmark = pytest.mark.slow

CONF = Path(__file__).parents[2] / "conf" / "model"

# Layers, and parameters for ten classes: github.com/kuangliu/pytorch-cifar, whose VGG has the same layers and
# biases and whose ResNets are He et al.'s with the CIFAR stem.
PUBLISHED = {
    "vgg11": (9, 9_231_114),
    "vgg13": (11, 9_416_010),
    "vgg16": (14, 14_728_266),
    "vgg19": (17, 20_040_522),
    "resnet18": (10, 11_173_962),
    "resnet34": (18, 21_282_122),
    "resnet50": (18, 23_520_842),
    "mlp": (6, 3072 * 128 + 128 + 4 * (128 * 128 + 128) + 128 * 10 + 10),
}


def test_every_model_has_a_config_and_each_makes_the_model_of_published_size():
    configs = {path.stem for path in CONF.glob("*.yaml") if not path.stem.startswith(("gpt_", "hf_"))}
    assert configs == {*models.__all__} == {*PUBLISHED, "gpt", "unet"}
    for name, published in PUBLISHED.items():
        cfg = config(["data=digits", f"model={name}"])
        assert set(cfg.model) == {"_target_"}  # so that a factory of no arguments can take its place
        assert Settings.composed(cfg, "1f1b", 2).model == name
        with torch.device("meta"):
            model = make_model(cfg, 0, torch.float32)
        assert (len(model), sum(p.numel() for p in model.parameters())) == published


@pytest.mark.parametrize(
    "make",
    [models.mlp, partial(models.vgg11, width=8), models.resnet18, models.resnet50],
    ids=["mlp", "vgg11", "resnet18", "resnet50"],
)
@torch.no_grad()
def test_cut_everywhere_at_once_gives_the_same_output(make):
    """Each layer is a stage of its own, which works in place on nothing that it is given."""
    torch.manual_seed(0)
    model, x = make(num_classes=7), torch.randn(2, 3, 32, 32)
    out = x
    for layer in model:
        before, given = out.clone(), out
        out = layer(given)
        assert torch.equal(given, before)
        assert 0.01 < out.std() < 10  # activations start at a sane scale
    assert out.shape == (2, 7)
    torch.testing.assert_close(out, model(x))


def test_other_sizes_have_the_same_layers_and_some_cannot_be():
    assert len(models.mlp(depth=8, width=16)) == 8
    narrow = models.vgg16(width=16)
    assert (len(narrow), *narrow.conv4_2.conv.weight.shape) == (14, 128, 128, 3, 3)
    with pytest.raises(ConfigError, match=r"depth=1 must be a whole number of at least 2"):
        models.mlp(depth=1)
    with pytest.raises(ConfigError, match=r"width=1\.5 must be a whole number of at least 1"):
        models.vgg16(width=1.5)
