"""The findings of a comparison in sentences: which rows differ from the baseline, and which have too few seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fedcore_study.comparisons.figures import FEW, Difference, Figure
from fedcore_study.comparisons.measures import ACCURACY, Measure
from fedcore_study.comparisons.significance import level, p_text
from fedcore_study.words import counted, joined


def findings(
    values: Mapping[str, Figure | None],
    differences: Mapping[str, Difference | None],
    baseline: str | None,
    confidence: float,
    measure: Measure = ACCURACY,
    *,
    one_set_of_seeds: bool,
) -> list[str]:
    """Return sentences about one block.

    :param values: the figures of the measure, by row.
    :param one_set_of_seeds: the rows have the same seeds. Only then is one of them called the best.
    :param differences: the differences to the baseline of the other rows, with corrected p-values.
    """
    known = {label: figure for label, figure in values.items() if figure is not None}
    if len(values) < 2 or not known:
        return []
    sentences = [_best(known, measure)] if one_set_of_seeds else []
    if baseline is None:
        return sentences
    pairs = {label: difference for label, difference in differences.items() if difference is not None}
    by_verdict: dict[str, dict[str, Difference]] = {}
    for label, difference in pairs.items():
        by_verdict.setdefault(verdict(difference, confidence, measure), {})[label] = difference
    for name, words in (
        ("better", f"Better than {baseline}"),
        ("worse", f"Worse than {baseline}"),
        ("same", f"No significant difference to {baseline}"),
    ):
        if name in by_verdict:
            each = (
                _worded(label, difference, measure, name == "same") for label, difference in by_verdict[name].items()
            )
            sentences.append(f"{words}: {', '.join(each)}.")
    if "few" in by_verdict:
        few = ", ".join(_worded(label, difference, measure, True) for label, difference in by_verdict["few"].items())
        sentences.append(
            f"Too few seeds to rank {joined(list(by_verdict['few']))} against {baseline}: {few}. Run at least {FEW}."
        )
    for label, difference in by_verdict.get("", {}).items():
        sentences.append(
            f"{label}: the same difference on every seed ({difference.text(measure)}); a t-test has no deviation to go "
            "by, run more seeds."
        )
    if unpaired := [label for label in differences if label not in pairs]:
        sentences.append(f"No seed with the same clients as {baseline}: {', '.join(unpaired)}.")
    if tested := sum(difference.p is not None for difference in pairs.values()):
        sentences.append(_how(tested, baseline, confidence))
        sentences += _undone(by_verdict.get("same", {}), tested)
    return sentences


def verdict(difference: Difference | None, confidence: float = 0.95, measure: Measure = ACCURACY) -> str:
    """Return ``better``, ``worse`` or ``same``; ``few`` for too few seeds, and ``none`` without a difference.

    It is empty if the difference is the same on every seed, which no test can judge.
    """
    if difference is None:
        return "none"
    if difference.corrected is None:
        return "few" if difference.n < FEW else ""
    if difference.corrected >= level(confidence):
        return "same"
    return "better" if measure.sign * difference.mean > 0 else "worse"


def _how(tested: int, baseline: str, confidence: float) -> str:
    """Say what was tested."""
    at = f"at level {level(confidence):g}"
    if tested == 1:
        return f"Tested by a paired t-test over the seeds, {at}."
    return (
        f"Tested by paired t-tests over the seeds, {at}, with p-values corrected by Holm for the {tested} "
        f"comparisons with {baseline} in this table. Each interval is of one comparison alone."
    )


def _undone(same: Mapping[str, Difference], tested: int) -> Iterable[str]:
    """Name the rows whose interval excludes zero, but which have no significant difference after the correction."""
    named = [
        label
        for label, difference in same.items()
        if difference.low and difference.high and difference.low * difference.high > 0
    ]
    if named and tested > 1:
        yield (
            f"Zero is outside of the interval of {joined(named)}, but after the correction for {tested} comparisons "
            "that can be chance."
        )


def _best(known: Mapping[str, Figure], measure: Measure) -> str:
    """Name the rows with the best mean, as it is printed."""
    printed = {label: f"{measure.scale * figure.mean:.{measure.digits}f}" for label, figure in known.items()}
    top = max(printed.values(), key=lambda text: measure.sign * float(text))
    names = [label for label, text in printed.items() if text == top]
    most = "Highest" if measure.sign > 0 else "Lowest"
    return f"{most} mean {measure.name}: {joined(names)} with {top}{measure.unit}."


def _worded(label: str, difference: Difference, measure: Measure, open_question: bool) -> str:
    """Return a row with its difference, and for an open question with the number of seeds that could answer it."""
    if difference.corrected is None:
        return f"{label} ({difference.text(measure)} over {counted(difference.n, 'seed')})"
    parts = [difference.text(measure), p_text(difference.corrected)]
    if open_question and difference.seeds is not None and difference.seeds > difference.n:
        parts.append(f"about {difference.seeds} seeds would show a difference of this size")
    return f"{label} ({', '.join(parts)})"
