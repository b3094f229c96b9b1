"""The runs that have a figure of a protocol; the others are named in a warning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from fedcore import ConfigError
from fedcore.tools import method, settings, short_name
from fedcore_study.comparisons.records import OVER_CLIENTS, RunRecord, Warn, with_global_model


def usable(
    runs: Sequence[RunRecord], protocol: str, round: int | None, warn: Warn, metric: str = "accuracy"
) -> list[RunRecord]:
    """Return the runs that have a figure of a protocol, and warn of the others.

    :raises ConfigError: no run has one.
    """
    if not runs:
        raise ConfigError("there is no run to compare yet")
    if any(protocol in run.protocols for run in runs):
        runs = [with_global_model(run, protocol) for run in runs]
    if round is None:
        unfinished = [run for run in runs if not run.finished]
        for run in unfinished:
            warn(f"{run.path} is not finished ({len(run.rounds)} of {run.config.rounds} rounds) and is left out")
        runs = [run for run in runs if run.finished]
        if not runs:
            hint = _round_of_all(unfinished, protocol)
            raise ConfigError(f"no run is finished; compare them at a round that all have reached{hint}")
    kept, without, others = [], [], []
    for run in runs:
        if run.at(protocol, round) is not None:
            kept.append(run)
        elif round is None or protocol not in run.protocols:
            without.append(run)
        else:
            others.append(run)
    if len(others) == 1 and kept:
        warn(f"{others[0].path} was not evaluated after round {round} and is left out")
    elif others and kept:
        warn(f"{len(others)} runs were not evaluated after round {round} and are left out: {_methods(others)}")
    if len(without) == 1:
        warn(f"{without[0].path} has no figures for protocol {protocol!r} and is left out")
    elif without and kept:
        present = ", ".join(sorted({name for run in without for name in run.protocols}))
        hint = f"; they have {present} (--protocol)" if present else ""
        warn(
            f"{len(without)} runs have no figures for protocol {protocol!r} and are left out: {_methods(without)}{hint}"
        )
    if not kept:
        protocols = sorted({name for run in runs for name in run.protocols})
        if protocol in protocols:
            hint = f"; the last evaluation that all have{last}" if (last := _round_of_all(runs, protocol)) else ""
            raise ConfigError(f"no run was evaluated after {round} rounds under protocol {protocol!r}{hint}")
        raise ConfigError(
            f"no run has figures for protocol {protocol!r}; there are: {', '.join(protocols) or 'none'}. "
            "Choose with --protocol"
        )
    measured = [run for run in kept if metric in run.figures(protocol, round)]
    if not measured:
        metrics = [name for name in kept[0].metrics(protocol, round) if not name.endswith(OVER_CLIENTS)]
        raise ConfigError(
            f"no run measured {metric!r} for protocol {protocol!r}; metrics of {kept[0].path}: "
            f"{', '.join(metrics) or 'none'}. --metric of train and resume adds one"
        )
    if unmeasured := [run for run in kept if run not in measured]:
        warn(f"runs that did not measure {metric!r} are left out: {_methods(unmeasured)}")
    return measured


def _round_of_all(runs: Iterable[RunRecord], protocol: str) -> str:
    """Return the option for the last round after which all runs were evaluated, behind a colon; empty without one."""
    rounds = [{point.rounds for point in run.curve(protocol)} for run in runs]
    last = max(set.intersection(*rounds), default=0)
    return f": --round {last}" if last else ""


def _methods(runs: Iterable[RunRecord]) -> str:
    """Return the methods of runs, each with its number of runs."""
    counted = Counter(method({short_name(name): {} for name in settings(run.config)["plugins"]}) for run in runs)
    return ", ".join(f"{name} ({number})" for name, number in counted.items())
