"""The papers' data sets, models and partitions for fedcore, and the models of torchvision and timm by name."""

from fedcore_zoo.bundled import breast_cancer, fixed_split
from fedcore_zoo.client_shares import dirichlet_clients
from fedcore_zoo.datasets import cifar10, cifar100, emnist, emnist_balanced, fashion_mnist, mnist
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
from fedcore_zoo.niid_bench import niid_bench
from fedcore_zoo.npz import read_npz
from fedcore_zoo.partitioners import classes, natural, quantity, shards
from fedcore_zoo.vision import load_torchvision

__all__ = [
    "PadTo",
    "alexnet",
    "breast_cancer",
    "cifar10",
    "cifar100",
    "classes",
    "dirichlet_clients",
    "embedding_bag",
    "emnist",
    "emnist_balanced",
    "fashion_mnist",
    "fdcl_cnn",
    "fedcme_cnn",
    "fedlab_alexnet",
    "fedlab_cnn",
    "fixed_split",
    "image_shape",
    "load_torchvision",
    "mnist",
    "natural",
    "niid_bench",
    "quantity",
    "read_npz",
    "resnet50",
    "shards",
    "simple_cnn",
]
