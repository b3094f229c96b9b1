"""Data sets that the library datasets reads: images, texts by a tokenizer, tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedcore import ConfigError
from fedcore.data import Dataset, find_data
from fedcore_huggingface.classes import read_classes
from fedcore_huggingface.places import rows_at
from fedcore_huggingface.spec import split
from fedcore_huggingface.splits import splits_of
from fedcore_huggingface.targets import read_targets
from fedcore_huggingface.texts import read_blocks
from fedcore_zoo import FittedRecipe


def dataset(rest: str) -> Callable[[Path | None], Dataset]:
    """A folder of save_to_disk, a CSV or Parquet file, or OWNER/NAME on the Hub: hf:PLACE?text=sentence&source=writer.

    Without a split for testing, a stratified fifth is the test set, always the same one.

    :raises ConfigError: an unknown option; the function that is returned raises it if there is no such place, its
        columns do not say what they are, or there are too few samples.
    """
    name = f"hf:{rest}"
    path, options = split(name)

    def load(data_dir: Path | None = None) -> Dataset:
        (rows, folders), chosen, fitted = rows_at(path, options, name, data_dir), options, None
        if options.pipeline is not None:
            if options.columns is not None or options.missing is not None or options.indicators:
                raise ConfigError(f"{name}: the pipeline says the columns and fills empty cells; leave out the others")
            fitted = FittedRecipe.load(find_data(options.pipeline, data_dir))
            chosen = options.model_copy(update={"columns": fitted.columns})
        train, tests = splits_of(rows, folders, chosen, name)
        if chosen.block_size is not None:
            return read_blocks(train, next(iter(tests.values()), None), chosen.block_size, chosen)
        read = read_classes if chosen.target is None else read_targets
        return read(train, tests, chosen, fitted)

    return load
