"""SIGKILL at random moments: of a run with its workers, of its parent alone, of one worker."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.reliability import kills

KILLS = int(os.environ.get("FEDCORE_KILLS", "100"))
SEED = int(os.environ.get("FEDCORE_KILL_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 31)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Return the uninterrupted run of a method, made once."""
    made: dict[str, Path] = {}

    def find(method, **options):
        key = json.dumps([method, options])
        if key not in made:
            made[key] = kills.unharmed(tmp_path_factory.mktemp("plain") / method, method, **options)
        return made[key]

    return find


@pytest.mark.parametrize(
    ("method", "kind", "options"),
    [
        ("scaffold", "tree", {"checkpoint_every": 3}),
        pytest.param("moon", "parent", {}, marks=pytest.mark.slow),
        pytest.param("moon", "tree", {"stack": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path, plain, method, kind, options):
    chance = random.Random(f"{SEED} {method}")
    print(f"FEDCORE_KILL_SEED={SEED}")
    config = kills.configure(tmp_path, method, **options, workers=int(kind == "parent"))
    folders = [tmp_path / f"run-{number}" for number in range(5)]  # a run of a second can end before it is killed
    run = next((out for out in folders if kills.killed_run(out, config, kind, chance, times=2)), None)
    assert run is not None, "ended before it was killed, each time"
    reference = plain(method, **options)
    assert kills.differences(kills.left_by(run), kills.left_by(reference)) == []


@pytest.mark.slow
def test_a_run_outlives_its_workers(tmp_path, plain):
    chance = random.Random(f"{SEED} workers")
    print(f"FEDCORE_KILL_SEED={SEED}")
    config = kills.configure(tmp_path, "scaffold", workers=2)
    done = kills.run_without_workers_that_were_killed(tmp_path / "run", config, chance, times=2)
    assert done, "ended before a worker was killed"
    kills.check_worker_kills(tmp_path / "run", plain("scaffold"), "scaffold", done, {})


@pytest.mark.slow
def test_a_hundred_kills(tmp_path, plain):
    """Of every kind, over every method, with and without workers; prints what was hit."""
    chance, done, outcomes, wanted = random.Random(SEED), [], [], KILLS
    print(f"\nFEDCORE_KILL_SEED={SEED}")
    number = 0
    while len(done) < wanted:
        method = kills.METHODS[number % len(kills.METHODS)]
        kind = ("tree", "parent", "worker", "tree")[number % 4]
        options = {"checkpoint_every": chance.choice([None, 1, 3])}
        if method == "fedcme":
            options["local_epochs"] = 2  # one epoch has no middle for the exchange
        workers = 2 if kind != "tree" or number % 8 == 0 else 0
        folder = tmp_path / str(number)
        folder.mkdir()
        out, config = folder / "run", kills.configure(folder, method, workers=workers, **options)
        reference = plain(method, **options)
        if kind == "worker":
            found = kills.run_without_workers_that_were_killed(out, config, chance, times=min(3, wanted - len(done)))
            outcomes += kills.check_worker_kills(out, reference, method, found, options)
        else:
            found = kills.killed_run(out, config, kind, chance, times=min(6, wanted - len(done)))
            assert kills.differences(kills.left_by(out), kills.left_by(reference)) == [], (number, method, kind)
        done += found
        number += 1
        print(f"{len(done):3} kills after run {number}: {method}, {kind}, {options}, {workers} workers, {len(found)}")
    summary = {
        "kills": dict(Counter(kill.kind for kill in done)),
        "runs": number,
        "gone on with": sum(kill.kind != "worker" for kill in done),
        "before the folder was a run": sum(not kill.begun for kill in done),
        "while going on": sum(kill.resumed for kill in done),
        "in the start of a process": sum(kill.moment == "start" for kill in done),
        "between a round's line and its checkpoint": sum(kill.uncommitted > 0 for kill in done),
        "while a file was being written": sum(kill.half_written > 0 for kill in done),
        "workers that outlived their parent, seconds at most": max(k.seconds for k in done),
        "clients lost with a worker": dict(Counter(outcomes)),
    }
    print(json.dumps(summary, indent=2))
    if folder := os.environ.get("FEDCORE_RELIABILITY_OUT"):
        record = {"seed": SEED, "summary": summary, "kills": [asdict(kill) for kill in done]}
        Path(folder, "kills.json").write_text(json.dumps(record, indent=1))
