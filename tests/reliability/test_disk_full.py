"""No room on the disk: the run stops with a clear error, and goes on to the same bits when there is room."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile

import pytest
from torch import nn
from typer.testing import CliRunner

from fedcore.cli.app import app
from fedcore.engines import channel
from fedcore.models import SplitModel
from fedcore.runs.directory import RunDirectory
from fedcore_testing import federate, model_bytes
from fedcore_testing.problems import few_digits
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


def used_by(folder):
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


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
    if (out / "config.yaml").exists():
        found = RunDirectory(out).checkpoints.load()
        rounds = found.round if found else 0
        assert rounds < ROUNDS or found.phase != "done"
        assert list(out.rglob("*.tmp")) == []
        code, said = fedcore("resume", out)
        assert code == 0, said
        assert kills.differences(kills.left_by(out), plain) == []
    else:
        assert leave < 100


@pytest.mark.slow
def test_a_limit_on_the_size_of_files_is_such_an_error(tmp_path, plain):
    """A quota of the process's own, for where nothing can be mounted."""
    config = kills.configure(tmp_path, "moon", workers=0, **OPTIONS)
    out = tmp_path / "run"
    limited = subprocess.run(
        [sys.executable, "-m", "fedcore", "train", "--config", config, "--out", out, "--quiet"],
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


def wide(num_classes, input_shape):
    """A model of 24 MB, as is each broadcast and update."""
    return SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 80_000), nn.ReLU()), 80_000, num_classes)


@pytest.mark.parametrize("more", ["", ",ro"])
def test_what_finds_no_room_in_shared_memory_goes_to_the_temporary_folder(tmp_path, disk, monkeypatch, more):
    """Shared memory has room for the data but not for broadcast and updates; or it is read-only."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    options = {"model": wide, "dataset": few_digits, "rounds": 1, "local_steps": 1}
    expected = model_bytes(federate(tmp_path, workers=0, **options))
    monkeypatch.setattr(channel, "SHARED_MEMORY", disk(66 * KIB, more))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    assert model_bytes(federate(tmp_path, workers=2, **options)) == expected
    assert not [*channel.SHARED_MEMORY.iterdir(), *temporary.iterdir()]
