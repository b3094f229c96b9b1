"""Everything about one run, and what differs between two."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedcore import FedcoreError, RunConfig, RunDirectoryError
from fedcore.tools import LABELS, PROTOCOLS, WITHOUT_EFFECT, files, flat, protocols, rounds, safe_yaml, saved
from fedcore_study.lenient import count, mapping_in, number
from fedcore_study.runs.deletion import size
from fedcore_study.runs.overview import Overview, Warn, read_rounds

ALWAYS = ("dataset", "model", "partition", "clients", "rounds", "seed")
"""Options that a setting names even at their defaults."""

FIGURES = ("accuracy", "loss", "std", "worst10")
"""The figures of a protocol that are shown and compared."""


def details(run: Overview, warn: Warn) -> dict[str, Any]:
    """Return everything about a run, as plain values.

    :param warn: called with a message about damaged lines and changed options.
    :raises RunDirectoryError: the run is broken.
    """
    if run.state == "broken":
        raise RunDirectoryError(run.problem)
    path = run.path
    content = safe_yaml.read_mapping(path / "config.yaml", plain=True)
    options = {name: value for name, value in content.items() if name not in safe_yaml.BESIDE_OPTIONS}
    config = None
    try:
        config = saved.SavedConfig.read(path / "config.yaml").config(path.absolute())
    except FedcoreError as error:
        warn(str(error))
    summary: Mapping[str, Any] = {}
    if run.state == "finished":
        summary = files.parse_record((path / "summary.json").read_bytes())
    metrics = read_rounds(path).metrics if not summary else summary["metrics"]
    entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    return {
        **run.to_json(),
        "options": options,
        "setting": dict(_setting(options)),
        "figures": figures(metrics),
        "best_by_validation": metrics.get("best_by_validation"),
        "bytes": {way: count(mapping_in(summary, "bytes").get(way)) for way in ("down", "up")} if summary else None,
        "seconds": _seconds(path) if summary else None,
        "sessions": files.RecordFile(path / "sessions.jsonl").read(warn),
        "changes": content.get("changes") or [],
        **{name: mapping_in(content, name) for name in ("digests", "versions")},
        "files": {entry.name + "/" * entry.is_dir(): size(entry) for entry in entries},
        "resume": _resume(run, config),
    }


def _seconds(path: Path) -> float | None:
    """Return the rounds.seconds of all rounds, whichever process trained them: summary.json has the last one's.

    What is no number counts as 0. None if the sum is no number.
    """
    times = [mapping_in(line, "time") for line in files.RecordFile(path / "metrics.jsonl").read()]
    numbers = [{part: number(value) or 0.0 for part, value in time.items()} for time in times if "round" in time]
    return number(sum(rounds.seconds({"time": time}) for time in numbers))


def figures(metrics: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the numbers of every protocol that was measured."""
    by_protocol = {}
    for name in PROTOCOLS:
        row = mapping_in(metrics, name)
        numbers = {key: row[key] for key in (*FIGURES, *protocols.further(row)) if number(row.get(key)) is not None}
        if numbers:
            by_protocol[name] = numbers
    return by_protocol


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return what differs between the details of two runs: for each name the two values.

    Figures have a third value, the second minus the first. An option that only one of them has is None in the other.
    """
    changed = _pairs(_compared(one["options"]), _compared(other["options"]))
    measured = _pairs(_measured(one), _measured(other), equal=True)
    return {
        "runs": [one["path"], other["path"]],
        "options": {name: pair for name, pair in changed.items() if not _without_effect(name)},
        "without_effect": {name: pair for name, pair in changed.items() if _without_effect(name)},
        "figures": {
            name: [a, b, None if a is None or b is None or number(b - a) is None else b - a]
            for name, (a, b) in measured.items()
            if a is not None or b is not None
        },
        "versions": _pairs(_versions(one), _versions(other)),
        "same_partition": _same(one, other, "partition"),
        "same_data": _same(one, other, "data"),
    }


def _setting(options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the options that distinguish a run from others: those that are not at their defaults, and some more."""
    defaults = dict(flat(RunConfig().model_dump(mode="json"), "."))
    left_out = ("out", *LABELS)
    for name, value in flat(options, "."):
        if name.partition(".")[0] not in left_out and (name in ALWAYS or value != defaults.get(name, ...)):
            yield name.removeprefix("plugins."), value


def _compared(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run by name, ``moon.mu`` for a plugin's. What an older file lacks is at its default."""
    values = {**RunConfig().model_dump(mode="json"), **options}
    plugins = values.pop("plugins")
    compared = {"method": "+".join(plugins) or "fedavg"}
    compared |= dict(flat({name: value for name, value in values.items() if name not in ("out", *LABELS)}, "."))
    return compared | dict(flat(plugins, "."))


def _pairs(one: Mapping[str, Any], other: Mapping[str, Any], *, equal: bool = False) -> dict[str, list[Any]]:
    """Return the two values of every name.

    :param equal: also of names with equal values.
    """
    names = dict.fromkeys([*one, *other])
    pairs = {name: [one.get(name), other.get(name)] for name in names}
    return {name: pair for name, pair in pairs.items() if equal or pair[0] != pair[1]}


def _measured(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a run and what it cost, by name: ``global.accuracy``, ``bytes.up``."""
    spent = {"rounds": run["rounds"], "bytes": run["bytes"] or {"down": None, "up": None}, "seconds": run["seconds"]}
    return dict(flat({**run["figures"], **spent}, "."))


def _without_effect(name: str) -> bool:
    return name.partition(".")[0] in WITHOUT_EFFECT


def _versions(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the versions with which a run was begun, and the commit of fedcore."""
    commit = run["sessions"][0].get("commit") if run["sessions"] else None
    return {**run["versions"], "commit": commit}


def _same(one: Mapping[str, Any], other: Mapping[str, Any], digest: str) -> bool:
    return one["digests"].get(digest) is not None and one["digests"].get(digest) == other["digests"].get(digest)


def _resume(run: Overview, config: RunConfig | None) -> str | None:
    """Return the command that goes on with a run, a finished one for more rounds; None if it cannot go on."""
    if run.state == "running" or config is None:
        return None
    command, has_checkpoint = (
        saved.how_to_resume(run.path, config),
        any((run.path / "checkpoint").glob("*.safetensors")),
    )
    if run.state == "stopped":
        return command if has_checkpoint or rounds.may_be_unsaved(run.done, config.checkpoint_every) else None
    if not has_checkpoint:
        return None
    return command if command.startswith("in Python") else f"{command} --rounds {2 * config.rounds}"
