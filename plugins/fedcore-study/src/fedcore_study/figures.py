"""Figures as files, which matplotlib of the extra ``report`` draws."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from fedcore import ConfigError, UnknownNameError
from fedcore.base.files import storing

if TYPE_CHECKING:
    from fedcore.data import Dataset, Partition


FORMATS = ("png", "pdf")


def check_format(form: str, *, needed: bool) -> None:
    """Check that figures can be written in a format, and, where they are needed, that they can be written.

    :raises UnknownNameError: the format is not one of ``FORMATS``.
    :raises ConfigError: matplotlib is not installed.
    """
    if form not in FORMATS:
        raise UnknownNameError("figure format", form, FORMATS)
    if needed:
        require_matplotlib()


def require_matplotlib() -> None:
    """Check that matplotlib is installed, without importing it.

    :raises ConfigError: it is not.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("figures as files need matplotlib, which is not installed: pip install matplotlib")


def partition(partition: Partition, dataset: Dataset, out: Path) -> None:
    """Write a picture of a partition, training samples by client and class, for ``fedcore data plot --out``.

    :param out: its name ends with .png or .pdf.
    :raises ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    require_matplotlib()
    from fedcore_study.reports import samples, static

    with storing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        static.save(samples.picture(partition, dataset), out)
