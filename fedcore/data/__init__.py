"""Data sets, and partitions among clients. The names below are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedcore.base.lazy import lazy

if TYPE_CHECKING:
    from fedcore.data.assign import Partitioner as Partitioner
    from fedcore.data.assign import draw_by_class as draw_by_class
    from fedcore.data.assign import make_partition as make_partition
    from fedcore.data.assign import with_public as with_public
    from fedcore.data.client_data import ClientData as ClientData
    from fedcore.data.dataset import Dataset as Dataset
    from fedcore.data.dataset import Domains as Domains
    from fedcore.data.dataset import PublicSamples as PublicSamples
    from fedcore.data.dataset import data_digest as data_digest
    from fedcore.data.images import ResidentSamples as ResidentSamples
    from fedcore.data.images import Split as Split
    from fedcore.data.images import assemble as assemble
    from fedcore.data.images import normalise as normalise
    from fedcore.data.inputs import Inputs as Inputs
    from fedcore.data.loading import as_dataset as as_dataset
    from fedcore.data.loading import default_data_dir as default_data_dir
    from fedcore.data.loading import find_data as find_data
    from fedcore.data.loading import load_dataset as load_dataset
    from fedcore.data.loading import numbered_as as numbered_as
    from fedcore.data.loading import with_labels as with_labels
    from fedcore.data.partition import DECLARED as DECLARED
    from fedcore.data.partition import IndexLists as IndexLists
    from fedcore.data.partition import Partition as Partition
    from fedcore.data.partition import fitted as fitted
    from fedcore.data.partition import load_partition as load_partition
    from fedcore.data.partition import problem_with_lists as problem_with_lists
    from fedcore.data.partitioners import MIN_SIZE as MIN_SIZE
    from fedcore.data.partitioners import IntArray as IntArray
    from fedcore.data.partitioners import PartitionWarning as PartitionWarning
    from fedcore.data.partitioners import assign_by_counts as assign_by_counts
    from fedcore.data.partitioners import capped_counts as capped_counts
    from fedcore.data.partitioners import check_alpha as check_alpha
    from fedcore.data.partitioners import checked_labels as checked_labels
    from fedcore.data.partitioners import dirichlet as dirichlet
    from fedcore.data.partitioners import even_sizes as even_sizes
    from fedcore.data.partitioners import fill_up as fill_up
    from fedcore.data.partitioners import iid as iid
    from fedcore.data.partitioners import parts_by_owner as parts_by_owner
    from fedcore.data.samples import JSON as JSON
    from fedcore.data.samples import Samples as Samples
    from fedcore.data.samples import TensorSamples as TensorSamples
    from fedcore.data.samples import by_any_thread as by_any_thread
    from fedcore.data.samples import check_labels as check_labels
    from fedcore.data.samples import check_offsets as check_offsets
    from fedcore.data.samples import first_ten as first_ten
    from fedcore.data.task import Task as Task
    from fedcore.data.task import other_task as other_task
    from fedcore.data.task import task_of as task_of

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
