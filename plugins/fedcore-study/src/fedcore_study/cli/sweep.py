"""``sweep``: a grid of runs, several side by side."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedcore import ConfigError, FedcoreError, RunConfig
from fedcore.tools import INTERRUPTED, SOME_FAILED, options, output, safe_yaml, typed_code
from fedcore_study.cli import shared

if TYPE_CHECKING:
    from fedcore_study.sweeps.spec import SweepSpec

_FIELDS = [name for name in RunConfig.model_fields if name not in ("out", "name", "seed")]


@options.config_flags(only=_FIELDS)
def sweep(
    flags: dict[str, Any],
    *,
    source: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE_OR_SWEEP]", help="A sweep's YAML file, or the folder of a sweep to go on with."),
    ] = None,
    grid: Annotated[
        list[str] | None,
        options.option(
            "--grid",
            "An axis: plugin (moon+uscc combines two), an option of train, or PLUGIN.OPTION; can be given again.",
            shared.SWEEP_PANEL,
            metavar="AXIS=VALUE,...",
        ),
    ] = None,
    trials: Annotated[
        int | None,
        options.option(
            "--optuna",
            "Search by Optuna, in so many trials in all, in place of a grid; pruned on clients' held-out parts.",
            shared.SWEEP_PANEL,
            metavar="TRIALS",
            min=1,
        ),
    ] = None,
    searched: Annotated[
        list[str] | None,
        options.option(
            "--search",
            "An option that --optuna searches, or OPTION=VALUE,VALUE; can be given again.",
            shared.SWEEP_PANEL,
            metavar="OPTION=LOW..HIGH[:log]",
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        options.option("--seeds", "How many (0 to N-1), or which.", shared.SWEEP_PANEL, metavar="N or A,B,..."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        options.option(
            "--set",
            "An option of a plugin, in each run that has the plugin; can be given again.",
            shared.SWEEP_PANEL,
            metavar="PLUGIN.OPTION=VALUE",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        options.option("--out", "The sweep's folder; default sweeps/<file's name or time>.", shared.SWEEP_PANEL),
    ] = None,
    parallel: shared.Parallel = None,
    submit: Annotated[
        str | None,
        options.option(
            "--submit",
            "Submit each run as a job, to SLURM or, to try it, to this machine; needs submitit.",
            shared.SWEEP_PANEL,
            metavar="slurm|local",
        ),
    ] = None,
    submitted_with: Annotated[
        list[str] | None,
        options.option(
            "--submit-set",
            "A parameter of submitit's executor, such as slurm_partition=gpu; can be given again.",
            shared.SWEEP_PANEL,
            metavar="NAME=VALUE",
        ),
    ] = None,
    dry_run: Annotated[
        bool, options.option("--dry-run", "Check and list the runs, start none.", shared.SWEEP_PANEL)
    ] = False,
    preset: options.RunPreset = None,
    allow_code: options.AllowCode = False,
    allow_outside: options.AllowOutside = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Run a grid of methods, settings and seeds; finished runs are not run again.

    Methods of one seed see the same clients, cohorts and initial weights (of the layers they have in common; some
    add a projection head, which --projection gives to all). Ctrl-C leaves checkpoints: fedcore sweep FOLDER goes on
    from there. Exit code 3: some runs failed; the others are finished.
    """
    from fedcore_study.sweeps.directory import SweepDirectory, new_folder
    from fedcore_study.sweeps.run import check_named, plan_sweep, run_sweep
    from fedcore_study.sweeps.spec import SweepSpec, override

    if searched and trials is None:
        raise ConfigError("--search is for --optuna: add how many trials, --optuna 20")
    changed = partial(override, base=flags, grid=grid or [], seeds=seeds, settings=settings or [], preset=preset)
    if trials is not None:
        if source is not None or grid:
            raise ConfigError("--optuna takes no file and no --grid: --search names what is searched")
        if submit is not None or submitted_with:
            raise ConfigError("--optuna runs its trials on this machine; leave --submit and --submit-set out")
        from fedcore_study.cli.search import run_search

        asked = changed(SweepSpec()), searched or [], trials, out or new_folder()
        run_search(*asked, parallel=parallel, as_json=as_json, quiet=quiet, dry_run=dry_run)
        return
    parameters = _parameters(submit, submitted_with or [])
    is_changed = bool(flags or grid or seeds or settings or preset)
    spec, folder = _asked_for(source, out, changed if is_changed else None)
    goes_on = source is not None and source.is_dir()
    if spec is not None and source is not None:
        own = [*typed_code([*flags.values(), *(grid or [])]), *(settings or [])]
        check_named(spec, source, folder if goes_on else None, own, allow_code=allow_code, allow_outside=allow_outside)
    rounds = flags.get("rounds") if goes_on else None
    if dry_run:
        planned = plan_sweep(spec) if spec else SweepDirectory(folder).plan().items()
        labels = SweepDirectory(folder).extended(planned, rounds)[1] if goes_on else [label for label, _ in planned]
        output.line("\n".join(labels))
        output.note(f"{len(labels)} runs, none started")
        return

    from fedcore_study.cli.sweep_display import SweepDisplay

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a job that is preempted stops as at Ctrl-C
    with SweepDisplay(output.stderr(), quiet=quiet) as display:
        result = run_sweep(
            spec,
            folder,
            rounds=rounds,
            parallel=parallel,
            listen=display,
            allow_code=allow_code,
            allow_outside=allow_outside,
            submit=submit,
            parameters=parameters,
        )
    for note in _cautions(result.directory):
        output.note(note)
    failed = result.named("failed")
    if as_json:
        output.print_json({"sweep_dir": str(result.directory), "runs": list(map(asdict, result.outcomes))})
    for outcome in failed:
        output.error(f"{outcome.name}: {outcome.message}", label="failed")
    path = shlex.quote(str(result.directory))
    done = f"{len(result.named('finished'))} of {len(result.outcomes)} runs are finished"
    if result.interrupted or failed:
        jobs = (
            [] if submit is None else [f"--submit={submit}", *(f"--submit-set={text}" for text in submitted_with or ())]
        )
        command = " ".join([result.how_to_go_on(), *map(shlex.quote, jobs)])
        if result.interrupted:
            output.error(f"{done}. Go on with: {command}", label="stopped")
            raise typer.Exit(INTERRUPTED)
        output.error(f"{done}, {len(failed)} failed. Try these again with: {command}", label="failed")
        raise typer.Exit(SOME_FAILED)
    if not as_json:
        output.line(f"{done}. Compare them with: fedcore compare {path}")


