"""Data sets, and partitions among clients."""

from fedcore.data.assign import Partitioner, make_partition
from fedcore.data.datasets import default_data_dir, load_dataset
from fedcore.data.files import read_npz
from fedcore.data.index_lists import IndexLists
from fedcore.data.owners import IntArray
from fedcore.data.partition import DECLARED, Partition
from fedcore.data.partition_file import load_partition
from fedcore.data.partitioners import dirichlet_partition
from fedcore.data.rows import TensorSamples, check_labels
from fedcore.data.samples import JSON, Dataset, PublicSamples, ResidentSamples, Samples
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
    "PublicSamples",
    "ResidentSamples",
    "Samples",
    "SequenceBatch",
    "SequenceSamples",
    "Split",
    "TensorSamples",
    "assemble",
    "check_labels",
    "check_offsets",
    "default_data_dir",
    "dirichlet_partition",
    "gather_runs",
    "load_dataset",
    "load_partition",
    "make_partition",
    "read_npz",
]
