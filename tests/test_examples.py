"""The examples run."""

import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_quickstart(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    result = runpy.run_path(str(EXAMPLES / "quickstart.py"))["main"](2)
    assert 0 < result.metrics["global"]["accuracy"] <= 1
    printed = capsys.readouterr().out
    assert "moon.contrast" in printed.splitlines()[1]
    assert str(result.directory) in printed


def test_every_example_is_tested():
    here = Path(__file__).read_text(encoding="utf-8")
    assert [path.name for path in EXAMPLES.glob("*.py") if path.name not in here] == []
