"""The cells of a table: numbers, words or empty. What is read as which, of DataFrames, arrays and lists."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcore import DataError
from fedcore.data import first_ten

Array: TypeAlias = npt.NDArray[Any]

FEW_WORDS = 10
"""So many different words may be numbers by chance, such as stages of a disease."""

PUNCTUATED = re.compile(r"[$€£]? ?[+-]?\d[\d.,' ]*[$€£%]?")
"""A number with a decimal comma, marks between thousands, or a unit, as spreadsheets show it."""

DATE = re.compile(r"\d{1,4}([./-])\d{1,2}\1\d{1,4}\b")

WRITE_PLAINLY = (
    ", with commas or signs. Write them plainly, as 1234.5: pandas.read_csv(FILE, decimal=','), or thousands=',' where "
    "commas are between thousands, then .to_csv(NEW, index=False)"
)


@dataclass(frozen=True)
class Cells:
    """The cells of a table: numbers, or positions in the words of a column; nan where they are empty."""

    most_words: ClassVar[int] = 1000
    """The most categories that a column may have."""

    columns: tuple[str, ...]
    values: Array
    """(n, columns) float64."""
    words: Mapping[str, tuple[str, ...]]
    """The words of each column of words."""

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, column: str) -> Array:
        cells: Array = self.values[:, self._places[column]]
        return cells

    @cached_property
    def _places(self) -> dict[str, int]:
        return {column: place for place, column in enumerate(self.columns)}

    def rows(self, rows: Any) -> Cells:
        """Return the cells of these rows."""
        return Cells(self.columns, self.values[rows], self.words)

    def numbers(self, fill: Mapping[str, float | str], where: str = "") -> Array:
        """Return the columns of numbers (n, columns) float64, with a value for the empty cells of each.

        :param where: whose rows they are, for messages. Without it empty cells without a value stay nan.
        :raises DataError: a number is missing, and nothing says what it becomes.
        """
        numbers = []
        for name in self.columns:
            if name in self.words:
                continue
            empty = np.isnan(self[name])
            if where and name not in fill and empty.any():
                raise DataError(
                    f"{where}: column {name!r} has {int(empty.sum())} empty cells, and the run was not told what they "
                    "become (?missing=median); fill them, or leave out their rows"
                )
            numbers.append(np.where(empty, fill.get(name, np.nan), self[name]))
        return np.column_stack(numbers) if numbers else np.empty((len(self), 0))

    def fitted(self, columns: Sequence[str], words: Collection[str], where: str) -> Cells:
        """Return the cells of a run's columns in their order, with words where the run has words.

        :param where: whose rows they are, for messages.
        :raises DataError: a column is missing, or has words where the run has numbers.
        """
        if tuple(columns) == self.columns and {*words} == {*self.words}:
            return self
        if missing := [name for name in columns if name not in self._places]:
            surplus = [name for name in self.columns if name not in columns]
            raise DataError(
                f"{where} has other columns than the run. Missing: {first_ten(missing)}; not in the run: "
                f"{first_ten(surplus) or 'none'}. Rename columns, or choose them, as in hf:FILE.csv?columns=NAME,NAME. "
                f"The run's {len(columns)}: {first_ten(columns)}"
            )
        values: list[Array] = []
        known: dict[str, tuple[str, ...]] = {}
        for name in columns:
            column, own = self[name], self.words.get(name)
            if name in words and own is None:  # numbers that are names, or a column of empty cells alone
                column, own = _read_words(column)
            elif name not in words and own is not None:
                column = np.array([np.nan, *(_number_of(word, name, where) for word in own)])[
                    np.where(np.isnan(column), 0, column + 1).astype(np.int64)
                ]
            values.append(column)
            known |= {name: own} if name in words and own is not None else {}
        return Cells(tuple(columns), np.column_stack(values), known)

    @classmethod
    def read(cls, table: Any, columns: Sequence[str], words: Iterable[str]) -> Cells:
        """Return the cells of a DataFrame, or of an array or a list of rows with these columns in order.

        :param words: the columns of words.
        :raises DataError: a column is missing, or a cell is no number.
        """
        table, text_columns, values = in_order(table, columns, "x"), {*words}, []
        if not hasattr(table, "iloc"):
            table = np.asarray(table, dtype=object)
        if table.ndim != 2 or table.shape[1] != len(columns):
            raise DataError(
                f"x has the shape {table.shape}; expected (n, {len(columns)}), with the columns {first_ten(columns)}, "
                "or a DataFrame with these names"
            )
        words_by_column: dict[str, tuple[str, ...]] = {}
        for place, name in enumerate(columns):
            column = table.iloc[:, place].to_numpy(dtype=object) if hasattr(table, "iloc") else table[:, place]
            if name in text_columns:
                places, words_by_column[name] = _read_words(column)
                values.append(places)
                continue
            try:
                values.append(np.array([np.nan if word_of(cell) is None else float(cell) for cell in column]))
            except (TypeError, ValueError) as error:
                raise DataError(f"x: the cells of column {name!r} are not all numbers ({error})") from error
        cells = np.column_stack(values) if values else np.empty((len(table), 0))
        return cls(tuple(columns), cells, words_by_column)


def word_of(cell: Any) -> str | None:
    """Return a cell as a category, without blanks around it; None if it is empty.

    Whole numbers are written without a fraction: pandas makes floats of them in a column with empty cells.
    """
    if cell is None or type(cell).__name__ == "NAType" or cell != cell:  # pandas' own, which is not equal to anything
        return None
    whole = isinstance(cell, float | np.floating) and float(cell).is_integer()
    return str(int(cell) if whole else cell).strip() or None


def spelled_alike(words: Sequence[str], where: str) -> tuple[str, ...]:
    """Return the note on words of a column that differ in capitals or blanks alone, as sites write them; or nothing."""
    spelled: dict[str, list[str]] = {}
    for word in words:
        spelled.setdefault("".join(word.split()).casefold(), []).append(word)
    if not (several := [", ".join(map(repr, each)) for each in spelled.values() if len(each) > 1]):
        return ()
    return (f"{where}: some words differ in capitals or blanks alone, and are different ones: {first_ten(several)}",)


def numbers_as_words(words: Sequence[str]) -> str:
    """Return the fault of a column's words, if most of them are numbers; else nothing."""
    strange = [word for word in words if not _is_number(word)]
    shown = [word for word in strange if DATE.match(word) or PUNCTUATED.fullmatch(word)]
    if len(words) < FEW_WORDS or len(strange) - len(shown) > len(words) / 4:
        return ""
    if not strange:
        return f"holds numbers as texts, such as {words[0]!r}. Save them as numbers"
    if shown and DATE.match(shown[0]):
        return f"holds dates such as {shown[0]!r}. Write a date as a number, such as days since a day"
    if shown:
        return f"holds numbers such as {shown[0]!r}{WRITE_PLAINLY}"
    return f"holds numbers, and words among them: {first_ten([*map(repr, strange)])}. Leave such cells empty"


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _read_words(cells: Iterable[Any]) -> tuple[Array, tuple[str, ...]]:
    """Return the places of cells in the sorted words of their column, nan where they are empty, and these words."""
    texts = [word_of(cell) for cell in cells]
    words = tuple(sorted({text for text in texts if text is not None}))
    place_of: dict[str | None, float] = {word: float(number) for number, word in enumerate(words)}
    return np.array([place_of.get(text, np.nan) for text in texts], dtype=np.float64), words


