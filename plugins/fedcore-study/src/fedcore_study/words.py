"""Lists and numbers in sentences."""

from __future__ import annotations

from collections.abc import Sequence


def joined(names: Sequence[str]) -> str:
    """Return names as a sentence lists them: ``a, b and c``."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def counted(number: int, noun: str) -> str:
    """Return a number of things: ``1 seed``, ``3 seeds``."""
    return f"{number} {noun}{'s' * (number != 1)}"
