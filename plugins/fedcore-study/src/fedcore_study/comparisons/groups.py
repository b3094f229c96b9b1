"""Runs in groups. The runs of a group share their settings; a group has a row per method (or other options) with a run
per seed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedcore import ConfigError, RunConfig, UnknownNameError
from fedcore.tools import PARTITION_OPTIONS, Json, key, method, settings, short_name
from fedcore_study.comparisons.records import RunRecord
from fedcore_study.words import shown

WITHOUT_ALPHA = ("iid", "shards", "classes", "natural", "domain")
"""Partitioners that do not use ``alpha``."""

_GIVEN = r"object:[0-9a-f]{12}|.*\.json"
"""Nor does what a program gave as lists, which their hash names, or a partition file."""

BY_ROUNDING = ("autotune", "capture", "memory_format", "stack")
"""Options that change results by rounding alone. ``auto`` may stand for another value in each method's runs."""

NAME = "name"
"""The word of ``--by`` with which the runs' own names make rows."""


@dataclass(frozen=True)
class Group:
    """Runs that share the training labels and all settings except the rows' own and the seed."""

    settings: dict[str, Json]
    """The settings in which groups differ, as tables print them: numbers, and names that tell methods and other values
    apart. An ``alpha`` that the partition does not use is left out."""
    rows: dict[str, list[RunRecord]]
    """The runs by the row's label."""


def group_runs(
    runs: Sequence[RunRecord], fields: Sequence[str], tuned: Collection[str] = ()
) -> tuple[dict[str, Json], list[Group]]:
    """Group runs, at least one; return the settings that all groups share, and the groups.

    :param fields: the options that make a row, as :func:`option` returns them.
    :param tuned: options that each row has its own value of, as :func:`tuned_option` returns them. They are no part of
        the settings, and not in a row's name.
    :raises ConfigError: rows are made by name, and runs of one name differ in an option that is not of the data.
    """
    tuned = [*tuned, *_by_rounding(runs, fields, tuned)]
    by_settings: dict[str, Group] = {}
    rows: dict[str, dict[str, Any]] = {}
    named: dict[str, RunRecord] = {}
    for run in runs:
        row, values = parted(run, fields, tuned)
        if NAME in fields:
            _check_same(run, named.setdefault(run.title, run), tuned)
        labels = None if "dataset" in fields else run.labels
        group = by_settings.setdefault(key([values, labels]), Group({**values, "labels": run.labels[:12]}, {}))
        group.rows.setdefault(key(row), []).append(run)
        rows[key(row)] = row
    names = _labels(rows, fields)
    groups = list(by_settings.values())
    every = dict.fromkeys(name for group in groups for name in group.settings)
    printed = {name: _printed(name, [group.settings.get(name) for group in groups]) for name in every}
    shared = [name for name in every if len(printed[name]) == 1]
    common = {name: groups[0].settings[name] for name in shared if name != "labels"}
    return common, [
        Group(
            {name: printed[name][key(value)] for name, value in group.settings.items() if name not in shared},
            {names[row]: runs for row, runs in group.rows.items()},
        )
        for group in groups
    ]


def parted(
    run: RunRecord, fields: Sequence[str], tuned: Collection[str] = ()
) -> tuple[dict[str, Any], dict[str, Json]]:
    """Return a run's part of settings that makes its row, and the other settings, both without seed and tuned options.

    With rows by name, these other settings are the data's.
    """
    values = without_tuned(_used(run.config, fields), tuned)
    del values["seed"]
    row = {name: run.title if name == NAME else values.pop(name) for name in fields}
    if NAME in fields:
        values = {name: value for name, value in values.items() if name in PARTITION_OPTIONS}
    return row, values


def _by_rounding(runs: Iterable[RunRecord], fields: Sequence[str], tuned: Collection[str]) -> list[str]:
    """Return the options that change results by rounding alone; none of them if some runs differ in nothing else."""
    names = [name for name in BY_ROUNDING if name not in fields]
    places = Counter(key([*parted(run, fields, [*tuned, *names]), run.labels, run.config.seed]) for run in runs)
    return names if max(places.values(), default=1) == 1 else []


