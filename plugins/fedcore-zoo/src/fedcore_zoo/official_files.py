"""The official files of image data sets: in the data directory, downloaded by torchvision where missing, checked."""

from __future__ import annotations

import contextlib
import fcntl
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from fedcore import DataError
from fedcore.data import Split, default_data_dir
from fedcore_zoo.npz import read_npz
from fedcore_zoo.vision import load_torchvision

_DOWNLOAD_TIMEOUT = 15.0  # seconds without an answer; torchvision sets none and could hang behind a firewall
_LAYOUT_HINT = (
    "Run once with network access (torchvision downloads them), copy the files there by hand (unpacked), or "
    "point --data-dir (or FEDCORE_DATA) to a directory with these files."
)


def read_idx(
    name: str,
    reader: str,
    prefixes: tuple[str, str],
    data_dir: Path | None,
    *,
    first: int = 0,
    last: int = 9,
    **options: str,
) -> tuple[Split, Split]:
    """Read the IDX files (training, test) of a set in MNIST's format; missing files are downloaded first."""
    root = data_dir or default_data_dir()
    raw = root / reader / "raw"
    files = [(raw / f"{p}-images-idx3-ubyte", raw / f"{p}-labels-idx1-ubyte") for p in prefixes]
    torchvision = load_torchvision()
    if not all(file.is_file() for pair in files for file in pair):
        # torchvision prefers an old processed/*.pt to the raw files; only raw files are read here.
        base = getattr(torchvision.datasets, reader)
        fetcher = type(reader, (base,), {"_check_legacy_exist": lambda self: False})
        expected = [str(file) for pair in files for file in pair]
        with _explained_download(name, expected), _alone(root):
            fetcher(str(root), download=True, **options)
            if not all(Path(file).is_file() for file in expected):
                raise FileNotFoundError("the download is incomplete")
    splits = []
    for image_file, label_file in files:
        try:
            images = torchvision.datasets.mnist.read_image_file(str(image_file))
            labels = torchvision.datasets.mnist.read_label_file(str(label_file))
            if not images.shape[0] or images.shape[1:] != (28, 28) or len(labels) != len(images):
                raise ValueError(f"{tuple(images.shape)} images and {len(labels)} labels")
            if int(labels.min()) < first or int(labels.max()) > last:
                raise ValueError(f"labels {_span(labels)}, expected {first}..{last}")
        except Exception as error:  # a damaged file may raise anything in the parser
            raise DataError(
                f"{name}: {image_file} and {label_file} cannot be used: {error or type(error).__name__}. "
                "Delete them to download again, or replace them by the official files (unpacked)."
            ) from error
        splits.append(Split(images.unsqueeze(1), labels))
    return splits[0], splits[1]


def read_cifar(
    name: str, reader: str, num_classes: int, data_dir: Path | None
) -> tuple[Split, Split, tuple[str, ...] | None]:
    """Read a CIFAR set from ``name.npz``, else by torchvision; third, its class names if known."""
    root = data_dir or default_data_dir()
    archive = root / f"{name}.npz"
    if archive.is_file():
        train, test = read_npz(archive)
        for split in (train, test):
            if split.images.dtype != torch.uint8 or split.images.shape[1:] != (3, 32, 32):
                raise DataError(f"{archive}: x_train and x_test must be uint8 of shape (n, 32, 32, 3)")
            if int(split.labels.min()) < 0 or int(split.labels.max()) >= num_classes:
                raise DataError(f"{archive}: labels {_span(split.labels)}, expected 0..{num_classes - 1}")
        return train, test, None
    base = getattr(load_torchvision().datasets, reader)
    parts = [root / base.base_folder / file for file, _ in (*base.train_list, *base.test_list)]
    expected = [f"{archive} (x_train, y_train, x_test, y_test)", f"or torchvision's {root / base.base_folder}/"]
    with _explained_download(name, expected):
        missing = not all(part.is_file() for part in parts)
        with _alone(root) if missing else contextlib.nullcontext():
            sets = [base(str(root), train=train, download=missing and train) for train in (True, False)]
    splits = [
        Split(
            torch.from_numpy(np.ascontiguousarray(s.data.transpose(0, 3, 1, 2))),
            torch.tensor(s.targets, dtype=torch.int64),
        )
        for s in sets
    ]
    return splits[0], splits[1], tuple(sets[0].classes)


def _span(labels: torch.Tensor) -> str:
    return f"{int(labels.min())}..{int(labels.max())}"


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Wait until no other process, such as a job of the same array, downloads to the folder.

    Two downloads at a time would write to one archive, and a part of the jobs would end with an error.
    """
    root.mkdir(parents=True, exist_ok=True)
    path = root / ".download.lock"
    with path.open("w") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # who waits for it has it open


@contextlib.contextmanager
def _explained_download(name: str, expected: Sequence[str]) -> Iterator[None]:
    """Turn any error of a torchvision download into a DataError with advice, and remove the empty folders it made."""
    folder = Path(expected[0]).absolute().parent
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_DOWNLOAD_TIMEOUT)
    try:
        yield
    except Exception as error:  # network, proxy, disk, md5, archive: the advice is the same
        reason = " ".join(str(error).split()) or type(error).__name__
        for path in missing:
            with contextlib.suppress(OSError):  # it is not empty
                path.rmdir()
        raise DataError(
            f"{name}: data files are missing or not the official ones, and torchvision could not download them "
            f"({reason}). Expected: {', '.join(expected)}. {_LAYOUT_HINT}"
        ) from error
    finally:
        socket.setdefaulttimeout(before)
