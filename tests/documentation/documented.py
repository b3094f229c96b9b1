"""The commands that README, CONTRIBUTING, documentation and cards show."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PLACEHOLDER = re.compile(r"\.\.\.|<\w+>|\[[A-Z]")
FENCE = re.compile(r"^```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL)
SHELL = ("", "bash", "sh", "console", "text")


class Shown(NamedTuple):
    """One command.

    :param document: the file, from the root; ``line`` as it stands there; ``words`` after ``fedcore``.
    :param output: what a ``console`` block shows below it.
    """

    document: str
    line: str
    words: tuple[str, ...]
    output: str = ""


def documents() -> list[Path]:
    """Return every page that shows commands."""
    found = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("lab/*.md"),
        *ROOT.glob("plugins/*/README.md"),
    ]
    return sorted([*found, *ROOT.glob("examples/*/README.md")])


def commands(path: Path) -> list[Shown]:
    """Return the commands of a document, in order: of code blocks, and inline ones."""
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT).as_posix()
    variables: dict[str, str] = {}
    found = []
    for line, output in _lines(text):
        assigned = re.fullmatch(r'([A-Z]\w*)="(.*)"', line)
        if assigned:
            variables[assigned[1]] = _expand(assigned[2], variables)
        elif line.startswith("fedcore ") and not PLACEHOLDER.search(line):
            words = tuple(shlex.split(_expand(line, variables), comments=True)[1:])
            found.append(Shown(name, line, words, output))
    return found


def settings(path: Path) -> list[str]:
    """Return the ``--set plugin.option=value`` of a document, whatever stands around them, without placeholders."""
    found = re.findall(r"--set '?([\w-]+\.\w+=[^\s`']+)", path.read_text(encoding="utf-8"))
    return [setting for setting in found if not re.search(r"^[A-Z]+\.|=[A-Z]{3,}$", setting)]


def blocks(text: str, *languages: str) -> list[str]:
    """Return the fenced code blocks in any of these languages."""
    return [block["text"] for block in FENCE.finditer(text) if block["language"] in languages]


def _lines(text: str) -> list[tuple[str, str]]:
    """Return the lines of code with what a console shows below each; continued lines are one."""
    found: list[tuple[int, str, str]] = []
    for block in FENCE.finditer(text):
        if block["language"] in SHELL:
            joined = block["text"].replace("\\\n", " ")
            if block["language"] == "console":
                for entry in joined.split("$ ")[1:]:
                    line, _, output = entry.partition("\n")
                    found.append((block.start(), line.strip(), output.strip()))
            else:
                found += [(block.start(), line.strip(), "") for line in joined.splitlines()]
    bare = FENCE.sub(lambda block: re.sub(r"[^\n]", " ", block[0]), text)  # same length
    joined = re.sub(r"\\\n", lambda _: "  ", bare)
    for line in re.finditer(r"^ {4,}(\S.*)$", joined, re.MULTILINE):
        found.append((line.start(), line[1].strip(), ""))
    for inline in re.finditer(r"(?<!`)`(fedcore\s[^`]+)`", re.sub(r"^ {4,}.*$", _blank, joined, flags=re.MULTILINE)):
        found.append((inline.start(), " ".join(inline[1].split()), ""))
    return [(line, output) for _, line, output in sorted(found, key=lambda entry: entry[0])]


def _blank(found: re.Match[str]) -> str:
    return " " * len(found[0])


def _expand(text: str, variables: dict[str, str]) -> str:
    return re.sub(r"\$(\w+)", lambda found: variables.get(found[1], found[0]), text)
