"""``train``, ``resume`` and ``evaluate``.

Figures are one line. A package draws them as tables: functions behind the entry points ``summary``, ``metrics`` and
``profile`` of the group ``fedcore.tables``, which return what rich prints.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from fedcore.base import output, registry
from fedcore.base.config import RunConfig
from fedcore.base.errors import DivergedError, FedcoreError
from fedcore.base.identity import CHANGEABLE, method
from fedcore.base.process import importing
from fedcore.cli import options
from fedcore.cli.guard import INTERRUPTED
from fedcore.cli.settings import build_config
from fedcore.runs.saved import RunFiles


@options.config_flags()
def train(
    flags: dict[str, Any],
    *,
    settings: options.RunSettings = None,
    preset: options.RunPreset = None,
    config_file: options.RunConfigFile = None,
    allow_code: options.RunAllowCode = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    profile: options.RunProfile = False,
    fast_dev_run: options.RunFastDevRun = False,
    debug: options.Debug = False,
    help_all: options.HelpAll = False,
) -> None:
    """Train a model with federated clients, in a new run directory.

    After Ctrl-C, fedcore resume continues from the last checkpoint to the same bits.
    """
    config = build_config(flags, config_file, settings or [], allow_code=allow_code, preset=preset)
    with importing():
        from fedcore.runs.api import run

    with nullcontext() if fast_dev_run else _begun_early(config), training(quiet) as display:
        result = run(config, notify=display, fast_dev_run=fast_dev_run)
    if fast_dev_run and not as_json:
        output.line(_what_ran(result.config))
        return
    show_summary(result.summary, as_json=as_json, quiet=quiet, profile=profile)


def _begun_early(config: RunConfig) -> AbstractContextManager[object]:
    """Let packages begin what has to come before the first computation and thread, such as a fork of this process.

    These are functions of the group ``fedcore.starts``. They take the configuration, and return the block in which they
    hold what they began. Torch is imported by then, and CUDA is not touched.
    """
    stack = ExitStack()
    for name in registry.available("start"):
        stack.enter_context(registry.resolve("start", name)(config))
    return stack


def _what_ran(config: RunConfig) -> str:
    """Return the line that says what a fast dev run has tried."""
    work = f"{config.rounds} rounds of {config.clients} client{'s' * (config.clients > 1)}"
    subject = f"{method(config.plugins)} on {config.dataset} ({config.model})"
    return f"everything ran: {subject}, {work} with a few batches of {config.batch_size}. Nothing is kept."


@options.config_flags(only=CHANGEABLE, with_defaults=False)
def resume(
    flags: dict[str, Any],
    *,
    run_dir: options.RunDir,
    out: Annotated[
        Path | None, typer.Option(help="Resume in a copy in this new folder; RUN_DIR is not changed.")
    ] = None,
    allow_code: options.AllowCode = False,
    allow_outside: options.AllowOutside = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    profile: options.RunProfile = False,
    debug: options.Debug = False,
) -> None:
    """Resume a stopped run with the same options, to the same bits.

    An option given here replaces the run's option from now on. The run's config.yaml records the change.
    """
    with importing():
        from fedcore.runs import api, directory

    saved = directory.RunDirectory.open(Path(os.path.expanduser(run_dir))).read_saved()
    with _begun_early(RunConfig.create({**saved.values, **flags})), training(quiet) as display:
        result = api.resume(
            run_dir, notify=display, allow_code=allow_code, allow_outside=allow_outside, changes=flags, out=out
        )
    show_summary(result.summary, as_json=as_json, quiet=quiet, profile=profile)


@options.config_flags(only=("metrics",), with_defaults=False)
def evaluate(
    flags: dict[str, Any],
    *,
    run_dir: options.RunDir,
    allow_code: options.AllowCode = False,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Evaluate a run's last checkpoint under every protocol. Writes nothing.

    Metrics given here replace the run's own.
    """
    from fedcore.runs.rounds import not_evaluated, undefined
    from fedcore.runs.terminal import make_display

    with importing():
        from fedcore.runs.api import evaluate_run

    display = make_display(output.stderr(), quiet=True)
    metrics = evaluate_run(run_dir, notify=display, allow_code=allow_code, metrics=flags.get("metrics"))
    if as_json:
        output.print_json(metrics)
    elif "metrics" in registry.available("table"):
        console = output.stdout()
        console.print(registry.resolve("table", "metrics")(metrics, console.width))
    else:
        output.line(", ".join(_accuracies(metrics)) or metrics["global_reason"])
        for problem in filter(None, (not_evaluated(metrics), undefined(metrics))):
            output.note(problem)


@contextmanager
def training(
    quiet: bool, how_to_resume: Callable[[Path], str] = lambda directory: RunFiles(directory).how_to_resume
) -> Iterator[Any]:
    """Display a run while it trains. If it stops early, print the command that resumes it.

    :param how_to_resume: returns the command that resumes the run in a directory.
    """
    from fedcore.runs.terminal import make_display

    display = make_display(output.stderr(), quiet=quiet)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a preempted job stops as after Ctrl-C
    try:
        with display:
            yield display
    except KeyboardInterrupt:
        if display.directory is None:
            raise  # there is no run yet
        go_on = "interrupted before a round was finished; nothing is kept"
        if (display.directory / "config.yaml").is_file():  # a run that stops in its first round deletes it
            go_on = f"interrupted. Go on with: {how_to_resume(display.directory)}"
        output.error(go_on, label="stopped")
        raise typer.Exit(INTERRUPTED) from None
    except FedcoreError as error:
        if display.directory is not None and display.done and (display.directory / "config.yaml").is_file():
            kept = f"what was saved of the run is in {display.directory}"  # a full disk may have no checkpoint
            if not isinstance(error, DivergedError):  # it would diverge again
                kept += f"; {how_to_resume(display.directory)} goes on from there"
            output.note(kept)
        raise


def show_summary(summary: Mapping[str, Any], *, as_json: bool, quiet: bool, profile: bool = False) -> None:
    """Print a finished run's figures as JSON on stdout, as tables, or with ``quiet`` in one line."""
    console = output.stderr() if as_json else output.stdout()
    if as_json:
        output.print_json(summary)
        if quiet:
            return
    where = f"run directory: {summary['run_dir']}"
    if quiet or "summary" not in registry.available("table"):
        where = ", ".join([*_accuracies(summary["metrics"]), where])
    else:
        console.print(registry.resolve("table", "summary")(summary, console.width))
    if profile:
        console.print(registry.resolve("table", "profile")(summary["time"]), "")
    console.print(output.text(where), soft_wrap=True)


def _accuracies(metrics: Mapping[str, Any]) -> list[str]:
    from fedcore.runs.rounds import percentages

    return [f"{name} {value}" for name, value in percentages({"metrics": metrics}).items()]
