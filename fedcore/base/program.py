"""The program that runs: the source that it has executed so far."""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any


def main_source() -> str | None:
    """Return the source of the program up to the statement that runs now; None where there is none.

    The program is a script, or the cells of a notebook in the order in which they were executed. What is typed after
    ``python -i`` stands in no file.
    """
    shell, main = notebook_shell(), sys.modules["__main__"]
    lines = dict(_running(main))
    if shell is not None:
        *cells, last = (cell for cell in ["", *shell.history_manager.input_hist_parsed] if _parses(cell))
        return "\n".join([*cells, _until(last, [*lines.values()][-1]) if lines else last])
    file = getattr(main, "__file__", None)
    if file is None or (lines and file not in lines):
        return None
    try:
        source = Path(file).read_text(encoding="utf-8")
        return _until(source, lines[file]) if lines else source
    except (OSError, ValueError, SyntaxError):
        return None


def notebook_shell() -> Any | None:
    """Return IPython's shell where this process is one; None elsewhere."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None


def _running(main: ModuleType) -> Iterator[tuple[str, int]]:
    """Yield file and line of the program's own statements that the main thread executes, the outermost last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_globals is vars(main) and frame.f_locals is frame.f_globals:  # not a function's frame
            yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def _until(source: str, line: int) -> str:
    """Return a source up to the end of the statement that stands at a line."""
    begun = [statement.end_lineno or 0 for statement in ast.parse(source).body if statement.lineno <= line]
    return "\n".join(source.split("\n")[: max(begun, default=0)])


def _parses(cell: str) -> bool:
    try:
        ast.parse(cell)
    except SyntaxError:
        return False
    return True
