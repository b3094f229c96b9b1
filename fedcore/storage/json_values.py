"""Values as JSON: read strictly, without nan and inf, and with a checksum where a file has lines that may be torn."""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping
from typing import Any

_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_SEAL = "crc32"

NOT_FINITE = "not_finite"
"""Key under which a record lists its values that could not be computed."""


def parse_json(text: str | bytes) -> Any:
    """Return a JSON text's value.

    :raises ValueError: it is invalid, nested too deeply, or holds an unpaired surrogate (``"\\ud800"``).
    """
    try:
        if isinstance(text, bytes):
            text = text.decode()  # json accepts unpaired surrogates
        value = json.loads(text)
        if _HALF.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"it holds {error.object[error.start]!r}, an unpaired surrogate") from None
    return value


def finite(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record in which nan and inf, which JSON does not have, are None, and named under ``not_finite``."""
    try:
        json.dumps(record, allow_nan=False)
    except ValueError:
        names: list[str] = []
        plain = {name: _finite(value, name, names) for name, value in record.items()}
        return {**plain, NOT_FINITE: names} if names else plain
    return dict(record)


def _finite(value: Any, name: str, names: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(entry, f"{name}.{key}", names) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry, f"{name}.{index}", names) for index, entry in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        names.append(name)
        return None
    return value


def sealed(value: Mapping[str, Any], mark: str = "") -> dict[str, Any]:
    """Return a JSON mapping with a checksum as last entry, for :func:`unsealed`.

    :param mark: owner of the mapping; part of the checksum.
    """
    return {**value, _SEAL: _checksum(value, mark)}


def unsealed(value: Any, mark: str = "") -> dict[str, Any]:
    """Return a mapping without its checksum.

    :raises ValueError: it is no mapping, or not the one that was sealed with this mark.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{value!r:.40} is no record")
    rest = {key: entry for key, entry in value.items() if key != _SEAL}
    if value.get(_SEAL) != _checksum(rest, mark):
        raise ValueError("its contents do not match its checksum, or it is another run's")
    return rest


def _checksum(value: Mapping[str, Any], mark: str) -> str:
    return f"{zlib.crc32((mark + json.dumps(value)).encode()):08x}"
