"""Read a plugin's texts: the commands in its README, and the length of its code."""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from pathlib import Path
from types import ModuleType
from typing import Any

from fedcore.base.config import RunConfig
from fedcore.base.safe_yaml import parse_setting

_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def commands_of(readme: Path) -> list[RunConfig]:
    """Return the configuration of every ``fedcore train --...`` in a README, in its order.

    :raises ConfigError: a command would be refused.
    """
    configs = []
    for command in re.findall(r"fedcore train (--[^`\n]+)", readme.read_text(encoding="utf-8")):
        values: dict[str, Any] = {}
        plugins: dict[str, dict[str, Any]] = {}
        for flag, value in re.findall(r"--(\S+)(?: (?!--)(\S+))?", command):
            if flag == "plugin":
                plugins[value] = {}
            elif flag == "set":
                plugin, option, given = parse_setting(value)
                plugins[plugin][option] = given
            else:
                values[flag.replace("-", "_")] = value or True
        configs.append(RunConfig.create({**values, "plugins": plugins}))
    return configs


def settings_of(readme: Path) -> list[tuple[str, str, Any]]:
    """Return plugin, option and value of every ``--set`` in a README, in its order.

    :raises ConfigError: a setting cannot be read.
    """
    found = re.findall(r"--set (\S+=[^\s`]+)", readme.read_text(encoding="utf-8"))
    return [parse_setting(setting) for setting in found]


def lines_of_code(module: ModuleType, *without: str) -> int:
    """Return the number of code lines of a module, without imports, comments and docstrings.

    :param without: classes that are not counted, such as options.
    """
    source = inspect.getsource(module)
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)) or (isinstance(node, ast.ClassDef) and node.name in without):
            skipped.update(_lines(node))
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            skipped.update(_lines(first))
    used = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in _LAYOUT
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(used - skipped)


def _lines(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)
