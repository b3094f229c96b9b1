"""The tree of commands."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperGroup
from typer.main import get_command

from fedcore import __version__
from fedcore.base import registry
from fedcore.base.errors import ConfigError, FedcoreError, suggestion
from fedcore.cli import command, group, options, training
from fedcore.cli.guard import guarded


class Commands(TyperGroup):
    """The commands of the core and of installed packages.

    A package's command is a ``typer.Typer`` behind an entry point of the group ``fedcore.commands``. The name of the
    entry point is the text after ``fedcore`` on the command line: ``sweep``, ``plugins check``.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.suggest_commands = False  # typer knows no packages' commands

    def invoke(self, ctx: Any) -> Any:
        """Run a command and print its errors as messages."""
        if ctx.parent is not None:
            return super().invoke(ctx)
        for place, argument in enumerate(ctx.args):  # shells leave ~ in --out=~/run
            option, equals, value = argument.partition("=")
            if option.startswith("--") and value.startswith("~"):
                ctx.args[place] = option + equals + os.path.expanduser(value)
        with guarded():
            return super().invoke(ctx)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the core's commands in their order, then the names of packages' commands."""
        own = super().list_commands(ctx)
        group = _words_before(ctx)
        names = (name.removeprefix(group) for name in registry.available("command") if name.startswith(group))
        return [*own, *(name for name in names if " " not in name and name not in own)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command. A package's command is imported now.

        :raises ConfigError: names the package that has the command but is not installed.
        """
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        name = f"{_words_before(ctx)}{cmd_name}"
        if name not in registry.available("command"):
            if cmd_name.startswith("-") or ctx.resilient_parsing:  # an option, or shell completion
                return None
            if package := registry.package_of("command", name):
                raise ConfigError(f"{name!r} needs the package {package}: {registry.how_to_install(package)}")
            return ctx.fail(f"No such command {cmd_name!r}.{suggestion(cmd_name, self.list_commands(ctx))}")
        try:
            command = get_command(registry.resolve("command", name))
        except FedcoreError as error:
            command = get_command(_broken(error))  # --help and all other commands still work
        command.name = cmd_name
        return command


def _words_before(ctx: Any) -> str:
    """Return the words between ``fedcore`` and a command: empty, or ``plugins `` with the space."""
    return f"{ctx.info_name} " if ctx.parent is not None else ""


def _broken(error: FedcoreError) -> typer.Typer:
    """Return a command that raises a package's import error."""

    def refuse() -> None:
        raise error

    with_anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    return command(refuse, help=f"Cannot be loaded: {escape(str(error))}", context_settings=with_anything)


app = group(
    "Federated learning on non-IID data: one round loop, one local loop, every method a plugin.",
    add_completion=True,
    epilog="First try: fedcore train --rounds 5\n\nExit codes: 0 done, 1 a bug, 2 bad input or a run that cannot go "
    "on, 3 some runs of a sweep failed, 4 training diverged, 130 interrupted, "
    "141 the reader of the output closed the pipe",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedcore {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Accept the options before a command."""


app.command("train", cls=options.BriefHelp)(training.train)
app.command("resume")(training.resume)
app.command("evaluate")(training.evaluate)
app.add_typer(group("The methods, trackers and engines that are installed."), name="plugins")
