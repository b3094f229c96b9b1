"""Data sets that the library datasets reads: images, texts by a tokenizer, tables.

They are folders of ``save_to_disk``, CSV and Parquet files, and repositories of the Hub.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcore import ConfigError
from fedcore.data import Dataset, Split, Task, assemble, find_data, numbered_as, with_labels
from fedcore_huggingface.language import TokenBlocks, language_dataset
from fedcore_huggingface.spec import Options, folder_of, split
from fedcore_tasks import MultiLabel, Regression, Survival
from fedcore_zoo import (
    Cells,
    FittedRecipe,
    Recipe,
    SequenceSamples,
    TableSamples,
    fixed_split,
    mean_and_deviation,
    numbered_groups,
    numbers_as_words,
    spelled_alike,
    whole_rows,
    word_of,
)

Array: TypeAlias = npt.NDArray[Any]

LABELS = ("label", "labels", "target")
TESTS = ("test", "validation", "valid", "dev")
"""Names of the split that is the test set, the first that is there and has labels."""

ROW_INDEX = re.compile(r"(Unnamed: \d+|__index_level_\d+__)?")
"""Names that pandas gives the column of a saved row index. On sorted data such numbers tell the class."""

FILES = (".csv", ".parquet")
"""The suffixes of files that are tables."""

REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
"""``OWNER/NAME`` on the Hub. A folder of this name comes first."""

NUMBERS = ("int", "uint", "float", "bool")
"""How the types of numbers begin."""

FEW = 1000
"""Rows that show of most columns that they do not tell the class."""

CSV_BLOCK = 1 << 26
"""Bytes of a CSV file that are read at once. A row of a wide table has more than the default."""

EMPTY = (
    *("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A"),
    *("NA", "NULL", "NaN", "None", "n/a", "nan", "null"),
)
"""Cells of a CSV file that are empty, as for ``pandas.read_csv``: what it reads later means the same to the model."""

EXACT = 2.0**53
"""Up to here float64 tells whole numbers from their neighbours."""

FEWEST = 10
"""Training samples that a data set needs, unless it is one client's part."""

TEST_SIZE = 0.2

SMALLEST_STRATUM = 5
"""Samples of each group of similar targets, of which the test part gets one; with fewer it is drawn at random."""


@dataclass(frozen=True)
class Table:
    """A table's Arrow columns and their features, which datasets would copy at each access."""

    features: Mapping[str, Any]
    columns: Mapping[str, Any]
    """The ``pyarrow.ChunkedArray`` of each column."""
    rows: npt.NDArray[np.int64]
    """The positions of the table's rows in the columns."""
    folders: tuple[Path, ...]
    """The folders of the files that cells may name."""

    @classmethod
    def of(cls, rows: Any, folders: tuple[Path, ...]) -> Self:
        """Return a ``datasets.Dataset`` as a table. Nothing is decoded."""
        arrow = rows.with_format("arrow")[:]
        columns = dict(zip(arrow.column_names, arrow.columns, strict=True))
        return cls(rows.features, columns, np.arange(len(rows)), folders)

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, rows: npt.NDArray[np.int64]) -> Table:
        """Return the table of these rows."""
        return replace(self, rows=self.rows[rows])

    def cells(self, column: str) -> Iterator[Any]:
        """Yield a column's cells as Python values."""
        values = self.columns[column]
        return (values[row].as_py() for row in self.rows.tolist())

    def numbers(self, column: str) -> Array:
        """Return a column's cells as float64, empty ones as nan.

        :raises TypeError: or ValueError. They are no numbers.
        """
        values: Array = self.columns[column].to_numpy()[self.rows]
        if values.dtype.kind not in "biufO":
            raise TypeError(f"they are {self.features[column].dtype}")
        return values.astype(np.float64)


def dataset(rest: str) -> Callable[[Path | None], Dataset]:
    """A folder of save_to_disk, a CSV or Parquet file, or OWNER/NAME on the Hub: hf:PLACE?text=sentence&source=writer.

    :raises ConfigError: an unknown option; the function that is returned raises it if there is no such place.
    """
    name = f"hf:{rest}"
    path, options = split(rest, name)

    def load(data_dir: Path | None = None) -> Dataset:
        (table, folders), chosen, fitted = _table(path, options, name, data_dir), options, None
        if options.pipeline is not None:
            if options.columns is not None or options.missing is not None or options.indicators:
                raise ConfigError(f"{name}: the pipeline says the columns and fills empty cells; leave out the others")
            fitted = FittedRecipe.load(find_data(options.pipeline, data_dir))
            chosen = options.model_copy(update={"columns": ",".join(fitted.columns)})
        return read(table, folders, chosen, name, fitted)

    return load


