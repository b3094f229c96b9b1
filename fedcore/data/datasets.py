"""Image data sets: scikit-learn's digits, torchvision's sets, and the user's own files.

A loader (entry-point group ``fedcore.datasets``) takes the data directory, None for the default, and returns
a :class:`~fedcore.data.samples.Dataset`.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcore.data.samples import Dataset, ResidentSamples
from fedcore.errors import DataError, PluginContractError
from fedcore.registry import resolve
from fedcore.vision import load_torchvision

Array: TypeAlias = npt.NDArray[Any]

_CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_DOWNLOAD_TIMEOUT = 15.0  # seconds without an answer; torchvision sets none and could hang behind a firewall
_LAYOUT_HINT = (
    "Run once with network access (torchvision downloads them), copy the files there by hand (unpacked), or "
    "point --data-dir (or FEDCORE_DATA) to a directory laid out like that."
)


class _Split(NamedTuple):
    """Images (n, C, H, W), uint8 or float32 and not normalised, and labels (n,) int64."""

    images: Tensor
    labels: Tensor


def load_dataset(spec: str, data_dir: Path | None = None) -> Dataset:
    """Return the data set ``spec``: a name, ``npz:FILE`` or ``imagefolder:DIR``.

    :raises UnknownNameError: nobody provides the name.
    :raises DataError: files are missing or damaged.
    """
    kind, _, rest = spec.partition(":")
    if kind == "npz":
        return npz(Path(rest).expanduser())
    if kind == "imagefolder":
        return imagefolder(Path(rest).expanduser())
    loader: Callable[[Path | None], Dataset] = resolve("dataset", spec)
    dataset = loader(data_dir)
    if not isinstance(dataset, Dataset):
        raise PluginContractError(f"data set {spec!r}: its loader returned {type(dataset).__name__}, not Dataset")
    return dataset


def default_data_dir() -> Path:
    """Return the directory named by FEDCORE_DATA, else ``~/.cache/fedcore/data``."""
    named = os.environ.get("FEDCORE_DATA")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "fedcore" / "data"


def digits(data_dir: Path | None = None) -> Dataset:
    """Return scikit-learn's bundled digits: (1, 8, 8), 10 classes, 1437 to train and 360 to test.

    The split is stratified and fixed; it does not depend on the run's seed.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    images = torch.from_numpy(bunch.images / 16.0).to(torch.float32).unsqueeze(1)
    labels = torch.from_numpy(bunch.target.astype(np.int64))
    train, test = (
        torch.from_numpy(part)
        for part in train_test_split(np.arange(len(labels)), test_size=0.2, stratify=bunch.target, random_state=0)
    )
    return _dataset(
        "digits",
        _Split(images[train], labels[train]),
        _Split(images[test], labels[test]),
        class_names=tuple(str(digit) for digit in range(10)),
    )


def mnist(data_dir: Path | None = None) -> Dataset:
    """Return MNIST: (1, 28, 28), 10 classes, 60,000 + 10,000 images.

    :raises DataError: files are missing and cannot be downloaded, or they are damaged.
    """
    train, test = _read_idx("mnist", "MNIST", ("train", "t10k"), data_dir)
    names = tuple(str(digit) for digit in range(10))
    return _dataset("mnist", train, test, stats=((0.1307,), (0.3081,)), class_names=names)


def fashion_mnist(data_dir: Path | None = None) -> Dataset:
    """Return Fashion-MNIST: (1, 28, 28), 10 classes, 60,000 + 10,000 images.

    :raises DataError: files are missing and cannot be downloaded, or they are damaged.
    """
    train, test = _read_idx("fashion-mnist", "FashionMNIST", ("train", "t10k"), data_dir)
    names = tuple(load_torchvision().datasets.FashionMNIST.classes)
    return _dataset("fashion-mnist", train, test, stats=((0.2860,), (0.3530,)), class_names=names)


def emnist(data_dir: Path | None = None) -> Dataset:
    """Return the letters of EMNIST: (1, 28, 28), 26 classes, 124,800 + 20,800 images.

    :raises DataError: files are missing and cannot be downloaded, or they are damaged.
    """
    prefixes = ("emnist-letters-train", "emnist-letters-test")
    # The files hold every image transposed, and count the letters from 1.
    train, test = (
        _Split(split.images.transpose(2, 3).contiguous(), split.labels - 1)
        for split in _read_idx("emnist", "EMNIST", prefixes, data_dir, first=1, last=26, split="letters")
    )
    return _dataset("emnist", train, test, class_names=tuple("abcdefghijklmnopqrstuvwxyz"))


