"""Tables: cells that are words, empty or numbers become numbers, by what the training rows say.

A :class:`Recipe` holds what they say: the categories of words, the values for empty cells, mean and deviation.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from fedcore import DataError
from fedcore.data import Inputs, TensorSamples, first_ten
from fedcore_zoo.cells import Array, Cells, spelled_alike
from fedcore_zoo.fitted import FittedRecipe

ROUNDING = 1e-15
"""Values that differ by less, relative to the largest, are one value."""

DEVIATION_OF_SUMS = {True: 1e-14, False: 1e-12}
"""What sums leave of the deviation of a constant column, relative to its mean: in tables, and elsewhere."""

FAR = 500
"""Powers of two beyond which squares leave the range of float64."""

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
        """Return the recipe whose fields :meth:`to_json` gave, also next to what a model's inputs and card have."""
        own = {name: item for name, item in value.items() if name not in ("by", "clients")}
        fields = {name: tuple(item) if isinstance(item, (list, tuple)) else item for name, item in own.items()}
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
            own = np.array([*cells.words[name], self.fill.get(name, "")], dtype=object)  # the last is of empty cells
            texts = own[np.where(np.isnan(cells[name]), len(own) - 1, cells[name]).astype(np.int64)]
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
    return FittedRecipe.from_json(value) if "skops" in value else Recipe.from_json(value)


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
