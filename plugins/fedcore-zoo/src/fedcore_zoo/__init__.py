"""Data sets and models for fedcore: the papers' networks, and those of torchvision and timm by name."""

from fedcore_zoo.bundled import breast_cancer, fixed_split
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
    "breast_cancer",
    "embedding_bag",
    "fdcl_cnn",
    "fedcme_cnn",
    "fedlab_alexnet",
    "fedlab_cnn",
    "fixed_split",
    "image_shape",
    "resnet50",
    "simple_cnn",
]
