"""Small data sets, a tokenizer and models in folders, as the libraries save them."""

from __future__ import annotations

import importlib
import io
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcore_huggingface import dataset
from fedcore_zoo import load_torchvision

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "film", "book", "a", "the")


class Later:
    """A library that is imported when a test first uses it; without it the tests of the file are skipped.

    Every process of ``make test`` collects all files, and few of them run these tests.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        if find_spec(name.partition(".")[0]) is None:
            pytest.skip(f"{name} is not installed here", allow_module_level=True)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks for marks of its own as it collects
            raise AttributeError(attribute)
        load_torchvision()  # transformers imports it, and it may need help
        return getattr(importlib.import_module(self.name), attribute)


def texts(count: int = 60) -> dict[str, list]:
    """Return sentences of two classes, by five writers."""
    kinds = [("good film", "a good book"), ("bad", "the bad film")]
    return {
        "sentence": [kinds[k % 2][k // 2 % 2] for k in range(count)],
        "label": [("neg", "pos")[1 - k % 2] for k in range(count)],
        "writer": [f"writer {k // 3 % 5}" for k in range(count)],
    }


def pictures(count: int = 40, mode: str = "RGB") -> dict[str, list]:
    from PIL import Image

    draw = np.random.default_rng(0)
    arrays = draw.integers(0, 128, (count, 8, 8, 3), dtype=np.uint8)
    arrays[1::2] += 100  # class 1 is brighter
    return {"image": [Image.fromarray(a).convert(mode) for a in arrays], "label": [k % 2 for k in range(count)]}


def save(folder: Path, **splits: dict[str, list]) -> Path:
    """Save splits as datasets does; a single one named ``only`` as a data set without splits."""
    from datasets import DatasetDict

    tables = {name: table_of(columns) for name, columns in splits.items()}
    (tables["only"] if "only" in tables else DatasetDict(tables)).save_to_disk(str(folder))
    return folder


def table_of(columns: dict[str, list]):
    """Return a data set with a given fingerprint: ``from_dict`` pickles, which fails with some pyarrow."""
    from datasets import Dataset, DatasetInfo, Features, Image
    from datasets.table import InMemoryTable

    plain = {name: [encoded(cell) for cell in cells] for name, cells in columns.items()}
    table = InMemoryTable.from_pydict(plain)
    found = Features.from_arrow_schema(table.schema)
    found |= {name: Image() for name, cells in columns.items() if hasattr(cells[0], "convert")}
    return Dataset(table.cast(found.arrow_schema), info=DatasetInfo(features=Features(found)), fingerprint="fixture")


def encoded(cell):
    """Return an image as datasets stores it, anything else as it is."""
    if not hasattr(cell, "convert"):
        return cell
    file = io.BytesIO()
    cell.save(file, format="PNG")
    return {"bytes": file.getvalue(), "path": None}


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))  # noqa: S106
    made.pre_tokenizer = Whitespace()
    made.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    folder = tmp_path_factory.mktemp("tokenizer")
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="session")
def text_set(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> str:
    """The rest of a name: a folder of texts with its options."""
    folder = save(tmp_path_factory.mktemp("texts") / "set", train=texts(), test=texts(20))
    return f"{folder}?text=sentence&source=writer&tokenizer={tokenizer}"


@pytest.fixture(scope="session")
def image_set(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save(tmp_path_factory.mktemp("pictures") / "set", only=pictures()))


@pytest.fixture
def load():
    return lambda rest: dataset(str(rest))()
