"""Data sets by name: those bundled with scikit-learn, and torchvision's sets.

A loader (entry-point group ``fedcore.datasets``) takes the data directory, None for the default, and returns
a :class:`~fedcore.data.samples.Dataset`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from fedcore.base.errors import DataError, PluginContractError
from fedcore.base.registry import call, resolve
from fedcore.data.files import imagefolder, npz, read_npz
from fedcore.data.rows import TensorSamples
from fedcore.data.samples import Dataset
from fedcore.data.split import Split, assemble, span
from fedcore.data.vision import load_torchvision

Array: TypeAlias = npt.NDArray[Any]

BALANCED_CLASSES = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt"
"""Classes of EMNIST's balanced split, in the order of its labels."""

_CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_DOWNLOAD_TIMEOUT = 15.0  # seconds without an answer; torchvision sets none and could hang behind a firewall
_LAYOUT_HINT = (
    "Run once with network access (torchvision downloads them), copy the files there by hand (unpacked), or "
    "point --data-dir (or FEDCORE_DATA) to a directory with these files."
)


def load_dataset(spec: str, data_dir: Path | None = None) -> Dataset:
    """Return the data set ``spec``: a name, ``npz:FILE`` or ``imagefolder:DIR``.

    :raises UnknownNameError: no installed package provides the name.
    :raises DataError: files are missing or damaged.
    """
    kind, _, rest = spec.partition(":")
    if kind == "npz":
        return npz(_expanded(rest, spec))
    if kind == "imagefolder":
        return imagefolder(_expanded(rest, spec))
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
    return _expanded(named or "~/.cache/fedcore/data", f"FEDCORE_DATA={named}")


def _expanded(path: str, source: str) -> Path:
    """Return a path with its ``~`` replaced by a home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise DataError(f"{source}: there is no such user's home; write the full path") from None


def digits(data_dir: Path | None = None) -> Dataset:
    """Return scikit-learn's bundled digits: (1, 8, 8), 10 classes, 1437 to train and 360 to test.

    The split is stratified and fixed; it does not depend on the run's seed.
    """
    pixels, target, *parts = _bundled_digits()
    images = torch.from_numpy(pixels / 16.0).to(torch.float32).unsqueeze(1)
    labels = torch.from_numpy(target.astype(np.int64))
    train, test = map(torch.from_numpy, parts)
    return assemble(
        "digits",
        Split(images[train], labels[train]),
        Split(images[test], labels[test]),
        class_names=tuple(str(digit) for digit in range(10)),
    )


@functools.cache  # scikit-learn parses a text file each time
def _bundled_digits() -> tuple[Array, Array, Array, Array]:
    """Return pixels (n, 8, 8), labels (n,), and the positions to train and to test on; for reading only."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return bunch.images, bunch.target, *fixed_split(bunch.target, 0.2)


def breast_cancer(data_dir: Path | None = None) -> Dataset:
    """Return scikit-learn's bundled breast-cancer table: 30 numbers, 2 classes, 455 to train and 114 to test.

    Measurements of cell nuclei (Wisconsin diagnostic data), normalised by the training rows' mean and standard
    deviation. The split is stratified and fixed; it does not depend on the run's seed.
    """
    from sklearn.datasets import load_breast_cancer

    bunch = load_breast_cancer()
    train, test = fixed_split(bunch.target, 0.2)
    mean, std = bunch.data[train].mean(axis=0), bunch.data[train].std(axis=0)  # float64, in NumPy's fixed order
    rows = torch.from_numpy((bunch.data - mean) / std).to(torch.float32)
    labels = torch.from_numpy(bunch.target.astype(np.int64))
    return Dataset(
        name="breast-cancer",
        train=TensorSamples(rows[train], labels[train]),
        test=TensorSamples(rows[test], labels[test]),
        num_classes=2,
        input_shape=(30,),
        class_names=tuple(map(str, bunch.target_names)),
        model="mlp",
    )


def fixed_split(labels: Any, test_size: float) -> tuple[Array, Array]:
    """Return the positions of a stratified training and test part of ``labels`` (n,), always the same."""
    from sklearn.model_selection import train_test_split

    train, test = train_test_split(np.arange(len(labels)), test_size=test_size, stratify=labels, random_state=0)
    return train, test


def mnist(data_dir: Path | None = None) -> Dataset:
    """Return MNIST: (1, 28, 28), 10 classes, 60,000 + 10,000 images.

    :raises DataError: files are missing and cannot be downloaded, or they are damaged.
    """
    train, test = _read_idx("mnist", "MNIST", ("train", "t10k"), data_dir)
    names = tuple(str(digit) for digit in range(10))
    return assemble("mnist", train, test, stats=((0.1307,), (0.3081,)), class_names=names)


