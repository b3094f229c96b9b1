"""Data sets, partitions among clients, and augmentation."""

from fedcore.data.assign import make_partition
from fedcore.data.augment import augment
from fedcore.data.datasets import default_data_dir, fixed_split, load_dataset
from fedcore.data.files import read_npz
from fedcore.data.index_lists import IndexLists
from fedcore.data.partition import DECLARED, Partition
from fedcore.data.partition_file import load_partition
from fedcore.data.partitioners import IntArray, Partitioner, dirichlet_partition
from fedcore.data.rows import TensorSamples, check_labels
from fedcore.data.samples import JSON, Dataset, ResidentSamples, Samples
from fedcore.data.sequences import SequenceBatch, SequenceSamples, check_offsets, gather_runs
from fedcore.data.split import Split, assemble

__all__ = [
    "DECLARED",
    "JSON",
    "Dataset",
    "IndexLists",
    "IntArray",
    "Partition",
    "Partitioner",
    "ResidentSamples",
    "Samples",
    "SequenceBatch",
    "SequenceSamples",
    "Split",
    "TensorSamples",
    "assemble",
    "augment",
    "check_labels",
    "check_offsets",
    "default_data_dir",
    "dirichlet_partition",
    "fixed_split",
    "gather_runs",
    "load_dataset",
    "load_partition",
    "make_partition",
    "read_npz",
]
