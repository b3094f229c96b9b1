"""A table that the library datasets read: its features, columns and cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from fedcore import ConfigError
from fedcore.data import first_ten

Array: TypeAlias = npt.NDArray[Any]

TEXTS = ("string", "large_string")
"""How the types of texts begin."""


@dataclass(frozen=True)
class Table:
    """A table's Arrow columns and their features, which datasets would copy at each access."""

    name: str
    """The name of the data set, with which each message begins."""
    features: Mapping[str, Any]
    columns: Mapping[str, Any]
    """The ``pyarrow.ChunkedArray`` of each column."""
    rows: npt.NDArray[np.int64]
    """The positions of the table's rows in the columns."""
    folders: tuple[Path, ...]
    """The folders of the files that cells may name."""

    @classmethod
    def of(cls, rows: Any, name: str, folders: tuple[Path, ...]) -> Self:
        """Return a ``datasets.Dataset`` as a table. Nothing is decoded."""
        arrow = rows.with_format("arrow")[:]
        columns = dict(zip(arrow.column_names, arrow.columns, strict=True))
        return cls(name, rows.features, columns, np.arange(len(rows)), folders)

    def __len__(self) -> int:
        return len(self.rows)

    def error(self, problem: str) -> ConfigError:
        """Return the error that says what is wrong with this data set."""
        return ConfigError(f"{self.name}: {problem}")

    def select(self, rows: npt.NDArray[np.int64]) -> Table:
        """Return the table of these rows."""
        return replace(self, rows=self.rows[rows])

    @property
    def known(self) -> str:
        """The names of the columns, for messages."""
        return f"there are: {first_ten(list(self.features))}"

    def feature(self, column: str) -> Any:
        """Return the feature of a column.

        :raises ConfigError: there is no such column. What reads a column asks here.
        """
        if column not in self.features:
            raise self.error(f"has no column {column!r}; {self.known}")
        return self.features[column]

    def plain(self, column: str) -> str:
        """Return the name of a column whose cells are single values, such as classes or sources.

        :raises ConfigError: they are not.
        """
        from datasets import ClassLabel, Value

        if not isinstance(feature := self.feature(column), (ClassLabel, Value)):
            raise self.error(f"cells of column {column!r} have to be single words or numbers, not {feature}")
        return column

    def cells(self, column: str) -> Iterator[Any]:
        """Return a column's cells as Python values."""
        self.feature(column)
        values = self.columns[column]
        return (values[row].as_py() for row in self.rows.tolist())

    def values(self, column: str) -> list[Any]:
        """Return a column's cells: floats such as 2.0 as integers, words without blanks around them, None for blanks.

        pandas writes whole numbers as floats in a column with gaps, and sites add blanks: both are the same class.
        """
        return [_whole(cell) for cell in self.cells(column)]

    def numbers(self, column: str, hint: str = "") -> Array:
        """Return a column's cells as float64, empty ones as nan.

        :param hint: what to do if they are no numbers.
        :raises ConfigError: they are no numbers.
        """
        feature = self.feature(column)
        try:
            values: Array = self.columns[column].to_numpy()[self.rows]
            if values.dtype.kind not in "biufO":
                raise TypeError(f"they are {feature.dtype}")
            return values.astype(np.float64)
        except (TypeError, ValueError) as error:
            raise self.error(f"the cells of column {column!r} are not all numbers ({error}){hint}") from error


def _whole(cell: Any) -> Any:
    if isinstance(cell, str):
        return cell.strip() or None
    return int(cell) if isinstance(cell, float) and cell.is_integer() else cell