def fashion_mnist(data_dir: Path | None = None) -> Dataset:
    """Return Fashion-MNIST: (1, 28, 28), 10 classes, 60,000 + 10,000 images.

    :raises DataError: files are missing and cannot be downloaded, or they are damaged.
    """
    train, test = _read_idx("fashion-mnist", "FashionMNIST", ("train", "t10k"), data_dir)
    names = tuple(load_torchvision().datasets.FashionMNIST.classes)
    return assemble("fashion-mnist", train, test, stats=((0.2860,), (0.3530,)), class_names=names)


def emnist(data_dir: Path | None = None) -> Dataset:
    """Return the letters of EMNIST: (1, 28, 28), 26 classes, 124,800 + 20,800 images.

    :raises DataError: files are missing and cannot be downloaded, or they are damaged.
    """
    # The files count the letters from 1.
    return _emnist("emnist", "letters", ascii_lowercase, data_dir, first=1)


def emnist_balanced(data_dir: Path | None = None) -> Dataset:
    """Return EMNIST's balanced split: (1, 28, 28), 47 classes, 112,800 + 18,800 images.

    Digits and letters, upper and lower case; a letter whose cases look alike is one class, with the name in upper case.

    :raises DataError: files are missing and cannot be downloaded, or they are damaged.
    """
    return _emnist("emnist-balanced", "balanced", BALANCED_CLASSES, data_dir, first=0)


def _emnist(name: str, split: str, class_names: str, data_dir: Path | None, *, first: int) -> Dataset:
    """Read a split of EMNIST, whose files hold every image transposed and count the classes from ``first``."""
    prefixes = (f"emnist-{split}-train", f"emnist-{split}-test")
    last = first + len(class_names) - 1
    train, test = (
        Split(part.images.transpose(2, 3).contiguous(), part.labels - first)
        for part in _read_idx(name, "EMNIST", prefixes, data_dir, first=first, last=last, split=split)
    )
    return assemble(name, train, test, class_names=tuple(class_names))


def cifar10(data_dir: Path | None = None) -> Dataset:
    """Return CIFAR-10: (3, 32, 32), 10 classes, from ``cifar10.npz`` in the directory or by torchvision.

    :raises DataError: files are missing and cannot be downloaded, or they are damaged.
    """
    train, test, _ = _read_cifar("cifar10", "CIFAR10", 10, data_dir)
    mean = (125.3 / 255, 123.0 / 255, 113.9 / 255)
    std = (63.0 / 255, 62.1 / 255, 66.7 / 255)
    return assemble(
        "cifar10",
        train,
        test,
        stats=(mean, std),
        num_classes=10,
        class_names=_CIFAR10_CLASSES,
        augmentation="cifar10",
    )


def cifar100(data_dir: Path | None = None) -> Dataset:
    """Return CIFAR-100: (3, 32, 32), 100 classes, from ``cifar100.npz`` in the directory or by torchvision.

    :raises DataError: files are missing and cannot be downloaded, or they are damaged.
    """
    train, test, class_names = _read_cifar("cifar100", "CIFAR100", 100, data_dir)
    mean = (0.50707516, 0.48654887, 0.44091784)
    std = (0.26733429, 0.25643846, 0.27615047)
    return assemble(
        "cifar100",
        train,
        test,
        stats=(mean, std),
        num_classes=100,
        class_names=class_names,
        augmentation="cifar100",
    )


def _read_idx(
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
        with _explained_download(name, expected):
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
                raise ValueError(f"labels {span(labels)}, expected {first}..{last}")
        except Exception as error:  # a damaged file may raise anything in the parser
            raise DataError(
                f"{name}: {image_file} and {label_file} cannot be used: {error or type(error).__name__}. "
                "Delete them to download again, or replace them by the official files (unpacked)."
            ) from error
        splits.append(Split(images.unsqueeze(1), labels))
    return splits[0], splits[1]


def _read_cifar(
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
            if int(split.labels.max()) >= num_classes:
                raise DataError(f"{archive}: labels {span(split.labels)}, expected 0..{num_classes - 1}")
        return train, test, None
    base = getattr(load_torchvision().datasets, reader)
    parts = [root / base.base_folder / file for file, _ in (*base.train_list, *base.test_list)]
    expected = [
        f"{archive} (x_train, y_train, x_test, y_test)",
        f"or torchvision's {root / base.base_folder}/",
    ]
    with _explained_download(name, expected):
        missing = not all(part.is_file() for part in parts)
        sets = [base(str(root), train=train, download=missing and train) for train in (True, False)]
    splits = [
        Split(
            torch.from_numpy(np.ascontiguousarray(s.data.transpose(0, 3, 1, 2))),
            torch.tensor(s.targets, dtype=torch.int64),
        )
        for s in sets
    ]
    return splits[0], splits[1], tuple(sets[0].classes)


@contextlib.contextmanager
def _explained_download(name: str, expected: Sequence[str]) -> Iterator[None]:
    """Turn any error of a torchvision download into a DataError with advice, and remove empty folders."""
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
