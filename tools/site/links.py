"""Links of files that are read in the repository and on the site: to pages where there is one, else plain text."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>[^)\s]+)\)")
FENCE = re.compile(r"(^```.*?^```[^\S\n]*$)", re.MULTILINE | re.DOTALL)
LITERAL = re.compile(r"`[^`]+`")


def method_page(package: str) -> str:
    """Return the page of a plugin package, named by its folder."""
    return f"methods/{package.removeprefix('fedcore-')}.md"


def page_of(path: str) -> str | None:
    """Return the page that shows a file or folder of the repository; None where none does."""
    parts = path.split("/")
    if path == "README.md":
        return "index.md"
    if path == "fedcore/hooks/hookspecs.py":
        return "reference/hooks.md"
    if parts[0] == "docs" and path.endswith(".md"):
        return path.removeprefix("docs/")
    if parts[0] == "plugins" and len(parts) > 1 and (len(parts) == 2 or parts[2:] == ["README.md"]):
        return method_page(parts[1])
    return None


SECTION = re.compile(r'^--8<-- "(?P<file>[^":]+\.md):(?P<name>[\w-]+)"$', re.MULTILINE)


def include_sections(markdown: str, source: str) -> str:
    """Return a page with the named sections of other pages in place, their links as seen from ``source``'s folder.

    pymdownx.snippets would include them, but after the links were put right.

    :raises ValueError: a section that is not there.
    """

    def included(found: re.Match[str]) -> str:
        text = (ROOT / found["file"]).read_text(encoding="utf-8")
        marks = rf"<!-- --8<-- \[start:{found['name']}\] -->\n(.*?)\n<!-- --8<-- \[end:{found['name']}\] -->"
        section = re.search(marks, text, re.DOTALL)
        if section is None:
            raise ValueError(f"{source}: {found['file']} has no section {found['name']!r}")
        return section[1]

    return SECTION.sub(included, markdown)


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
