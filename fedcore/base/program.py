"""The program that runs: the source that it has executed so far."""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any


def main_source() -> str | None:
    """Return the source of the program up to the statement that runs now; None where there is none.

    The program is a script, or the cells of a notebook in the order in which they were executed. What is typed after
    ``python -i`` stands in no file, and a file that was edited since is not the program.
    """
    shell, main = notebook_shell(), sys.modules["__main__"]
    running = list(_running(main))
    if shell is not None:
        *cells, last = (cell for cell in ["", *shell.history_manager.input_hist_parsed] if _parses(cell))
        return "\n".join([*cells, _until(last, running[-1].f_lineno) if running else last])
    file = getattr(main, "__file__", None)
    if file is None:
        return None
    try:
        source = Path(file).read_text(encoding="utf-8")
        if not running:
            return source
        frame = running[-1]
        unchanged = frame.f_code == compile(source, file, "exec", dont_inherit=True)
        return _until(source, frame.f_lineno) if unchanged else None
    except (OSError, ValueError, SyntaxError):
        return None


def notebook_shell() -> Any | None:
    """Return IPython's shell where this process is one; None elsewhere."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None


def _running(main: ModuleType) -> Iterator[FrameType]:
    """Yield the frames of the program's own statements that the main thread executes, the outermost last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_globals is vars(main) and frame.f_locals is frame.f_globals:  # not a function's frame
            yield frame
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
