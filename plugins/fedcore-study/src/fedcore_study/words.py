"""Names, numbers and lists as tables and sentences have them."""

from __future__ import annotations

from collections.abc import Sequence

from fedcore.base.identity import short_name
from fedcore.base.objects import CODE, OBJECT


def joined(names: Sequence[str]) -> str:
    """Return names as a sentence lists them: ``a, b and c``."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def counted(number: int, noun: str) -> str:
    """Return a number of things: ``1 seed``, ``3 seeds``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def without_module(name: str) -> str:
    """Return ``Near`` for ``module:study.Near``, the user's own code or object. Other names are returned unchanged."""
    return short_name(name) if name.startswith((CODE, OBJECT)) else name