def without_tuned(values: dict[str, Any], tuned: Collection[str]) -> dict[str, Any]:
    """Return settings without tuned options: ``lr``, ``moon.mu``."""
    kept = {name: value for name, value in values.items() if name not in tuned}
    if "plugins" in kept:
        kept["plugins"] = {
            plugin: {name: value for name, value in options.items() if f"{plugin}.{name}" not in tuned}
            for plugin, options in kept["plugins"].items()
        }
    return kept


def tuned_options(names: Iterable[str], runs: Sequence[RunRecord]) -> list[str]:
    """Return the options that words of ``--tuned`` name, of runs and their plugins: ``mu`` is that of every plugin.

    :raises UnknownNameError: no run has the option.
    """
    every = settings(RunConfig())
    of_plugins = dict.fromkeys(
        f"{plugin}.{name}"
        for run in runs
        for plugin, options in settings(run.config)["plugins"].items()
        for name in options
    )
    options = [name for name in every if name not in ("seed", "plugins", *PARTITION_OPTIONS)]
    tuned_names: dict[str, None] = {}
    for word in (part.strip() for name in names for part in name.split(",")):
        plain = word.replace("-", "_")
        meant = [name for name in of_plugins if name.split(".")[-1] == plain or name == word]
        meant += [plain] if plain in options else []
        if not meant:
            raise UnknownNameError("--tuned", word, [*options, *of_plugins])
        tuned_names |= dict.fromkeys(meant)
    return list(tuned_names)


def relabelled(groups: Sequence[Group], labels: Mapping[str, str]) -> list[Group]:
    """Return groups whose rows have other names.

    :param labels: new names by the present ones.
    :raises UnknownNameError: no group has a row of a present name.
    :raises ConfigError: two rows of a group would have the same name.
    """
    present = {label for group in groups for label in group.rows}
    for label in labels:
        if label not in present:
            raise UnknownNameError("row", label, present, "It stands in --label")
    renamed = []
    for group in groups:
        names = {label: labels.get(label, label) for label in group.rows}
        for name, count in Counter(names.values()).items():
            if count > 1:
                raise ConfigError(f"--label gives {count} rows the name {name!r}; give each row its own")
        renamed.append(replace(group, rows={names[label]: runs for label, runs in group.rows.items()}))
    return renamed


def distinct(runs: Sequence[RunRecord], fields: Sequence[str], warn: Callable[[str], None]) -> list[RunRecord]:
    """Return the runs without those that repeat another run under an ``alpha`` without effect, and warn how many."""
    first: dict[str, RunRecord] = {}
    kept = []
    for run in runs:
        other = first.setdefault(key([_used(run.config, fields), run.labels, run.partition]), run)
        if other is run or settings(other.config) == settings(run.config):
            kept.append(run)
    if left := len(runs) - len(kept):
        warn(f"runs that repeat others under another alpha, which their partition does not use, are left out: {left}")
    return kept


def uses_alpha(partition: str) -> bool:
    """Return whether ``alpha`` has an effect on a partition."""
    return partition not in WITHOUT_ALPHA and not re.fullmatch(_GIVEN, partition)


def option(name: str) -> str:
    """Return the option that a word of ``--by`` names.

    :raises UnknownNameError: there is no such option.
    """
    field = "plugins" if name == "plugin" else name.replace("-", "_")
    known = [NAME, *(name for name in settings(RunConfig()) if name != "seed")]
    if field not in known:
        hint = "Figures are always over seeds." if field == "seed" else ""
        raise UnknownNameError("--by", name, ["plugin", *known], hint)
    return field


def by_seed(runs: Sequence[RunRecord]) -> dict[int, RunRecord]:
    """Return a row's runs by seed.

    :raises ConfigError: two runs have the same seed.
    """
    by_number: dict[int, RunRecord] = {}
    for run in runs:
        other = by_number.setdefault(run.config.seed, run)
        if other is not run:
            raise ConfigError(
                f"{other.path} and {run.path} are runs of the same settings and seed; name one of them, "
                "or the deviation over seeds would come out too small"
            )
    return by_number


