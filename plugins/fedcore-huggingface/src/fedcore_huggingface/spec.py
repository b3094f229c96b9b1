"""Names such as ``hf:my-folder?text=sentence&source=writer``: a folder, file or repository, and options."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from fedcore import ConfigError
from fedcore_zoo import name_options

Columns: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(lambda text: tuple(text.split(",")))]
"""Names of columns, with commas between them."""


class Options(BaseModel):
    """The options of a data set, after the question mark of its name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    label: str | None = Field(
        default=None, description="Column of the classes; default label, labels or target, or the only ClassLabel."
    )
    target: Columns | None = Field(
        default=None,
        description="In place of label, columns of what is predicted, with commas: a number or several, 0 and 1 for "
        "each of several labels, or a time and whether the event happened.",
    )
    image: str | None = Field(default=None, description="Column of images.")
    text: str | None = Field(default=None, description="Column of texts.")
    columns: Columns | None = Field(default=None, description="Columns of a table, with commas; default all numbers.")
    categories: Columns = Field(
        default=(), description="Columns of a table whose numbers are names, or whose words are inputs, with commas."
    )
    missing: Literal["median", "most-frequent"] | None = Field(
        default=None, description="What empty cells of a table become, by the training rows."
    )
    indicators: bool = Field(default=False, description="A further column for each with empty cells, 1 where they are.")
    pipeline: str | None = Field(
        default=None, description="File of skops with a fitted transformer of scikit-learn for the columns of a table."
    )
    test: str | None = Field(
        default=None, description="Split that is the test set; default test, validation, valid or dev."
    )
    part: bool = Field(
        default=False, description="One client's part: all rows are training samples, however few they are."
    )
    source: str | None = Field(
        default=None, description="Column of where a sample comes from, for --partition natural."
    )
    groups: str | None = Field(
        default=None,
        description="Column of what belongs together, such as a patient, on one side of every split.",
    )
    tokenizer: str | None = Field(default=None, description="Folder of the tokenizer of texts.")
    max_length: int = Field(default=128, ge=1, le=1 << 20, description="Tokens per text; the rest is cut off.")
    block_size: int | None = Field(
        default=None,
        ge=2,
        le=1 << 20,
        description="Tokens per block of joined texts, whose next tokens are predicted.",
    )
    size: int | None = Field(default=None, ge=1, le=1 << 12, description="Side to which images are resized.")
    subset: str | None = Field(default=None, description="Subset (configuration) of a data set of the Hub.")
    revision: str | None = Field(default=None, description="Commit, tag or branch of a data set of the Hub.")


def split(name: str) -> tuple[str, Options]:
    """Split ``hf:PLACE?option=value&option=value``.

    :raises ConfigError: an option is unknown, out of bounds or there twice.
    """
    path, options = name_options(name)
    try:
        return path, Options.model_validate(options)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, problem["loc"]))
        known = ", ".join(Options.model_fields)
        raise ConfigError(f"{name}: option {where!r}: {problem['msg'].lower()}; there are: {known}") from None


def folder_of(path: str, name: str) -> Path:
    """Return the folder of a model or tokenizer.

    :raises ConfigError: there is no such folder on this machine.
    """
    folder = Path(os.path.expanduser(path))  # unlike Path.expanduser it does not raise where there is no such home
    if not folder.is_dir():
        raise ConfigError(
            f"{name}: {folder} is no folder on this machine. Nothing is downloaded: save a model or tokenizer with "
            "save_pretrained, and name that folder"
        )
    return folder


@contextmanager
def refusing(problem: str, advice: str = "") -> Iterator[None]:
    """Raise as a ConfigError whatever a library raises: it is of many kinds, and the advice is the same.

    :param problem: begins the message, and ``advice`` ends it.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{problem} ({type(error).__name__}: {error}){advice}") from error
