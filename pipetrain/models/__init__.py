"""The models: each a function that returns an `nn.Sequential` of the finest layers that can be cut.

They are built whole on every rank, under a seed that the caller sets, and draw their weights in the order of
their layers: the initial weights depend on the seed and the layer alone, never on the partition. A model of
one's own is a factory of the same kind: `model._target_=my_package.my_factory`.
"""

from pipetrain.models.mlp import mlp
from pipetrain.models.resnet import resnet18, resnet34, resnet50
from pipetrain.models.vgg import vgg11, vgg13, vgg16, vgg19

__all__ = ["mlp", "resnet18", "resnet34", "resnet50", "vgg11", "vgg13", "vgg16", "vgg19"]
