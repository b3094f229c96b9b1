"""Images of a column as pixels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcore.data import Split, assemble
from fedcore_huggingface.table import Table


def image_fields(tables: Sequence[Table], labels: Sequence[Tensor], column: str, size: int | None) -> dict[str, Any]:
    """Return the fields of a data set that hold each table's images.

    :param size: the side to which they are resized.
    """
    splits = (Split(*part) for part in zip(_pixels(tables, column, size), labels, strict=True))
    images = assemble(tables[0].name, *splits)
    return {"train": images.train, "test": images.test, "input_shape": images.input_shape}


def _pixels(tables: Sequence[Table], column: str, size: int | None) -> list[Tensor]:
    """Return the pixels of each table, (n, C, H, W) uint8. C is 1 if all images are grey, else 3."""
    parts = []
    for table in tables:
        arrays = []  # (H, W) or (H, W, 3)
        for image in _decoded(table, column):
            if image.mode.startswith(("I", "F")):  # Pillow would cut values off at 255
                raise table.error(
                    f"column {column!r} holds images of more than 8 bits a channel (mode {image.mode}); rescale them "
                    "to 8 bits, or use npz:FILE with floats"
                )
            if image.format == "TIFF" and image.n_frames > 1:
                raise table.error(f"column {column!r} holds TIFF files of several pages; give each page a row")
            image = image.convert("L" if image.mode in ("1", "L") else "RGB")
            arrays.append(np.asarray(image if size is None else image.resize((size, size))))
        shapes = {array.shape[:2] for array in arrays}
        if len(shapes) > 1:
            raise table.error(f"images of {len(shapes)} sizes; resize them to one, for example with ?size=32")
        parts.append(arrays)
    channels = 3 if any(array.ndim == 3 for arrays in parts for array in arrays) else 1
    pixels = []
    for arrays in parts:
        sides = (arrays or parts[0])[0].shape[:2]  # the test part of one client's part is empty
        pixels.append(torch.empty((len(arrays), channels, *sides), dtype=torch.uint8))
        for image, array in zip(pixels[-1].numpy(), arrays, strict=True):
            image[:] = np.atleast_3d(array).transpose(2, 0, 1)  # a grey one among others three times
    return pixels


def _decoded(table: Table, column: str) -> Iterator[Any]:
    """Yield the images of a column. A cell may name a file instead, inside of the data set's own folder."""
    from datasets import Image

    if not isinstance(feature := table.feature(column), Image):
        raise table.error(f"column {column!r} holds no images, as datasets' cast_column(..., Image()) makes them")
    decode = Image(mode=feature.mode).decode_example
    for row, cell in zip(table.rows, table.cells(column), strict=True):
        where = f"row {row} of column {column!r}"
        if cell and cell["bytes"] is None and cell["path"] is not None:
            cell["path"] = str(_file_inside(cell["path"], table, where))
        try:
            yield decode(cell or {"bytes": None, "path": None})
        except Exception as error:  # Pillow's own, of many kinds: the advice is the same
            raise table.error(f"{where} is no image that can be read ({error}). Leave out its row") from error


def _file_inside(path: str, table: Table, where: str) -> Path:
    """Return the file that a cell names.

    :raises ConfigError: it is an address, or not inside of the folders. A table from elsewhere thus opens nothing else.
    """
    for folder in () if "\0" in path else table.folders:
        file = (folder / path).resolve()
        if file.is_relative_to(folder.resolve()) and file.is_file():
            return file
    raise table.error(
        f"{where} names {path!r} instead of an image, which is no file in {' or '.join(map(str, table.folders))}; it "
        "is not opened. Save the data set with the images themselves"
    )
