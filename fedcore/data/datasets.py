"""Data sets by name, and the directory of their files.

A loader (entry-point group ``fedcore.datasets``) takes the data directory, None for the default, and returns
a :class:`~fedcore.data.samples.Dataset`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from fedcore.base.errors import DataError, PluginContractError
from fedcore.base.registry import call, resolve
from fedcore.data.files import npz
from fedcore.data.samples import Dataset


def load_dataset(spec: str, data_dir: Path | None = None) -> Dataset:
    """Return the data set ``spec``: a name, ``npz:FILE``, or the name behind a package's prefix.

    :raises UnknownNameError: no installed package provides the name.
    :raises DataError: files are missing or damaged.
    """
    if spec.startswith("npz:"):
        return npz(expanded(spec.removeprefix("npz:"), spec))
    loader: Callable[[Path | None], Dataset] = resolve("dataset", spec)
    dataset = call("dataset", spec, loader, data_dir)
    if not isinstance(dataset, Dataset):
        raise PluginContractError.of(spec, f"returned {type(dataset).__name__}", kind="dataset", expected="a Dataset")
    return dataset


def default_data_dir() -> Path:
    """Return the directory named by FEDCORE_DATA, else ``~/.cache/fedcore/data``.

    :raises DataError: the path names the home of a user that does not exist.
    """
    named = os.environ.get("FEDCORE_DATA")
    return expanded(named or "~/.cache/fedcore/data", f"FEDCORE_DATA={named}")


def expanded(path: str, source: str) -> Path:
    """Return a path with its ``~`` replaced by a home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise DataError(f"{source}: there is no such user's home; write the full path") from None
