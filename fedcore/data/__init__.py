"""Data sets, and partitions among clients."""

from fedcore.data.assign import Partitioner, make_partition, with_public
from fedcore.data.client_data import ClientData
from fedcore.data.dataset import Dataset, Domains, PublicSamples
from fedcore.data.images import ResidentSamples, Split, assemble
from fedcore.data.loading import as_dataset, default_data_dir, find_data, load_dataset, numbered_as, read_npz
from fedcore.data.partition import DECLARED, IndexLists, Partition, load_partition
from fedcore.data.partitioners import (
    MIN_SIZE,
    IntArray,
    PartitionWarning,
    assign_by_counts,
    capped_counts,
    check_alpha,
    checked_labels,
    dirichlet,
    even_sizes,
    iid,
    parts_by_owner,
)
from fedcore.data.samples import (
    JSON,
    Samples,
    SequenceBatch,
    SequenceSamples,
    TensorSamples,
    check_labels,
    check_offsets,
    gather_runs,
)

__all__ = [
    "DECLARED",
    "JSON",
    "MIN_SIZE",
    "ClientData",
    "Dataset",
    "Domains",
    "IndexLists",
    "IntArray",
    "Partition",
    "PartitionWarning",
    "Partitioner",
    "PublicSamples",
    "ResidentSamples",
    "Samples",
    "SequenceBatch",
    "SequenceSamples",
    "Split",
    "TensorSamples",
    "as_dataset",
    "assemble",
    "assign_by_counts",
    "capped_counts",
    "check_alpha",
    "check_labels",
    "check_offsets",
    "checked_labels",
    "default_data_dir",
    "dirichlet",
    "even_sizes",
    "find_data",
    "gather_runs",
    "iid",
    "load_dataset",
    "load_partition",
    "make_partition",
    "numbered_as",
    "parts_by_owner",
    "read_npz",
    "with_public",
]
