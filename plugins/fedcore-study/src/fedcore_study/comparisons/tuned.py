"""Methods at options of their own: of the runs of a row, those that are best on held-out parts."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from fedcore import ConfigError
from fedcore.tools import key, method, protocols, settings, short_name
from fedcore_study.comparisons.groups import parted, tuned_options
from fedcore_study.comparisons.measures import judge
from fedcore_study.comparisons.records import RunRecord, Warn
from fedcore_study.lenient import mapping_in, number
from fedcore_study.words import counted, joined, shown


def tuned_runs(
    runs: Sequence[RunRecord], fields: Sequence[str], names: Iterable[str], warn: Warn
) -> tuple[list[RunRecord], list[str]]:
    """Return each row's runs at its own values of the tuned options, and these options.

    Of a row's values those are kept whose runs have the best figure of ``best_by`` on held-out parts, in the mean over
    the most seeds that finished, those that all such values share. Without names the options are those that searches
    tried, unless rows are made by one.

    :param fields: the options that make a row.
    :param names: the words of ``--tuned``.
    :param warn: called with the values that have fewer finished seeds than others, but for those of a search.
    :raises ConfigError: a name does not exist, or a row has several values and no figures on held-out parts.
    """
    tuned = tuned_options(names, runs)
    if not tuned:
        searched = dict.fromkeys(name for run in runs for name in run.searched)
        if set(fields).intersection(searched) <= {"plugins"}:
            tuned = list(searched)
    tuned = [name for name in tuned if name not in fields]
    if not tuned:
        return list(runs), []
    rows: dict[str, dict[str, list[RunRecord]]] = {}
    for run in runs:
        place = key([*parted(run, fields, tuned), run.labels])
        rows.setdefault(place, {}).setdefault(key(values_of(run, tuned)), []).append(run)
    kept = {run.path for candidates in rows.values() for run in _best(list(candidates.values()), tuned, warn)}
    return [run for run in runs if run.path in kept], tuned


def values_of(run: RunRecord, tuned: Collection[str]) -> dict[str, Any]:
    """Return a run's values of tuned options, without options of plugins that it does not have."""
    values = settings(run.config)
    plugins = {f"{plugin}.{name}": value for plugin, own in values["plugins"].items() for name, value in own.items()}
    return {name: (values | plugins)[name] for name in tuned if name in values or name in plugins}


def at_which(rows: Mapping[str, Sequence[RunRecord]], tuned: Collection[str], protocol: str) -> str:
    """Return a note with each row's values of tuned options; empty without such options.

    It says so where the figures of the protocol are of the samples that chose the values.
    """
    parts = []
    for label, runs in rows.items() if tuned else ():
        parts.append(f"{label}: {_in_words(runs[0], tuned)}")
    if not parts:
        return ""
    chose = protocol in protocols.VALIDATION and (
        protocol not in protocols.HELD_OUT
        or any(not run.config.validation_share for runs in rows.values() for run in runs)
    )
    on_test = any(_is_tested_on_held_out(run) for runs in rows.values() for run in runs)
    note = f"each row has its own tuned options ({'; '.join(parts)})"
    if chose or (on_test and protocol == "global"):
        note += f"; the samples of {protocol} chose them, so it is too high: {'' if on_test else 'take global, or '}"
        note += "train with --validation-share 0.5 and take personal or global_local"
    return note


def _is_tested_on_held_out(run: RunRecord) -> bool:
    """Return whether the clients' held-out parts are the test set: a model has the same loss on both."""
    ours, theirs = (number(run.figures(protocol, None).get("loss")) for protocol in ("global", "global_local"))
    return ours is not None and theirs is not None and math.isclose(ours, theirs, rel_tol=1e-6)


def _in_words(run: RunRecord, tuned: Collection[str]) -> str:
    """Return a run's values of tuned options: ``lr 0.01, mu 1.23``."""
    values = values_of(run, tuned).items()
    return ", ".join(f"{name.split('.')[-1]} {shown(value)}" for name, value in values) or "none"


def _best(candidates: Sequence[Sequence[RunRecord]], tuned: Collection[str], warn: Warn) -> Sequence[RunRecord]:
    """Return the runs of the values that are best on held-out parts."""
    if len(candidates) == 1:
        return candidates[0]
    done = [[run for run in runs if run.finished] for runs in candidates]
    seeds = [len({run.config.seed for run in runs}) for runs in done]
    most = max(seeds)
    row = method({short_name(name): {} for name in settings(candidates[0][0].config)["plugins"]})
    fewer = [
        f"{_in_words(runs[0], tuned)} ({counted(finished, 'seed')})"
        for runs, finished in zip(candidates, seeds, strict=True)
        if finished < most and not runs[0].searched
    ]
    if not most:
        shown_values = _in_words(candidates[0][0], tuned)
        warn(f"{row}: no run is finished that could choose its tuned options; {shown_values} is shown")
    elif fewer:
        whole = counted(most, "finished seed")
        warn(f"{row}: its tuned options are chosen among values with {whole}, without {'; '.join(fewer)}")
    done = [runs for runs, finished in zip(done, seeds, strict=True) if runs and finished == most]
    if len(done) < 2:
        return (done or candidates)[0]
    shared = set.intersection(*({run.config.seed for run in runs} for runs in done))
    if len(shared) < most:
        over = f"compared over seed {joined([*map(str, sorted(shared))])}" if shared else "none of them on all"
        warn(f"{row}: its values of tuned options have finished on different seeds, {over}")
    measure = judge(done[0][0].config, done[0][0].signs)
    figures = [
        [_held_out(run, measure.name) for run in runs if not shared or run.config.seed in shared] for runs in done
    ]
    known = [[figure for figure in of_runs if figure is not None] for of_runs in figures]
    if not all(len(held_out) == len(every) for held_out, every in zip(known, figures, strict=True)):
        one, two = done[0][0].path, done[1][0].path
        raise ConfigError(
            f"{one} and {two} differ in tuned options ({', '.join(tuned)}), and not all such runs have a figure on "
            "held-out parts to choose by. Train them with --client-test-fraction 0.2, or name the runs of one choice"
        )
    means = [measure.sign * fmean(held_out) for held_out in known]
    return done[means.index(max(means))]


def _held_out(run: RunRecord, name: str) -> float | None:
    """Return a run's best figure on held-out parts, over its rounds."""
    best = mapping_in(mapping_in(run.summary or {}, "metrics"), "best_by_validation")
    return number(best.get(f"validation_{name}"))
