"""The same classes in several domains, such as photos and sketches: data sets, and partitions by domain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from fedcore import ConfigError, DataError, generator, numpy_generator
from fedcore.data import (
    Dataset,
    Domains,
    IntArray,
    Split,
    assemble,
    checked_labels,
    default_data_dir,
    dirichlet,
    find_data,
    iid,
)
from fedcore_zoo.image_folder import check_listed, class_folders, decoded, is_folder, split_options
from fedcore_zoo.query import MOVED

Array: TypeAlias = npt.NDArray[Any]

Parts: TypeAlias = dict[str, Array]
"""The positions of each client, by its name: that of its domain, with a number if the domain has several clients."""

TEST_SHARE = 0.2
"""The share of each class of a domain that becomes the test set, if the data set has no lists of its own."""

FEDBN_CLASSES = (
    "bird",
    "feather",
    "headphones",
    "ice_cream",
    "teapot",
    "tiger",
    "whale",
    "windmill",
    "wine_glass",
    "zebra",
)
"""The ten classes of DomainNet on which FedBN (Li et al., ICLR 2021) is evaluated."""


def domain_folders(name: str) -> Callable[[Path | None], Dataset]:
    """Images in a folder per domain and class: ``domains:DIR`` with DOMAIN/CLASS/*, as PACS, Office-Home, DomainNet.

    ``domains:DIR?size=64&classes=dog,horse``: the side to which images are resized, and the classes that are read;
    ``classes=fedbn`` are FedBN's ten of DomainNet.
    """
    folder, size, options = split_options(f"domains:{name}", ("size", "classes"))
    asked = options.get("classes")
    classes = FEDBN_CLASSES if asked == "fedbn" else tuple(asked.split(",")) if asked else None
    return lambda data_dir: read_domains(find_data(folder, data_dir), size=size or 64, classes=classes)


def read_domains(path: Path, *, size: int = 64, classes: Sequence[str] | None = None) -> Dataset:
    """Return images in one folder per domain and class, resized to ``size`` x ``size`` and normalised to -1..1.

    Where the folder has ``DOMAIN_train.txt`` and ``DOMAIN_test.txt`` with lines "path label", as DomainNet has, these
    lists are the training and the test set. Otherwise a fifth of each class of a domain, drawn with a fixed seed, is
    the test set, as these data sets have none. Only regular files below ``path`` are read, no links.

    :param classes: the classes that are read; default all.
    :raises DataError: there are fewer than two domains, a class is missing everywhere or asked for twice, or an image
        is in both lists or cannot be read.
    """
    if not path.is_dir():
        raise DataError(
            f"domains: {path} is not a directory; expected a folder per domain, with a folder per class. {MOVED}"
        )
    folders = sorted(f for f in path.iterdir() if is_folder(f) and f.name[0] != "." and any(f.glob("*/*")))
    if len(folders) < 2:
        raise DataError(f"domains: {path} must hold at least two folders DOMAIN/CLASS/* of images")
    files_of: dict[str, tuple[Files, Files]] = {}
    links = sorted(f.name for f in path.iterdir() if f.is_symlink() and f.is_dir())
    notes: tuple[str, ...] = (f"{path}: links to folders left out: {', '.join(links)}",) if links else ()
    for folder in folders:
        parts_of = _listed(path, folder.name)
        if parts_of is None:
            files, _, more = class_folders(folder, "domains")
            parts_of, notes = _drawn(files), notes + more
        files_of[folder.name] = parts_of
    names = sorted({label for parts in files_of.values() for files in parts for _, label in files})
    if classes is not None:
        if missing := sorted(set(classes) - set(names)):
            raise DataError(f"domains: {path}: no domain has the class {missing[0]!r}")
        if len(set(classes)) < len(classes):
            raise DataError(f"domains: classes={','.join(classes)} names a class twice")
        names = list(classes)
    number = {name: k for k, name in enumerate(names)}
    parts = []
    for part in (0, 1):
        rows = [
            (file, number[label], domain)
            for domain, folder in enumerate(folders)
            for file, label in files_of[folder.name][part]
            if label in number
        ]
        images = decoded([file for file, _, _ in rows], size, where="domains")
        labels, domains = (torch.tensor([row[column] for row in rows], dtype=torch.int64) for column in (1, 2))
        parts.append((Split(images, labels), domains))
    (train, of_train), (test, of_test) = parts
    half = (0.5, 0.5, 0.5)
    dataset = assemble(
        f"domains:{path.resolve().name}", train, test, stats=(half, half), class_names=tuple(names), notes=notes
    )
    return _with_domains(dataset, [folder.name for folder in folders], of_train, of_test)


