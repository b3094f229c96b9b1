"""Which columns are a model's inputs, and of which kind: images, texts or rows of a table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from fedcore_huggingface.images import image_fields
from fedcore_huggingface.rows import row_fields
from fedcore_huggingface.spec import Options
from fedcore_huggingface.splits import origins
from fedcore_huggingface.table import TEXTS, Table
from fedcore_huggingface.texts import text_fields
from fedcore_zoo import FittedRecipe

LABELS = ("label", "labels", "target")

ROW_INDEX = re.compile(r"(Unnamed: \d+|__index_level_\d+__)?")
"""Names that pandas gives the column of a saved row index. On sorted data such numbers tell the class."""

NUMBERS = ("int", "uint", "float", "bool")
"""How the types of numbers begin."""


def input_fields(
    tables: Sequence[Table],
    labels: Sequence[Tensor],
    predicted: Sequence[str],
    options: Options,
    fitted: FittedRecipe | None,
) -> dict[str, Any]:
    """Return the fields of a data set that hold its samples, without those of the classes.

    :param labels: of each table, (n,) int64: classes, or zeros in the place of targets.
    :param predicted: the columns of labels or targets, which are no inputs.
    :param fitted: makes the numbers of a table's columns, instead of what its training rows say.
    """
    fields = origins(tables, options)
    kind, columns = _input_columns(tables[0], labels[0], predicted, options)
    if kind == "image":
        return fields | image_fields(tables, labels, columns[0], options.size)
    if kind == "text":
        return fields | text_fields(tables, labels, columns[0], options)
    return fields | row_fields(tables, labels, columns, predicted, options, fitted)


def _input_columns(
    table: Table, labels: Tensor, predicted: Sequence[str], options: Options
) -> tuple[str, Sequence[str]]:
    """Return the samples' kind, ``image``, ``text`` or ``table``, and the columns that hold them.

    Further columns of classes are not among them, unless they are named: another one of ``LABELS``, and words for the
    classes.
    """
    from datasets import Image, Value

    features = {
        column: feature
        for column, feature in table.features.items()
        if column not in (*predicted, options.source, options.groups)
        and not ROW_INDEX.fullmatch(column)
        and column.lower() not in LABELS
    }
    dtypes = {column: feature.dtype for column, feature in features.items() if isinstance(feature, Value)}
    types = (*NUMBERS, "null") if options.part else NUMBERS  # a client's cells of a column may all be empty
    numbers = [column for column, dtype in dtypes.items() if dtype.startswith(types)]
    columns = options.columns
    if options.categories and columns is None:
        columns = (*(column for column in numbers if column not in options.categories), *options.categories)
    if unused := [column for column in options.categories if column not in (columns or ())]:
        raise table.error(f"?categories={unused[0]} is not among ?columns={','.join(columns or ())}; add it there")
    named = {"image": options.image, "text": options.text, "table": columns}
    chosen = [(kind, value) for kind, value in named.items() if value is not None]
    if len(chosen) > 1:
        raise table.error("write one of image, text and columns")
    if chosen:
        kind, value = chosen[0]
        columns = (value,) if isinstance(value, str) else value
        for column in columns:
            table.feature(column)
        if both := [column for column in predicted if column in columns]:
            raise table.error(f"column {both[0]!r} holds what is predicted, so it cannot be an input, too")
        return kind, columns
    of_kind = {
        "image": [column for column, feature in features.items() if isinstance(feature, Image)],
        "text": [
            column
            for column, dtype in dtypes.items()
            if dtype.startswith(TEXTS) and not _are_names(table.cells(column), labels)
        ],
        "table": numbers,
    }
    for kind in ("image", "text"):
        if len(of_kind[kind]) == 1:
            return kind, of_kind[kind]
        if of_kind[kind]:
            table_of = ", or ?columns=... for a table of numbers" * bool(numbers)
            raise table.error(f"which column? Write ?{kind}=COLUMN{table_of}; {table.known}")
    if not numbers:
        raise table.error(f"no column holds images, texts or numbers; {table.known}")
    return "table", numbers


def _are_names(cells: Iterable[Any], labels: Tensor) -> bool:
    """Return whether each class has one word, and each word one class."""
    pairs = set(zip(cells, labels.tolist(), strict=True))
    return 1 < len(pairs) == len({word for word, _ in pairs}) == len({label for _, label in pairs})
