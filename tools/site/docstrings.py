"""Docstrings as Markdown: the fields and roles that fedcore writes, for mkdocstrings and for the pages made here."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import griffe

FIELD = re.compile(r":(?P<kind>param|returns|raises|ivar|source)(?: (?P<name>[^:`]+))?: ?(?P<text>.*)")
LABEL = re.compile(r"(?P<kind>When|Combining): (?P<text>.*)")
TITLES = {
    "param": "Arguments",
    "ivar": "Attributes",
    "returns": "Returns",
    "raises": "Raises",
    "source": "Source",
    "When": "When",
    "Combining": "Combining",
}


class Field(NamedTuple):
    """One field of a docstring, such as ``:param step: ...`` or ``When: ...``."""

    kind: str
    name: str | None
    text: str


def split(docstring: str) -> tuple[str, list[Field]]:
    """Return a docstring's text, and its fields in the order in which they stand."""
    body: list[str] = []
    fields: list[Field] = []
    inside = False
    for line in docstring.splitlines():
        found = FIELD.fullmatch(line) or LABEL.fullmatch(line)
        if found:
            fields.append(Field(found["kind"], found.groupdict().get("name"), found["text"]))
            inside = True
        elif inside and line.startswith(" "):
            fields[-1] = fields[-1]._replace(text=f"{fields[-1].text} {line.strip()}".strip())
        else:
            inside = False
            body.append(line)
    return "\n".join(body).strip(), fields


def to_markdown(docstring: str) -> str:
    """Return a docstring as Markdown: text first, then each kind of field under its title."""
    body, fields = split(docstring)
    parts = [_text(body)] if body else []
    for kind in dict.fromkeys(field.kind for field in fields):
        entries = [field for field in fields if field.kind == kind]
        if all(field.name is None for field in entries):
            parts.append(f"**{TITLES[kind]}:** {' '.join(inline(field.text) for field in entries)}")
        else:
            items = [f"- `{field.name}`: {inline(field.text)}" for field in entries]
            parts.append(f"**{TITLES[kind]}:**\n\n" + "\n".join(items))
    return "\n\n".join(parts)


def inline(text: str) -> str:
    """Return one line of a docstring as Markdown: roles and literals as code, formulas between dollar signs."""
    text = re.sub(r":math:`([^`]*)`", lambda found: f"${found[1]}$", text)
    text = re.sub(r":\w+:`~?([^`]*)`", lambda found: f"`{found[1].rpartition('.')[2]}`", text)
    text = text.replace("``", "`")
    return escape(text)


def escape(text: str) -> str:
    """Return Markdown in which ``<a, b>`` is an inner product, not a tag; code and formulas stay as they are."""
    pieces = re.split(r"(`[^`]*`|\$[^$]*\$)", text)
    return "".join(piece if index % 2 else piece.replace("<", "&lt;") for index, piece in enumerate(pieces))


def _text(body: str) -> str:
    """Return paragraphs as Markdown; examples and literal blocks become code."""
    made: list[str] = []
    for paragraph in re.split(r"\n\s*\n", body):
        if paragraph.lstrip().startswith(">>>"):
            made.append(f"```pycon\n{paragraph}\n```")
        elif all(line.startswith("    ") for line in paragraph.splitlines()):
            made.append(paragraph)
        else:
            made.append(inline(re.sub(r"::$", ":", paragraph)))
    return "\n\n".join(made)


class Docstrings(griffe.Extension):
    """Hands mkdocstrings every docstring as Markdown."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite one object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
