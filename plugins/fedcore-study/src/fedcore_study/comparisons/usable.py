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
    if round is None:
        unfinished = [run for run in runs if not run.finished]
        for run in unfinished:
            warn(f"{run.path} is not finished ({len(run.rounds)} of {run.config.rounds} rounds) and is left out")
        runs = [run for run in runs if run.finished]
        if not runs:
            reached = min(len(run.rounds) for run in unfinished)
            hint = f": --round {reached}" if reached else ""
            raise ConfigError(f"no run is finished; compare them at a round that all have reached{hint}")
    if any(protocol in run.protocols for run in runs):
        runs = [with_global_model(run, protocol) for run in runs]
    kept, without = [], []
    for run in runs:
        if run.at(protocol, round) is not None:
            kept.append(run)
        elif round is None or protocol not in run.protocols:
            without.append(run)
        else:
            warn(f"{run.path} was not evaluated after round {round} and is left out")
    if len(without) == 1:
        warn(f"{without[0].path} has no figures for protocol {protocol!r} and is left out")
    elif without and kept:
        others = ", ".join(sorted({name for run in without for name in run.protocols}))
        hint = f"; they have {others} (--protocol)" if others else ""
        warn(
            f"{len(without)} runs have no figures for protocol {protocol!r} and are left out: {_methods(without)}{hint}"
        )
    if not kept:
        protocols = sorted({name for run in runs for name in run.protocols})
        if protocol in protocols:
            raise ConfigError(f"no run was evaluated after {round} rounds under protocol {protocol!r}")
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


def _methods(runs: Iterable[RunRecord]) -> str:
    """Return the methods of runs, each with its number of runs."""
    counted = Counter(method({short_name(name): {} for name in settings(run.config)["plugins"]}) for run in runs)
    return ", ".join(f"{name} ({number})" for name, number in counted.items())