def _table(path: str, options: Options, name: str, data_dir: Path | None) -> tuple[Any, tuple[Path, ...]]:
    """Return the table or the splits at a place, and the folders of the files that its cells may name."""
    where = find_data(path, data_dir)
    if where.is_dir():
        return _saved(where, name), (where,)
    if where.suffix in FILES:
        if where.is_file():
            return _file(where, name), (where.parent,)
    elif REPOSITORY.fullmatch(path):
        from datasets.config import HF_DATASETS_CACHE
        from huggingface_hub.constants import HF_HUB_CACHE

        return _of_the_hub(path, options, name), (Path(HF_DATASETS_CACHE), Path(HF_HUB_CACHE))
    raise ConfigError(
        f"{name}: {where} is no folder on this machine that datasets' save_to_disk wrote, no .csv or .parquet file, "
        "and not OWNER/NAME of a data set of the Hub"
    )


def read(
    table: Any, folders: tuple[Path, ...], options: Options, name: str, fitted: FittedRecipe | None = None
) -> Dataset:
    """Make a data set of a ``datasets.Dataset`` or a ``DatasetDict``.

    Without a split for testing, a stratified fifth is the test set, always the same one.

    :param fitted: makes the numbers of a table's columns, instead of what its training rows say.
    :raises ConfigError: its columns do not say what they are, or there are too few samples.
    """
    train, tests = _splits(table, folders, options, name)
    if options.block_size is not None:
        return _blocks(train, next(iter(tests.values()), None), options.block_size, options, name)
    if options.target is not None:
        columns = _target_columns(train, options, name)
        test = next(iter(tests.values()), None)
        cells_of = partial(_targets, columns=columns, name=name)
        tables, targets = _in_two(train, test, cells_of, partial(_target_strata, name=name), options, name)
        zeros = [torch.zeros(len(part), dtype=torch.int64) for part in tables]  # the targets take their place
        samples = _samples(tables, zeros, columns, options, name, fitted)
        return with_labels(Dataset(name=name, num_classes=1, **samples), _task_of(targets[0]), *targets)
    column = _label_column(train, options, name)
    where = f"{name}: column {column!r}"

    def strata_of(cells: Array) -> tuple[Tensor, Sequence[str]]:
        (labels,), names = _labels([train.features[column]], [cells], where)
        return labels, names

    unlabelled = [split for split, part in tests.items() if options.test is None and _is_unlabelled(part, column)]
    test = next((part for split, part in tests.items() if split not in unlabelled), None)
    tables, cells = _in_two(train, test, partial(_class_cells, column=column, name=name), strata_of, options, name)
    labels, names = _labels([part.features[column] for part in tables], cells, where)
    samples = _samples(tables, labels, (column,), options, name, fitted)
    samples["notes"] = (
        *(f"{name}: split {split!r} has no labels and is not used" for split in unlabelled),
        *spelled_alike(names, where),
        *samples["notes"],
    )
    return Dataset(name=name, num_classes=len(names), class_names=names, **samples)