def cifar10(data_dir: Path | None = None) -> Dataset:
    """Return CIFAR-10: (3, 32, 32), 10 classes, from ``cifar10.npz`` in the directory or by torchvision.

    :raises DataError: files are missing and cannot be downloaded, or they are damaged.
    """
    train, test, _ = _read_cifar("cifar10", "CIFAR10", 10, data_dir)
    mean = (125.3 / 255, 123.0 / 255, 113.9 / 255)
    std = (63.0 / 255, 62.1 / 255, 66.7 / 255)
    return _dataset(
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
    return _dataset(
        "cifar100",
        train,
        test,
        stats=(mean, std),
        num_classes=100,
        class_names=class_names,
        augmentation="cifar100",
    )


def npz(path: Path) -> Dataset:
    """Return the user's own images: x_train, y_train, x_test, y_test in one ``.npz`` file.

    x is (n, H, W), (n, H, W, C) or (n, C, H, W) with up to 4 channels (the last axis is tried first), uint8
    (then divided by 255) or floating point; y is (n,) integers, 0..C-1 for C classes. Normalised by the
    training images' mean and standard deviation.

    :raises DataError: the file is missing, damaged or something else.
    """
    train, test = _read_npz(path)
    if train.images.dtype != test.images.dtype:
        raise DataError(f"{path}: x_train and x_test must have the same type, both uint8 or both floating point")
    found = torch.unique(train.labels)
    if not torch.equal(found, torch.arange(len(found))) or int(test.labels.max()) >= len(found):
        raise DataError(
            f"{path}: labels must be 0..C-1 with every class in y_train; found {_span(train.labels)} "
            f"({len(found)} different ones) in y_train and {_span(test.labels)} in y_test. Renumber them, "
            "for instance with numpy.unique(y_train, return_inverse=True) and numpy.searchsorted for y_test."
        )
    return _dataset(f"npz:{path.name}", train, test)


def imagefolder(path: Path) -> Dataset:
    """Return images in one folder per class: ``train/CLASS/*`` and ``test/CLASS/*`` or ``val/CLASS/*``.

    All images must have one size; they are read as RGB and normalised to -1..1, as MOON does for
    Tiny-ImageNet, whose own layout (``val/images`` with ``val/val_annotations.txt``) is understood too.

    :raises DataError: folders or images are missing, damaged or of different sizes.
    """
    if not (path / "train").is_dir():
        raise DataError(f"imagefolder: {path / 'train'} is not a directory; expected train/ and test/ or val/ in it")
    train_files, names = _class_folders(path / "train")
    annotations = path / "val" / "val_annotations.txt"
    if annotations.is_file():
        test_files = _annotated_files(annotations)
    else:
        held_out = next((path / name for name in ("test", "val") if (path / name).is_dir()), None)
        if held_out is None:
            raise DataError(f"imagefolder: neither test/ nor val/ in {path}; one of them is the test set")
        test_files, _ = _class_folders(held_out)
    strange = sorted({label for _, label in test_files} - set(names))
    if strange:
        raise DataError(f"imagefolder: {path}: class {strange[0]!r} of the test images has no folder in train/")
    number = {name: k for k, name in enumerate(names)}
    train, test = (
        _Split(_decode([file for file, _ in files]), torch.tensor([number[label] for _, label in files]))
        for files in (train_files, test_files)
    )
    half = (0.5, 0.5, 0.5)
    return _dataset(
        f"imagefolder:{path.resolve().name}",
        train,
        test,
        stats=(half, half),
        num_classes=len(names),
        class_names=tuple(names),
    )


def _dataset(
    name: str,
    train: _Split,
    test: _Split,
    *,
    stats: tuple[Sequence[float], Sequence[float]] | None = None,
    num_classes: int | None = None,
    class_names: tuple[str, ...] | None = None,
    augmentation: str | None = None,
) -> Dataset:
    """Normalise, by the training images' own statistics unless others are given, and put together."""
    if train.images.shape[1:] != test.images.shape[1:]:
        raise DataError(
            f"{name}: training images are {tuple(train.images.shape[1:])} (C, H, W), "
            f"test images {tuple(test.images.shape[1:])}: bring them to one size"
        )
    mean, std = stats or _channel_stats(train.images)
    samples = [ResidentSamples.from_pixels(*split, mean, std) for split in (train, test)]
    return Dataset(
        name=name,
        train=samples[0],
        test=samples[1],
        num_classes=num_classes or (len(class_names) if class_names else int(train.labels.max()) + 1),
        input_shape=tuple(train.images.shape[1:]),
        class_names=class_names,
        augmentation=augmentation,
    )


def _channel_stats(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel, of [0, 1] brightness for uint8 images.

    In double precision by NumPy, which adds in a fixed order: the numbers do not depend on the threads.
    """
    means, stds = [], []
    for channel in images.unbind(dim=1):
        if channel.dtype == torch.uint8:
            weights = np.bincount(channel.numpy().ravel(), minlength=256) / channel.numel()
            values = np.arange(256) / 255
            mean = float(weights @ values)
            std = float(np.sqrt(weights @ (values - mean) ** 2))
        else:
            array = channel.numpy()
            mean, std = float(array.mean(dtype=np.float64)), float(array.std(dtype=np.float64))
        means.append(mean)
        stds.append(std or 1.0)  # a channel of one value: nothing to scale
    return tuple(means), tuple(stds)


def _read_idx(
    name: str,
    reader: str,
    prefixes: tuple[str, str],
    data_dir: Path | None,
    *,
    first: int = 0,
    last: int = 9,
    **options: str,
) -> tuple[_Split, _Split]:
    """Read the IDX files of a MNIST-like set (training, test), after fetching what is not there."""
    root = data_dir or default_data_dir()
    raw = root / reader / "raw"
    files = [(raw / f"{p}-images-idx3-ubyte", raw / f"{p}-labels-idx1-ubyte") for p in prefixes]
    torchvision = load_torchvision()
    if not all(file.is_file() for pair in files for file in pair):
        # torchvision would prefer a processed/*.pt of old over the raw files; we read raw files only.
        base = getattr(torchvision.datasets, reader)
        fetcher = type(reader, (base,), {"_check_legacy_exist": lambda self: False})
        expected = [str(file) for pair in files for file in pair]
        with _explained_download(name, expected):
            fetcher(str(root), download=True, **options)
            if not all(Path(file).is_file() for file in expected):
                raise FileNotFoundError("the download did not bring all of them")
    splits = []
    for image_file, label_file in files:
        try:
            images = torchvision.datasets.mnist.read_image_file(str(image_file))
            labels = torchvision.datasets.mnist.read_label_file(str(label_file))
            if not images.shape[0] or images.shape[1:] != (28, 28) or len(labels) != len(images):
                raise ValueError(f"{tuple(images.shape)} images and {len(labels)} labels")
            if int(labels.min()) < first or int(labels.max()) > last:
                raise ValueError(f"labels {_span(labels)}, expected {first}..{last}")
        except Exception as error:  # what a damaged file provokes in the parser is anybody's guess
            raise DataError(
                f"{name}: {image_file} and {label_file} cannot be used: {error or type(error).__name__}. "
                "Delete them to download again, or replace them by the official files (unpacked)."
            ) from error
        splits.append(_Split(images.unsqueeze(1), labels))
    return splits[0], splits[1]


def _read_cifar(
    name: str, reader: str, num_classes: int, data_dir: Path | None
) -> tuple[_Split, _Split, tuple[str, ...] | None]:
    """Read a CIFAR set from ``name.npz``, else by torchvision; third, its class names if they are there."""
    root = data_dir or default_data_dir()
    archive = root / f"{name}.npz"
    if archive.is_file():
        train, test = _read_npz(archive)
        for split in (train, test):
            if split.images.dtype != torch.uint8 or split.images.shape[1:] != (3, 32, 32):
                raise DataError(f"{archive}: x_train and x_test must be uint8 of shape (n, 32, 32, 3)")
            if int(split.labels.max()) >= num_classes:
                raise DataError(f"{archive}: labels {_span(split.labels)}, expected 0..{num_classes - 1}")
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
        _Split(
            torch.from_numpy(np.ascontiguousarray(s.data.transpose(0, 3, 1, 2))),
            torch.tensor(s.targets, dtype=torch.int64),
        )
        for s in sets
    ]
    return splits[0], splits[1], tuple(sets[0].classes)


@contextlib.contextmanager
def _explained_download(name: str, expected: Sequence[str]) -> Iterator[None]:
    """Turn whatever goes wrong while torchvision fetches a set into instructions for the user."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_DOWNLOAD_TIMEOUT)
    try:
        yield
    except Exception as error:  # network, proxy, disk, md5, archive: all end in the same advice
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"{name}: data files are missing or not the official ones, and torchvision could not get them "
            f"({reason}). Expected: {', '.join(expected)}. {_LAYOUT_HINT}"
        ) from error
    finally:
        socket.setdefaulttimeout(before)


def _read_npz(path: Path) -> tuple[_Split, _Split]:
    if not path.is_file():
        raise DataError(
            f"npz: {path} does not exist; expected a file written by numpy.savez with the arrays "
            "x_train, y_train, x_test, y_test"
        )
    keys = ("x_train", "y_train", "x_test", "y_test")
    try:
        content = np.load(path, allow_pickle=False)
        if not isinstance(content, np.lib.npyio.NpzFile):
            raise ValueError("a single array, not an archive made by numpy.savez")
        with content:
            absent = [key for key in keys if key not in content]
            if absent:
                raise ValueError(f"without {', '.join(absent)} (it has {', '.join(content) or 'nothing'})")
            x_train, y_train, x_test, y_test = (content[key] for key in keys)
    except Exception as error:  # zip, zlib, header parser, memory: a stranger's file can provoke anything
        raise DataError(
            f"{path} is not a usable .npz file: {error or type(error).__name__}. It must hold "
            f"{', '.join(keys)} as plain arrays (no Python objects)."
        ) from error
    return (
        _Split(_images_from_array(x_train, f"{path}: x_train"), _labels_from_array(y_train, x_train, path)),
        _Split(_images_from_array(x_test, f"{path}: x_test"), _labels_from_array(y_test, x_test, path)),
    )


def _images_from_array(x: Array, where: str) -> Tensor:
    """Return (n, C, H, W), uint8 or float32."""
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and 1 <= x.shape[3] <= 4:
        x = x.transpose(0, 3, 1, 2)
    elif x.ndim != 4 or not 1 <= x.shape[1] <= 4:
        raise DataError(f"{where}: shape {x.shape}; expected (n, H, W), (n, H, W, C) or (n, C, H, W), C up to 4")
    if not x.size:
        raise DataError(f"{where}: shape {x.shape} holds no pixels")
    if x.dtype != np.uint8:
        if x.dtype.kind != "f":
            raise DataError(f"{where}: type {x.dtype}; convert it to uint8 (0..255) or to floating point")
        with np.errstate(over="ignore"):
            x = x.astype(np.float32)
        if not np.isfinite(x).all():
            raise DataError(f"{where}: holds numbers that are not finite in float32")
    return torch.from_numpy(np.ascontiguousarray(x))


def _labels_from_array(y: Array, x: Array, path: Path) -> Tensor:
    if y.ndim == 2 and y.shape[1] == 1:  # the shape Keras gives CIFAR labels
        y = y[:, 0]
    if y.shape != x.shape[:1] or y.dtype.kind not in "iu":
        raise DataError(
            f"{path}: labels must be integers of shape ({len(x)},), one for each image, "
            f"not {y.dtype} of shape {y.shape}"
        )
    if int(y.min()) < 0 or int(y.max()) >= 2**31:
        raise DataError(f"{path}: labels must be 0..C-1; found {int(y.min())}..{int(y.max())}")
    return torch.from_numpy(y.astype(np.int64))


def _class_folders(folder: Path) -> tuple[list[tuple[Path, str]], list[str]]:
    """Return torchvision's view of a folder: (file, class name) in order, and the sorted class names."""
    try:
        found = load_torchvision().datasets.ImageFolder(str(folder))
    except OSError as error:
        raise DataError(f"imagefolder: {folder} must hold one folder of images per class: {error}") from error
    return [(Path(file), found.classes[label]) for file, label in found.samples], list(found.classes)


def _annotated_files(annotations: Path) -> list[tuple[Path, str]]:
    """Return (file, class name) of Tiny-ImageNet's validation images: lines "file TAB class TAB box"."""
    try:
        lines = annotations.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise DataError(f"imagefolder: cannot read {annotations}: {error}") from error
    rows = [line.split("\t") for line in lines if line.strip()]
    # Only the last part of the name: an annotation must not lead out of the folder.
    if not rows or any(len(row) < 2 or Path(row[0]).name != row[0] for row in rows):
        raise DataError(f'imagefolder: {annotations} must hold lines "file TAB class ..."')
    return [(annotations.parent / "images" / row[0], row[1]) for row in rows]


def _decode(files: Sequence[Path]) -> Tensor:
    """Return the images as (n, 3, H, W) uint8, read by torchvision's default loader."""
    loader = load_torchvision().datasets.folder.default_loader

    def read(file: Path) -> Array:
        try:
            return np.asarray(loader(str(file)), dtype=np.uint8).transpose(2, 0, 1)
        except Exception as error:  # Pillow's decoders raise what they like on damaged files
            raise DataError(f"imagefolder: cannot read {file}: {error}") from error

    height, width = read(files[0]).shape[1:]
    images = np.empty((len(files), 3, height, width), dtype=np.uint8)

    def put(position: int) -> None:
        image = read(files[position])
        if image.shape[1:] != (height, width):
            raise DataError(
                f"imagefolder: {files[position]} is {image.shape[2]}x{image.shape[1]}, but {files[0]} is "
                f"{width}x{height}: resize all images to one size first"
            )
        images[position] = image

    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        for _ in pool.map(put, range(len(files))):
            pass
    return torch.from_numpy(images)


def _span(labels: Tensor) -> str:
    return f"{int(labels.min())}..{int(labels.max())}"
