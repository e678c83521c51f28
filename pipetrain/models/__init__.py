"""The models: functions that return an `nn.Sequential` of the smallest layers between possible cuts.

Each layer's weights are those of its `reset_parameters`, so a rank can make those of its stages alone. No
layer works in place, so the tensors at a cut never change; this costs no time (0.63 s a training step of
VGG16 either way, batch 64 on two cores). A user's model is a factory of the same kind:
`model._target_=my_package.my_factory`.
"""

from __future__ import annotations

from pipetrain.models.gpt import gpt
from pipetrain.models.unet import unet
from pipetrain.models.vision import (
    alexnet,
    mlp,
    resnet18,
    resnet34,
    resnet50,
    resnet101,
    vgg11,
    vgg13,
    vgg16,
    vgg19,
)

__all__ = [
    "alexnet",
    "gpt",
    "mlp",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "unet",
    "vgg11",
    "vgg13",
    "vgg16",
    "vgg19",
]
