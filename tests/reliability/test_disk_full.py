"""No room on the disk: the run stops with a clear error, and goes on to the same bits when there is room."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from fedcore import RunConfig
from fedcore.cli.app import app
from fedcore.runs.api import started
from fedcore.runs.directory import RunDirectory
from tests.reliability import kills

ROUNDS = 8
OPTIONS = {"rounds": ROUNDS, "clients": 3, "participation": 1.0}
KIB = 1024


@pytest.fixture
def disk(tmp_path):
    """Return a function that gives a file system of some KiB, which a file can fill."""
    mounted = []

    def make(kib, more=""):
        folder = tmp_path / "disk"
        folder.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={kib}k{more}", "tmpfs", folder], capture_output=True
        )
        if done.returncode:
            pytest.skip(f"a file system cannot be mounted here: {done.stderr.decode().strip()}")
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", "-l", folder], check=True)


def free(folder):
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


def fill(folder, leave):
    """Take all room but ``leave`` bytes."""
    (folder / "filler").write_bytes(b"x" * max(0, free(folder) - leave))


def fedcore(*words):
    """Run a command in this process; returns its exit code and what it said."""
    result = CliRunner().invoke(app, [*map(str, words), "--quiet"])
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return kills.left_by(kills.unharmed(tmp_path_factory.mktemp("plain") / "run", "moon", **OPTIONS))


SLOW = [
    pytest.param(kib, workers, marks=pytest.mark.slow) for workers in (0, 1) for kib in (0, 200, 500, 800, 1200, 1500)
]


@pytest.mark.parametrize(("leave", "workers"), [(900, 0), *SLOW])
def test_a_full_disk_stops_the_run_and_loses_nothing(tmp_path, disk, plain, leave, workers):
    """Whatever the file is that finds no room: a client's state, the metrics, a checkpoint, the start of the run."""
    folder = disk(8 * KIB)
    fill(folder, leave * KIB)
    out = folder / "run"
    config = kills.configure(tmp_path, "moon", workers=workers, **OPTIONS)
    code, said = fedcore("train", "--config", config, "--out", out)
    assert code == 2, said
    assert "No space left on device; make room there" in said, said
    assert "Traceback" not in said
    assert "internal error" not in said
    (folder / "filler").unlink()
    if out.exists():
        found = RunDirectory(out).checkpoints.load()
        rounds = found.round if found else 0
        assert rounds < ROUNDS or found.phase != "done"
        assert list(out.rglob("*.tmp")) == []
        again = ("resume", out)
    else:  # the clients' states of the first round found no room: there is nothing to go on with
        assert leave * KIB < sum(len(content) for name, content in plain.items() if name.startswith("clients/"))
        assert "goes on" not in said
        again = ("train", "--config", config, "--out", out)
    code, said = fedcore(*again)
    assert code == 0, said
    assert kills.differences(kills.left_by(out), plain) == []


def test_a_copy_that_finds_no_room_says_it_once(tmp_path, disk):
    """Each file that found none stood in the error, with both of its paths."""
    run = kills.unharmed(tmp_path / "run", "moon", rounds=1)
    code, said = fedcore("resume", run, "--rounds", 2, "--out", disk(8) / "copy")
    assert code == 2, said
    assert said.count("No space left on device") == 1, said


@pytest.mark.slow
def test_a_limit_on_the_size_of_files_is_such_an_error(tmp_path, plain):
    """A quota of the process's own, for where nothing can be mounted."""
    out = tmp_path / "run"
    config = RunConfig(**{**kills.OPTIONS, **OPTIONS, "workers": 0}, plugins={"moon": {}}, out=out)
    with started(config) as (run, state):
        for _ in range(3):
            state = run.one_round(state)
    limited = subprocess.run(
        [sys.executable, "-m", "fedcore", "resume", out, "--quiet"],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20 * KIB, 20 * KIB)),
    )
    assert limited.returncode == 2, limited.stderr
    assert "File too large; make room there" in limited.stderr
    assert "Traceback" not in limited.stderr
    code, said = fedcore("resume", out)
    assert code == 0, said
    assert kills.differences(kills.left_by(out), plain) == []
