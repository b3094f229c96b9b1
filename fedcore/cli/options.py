"""The flags of a run, generated from RunConfig: a field's name is its flag, its description the help."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from fedcore.base import registry
from fedcore.base.config import RunConfig
from fedcore.base.system_options import SystemOptions
from fedcore.cli import fields
from fedcore.cli.guard import debug

METHODS, DATA, CLIENTS = "Methods", "Data and model", "Clients"
TRAINING, EXECUTION, RECORDS = "Training", "Execution", "Records"
GRID = "Sweep"

FORMATS = ("table", "markdown", "csv", "latex", "json")
"""How a table can be printed."""

_PANELS = {
    METHODS: ("plugins",),
    DATA: ("dataset", "data_dir", "augment", "model", "weights", "projection"),
    CLIENTS: (
        "partition",
        "alpha",
        "classes_per_client",
        "clients",
        "participation",
        "client_test_fraction",
        "samples",
        "public",
        "system",
    ),
    EXECUTION: (
        "engine",
        "workers",
        "device",
        "precision",
        "memory_format",
        "autotune",
        "capture",
        "lanes",
        "min_clients",
        "max_waiting",
        "max_payload",
        "client_timeout",
    ),
    RECORDS: ("eval_every", "checkpoint_every", "out", "trackers"),
}
BY_SET = ("engine_options",)
"""Fields without a flag: what is in them is written as ``--set NAME.OPTION=VALUE``."""

_NAMES_OF = {
    "plugins": "plugin",
    "dataset": "dataset",
    "model": "model",
    "partition": "partitioner",
    "engine": "engine",
    "trackers": "tracker",
}

Json = Annotated[bool, typer.Option("--json", help="Print only the result as JSON on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print the result in one line, without progress.")]
Debug = Annotated[bool, typer.Option("--debug", callback=debug, help="Print the traceback of an error.")]
AllowCode = Annotated[
    bool, typer.Option("--allow-code", help="Import code that a file names as module:...; inspect that code first.")
]
AllowOutside = Annotated[
    bool,
    typer.Option(
        "--allow-outside", help="Allow trackers to write, and the engine to connect, outside the run directory."
    ),
]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN_OR_SWEEP...", help="Run or sweep directories.")]
By = Annotated[
    list[str] | None,
    typer.Option(
        metavar="OPTION",
        help="Option that distinguishes rows: plugin, or an option of train; can be repeated. Default plugin.",
    ),
]
Parallel = Annotated[
    int | None,
    typer.Option(
        "--parallel",
        min=1,
        help="Parallel runs, each in its own process; default one per core if memory allows.",
        rich_help_panel=GRID,
    ),
]
RunSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME.OPTION=VALUE",
        help="An option of a plugin, a tracker or the engine, such as moon.mu=5; can be repeated.",
        rich_help_panel=METHODS,
    ),
]
RunConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="YAML file of options, such as a run's config.yaml; flags override it.",
        rich_help_panel=METHODS,
    ),
]
RunAllowCode = Annotated[
    bool,
    typer.Option(
        "--allow-code",
        help="Import code that the --config file names as module:...; inspect that code first.",
        rich_help_panel=METHODS,
    ),
]
RunJson = Annotated[
    bool,
    typer.Option("--json", help="Print only summary.json on stdout.", rich_help_panel=RECORDS),
]
RunQuiet = Annotated[
    bool, typer.Option("--quiet", help="Print the result in one line, without progress.", rich_help_panel=RECORDS)
]
RunProfile = Annotated[
    bool, typer.Option("--profile", help="Print the time split of a round.", rich_help_panel=RECORDS)
]
RunDebug = Annotated[
    bool,
    typer.Option("--debug", callback=debug, help="Print the traceback of an error.", rich_help_panel=RECORDS),
]


def config_flags(*, only: Collection[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of RunConfig's fields (of some ``only``), before its own.

    The command is called with the values that the user gave as its first argument, by field name.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        flags = [flag(name) for name in RunConfig.model_fields if name not in BY_SET and (not only or name in only)]
        names = [parameter.name for parameter in flags]
        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]

        @functools.wraps(function)
        def command(**arguments: Any) -> None:
            given = {name: arguments.pop(name) for name in names}
            function({name: value for name, value in given.items() if value not in (None, [])}, **arguments)

        command.__signature__ = inspect.Signature([*flags, *own])  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in (*flags, *own)}
        return command

    return decorate


def flag(name: str) -> inspect.Parameter:
    """Return a field of RunConfig as a command's parameter; None (or no value) when it is not given."""
    field = RunConfig.model_fields[name]
    inner = fields.base_type(field.annotation)
    default = fields.default(field)
    text = field.description or ""
    long = "--" + name.replace("_", "-")
    declarations: list[str] = [long]
    kind: Any = inner
    metavar: str | None = None
    if name == "plugins":
        declarations, kind, metavar = ["--plugin"], list[str], "NAME"
        text = "A method; can be repeated, hooks are called in this order. FedAvg without any."
    elif name == "trackers":
        declarations, kind, metavar = ["--tracker"], list[str], "NAME"
        text = "Show the run in tensorboard, mlflow, wandb, ... while it trains; can be repeated."
    elif name == "system":
        kind, metavar = list[str], "OPTION=VALUE"
        text = f"{text} Options: {', '.join(SystemOptions.model_fields)}; can be repeated."
    elif inner is bool:
        declarations = [f"{long}/--no-{long.removeprefix('--')}"]
    elif fields.choices(inner):
        kind, metavar = str, "|".join(fields.choices(inner))
    elif inner not in (int, float, str, Path):
        raise TypeError(f"RunConfig.{name}: the command line has no flag for {field.annotation}")
    shown = [fields.bounds(field)] if fields.bounds(field) else []
    if default is not None and kind != list[str] and inner is not bool:
        shown.append(f"default {default}")
    elif default is True:
        shown.append("on by default")
    if shown:
        text += f" [{'; '.join(shown)}]"
    option = typer.Option(
        *declarations,
        help=escape(text),
        show_default=False,
        metavar=metavar,
        rich_help_panel=panel(name),
        autocompletion=_completer(_NAMES_OF[name]) if name in _NAMES_OF else None,
    )
    annotation = operator.getitem(Annotated, (kind | None, option))
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def panel(name: str) -> str:
    """Return the help panel of a field; what is in no list is about training."""
    return next((title for title, names in _PANELS.items() if name in names), TRAINING)


def _completer(kind: str) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return [name for name in registry.available(kind) if name.startswith(incomplete)]

    return complete
