"""Print how large the core is, and how much of it a person meets: python tools/measures.py [--most [N]].

Lines of code are those without blank lines, comments, docstrings and imports. The last two figures are measured in
processes of their own: the modules of fedcore that ``import fedcore.hooks.hookspecs`` loads, and the files of fedcore
that ``fedcore train --plugin moon`` imports. ``--most`` fails if fedcore/ has more lines of code than N, by default
than ``most-lines`` of ``[tool.fedcore]`` in pyproject.toml.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "fedcore"


def lines_of_code(source: str) -> int:
    """Count the lines that hold code."""
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        is_text = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if is_text or isinstance(node, (ast.Import, ast.ImportFrom)):
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(bool(line.strip()) and not line.strip().startswith("#") and at not in skipped for at, line in lines)


def sizes(folder: Path) -> tuple[int, int]:
    """Return the lines of code and the number of the Python files below a folder."""
    files = sorted(folder.rglob("*.py"))
    return sum(lines_of_code(file.read_text(encoding="utf-8")) for file in files), len(files)


SECTIONS = {"MethodOptions", "DataOptions", "ModelOptions", "FederationOptions", "TrainingOptions"}
SECTIONS |= {"ExecutionOptions", "RecordOptions"}


def holders() -> list[str]:
    """Return the functions of fedcore/ that hold a run's whole configuration.

    A parameter is a ``RunConfig``, or ``.config`` is given a name or handed on, other than as one of its sections.
    """
    functions = [
        (owner, node)
        for file in sorted(CORE.rglob("*.py"))
        for owner in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        for node in ast.iter_child_nodes(owner)
        if isinstance(node, ast.FunctionDef)
    ]
    narrow: set[str] = set()  # functions that take a section
    for owner, node in functions:
        if _annotated(node) & SECTIONS:
            narrow.add(owner.name if isinstance(owner, ast.ClassDef) and node.name == "__init__" else node.name)
    found = []
    for _, node in functions:
        whole = "RunConfig" in _annotated(node)
        for parent in ast.walk(node):
            of_section = isinstance(parent, ast.AnnAssign) and _names(parent.annotation) & SECTIONS
            called = _names(parent.func) & narrow if isinstance(parent, ast.Call) else ()
            reads = isinstance(parent, ast.Attribute) or of_section or called
            children = ast.iter_child_nodes(parent)
            whole |= not reads and any(isinstance(each, ast.Attribute) and each.attr == "config" for each in children)
        found += [node.name] * whole
    return found


def _annotated(function: ast.FunctionDef) -> set[str]:
    """Return the names in the annotations of a function's parameters."""
    arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    return {name for each in arguments if each.annotation for name in _names(each.annotation)}


def _names(node: ast.AST) -> set[str]:
    """Return the names and attributes in an expression."""
    return {
        part.id if isinstance(part, ast.Name) else part.attr
        for part in ast.walk(node)
        if isinstance(part, (ast.Name, ast.Attribute))
    }


def imported(code: str) -> list[str]:
    """Return the modules of fedcore that a Python process has loaded after it ran some code."""
    listing = "import sys\nprint(*sorted(m for m in sys.modules if m.split('.')[0] == 'fedcore'), sep='\\n')"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", f"{code}\n{listing}"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)  # noqa: S603
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2]
        sys.exit(
            f"{sys.executable} cannot run fedcore ({reason}), which the other figures need. Use the Python of the "
            "environment that make setup makes: .venv/bin/python tools/measures.py"
        )
    return [line for line in done.stdout.splitlines() if line.startswith("fedcore")]


TRAIN = """
import sys
from fedcore.cli.app import app
try:
    app(["train", "--plugin", "moon", "--rounds", "1", "--workers", "0", "--quiet", "--out", "run"])
except SystemExit as end:
    assert not end.code
"""


def measures() -> Iterator[tuple[str, object]]:
    """Yield each figure with its name."""
    code, files = sizes(CORE)
    rooms = sorted(path.parent for path in CORE.glob("*/__init__.py"))
    yield "lines of code in fedcore/", code
    yield "files in fedcore/", files
    yield "rooms in fedcore/", len(rooms)
    for room in rooms:
        yield f"  {room.name}", "{} lines, {} files".format(*sizes(room))
    yield "functions that hold the whole configuration", len(holders())
    behind = [name for name in imported("import fedcore.hooks.hookspecs") if name.count(".") > 1]
    yield "modules that hooks.hookspecs loads", len(behind)
    others = sorted({name.split(".")[1] for name in behind} - {"base", "hooks"})
    yield "  of rooms other than base and hooks", ", ".join(others) or "empty"
    yield "files of fedcore that train --plugin moon imports", len(imported(TRAIN))


def require_at_most(most: int) -> None:
    """End with a message if fedcore/ has more lines of code; say where the limit can be lowered."""
    code, _ = sizes(CORE)
    limit = "most-lines of [tool.fedcore] in pyproject.toml"
    if code > most:
        sys.exit(
            f"fedcore/ has {code:,} lines of code, {code - most:,} more than {most:,}, the limit. Say it in fewer, or "
            f"move it to a package. If the core has to grow, raise {limit}, with the reason in the commit's message"
        )
    if code < most:
        print(f"fedcore/ has {code:,} lines of code, fewer than {most:,}, the limit: lower {limit}")


def main() -> None:
    """Print the figures, or check the one that has a limit."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(description="Print how large the core is.")
    most = project["tool"]["fedcore"]["most-lines"]
    parser.add_argument("--most", type=int, nargs="?", const=most, metavar="N", help=f"fail above N lines ({most})")
    chosen = parser.parse_args()
    if chosen.most is not None:
        require_at_most(chosen.most)
        return
    for name, value in measures():
        print(f"{name:<52} {value}")


if __name__ == "__main__":
    main()
