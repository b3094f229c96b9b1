"""Data sets, their division among clients, and augmentation."""

from fedcore.data.augment import augment
from fedcore.data.datasets import load_dataset
from fedcore.data.dealing import make_partition
from fedcore.data.partition import DECLARED, Partition
from fedcore.data.partition_file import load_partition
from fedcore.data.partitions import dirichlet_partition
from fedcore.data.parts import Parts
from fedcore.data.rows import TensorSamples
from fedcore.data.samples import Dataset, ResidentSamples, Samples
from fedcore.data.sequences import SequenceBatch, SequenceSamples

__all__ = [
    "DECLARED",
    "Dataset",
    "Partition",
    "Parts",
    "ResidentSamples",
    "Samples",
    "SequenceBatch",
    "SequenceSamples",
    "TensorSamples",
    "augment",
    "dirichlet_partition",
    "load_dataset",
    "load_partition",
    "make_partition",
]