def _check_same(run: RunRecord, other: RunRecord, tuned: Collection[str]) -> None:
    """Refuse two runs of one name that are not of one method: a mean over them says nothing.

    :raises ConfigError: they differ in an option that is not of the data, tuned or a seed.
    """
    one, two = (without_tuned(settings(each.config), tuned) for each in (run, other))
    if different := [name for name in one if name not in (*PARTITION_OPTIONS, "seed") and one[name] != two[name]]:
        name = "plugin" if different[0] == "plugins" else different[0]
        raise ConfigError(
            f"{other.path} and {run.path} have the name {run.title!r} and differ in {name}; give each method its own "
            "name (fedcore runs), or add the option: --by name --by " + name
        )


def _used(config: RunConfig, fields: Sequence[str]) -> dict[str, Json]:
    """Return a run's settings. An ``alpha`` without effect is left out, unless it or the partition makes the rows."""
    values = settings(config)
    if not uses_alpha(config.partition) and not {"alpha", "partition"} & set(fields):
        del values["alpha"]
    return values


def _labels(rows: Mapping[str, Mapping[str, Any]], fields: Sequence[str]) -> dict[str, str]:
    """Name every row.

    :param rows: each row's options.
    """
    names = {}
    for name in fields:
        values = [row[name] for row in rows.values()]
        prefix = "" if len(fields) == 1 else f"{name}="
        names[name] = _method_names(values) if name == "plugins" else _own_names(values, prefix)
    return {place: ", ".join(names[name][key(row[name])] for name in fields) for place, row in rows.items()}


def _method_names(methods: Sequence[Mapping[str, Mapping[str, Json]]]) -> dict[str, str]:
    """Name methods by their plugins, and by the options in which methods with the same plugins differ.

    The user's own plugins are named without their module, unless two plugins with that name are compared.

    :returns: the names by the keys of the methods.
    """
    short = Counter(map(short_name, {name for plugins in methods for name in plugins}))
    named = {
        key(plugins): {short_name(n) if short[short_name(n)] == 1 else n: options for n, options in plugins.items()}
        for plugins in methods
    }
    peers: dict[str, list[dict[str, Json]]] = {}
    for plugins in named.values():
        peers.setdefault(method(plugins), []).append(_flat(plugins))
    names = {}
    for place, plugins in named.items():
        name, own = method(plugins), _flat(plugins)
        different = [o for o in own if any(key(peer.get(o)) != key(own[o]) for peer in peers[name])]
        words = {o: _own_names([peer.get(o) for peer in peers[name]], "")[key(own[o])] for o in different}
        # A method of one plugin is the prefix of its options.
        options = ", ".join(f"{o.removeprefix(f'{name}.')}={word}" for o, word in words.items())
        names[place] = f"{name} ({options})" if options else name
    return names


def _printed(name: str, values: Sequence[Any]) -> dict[str, Json]:
    """Return the values of a setting as tables print them, by their keys."""
    if name == "plugins":
        return {**_method_names(values)}
    names = _own_names(values, "")
    kept = {key(v): v is None or (isinstance(v, (int, float)) and names[key(v)] == shown(v)) for v in values}
    return {key(v): v if kept[key(v)] else names[key(v)] for v in values}


def _own_names(values: Sequence[Any], prefix: str) -> dict[str, str]:
    """Name values of an option, without modules and further digits if these are not needed to tell the values apart.

    :returns: the names, each after a prefix, by the keys of the values.
    """
    whole = {key(value): value for value in values}
    times = Counter(map(shown, whole.values()))
    return {
        place: prefix + (shown(value) if times[shown(value)] == 1 else str(value)) for place, value in whole.items()
    }


def _flat(plugins: Mapping[str, Mapping[str, Json]]) -> dict[str, Json]:
    return {f"{plugin}.{option}": value for plugin, options in plugins.items() for option, value in options.items()}