def _parameters(submit: str | None, texts: list[str]) -> dict[str, Any]:
    """Return the parameters of submitit's executor."""
    if submit is None and texts:
        raise ConfigError("--submit-set is for --submit slurm")
    if submit not in (None, "slurm", "local"):
        raise ConfigError(f"--submit {submit!r}: write slurm or local")
    parameters = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (equals and name.isidentifier()):
            raise ConfigError(f"--submit-set {text!r}: write NAME=VALUE, for example slurm_partition=gpu")
        try:
            parameters[name] = safe_yaml.read_yaml(value)
        except ValueError as error:
            raise ConfigError(f"--submit-set {text!r}: the value is not valid YAML ({error})") from None
    return parameters


def _cautions(folder: Path) -> list[str]:
    """Return the cautions that a comparison of the sweep's finished runs would have on their models."""
    from fedcore_study.comparisons.cautions import other_models
    from fedcore_study.comparisons.comparison import BASELINE
    from fedcore_study.comparisons.groups import group_runs
    from fedcore_study.comparisons.records import find_runs

    try:
        runs = [run for run in find_runs([folder], lambda message: None) if run.finished]
        groups = group_runs(runs, ["plugins"])[1] if runs else []
    except FedcoreError:
        return []  # compare names the problem
    cautions = [other_models(group.rows, BASELINE) for group in groups if BASELINE in group.rows]
    return list(dict.fromkeys(note for note in cautions if note))


def _asked_for(
    source: Path | None, out: Path | None, changed: Callable[[SweepSpec], SweepSpec] | None
) -> tuple[SweepSpec | None, Path]:
    """Return the grid, None for all that a folder has planned, and the sweep's folder.

    :param changed: adds the options of the command line to a sweep; None without options.
    """
    from fedcore_study.sweeps.directory import SweepDirectory, new_folder
    from fedcore_study.sweeps.spec import SweepSpec, read_earlier, read_spec

    if source is None:
        if changed is None:
            raise ConfigError(
                "nothing to sweep: name a file, a sweep's folder, or axes such as --grid plugin=fedavg,moon --seeds 3"
            )
        return changed(SweepSpec()), out or new_folder()
    if not source.is_dir():
        spec = read_spec(source)
        return changed(spec) if changed else spec, out or Path("sweeps") / source.stem
    if out is not None:
        raise ConfigError(f"{source} is a sweep's folder; leave --out out to go on in it")
    if changed is None:
        return None, source
    directory = SweepDirectory(source)
    directory.plan()  # says so if the folder holds no sweep
    return changed(read_earlier(directory.spec_file)), source
