"""What a reader of a comparison has to know: models other than the baseline's, few seeds, different seeds, failed
clients, runs that ended early, restarted schedules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

from fedcore.tools import PROTOCOLS, key, rounds, settings
from fedcore_study.comparisons.figures import FEW, Difference
from fedcore_study.comparisons.groups import BY_ROUNDING
from fedcore_study.comparisons.records import ModelSize, RunRecord
from fedcore_study.schedules import follows_rounds
from fedcore_study.words import by_value, counted

OWN = tuple(name for name, protocol in PROTOCOLS.items() if protocol.own_model and name != "unseen_adapted")
"""The protocols that measure clients' own models. The one on held-out parts is first."""


def other_models(rows: Mapping[str, Sequence[RunRecord]], baseline: str) -> str:
    """Return a sentence that names the rows with another model than the baseline's; empty if there is none.

    :param rows: runs by label, with the baseline's.
    """
    reference = _common(rows[baseline])
    if reference is None:
        return ""
    sizes = {label: size for label, runs in rows.items() if (size := _common(runs)) not in (None, reference)}
    groups = by_value(sizes)
    if not groups:
        return ""
    models = "; ".join(f"{', '.join(labels)}: {size}" for size, labels in groups.items())
    text = f"the methods do not train the same model. {models}; the baseline {baseline}: {reference}. "
    if reference.projection is None and any(size and size.projection for size in groups):
        return text + "To compare like with like run all of them with --projection, which gives each the head"
    return text + f"The difference to {baseline} is partly that of the models"


def plugin_notes(rows: Mapping[str, Sequence[RunRecord]]) -> list[str]:
    """Return what plugins noted in the set-up of a row's runs, such as that the method is FedAvg on this model."""
    noted = ((str(note), label) for label, runs in rows.items() for run in runs for note in run.plugin_notes)
    return [note if note.startswith(f"{label}: ") else f"{label}: {note}" for note, label in dict.fromkeys(noted)]


def few_seeds(differences: Iterable[Difference | None]) -> str:
    """Return a sentence if some differences are over too few seeds for an interval, else an empty text."""
    numbers = sorted({difference.n for difference in differences if difference is not None and difference.n < FEW})
    if not numbers:
        return ""
    seeds = " or ".join(counted(n, "seed") for n in numbers)
    return f"differences over {seeds} say nothing about other seeds, and have no interval; run at least {FEW}"


def few_pairs(
    differences: Mapping[str, Difference | None], seeds: Mapping[str, Sized], baseline: str | None
) -> Iterator[str]:
    """Yield a sentence for each row of which some seeds, but not all, have no pair in the baseline."""
    for label, difference in differences.items():
        if difference is not None and difference.n < len(seeds[label]):
            yield f"{label}: only {difference.n} of {len(seeds[label])} seeds have a pair in {baseline}"


def no_baseline(fedavg: Sequence[str]) -> str:
    """Return a sentence that asks for the baseline if several rows are of FedAvg, else an empty text.

    :param fedavg: the labels of these rows.
    """
    if len(fedavg) < 2:
        return ""
    return f"{len(fedavg)} rows are of fedavg, so none is the baseline; name it: --baseline {fedavg[0]!r}"


def other_seeds(rows: Mapping[str, Iterable[int]]) -> str:
    """Return a sentence that names the seeds of the rows; empty if all have the same.

    :param rows: seeds by label.
    """
    groups = by_value({label: ", ".join(map(str, sorted(seeds))) for label, seeds in rows.items()})
    if len(groups) < 2:
        return ""
    seeds_of_rows = "; ".join(f"{', '.join(labels)}: {seeds}" for seeds, labels in groups.items())
    return f"the rows have different seeds ({seeds_of_rows}), so their means are not ranked and none is called the best"


def other_sources(rows: Mapping[str, Sequence[RunRecord]]) -> str:
    """Return a sentence that names code which changed between the runs, with the rows; empty if none did."""
    rows_by_source: dict[str, dict[str, None]] = {}
    hashes: dict[str, set[str]] = {}
    for label, runs in rows.items():
        for name, value in (source for run in runs for source in run.sources):
            rows_by_source.setdefault(name, {})[label] = None
            hashes.setdefault(name, set()).add(value)
    changed = "; ".join(
        f"{name} ({', '.join(rows_by_source[name])})" for name, values in hashes.items() if len(values) > 1
    )
    if not changed:
        return ""
    return f"some code changed between the runs: {changed}. To compare one version, train all of them in another folder"


def other_data(rows: Mapping[str, Sequence[RunRecord]]) -> str:
    """Return a sentence if a data set changed under its name between the runs; empty if none did."""
    contents: dict[str, dict[str, RunRecord]] = {}
    for run in (run for runs in rows.values() for run in runs):
        values = settings(run.config)
        contents.setdefault(key([values[name] for name in ("dataset", "task", "public")]), {}).setdefault(run.data, run)
    pairs = [[run.path for run in runs.values()][:2] for runs in contents.values() if len(runs) > 1]
    if not pairs:
        return ""
    one, other = pairs[0]
    return (
        f"the samples of a data set changed between the runs, as between {one} and {other}: another file, folder or "
        "loader under the same name, or one that is normalised with the rounding of another type of CPU"
    )


