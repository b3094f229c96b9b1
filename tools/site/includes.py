"""Write the parts of files that pages show: ``python tools/site/includes.py``, after a change of such a file.

A page shows between the two lines below a whole file, or its lines from ``[start:NAME]`` to ``[end:NAME]``::

    <!-- include: examples/quickstart.py:NAME -->
    <!-- end of include -->

So a page is complete in the repository, too. A test compares it with the files.
"""

from __future__ import annotations

import re
from pathlib import Path

from links import ROOT

END = "<!-- end of include -->"
INCLUDE = re.compile(
    rf"^(?P<start><!-- include: (?P<file>[^\s:]+)(?::(?P<name>\w[\w-]*))? -->)\n(?P<text>.*?)^{END}$", re.M | re.S
)


def pages() -> list[Path]:
    """Return every page."""
    return sorted((ROOT / "docs").rglob("*.md"))


def current(page: Path) -> str:
    """Return a page's text with its includes as the files are now."""
    text = page.read_text(encoding="utf-8")
    return INCLUDE.sub(lambda at: f"{at['start']}\n{_part(at['file'], at['name'])}\n{END}", text)


def _part(file: str, name: str | None) -> str:
    """Return a file or a named part of it: Markdown as it stands, code in a fence.

    :raises ValueError: the file has no such part.
    """
    text = (ROOT / file).read_text(encoding="utf-8")
    if name:
        marked = re.search(rf"--8<-- \[start:{name}\].*?\n(.*?)[^\n]*--8<-- \[end:{name}\]", text, re.DOTALL)
        if marked is None:
            raise ValueError(f"{file} has no lines between [start:{name}] and [end:{name}]")
        text = marked[1]
    text = "\n".join(line for line in text.splitlines() if "--8<--" not in line).strip("\n")
    kind = Path(file).suffix[1:]
    return text if kind == "md" else f"```{'python' if kind == 'py' else kind}\n{text}\n```"


if __name__ == "__main__":
    for page in pages():
        if (text := current(page)) != page.read_text(encoding="utf-8"):
            page.write_text(text, encoding="utf-8")
            print(f"written: {page.relative_to(ROOT)}")
