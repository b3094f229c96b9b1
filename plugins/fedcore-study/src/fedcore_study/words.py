"""Names, numbers and lists for tables and sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from fedcore.tools import registry, short_name

Value = TypeVar("Value")


def joined(names: Sequence[str]) -> str:
    """Return a list of names for a sentence: ``a, b and c``."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def counted(number: int, noun: str) -> str:
    """Return a number of things: ``1 seed``, ``3 seeds``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def without_module(name: str) -> str:
    """Return ``Near`` for ``module:study.Near``, the user's own code or object. Other names are returned unchanged."""
    return short_name(name) if name.startswith((registry.CODE, registry.OBJECT)) else name


def named(settings: Mapping[str, object]) -> str:
    """Return settings for a title: ``partition iid, lr 0.0935``."""
    return ", ".join(
        f"{name} {shown(value) if isinstance(value, float) else value}" for name, value in settings.items()
    )


def shown(value: object) -> str:
    """Return an option's value for people: ``0.0935`` with three significant digits, a name without its module.

    A file has no folder, and a data set no options: ``a.csv`` of ``hf:/data/a.csv?label=death``.
    """
    if isinstance(value, float):
        return str(float(f"{value:.3g}"))
    if isinstance(value, (list, tuple)) and value:
        return ", ".join(without_module(str(each)) for each in value)
    text = without_module(str(value))
    return text.partition("?")[0].rstrip("/").rpartition("/")[2] or text


def by_value(values: Mapping[str, Value]) -> dict[Value, list[str]]:
    """Return the names that have each value."""
    names: dict[Value, list[str]] = {}
    for name, value in values.items():
        names.setdefault(value, []).append(name)
    return names
