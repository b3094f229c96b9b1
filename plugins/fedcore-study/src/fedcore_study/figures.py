"""Figures that commands of the core draw through the entry points ``fedcore.figures``."""

from __future__ import annotations

from pathlib import Path

from fedcore.base.files import storing
from fedcore.data import Dataset, Partition
from fedcore_study.reports.optional_dependencies import require


def partition(partition: Partition, dataset: Dataset, out: Path) -> None:
    """Write a picture of a partition, training samples by client and class, for ``fedcore data plot --out``.

    :param out: its name ends with .png or .pdf.
    :raises ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    require(["matplotlib"])
    from fedcore_study.reports import samples, static

    with storing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        static.save(samples.picture(partition, dataset), out)
