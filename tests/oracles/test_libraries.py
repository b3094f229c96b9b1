"""What other libraries compute on the same input: equal, or different for the reason that the fixture states.

``make oracles NAME`` runs a library in an environment of its own and writes its fixture again.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

import pytest

from tests.oracles import calls, compare

VERDICTS = {"decision", "library"}


def groups() -> Iterator[object]:
    """Yield a library's cases by area; a whole run takes a while, and is one alone.

    Of a library's runs of a method the first is quick. So is one library's epsilon by PLD, which takes a second.
    """
    for path in sorted(compare.FIXTURES.glob("*.json")):
        found: dict[str, list[Any]] = {}
        known = set() if path.stem == "dp_accounting_tests" else {"PLD epsilon"}
        for case in compare.read(path)["cases"]:
            alone = case["area"] == "whole run"
            found.setdefault(f"{case['area']}: {case['name']}" if alone else case["area"], []).append(case)
        for name, cases in found.items():
            method = name.partition(",")[0]
            yield pytest.param(cases, id=f"{path.stem}-{name}", marks=[pytest.mark.slow] if method in known else [])
            known.add(method)


@pytest.mark.parametrize("cases", groups())
def test_fedcore_computes_what_the_fixture_says(cases: list[Any]) -> None:
    wrong = [problem for case in cases if (problem := compare.problem(case, calls.compute(case)))]
    assert not wrong, "\n".join(wrong)


def test_every_fixture_says_where_its_values_are_from_and_why_they_differ() -> None:
    total = 0
    for path in compare.FIXTURES.glob("*.json"):
        fixture = compare.read(path)
        datetime.date.fromisoformat(fixture["date"])
        assert all(fixture[said] for said in ("library", "version", "source")), path.name
        used = {case["differs"] for case in fixture["cases"] if "differs" in case}
        assert used == set(fixture["differences"]), path.name
        for key, difference in fixture["differences"].items():
            assert difference["verdict"] in VERDICTS, (path.name, key)
            assert difference["why"].endswith("."), (path.name, key)
            assert all(difference[said] for said in ("follows", "where")), (path.name, key)
        names = [(case["area"], case["name"]) for case in fixture["cases"]]
        assert len(set(names)) == len(names), path.name
        total += len(names)
    assert total >= 600
