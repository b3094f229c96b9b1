"""Temporary folders: deleted when their process is gone, and never before."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedcore.tools import process
from fedcore_ray.owned_folder import OwnedFolder, remove_abandoned

PREFIX = "fedcore-here-"
OWNER = """
import signal, sys
from pathlib import Path
from fedcore_ray.owned_folder import OwnedFolder

folder = OwnedFolder(Path(sys.argv[1]), sys.argv[2])
(folder.path / "tensors").write_bytes(b"content")
print("ready", flush=True)
signal.pause()
"""


def aged(folder: Path) -> Path:
    """Return a folder that was made a while ago."""
    os.utime(folder, (time.time() - 9, time.time() - 9))
    return folder


@pytest.mark.slow
def test_a_killed_owners_folder_is_deleted(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, tmp_path, PREFIX]
    with subprocess.Popen(command, env=process.environment(), stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        (folder,) = map(aged, tmp_path.iterdir())
        remove_abandoned(tmp_path, PREFIX)
        assert [path.read_bytes() for path in folder.iterdir()] == [b"content"]
        owner.kill()
        owner.wait()
    remove_abandoned(tmp_path, PREFIX)
    assert not any(tmp_path.iterdir())


def test_a_folder_is_its_owners_alone_and_removed_once(tmp_path: Path) -> None:
    folder = OwnedFolder(tmp_path, PREFIX)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.remove()
    folder.remove()
    assert not any(tmp_path.iterdir())


def test_where_folders_cannot_be_locked_none_is_taken_for_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")  # as NFS does

    monkeypatch.setattr(fcntl, "flock", refuse)
    folder = aged(OwnedFolder(tmp_path, PREFIX).path)
    remove_abandoned(tmp_path, PREFIX)
    assert folder.exists()


def test_folders_of_others_and_one_that_is_being_made_stay(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    link = tmp_path / f"{PREFIX}1-link"
    link.symlink_to(aged(target))
    new = tmp_path / f"{PREFIX}2-new"
    new.mkdir()
    (tmp_path / "other-1-2").mkdir()
    remove_abandoned(tmp_path, PREFIX)
    assert {path.name for path in tmp_path.iterdir()} == {"target", link.name, new.name, "other-1-2"}
