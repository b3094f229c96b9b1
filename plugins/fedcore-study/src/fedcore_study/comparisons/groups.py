"""Runs in groups: the same settings in one group, in it a row per method (or other options), in it the seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedcore import ConfigError, RunConfig, UnknownNameError
from fedcore.base.config import Json
from fedcore.base.identity import key, method, settings, short_name
from fedcore_study.comparisons.records import RunRecord
from fedcore_study.words import without_module

WITHOUT_ALPHA = ("iid", "shards", "classes", "natural", "domain")
"""Partitioners that do not use ``alpha``, as no partition file does."""


@dataclass(frozen=True)
class Group:
    """Runs that share all settings but the rows' own and the seed, and the training labels that were split.

    :param settings: those in which groups differ, without an ``alpha`` that the partition does not use. ``rows`` are
        the runs by label.
    """

    settings: dict[str, Json]
    rows: dict[str, list[RunRecord]]


def grouped(runs: Sequence[RunRecord], fields: Sequence[str]) -> tuple[dict[str, Json], list[Group]]:
    """Group runs, at least one; returns what all groups share, and the groups.

    :param fields: the options that make a row, as :func:`field` returns them.
    """
    groups: dict[str, dict[str, list[RunRecord]]] = {}
    for run in runs:
        values = _used(run.config, fields)
        row = {name: values.pop(name) for name in fields}
        del values["seed"]
        labels = None if "dataset" in fields else run.labels
        groups.setdefault(key([values, labels]), {}).setdefault(key(row), []).append(run)
    blocks = [list(rows.values()) for rows in groups.values()]
    names = _labels([rows[0] for block in blocks for rows in block], fields)
    named = [{names[key(_row_values(rows[0], fields))]: rows for rows in block} for block in blocks]
    common, differing = _settings([next(iter(block.values()))[0] for block in named], fields)
    return common, [Group(shown, block) for block, shown in zip(named, differing, strict=True)]


def distinct(runs: Sequence[RunRecord], fields: Sequence[str], warn: Callable[[str], None]) -> list[RunRecord]:
    """Return the runs without those that repeat another one under an ``alpha`` that has no effect, and say how many."""
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
    return partition not in WITHOUT_ALPHA and not partition.endswith(".json")


def field(name: str) -> str:
    """Return the option that a word of ``--by`` names.

    :raises UnknownNameError: there is none.
    """
    found = "plugins" if name == "plugin" else name.replace("-", "_")
    known = [option for option in settings(RunConfig()) if option != "seed"]
    if found not in known:
        hint = "Figures are always over seeds." if found == "seed" else ""
        raise UnknownNameError("--by", name, ["plugin", *known], hint)
    return found


def by_seed(runs: Sequence[RunRecord]) -> dict[int, RunRecord]:
    """Return a row's runs by seed.

    :raises ConfigError: two of them have the same one.
    """
    found: dict[int, RunRecord] = {}
    for run in runs:
        other = found.setdefault(run.config.seed, run)
        if other is not run:
            raise ConfigError(
                f"{other.path} and {run.path} are runs of the same settings and seed; name one of them, "
                "or the deviation over seeds would come out too small"
            )
    return found


def _used(config: RunConfig, fields: Sequence[str]) -> dict[str, Json]:
    """Return a run's settings without an ``alpha`` that has no effect, unless it or the partition makes the rows."""
    values = settings(config)
    if not uses_alpha(config.partition) and not {"alpha", "partition"} & set(fields):
        del values["alpha"]
    return values


def _row_values(run: RunRecord, fields: Iterable[str]) -> dict[str, Json]:
    values = settings(run.config)
    return {name: values[name] for name in fields}


def _labels(runs: Sequence[RunRecord], fields: Sequence[str]) -> dict[str, str]:
    """Name every row: methods by their plugins, with those options in which equal ones differ.

    A plugin, a model or a data set of the user's own has its own name without a module, unless two of that name are
    compared.
    """
    rows = {key(values): values for values in (_row_values(run, fields) for run in runs)}
    names = {name for values in rows.values() for name in values.get("plugins", {})}
    short = Counter(map(short_name, names))

    def named(plugins: Mapping[str, Mapping[str, Json]]) -> dict[str, Mapping[str, Json]]:
        return {short_name(n) if short[short_name(n)] == 1 else n: options for n, options in plugins.items()}

    by_method: dict[str, list[dict[str, Any]]] = {}
    for values in rows.values():
        if "plugins" in values:
            plugins = named(values["plugins"])
            by_method.setdefault(method(plugins), []).append(_flat(plugins))
    labels = {}
    for text, values in rows.items():
        parts = []
        for name in fields:
            if name == "plugins":
                plugins = named(values[name])
                label, own = method(plugins), _flat(plugins)
                peers = by_method[label]
                different = [o for o in own if any(key(peer.get(o)) != key(own[o]) for peer in peers)]
                # a method of one plugin is the prefix of its options
                named_options = ", ".join(f"{o.removeprefix(f'{label}.')}={own[o]}" for o in different)
                parts.append(label + (f" ({named_options})" if different else ""))
            else:
                shown = _own_names({str(one[name]) for one in rows.values()})[str(values[name])]
                parts.append(shown if len(fields) == 1 else f"{name}={shown}")
        labels[text] = ", ".join(parts)
    return labels


def _own_names(values: Iterable[str]) -> dict[str, str]:
    """Return the values without modules, where these are not needed to tell them apart."""
    own = {value: without_module(value) for value in values}
    times = Counter(own.values())
    return {value: name if times[name] == 1 else value for value, name in own.items()}


def _flat(plugins: Mapping[str, Mapping[str, Json]]) -> dict[str, Json]:
    return {f"{plugin}.{option}": value for plugin, options in plugins.items() for option, value in options.items()}


def _settings(runs: Sequence[RunRecord], fields: Sequence[str]) -> tuple[dict[str, Json], list[dict[str, Json]]]:
    """Return what all blocks share, and for each block the rest."""
    values = [{**_used(run.config, fields), "labels": run.labels[:12]} for run in runs]
    for each in values:
        for name in ("seed", *fields):
            del each[name]
    shared = {name for name in values[0] if len({key(each.get(name)) for each in values}) == 1}
    common = {name: value for name, value in values[0].items() if name in shared and name != "labels"}
    return common, [{name: value for name, value in each.items() if name not in shared} for each in values]
