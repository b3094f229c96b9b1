"""Options behind the question mark of a name: ``hf:FILE.csv?label=death&source=site``."""

from __future__ import annotations

from collections import Counter
from urllib.parse import parse_qsl

from fedcore import ConfigError


def name_options(name: str) -> tuple[str, dict[str, str]]:
    """Return what a name of the form ``KIND:PLACE?option=value&option=value`` has as its place, and its options.

    A plus is a plus, as in the column ``CD4+``; ``%26`` is an ampersand.

    :raises ConfigError: an option stands twice, of which only one could count.
    """
    place, _, query = name.partition(":")[2].partition("?")
    pairs = parse_qsl(query.replace("+", "%2B"), keep_blank_values=True)
    if twice := [option for option, count in Counter(option for option, _ in pairs).items() if count > 1]:
        raise ConfigError(f"{name}: option {twice[0]!r} stands twice; write it once, as in ?columns=age,sex")
    return place, dict(pairs)
