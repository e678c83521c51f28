"""The models of images: their published sizes, and that they can be cut anywhere."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from pipetrain import models
from pipetrain.config.build import make_model
from pipetrain.config.settings import Settings
from pipetrain.errors import ConfigError
from tests.support.cases import options_of

pytestmark = pytest.mark.slow

CONF = Path(__file__).parents[2] / "conf" / "model"

# Layers, and parameters for ten classes: github.com/kuangliu/pytorch-cifar, whose VGG has the same layers and
# biases and whose ResNets are He et al.'s with the CIFAR stem. AlexNet's form for 32x32 is our own.
PUBLISHED = {
    "alexnet": (8, 36_051_786),
    "vgg11": (9, 9_231_114),
    "vgg13": (11, 9_416_010),
    "vgg16": (14, 14_728_266),
    "vgg19": (17, 20_040_522),
    "resnet18": (10, 11_173_962),
    "resnet34": (18, 21_282_122),
    "resnet50": (18, 23_520_842),
    "resnet101": (35, 42_512_970),
    "mlp": (6, 3072 * 128 + 128 + 4 * (128 * 128 + 128) + 128 * 10 + 10),
}


def test_every_model_has_a_config_and_each_makes_the_model_of_published_size():
    configs = {path.stem for path in CONF.glob("*.yaml") if not path.stem.startswith(("gpt_", "hf_"))}
    assert configs == {*models.__all__} == {*PUBLISHED, "gpt", "unet"}
    for name, published in PUBLISHED.items():
        cfg = options_of(["data=digits", f"model={name}"])
        assert set(cfg["model"]) == {"_target_"}  # so that a factory of no arguments can take its place
        assert Settings.composed(cfg, "1f1b", 2).model == name
        with torch.device("meta"):
            model = make_model(cfg, 0, torch.float32)
        assert (len(model), sum(p.numel() for p in model.parameters())) == published


# Parameters for the 1000 classes of ImageNet: torchvision's tables of its weights.
TORCHVISION = {
    "alexnet": 61_100_840,
    "vgg11": 132_868_840,
    "vgg13": 133_053_736,
    "vgg16": 138_365_992,
    "vgg16 batchnorm=false": 138_357_544,
    "vgg19": 143_678_248,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
}


@pytest.mark.parametrize(("words", "parameters"), TORCHVISION.items())
def test_the_forms_for_imagenet_are_torchvision_s(words, parameters):
    name, *options = words.split()
    more = [f"model.{option}" for option in ("imagenet=true", "num_classes=1000", *options)]
    with torch.device("meta"):
        model = make_model(options_of([f"model={name}", *more]), 0, torch.float32)
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 1000)
    assert sum(p.numel() for p in model.parameters()) == parameters


SMALL = {
    "mlp": models.mlp,
    "alexnet": partial(models.alexnet, width=8),
    "vgg11": partial(models.vgg11, width=8),
    "resnet18": models.resnet18,
    "resnet50": models.resnet50,
    "alexnet, imagenet": partial(models.alexnet, width=8, imagenet=True),
    "vgg11, imagenet": partial(models.vgg11, width=8, batchnorm=False, imagenet=True),
    "resnet18, imagenet": partial(models.resnet18, imagenet=True),
}


@pytest.mark.parametrize(("name", "make"), SMALL.items())
@torch.no_grad()
def test_cut_everywhere_at_once_gives_the_same_output(name, make):
    """Each layer is a stage of its own, which works in place on nothing that it is given."""
    torch.manual_seed(0)
    size = 64 if "imagenet" in name else 32
    model, x = make(num_classes=7).apply(_without_dropout), torch.randn(2, 3, size, size)
    out = x
    for layer in model:
        before, given = out.clone(), out
        out = layer(given)
        assert torch.equal(given, before)
        assert 0.01 < out.std() < 10  # activations start at a sane scale
    assert out.shape == (2, 7)
    torch.testing.assert_close(out, model(x))


def _without_dropout(module):
    if isinstance(module, torch.nn.Dropout):
        module.eval()


def test_other_sizes_have_the_same_layers_and_some_cannot_be():
    assert len(models.mlp(depth=8, width=16)) == 8
    narrow = models.vgg16(width=16)
    assert (len(narrow), *narrow.conv4_2.conv.weight.shape) == (14, 128, 128, 3, 3)
    with pytest.raises(ConfigError, match=r"depth=1 must be a whole number of at least 2"):
        models.mlp(depth=1)
    with pytest.raises(ConfigError, match=r"imagenet=2 must be true or false"):
        models.alexnet(imagenet=2)
    with pytest.raises(ConfigError, match=r"width=1\.5 must be a whole number of at least 1"):
        models.vgg16(width=1.5)
