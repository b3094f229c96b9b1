"""Values from files that may be damaged or untrusted. A value of another form than asked for counts as missing."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any


def number(value: Any) -> float | None:
    """Return a finite number, else None."""
    usable = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return float(value) if usable else None


def mapping_in(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a mapping inside a record; an empty one where there is none."""
    found = value.get(name)
    return found if isinstance(found, dict) else {}


def list_in(value: Mapping[str, Any], name: str) -> list[Any]:
    """Return a list inside a record; an empty one where there is none."""
    found = value.get(name)
    return found if isinstance(found, list) else []
