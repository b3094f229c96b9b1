"""Options of a run and the commands, made from RunConfig and from the command line itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic_core import PydanticUndefined

from fedcore.base.config import RunConfig
from fedcore.base.errors import flag_of
from fedcore.cli import options
from fedcore.cli.app import app


def options_page() -> str:
    """Return the table of RunConfig's fields, in the command line's groups."""
    groups: dict[str, list[str]] = {}
    for name, field in RunConfig.model_fields.items():
        flag = flag_of(name)
        default = "" if field.default in (None, PydanticUndefined) else f"`{field.default}`"
        kind = " or ".join(f"`{choice}`" for choice in options.choices(field.annotation))
        bounds = options.bounds(field) or kind
        text = _cell(field.description or "")
        groups.setdefault(options.panel(name), []).append(
            f"| `{name}` | `{flag}` | {default} | {_cell(bounds)} | {text} |"
        )
    parts = [
        "# Options of a run",
        "Made from `fedcore.RunConfig` whenever the site is built. A field's name is its key in a YAML file "
        "(`--config FILE`) and its name in Python; a flag overrides the file.",
    ]
    for title, rows in groups.items():
        parts.append(f"## {title}")
        head = "| name | flag | default | values | what |\n| --- | --- | --- | --- | --- |\n"
        parts.append(head + "\n".join(rows))
    return "\n\n".join(parts) + "\n"


def commands_page() -> str:
    """Return every command with its arguments and options."""
    parts = [
        "# Command line",
        "Made from the commands themselves whenever the site is built. Every command answers `--help`; "
        "errors of the user end with exit code 2 and no traceback.",
    ]
    for words, command in commands():
        parts.append(f"## `{' '.join(words)}`")
        parts.append(_cell(command.help or ""))
        rows = [_row(parameter) for parameter in command.params if parameter.name != "help"]
        if rows:
            parts.append("| argument | what |\n| --- | --- |\n" + "\n".join(rows))
    return "\n\n".join(parts) + "\n"


def commands() -> Iterator[tuple[list[str], Any]]:
    """Yield every command that does something, those of installed packages too, with the words that name it."""
    from typer import Context
    from typer.main import get_command

    def walk(words: list[str], command: Any, parent: Any) -> Iterator[tuple[list[str], Any]]:
        if not hasattr(command, "list_commands"):
            yield words, command
            return
        context = Context(command, info_name=words[-1], parent=parent)
        for name in command.list_commands(context):
            yield from walk([*words, name], command.get_command(context, name), context)

    yield from walk(["fedcore"], get_command(app), None)


def _row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"| `{parameter.metavar or parameter.name.upper()}` | {_cell(parameter.help or '')} |"
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    return f"| {names} | {_cell(parameter.help or '')} |"


def _cell(text: str) -> str:
    """Return a help text as Markdown in one cell: rich's own escapes and line breaks taken out."""
    return " ".join(text.replace("\\[", "[").replace("|", "\\|").replace("<", "&lt;").split())
