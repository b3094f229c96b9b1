"""Write which package of plugins/ brings which name into fedcore/base/packages.json: python tools/packages.py.

The file is in fedcore's wheel: a name that an absent package would bring is answered with that package.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

from fedcore.base.registry import PREFIXED, group_of

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "fedcore" / "base" / "packages.json"

KINDS = (
    *(
        "plugin",
        "dataset",
        "task",
        "model",
        "partitioner",
        "augmentation",
        "metric",
        "option",
        "engine",
        "runner",
        "tracker",
    ),
    *("tracking", "preset", "command", "feature", "figure", "display", "table"),
    *(f"{kind} prefix" for kind in PREFIXED),
)
"""The kinds of objects that packages bring."""


def text() -> str:
    """Return the file's text: kind of name, name, package."""
    found: dict[str, dict[str, str]] = {}
    for path in sorted((ROOT / "plugins").glob("*/pyproject.toml")):
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        for kind in KINDS:
            for name in project.get("entry-points", {}).get(group_of(kind), {}):
                found.setdefault(kind, {})[name] = project["name"]
    return json.dumps(found, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
