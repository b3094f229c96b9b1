"""What a comparison shows, in words: which rows differ from the baseline beyond the interval, and which do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedcore_study.compare.figures import FEW, Difference, Figure

MANY = 5
"""From so many comparisons with a baseline on, the findings say what that number does to the intervals."""


def findings(
    accuracies: Mapping[str, Figure | None],
    differences: Mapping[str, Difference | None],
    baseline: str | None,
    confidence: float,
) -> list[str]:
    """Return sentences about one block.

    :param accuracies: by row, fractions. ``differences``: to the baseline, of the other rows.
    """
    known = {label: figure for label, figure in accuracies.items() if figure is not None}
    if len(accuracies) < 2 or not known:
        return []
    said = [_highest(known)]
    if baseline is None:
        return said
    level = f"{100 * confidence:g} %"
    told: dict[str, list[str]] = {}
    for label, difference in differences.items():
        told.setdefault(verdict(difference), []).append(_worded(label, difference))
    for name, sentence in (
        ("better", f"Better than {baseline}, the whole {level} interval above zero"),
        ("worse", f"Worse than {baseline}, the whole {level} interval below zero"),
        ("same", f"Not to be told apart from {baseline}, zero is within the {level} interval"),
        ("few", f"Too few seeds in common with {baseline} to tell, fewer than {FEW}"),
        ("none", f"No seed in common with {baseline}"),
    ):
        if name in told:
            said.append(f"{sentence}: {', '.join(told[name])}.")
    judged = sum(len(told.get(name, ())) for name in ("better", "worse", "same"))
    if judged >= MANY:
        said.append(
            f"These are {judged} comparisons, each with an interval for itself: of methods that are as good as "
            f"{baseline}, one in {1 / (1 - confidence):.0f} is expected outside of its {level} interval by chance."
        )
    return said


def verdict(difference: Difference | None) -> str:
    """Return ``better``, ``worse`` or ``same``; ``few`` where the seeds are too few to tell, ``none`` without any."""
    if difference is None:
        return "none"
    if difference.low is None or difference.high is None:
        return "few"
    return "better" if difference.low > 0 else "worse" if difference.high < 0 else "same"


def _highest(known: Mapping[str, Figure]) -> str:
    """Name the rows with the highest mean as it is printed."""
    printed = {label: f"{100 * figure.mean:.2f}" for label, figure in known.items()}
    top = max(printed.values(), key=float)
    names = [label for label, text in printed.items() if text == top]
    return f"Highest mean accuracy: {_joined(names)} with {top} %."


def _worded(label: str, difference: Difference | None) -> str:
    if difference is None:
        return label
    interval = ""
    if difference.low is not None and difference.high is not None:
        interval = f" [{100 * difference.low:+.2f}, {100 * difference.high:+.2f}]"
    return f"{label} ({100 * difference.mean:+.2f}{interval})"


def _joined(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
