"""A small perceptron: the model for trying a schedule out, and for tests that want no BatchNorm.

Without BatchNorm nothing depends on how a batch is cut, so every flush schedule must give the same weights.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from pipetrain.errors import ConfigError


def mlp(num_classes: int = 10, depth: int = 6, width: int = 128) -> nn.Sequential:
    """Perceptron: images (n, 3, 32, 32) to logits (n, num_classes), `depth` linear layers of `width` units.

    Raises ConfigError where depth is under 2 or width under 1.
    """
    if depth < 2 or width < 1:
        raise ConfigError(
            f"model mlp needs depth >= 2 and width >= 1; got depth={depth}, width={width}: "
            "change model.depth or model.width"
        )
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["hidden1"] = nn.Sequential(
        OrderedDict[str, nn.Module](
            flatten=nn.Flatten(), linear=nn.Linear(3 * 32 * 32, width), relu=nn.ReLU()
        )
    )
    for index in range(2, depth):
        layers[f"hidden{index}"] = nn.Sequential(
            OrderedDict[str, nn.Module](linear=nn.Linear(width, width), relu=nn.ReLU())
        )
    layers["head"] = nn.Linear(width, num_classes)
    model = nn.Sequential(layers)
    for module in model.modules():
        if isinstance(module, nn.Linear):  # in the order of the layers; He et al., 2015
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            nn.init.zeros_(module.bias)
    return model
