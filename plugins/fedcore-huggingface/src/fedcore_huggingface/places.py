"""Where data sets lie: folders of ``save_to_disk``, CSV and Parquet files, and repositories of the Hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fedcore import ConfigError
from fedcore.data import find_data
from fedcore_huggingface.spec import Options, refusing
from fedcore_zoo import MOVED

FILES = (".csv", ".parquet")
"""The suffixes of files that are tables."""

SAVED = ("dataset_info.json", "dataset_dict.json")
"""Files of ``save_to_disk``, of a data set and of several splits."""

REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
"""``OWNER/NAME`` on the Hub. A folder of this name comes first."""

CSV_BLOCK = 1 << 26
"""Bytes of a CSV file that are read at once. A row of a wide table has more than the default."""

EMPTY = (
    *("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A"),
    *("NA", "NULL", "NaN", "None", "n/a", "nan", "null"),
)
"""Cells of a CSV file that are empty, as for ``pandas.read_csv``: what it reads later means the same to the model."""


def rows_at(path: str, options: Options, name: str, data_dir: Path | None) -> tuple[Any, tuple[Path, ...]]:
    """Return the ``datasets.Dataset`` or the ``DatasetDict`` at a place, and the folders of files that cells may name.

    :raises ConfigError: there is none, or it cannot be read.
    """
    where = find_data(path, data_dir)
    # The folder of data sets may have one of NAME's own files, such as the official ones of mnist.
    named = not REPOSITORY.fullmatch(path) or Path(path).is_dir()
    if where.is_dir() and (named or any((where / file).is_file() for file in SAVED)):
        from datasets import load_from_disk

        files = "{'train': ..., 'test': ...}"
        advice = f". Name one CSV file, or save several: load_dataset('csv', data_files={files}).save_to_disk(NEW)"
        with refusing(f"{name}: {where} is no data set that datasets' save_to_disk wrote", advice):
            return load_from_disk(str(where)), (where,)
    if where.suffix in FILES:
        if where.is_file():
            return _file(where, name), (where.parent,)
    elif REPOSITORY.fullmatch(path):
        from datasets import load_dataset
        from datasets.config import HF_DATASETS_CACHE
        from huggingface_hub.constants import HF_HUB_CACHE

        advice = ". Where there is no network, name a folder that datasets' save_to_disk wrote"
        with refusing(f"{name}: neither the Hub nor the cache on this machine has it", advice):
            rows = load_dataset(path, options.subset, revision=options.revision)
        return rows, (Path(HF_DATASETS_CACHE), Path(HF_HUB_CACHE))
    raise ConfigError(
        f"{name}: {where} is no folder on this machine that datasets' save_to_disk wrote, no .csv or .parquet file, "
        f"and not OWNER/NAME of a data set of the Hub. {MOVED}"
    )


def _file(path: Path, name: str) -> Any:
    """Read a file without datasets' cache, which would copy it into the home folder."""
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from pyarrow import csv, parquet, types  # type: ignore[import-untyped]

    with refusing(f"{name}: {path} cannot be read"):
        if path.suffix == ".csv":
            _check_first_line(path, name)
            reading = csv.ReadOptions(block_size=CSV_BLOCK)
            empty = csv.ConvertOptions(null_values=EMPTY, strings_can_be_null=True)
            lines = csv.ParseOptions(newlines_in_values=True)  # else no text may be in two blocks
            table = csv.read_csv(str(path), read_options=reading, parse_options=lines, convert_options=empty)
            if any(map(types.is_binary, table.schema.types)):  # what pyarrow makes of words in other encodings
                raise _not_utf_8(path, name)
        else:
            table = parquet.read_table(str(path))
        return Dataset(InMemoryTable(table), fingerprint="file")


def _check_first_line(path: Path, name: str) -> None:
    """Refuse a file whose first line is not UTF-8, or has no comma but another separator."""
    with path.open("rb") as file:
        first = file.readline(CSV_BLOCK)
    try:
        words = first.decode()
    except UnicodeDecodeError as error:
        raise _not_utf_8(path, name) from error
    if "," not in words and (mark := next((mark for mark in ";\t|" if mark in words), "")):
        raise ConfigError(
            f"{name}: the columns of {path} are separated by {mark!r}; save it with commas between columns and points "
            f"in numbers: pandas.read_csv(FILE, sep={mark!r}, decimal=',').to_csv(NEW, index=False)"
        )


def _not_utf_8(path: Path, name: str) -> ConfigError:
    advice = "pandas.read_csv(FILE, encoding='latin-1').to_csv(NEW, index=False), or whatever encoding it has"
    return ConfigError(f"{name}: {path} is no text in UTF-8; save it so: {advice}")