def _with_domains(dataset: Dataset, names: Sequence[str], train: Tensor, test: Tensor) -> Dataset:
    """Return a data set with its domains, which are also the sources of its samples."""
    lacking = [
        f"{name} lacks {dataset.class_names[k] if dataset.class_names else k}"
        for domain, name in enumerate(names)
        for k in sorted(set(range(dataset.num_classes)) - set(dataset.train.labels[train == domain].tolist()))
    ]
    more = f" and {len(lacking) - 5} more" if len(lacking) > 5 else ""
    notes = [f"domains without some classes: {', '.join(lacking[:5])}{more}"] if lacking else []
    if untested := sorted(set(range(len(names))) - set(test.tolist())):
        notes.append(f"domains without test images, which have no accuracy: {', '.join(names[k] for k in untested)}")
    domains = Domains(tuple(names), train, test)
    dataset = replace(dataset, sources=train, source_names=tuple(names), domains=domains)
    return replace(dataset, notes=(*dataset.notes, *notes))


Files: TypeAlias = list[tuple[Path, str]]
"""Pairs of a file and the name of its class."""


def _listed(path: Path, domain: str) -> tuple[Files, Files] | None:
    """Return the training and the test files that a domain's lists name; None if it has no lists."""
    lists = [path / f"{domain}_{part}.txt" for part in ("train", "test")]
    if not all(file.is_file() for file in lists):
        return None
    parts: list[Files] = []
    for file in lists:
        entries = [line.rsplit(" ", 1)[0] for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        for entry in entries:
            steps = Path(entry).parts
            if len(steps) != 3 or steps[0] != domain:
                raise DataError(f'domains: {file}: {entry!r} is not "{domain}/CLASS/FILE label"')
        parts.append([(path / entry, Path(entry).parts[1]) for entry in entries])
    check_listed([file for part in parts for file, _ in part], path, f"domains: {domain}_train.txt and {lists[1].name}")
    return parts[0], parts[1]


def _drawn(files: Files) -> tuple[Files, Files]:
    """Split a domain's files: of each class a fifth, at least one if it has two, is the test set."""
    train: Files = []
    test: Files = []
    by_class: dict[str, Files] = {}
    for pair in files:
        by_class.setdefault(pair[1], []).append(pair)
    for label, own in sorted(by_class.items()):
        order = torch.randperm(len(own), generator=generator(0, f"domains/{label}")).tolist()
        count = max(round(TEST_SHARE * len(own)), min(1, len(own) - 1))
        test += [own[k] for k in sorted(order[:count])]
        train += [own[k] for k in sorted(order[count:])]
    return train, test


DIGITS_FIVE: Mapping[str, tuple[str, ...]] = {
    "mnist": ("mnist_data.mat",),
    "mnistm": ("mnistm_with_label.mat",),
    "svhn": ("svhn_train_32x32.mat", "svhn_test_32x32.mat"),
    "syn": ("syn_number.mat",),
    "usps": ("usps_28x28.mat",),
}
"""The domains of Digits-Five, each with its published files."""


def digits_five(data_dir: Path | None) -> Dataset:
    """Digits-Five: MNIST, MNIST-M, SVHN, synthetic digits and USPS, 3x32x32, from the published files (Digit-Five/).

    :raises DataError: a file is missing or of another form, or holds labels or pixels that no digit has.
    """
    root = (data_dir or default_data_dir()) / "Digit-Five"
    parts: dict[str, list[tuple[Array, Array]]] = {}
    for domain, files in DIGITS_FIVE.items():
        contents = [_mat(root / file) for file in files]
        try:
            parts[domain] = [_checked(*_digits(domain, contents, part), part) for part in ("train", "test")]
        except (KeyError, IndexError, ValueError) as error:
            raise DataError(f"digits-five: {root / files[0]} is not the published file: {error!r}") from error
    numbers = torch.arange(len(parts))
    splits, domains = [], []
    for part in (0, 1):
        images = torch.cat([_in_32(torch.from_numpy(x)) for x, _ in (own[part] for own in parts.values())])
        labels = torch.from_numpy(np.concatenate([own[part][1] for own in parts.values()]))
        splits.append(Split(images, labels))
        domains.append(numbers.repeat_interleave(torch.tensor([len(own[part][1]) for own in parts.values()])))
    half = (0.5, 0.5, 0.5)
    dataset = assemble("digits-five", splits[0], splits[1], stats=(half, half), num_classes=10)
    return _with_domains(dataset, list(parts), domains[0], domains[1])


def _mat(file: Path) -> dict[str, Any]:
    from scipy.io import loadmat

    if not file.is_file():
        raise DataError(f"digits-five: {file} is missing; put the published .mat files there, or pass --data-dir")
    try:
        variables: dict[str, Any] = loadmat(str(file))
    except Exception as error:  # a damaged file may raise anything in the parser
        raise DataError(f"digits-five: cannot read {file}: {error}") from error
    return variables


def _digits(domain: str, contents: Sequence[Mapping[str, Any]], part: str) -> tuple[Array, Array]:
    """Return the images (n, H, W, 1 or 3), from 0 to 255, and the labels, (n,) or one-hot (n, 10), of one part."""
    first = contents[0]
    if domain == "mnist":
        images = first[f"{part}_32"]
        return images.reshape(len(images), 32, 32, 1), first[f"label_{part}"]
    if domain == "mnistm":
        return first[part], first[f"label_{part}"]
    if domain == "svhn":
        own = contents[("train", "test").index(part)]
        return own["X"].transpose(3, 0, 1, 2), own["y"].reshape(-1)
    if domain == "syn":
        return first[f"{part}_data"], first[f"{part}_label"].reshape(-1)
    images, labels = first["dataset"][("train", "test").index(part)]
    return (images * 255).transpose(0, 2, 3, 1), labels.reshape(-1)


def _checked(images: Array, labels: Array, part: str) -> tuple[Array, Array]:
    """Return images as uint8, and labels or their one-hot rows as digits (n,) int64. SVHN writes 10 for 0.

    :raises ValueError: they are not as many, pixels are not from 0 to 255, or labels are no digits.
    """
    if len(images) != len(labels) or not len(images):
        raise ValueError(f"{part}: {len(images)} images and {len(labels)} labels")
    # Comparisons with NaN are false. usps holds brightness in float: 0 and 1 may be a rounding away from 0 and 255.
    if not (images.min() > -1 and images.max() < 256):
        raise ValueError(f"{part}: pixels from {images.min()} to {images.max()}, expected 0 to 255")
    if labels.ndim == 2:
        if labels.shape[1] != 10 or not (np.sort(labels, axis=1) == np.eye(10)[-1]).all():
            raise ValueError(f"{part}: labels of shape {labels.shape} are not one-hot rows of ten digits")
        labels = labels.argmax(axis=1)
    digits = np.isin(labels, np.arange(11))
    if not digits.all():
        raise ValueError(f"{part}: {(~digits).sum()} labels are no digits, such as {labels[~digits][0]}")
    return images.astype(np.uint8), labels.astype(np.int64) % 10


def _in_32(images: Tensor) -> Tensor:
    """Return images (n, H, W, C) uint8 as (n, 3, 32, 32) uint8."""
    images = images.permute(0, 3, 1, 2)
    if images.shape[2:] != (32, 32):
        resized = F.interpolate(images.float(), (32, 32), mode="bilinear", antialias=True)
        images = resized.round_().clamp_(0, 255).to(torch.uint8)
    return images.expand(-1, 3, -1, -1).contiguous()


def domain(labels: IntArray, num_clients: int, *, seed: int, dataset: Dataset, rows: IntArray, **_: Any) -> Parts:
    """Give each client samples of one domain; the clients of a domain share its samples evenly and at random.

    :raises ConfigError: the data set has no domains, or there are more domains than clients.
    """
    return _inside(iid, labels, num_clients, seed=seed, dataset=dataset, rows=rows)


def domain_dirichlet(
    labels: IntArray, num_clients: int, *, alpha: float, seed: int, dataset: Dataset, rows: IntArray, **more: Any
) -> Parts:
    """Give each client samples of one domain; the clients of a domain split its classes by Dirichlet(alpha).

    :raises ConfigError: the data set has no domains, or there are more domains than clients.
    """
    how = {"alpha": alpha, **more}
    return _inside(dirichlet, labels, num_clients, seed=seed, dataset=dataset, rows=rows, **how)


def _inside(
    scheme: Callable[..., list[Array]],
    labels: IntArray,
    num_clients: int,
    *,
    seed: int,
    dataset: Dataset,
    rows: IntArray,
    **how: Any,
) -> Parts:
    """Assign clients to domains in turn, and split the samples of each domain among its clients by a scheme."""
    labels = checked_labels(labels, num_clients)
    if dataset.domains is None:
        raise ConfigError(f"data set {dataset.name!r} has no domains; name another partition")
    of_row = dataset.domains.train.cpu().numpy()[rows]
    present = np.unique(of_row)
    if num_clients < len(present):
        raise ConfigError(
            f"--clients is {num_clients}, but the samples come from {len(present)} domains; take at least as many"
        )
    parts: list[tuple[str, Array]] = [("", np.empty(0, np.int64))] * num_clients
    for turn, number in enumerate(present.tolist()):
        own, clients = np.flatnonzero(of_row == number), range(turn, num_clients, len(present))
        name = dataset.domains.names[number]
        drawn = int(numpy_generator(seed, f"domain/{name}").integers(1 << 31))
        inside = scheme(labels[own], len(clients), seed=drawn, **how)
        for count, (client, positions) in enumerate(zip(clients, inside, strict=True), start=1):
            parts[client] = name if len(clients) == 1 else f"{name} {count}", own[np.asarray(positions)]
    return dict(parts)
