"""Options behind the question mark of a name: ``hf:FILE.csv?label=death&source=site``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from urllib.parse import parse_qsl

from fedcore import ConfigError

MOVED = "If it has moved, --data-dir or FEDCORE_DATA names its folder"
"""The advice where :func:`fedcore.data.find_data` found nothing."""


def name_options(name: str, known: Collection[str] | None = None) -> tuple[str, dict[str, str]]:
    """Return what a name of the form ``KIND:PLACE?option=value&option=value`` has as its place, and its options.

    A plus is a plus, as in the column ``CD4+``; ``%26`` is an ampersand.

    :param known: the options that there are; None leaves it to the caller to refuse others.
    :raises ConfigError: an option is unknown, or stands twice, of which only one could count.
    """
    place, _, query = name.partition(":")[2].partition("?")
    pairs = parse_qsl(query.replace("+", "%2B"), keep_blank_values=True)
    if twice := [option for option, count in Counter(option for option, _ in pairs).items() if count > 1]:
        raise ConfigError(f"{name}: option {twice[0]!r} stands twice; write it once, several values with commas")
    options = dict(pairs)
    if unknown := [] if known is None else sorted({*options} - {*known}):
        raise ConfigError(f"{name}: option {unknown[0]!r} is unknown; there are: {', '.join(known or ())}")
    return place, options
