"""Data sets of classes: the labels of a column, and their names."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcore.data import Dataset, first_ten, numbered_as
from fedcore_huggingface.inputs import LABELS, input_fields
from fedcore_huggingface.places import EMPTY
from fedcore_huggingface.spec import Options
from fedcore_huggingface.splits import in_two
from fedcore_huggingface.table import Array, Table
from fedcore_zoo import FittedRecipe, spelled_alike


def read_classes(train: Table, tests: dict[str, Table], options: Options, fitted: FittedRecipe | None) -> Dataset:
    """Return a data set of classes. Test splits whose labels are kept back are not used."""
    column = _label_column(train, options.label)

    def strata_of(cells: Array) -> tuple[Tensor, Sequence[str]]:
        (labels,), names = _labels([train], [cells], column)
        return labels, names

    unlabelled = [split for split, part in tests.items() if options.test is None and _is_unlabelled(part, column)]
    test = next((part for split, part in tests.items() if split not in unlabelled), None)
    tables, cells = in_two(train, test, partial(_class_cells, column=column), strata_of, options)
    labels, names = _labels(tables, cells, column)
    fields = input_fields(tables, labels, (column,), options, fitted)
    untrained = [] if options.part else [names[k] for k in sorted({*labels[1].tolist()} - {*labels[0].tolist()})]
    note = f"{train.name}: test samples have classes without a training sample: {first_ten(untrained)}"
    notes = (
        *([note] if untrained else []),
        *(f"{train.name}: split {split!r} has no labels and is not used" for split in unlabelled),
        *spelled_alike(names, f"{train.name}: column {column!r}"),
        *fields.pop("notes", ()),
    )
    return Dataset(name=train.name, num_classes=len(names), class_names=names, notes=notes, **fields)


def _label_column(table: Table, named: str | None) -> str:
    from datasets import ClassLabel

    if named is not None:
        return table.plain(named)
    columns = [column for column in LABELS if column in table.features]
    columns = columns or [column for column, feature in table.features.items() if isinstance(feature, ClassLabel)]
    if not columns or (len(columns) > 1 and columns[0] not in LABELS):
        raise table.error(
            "which column holds the classes? Write ?label=COLUMN, ?target=COLUMN to predict numbers, or "
            f"?block_size=128 to predict the next tokens of texts; {table.known}"
        )
    return table.plain(columns[0])


def _is_unlabelled(table: Table, column: str) -> bool:
    """Return whether all labels are -1, as in the test splits of benchmarks that keep the labels to themselves."""
    from datasets import ClassLabel

    return isinstance(table.features.get(column), ClassLabel) and set(table.cells(column)) == {-1}


def _class_cells(table: Table, column: str) -> Array:
    """Return the cells of a column of classes, (n,): whole numbers, or words."""
    cells = table.values(column)
    if any(cell is None or isinstance(cell, float) for cell in cells):
        raise table.error(
            f"column {column!r} holds no classes: fractions or empty cells are among its values. Write "
            f"?target={column} to predict numbers. Of words these are empty: {', '.join(EMPTY[-7:])}"
        )
    return np.array(cells, dtype=object)


def _labels(tables: Sequence[Table], cells: Sequence[Array], column: str) -> tuple[list[Tensor], tuple[str, ...]]:
    """Return the classes of each table's cells as 0..C-1, and their names, which are the first table's.

    :raises DataError: a class of another table is not among them.
    """
    where = f"{tables[0].name}: column {column!r}"
    (first, names), *others = (_classes(table.feature(column), own) for table, own in zip(tables, cells, strict=True))
    tests = [
        numbered_as(labels, own, names, f"{where} of the test samples") if len(labels) else labels
        for labels, own in others
    ]
    return [numbered_as(first, names, names, where), *tests], names


def _classes(feature: Any, cells: Array) -> tuple[Tensor, tuple[str, ...]]:
    """Return cells (n,) as numbers of classes, and the classes' names: those of a ClassLabel, or the sorted cells."""
    from datasets import ClassLabel

    if isinstance(feature, ClassLabel):
        return torch.tensor(cells.tolist(), dtype=torch.int64), tuple(feature.names)
    classes = sorted({*cells})
    numbers = {name: number for number, name in enumerate(classes)}
    return torch.tensor([numbers[cell] for cell in cells], dtype=torch.int64), tuple(map(str, classes))
