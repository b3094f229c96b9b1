"""Models for fedcore: the papers' networks, and those of torchvision and timm by name."""

from fedcore_zoo.fedlab import fedlab_alexnet, fedlab_cnn
from fedcore_zoo.networks import (
    PadTo,
    alexnet,
    embedding_bag,
    fdcl_cnn,
    fedcme_cnn,
    image_shape,
    resnet50,
    simple_cnn,
)

__all__ = [
    "PadTo",
    "alexnet",
    "embedding_bag",
    "fdcl_cnn",
    "fedcme_cnn",
    "fedlab_alexnet",
    "fedlab_cnn",
    "image_shape",
    "resnet50",
    "simple_cnn",
]
