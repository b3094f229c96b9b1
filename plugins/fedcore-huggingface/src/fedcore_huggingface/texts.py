"""Texts as tokens, for classes; and data sets of blocks of tokens, whose next ones are predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedcore.data import Dataset
from fedcore_huggingface.language import TokenBlocks, language_dataset
from fedcore_huggingface.spec import Options, folder_of, refusing
from fedcore_huggingface.splits import origins, parts_of
from fedcore_huggingface.table import TEXTS, Table
from fedcore_zoo import SequenceSamples


def read_blocks(train: Table, test: Table | None, size: int, options: Options) -> Dataset:
    """Return texts as blocks of tokens. No block has texts of two sources or groups."""
    column = _text_column(train, options)
    if test is None:
        nothing = torch.zeros(len(train), dtype=torch.int64)
        train, test = (train.select(rows) for rows in parts_of(train, nothing, ("",), options))
    tables = (train, test)
    tokenizer = _tokenizer(train, column, options)
    if (end := tokenizer.eos_token_id) is None:
        raise train.error("the tokenizer has no end token, which separates texts: set its eos_token, save it")
    tokens = [_tokens(tokenizer, table, column, add_special_tokens=False, verbose=False) for table in tables]
    described = origins(tables, options)
    kinds = [kind for kind in ("sources", "groups") if kind in described]
    keys = list(zip(*(described[kind].tolist() for kind in kinds), strict=True)) if kinds else [()] * len(train)
    blocks, firsts = TokenBlocks.by(keys, tokens[0], size, end)
    described |= {kind: described[kind][firsts] for kind in kinds}
    return language_dataset(train.name, blocks, TokenBlocks.of(tokens[1], size, end), len(tokenizer), **described)


def _text_column(table: Table, options: Options) -> str:
    """Return the column of texts of which next tokens are predicted."""
    from datasets import Value

    for option in ("label", "target", "image", "columns", "categories", "size", "part"):
        if getattr(options, option):
            raise table.error(f"?block_size is for texts whose next tokens are predicted, without ?{option}")
    used = (options.source, options.groups)
    columns = [
        column
        for column, feature in table.features.items()
        if isinstance(feature, Value) and feature.dtype.startswith(TEXTS) and column not in used
    ]
    if options.text is None and len(columns) != 1:
        raise table.error(f"which column holds the texts? Write ?text=COLUMN; {table.known}")
    return options.text or columns[0]


def text_fields(tables: Sequence[Table], labels: Sequence[Tensor], column: str, options: Options) -> dict[str, Any]:
    """Return the fields of a data set that hold each table's texts as tokens."""
    tokenizer, samples, full = _tokenizer(tables[0], column, options), [], 0
    for table, numbers in zip(tables, labels, strict=True):
        tokens = _tokens(tokenizer, table, column, truncation=True, max_length=options.max_length)
        if not all(tokens):
            raise table.error(f"column {column!r} has texts without a token; leave such rows out")
        samples.append(SequenceSamples.of(tokens, numbers.tolist()))
        full += sum(len(text) == options.max_length for text in tokens)
    note = (
        f"{full} of {sum(map(len, tables))} texts fill all {options.max_length} tokens, beyond which they are cut off"
    )
    fields = {"train": samples[0], "test": samples[1], "input_shape": (len(tokenizer),), "model": "embedding-bag"}
    return fields | {"notes": (f"{tables[0].name}: {note}; ?max_length= takes more",) if full else ()}


def _tokenizer(table: Table, column: str, options: Options) -> Any:
    """Return the tokenizer of a column of texts."""
    from transformers import AutoTokenizer

    if options.tokenizer is None:
        raise table.error(
            f"column {column!r} holds texts; name a tokenizer that save_pretrained wrote: ?tokenizer=FOLDER. "
            f"For a table name its ?columns=..., or this one of its columns: ?categories={column}, or ?source={column}"
        )
    folder = folder_of(options.tokenizer, f"{table.name}: tokenizer")
    with refusing(f"{table.name}: {folder} holds no tokenizer"):
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


def _tokens(tokenizer: Any, table: Table, column: str, **how: Any) -> list[list[int]]:
    """Return the tokens of each text of a column.

    :param how: further arguments of the tokenizer.
    """
    texts = list(table.cells(column))
    if not all(isinstance(text, str) for text in texts):
        raise table.error(f"column {column!r} has cells that are no texts")
    return tokenizer(texts, **how)["input_ids"] if texts else []  # it takes no empty list
