"""Parts of a record, which may be damaged or untrusted: a missing value, or one of another type, is read as empty."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def mapping_in(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a mapping inside a record; an empty one where something else, or nothing, stands there."""
    found = value.get(name)
    return found if isinstance(found, dict) else {}


def list_in(value: Mapping[str, Any], name: str) -> list[Any]:
    """Return a list inside a record; an empty one likewise."""
    found = value.get(name)
    return found if isinstance(found, list) else []
