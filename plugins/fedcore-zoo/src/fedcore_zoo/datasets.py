"""The image data sets of the papers, from their official files."""

from __future__ import annotations

from pathlib import Path
from string import ascii_lowercase

from fedcore.data import Dataset, Split, assemble
from fedcore_zoo.official_files import read_cifar, read_idx
from fedcore_zoo.vision import load_torchvision

BALANCED_CLASSES = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt"
"""Classes of EMNIST's balanced split, in the order of its labels."""

_CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


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
