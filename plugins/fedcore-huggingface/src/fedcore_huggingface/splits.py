"""The training and the test part of a data set, and which samples come from one source or belong together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcore import ConfigError
from fedcore_huggingface.spec import Options
from fedcore_huggingface.table import Array, Table
from fedcore_zoo import fixed_split, numbered_groups, whole_rows, word_of

TESTS = ("test", "validation", "valid", "dev")
"""Names of the split that is the test set, the first that is there and has labels."""

FEWEST = 10
"""Training samples that a data set needs, unless it is one client's part."""

TEST_SIZE = 0.2


def splits_of(rows: Any, folders: tuple[Path, ...], options: Options, name: str) -> tuple[Table, dict[str, Table]]:
    """Return the training split, and the splits that can be the test set by name, in order of preference.

    :param rows: a ``datasets.Dataset`` or a ``DatasetDict``.
    """
    from datasets import DatasetDict

    splits = dict(rows) if isinstance(rows, DatasetDict) else {"train": rows}
    if "train" not in splits:
        raise ConfigError(f"{name}: none of its splits is named train; there are: {', '.join(splits)}")
    train = Table.of(splits.pop("train"), name, folders)
    if options.test is not None and options.test not in splits:
        raise train.error(
            f"has no split {options.test!r} for testing; next to train there are: {', '.join(splits) or 'none'}"
        )
    if len(train) < FEWEST and not (options.part and len(train)):
        raise train.error(
            f"has {len(train)} training samples; at least {FEWEST} are needed. One client's part, ?part=yes, "
            "may have fewer; a client of a federation takes all rows with --test-fraction"
        )
    chosen = TESTS if options.test is None else (options.test,)
    return train, {split: Table.of(splits[split], name, folders) for split in chosen if split in splits}


def in_two(
    train: Table,
    test: Table | None,
    cells_of: Callable[[Table], Array],
    strata_of: Callable[[Array], tuple[Tensor, Sequence[str]]],
    options: Options,
) -> tuple[list[Table], list[Array]]:
    """Return the training and the test part, and the cells of each one's labels or targets.

    Without a test part one is split off the training part; that of one client's part is empty.

    :param strata_of: returns the strata of the split, (n,) int64, and their names.
    """
    cells = cells_of(train)
    if test is not None:
        return [train, test], [cells, cells_of(test)]
    if options.part:
        parts = np.arange(len(train)), np.empty(0, dtype=np.int64)
    else:
        parts = parts_of(train, *strata_of(cells), options)
    return [train.select(rows) for rows in parts], [cells[rows] for rows in parts]


def parts_of(
    table: Table, strata: Tensor, names: Sequence[str], options: Options
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the positions of a training part and of a test part, always the same fifth.

    Groups stay together. A source all of whose rows were drawn for the test keeps one for training: small hospitals are
    clients, too.

    :param strata: (n,) int64, which both parts have in proportion; ``names``: theirs, for the message.
    """
    rows = np.arange(len(strata))
    group_of_row = rows if options.groups is None else _group_names(table, options.groups)
    try:
        train, test = fixed_split(strata.numpy(), TEST_SIZE)
    except ValueError:  # scikit-learn's own
        classes, counts = strata.unique(return_counts=True)
        rarest = int(counts.argmin())
        raise table.error(
            f"has no split for testing, and not enough samples of each class to make one: {len(strata)} "
            f"samples of {len(classes)} classes, {counts[rarest]} of class {names[classes[rarest]]!r}. Leave rare "
            "classes out, or save the data with a split named test"
        ) from None
    if options.groups is None and options.source is None:
        return train, test
    is_test = whole_rows(np.isin(rows, test), group_of_row)
    if options.source is not None:
        _, first, source = np.unique(_numbered(table, options.source)[0], return_index=True, return_inverse=True)
        lost = first[np.bincount(source, ~is_test) == 0]
        kept = is_test & ~np.isin(group_of_row, group_of_row[lost])
        is_test = kept if kept.any() else is_test
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def origins(tables: Sequence[Table], options: Options) -> dict[str, Any]:
    """Return the fields of a data set that hold the groups and sources of the training samples, those that it has."""
    fields: dict[str, Any] = {}
    if options.groups is not None:
        names = (_group_names(table, options.groups) for table in tables)
        fields["groups"] = numbered_groups(tables[0].name, *names)
    if options.source is not None:
        fields["sources"], fields["source_names"] = _numbered(tables[0], options.source)
    return fields


def _group_names(table: Table, column: str) -> Array:
    """Return the group of each row as a word, (n,)."""
    cells = [word_of(cell) for cell in table.cells(table.plain(column))]
    if None in cells:
        raise table.error(f"column {column!r} has empty cells: samples without a group")
    return np.array(cells, dtype=str)


def _numbered(table: Table, column: str) -> tuple[Tensor, tuple[str, ...]]:
    """Return a column's values as numbers 0..G-1, in their sorted order, and each number's value as a name."""
    values = table.values(table.plain(column))
    if any(value is None or value != value for value in values):
        raise table.error(f"column {column!r} has cells that are empty or no number: samples without a source")
    numbers = {value: number for number, value in enumerate(sorted(set(values)))}
    labels = getattr(table.feature(column), "names", None)  # of a ClassLabel, whose cells are numbers
    names = tuple(str(labels[value] if labels else value) for value in numbers)
    return torch.tensor([numbers[value] for value in values], dtype=torch.int64), names
