"""Images of one's own, in one folder per class."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcore import ConfigError, DataError
from fedcore.data import Dataset, Split, assemble, find_data
from fedcore.engines import cores
from fedcore_zoo.groups import numbered_groups
from fedcore_zoo.query import MOVED, name_options
from fedcore_zoo.vision import load_torchvision

Array: TypeAlias = npt.NDArray[Any]


def imagefolder(name: str) -> Callable[[Path | None], Dataset]:
    """Images in a folder: ``imagefolder:DIR`` with train/CLASS/* and test/CLASS/* or val/CLASS/*.

    ``imagefolder:DIR?size=64``: the side to which images are resized. ``?groups=folder``: each class has a folder for
    each group, such as a patient, whose images stay on one side of every split.
    """
    folder, size, options = split_options(f"imagefolder:{name}", ("size", "groups"))
    if (groups := options.get("groups")) not in (None, "folder"):
        raise ConfigError(f"imagefolder:{name}: groups is {groups!r}; expected folder, the level below the classes")
    return lambda data_dir: read_folder(find_data(folder, data_dir), size=size, grouped=groups is not None)


def split_options(name: str, known: Sequence[str]) -> tuple[str, int | None, dict[str, str]]:
    """Return folder, ``size`` and the other options of a name such as ``domains:DIR?size=64&classes=dog,horse``.

    :raises ConfigError: an option is unknown, or size is no number of pixels.
    """
    folder, options = name_options(name, known)
    size = options.pop("size", None)
    if size is not None and not (size.isdecimal() and 1 <= int(size) <= 4096):
        raise ConfigError(f"{name}: size is {size!r}, expected a number of pixels from 1 to 4096")
    return folder, None if size is None else int(size), options


def read_folder(path: Path, *, size: int | None = None, grouped: bool = False) -> Dataset:
    """Return images in one folder per class: ``train/CLASS/*`` and ``test/CLASS/*``. Without ``test`` it is ``val``.

    The images are read as RGB and normalised to -1..1, as MOON does for Tiny-ImageNet. Tiny-ImageNet's own layout, with
    ``val/images`` and ``val/val_annotations.txt``, is also understood. Only regular files below ``path`` are read:
    links are left out and noted.

    :param size: the side to which images are resized; by default all must have one size.
    :param grouped: whether the folders below the classes are groups.
    :raises DataError: folders or images are missing, damaged or of different sizes, or a group is in both parts.
    """
    if not is_folder(path / "train"):
        raise DataError(
            f"imagefolder: {path / 'train'} is not a directory; expected train/ and test/ or val/ in it, no links. "
            + MOVED
        )
    train_files, names, notes = class_folders(path / "train")
    annotations = path / "val" / "val_annotations.txt"
    if annotations.is_file():
        held_out, test_files = annotations.parent, _annotated_files(path, annotations)
    else:
        folders = [path / name for name in ("test", "val") if is_folder(path / name)]
        if not folders:
            raise DataError(f"imagefolder: {path} holds neither test/ nor val/, the folder of the test set, no link")
        held_out = folders[0]
        test_files, _, more = class_folders(held_out)
        notes += more
    strange = sorted({label for _, label in test_files} - set(names))
    if strange:
        raise DataError(f"imagefolder: {path}: class {strange[0]!r} of the test images has no folder in train/")
    number = {name: k for k, name in enumerate(names)}
    train, test = (
        Split(decoded([file for file, _ in files], size), torch.tensor([number[label] for _, label in files]))
        for files in (train_files, test_files)
    )
    used = ("train", held_out.name)
    others = [f"{f.name}/" for f in path.iterdir() if f.is_dir() and f.name[0] != "." and f.name not in used]
    if others:
        notes += (f"{path}: folders not used: {', '.join(map(repr, sorted(others)))}",)
    half = (0.5, 0.5, 0.5)
    dataset = assemble(
        f"imagefolder:{path.resolve().name}",
        train,
        test,
        stats=(half, half),
        class_names=tuple(names),
        notes=notes,
    )
    if not grouped:
        return dataset
    parts = (
        np.array([_group(file, folder) for file, _ in files])
        for files, folder in ((train_files, path / "train"), (test_files, held_out))
    )
    return replace(dataset, groups=numbered_groups(f"imagefolder: {path}", *parts))


def _group(file: Path, folder: Path) -> str:
    """Return the folder of a file below that of its class.

    :raises DataError: the file is in the class's folder itself.
    """
    parts = file.relative_to(folder).parts
    if len(parts) < 3:
        raise DataError(f"imagefolder: {file} is in no folder of a group; ?groups=folder expects CLASS/GROUP/IMAGE")
    return parts[1]


def class_folders(
    folder: Path, where: str = "imagefolder"
) -> tuple[list[tuple[Path, str]], list[str], tuple[str, ...]]:
    """Return a folder's images as (file, class name) in torchvision's order, the sorted class names, and notes.

    Names that begin with a dot are left out. A note counts other files that torchvision does not take for images, links
    and files that are not regular: each sample is one file inside of the folder, and reading it ends.

    :param where: the data set, for the message.
    :raises DataError: it does not hold a folder of images per class.
    """
    suffixes = load_torchvision().datasets.folder.IMG_EXTENSIONS
    known = ", ".join(suffixes)
    others: Counter[str] = Counter()
    names, files = [], []
    try:
        entries = sorted(entry for entry in folder.iterdir() if entry.name[0] != "." and entry.is_dir())
        for entry in entries:
            if entry.is_symlink():
                others["links"] += 1
                continue
            names.append(entry.name)
            for inner in _visible(entry):
                suffix = os.path.splitext(inner.name)[1]
                if inner.is_symlink():
                    others["links"] += 1
                elif not inner.is_file(follow_symlinks=False):
                    others["that are not regular"] += 1
                elif suffix.lower() not in suffixes:
                    others[suffix] += 1
                else:
                    files.append((Path(inner.path), entry.name))
    except OSError as error:
        raise DataError(f"{where}: cannot read {folder}: {error}") from error
    left = ", ".join(f"{count} {kind or 'without a suffix'}" for kind, count in sorted(others.items()))
    empty = sorted({*names} - {name for _, name in files})
    if empty or not names:
        lacking = f"{empty[0]!r} holds none" if empty else "it holds no folder"
        more = f". Left out: {left}; links are not followed, cp -RL copies what they lead to" if left else ""
        raise DataError(f"{where}: {folder} must hold one folder of images ({known}) per class, but {lacking}{more}")
    notes = (f"{folder}: files left out: {left}; images are {known}",) if left else ()
    return files, names, notes


def is_folder(path: Path) -> bool:
    """Return whether there is a folder and no link to one: what it holds would be read twice, or as another class."""
    return path.is_dir() and not path.is_symlink()


def _visible(folder: Path) -> list[os.DirEntry[str]]:
    """Return what lies below a folder in torchvision's order, no folders; leave out names that begin with a dot."""
    places, entries = [str(folder)], []
    while places:
        place = places.pop()
        with os.scandir(place) as scan:
            for entry in scan:
                if entry.name[0] != "." and entry.is_dir(follow_symlinks=False):
                    places.append(entry.path)
                elif entry.name[0] != ".":
                    entries.append((place, entry.name, entry))
    return [entry for _, _, entry in sorted(entries, key=lambda each: each[:2])]


def check_listed(files: Sequence[Path], root: Path, where: str) -> None:
    """Check files below ``root`` that a list names.

    :param where: the list, for the message.
    :raises DataError: a file is named twice, is missing or not regular, or a link leads to it.
    """
    named = Counter(files)
    twice = [file for file, count in named.items() if count > 1]
    if twice:
        raise DataError(f"{where}: {len(twice)} images are named twice, such as {twice[0]}; a sample is one image")
    for folder in sorted({file.parent for file in files}):
        if folder.resolve() != root.resolve() / folder.relative_to(root):
            raise DataError(f"{where}: {folder} is a link or leads out of {root}; links are not followed")
    for file in files:
        try:
            mode = file.lstat().st_mode
        except OSError as error:
            raise DataError(f"{where}: cannot read {file}: {error.strerror}") from error
        if not stat.S_ISREG(mode):
            raise DataError(f"{where}: {file} is a link or not a regular file; links are not followed")


def _annotated_files(root: Path, annotations: Path) -> list[tuple[Path, str]]:
    """Return (file, class name) of Tiny-ImageNet's validation images: lines "file TAB class TAB box"."""
    try:
        lines = annotations.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise DataError(f"imagefolder: cannot read {annotations}: {error}") from error
    rows = [line.split("\t") for line in lines if line.strip()]
    # Only a file name: an annotation must not lead out of the folder.
    if not rows or any(len(row) < 2 or Path(row[0]).name != row[0] for row in rows):
        raise DataError(f'imagefolder: {annotations} must hold lines "file TAB class ..."')
    files = [(annotations.parent / "images" / row[0], row[1]) for row in rows]
    check_listed([file for file, _ in files], root, f"imagefolder: {annotations}")
    return files


def decoded(files: Sequence[Path], size: int | None = None, *, where: str = "imagefolder") -> Tensor:
    """Return the images as (n, 3, H, W) uint8, read by Pillow.

    :param size: the side to which images are resized, with antialiasing; by default all must have one size.
    :param where: the data set, for the message.
    :raises DataError: an image cannot be read, or has another size than the first one.
    """
    from PIL import Image

    def read(file: Path) -> Array:
        try:
            with Image.open(file) as opened:
                if opened.mode.startswith(("I", "F")):  # Pillow would cut their values off at 255
                    raise DataError("more than 8 bits a channel; rescale it to 8 bits, or use npz:FILE with floats")
                if opened.format == "TIFF" and (pages := getattr(opened, "n_frames", 1)) > 1:  # a JPEG has previews
                    raise DataError(f"{pages} pages, of which one would be read; save those to read as files")
                image = opened.convert("RGB")
            image = image if size is None else image.resize((size, size), resample=2)  # bilinear
            return np.asarray(image, dtype=np.uint8).transpose(2, 0, 1)
        except Exception as error:  # Pillow's decoders may raise anything on damaged files
            raise DataError(f"{where}: cannot read {file}: {error}") from error

    height, width = (size, size) if size is not None else read(files[0]).shape[1:]
    images = np.empty((len(files), 3, height, width), dtype=np.uint8)

    def put(position: int) -> None:
        image = read(files[position])
        if image.shape[1:] != (height, width):
            raise DataError(
                f"{where}: {files[position]} is {image.shape[2]}x{image.shape[1]}, but {files[0]} is "
                f"{width}x{height}: resize all images to one size, for example with ?size=64"
            )
        images[position] = image

    with ThreadPoolExecutor(max_workers=min(8, cores())) as pool:
        for _ in pool.map(put, range(len(files))):
            pass
    return torch.from_numpy(images)
