"""How a case of a fixture is judged, by the tests and by ``benchmarks/oracles/run.py``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

FIXTURES = Path(__file__).parent / "fixtures"


def read(path: Path) -> dict[str, Any]:
    """Return a fixture."""
    return json.loads(path.read_text(encoding="utf-8"))


def equal(one: Any, other: Any, tolerance: list[float]) -> bool:
    """Return whether two values have one shape, and are equal within (absolute, relative); None is not a number."""
    left, right = numbers(one), numbers(other)
    same = left.shape == right.shape
    return bool(same and np.allclose(left, right, atol=tolerance[0], rtol=tolerance[1], equal_nan=True))


def numbers(value: Any) -> np.ndarray:
    """Return a fixture's value as an array."""
    return np.array(value, dtype=float)


def problem(case: Mapping[str, Any], got: Any) -> str | None:
    """Return what is wrong with fedcore's value for a case, or None.

    A case that agrees has the library's value. One that differs has the value that is recorded for fedcore, and not
    the library's.
    """
    name, bounds = f"{case['area']}, {case['name']}", case["tolerance"]
    if not case.get("differs"):
        return None if equal(case["library"], got, bounds) else f"{name}: the library {case['library']}, fedcore {got}"
    if not equal(case["fedcore"], got, bounds):
        return f"{name}: fedcore computed {case['fedcore']}, now {got}"
    return (
        f"{name}: the library's value {got}, so no difference is left" if equal(case["library"], got, bounds) else None
    )
