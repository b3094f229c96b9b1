"""Tables: cells that are words, empty or numbers become numbers, by what the training rows say.

A :class:`Recipe` holds what they say: the categories of words, the values for empty cells, mean and deviation.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcore import DataError
from fedcore.data import Inputs, TensorSamples, first_ten
from fedcore_zoo.fitted import FittedRecipe

Array: TypeAlias = npt.NDArray[Any]

ROUNDING = 1e-15
"""Values that differ by less, relative to the largest, are one value."""

DEVIATION_OF_SUMS = {True: 1e-14, False: 1e-12}
"""What sums leave of the deviation of a constant column, relative to its mean: in tables, and elsewhere."""

FAR = 500
"""Powers of two beyond which squares leave the range of float64."""

FEW_WORDS = 10
"""So many different words may be numbers by chance, such as stages of a disease."""

DECIMAL = re.compile(r"[+-]?\d+(\.\d{3})*,\d+")
DECIMAL_COMMA = (
    ", with a decimal comma. Write them with a point: pandas.read_csv(FILE, decimal=',').to_csv(NEW, index=False)"
)

FILLS = ("median", "most-frequent")
"""What empty cells can become. Words become the most frequent one either way."""


@dataclass(frozen=True)
class Recipe:
    """How the raw columns of a table become a model's numbers. Its fields are plain values, which JSON keeps."""

    columns: tuple[str, ...]
    """The raw columns in order."""
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The categories of each column of words, sorted. Each is 1 in a column ``NAME=WORD``, others are 0."""
    fill: Mapping[str, float | str] = field(default_factory=dict)
    """What an empty cell of a column becomes. Cells of other columns may not be empty."""
    indicators: tuple[str, ...] = ()
    """Columns that get a further column ``NAME missing``: 1 where the cell is empty."""
    mean: tuple[float, ...] = ()
    """What is subtracted from each column of numbers, in the order of ``columns``."""
    std: tuple[float, ...] = ()
    """By what these are then divided."""

    @classmethod
    def of(cls, cells: Cells, *, missing: str | None = None, indicators: bool = False) -> Self:
        """Return the recipe that some training rows give.

        :param missing: one of ``FILLS``; None refuses empty cells of numbers.
        :param indicators: whether columns in which these rows have empty cells get an indicator.
        """
        words: dict[str, tuple[str, ...]] = {}
        fill: dict[str, float | str] = {}
        holes = []
        for name in cells.columns:
            empty = np.isnan(cells[name])
            known = cells[name][~empty]
            holes += [name] if empty.any() else []
            if name in cells.words:
                codes, counts = np.unique(known.astype(np.int64), return_counts=True)
                words[name] = tuple(cells.words[name][code] for code in codes)
                if missing and len(codes):
                    fill[name] = words[name][counts.argmax()]
                continue
            if missing:
                fill[name] = _middle(known, missing) if len(known) else 0.0
        mean, std, _ = mean_and_deviation(cells.numbers(fill))
        marked = tuple(holes) if indicators else ()
        return cls(tuple(cells.columns), words, fill, marked, tuple(mean.tolist()), tuple(std.tolist()))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return the recipe whose fields :meth:`to_json` gave."""
        fields = {name: tuple(item) if isinstance(item, (list, tuple)) else item for name, item in value.items()}
        return cls(**fields | {"words": {name: tuple(words) for name, words in value.get("words", {}).items()}})

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)

    is_fixed: ClassVar[bool] = False
    """Whether other training rows would give the same recipe."""

    @property
    def is_plain(self) -> bool:
        """Whether all columns are numbers without gaps, for which mean and deviation say all."""
        return not (self.words or self.fill or self.indicators)

    @property
    def outputs(self) -> list[str]:
        """The names of the model's columns: of numbers, of words, and indicators, each in order of ``columns``."""
        numbers = [name for name in self.columns if name not in self.words]
        categories = [f"{name}={word}" for name, words in self.words.items() for word in words]
        return [*numbers, *categories, *(f"{name} missing" for name in self.indicators)]

    @property
    def shift(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and deviation of every output column: words and indicators stay 0 and 1."""
        others = len(self.outputs) - len(self.mean)
        return (*self.mean, *[0.0] * others), (*self.std, *[1.0] * others)

    def apply(self, cells: Cells, where: str) -> Tensor:
        """Return the rows as the model's numbers, (n, outputs) float32.

        :param where: whose rows they are, for messages.
        :raises DataError: a number is missing and nothing says what it becomes, or a number is too large.
        """
        others, table = [], cells.fitted(self.columns, self.words, where).numbers(self.fill, where)
        for name in self.words:
            empty = np.isnan(cells[name])
            own = [cells.words[name][int(code)] for code in np.where(empty, 0, cells[name])] if len(cells) else []
            texts = np.where(empty, str(self.fill.get(name, "")), np.asarray(own, dtype=object))
            others += [texts == word for word in self.words[name]]
        others += [np.isnan(cells[name]) for name in self.indicators]
        with np.errstate(over="ignore"):
            scaled = torch.from_numpy((table - np.asarray(self.mean)) / np.asarray(self.std)).to(torch.float32)
        if far := (~scaled.isfinite().all(dim=0)).nonzero().flatten().tolist():
            raise DataError(
                f"{where}: numbers are too far from the training rows' for float32, in: "
                f"{first_ten([repr(self.outputs[place]) for place in far])}. Correct them, or name other columns"
            )
        return torch.cat([scaled, *(torch.from_numpy(each.astype(np.float32))[:, None] for each in others)], dim=1)

    def notes(self, parts: Iterable[Cells], where: str) -> tuple[str, ...]:
        """Return the notes on categories that cells have and no training row, and on those that are spelled alike."""
        strange: dict[str, set[str]] = {}
        for cells in parts:
            for name, words in self.unseen(cells).items():
                strange.setdefault(name, set()).update(words)
        return (
            *(
                f"{where}: no training row has these categories of {name!r}, so they are none of its columns: "
                f"{first_ten([repr(word) for word in sorted(words)])}"
                for name, words in strange.items()
            ),
            *(note for name, words in self.words.items() for note in spelled_alike(words, f"{where}: column {name!r}")),
        )

    def unseen(self, cells: Cells) -> dict[str, list[str]]:
        """Return the words of each column that no training row has. Their rows are 0 in all of its categories."""
        unseen = {}
        for name, known in self.words.items():
            codes = np.unique(cells[name][~np.isnan(cells[name])].astype(np.int64))
            if strange := [word for word in (cells.words[name][code] for code in codes) if word not in known]:
                unseen[name] = strange
        return unseen


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
                texts = [word_of(cell) for cell in column]
                own = tuple(sorted({text for text in texts if text is not None}))
                column = _places_of(texts, own)
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
                    f"x has the shape {table.shape}; expected (n, {len(columns)}), with the columns "
                    f"{first_ten(columns)}, or a DataFrame"
                )
        words_by_column: dict[str, tuple[str, ...]] = {}
        for place, name in enumerate(columns):
            column = table.iloc[:, place].to_numpy(dtype=object) if hasattr(table, "iloc") else table[:, place]
            if name in text_columns:
                texts = [word_of(cell) for cell in column]
                words_by_column[name] = tuple(sorted({text for text in texts if text is not None}))
                values.append(_places_of(texts, words_by_column[name]))
                continue
            try:
                values.append(np.array([np.nan if word_of(cell) is None else float(cell) for cell in column]))
            except (TypeError, ValueError) as error:
                raise DataError(f"x: the cells of column {name!r} are not all numbers ({error})") from error
        cells = np.column_stack(values) if values else np.empty((len(table), 0))
        return cls(tuple(columns), cells, words_by_column)


class TableSamples(TensorSamples):
    """Rows of a table as a recipe makes them, with the cells, of which other training rows make another recipe.

    :param missing: and ``indicators``: as for :meth:`Recipe.of`.
    """

    def __init__(
        self,
        cells: Cells,
        labels: Tensor,
        recipe: Recipe | FittedRecipe,
        where: str,
        missing: str | None,
        indicators: bool,
    ) -> None:
        mean, std = recipe.shift
        super().__init__(recipe.apply(cells, where), labels, mean=mean, std=std, columns=recipe.outputs)
        self.cells, self.made, self.where, self.missing, self.indicators = cells, recipe, where, missing, indicators

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe as plain values; empty if mean, deviation and names of the columns say all."""
        return {} if self.made.is_plain else {"by": "table_inputs", **self.made.to_json()}

    def by(self, recipe: Recipe | FittedRecipe) -> TableSamples:
        """Return the rows as another recipe makes them."""
        return TableSamples(self.cells, self.labels, recipe, self.where, self.missing, self.indicators)

    def fitted(self, columns: Sequence[str], words: Collection[str]) -> Cells:
        """Return the cells of a run's columns; see :meth:`Cells.fitted`."""
        return self.cells.fitted(columns, words, self.where)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a client's user should know of the rows by the run's recipe."""
        return self.made.notes([self.cells], self.where)

    def followed_by(self, others: TableSamples) -> TableSamples:
        """Return these rows and others of the same table, such as its test part."""
        cells = Cells(self.cells.columns, np.concatenate([self.cells.values, others.cells.values]), self.cells.words)
        labels = torch.cat([self.labels, others.labels])
        return TableSamples(cells, labels, self.made, self.where, self.missing, self.indicators)

    def by_recipe(self, recipe: Mapping[str, Any]) -> TableSamples:
        """Return the rows as the recipe of a federation's server makes them, in plain values.

        :raises DataError: it is no recipe, or one for other columns.
        """
        try:
            return self.by(recipe_from(recipe))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise DataError(
                f"{self.where}: the run's recipe does not fit its columns {first_ten(self.cells.columns)}: {error!r}"
            ) from error

    def recipe_of(self, rows: Tensor) -> Recipe | FittedRecipe:
        """Return the recipe that some of these rows give, for positions (n,) int64."""
        if self.made.is_fixed:
            return self.made
        return Recipe.of(self.cells.rows(rows.numpy()), missing=self.missing, indicators=self.indicators)

    def __copy__(self) -> Self:
        """Return the same rows with the same cells, such as for labels of another task."""
        twin = self.__class__.__new__(self.__class__)
        twin.__dict__ |= vars(self)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """Leave the cells behind: workers need the numbers alone."""
        return vars(self) | {"cells": self.cells.rows([])}


def recipe_from(value: Mapping[str, Any]) -> Recipe | FittedRecipe:
    """Return the recipe that is stored with a model, in plain values."""
    fields = {name: item for name, item in value.items() if name not in ("by", "clients")}
    return FittedRecipe.from_json(fields) if "skops" in fields else Recipe.from_json(fields)


def table_inputs(form: Inputs, x: Any) -> Tensor:
    """Return a model's input for raw rows by the recipe that was stored with the model: a feature of fedcore.

    :param x: a DataFrame, whose columns are matched by name, or rows with the raw columns in order.
    :raises DataError: columns are missing, or cells are neither numbers nor empty.
    """
    recipe = recipe_from(form.recipe)
    cells = Cells.read(x, recipe.columns, recipe.words)
    for name, strange in recipe.unseen(cells).items():
        warnings.warn(
            f"x: column {name!r} has categories that no training row has: {first_ten([*map(repr, strange)])}; their "
            "rows are of none of its categories",
            stacklevel=2,
        )
    return recipe.apply(cells, "x")


def word_of(cell: Any) -> str | None:
    """Return a cell as a category, without blanks around it; None if it is empty.

    Whole numbers are written without a fraction: pandas makes floats of them in a column with empty cells.
    """
    if cell is None or cell != cell:
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
    """Return what is wrong with the words of a column, most of which are numbers; nothing if they are words."""
    strange = [word for word in words if not _is_number(word)]
    commas = [word for word in strange if DECIMAL.fullmatch(word)]
    if len(words) < FEW_WORDS or not strange or len(strange) - len(commas) > len(words) / 4:
        return ""
    if commas:
        return f"holds numbers such as {commas[0]!r}{DECIMAL_COMMA}"
    return f"holds numbers, and words among them: {first_ten([*map(repr, strange)])}. Leave such cells empty"


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _places_of(texts: Sequence[str | None], words: Sequence[str]) -> Array:
    place_of: dict[str | None, float] = {word: float(number) for number, word in enumerate(words)}
    return np.array([place_of.get(text, np.nan) for text in texts], dtype=np.float64)


def _number_of(word: str, column: str, where: str) -> float:
    try:
        return float(word)
    except ValueError:
        comma = DECIMAL_COMMA if DECIMAL.fullmatch(word) else ""
        raise DataError(f"{where}: column {column!r} holds {word!r}, and the run has numbers there{comma}") from None


def mean_and_deviation(table: Array) -> tuple[Array, Array, Array]:
    """Return the mean and the deviation of each column of numbers (n, columns) float64, and which are constant.

    The deviation of a constant column is 1.
    """
    if not table.size:
        return np.zeros(table.shape[1]), np.ones(table.shape[1]), np.ones(table.shape[1], dtype=bool)
    largest = np.maximum(table.max(axis=0), -table.min(axis=0))
    exponents = np.frexp(largest)[1]
    exponents[np.abs(exponents) < FAR] = 0
    scaled = np.ldexp(table, -exponents) if exponents.any() else table  # powers of two change no digit
    mean, std = scaled.mean(axis=0), scaled.std(axis=0)
    constant = np.ptp(scaled, axis=0) <= ROUNDING * np.ldexp(largest, -exponents)
    mean[constant] = scaled[0, constant]  # the mean of numbers that are all 0.1 is another number
    return np.ldexp(mean, exponents), np.where(constant, 1.0, np.ldexp(std, exponents)), constant


def divisors(mean: Array, std: Array, *, table: bool = False) -> Array:
    """Return deviations by which columns (columns,) can be divided, where sums alone are known: 1 for a constant one.

    :param table: whether they are columns of a table; others, such as channels, count as constant more easily.
    """
    least = np.abs(mean) if table else np.maximum(1.0, np.abs(mean))
    return np.where(std > DEVIATION_OF_SUMS[table] * least, std, 1.0)


def _middle(known: Array, missing: str) -> float:
    """Return the median of numbers, or the most frequent one, of several the smallest."""
    if missing == "median":
        return float(np.median(known))
    values, counts = np.unique(known, return_counts=True)
    return float(values[counts.argmax()])


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
    """Return the names of a DataFrame's columns; nothing if they are numbers, and for anything else."""
    names = tuple(getattr(table, "columns", ()))
    return names if all(isinstance(name, str) for name in names) else ()


def in_order(table: Any, columns: Sequence[str], name: str) -> Any:
    """Return a DataFrame's columns in the order of training. What has no names of columns is returned as it is.

    :raises DataError: a column is missing. The message calls the table ``name``.
    """
    names = set(column_names(table))
    if not (names and columns):
        return table
    missing = next((column for column in columns if column not in names), None)
    if missing is not None:
        raise DataError(f"{name} has no column {missing!r}, which is one of the {len(columns)} columns of training")
    return table[list(columns)]
