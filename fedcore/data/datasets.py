"""Data sets by name: those bundled with scikit-learn, and torchvision's sets.

A loader (entry-point group ``fedcore.datasets``) takes the data directory, None for the default, and returns
a :class:`~fedcore.data.samples.Dataset`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from string import ascii_lowercase
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from fedcore.base.errors import PluginContractError
from fedcore.base.registry import call, resolve
from fedcore.data.files import imagefolder, npz
from fedcore.data.official_files import expanded, read_cifar, read_idx
from fedcore.data.rows import TensorSamples
from fedcore.data.samples import Dataset
from fedcore.data.split import Split, assemble
from fedcore.data.vision import load_torchvision

Array: TypeAlias = npt.NDArray[Any]

BALANCED_CLASSES = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt"
"""Classes of EMNIST's balanced split, in the order of its labels."""

_CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def load_dataset(spec: str, data_dir: Path | None = None) -> Dataset:
    """Return the data set ``spec``: a name, ``npz:FILE`` or ``imagefolder:DIR``.

    :raises UnknownNameError: no installed package provides the name.
    :raises DataError: files are missing or damaged.
    """
    kind, _, rest = spec.partition(":")
    if kind == "npz":
        return npz(expanded(rest, spec))
    if kind == "imagefolder":
        return imagefolder(expanded(rest, spec))
    loader: Callable[[Path | None], Dataset] = resolve("dataset", spec)
    dataset = call("dataset", spec, loader, data_dir)
    if not isinstance(dataset, Dataset):
        raise PluginContractError.of(spec, f"returned {type(dataset).__name__}", kind="dataset", expected="a Dataset")
    return dataset


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
    train, test = read_idx("mnist", "MNIST", ("train", "t10k"), data_dir)
    names = tuple(str(digit) for digit in range(10))
    return assemble("mnist", train, test, stats=((0.1307,), (0.3081,)), class_names=names)


def fashion_mnist(data_dir: Path | None = None) -> Dataset:
    """Return Fashion-MNIST: (1, 28, 28), 10 classes, 60,000 + 10,000 images.

    :raises DataError: files are missing and cannot be downloaded, or they are damaged.
    """
    train, test = read_idx("fashion-mnist", "FashionMNIST", ("train", "t10k"), data_dir)
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
        for part in read_idx(name, "EMNIST", prefixes, data_dir, first=first, last=last, split=split)
    )
    return assemble(name, train, test, class_names=tuple(class_names))


def cifar10(data_dir: Path | None = None) -> Dataset:
    """Return CIFAR-10: (3, 32, 32), 10 classes, from ``cifar10.npz`` in the directory or by torchvision.

    :raises DataError: files are missing and cannot be downloaded, or they are damaged.
    """
    train, test, _ = read_cifar("cifar10", "CIFAR10", 10, data_dir)
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
    train, test, class_names = read_cifar("cifar100", "CIFAR100", 100, data_dir)
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
