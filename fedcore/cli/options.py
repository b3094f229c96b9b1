"""The flags of a run, generated from RunConfig. A field's name is its flag, and its description is the help text."""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import re
from collections.abc import Callable, Collection
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from rich.markup import escape
from typer.core import TyperCommand

from fedcore.base import registry
from fedcore.base.config import MethodOptions, RecordOptions, RunConfig, marked, options_with
from fedcore.base.errors import ConfigError, flag_of
from fedcore.base.protocols import EVALUATED
from fedcore.base.section import Kind, Repeated, Trait
from fedcore.cli.guard import debug

METHODS, RECORDS = MethodOptions.panel, RecordOptions.panel

EVERYDAY = (*options_with(Trait.EVERYDAY), "settings", "preset", "config_file", "help_all")
"""The options that the help of a :class:`BriefHelp` command shows, by parameter."""

BY_SET = ("engine_options",)
"""Fields without a flag. Users write their entries as ``--set NAME.OPTION=VALUE``."""

_HUGE = 1_000_000
"""Bounds from here on only refuse typos. The help does not print them."""
_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


class BriefHelp(TyperCommand):
    """A command whose ``--help`` fits a screen: the everyday options in one panel, the first sentence of each text.

    ``--help-all`` prints everything.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the brief help."""
        brief = copy.copy(self)
        brief.help, brief.add_help_option = _first_sentence(self.help or ""), False
        brief.params = [copy.copy(parameter) for parameter in self.params if parameter.name in EVERYDAY]
        for parameter in brief.params:
            vars(parameter).update(help=_first_sentence(vars(parameter)["help"]), rich_help_panel=None)
        super(BriefHelp, brief).format_help(ctx, formatter)


def _first_sentence(text: str) -> str:
    """Return the first sentence of a help text, with the default that the text ends with."""
    first, dot, rest = text.partition(". ")
    default = re.search(r"default [^\]]+\]$", rest)
    first = first.partition("\n\n")[0] + dot.strip()
    return f"{first} \\[{default[0]}" if default else first


def _print_all(context: typer.Context, wanted: bool) -> None:
    """Print the help of all options, and end the command."""
    if wanted:
        command: Any = context.command
        TyperCommand.format_help(command, context, context.make_formatter())
        raise typer.Exit


def _completer(kind: str) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return [name for name in registry.available(kind) if name.startswith(incomplete)]

    return complete


def option(name: str, text: str, in_panel: str | None = None, **more: Any) -> Any:
    """Return typer's option with a help text, which stands in a panel of the help."""
    return typer.Option(name, help=text, rich_help_panel=in_panel, **more)


_OUTSIDE = "Allow trackers to write, and the engine to connect, outside the run directory."
_SET = "Set an option, such as moon.mu=5. It belongs to a plugin, a tracker or the engine. Can be repeated."
_PRESET = (
    "Start from a known setting, such as cifar10-moon. fedcore data list names all; a file's options and flags "
    "override it."
)
_FAST = "Only try whether everything runs: two rounds of one client on two batches, in this process. Keeps nothing."
_FILE = "YAML file of options, such as a run's config.yaml. Flags override it."
_CODE_OF_FILE = "Import code that the --config file names as module:...; inspect that code first."


def _draws_a_table(wanted: bool) -> bool:
    """Refuse ``--profile`` before the run if the package that draws its table is not installed."""
    if wanted:
        registry.needed("table", "profile", "--profile")
    return wanted


_REPEATED = {
    "plugins": ("NAME", "A method; can be repeated, hooks are called in this order. Default: FedAvg."),
    "trackers": ("NAME", "Show the run in tensorboard, mlflow, wandb, ... while it trains. Can be repeated."),
    "metrics": ("NAME", "A metric of an evaluation next to accuracy and loss, such as macro-f1. Can be repeated."),
    "protocols": (
        "NAME",
        f"{RunConfig.model_fields['protocols'].description} One of {', '.join(EVALUATED)}. Can be repeated.",
    ),
    "tags": ("TAG", "A word by which fedcore runs list finds the run. Can be repeated."),
}
"""Fields whose flags can be repeated: the form of a value, and the help text."""
_WRITTEN = {"client_models": "A,B,C", "unseen_clients": "SHARE|NAME,..."}
"""Fields whose values have a form of their own on the command line."""

RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run directory that train printed.")]
HelpAll = Annotated[bool, typer.Option("--help-all", help="Show all options.", is_eager=True, callback=_print_all)]
Json = Annotated[bool, option("--json", "Print only the result as JSON on stdout.")]
Quiet = Annotated[bool, option("--quiet", "Print the result in one line, without progress. Notes go to stderr.")]
Debug = Annotated[bool, option("--debug", "Print the traceback of an error.", callback=debug)]
AllowCode = Annotated[
    bool, option("--allow-code", "Import code that a file names as module:...; inspect that code first.")
]
AllowOutside = Annotated[bool, option("--allow-outside", _OUTSIDE)]
RunSettings = Annotated[list[str] | None, option("--set", _SET, METHODS, metavar="NAME.OPTION=VALUE")]
RunPreset = Annotated[
    str | None, option("--preset", _PRESET, METHODS, metavar="NAME", autocompletion=_completer("preset"))
]
RunFastDevRun = Annotated[bool, option("--fast-dev-run", _FAST, RECORDS)]
RunConfigFile = Annotated[Path | None, option("--config", _FILE, METHODS, metavar="FILE")]
RunAllowCode = Annotated[bool, option("--allow-code", _CODE_OF_FILE, METHODS)]
RunProfile = Annotated[bool, option("--profile", "Print the time split of a round.", RECORDS, callback=_draws_a_table)]


def config_flags(
    *, only: Collection[str] = (), with_defaults: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of RunConfig's fields, before the flags of its own.

    The first argument of the command is a mapping of the values that the user gave, by field name and as a config file
    has them: paths are texts.

    :param only: the fields that get a flag; empty for all fields.
    :param with_defaults: whether the help names defaults. The defaults of an existing run are its own values.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        flags = [
            flag(name, with_default=with_defaults)
            for name in RunConfig.model_fields
            if name not in BY_SET and (not only or name in only)
        ]
        names = [parameter.name for parameter in flags]
        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]

        @functools.wraps(function)
        def command(**arguments: Any) -> None:
            written = {}
            for name in names:
                if (value := arguments.pop(name)) not in (None, []):
                    written[name] = str(value) if isinstance(value, Path) else value
            function(written, **arguments)

        command.__signature__ = inspect.Signature([*flags, *own])  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in (*flags, *own)}
        return command

    return decorate


@functools.cache
def flag(name: str, *, with_default: bool = True) -> inspect.Parameter:
    """Return a field of RunConfig as a command's parameter. Without a value from the user it is None or empty."""
    field = RunConfig.model_fields[name]
    inner = base_type(field.annotation)
    default = field.get_default(call_default_factory=True)
    text = field.description or ""
    long = flag_of(name)
    declarations: list[str] = [long]
    kind: Any = inner
    metavar: str | None = None
    if name in _REPEATED:
        kind, (metavar, text) = list[str], _REPEATED[name]
    elif metavar := marked(name, Repeated):
        kind, text = list[str], f"{text} Can be repeated."
    elif name in _WRITTEN:
        kind, metavar = str, _WRITTEN[name]
    elif inner is bool:
        declarations = [f"{long}/--no-{long.removeprefix('--')}"]
    elif choices(inner):
        kind, metavar = str, "|".join(choices(inner))
    elif inner not in (int, float, str, Path):
        raise ConfigError(f"{long}: no flag for {field.annotation}; mark a list: Annotated[..., Repeated('X')]")
    shown = [bounds(field)] if bounds(field) else []
    if with_default and default not in (None, []) and kind != list[str] and inner is not bool:
        shown.append(f"default {default}")
    elif default is True:
        shown.append("on by default")
    if shown:
        text += f" [{'; '.join(shown)}]"
    shown_as = typer.Option(
        *declarations,
        help=escape(text),
        show_default=False,
        metavar=metavar,
        rich_help_panel=panel(name),
        autocompletion=_completer(names) if (names := marked(name, Kind)) else None,
    )
    annotation = operator.getitem(Annotated, (kind | None, shown_as))
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def panel(name: str) -> str:
    """Return the help panel of a field, which is its section's."""
    return next(section.panel for section in RunConfig.sections() if name in section.model_fields)


def base_type(annotation: Any) -> Any:
    """Return an annotation without its ``| None``."""
    inner = [part for part in get_args(annotation) if part is not NoneType]
    return inner[0] if get_origin(annotation) in (Union, UnionType) and len(inner) == 1 else annotation


def choices(annotation: Any) -> list[str]:
    """Return the values of a Literal, or N and the values for a number or a Literal; empty for other annotations."""
    inner = base_type(annotation)
    if get_origin(inner) in (Union, UnionType):
        return [value for part in get_args(inner) for value in choices(part) or ["N"]]
    return [str(value) for value in get_args(inner)] if get_origin(inner) is Literal else []


def bounds(field: FieldInfo) -> str:
    """Return a field's bounds, as in ``0 < x <= 1`` or ``>= 1``; empty without bounds that a user meets."""
    limits = [(name, getattr(item, name)) for name in _SIGNS for item in field.metadata if hasattr(item, name)]
    signs = [(_SIGNS[name], f"{limit:g}") for name, limit in limits if limit is not None and abs(limit) < _HUGE]
    if len(signs) == 2:
        (low, least), (high, most) = signs
        return f"{least} {low.replace('>', '<')} x {high} {most}"
    return " ".join(signs[0]) if signs else ""
