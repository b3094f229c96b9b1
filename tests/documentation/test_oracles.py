"""docs/why-numbers-differ.md, the links to it and the line of README are what the fixtures say."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_written_from_the_fixtures():
    tool = runpy.run_path(str(ROOT / "tools" / "oracles.py"))
    for page, written in (("PAGE", "text"), ("INDEX", "index"), ("README", "readme")):
        assert tool[page].read_text(encoding="utf-8") == tool[written](), f"{tool[page]}: run python tools/oracles.py"


def test_every_method_of_the_tables_exists():
    """A renamed plugin, or a call that no fixture makes any more, would count for nothing."""
    tool = runpy.run_path(str(ROOT / "tools" / "oracles.py"))
    calls = {case["call"] for fixture in tool["fixtures"]() for case in fixture["cases"]}
    assert {call for some in tool["OF_CALL"].values() for call in some} <= calls
    count, _, methods = tool["covered"]().partition(" of ")
    assert int(count) >= len({*tool["OF_CALL"], *tool["BY_PAPER"]})
    assert int(methods.split()[0]) >= int(count)
