"""Data sets, their division among clients, and augmentation."""

from fedcore.data.augment import augment
from fedcore.data.datasets import load_dataset
from fedcore.data.partition import Partition, load_partition, make_partition
from fedcore.data.partitions import dirichlet_partition
from fedcore.data.parts import Parts
from fedcore.data.samples import Dataset, ResidentSamples, Samples

__all__ = [
    "Dataset",
    "Partition",
    "Parts",
    "ResidentSamples",
    "Samples",
    "augment",
    "dirichlet_partition",
    "load_dataset",
    "load_partition",
    "make_partition",
]
