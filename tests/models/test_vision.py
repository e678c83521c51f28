"""The models of images: their published sizes, and that they can be cut anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from pipetrain import models
from pipetrain.building import make_model
from pipetrain.errors import ConfigError
from pipetrain.settings import Settings
from tests.support.cases import config

pytestmark = pytest.mark.slow

CONF = Path(__file__).parents[2] / "conf" / "model"

# Parameters for ten classes: github.com/kuangliu/pytorch-cifar, whose VGG has the same layers and biases and
# whose ResNets are He et al.'s with the CIFAR stem.
PARAMETERS = {
    "vgg11": 9_231_114,
    "vgg13": 9_416_010,
    "vgg16": 14_728_266,
    "vgg19": 20_040_522,
    "resnet18": 11_173_962,
    "resnet34": 21_282_122,
    "resnet50": 23_520_842,
    "mlp": 3072 * 128 + 128 + 4 * (128 * 128 + 128) + 128 * 10 + 10,
}
LAYERS = {
    "vgg11": 9,
    "vgg13": 11,
    "vgg16": 14,
    "vgg19": 17,
    "resnet18": 10,
    "resnet34": 18,
    "resnet50": 18,
    "mlp": 6,
}


def build(name: str, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model: nn.Sequential = getattr(models, name)()
    return model


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_every_model_has_a_config_and_is_tested():
    configs = {path.stem for path in CONF.glob("*.yaml") if not path.stem.startswith(("gpt_", "hf_"))}
    assert configs == {*models.__all__} == {*PARAMETERS, "gpt", "unet"}


@pytest.mark.parametrize("name", PARAMETERS)
def test_config_makes_the_model_of_published_size(name):
    cfg = config(["data=digits", f"model={name}"])
    assert set(cfg.model) == {"_target_"}  # so that a factory of no arguments can take its place
    assert Settings.composed(cfg, "1f1b", 2).model == name
    model = make_model(cfg, 0, torch.float32)
    assert len(model) == LAYERS[name]
    assert parameters(model) == PARAMETERS[name]


@pytest.mark.parametrize("name", ["mlp", "vgg11", "resnet18", "resnet50"])
@torch.no_grad()
def test_cut_everywhere_at_once_gives_the_same_output(name):
    """Each layer is a stage of its own, which works in place on nothing that it is given."""
    model = build(name).train()
    x = torch.randn(2, 3, 32, 32)
    out = x
    for layer in model:
        before, given = out.clone(), out
        out = layer(given)
        assert torch.equal(given, before)
    assert out.shape == (2, 10)
    torch.testing.assert_close(out, model(x))


def test_vgg16_is_cut_after_its_third_block():
    model = build("vgg16")
    assert model[:7](torch.randn(2, 3, 32, 32)).shape == (2, 256, 4, 4)
    assert [name for name, _ in model.named_children()][7] == "conv4_1"
    assert (parameters(model[:7]), parameters(model[7:])) == (1_737_792, 12_990_474)


def test_resnet18_is_cut_after_its_second_group():
    model = build("resnet18")
    assert model[:5](torch.randn(2, 3, 32, 32)).shape == (2, 128, 16, 16)
    assert [name for name, _ in model.named_children()][5] == "layer3_0"
    assert (parameters(model[:5]), parameters(model[5:])) == (675_392, 10_498_570)


def test_names_say_where_a_layer_is():
    names = [name for name, _ in build("vgg11").named_children()]
    assert names[:4] == ["conv1_1", "conv2_1", "conv3_1", "conv3_2"]
    assert names[-2:] == ["conv5_2", "head"]
    assert [name for name, _ in build("mlp").named_children()][-2:] == ["hidden5", "head"]


@pytest.mark.parametrize("name", ["vgg11", "resnet18", "mlp"])
def test_activations_start_at_a_sane_scale(name):
    model = build(name).train()
    out = model[:-1](torch.randn(16, 3, 32, 32))
    assert 0.1 < out.std() < 10


@pytest.mark.parametrize("name", ["vgg11", "resnet18", "mlp"])
def test_other_numbers_of_classes(name):
    assert getattr(models, name)(num_classes=7).eval()(torch.randn(1, 3, 32, 32)).shape == (1, 7)


def test_mlp_of_another_shape():
    assert len(models.mlp(depth=8, width=16)) == 8


@pytest.mark.parametrize(("depth", "width"), [(1, 8), (2, 0)])
def test_mlp_that_cannot_be_is_refused(depth, width):
    with pytest.raises(ConfigError, match=r"model\.(depth|width)=. must be a whole number"):
        models.mlp(depth=depth, width=width)


def test_a_narrower_vgg_has_the_same_layers():
    narrow, wide = models.vgg16(width=16), build("vgg16")
    assert [name for name, _ in narrow.named_children()] == [name for name, _ in wide.named_children()]
    assert narrow.conv4_2.conv.weight.shape == (128, 128, 3, 3)


@pytest.mark.parametrize("width", [0, -1, 1.5, "x", None, True])
def test_a_width_that_cannot_be_is_refused(width):
    with pytest.raises(ValueError, match=f"model.width={width} must be a whole number of at least 1"):
        models.vgg16(width=width)
