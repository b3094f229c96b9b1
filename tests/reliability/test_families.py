"""Every file of a run directory of each kind, damaged in every way: same bits, or a message; no traceback, no wait."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from tests.reliability import damages

SETS = [*((kind, False) for kind in damages.KINDS), ("stateful", True), ("corrected", True)]
"""Kinds of runs that were stopped, and that came to their end."""

ACCIDENTS = ("empty", "cut at 60 %", "flipped in part 5", "a folder", "deleted")
"""What every file of a run of SCAFFOLD that was stopped meets; the slow tests damage every kind of run in every way."""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> damages.Made:
    return damages.make(tmp_path_factory.mktemp("stopped"), "stateful", finished=False)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("how", ACCIDENTS, ids=lambda how: how.replace(" ", "-"))
def test_a_damaged_file(stopped: damages.Made, tmp_path: Path, how: str) -> None:
    """It is refused, or the run goes on to the same bits; never to another run in silence."""
    names = damages.files_of(stopped)
    assert len(names) == 10
    for name in names:
        damages.check(stopped, tmp_path, name, how, readers=name in ("config.yaml", "metrics.jsonl", "partition.json"))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "finished"), SETS, ids=[f"{k}-{'finished' if f else 'stopped'}" for k, f in SETS])
def test_every_file_damaged_in_every_way(tmp_path: Path, kind: str, finished: bool) -> None:
    if kind == "tracked":
        pytest.importorskip("tensorboard")
    made = damages.make(tmp_path, kind, finished=finished)
    folder = tmp_path / "case"
    folder.mkdir()
    answers: Counter[str] = Counter()
    problems, cases = [], 0
    names = damages.files_of(made)
    if kind == "tracked":  # its other files are those of the stateless run, and each case starts a process
        names = [name for name in names if name.startswith(("trackers/", "tensorboard/", "metrics"))]
    if kind == "split":
        names = [name for name in names if name.startswith("partition")]
        assert len(names) == 2
    for name in names:
        for how in damages.DAMAGES:
            if name.startswith("clients/") and how == "another run's":
                continue  # it is whole, and under the right name: nothing tells it from this run's
            cases += 1
            try:
                found = damages.check(made, folder, name, how)
            except AssertionError as error:
                problems.append(f"{name}, {how}: {error}")
                continue
            answers.update(f"{command} {answer}" for command, answer in found.items())
    record = {"kind": kind, "finished": finished, "cases": cases, "handled": cases - len(problems), **sorted_(answers)}
    print(json.dumps(record))
    if out := os.environ.get("FEDCORE_RELIABILITY_OUT"):
        Path(out, f"damage-{kind}-{'finished' if finished else 'stopped'}.json").write_text(
            json.dumps(record, indent=1)
        )
    assert not problems, "\n\n".join(problems)


def sorted_(answers: Counter[str]) -> dict[str, int]:
    """Return counts in the order of their names."""
    return dict(sorted(answers.items()))
