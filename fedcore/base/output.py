"""Output: results go to stdout, everything else goes to stderr. No text is parsed as markup."""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from typing import IO, Any

from rich.console import Console
from rich.text import Text

_WIDTH_OF_FILES = 120


def stdout() -> Console:
    """Return the console of results."""
    return _console(sys.stdout)


def stderr() -> Console:
    """Return the console of everything else."""
    return _console(sys.stderr)


def clean(value: object) -> str:
    """Return an untrusted text without control characters: they could rewrite the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in str(value))


def text(value: object, style: str = "") -> Text:
    """Return an untrusted text that rich prints literally."""
    return Text(clean(value), style=style)


def line(message: object, style: str = "") -> None:
    """Print an untrusted text on stdout. It is not broken into lines, so that a command in it can be copied."""
    stdout().print(text(message, style), soft_wrap=True)


def error(message: object, *, label: str = "error") -> None:
    """Print ``error: message`` on stderr."""
    stderr().print(Text.assemble((f"{label}: ", "bold red"), clean(message)), soft_wrap=True)


def note(message: object, console: Console | None = None) -> None:
    """Print ``note: message`` on stderr."""
    (console or stderr()).print(Text.assemble(("note: ", "yellow"), clean(message)), soft_wrap=True)


def prose(thing: object) -> str:
    """Return an object's docstring without its fields and Sphinx roles."""
    words = re.split(r"^:\w+.*?:", inspect.getdoc(thing) or "", maxsplit=1, flags=re.MULTILINE)[0].rstrip()
    return re.sub(r"(?::\w+)?:`~?([^`]*)`", r"\1", words).replace("``", "")


def print_json(value: Any) -> None:
    """Print a value as JSON on stdout."""
    print(json.dumps(value, indent=2))


def percent(fraction: float | None) -> str:
    """Return a fraction in percent: ``93.06``; a dash for None."""
    return "-" if fraction is None else f"{100 * fraction:.2f}"


def number(value: float | None) -> str:
    """Return a number with four decimals; in scientific notation if it is very small or large; a dash for None."""
    if value is None:
        return "-"
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.2e}"


def duration(seconds: float) -> str:
    """Return a duration with units: ``0.43 s``, ``12 s``, ``3 min 05 s``, ``2 h 10 min``."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def size(count: float) -> str:
    """Return a number of bytes with units: ``479 kB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _console(file: IO[str] | None) -> Console:
    # A file has no width; rich's 80 columns would fold tables that a pager shows well. A closed stream is None.
    fixed = not (file and file.isatty()) and "COLUMNS" not in os.environ
    return Console(file=file, quiet=not file, width=_WIDTH_OF_FILES if fixed else None, markup=False, highlight=False)
