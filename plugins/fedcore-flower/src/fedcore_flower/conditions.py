"""A client's data, and the conditions under which it takes part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TrainerOptions:
    """A client's data and the conditions under which it takes part. They go to the training process as JSON."""

    data: str
    """The data set, as ``--dataset`` names one."""
    state: str
    """The folder of the client's states, Flower's files and logs."""
    data_dir: str | None = None
    """The folder of named data sets."""
    test_fraction: float | None = None
    """The part of the training samples to hold out. None holds out the data set's own test samples."""
    seed: int = 0
    """The seed by which held-out samples are drawn."""
    allowed: Sequence[str] | None = None
    """The methods that the client takes part in; None for all that are installed."""
    models: Sequence[str] = ()
    """The models that may read files of this machine."""
    device: str = "auto"
    quiet: bool = False
    """Whether to print nothing."""
