"""Links of files that are read in the repository and on the site: to pages where there is one, else plain text."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>[^)\s]+)\)")
FENCE = re.compile(r"(^```.*?^```[^\S\n]*$)", re.MULTILINE | re.DOTALL)
MADE_FROM = {"fedcore/hooks/hookspecs.py": "reference/hooks.md", "fedcore/base/config.py": "reference/options.md"}
"""Files of the core that have a page of their own: a link to the file leads to the page."""


def method_page(package: str) -> str:
    """Return the page of a plugin package, named by its folder."""
    return f"methods/{package.removeprefix('fedcore-')}.md"


def page_of(path: str) -> str | None:
    """Return the page that shows a file or folder of the repository; None where none does."""
    parts = path.split("/")
    if path == "README.md":
        return "index.md"
    if path in MADE_FROM:
        return MADE_FROM[path]
    if parts[0] == "docs" and path.endswith(".md"):
        return path.removeprefix("docs/")
    if parts[0] == "plugins" and len(parts) > 1 and (len(parts) == 2 or parts[2:] == ["README.md"]):
        return method_page(parts[1])
    return None


def relink(markdown: str, source: str, page: str) -> str:
    """Return Markdown with its links as they must stand on a page.

    :param source: the file that the text is of, from the repository's root.
    :param page: the page that it becomes a part of, from the root of the pages.
    """

    def replaced(found: re.Match[str]) -> str:
        text, target = found["text"], found["target"]
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        path, _, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        shown = page_of(path)
        if shown is None:
            return text if (ROOT / path).exists() else found[0]  # a link to nowhere is for mkdocs to refuse
        relative = posixpath.relpath(shown, posixpath.dirname(page))
        return f"[{text}]({relative}{'#' + anchor if anchor else ''})"

    pieces = FENCE.split(markdown)
    return "".join(piece if index % 2 else LINK.sub(replaced, piece) for index, piece in enumerate(pieces))
