"""A fitted transformer of scikit-learn, saved with skops, makes a model's numbers of the cells of a table.

skops builds objects of types that it trusts, scikit-learn's and NumPy's, and never unpickles.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from fedcore import ConfigError, DataError
from fedcore.data import first_ten
from fedcore_zoo.cells import Cells

LARGEST = 1 << 24
"""Bytes of a file: it is stored with the model, and sent to clients."""


TRUSTED = ("numpy.dtype",)
"""Types that are built next to those that skops trusts. SimpleImputer has one."""


@dataclass(frozen=True)
class FittedRecipe:
    """How a transformer makes a model's numbers of raw columns, in the place of a :class:`fedcore_zoo.Recipe`."""

    content: bytes
    """The file of skops."""
    columns: tuple[str, ...]
    """The raw columns in the order in which it was fitted."""
    words: tuple[str, ...] = ()
    """Which of them are words."""
    outputs: tuple[str, ...] = ()
    """The names of the model's columns."""

    is_plain = False
    is_fixed = True
    """Whether other training rows would give the same numbers."""
    shift: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Return the transformer in a file, whose columns are known and whose outputs are not yet.

        :raises ConfigError: there is no such file, or it holds no fitted transformer of a DataFrame.
        """
        if not path.is_file() or path.stat().st_size > LARGEST:
            raise ConfigError(f"?pipeline={path}: there is no such file of up to {LARGEST >> 20} MB")
        content = path.read_bytes()
        columns = getattr(_loaded(content), "feature_names_in_", None)
        if columns is None:
            raise ConfigError(f"?pipeline={path}: fit it on a DataFrame, so that it knows the names of its columns")
        return cls(content, tuple(map(str, columns)))

    def of(self, cells: Cells) -> FittedRecipe:
        """Return the transformer for a table with these cells, by which its outputs are known."""
        width = _numbers(self.content, cells, "?pipeline").shape[1]
        try:
            outputs = tuple(map(str, _loaded(self.content).get_feature_names_out()))
        except Exception:  # a step without names, which raises anything
            outputs = tuple(f"x{number}" for number in range(width))
        return FittedRecipe(self.content, self.columns, tuple(cells.words), outputs)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return the recipe whose plain values :meth:`to_json` gave."""
        columns, words, outputs = (tuple(map(str, value[name])) for name in ("columns", "words", "outputs"))
        return cls(base64.b64decode(value["skops"], validate=True), columns, words, outputs)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values, ``skops`` in base64."""
        columns, words, outputs = map(list, (self.columns, self.words, self.outputs))
        text = base64.b64encode(self.content).decode()
        return {"skops": text, "columns": columns, "words": words, "outputs": outputs}

    def apply(self, cells: Cells, where: str) -> Tensor:
        """Return the rows as the model's numbers, (n, outputs) float32.

        :raises DataError: the transformer refuses the rows, or its numbers are not finite in float32.
        """
        cells = cells.fitted(self.columns, self.words, where)
        if not len(cells):
            return torch.empty(0, len(self.outputs))
        with np.errstate(over="ignore"):
            numbers = torch.from_numpy(_numbers(self.content, cells, where).astype(np.float32))
        if numbers.shape[1] != len(self.outputs) or not numbers.isfinite().all():
            raise DataError(
                f"{where}: the pipeline gives {numbers.shape[1]} columns of {len(self.outputs)}, or numbers that are "
                "not finite in float32: let it fill empty cells and scale"
            )
        return numbers

    def unseen(self, cells: Cells) -> dict[str, list[str]]:
        """Return nothing: a transformer refuses a category that it does not know, or ignores it as its user chose."""
        return {}

    def notes(self, parts: Iterable[Cells], where: str) -> tuple[str, ...]:
        """Return nothing, as :meth:`unseen`."""
        return ()


@functools.lru_cache(maxsize=4)
def _loaded(content: bytes) -> Any:
    """Return the transformer in a file of skops.

    :raises ConfigError: skops is not installed, the file is damaged, has types that skops does not trust, or no fitted
        transformer.
    """
    try:
        from skops import io
    except ModuleNotFoundError:
        raise ConfigError("?pipeline= needs skops: pip install 'fedcore-zoo[skops]'") from None
    from sklearn.utils.validation import check_is_fitted

    try:
        strange = sorted({*io.get_untrusted_types(data=content)} - {*TRUSTED})
        transformer = None if strange else io.loads(content, trusted=list(TRUSTED))
    except Exception as error:  # zip, JSON, skops' own: a file from elsewhere may raise anything
        raise ConfigError(
            f"?pipeline= is no file that skops.io.dump wrote ({type(error).__name__}: {error!s:.200})"
        ) from error
    if strange:
        raise ConfigError(
            f"?pipeline= holds types that skops does not trust, and which may run code: {first_ten(strange)}. "
            "Use scikit-learn's own steps"
        )
    try:
        check_is_fitted(transformer)
        if not hasattr(transformer, "transform"):
            raise TypeError("it has no transform")
    except Exception as error:  # NotFittedError, or no estimator
        raise ConfigError(f"?pipeline= holds no fitted transformer of scikit-learn: {error!s:.200}") from error
    return transformer


def _numbers(content: bytes, cells: Cells, where: str) -> Any:
    """Return the transformer's numbers of cells, (n, outputs) float64."""
    import pandas as pd

    frame = {}
    for name in cells.columns:
        empty = np.isnan(cells[name])
        frame[name] = cells[name]
        if name in cells.words:
            words = np.array([*cells.words[name], np.nan], dtype=object)
            frame[name] = words[np.where(empty, len(words) - 1, cells[name]).astype(np.int64)]
    try:
        outputs = _loaded(content).transform(pd.DataFrame(frame))
        numbers = np.asarray(outputs.toarray() if hasattr(outputs, "toarray") else outputs, dtype=np.float64)
        if numbers.shape[:1] != (len(cells),) or numbers.ndim != 2:
            raise ValueError(f"it gives numbers of shape {numbers.shape}")
    except ConfigError:
        raise
    except Exception as error:  # scikit-learn's own, of many kinds
        raise DataError(f"{where}: the pipeline refuses the rows: {type(error).__name__}: {error!s:.300}") from error
    return numbers
