"""Data sets, models and partitions of the papers, models of torchvision and timm by name, and weights to start from.

All names are imported on first use: the option is read without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedcore.tools import lazy

if TYPE_CHECKING:
    from fedcore_zoo.arrays import image_split as image_split
    from fedcore_zoo.bundled import breast_cancer as breast_cancer
    from fedcore_zoo.bundled import fixed_split as fixed_split
    from fedcore_zoo.cells import Cells as Cells
    from fedcore_zoo.cells import numbers_as_words as numbers_as_words
    from fedcore_zoo.cells import spelled_alike as spelled_alike
    from fedcore_zoo.cells import word_of as word_of
    from fedcore_zoo.client_shares import dirichlet_clients as dirichlet_clients
    from fedcore_zoo.datasets import cifar10 as cifar10
    from fedcore_zoo.datasets import cifar100 as cifar100
    from fedcore_zoo.datasets import emnist as emnist
    from fedcore_zoo.datasets import emnist_balanced as emnist_balanced
    from fedcore_zoo.datasets import fashion_mnist as fashion_mnist
    from fedcore_zoo.datasets import mnist as mnist
    from fedcore_zoo.fedlab import fedlab_alexnet as fedlab_alexnet
    from fedcore_zoo.fedlab import fedlab_cnn as fedlab_cnn
    from fedcore_zoo.fitted import FittedRecipe as FittedRecipe
    from fedcore_zoo.groups import numbered_groups as numbered_groups
    from fedcore_zoo.groups import whole_groups as whole_groups
    from fedcore_zoo.groups import whole_rows as whole_rows
    from fedcore_zoo.networks import PadTo as PadTo
    from fedcore_zoo.networks import alexnet as alexnet
    from fedcore_zoo.networks import embedding_bag as embedding_bag
    from fedcore_zoo.networks import fdcl_cnn as fdcl_cnn
    from fedcore_zoo.networks import fedcme_cnn as fedcme_cnn
    from fedcore_zoo.networks import image_shape as image_shape
    from fedcore_zoo.networks import resnet50 as resnet50
    from fedcore_zoo.networks import simple_cnn as simple_cnn
    from fedcore_zoo.niid_bench import niid_bench as niid_bench
    from fedcore_zoo.npz import read_npz as read_npz
    from fedcore_zoo.partitioners import classes as classes
    from fedcore_zoo.partitioners import natural as natural
    from fedcore_zoo.partitioners import quantity as quantity
    from fedcore_zoo.partitioners import shards as shards
    from fedcore_zoo.preparation import as_client as as_client
    from fedcore_zoo.query import MOVED as MOVED
    from fedcore_zoo.query import name_options as name_options
    from fedcore_zoo.sequences import SequenceBatch as SequenceBatch
    from fedcore_zoo.sequences import SequenceSamples as SequenceSamples
    from fedcore_zoo.sequences import gather_runs as gather_runs
    from fedcore_zoo.split_network import SplitNetwork as SplitNetwork
    from fedcore_zoo.tables import Recipe as Recipe
    from fedcore_zoo.tables import TableSamples as TableSamples
    from fedcore_zoo.tables import mean_and_deviation as mean_and_deviation
    from fedcore_zoo.tables import table_inputs as table_inputs
    from fedcore_zoo.transforms import Transforms as Transforms
    from fedcore_zoo.vision import load_torchvision as load_torchvision
    from fedcore_zoo.weights import load_weights as load_weights

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