def _samples(
    tables: Sequence[Table],
    labels: Sequence[Tensor],
    predicted: Sequence[str],
    options: Options,
    name: str,
    fitted: FittedRecipe | None,
) -> dict[str, Any]:
    """Return the fields of a data set that hold its samples, without those of the classes.

    :param labels: of each table, (n,) int64: classes, or zeros in the place of targets.
    :param predicted: the columns of labels or targets, which are no inputs.
    """
    train = tables[0]
    fields: dict[str, Any] = {"notes": ()}
    if options.groups is not None:
        fields["groups"] = numbered_groups(name, *(_group_names(table, options.groups, name) for table in tables))
    if options.source is not None:
        fields["sources"], fields["source_names"] = _numbered(train, options.source, name)
    kind, columns = _inputs(train, labels[0], options, predicted, name)
    if kind == "image":
        pixels = _images(tables, columns[0], options.size, name)
        images = assemble(name, *(Split(part, numbers) for part, numbers in zip(pixels, labels, strict=True)))
        return fields | {"train": images.train, "test": images.test, "input_shape": images.input_shape}
    if kind == "text":
        tokens, vocabulary = _tokens(tables, columns[0], options, name)
        samples = (SequenceSamples.of(part, numbers.tolist()) for part, numbers in zip(tokens, labels, strict=True))
        fields |= zip(("train", "test"), samples, strict=True)
        return fields | {"input_shape": (vocabulary,), "model": "embedding-bag"}
    cells = _cells(tables, columns, _word_columns(train, columns, options), options, name)
    notes: list[str] = []
    if telling := _telling([part.values for part in cells], labels):
        note = f"{name}: a value is a class, one to one, in: {_listed(columns[place] for place in telling)}"
        if options.columns is None:
            kept = np.delete(np.arange(len(columns)), telling)
            columns = [columns[place] for place in kept]
            cells = [Cells(tuple(columns), part.values[:, kept], part.words) for part in cells]
            note += ". Name ?columns=... if these are inputs; they are not used"
        if not columns:
            raise ConfigError(f"{note}, and no other column holds numbers")
        notes.append(note)
    if options.columns is None:
        used = {*columns, *predicted, options.source, options.groups}
        left = [column for column in train.features if column not in used]
        notes.append(f"{name}: columns used: {_listed(columns)}; not used: {_listed(left)}")
    notes += _column_notes(train, cells, name)
    recipe = (
        fitted.of(cells[0]) if fitted else Recipe.of(cells[0], missing=options.missing, indicators=options.indicators)
    )
    if not recipe.outputs:
        raise ConfigError(f"{name}: no column holds a value; name other ?columns=")
    rows = (
        TableSamples(part, numbers, recipe, name, options.missing, options.indicators)
        for part, numbers in zip(cells, labels, strict=True)
    )
    fields |= zip(("train", "test"), rows, strict=True)
    return fields | {"input_shape": (len(recipe.outputs),), "model": "mlp", "notes": tuple(notes)}


def _blocks(train: Table, test: Table | None, size: int, options: Options, name: str) -> Dataset:
    """Return texts as blocks of tokens. No block has texts of two sources or groups."""
    column = _text_column(train, options, name)
    if test is None:
        nothing = torch.zeros(len(train), dtype=torch.int64)
        train, test = (train.select(rows) for rows in _parts(train, nothing, ("",), options, name))
    tables = (train, test)
    tokenizer = _tokenizer(column, options, name)
    if (end := tokenizer.eos_token_id) is None:
        raise ConfigError(f"{name}: the tokenizer has no end token, which separates texts: set its eos_token, save it")
    tokens = [
        tokenizer(_texts(table, column, name), add_special_tokens=False, verbose=False)["input_ids"] for table in tables
    ]
    described: dict[str, Any] = {}
    keys: list[Array] = []
    if options.source is not None:
        described["sources"], described["source_names"] = _numbered(train, options.source, name)
        keys.append(described["sources"].numpy())
    if options.groups is not None:
        described["groups"] = numbered_groups(name, *(_group_names(table, options.groups, name) for table in tables))
        keys.append(described["groups"].numpy())
    keys_of_texts = list(zip(*keys, strict=True)) if keys else [()] * len(train)
    blocks, firsts = TokenBlocks.by(keys_of_texts, tokens[0], size, end)
    described |= {kind: described[kind][firsts] for kind in ("sources", "groups") if kind in described}
    return language_dataset(name, blocks, TokenBlocks.of(tokens[1], size, end), len(tokenizer), **described)


def _text_column(table: Table, options: Options, name: str) -> str:
    """Return the column of texts of which next tokens are predicted."""
    from datasets import Value

    for option in ("label", "target", "image", "columns", "categories", "size", "part"):
        if getattr(options, option):
            raise ConfigError(f"{name}: ?block_size is for texts whose next tokens are predicted, without ?{option}")
    used = (options.source, options.groups)
    texts = [
        column
        for column, feature in table.features.items()
        if isinstance(feature, Value) and feature.dtype.startswith(("string", "large_string")) and column not in used
    ]
    if options.text is None and len(texts) != 1:
        raise ConfigError(f"{name}: which column holds the texts? Write ?text=COLUMN; {_known(table)}")
    return options.text or texts[0]


def _saved(folder: Path, name: str) -> Any:
    from datasets import load_from_disk

    try:
        return load_from_disk(str(folder))
    except Exception as error:  # pyarrow, JSON, the library's own: the advice is the same
        raise ConfigError(
            f"{name}: {folder} is no data set that datasets' save_to_disk wrote ({type(error).__name__}: {error})"
        ) from error


