"""Values from files that may be damaged or untrusted. A value of another type is treated as missing."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any


def number(value: Any) -> float | None:
    """Return a finite number; None for any other value."""
    usable = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return float(value) if usable else None


def count(value: Any) -> int | None:
    """Return a whole number from 0; None for any other value."""
    return value if isinstance(value, int) and number(value) is not None and value >= 0 else None


def mapping_in(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a mapping inside a record; an empty mapping if there is none."""
    inner = value.get(name)
    return inner if isinstance(inner, dict) else {}


def list_in(value: Mapping[str, Any], name: str) -> list[Any]:
    """Return a list inside a record; an empty list if there is none."""
    inner = value.get(name)
    return inner if isinstance(inner, list) else []
