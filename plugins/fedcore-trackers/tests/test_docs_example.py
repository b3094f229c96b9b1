"""The tracker of docs/tracking.md keeps the contract as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

from fedcore_trackers.testing import check_tracker

PAGE = (Path(__file__).parents[3] / "docs" / "tracking.md").read_text(encoding="utf-8")


def test_the_pages_tracker_works(tmp_path, monkeypatch):
    block = next(text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "class Printed(" in text)
    (tmp_path / "my_package.py").write_text(block)
    monkeypatch.syspath_prepend(str(tmp_path))
    check_tracker("module:my_package.Printed", tmp_path)
    (log,) = tmp_path.glob("*/trackers/module_my_package.Printed.log")
    assert "'loss/task'" in log.read_text()
