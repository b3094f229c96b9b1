"""Data sets, their division among clients, and augmentation."""

from fedcore.data.assign import make_partition
from fedcore.data.augment import augment
from fedcore.data.datasets import load_dataset
from fedcore.data.index_lists import IndexLists
from fedcore.data.partition import DECLARED, Partition
from fedcore.data.partition_file import load_partition
from fedcore.data.partitioners import dirichlet_partition
from fedcore.data.rows import TensorSamples
from fedcore.data.samples import Dataset, ResidentSamples, Samples
from fedcore.data.sequences import SequenceBatch, SequenceSamples

__all__ = [
    "DECLARED",
    "Dataset",
    "IndexLists",
    "Partition",
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
