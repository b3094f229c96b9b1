"""What a comparison of runs answers: a block for runs with the same settings, a row per method, figures over seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fedcore.tools import Json
from fedcore_study.comparisons.figures import Difference, Figure
from fedcore_study.comparisons.measures import ACCURACY, Measure
from fedcore_study.comparisons.significance import Ranks
from fedcore_study.words import named

BASELINE = "fedavg"

SEEDS, DIFFERENCE, P, CLIENTS = "seeds", "difference", "p", "clients"
"""Words of ``--columns`` that are no figure."""


@dataclass(frozen=True)
class Row:
    """One method (or other value of the rows' options) over seeds. Each figure is over the seeds that have it."""

    label: str
    values: dict[int, float]
    """The figure that is compared, by seed."""
    summary: Figure | None
    """The mean of the values."""
    difference: Difference | None
    """The difference to the baseline, paired by seed."""
    rounds: Figure | None
    """The rounds until the target is reached."""
    bytes: Figure | None
    """The bytes until the target is reached."""
    virtual: Figure | None
    """The seconds of the simulated system until the target is reached."""
    clients: dict[str, Figure | None]
    """How the figure is spread over the clients, by the names in ``fairness.FIGURES``."""
    each: dict[str, Figure | None]
    """The figure of each client by its name, if it is asked for; None for a client for which it is not defined."""
    reported: dict[str, Figure | None]
    """Numbers that plugins reported, by ``PLUGIN.NAME``."""
    metrics: dict[str, Figure | None]
    """The metrics next to accuracy, without the one that is compared."""
    costs: dict[str, Figure | None]
    """The costs by the names in ``costs.COSTS``."""
    asked: dict[str, Figure | None]
    """The figures of the protocol that the columns ask for, by their names in ``summary.json``."""


@dataclass(frozen=True)
class Block:
    """Rows that share all settings except for their own."""

    settings: dict[str, Json]
    """The settings in which blocks differ."""
    baseline: str | None
    rows: list[Row]
    notes: list[str]
    """Cautions for a reader, such as a baseline with another model or too few seeds."""
    findings: list[str]
    """The results in sentences."""


def same_seeds(rows: Iterable[Row]) -> bool:
    """Return whether all rows have the same seeds. Means over different seeds also differ by the seeds."""
    return len({frozenset(row.values) for row in rows}) <= 1


@dataclass(frozen=True)
class Comparison:
    """All blocks, and the question that they answer. Accuracies are fractions, times are seconds."""

    protocol: str
    by: list[str]
    """What makes a row: ``plugin`` and options of a run."""
    round: int | None = None
    """The number of rounds after which the runs are compared; None for their end."""
    target: float | None = None
    confidence: float = 0.95
    common: dict[str, Json] = field(default_factory=dict)
    """The settings that all blocks share."""
    blocks: list[Block] = field(default_factory=list)
    by_client: bool = False
    """Whether tables show how the figure is spread over the clients."""
    reported: Sequence[str] = ()
    """Figures of plugins' reports that tables show, as ``PLUGIN.NAME``."""
    columns: Sequence[str] = ()
    """The words of the columns that tables show; empty for the usual ones."""
    ranks: Ranks | None = None
    """The methods' ranks over the blocks, if these are of different data."""
    measure: Measure = ACCURACY
    """The figure that is compared."""
    tuned: Sequence[str] = ()
    """The options of which each row has its own values."""
    signs: Mapping[str, int] = field(default_factory=dict)
    """The figures of the runs' tasks, if these have no accuracy: 1 if more of a figure is better, -1 if less is."""

    @property
    def notes(self) -> list[str]:
        """The notes of all blocks. A note that some blocks do not have begins with the names of those that have it."""
        where: dict[str, list[str]] = {}
        for block in self.blocks:
            for note in block.notes:
                where.setdefault(note, []).append(named(block.settings))
        return [
            note if len(titles) == len(self.blocks) else f"{' and '.join(titles)}: {note}"
            for note, titles in where.items()
        ]

    @property
    def heading(self) -> str:
        """The heading of the column of rows: ``method``, or options of a run."""
        return ", ".join("method" if name == "plugin" else name for name in self.by)