def failed_clients(rows: Mapping[str, Sequence[RunRecord]], round: int | None = None) -> str:
    """Return a sentence that names the rows in whose runs clients failed, with the first reason; empty if none failed.

    :param round: count up to this round, by default to the end.
    """
    failures, reason = list[str](), ""
    for label, runs in rows.items():
        records = [record for run in runs for record in run.rounds[:round] if "failures" in record]
        if failed := sum(rounds.errors(rounds.lost(record)) for record in records):
            selected = sum(len(record["cohort"]) for record in records)
            failures.append(f"{label} ({in_a_round(failed, selected, len(records))})")
            reason = reason or next(filter(None, map(rounds.first_reason, records))).rstrip(".")
    if not failures:
        return ""
    return f"clients failed in runs of: {', '.join(failures)}. Their figures come from the others: {reason}"


def other_clients(rows: Mapping[str, Sequence[RunRecord]], protocol: str, round: int | None = None) -> str:
    """Return a sentence if runs with the same seed are measured on different numbers of clients, else an empty text.

    Runs with different numbers of clients are not held against each other.
    """
    measured: dict[str, dict[tuple[int, int], Any]] = {
        label: {(run.config.seed, run.config.clients): run.figures(protocol, round).get("clients") for run in runs}
        for label, runs in rows.items()
    }
    alike: dict[tuple[int, int], set[Any]] = {}
    for counts in measured.values():
        for seed_and_clients, count in counts.items():
            alike.setdefault(seed_and_clients, set()).add(count)
    if all(len(counts) == 1 for counts in alike.values()):
        return ""
    clients = "; ".join(f"{label}: {', '.join(map(str, counts.values()))}" for label, counts in measured.items())
    return (
        f"the rows are measured on different numbers of clients ({clients}). A client whose model could not be "
        "evaluated is left out, and a mean without hard clients is higher"
    )


def other_rounding(rows: Mapping[str, Sequence[RunRecord]], by: Collection[str]) -> Iterator[str]:
    """Yield a sentence for each option that changes results by rounding alone, and in which the runs differ.

    :param by: the options that make the rows.
    """
    for name in (name for name in BY_ROUNDING if name not in by):
        values = {label: {str(getattr(run.config, name, None)) for run in runs} for label, runs in rows.items()}
        groups = by_value({label: ", ".join(sorted(own)) for label, own in values.items()})
        if len(set[str]().union(*values.values())) > 1:
            text = "; ".join(f"{', '.join(labels)}: {own}" for own, labels in groups.items())
            yield f"the runs differ in {name} ({text}), which changes results by rounding alone, and times"


def in_a_round(failed: int, selected: int, rounds: int) -> str:
    """Return the mean number of failed clients of a round in words: ``3.0 of 10 in a round``."""
    mean = f"{failed / rounds:.1f}" if failed >= 0.05 * rounds else "under 0.1"
    return f"{mean} of {selected / rounds:.0f} in a round"


def restarted_schedules(rows: Mapping[str, Sequence[RunRecord]]) -> str:
    """Return a sentence that counts the runs whose schedule restarted; empty if there is none.

    A schedule restarts after ``resume --rounds`` if the learning rate or a method follows the number of rounds.
    """
    numbers = {label: sum(map(_restarted, runs)) for label, runs in rows.items()}
    restarted = ", ".join(f"{label} ({number})" for label, number in numbers.items() if number)
    if not restarted:
        return ""
    return (
        f"runs that were resumed with another --rounds, which their learning rate or method follows: {restarted}. A "
        "run of so many rounds from the start gives other results"
    )


def ended_early(rows: Mapping[str, Sequence[RunRecord]]) -> str:
    """Return a sentence that names the rows whose runs ended before ``--rounds``; empty if there is none."""
    parts = []
    for label, runs in rows.items():
        taken = [run.summary["rounds"] for run in runs if run.summary and run.summary["rounds"] < run.config.rounds]
        if taken:
            after = f"{min(taken)} to {max(taken)}" if min(taken) < max(taken) else f"{taken[0]}"
            parts.append(f"{label} ({len(taken)} of {len(runs)}, after {after} of {runs[0].config.rounds} rounds)")
    if not parts:
        return ""
    return f"runs ended early (--patience, on_round): {', '.join(parts)}. Figures and costs are of the rounds they took"


def global_models(rows: Mapping[str, Sequence[RunRecord]]) -> str:
    """Return a sentence that names the rows without own models in a table of own models; empty if there is none."""
    labels = [label for label, runs in rows.items() if any(run.lent for run in runs)]
    if not labels:
        return ""
    has = "has" if len(labels) == 1 else "have"
    return f"{', '.join(labels)} {has} no own models: personal has the global model on the same samples (global_local)"


def own_models(rows: Mapping[str, Sequence[RunRecord]], protocol: str) -> list[str]:
    """Return a sentence for each protocol of clients' own models, if a table is of global models."""
    if PROTOCOLS[protocol].own_model:
        return []
    settings = {}
    for label, runs in rows.items():
        if measured := [name for name in OWN if any(name in run.protocols for run in runs)]:
            settings[label] = measured[0]
    return [
        f"{', '.join(labels)} {'has' if len(labels) == 1 else 'have'} own models on the clients, which this table does "
        f"not measure: --protocol {name}"
        for name, labels in by_value(settings).items()
    ]


def _restarted(run: RunRecord) -> bool:
    changed = [change for change in run.changes if "rounds" in change and change["rounds"][0] != change["rounds"][1]]
    return any(change.get("round") for change in changed) and follows_rounds(run.config)


def _common(runs: Iterable[RunRecord]) -> ModelSize | None:
    """Return the size that all runs of a row have; None if one is unknown or they differ."""
    sizes = {run.model for run in runs}
    return sizes.pop() if len(sizes) == 1 else None