def _file(path: Path, name: str) -> Any:
    """Read a file without datasets' cache, which would copy it into the home folder."""
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from pyarrow import csv, parquet  # type: ignore[import-untyped]

    try:
        if path.suffix == ".csv":
            _check_separator(path, name)
            reading = csv.ReadOptions(block_size=CSV_BLOCK)
            empty = csv.ConvertOptions(null_values=EMPTY, strings_can_be_null=True)
            table = csv.read_csv(str(path), read_options=reading, convert_options=empty)
        else:
            table = parquet.read_table(str(path))
        return Dataset(InMemoryTable(table), fingerprint="file")
    except ConfigError:
        raise
    except Exception as error:  # pyarrow's own: the advice is the same
        raise ConfigError(f"{name}: {path} cannot be read ({type(error).__name__}: {error})") from error


def _check_separator(path: Path, name: str) -> None:
    """Refuse a file whose first line has no comma but another separator."""
    with path.open("rb") as file:
        first = file.readline(CSV_BLOCK)
    if b"," not in first and (mark := next((mark for mark in ";\t|" if mark.encode() in first), "")):
        raise ConfigError(
            f"{name}: the columns of {path} are separated by {mark!r}; save it with commas between columns and points "
            f"in numbers: pandas.read_csv(FILE, sep={mark!r}, decimal=',').to_csv(NEW, index=False)"
        )


def _of_the_hub(repository: str, options: Options, name: str) -> Any:
    """Return a data set of the Hub, from the cache of datasets if it is there."""
    from datasets import load_dataset

    try:
        return load_dataset(repository, options.subset, revision=options.revision)
    except Exception as error:  # the library's own, the network's
        raise ConfigError(
            f"{name}: neither the Hub nor the cache on this machine has it ({type(error).__name__}: {error}). Where "
            "there is no network, name a folder that datasets' save_to_disk wrote"
        ) from error


def _splits(table: Any, folders: tuple[Path, ...], options: Options, name: str) -> tuple[Table, dict[str, Table]]:
    """Return the training split, and the splits that can be the test set by name, in order of preference."""
    from datasets import DatasetDict

    splits = dict(table) if isinstance(table, DatasetDict) else {"train": table}
    if "train" not in splits:
        raise ConfigError(f"{name}: none of its splits is named train; there are: {', '.join(splits)}")
    train = Table.of(splits.pop("train"), folders)
    if options.test is not None and options.test not in splits:
        raise ConfigError(
            f"{name}: has no split {options.test!r} for testing; next to train there are: {', '.join(splits) or 'none'}"
        )
    if len(train) < FEWEST and not (options.part and len(train)):
        raise ConfigError(
            f"{name}: has {len(train)} training samples; at least {FEWEST} are needed. One client's part, ?part=yes, "
            "may have fewer; a client of a federation takes all rows with --test-fraction"
        )
    chosen = TESTS if options.test is None else (options.test,)
    return train, {split: Table.of(splits[split], folders) for split in chosen if split in splits}


def _is_unlabelled(table: Table, label: str) -> bool:
    """Return whether all labels are -1, as in the test splits of benchmarks that keep the labels to themselves."""
    from datasets import ClassLabel

    return isinstance(table.features.get(label), ClassLabel) and set(table.cells(label)) == {-1}


def _label_column(table: Table, options: Options, name: str) -> str:
    from datasets import ClassLabel

    if options.label is not None:
        return _plain(table, options.label, name)
    columns = [column for column in LABELS if column in table.features]
    columns = columns or [column for column, feature in table.features.items() if isinstance(feature, ClassLabel)]
    if not columns or (len(columns) > 1 and columns[0] not in LABELS):
        raise ConfigError(
            f"{name}: which column holds the classes? Write ?label=COLUMN, ?target=COLUMN to predict numbers, or "
            f"?block_size=128 to predict the next tokens of texts; {_known(table)}"
        )
    return _plain(table, columns[0], name)


def _target_columns(table: Table, options: Options, name: str) -> tuple[str, ...]:
    if options.label is not None:
        raise ConfigError(f"{name}: write ?label for a column of classes, or ?target for numbers, not both")
    return tuple(_plain(table, column, name) for column in (options.target or "").split(","))


