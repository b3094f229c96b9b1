"""What a script needs to write a fixture: it runs in a library's environment, without fedcore, and needs NumPy alone.

A case is one input, the library's value of it, and the name of the call with which fedcore gets the same input.
"""

from __future__ import annotations

import datetime
import json
import math
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np


def numbers(seed: int, *shape: int, scale: float = 1.0, digits: int = 3) -> np.ndarray:
    """Return normal numbers with few digits, so that a fixture holds exactly what the library got."""
    return np.round(np.random.default_rng(seed).standard_normal(shape) * scale, digits)


def spread(seed: int, clients: int, width: int, hostile: int = 0, shift: float = 0.0) -> np.ndarray:
    """Return clients' vectors (clients, width), the first ``hostile`` of them shifted."""
    rows = numbers(seed, clients, width)
    rows[:hostile] += shift
    return np.round(rows, 3)


def krum_of_paper(rows: np.ndarray, attackers: int) -> np.ndarray:
    """Return the vector that Krum chooses: the least sum of squared distances from its n - f - 2 nearest others."""
    apart = np.sort(((rows[:, None] - rows) ** 2).sum(axis=2), axis=1)[:, 1 : len(rows) - attackers - 1]
    return rows[apart.sum(axis=1).argmin()]


class Fixture:
    """The cases of one library, written to ``tests/oracles/fixtures/NAME.json`` of the folder that the script is given.

    :param name: the file's name, and that of ``make oracles NAME``.
    :param distribution: the package whose version is the library's; None where ``of`` says what was read.
    :param of: the version in words, of a library that is not installed.
    :param source: in words, where the values are from.
    """

    def __init__(
        self,
        name: str,
        title: str,
        distribution: str | None = None,
        *,
        of: str = "",
        source: str,
        also: Iterable[str] = (),
    ) -> None:
        self.name = name
        self.differences: dict[str, dict[str, str]] = {}
        self.cases: list[dict[str, Any]] = []
        self.head = {
            "library": title,
            "version": version(distribution) if distribution else of,
            "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
            "source": source,
            "with": {other: version(other) for other in ("numpy", "torch", *also) if _installed(other)}
            if distribution
            else {},
        }

    def difference(
        self, key: str, verdict: str, why: str, *, follows: str, where: str, option: str = "", tracker: str = ""
    ) -> str:
        """Declare a difference that cases name by ``differs=key``.

        :param verdict: ``decision``, or ``library`` where the library leaves its paper.
        :param why: one sentence: what each of the two computes.
        :param follows: who follows the paper's equation, and which.
        :param where: the library's function.
        :param option: the options with which fedcore gives the library's number.
        :param tracker: whether the project's tracker knows it, by title.
        """
        said = {
            "verdict": verdict,
            "why": why,
            "follows": follows,
            "where": where,
            "option": option,
            "tracker": tracker,
        }
        self.differences[key] = {name: text for name, text in said.items() if text}
        return key

    def add(
        self,
        area: str,
        name: str,
        call: str,
        value: Any,
        *,
        tolerance: float = 1e-6,
        relative: float | None = None,
        differs: str = "",
        source: str = "",
        where: str = "",
        **inputs: Any,
    ) -> None:
        """Add a case: the library's value, and the call with its inputs.

        :param tolerance: absolute, and relative where ``relative`` is not given.
        """
        case: dict[str, Any] = {
            "area": area,
            "name": name,
            "call": call,
            "inputs": _plain(inputs),
            "library": _short(value),
        }
        case["tolerance"] = [tolerance, tolerance if relative is None else relative]
        case.update({key: said for key, said in (("differs", differs), ("source", source), ("where", where)) if said})
        if differs and differs not in self.differences:
            raise KeyError(f"{self.name}, {name}: no difference is called {differs}")
        self.cases.append(case)

    def write(self) -> None:
        """Write the file into the folder of the command line."""
        path = Path(sys.argv[1]) / f"{self.name}.json"
        fixture = {**self.head, "differences": self.differences, "cases": self.cases}
        path.write_text(dumped(fixture), encoding="utf-8")
        print(f"{self.name}: {len(self.cases)} cases of {self.head['library']} {self.head['version']}")


def dumped(fixture: Mapping[str, Any]) -> str:
    """Return a fixture's text: a line for each case."""
    rows = ",\n".join(f"  {json.dumps(case)}" for case in fixture["cases"])
    head = json.dumps({key: value for key, value in fixture.items() if key != "cases"}, indent=1)[:-2]
    return f'{head},\n "cases": [\n{rows}\n ]\n}}\n'


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def _plain(value: Any) -> Any:
    """Return arrays and tensors as lists, with every digit."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _short(value: Any) -> Any:
    """Return a value with 15 significant digits, and None for what is not a number."""
    value = _plain(value)
    if isinstance(value, list):
        return [_short(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.15g}") if math.isfinite(value) else None
    return value


def partition_figures(parts: Iterable[Any], labels: np.ndarray, figures: Iterable[str]) -> list[float]:
    """Return the figures of a library's partition that hold whatever the draws."""
    parts = [np.asarray(part, dtype=int) for part in parts]
    held, number = np.concatenate(parts), int(labels.max()) + 1
    classes = [set(labels[part].tolist()) for part in parts]
    counts = [np.bincount(labels[part]) for part in parts]
    shares = [count[count > 0] / count.sum() for count in counts]
    known = {
        "sizes": sorted(len(part) for part in parts),
        "samples": len(held),
        "every sample once": int(sorted(held.tolist()) == list(range(len(labels)))),
        "sizes differ": int(len({len(part) for part in parts}) > 1),
        "at least ten each": int(min(len(part) for part in parts) >= 10),
        "most classes": max(len(some) for some in classes),
        "least classes": min(len(some) for some in classes),
        "at most two classes": int(max(len(some) for some in classes) <= 2),
        "at most three classes": int(max(len(some) for some in classes) <= 3),
        "client k has class k mod C": int(all(k % number in some for k, some in enumerate(classes))),
        "mean entropy": round(float(np.mean([-(share * np.log(share)).sum() for share in shares])), 2),
    }
    return [float(one) for figure in figures for one in np.atleast_1d(known[figure])]
