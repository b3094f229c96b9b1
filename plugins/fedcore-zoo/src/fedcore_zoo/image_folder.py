"""Images of one's own, in one folder per class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcore import DataError
from fedcore.data import Dataset, Split, assemble
from fedcore.engines import cores
from fedcore_zoo.vision import load_torchvision

Array: TypeAlias = npt.NDArray[Any]


def imagefolder(name: str) -> Callable[[Path | None], Dataset]:
    """Images in a folder: ``imagefolder:DIR`` with train/CLASS/* and test/CLASS/* or val/CLASS/*."""
    return lambda data_dir: read_folder(Path(name).expanduser())


def read_folder(path: Path) -> Dataset:
    """Return images in one folder per class: ``train/CLASS/*`` and ``test/CLASS/*``, or where there is
    no ``test``, ``val/CLASS/*``.

    All images must have one size; they are read as RGB and normalised to -1..1, as MOON does for
    Tiny-ImageNet, whose own layout (``val/images`` with ``val/val_annotations.txt``) is understood too.

    :raises DataError: folders or images are missing, damaged or of different sizes.
    """
    if not (path / "train").is_dir():
        raise DataError(f"imagefolder: {path / 'train'} is not a directory; expected train/ and test/ or val/ in it")
    train_files, names = class_folders(path / "train")
    annotations = path / "val" / "val_annotations.txt"
    if annotations.is_file():
        held_out, test_files = annotations.parent, _annotated_files(annotations)
    else:
        folders = [path / name for name in ("test", "val") if (path / name).is_dir()]
        if not folders:
            raise DataError(f"imagefolder: {path} holds neither test/ nor val/, the folder of the test set")
        held_out = folders[0]
        test_files, _ = class_folders(held_out)
    strange = sorted({label for _, label in test_files} - set(names))
    if strange:
        raise DataError(f"imagefolder: {path}: class {strange[0]!r} of the test images has no folder in train/")
    number = {name: k for k, name in enumerate(names)}
    train, test = (
        Split(decoded([file for file, _ in files]), torch.tensor([number[label] for _, label in files]))
        for files in (train_files, test_files)
    )
    used = ("train", held_out.name)
    others = [f"{f.name}/" for f in path.iterdir() if f.is_dir() and f.name[0] != "." and f.name not in used]
    half = (0.5, 0.5, 0.5)
    return assemble(
        f"imagefolder:{path.resolve().name}",
        train,
        test,
        stats=(half, half),
        num_classes=len(names),
        class_names=tuple(names),
        notes=(f"{path}: folders not used: {', '.join(map(repr, sorted(others)))}",) if others else (),
    )


def class_folders(folder: Path, what: str = "imagefolder") -> tuple[list[tuple[Path, str]], list[str]]:
    """Return torchvision's view of a folder: (file, class name) in order, and the sorted class names.

    :param what: what is read, for the message.
    :raises DataError: it does not hold a folder of images per class.
    """
    try:
        found = load_torchvision().datasets.ImageFolder(str(folder))
    except OSError as error:
        raise DataError(f"{what}: {folder} must hold one folder of images per class: {error}") from error
    return [(Path(file), found.classes[label]) for file, label in found.samples], list(found.classes)


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
                f"{width}x{height}: resize all images to one size first"
            )
        images[position] = image

    with ThreadPoolExecutor(max_workers=min(8, cores())) as pool:
        for _ in pool.map(put, range(len(files))):
            pass
    return torch.from_numpy(images)