def _in_two(
    train: Table,
    test: Table | None,
    cells_of: Callable[[Table], Array],
    strata_of: Callable[[Array], tuple[Tensor, Sequence[str]]],
    options: Options,
    name: str,
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
        parts = _parts(train, *strata_of(cells), options, name)
    return [train.select(rows) for rows in parts], [cells[rows] for rows in parts]


def _targets(table: Table, columns: Sequence[str], name: str) -> Array:
    """Return the cells of columns as numbers, (n,) or (n, columns) float64."""
    values = np.empty((len(table), len(columns)))
    for place, column in enumerate(columns):
        try:
            values[:, place] = table.numbers(column)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{name}: the cells of column {column!r} are not all numbers ({error}). Write ?label={column} if they "
                "are classes"
            ) from error
        if wrong := len(table) - int(np.isfinite(values[:, place]).sum()):
            raise ConfigError(
                f"{name}: {wrong} of the {len(table)} cells of column {column!r}, a target, are empty or not finite. "
                "Leave out their rows"
            )
    return values[:, 0] if len(columns) == 1 else values


def _task_of(targets: Array) -> type[Task]:
    """Return the task of targets (n,) or (n, C)."""
    if targets.ndim == 1:
        return Regression
    binary = [bool(np.isin(column, (0, 1)).all()) for column in targets.T]
    if all(binary):
        return MultiLabel
    return Survival if len(binary) == 2 and binary[1] and (targets[:, 0] >= 0).all() else Regression


def _target_strata(targets: Array, name: str) -> tuple[Tensor, Sequence[str]]:
    """Return groups of similar targets, (n,) int64, and their names."""
    task = _task_of(targets)
    labels = task.read(targets, len(targets), name)
    strata = task(labels).strata(labels)
    if int(strata.unique(return_counts=True)[1].min()) < SMALLEST_STRATUM:
        strata = torch.zeros_like(strata)
    return strata, [str(number) for number in range(int(strata.max()) + 1)]


def _class_cells(table: Table, column: str, name: str) -> Array:
    """Return the cells of a column of classes, (n,): whole numbers, or words."""
    cells = [_whole(value) for value in _column(table, column, name)]
    if any(cell is None or isinstance(cell, float) for cell in cells):
        raise ConfigError(
            f"{name}: column {column!r} holds no classes: fractions or empty cells are among its values. Write "
            f"?target={column} to predict numbers. Of words these are empty: {', '.join(EMPTY[-7:])}"
        )
    return np.array(cells, dtype=object)


def _labels(features: Sequence[Any], parts: Sequence[Array], where: str) -> tuple[list[Tensor], tuple[str, ...]]:
    """Return the classes of each part's cells as 0..C-1, and their names, which are the first part's.

    :raises DataError: a class of another part is not among them.
    """
    (first, names), *others = (_classes(feature, cells) for feature, cells in zip(features, parts, strict=True))
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


