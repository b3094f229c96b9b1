"""Files of a run that were damaged while it was stopped: noticed, said, and gone on with from what is whole."""

from __future__ import annotations

import random
import shutil

import pytest
from typer.testing import CliRunner

import fedcore
from fedcore import RunConfig
from fedcore.base.errors import RunDirectoryError
from fedcore.cli.app import app
from fedcore.runs.api import started
from fedcore.runs.directory import RunDirectory
from tests.reliability import kills
from tests.sentences import raises

OPTIONS = {**kills.OPTIONS, "rounds": 6, "checkpoint_every": 1, "workers": 0}
STOPPED = 4


@pytest.fixture(scope="module", params=["scaffold", pytest.param("moon", marks=pytest.mark.slow)])
def runs(request, tmp_path_factory):
    """Return a run that was stopped after some rounds, and what is left by one that was not."""
    folder = tmp_path_factory.mktemp(request.param)
    config = RunConfig(**OPTIONS, plugins={request.param: {}}, out=folder / "stopped")
    with started(config) as (experiment, state):
        for _ in range(STOPPED):
            state = experiment.one_round(state)
    return folder / "stopped", kills.left_by(kills.unharmed(folder / "whole", request.param, **OPTIONS))


@pytest.fixture
def stopped(runs, tmp_path):
    return shutil.copytree(runs[0], tmp_path / "run"), runs[1]


DAMAGES = {
    "emptied": lambda content, chance: b"",
    "cut": lambda content, chance: content[: chance.randrange(1, len(content))],
    "longer": lambda content, chance: content + b"\0",
    "a bit flipped": lambda content, chance: flipped(content, chance),
    "zeros": lambda content, chance: content[:4096] + bytes(len(content) - 4096),
}


def flipped(content, chance):
    position = chance.randrange(len(content) // 2, len(content))  # among the tensors
    return content[:position] + bytes([content[position] ^ 1 << chance.randrange(8)]) + content[position + 1 :]


def damage(file, how):
    file.write_bytes(DAMAGES[how](file.read_bytes(), random.Random(how)))


def generations(out):
    older, newer = sorted((out / "checkpoint").iterdir())
    return older, newer


def newest_state(out):
    """Return the file of a client's state that only the newest checkpoint names."""
    store = RunDirectory(out).checkpoints
    manifest = store.load().manifest
    client = next(client for client, version in manifest.items() if version == STOPPED - 1)
    return store.clients.path(client, STOPPED - 1)


def resumed(out):
    return CliRunner().invoke(app, ["resume", str(out), "--quiet"])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("what", ["checkpoint", "client"])
def test_the_checkpoint_before_is_gone_on_from(stopped, what, how):
    out, whole = stopped
    damage(generations(out)[1] if what == "checkpoint" else newest_state(out), how)
    check_fallback(out, whole)


@pytest.mark.parametrize("left", [0, 20])
def test_metrics_that_lack_a_line_belong_to_the_checkpoint_before(stopped, left):
    out, whole = stopped
    file = out / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[: STOPPED - 1]) + lines[-1][:left])
    check_fallback(out, whole)


def check_fallback(out, whole):
    result = resumed(out)
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith(f"note: {STOPPED:06d}-0-train.safetensors: ")
    assert f"going on from it, after {STOPPED - 1} rounds" in result.stderr
    assert kills.differences(kills.left_by(out), whole) == []


def test_what_is_whole_is_not_spoken_of(stopped):
    out, whole = stopped
    result = resumed(out)
    assert (result.exit_code, result.stderr) == (0, "")
    assert kills.differences(kills.left_by(out), whole) == []


@pytest.mark.parametrize("how", ["emptied", "a bit flipped"])
def test_two_damaged_checkpoints_are_an_error_that_changes_nothing(stopped, how):
    out, _ = stopped
    for file in generations(out):
        damage(file, how)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    result = resumed(out)
    assert result.exit_code == 2
    assert "can be used: 000004-0-train.safetensors: " in result.stderr
    assert "000003-0-train.safetensors: " in result.stderr
    assert f"fedcore train --config {out}/config.yaml --out NEW_FOLDER" in result.stderr.replace("\n", "")
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_state_that_both_checkpoints_name_is_an_error_when_it_is_used(stopped):
    """And the folder stays as it is: when the file is back, the run goes on."""
    out, whole = stopped
    store = RunDirectory(out).checkpoints
    older, newer = store.load().manifest, None
    newest = generations(out)[1]
    aside = newest.rename(out / "aside")
    newer, older = older, store.load().manifest
    aside.rename(newest)
    client = next(client for client, version in newer.items() if version is not None and older.get(client) == version)
    file = store.clients.path(client, newer[client])
    content = file.read_bytes()
    damage(file, "a bit flipped")
    with raises(RunDirectoryError, client, newer[client]):
        fedcore.resume(out)
    file.write_bytes(content)
    fedcore.resume(out)
    assert kills.differences(kills.left_by(out), whole) == []


def test_evaluate_says_it_too_and_writes_nothing(stopped):
    out, _ = stopped
    damage(generations(out)[1], "cut")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    result = CliRunner().invoke(app, ["evaluate", str(out), "--json"])
    assert result.exit_code == 0
    assert "note: 000004-0-train.safetensors: " in result.stderr
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
