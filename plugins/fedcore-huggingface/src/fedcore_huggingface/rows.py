"""Rows of a table: numbers and words of its columns, and notes on columns that say little, or too much."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from fedcore.data import first_ten
from fedcore_huggingface.spec import Options
from fedcore_huggingface.table import TEXTS, Array, Table
from fedcore_zoo import Cells, FittedRecipe, Recipe, TableSamples, mean_and_deviation, numbers_as_words, word_of

FEW = 1000
"""Rows that show of most columns that they do not tell the class."""

MANY = 20
"""Rows of which a different word or number in each is no chance."""

EXACT = 2.0**53
"""Up to here float64 tells whole numbers from their neighbours."""


def row_fields(
    tables: Sequence[Table],
    labels: Sequence[Tensor],
    columns: Sequence[str],
    predicted: Sequence[str],
    options: Options,
    fitted: FittedRecipe | None,
) -> dict[str, Any]:
    """Return the fields of a data set that hold each table's rows. Columns that tell the class are left out."""
    train = tables[0]
    parts = _cells(tables, columns, options)
    notes = []
    if telling := _telling([part.values for part in parts], labels):
        note = f"a value is a class, one to one, in: {_listed(columns[place] for place in telling)}"
        if options.columns is None:
            note += ". Name ?columns=... if these are inputs; they are not used"
            columns = [column for place, column in enumerate(columns) if place not in telling]
            if not columns:
                raise train.error(f"{note}, and no other column holds numbers")
            parts = [part.fitted(columns, part.words, train.name) for part in parts]
        notes.append(note)
    if options.columns is None:
        used = {*columns, *predicted, options.source, options.groups}
        left = [column for column in train.features if column not in used]
        notes.append(f"columns used: {_listed(columns)}; not used: {_listed(left)}")
    notes += _column_notes(train, parts)
    if fitted is None:
        recipe: Recipe | FittedRecipe = Recipe.of(parts[0], missing=options.missing, indicators=options.indicators)
    else:
        recipe = fitted.of(parts[0])
    if not recipe.outputs:
        raise train.error("no column holds a value; name other ?columns=")
    samples = [
        TableSamples(part, numbers, recipe, train.name, options.missing, options.indicators)
        for part, numbers in zip(parts, labels, strict=True)
    ]
    return {
        "train": samples[0],
        "test": samples[1],
        "input_shape": (len(recipe.outputs),),
        "model": "mlp",
        "notes": tuple(f"{train.name}: {note}" for note in notes),
    }


def _cells(tables: Sequence[Table], columns: Sequence[str], options: Options) -> list[Cells]:
    """Return the cells of each table. The words of a column are numbered alike in all of them."""
    values = [np.empty((len(table), len(columns))) for table in tables]
    words: dict[str, tuple[str, ...]] = {}
    for place, column in enumerate(columns):
        if not _holds_words(tables[0].features[column], column in options.categories):
            for table, rows in zip(tables, values, strict=True):
                is_date = str(getattr(table.feature(column), "dtype", "")).startswith(("date", "time"))
                hint = "; write a date as a number, such as days since a day" * is_date
                rows[:, place] = table.numbers(column, hint)
            continue
        texts = [[word_of(cell) for cell in table.cells(column)] for table in tables]
        words[column] = tuple(sorted({text for part in texts for text in part if text is not None}))
        if len(words[column]) > Cells.most_words:
            raise tables[0].error(
                f"column {column!r} has {len(words[column]):,} different values, which are no categories; "
                f"leave it out of ?columns, or name texts as ?text={column}"
            )
        is_text = str(getattr(tables[0].features[column], "dtype", "")) in TEXTS
        if is_text and column not in options.categories and (wrong := numbers_as_words(words[column])):
            raise tables[0].error(f"column {column!r} {wrong}. If they are names, write ?categories={column}")
        numbers = {word: number for number, word in enumerate(words[column])}
        for rows, part in zip(values, texts, strict=True):
            rows[:, place] = [np.nan if text is None else numbers[text] for text in part]
    filled = options.missing is not None or options.pipeline is not None
    for rows in values:
        usable = np.isfinite(rows) | (np.isnan(rows) & filled)
        if not usable.all():
            holes = [columns[place] for place in np.flatnonzero(~usable.all(axis=0)).tolist()]
            raise tables[0].error(
                f"cells are empty or no finite number, in: {_listed(holes)}. Fill them or leave out their "
                "rows, write ?missing=median or most-frequent for empty ones, or name other ?columns="
            )
    return [Cells(tuple(columns), rows, words) for rows in values]


def _holds_words(feature: Any, named: bool) -> bool:
    """Return whether the cells of a column are categories: it was named so, or holds words."""
    from datasets import ClassLabel

    return named or isinstance(feature, ClassLabel) or str(getattr(feature, "dtype", "")) in TEXTS


def _telling(numbers: Sequence[Array], labels: Sequence[Tensor]) -> list[int]:
    """Return which columns (n, columns) of all tables have one value for each class, and one class for each value."""
    classes, first, number = np.unique(labels[0].numpy(), return_index=True, return_inverse=True)
    values = numbers[0][first]  # (C, columns)
    likely = (np.diff(np.sort(values, axis=0), axis=0) != 0).all(axis=0) & (len(classes) > 1)
    likely &= (numbers[0][:FEW] == values[number[:FEW]]).all(axis=0)
    places = [np.searchsorted(classes, part.numpy()).clip(max=len(classes) - 1) for part in labels]
    return [
        int(column)
        for column in np.flatnonzero(likely)
        if all((part[:, column] == values[place, column]).all() for part, place in zip(numbers, places, strict=True))
    ]


def _column_notes(train: Table, parts: Sequence[Cells]) -> Iterator[str]:
    """Yield notes on columns of a table's parts that say little, or too much."""
    cells = parts[0]
    if numbers := [
        column for column in cells.columns if _are_different(np.concatenate([part[column] for part in parts]))
    ]:
        yield (
            f"a different word or whole number in each row, as record numbers are, in: {_listed(numbers)}. "
            "They may tell the class of these rows, and of no others. Name other ?columns=... to leave them out"
        )
    columns = [column for column in cells.columns if column not in cells.words]
    if not columns:
        return
    rows = np.column_stack([cells[column] for column in columns])
    with np.errstate(invalid="ignore"):
        largest = np.abs(rows).max(axis=0)
    inexact = [
        train.features[column].dtype in ("int64", "uint64") and most > EXACT
        for column, most in zip(columns, largest, strict=True)
    ]
    for is_told, note in (
        (mean_and_deviation(rows)[2], "one value in all training rows, which tells nothing, in"),
        (inexact, "whole numbers above 2^53, which lose their last digits, in"),
    ):
        if told := list(itertools.compress(columns, is_told)):
            yield f"{note}: {_listed(told)}. Name other ?columns=... to leave them out"


def _are_different(cells: Array) -> bool:
    """Return whether a column (n,) float64 of many rows has another whole number, or another word, in each."""
    known = cells[~np.isnan(cells)]
    return len(known) >= MANY and bool((known == np.floor(known)).all()) and len(np.unique(known)) == len(known)


def _listed(columns: Iterable[str]) -> str:
    return first_ten([*map(repr, columns)]) or "none"
