"""``plugins new``, ``plugins check`` and ``plugins show``: the commands for authors of plugins."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedcore import ConfigError, RunConfig
from fedcore.cli import command
from fedcore.tools import build_config, options, output, process, registry, short_name
from fedcore_testing.scaffold import KINDS, new_package, train_command

if TYPE_CHECKING:
    from rich.console import Console

    from fedcore_testing import Verdict

_VARIED = {"rounds", "local_epochs", "patience"}
"""Options that the checks set themselves: with other values a check would not see what it looks for."""

RUN_OPTIONS = tuple(
    name
    for name in RunConfig.model_fields
    if name not in _VARIED
    and (options.panel(name) in ("Data and model", "Training") or name in ("samples", "public", "device", "precision"))
)
"""The options of a run that ``plugins check`` takes."""

_MARKS = {
    "passed": ("passed", "green"),
    "failed": ("FAILED", "bold red"),
    "not applicable": ("-", "dim"),
    "failed as expected": ("known", "yellow"),
}


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the plugin, for example my-method.")],
    kind: Annotated[str, typer.Option(metavar="|".join(KINDS), help="Kind of plugin. [default method]")] = "method",
    into: Annotated[Path, typer.Option(help="Folder of the new package. [default here]")] = Path(),
    debug: options.Debug = False,
) -> None:
    """Write a complete plugin package: installable, tested, ready to train."""
    folder = new_package(name, kind, into)
    console = output.stdout()
    console.print(output.text(f"{folder}", style="bold"))
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        console.print(output.text(f"  {path.relative_to(folder)}"))
    tests = f"pytest {shlex.quote(str(folder))}"
    check = [f"fedcore plugins check {name}", f'{tests} -m "not slow"'] if kind == "method" else [tests]
    console.print("\nNext:")
    for line in (f"pip install -e {shlex.quote(f'{folder}[test]')}", *check):
        output.line(f"  {line}")
    output.line(f"  {train_command(name, kind)}")


@options.config_flags(only=RUN_OPTIONS, with_defaults=False)
def check(
    flags: dict[str, Any],
    *,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A plugin, or module:package.module.Class.")],
    only: Annotated[
        list[str] | None, typer.Option(metavar="CHECK", help="Run only this check; can be repeated.")
    ] = None,
    expect: Annotated[
        list[str] | None,
        typer.Option(metavar="CHECK=REASON", help="A check that the method cannot pass, and why; can be repeated."),
    ] = None,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Run also in worker processes and on every installed engine.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME.OPTION=VALUE", help="An option of the plugin; can be repeated."),
    ] = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Run the conformance checks on a plugin; exit code 1 if one fails.

    They run with the plugin's defaults, small models and 120 of the bundled digits. The options change that, such as
    --momentum 0 for a method that refuses momentum.
    """
    with process.importing():
        from fedcore_testing import run_checks

    own = _own_options(name, settings or [])
    reasons = dict(text.partition("=")[::2] for text in expect or ())
    verdicts = run_checks(name, slow=thorough, only=only or (), expected_failed_checks=reasons, options=own, run=flags)
    if as_json:
        results = list(verdicts)
        output.print_json(
            [
                {"check": v.check.name, "status": v.status, "message": v.message, "seconds": round(v.seconds, 3)}
                for v in results
            ]
        )
    else:
        results = _show(name, verdicts, output.stdout())
    if any(verdict.status == "failed" for verdict in results):
        raise typer.Exit(1)


def _own_options(name: str, settings: Sequence[str]) -> dict[str, Any]:
    for text in settings:
        owner = text.partition("=")[0].rpartition(".")[0]
        if owner not in ("", name, short_name(name), short_name(name).lower()):
            raise ConfigError(f"--set {text}: only an option of {name} can be set here: --set {name}.OPTION=VALUE")
    return build_config({"plugins": [name]}, None, settings, allow_code=True).plugins[name]


def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A plugin, tracker or engine, or module:package.Class.")],
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show what a plugin does, its options, its hooks and what it cannot be combined with."""
    with process.importing():
        from fedcore_testing.card import describe, describe_part, draw

    others = [kind for kind in ("tracker", "engine") if name in registry.available(kind)]
    card = describe_part(others[0], name) if others and name not in registry.available("plugin") else describe(name)
    if as_json:
        output.print_json(card)
    else:
        output.stdout().print(draw(card))


def _show(name: str, verdicts: Iterable[Verdict], console: Console) -> list[Verdict]:
    """Print each verdict when it is known, then a summary."""
    from rich.text import Text

    shown = []
    for verdict in verdicts:
        shown.append(verdict)
        word, style = _MARKS[verdict.status]
        line = Text.assemble((f"{word:>7}  ", style), (f"{verdict.check.name:<48}  ", "bold"), verdict.check.summary)
        console.print(line, soft_wrap=True)
        if verdict.message:
            text = output.clean(verdict.message.partition(f"fails {verdict.check.name}: ")[2] or verdict.message)
            for row in text.splitlines():
                console.print(
                    Text(f"{'':9}{row}", style="red" if verdict.status == "failed" else "dim"), soft_wrap=True
                )
    counts = {status: sum(v.status == status for v in shown) for status in _MARKS}
    outcome = "breaks the contract" if counts["failed"] else "keeps the contract"
    totals = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    seconds = output.duration(sum(v.seconds for v in shown))
    console.print(Text(f"\n{output.clean(name)} {outcome}: {totals} in {seconds}", style="bold"), soft_wrap=True)
    if counts["failed"]:
        output.line("A check that the method cannot pass by its definition: --expect CHECK=REASON")
    return shown


new_app, check_app, show_app = command(new), command(check), command(show)
