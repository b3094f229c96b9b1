"""Images of one's own in an ``.npz`` file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedcore import ConfigError, DataError
from fedcore.data import Dataset, Split, assemble, find_data, first_ten
from fedcore_zoo.arrays import KEYS, image_split
from fedcore_zoo.labels import check_classes
from fedcore_zoo.query import MOVED, name_options


def npz(name: str) -> Callable[[Path | None], Dataset]:
    """Images in a file ``npz:FILE`` of numpy.savez, with the arrays x_train, y_train, x_test, y_test.

    x is (n, H, W), (n, H, W, C) or (n, C, H, W) with up to 4 channels (the last axis is tried first), uint8
    (then divided by 255) or floating point; y is (n,) integers, 0..C-1 for C classes. Normalised by the
    training images' mean and standard deviation. ``npz:FILE?part=yes`` is one client's part of the data, in which
    classes may have no samples.
    """
    file, options = name_options(f"npz:{name}", ("part",))
    if (part := options.get("part", "no")) not in ("yes", "no"):
        raise ConfigError(f"npz:{name}: part is {part!r}; expected yes, or no")

    def load(data_dir: Path | None) -> Dataset:
        path = find_data(file, data_dir)
        if not path.exists():
            raise DataError(f"{path.absolute()} does not exist. {MOVED}")
        train, test, others = _read(path)
        if train.images.dtype != test.images.dtype:
            raise DataError(f"{path}: x_train and x_test must have the same type, both uint8 or both floating point")
        if part == "no":
            check_classes(train.labels, test.labels, str(path))
        classes = max(int(split.labels.max()) for split in (train, test)) + 1
        notes = (f"{path}: arrays not used: {first_ten(others)}",) if others else ()
        return assemble(f"npz:{path.name}", train, test, num_classes=classes, notes=notes)

    return load


def read_npz(path: Path) -> tuple[Split, Split]:
    """Return the training and the test part of an ``.npz`` file; never unpickles.

    :raises DataError: the file is missing, damaged or of another kind.
    """
    train, test, _ = _read(path)
    return train, test


def _read(path: Path) -> tuple[Split, Split, list[str]]:
    """Return the training and the test part, and the names of the other arrays, quoted and sorted."""
    if not path.exists():
        raise DataError(f"{path} does not exist")
    try:
        content = np.load(path, allow_pickle=False)
        if not isinstance(content, np.lib.npyio.NpzFile):
            raise ValueError("a single array, not an archive made by numpy.savez")
        with content:
            absent = [key for key in KEYS if key not in content]
            if absent:
                raise ValueError(f"without {', '.join(absent)} (it has {', '.join(content) or 'nothing'})")
            x_train, y_train, x_test, y_test = (content[key] for key in KEYS)
            others = sorted(repr(key) for key in content if key not in KEYS)
    except Exception as error:  # zip, zlib, header parser, memory: a file from elsewhere may raise anything
        raise DataError(
            f"{path} is not a usable .npz file: {error or type(error).__name__}. It must hold "
            f"{', '.join(KEYS)} as plain arrays (no Python objects), as numpy.savez writes them."
        ) from error
    where = f"{path}: "
    return image_split(x_train, y_train, "train", where), image_split(x_test, y_test, "test", where), others
