"""Names such as ``hf:my-folder?text=sentence&source=writer``: a folder, file or repository, and options."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedcore import ConfigError


class Options(BaseModel):
    """What may stand behind the folder of a data set, after a question mark."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    label: str | None = Field(
        default=None, description="Column of the classes; default label or labels, or the only ClassLabel."
    )
    image: str | None = Field(default=None, description="Column of images.")
    text: str | None = Field(default=None, description="Column of texts.")
    columns: str | None = Field(default=None, description="Columns of a table, with commas; default all numbers.")
    test: str | None = Field(default=None, description="Split that is the test set; default test or validation.")
    source: str | None = Field(
        default=None, description="Column of where a sample comes from, for --partition natural."
    )
    tokenizer: str | None = Field(default=None, description="Folder of the tokenizer of texts.")
    max_length: int = Field(default=128, ge=1, le=1 << 20, description="Tokens per text; the rest is cut off.")
    size: int | None = Field(default=None, ge=1, le=1 << 12, description="Side to which images are resized.")
    subset: str | None = Field(default=None, description="Subset (configuration) of a data set of the Hub.")
    revision: str | None = Field(default=None, description="Commit, tag or branch of a data set of the Hub.")


class NoOptions(BaseModel):
    """A folder and nothing else."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Model = TypeVar("Model", bound=BaseModel)


def parse(rest: str, options: type[Model], name: str) -> tuple[Path, Model]:
    """Split ``FOLDER?option=value&option=value``.

    :param name: the whole name, for messages.
    :raises ConfigError: there is no such folder on this machine, or an option is unknown or out of bounds.
    """
    path, parsed = split(rest, options, name)
    folder = place(path, name)
    if not folder.is_dir():
        raise ConfigError(
            f"{name}: {folder} is no folder on this machine. Nothing is downloaded: save a model or tokenizer with "
            "save_pretrained, and name that folder"
        )
    return folder, parsed


def split(rest: str, options: type[Model], name: str) -> tuple[str, Model]:
    """Split ``PLACE?option=value&option=value``.

    :raises ConfigError: an option is unknown or out of bounds.
    """
    path, _, query = rest.partition("?")
    given: dict[str, Any] = dict(parse_qsl(query, keep_blank_values=True))
    try:
        parsed = options.model_validate(given)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        known = ", ".join(options.model_fields) or "none"
        where = ".".join(map(str, problem["loc"]))
        raise ConfigError(f"{name}: option {where!r}: {problem['msg'].lower()}; there are: {known}") from None
    return path, parsed


def place(path: str, name: str) -> Path:
    """Return a path whose ``~`` is a home.

    :raises ConfigError: there is no such home.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{name}: there is no such user's home; write the full path") from None
