"""The page of results is what the committed evidence gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedcore_reproduce import curves
from fedcore_reproduce.evidence import read_all
from fedcore_reproduce.find import find_recipes
from fedcore_reproduce.page import filled, pictures, unplaced
from fedcore_reproduce.places import cells

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results.md"


@pytest.mark.slow
def test_the_page_and_its_pictures_are_made_from_the_evidence():
    evidence = read_all(ROOT / "results")
    recipes = find_recipes(print)
    text = PAGE.read_text(encoding="utf-8")
    assert filled(text, evidence, recipes, cells(recipes)) == text, "run: make results"
    assert not unplaced(text, evidence)
    drawn = pictures(evidence, recipes, PAGE)
    for picture, chart in drawn.items():
        assert curves.is_current(chart, picture), f"{picture}: run: make results"
    there = set((PAGE.parent / "results").glob("*"))
    assert there == set(drawn), "a picture that the page does not show"
    assert sum(picture.stat().st_size for picture in there) < 2_000_000


def test_no_evidence_names_this_machine():
    for file in (ROOT / "results").glob("*/*"):
        assert file.suffix == ".json"
        assert file.stat().st_size < 50_000, file
        text = file.read_text(encoding="utf-8")
        assert "/home/" not in text
        assert "/work/" not in text