def _number_of(word: str, column: str, where: str) -> float:
    try:
        return float(word)
    except ValueError:
        how = WRITE_PLAINLY if PUNCTUATED.fullmatch(word) else ""
        raise DataError(f"{where}: column {column!r} holds {word!r}, and the run has numbers there{how}") from None


def as_array(value: Any, name: str) -> Array:
    """Return an array, a tensor, a DataFrame or a list as an array of the same values.

    A DataFrame of columns of different types becomes float64: true and false are 1 and 0, and empty cells nan.

    :raises DataError: the array would lose a part of the value: it is sparse, masked or complex, or a column of a
        DataFrame does not hold numbers. The message calls it ``name``.
    """
    if hasattr(value, "toarray") or (isinstance(value, Tensor) and value.layout != torch.strided):
        raise DataError(f"{name} is sparse; write {name}.{'to_dense' if isinstance(value, Tensor) else 'toarray'}()")
    if np.ma.is_masked(value):
        raise DataError(f"{name} has masked cells, which have no value; fill them with .filled(...), or leave them out")
    if isinstance(value, Tensor):
        value = value.detach().cpu().resolve_conj()
        array: Array = (value.float() if value.dtype == torch.bfloat16 else value).numpy()  # NumPy has no bfloat16
    else:
        array = np.asarray(value)
    if array.dtype.kind == "O" and array.ndim == 2 and hasattr(value, "iloc"):
        array = np.column_stack(
            [_column(value.iloc[:, k], f"{name}: column {c!r}") for k, c in enumerate(value.columns)]
        )
    if array.dtype.kind == "c":
        raise DataError(f"{name} holds complex numbers; give their real and imaginary parts as columns or channels")
    return array


def _column(series: Any, where: str) -> Array:
    """Return a column of a DataFrame as float64."""
    try:
        if series.dtype.kind in "mMc":
            raise TypeError(f"they are {series.dtype}")
        numbers: Array = series.to_numpy(dtype=np.float64, na_value=np.nan)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where} has cells that are no numbers: {error}") from error
    return numbers


def column_names(table: Any) -> tuple[str, ...]:
    """Return the names of a DataFrame's columns; nothing if none is a text, and for anything else."""
    names = tuple(getattr(table, "columns", ()))
    return tuple(map(str, names)) if any(isinstance(name, str) for name in names) else ()


def check_rows(x: Any, y: Any, name: str) -> None:
    """Refuse a DataFrame and labels whose indices have the same entries in another order: rows go by position.

    :raises DataError: names the labels ``name``.
    """
    if not (hasattr(x, "iloc") and hasattr(y, "iloc")) or x.index.equals(y.index):
        return
    if len(x.index) == len(y.index) and x.index.symmetric_difference(y.index).empty:
        raise DataError(
            f"{name} has the index of its samples in another order, and rows are taken by position: write "
            f"{name.rpartition(' ')[2]}.loc[x.index]"
        )


def in_order(table: Any, columns: Sequence[str], name: str) -> Any:
    """Return a DataFrame's columns in the order of training. What has no names of columns is returned as it is.

    :raises DataError: a column is missing, or there twice. The message calls the table ``name``.
    """
    names = column_names(table)
    if not (names and columns):
        return table
    found = Counter(names)
    for column in columns:
        if not found[column]:
            raise DataError(f"{name} has no column {column!r}, which is one of the {len(columns)} columns of training")
        if found[column] > 1:
            raise DataError(f"{name} has {found[column]} columns {column!r}; drop or rename all but one")
    labels = dict(zip(names, table.columns, strict=True))  # a name may be a number
    return table[[labels[column] for column in columns]]