def _whole(value: Any) -> Any:
    """Return a float such as 2.0 as an integer, and a word without blanks around it; None for nothing but blanks.

    pandas writes whole numbers as floats in a column with gaps, and sites add blanks: both are the same class.
    """
    if isinstance(value, str):
        return value.strip() or None
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _parts(
    table: Table, strata: Tensor, names: Sequence[str], options: Options, name: str
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the positions of a training part and of a test part, stratified by ``strata`` (n,); groups stay together.

    :param names: of the strata, for the message.
    """
    groups = None if options.groups is None else _group_names(table, options.groups, name)
    try:
        train, test = fixed_split(strata.numpy(), TEST_SIZE)
    except ValueError:  # scikit-learn's own
        classes, counts = strata.unique(return_counts=True)
        rarest = int(counts.argmin())
        raise ConfigError(
            f"{name}: has no split for testing, and not enough samples of each class to make one: {len(strata)} "
            f"samples of {len(classes)} classes, {counts[rarest]} of class {names[classes[rarest]]!r}. Leave rare "
            "classes out, or save the data with a split named test"
        ) from None
    if groups is None:
        return train, test
    is_test = whole_rows(np.isin(np.arange(len(strata)), test), groups)
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def _group_names(table: Table, column: str, name: str) -> Array:
    """Return the group of each row as a word, (n,)."""
    cells = [word_of(cell) for cell in _column(table, _plain(table, column, name), name)]
    if None in cells:
        raise ConfigError(f"{name}: column {column!r} has empty cells: samples without a group")
    return np.array(cells, dtype=str)


def _inputs(table: Table, labels: Tensor, options: Options, used: Sequence[str], name: str) -> tuple[str, list[str]]:
    """Return the samples' kind, ``image``, ``text`` or ``table``, and the columns that hold them.

    Further columns of classes are not among them, unless they are named: another one of ``LABELS``, and words for the
    classes.
    """
    from datasets import Image, Value

    features = {
        column: feature
        for column, feature in table.features.items()
        if column not in (*used, options.source, options.groups)
        and not ROW_INDEX.fullmatch(column)
        and column.lower() not in LABELS
    }
    numbers = (*NUMBERS, "null") if options.part else NUMBERS  # a client's cells of a column may all be empty
    named = {"image": options.image, "text": options.text, "table": options.columns}
    if options.categories is not None and options.columns is None:
        words = options.categories.split(",")
        others = [
            column
            for column, feature in features.items()
            if column not in words and isinstance(feature, Value) and feature.dtype.startswith(numbers)
        ]
        named["table"] = ",".join([*others, *words])
    chosen = [(kind, value) for kind, value in named.items() if value is not None]
    if len(chosen) > 1:
        raise ConfigError(f"{name}: write one of image, text and columns")
    if chosen:
        kind, value = chosen[0]
        columns = value.split(",") if kind == "table" else [value]
        for column in columns:
            _require(table, column, name)
        if both := [column for column in used if column in columns]:
            raise ConfigError(f"{name}: column {both[0]!r} holds what is predicted, so it cannot be an input, too")
        return kind, columns
    dtypes = {column: feature.dtype for column, feature in features.items() if isinstance(feature, Value)}
    of_kind = {
        "image": [column for column, feature in features.items() if isinstance(feature, Image)],
        "text": [
            column
            for column, dtype in dtypes.items()
            if dtype.startswith(("string", "large_string")) and not _are_names(table.cells(column), labels)
        ],
        "table": [column for column, dtype in dtypes.items() if dtype.startswith(numbers)],
    }
    for kind in ("image", "text"):
        if len(of_kind[kind]) == 1:
            return kind, of_kind[kind]
        if of_kind[kind]:
            table_of = ", or ?columns=... for a table of numbers" * bool(of_kind["table"])
            raise ConfigError(f"{name}: which column? Write ?{kind}=COLUMN{table_of}; {_known(table)}")
    if not of_kind["table"]:
        raise ConfigError(f"{name}: no column holds images, texts or numbers; {_known(table)}")
    return "table", of_kind["table"]


def _are_names(cells: Iterable[Any], labels: Tensor) -> bool:
    """Return whether each class has one word, and each word one class."""
    pairs = set(zip(cells, labels.tolist(), strict=True))
    return 1 < len(pairs) == len({word for word, _ in pairs}) == len({label for _, label in pairs})


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


def _images(tables: Sequence[Table], column: str, size: int | None, name: str) -> list[Tensor]:
    """Return the pixels of each table, (n, C, H, W) uint8. C is 1 if all images are grey, else 3."""
    modes = {image.mode for table in tables for image in _decoded(table, column, name)}
    if deep := sorted(mode for mode in modes if mode.startswith(("I", "F"))):  # Pillow would cut values off at 255
        raise ConfigError(
            f"{name}: column {column!r} holds images of more than 8 bits a channel (mode {deep[0]}); rescale them to "
            "8 bits, or use npz:FILE with floats"
        )
    grey = modes <= {"1", "L"}
    pixels = []
    for table in tables:
        arrays = []
        for image in _decoded(table, column, name):
            image = image.convert("L" if grey else "RGB")
            arrays.append(np.asarray(image if size is None else image.resize((size, size))))
        shapes = {array.shape[:2] for array in arrays}
        if len(shapes) > 1:
            raise ConfigError(f"{name}: images of {len(shapes)} sizes; resize them to one, for example with ?size=32")
        stacked = torch.from_numpy(np.stack(arrays))
        pixels.append(stacked.unsqueeze(1) if grey else stacked.permute(0, 3, 1, 2).contiguous())
    return pixels


def _decoded(table: Table, column: str, name: str) -> Iterator[Any]:
    """Yield the images of a column. A cell may name a file instead, inside of the data set's own folder."""
    from datasets import Image

    _require(table, column, name)
    if not isinstance(feature := table.features[column], Image):
        raise ConfigError(
            f"{name}: column {column!r} holds no images, as datasets' cast_column(..., Image()) makes them"
        )
    decode = Image(mode=feature.mode).decode_example
    for row, cell in zip(table.rows, table.cells(column), strict=True):
        where = f"{name}: row {row} of column {column!r}"
        if cell and cell["bytes"] is None and cell["path"] is not None:
            cell["path"] = str(_file_inside(cell["path"], table.folders, where))
        try:
            yield decode(cell or {"bytes": None, "path": None})
        except Exception as error:  # Pillow's own, of many kinds: the advice is the same
            raise ConfigError(f"{where} is no image that can be read ({error}). Leave out its row") from error


def _file_inside(path: str, folders: Sequence[Path], where: str) -> Path:
    """Return the file that a cell names.

    :raises ConfigError: it is an address, or not inside of the folders. A table from elsewhere thus opens nothing else.
    """
    for folder in () if "\0" in path else folders:
        file = (folder / path).resolve()
        if file.is_relative_to(folder.resolve()) and file.is_file():
            return file
    raise ConfigError(
        f"{where} names {path!r} instead of an image, which is no file in {' or '.join(map(str, folders))}; it is not "
        "opened. Save the data set with the images themselves"
    )


def _tokens(tables: Sequence[Table], column: str, options: Options, name: str) -> tuple[list[list[list[int]]], int]:
    """Return each table's texts as tokens, and the size of the vocabulary."""
    tokenizer, parts = _tokenizer(column, options, name), []
    for table in tables:
        tokens = tokenizer(_texts(table, column, name), truncation=True, max_length=options.max_length)["input_ids"]
        if not all(tokens):
            raise ConfigError(f"{name}: column {column!r} has texts without a token; leave such rows out")
        parts.append(tokens)
    return parts, len(tokenizer)


def _tokenizer(column: str, options: Options, name: str) -> Any:
    """Return the tokenizer of a column of texts."""
    from transformers import AutoTokenizer

    if options.tokenizer is None:
        raise ConfigError(
            f"{name}: column {column!r} holds texts; name a tokenizer that save_pretrained wrote: ?tokenizer=FOLDER. "
            f"For a table of numbers name their ?columns=..., or this column as its ?source={column}"
        )
    folder = folder_of(options.tokenizer, f"{name}: tokenizer")
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library's own, JSON: the advice is the same
        raise ConfigError(f"{name}: {folder} holds no tokenizer ({type(error).__name__}: {error})") from error


def _texts(table: Table, column: str, name: str) -> list[str]:
    """Return the cells of a column of texts."""
    texts = _column(table, column, name)
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{name}: column {column!r} has cells that are no texts")
    return texts


def _word_columns(table: Table, columns: Sequence[str], options: Options) -> list[str]:
    """Return which columns of a table are categories: those named so, and the columns of words."""
    from datasets import ClassLabel

    named = [] if options.categories is None else options.categories.split(",")
    kinds = ("string", "large_string")
    return [
        column
        for column in columns
        if column in named
        or isinstance(table.features.get(column), ClassLabel)
        or str(getattr(table.features.get(column), "dtype", "")) in kinds
    ]


def _cells(
    tables: Sequence[Table], columns: Sequence[str], words: Sequence[str], options: Options, name: str
) -> list[Cells]:
    """Return the cells of each table. The words of a column are numbered alike in all of them."""
    values = [np.empty((len(table), len(columns))) for table in tables]
    known: dict[str, tuple[str, ...]] = {}
    for place, column in enumerate(columns):
        if column not in words:
            for table, rows in zip(tables, values, strict=True):
                _require(table, column, name)
                try:
                    rows[:, place] = table.numbers(column)
                except (TypeError, ValueError) as error:
                    kind = str(getattr(table.features[column], "dtype", ""))
                    hint = "; write a date as a number, such as days since a day" * kind.startswith(("date", "time"))
                    raise ConfigError(
                        f"{name}: the cells of column {column!r} are not all numbers ({error}){hint}"
                    ) from error
            continue
        texts = [[word_of(cell) for cell in _column(table, column, name)] for table in tables]
        known[column] = tuple(sorted({text for part in texts for text in part if text is not None}))
        if len(known[column]) > Cells.most_words:
            raise ConfigError(
                f"{name}: column {column!r} has {len(known[column]):,} different values, which are no categories; "
                f"leave it out of ?columns, or name texts as ?text={column}"
            )
        if column not in (options.categories or "").split(",") and (wrong := numbers_as_words(known[column])):
            raise ConfigError(f"{name}: column {column!r} {wrong}. If they are names, write ?categories={column}")
        numbers = {word: number for number, word in enumerate(known[column])}
        for rows, part in zip(values, texts, strict=True):
            rows[:, place] = [np.nan if text is None else numbers[text] for text in part]
    filled = options.missing is not None or options.pipeline is not None
    for table_rows in values:
        usable = np.isfinite(table_rows) | (np.isnan(table_rows) & filled)
        if not usable.all():
            holes = [columns[place] for place in np.flatnonzero(~usable.all(axis=0)).tolist()]
            raise ConfigError(
                f"{name}: cells are empty or no finite number, in: {_listed(holes)}. Fill them or leave out their "
                "rows, write ?missing=median or most-frequent for empty ones, or name other ?columns="
            )
    return [Cells(tuple(columns), rows, known) for rows in values]


def _column_notes(table: Table, parts: Sequence[Cells], name: str) -> tuple[str, ...]:
    """Return notes on columns of a table's parts that say little, or too much."""
    cells = parts[0]
    numbers = [column for column in cells.columns if _are_different(np.concatenate([part[column] for part in parts]))]
    notes = [
        f"{name}: a different word or whole number in each row, as record numbers are, in: {_listed(numbers)}. "
        "They may tell the class of these rows, and of no others. Name other ?columns=... to leave them out"
    ] * bool(numbers)
    columns = [column for column in cells.columns if column not in cells.words]
    if not columns:
        return tuple(notes)
    rows = np.column_stack([cells[column] for column in columns])
    constant = mean_and_deviation(rows)[2]
    with np.errstate(invalid="ignore"):
        largest = np.abs(rows).max(axis=0)
    inexact = [
        table.features[column].dtype in ("int64", "uint64") and most > EXACT
        for column, most in zip(columns, largest, strict=True)
    ]
    return (
        *notes,
        *(
            f"{name}: {note}: {_listed(itertools.compress(columns, mask))}. Name other ?columns=... to leave them out"
            for mask, note in (
                (constant, "one value in all training rows, which tells nothing, in"),
                (inexact, "whole numbers above 2^53, which lose their last digits, in"),
            )
            if np.any(mask)
        ),
    )


def _are_different(cells: Array) -> bool:
    """Return whether a column of at least 20 rows has another whole number, or another word, in each, (n,) float64."""
    known = cells[~np.isnan(cells)]
    return len(known) >= 2 * FEWEST and bool((known == np.floor(known)).all()) and len(np.unique(known)) == len(known)


def _numbered(table: Table, column: str, name: str) -> tuple[Tensor, tuple[str, ...]]:
    """Return a column's values as numbers 0..G-1, in their sorted order, and each number's value as a name."""
    values = [_whole(value) for value in _column(table, _plain(table, column, name), name)]
    if any(value is None or value != value for value in values):
        raise ConfigError(f"{name}: column {column!r} has cells that are empty or no number: samples without a source")
    numbers = {value: number for number, value in enumerate(sorted(set(values)))}
    labels = getattr(table.features[column], "names", None)  # of a ClassLabel, whose cells are numbers
    names = tuple(str(labels[value] if labels else value) for value in numbers)
    return torch.tensor([numbers[value] for value in values], dtype=torch.int64), names


def _column(table: Table, column: str, name: str) -> list[Any]:
    _require(table, column, name)
    return list(table.cells(column))


def _plain(table: Table, column: str, name: str) -> str:
    """Return the name of a column whose cells are single values, such as classes or sources.

    :raises ConfigError: they are not, or there is no such column.
    """
    from datasets import ClassLabel, Value

    _require(table, column, name)
    if not isinstance(feature := table.features[column], (ClassLabel, Value)):
        raise ConfigError(f"{name}: cells of column {column!r} have to be single words or numbers, not {feature}")
    return column


def _require(table: Table, column: str, name: str) -> None:
    if column not in table.features:
        raise ConfigError(f"{name}: has no column {column!r}; {_known(table)}")


def _known(table: Table) -> str:
    return f"there are: {_some(list(table.features))}"


def _listed(columns: Iterable[str]) -> str:
    return _some(list(map(repr, columns))) or "none"


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:10])}{f' and {len(names) - 10} more' * (len(names) > 10)}"
