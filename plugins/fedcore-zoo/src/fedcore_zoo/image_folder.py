"""Images of one's own, in one folder per class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import parse_qsl

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcore import ConfigError, DataError
from fedcore.data import Dataset, Split, assemble, find_data
from fedcore.engines import cores
from fedcore_zoo.vision import load_torchvision

Array: TypeAlias = npt.NDArray[Any]


def imagefolder(name: str) -> Callable[[Path | None], Dataset]:
    """Images in a folder: ``imagefolder:DIR`` with train/CLASS/* and test/CLASS/* or val/CLASS/*.

    ``imagefolder:DIR?size=64``: the side to which images are resized.
    """
    folder, size, _ = split_options(f"imagefolder:{name}", ("size",))
    return lambda data_dir: read_folder(find_data(folder, data_dir), size=size)


def split_options(name: str, known: Sequence[str]) -> tuple[str, int | None, dict[str, str]]:
    """Return folder, ``size`` and the other options of a name such as ``domains:DIR?size=64&classes=dog,horse``.

    :raises ConfigError: an option is unknown, or size is no number of pixels.
    """
    folder, _, query = name.partition(":")[2].partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := sorted(set(options) - set(known)):
        raise ConfigError(f"{name}: option {unknown[0]!r} is unknown; there are: {', '.join(known)}")
    size = options.pop("size", None)
    if size is not None and not (size.isdecimal() and 1 <= int(size) <= 4096):
        raise ConfigError(f"{name}: size is {size!r}, expected a number of pixels from 1 to 4096")
    return folder, None if size is None else int(size), options


def read_folder(path: Path, *, size: int | None = None) -> Dataset:
    """Return images in one folder per class: ``train/CLASS/*`` and ``test/CLASS/*``. Without ``test`` it is ``val``.

    The images are read as RGB and normalised to -1..1, as MOON does for Tiny-ImageNet. Tiny-ImageNet's own layout, with
    ``val/images`` and ``val/val_annotations.txt``, is also understood.

    :param size: the side to which images are resized; by default all must have one size.
    :raises DataError: folders or images are missing, damaged or of different sizes.
    """
    if not (path / "train").is_dir():
        raise DataError(f"imagefolder: {path / 'train'} is not a directory; expected train/ and test/ or val/ in it")
    train_files, names, notes = class_folders(path / "train")
    annotations = path / "val" / "val_annotations.txt"
    if annotations.is_file():
        held_out, test_files = annotations.parent, _annotated_files(annotations)
    else:
        folders = [path / name for name in ("test", "val") if (path / name).is_dir()]
        if not folders:
            raise DataError(f"imagefolder: {path} holds neither test/ nor val/, the folder of the test set")
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
    return assemble(
        f"imagefolder:{path.resolve().name}",
        train,
        test,
        stats=(half, half),
        class_names=tuple(names),
        notes=notes,
    )


def class_folders(folder: Path, what: str = "imagefolder") -> tuple[list[tuple[Path, str]], list[str], tuple[str, ...]]:
    """Return a folder's images as (file, class name) in torchvision's order, the sorted class names, and notes.

    Names that begin with a dot are left out. A note counts other files that torchvision does not take for images.

    :param what: what is read, for the message.
    :raises DataError: it does not hold a folder of images per class.
    """
    of_torchvision = load_torchvision().datasets.folder
    known = ", ".join(of_torchvision.IMG_EXTENSIONS)
    others: Counter[str] = Counter()

    def is_image(file: str) -> bool:
        path = Path(file)
        if any(part[0] == "." for part in path.relative_to(folder).parts):
            return False
        taken = path.suffix.lower() in of_torchvision.IMG_EXTENSIONS
        others[path.suffix] += not taken
        return taken

    try:
        names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != ".")
        numbers = {name: number for number, name in enumerate(names)}
        found = of_torchvision.make_dataset(str(folder), numbers, is_valid_file=is_image)
    except (OSError, ValueError) as error:
        raise DataError(f"{what}: {folder} must hold one folder of images ({known}) per class: {error}") from error
    left = ", ".join(f"{count} {suffix or 'without a suffix'}" for suffix, count in sorted(others.items()) if count)
    notes = (f"{folder}: files left out: {left}; images are {known}",) if left else ()
    return [(Path(file), names[label]) for file, label in found], names, notes


def _annotated_files(annotations: Path) -> list[tuple[Path, str]]:
    """Return (file, class name) of Tiny-ImageNet's validation images: lines "file TAB class TAB box"."""
    try:
        lines = annotations.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise DataError(f"imagefolder: cannot read {annotations}: {error}") from error
    rows = [line.split("\t") for line in lines if line.strip()]
    # Only a file name: an annotation must not lead out of the folder.
    if not rows or any(len(row) < 2 or Path(row[0]).name != row[0] for row in rows):
        raise DataError(f'imagefolder: {annotations} must hold lines "file TAB class ..."')
    return [(annotations.parent / "images" / row[0], row[1]) for row in rows]


def decoded(files: Sequence[Path], size: int | None = None, *, what: str = "imagefolder") -> Tensor:
    """Return the images as (n, 3, H, W) uint8, read by Pillow.

    :param size: the side to which images are resized, with antialiasing; by default all must have one size.
    :param what: what is read, for the message.
    :raises DataError: an image cannot be read, or has another size than the first one.
    """
    from PIL import Image

    def read(file: Path) -> Array:
        try:
            with Image.open(file) as opened:
                if opened.mode.startswith(("I", "F")):  # Pillow would cut their values off at 255
                    raise DataError("more than 8 bits a channel; rescale it to 8 bits, or use npz:FILE with floats")
                image = opened.convert("RGB")
            image = image if size is None else image.resize((size, size), resample=2)  # bilinear
            return np.asarray(image, dtype=np.uint8).transpose(2, 0, 1)
        except Exception as error:  # Pillow's decoders may raise anything on damaged files
            raise DataError(f"{what}: cannot read {file}: {error}") from error

    height, width = (size, size) if size is not None else read(files[0]).shape[1:]
    images = np.empty((len(files), 3, height, width), dtype=np.uint8)

    def put(position: int) -> None:
        image = read(files[position])
        if image.shape[1:] != (height, width):
            raise DataError(
                f"{what}: {files[position]} is {image.shape[2]}x{image.shape[1]}, but {files[0]} is "
                f"{width}x{height}: resize all images to one size, for example with ?size=64"
            )
        images[position] = image

    with ThreadPoolExecutor(max_workers=min(8, cores())) as pool:
        for _ in pool.map(put, range(len(files))):
            pass
    return torch.from_numpy(images)
