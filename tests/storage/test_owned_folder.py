"""Temporary folders: deleted when their process is gone, whatever its number is here, and never before."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedcore.base.process import environment
from fedcore.storage import owned_folder
from fedcore.storage.owned_folder import OwnedFolder, remove_abandoned

PREFIX = "fedcore-here-"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[OwnedFolder]:
    found = OwnedFolder(tmp_path, PREFIX)
    yield found
    found.remove()


def test_a_live_folder_stays_whatever_its_owners_number_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another container's numbers the owner may be a process that is not there."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(os, "getpid", lambda: ended.pid)
        folder = OwnedFolder(tmp_path, PREFIX)
    remove_abandoned(tmp_path, PREFIX)
    assert folder.path.exists()
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.remove()
    folder.remove()  # a second time does nothing
    assert not any(tmp_path.iterdir())


OWNER = """
import os, signal, sys
from pathlib import Path
from fedcore.storage.owned_folder import OwnedFolder

folder = OwnedFolder(Path(sys.argv[1]), sys.argv[2])
(folder.path / "tensors").write_bytes(b"content")
if os.fork() == 0:  # a process of a data loader, say, which ends when the test does
    print("ready", flush=True)
    sys.stdin.read()
    os._exit(0)
signal.pause()
"""


def test_a_killed_owners_folder_is_deleted_though_its_fork_lives_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, tmp_path, PREFIX]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment(), **pipes) as owner:  # type: ignore[call-overload]
        assert owner.stdout.readline() == b"ready\n"
        remove_abandoned(tmp_path, PREFIX)
        assert [path.read_bytes() for path in tmp_path.glob("*/*")] == [b"content"]
        owner.kill()
        owner.wait()
        remove_abandoned(tmp_path, PREFIX)
        assert not any(tmp_path.iterdir())


def test_no_process_that_is_started_holds_the_lock(folder: OwnedFolder, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as started:
        assert not os.get_inheritable(folder._descriptor)
        os.close(folder._descriptor)
        owned_folder._held.discard(folder._descriptor)
        remove_abandoned(tmp_path, PREFIX)
        assert not any(tmp_path.iterdir())
        started.communicate(b"\n")


def test_a_folder_is_made_again_if_another_process_deletes_it_before_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, lock, moments = tempfile.mkdtemp, fcntl.flock, iter(["made", "opened", "neither"])

    def made(**options: str) -> str:
        path = make(**options)
        moment = next(moments)
        if moment == "made":
            remove_abandoned(tmp_path, PREFIX)
        monkeypatch.setattr(fcntl, "flock", opened if moment == "opened" else lock)
        return path

    def opened(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        remove_abandoned(tmp_path, PREFIX)
        lock(descriptor, operation)

    monkeypatch.setattr(tempfile, "mkdtemp", made)
    folder = OwnedFolder(tmp_path, PREFIX)
    assert next(moments, None) is None
    assert list(tmp_path.iterdir()) == [folder.path]
    remove_abandoned(tmp_path, PREFIX)
    assert list(tmp_path.iterdir()) == [folder.path]
    folder.remove()


def test_where_folders_cannot_be_locked_none_is_taken_for_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")  # as NFS does

    monkeypatch.setattr(fcntl, "flock", refuse)
    folder = OwnedFolder(tmp_path, PREFIX)
    remove_abandoned(tmp_path, PREFIX)
    assert folder.path.exists()
    folder.remove()
    assert not folder.path.exists()


def test_folders_of_other_hosts_and_others_names_stay(
    folder: OwnedFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another host's lock may not be seen on a file system that both share."""
    monkeypatch.setattr(owned_folder, "_kernel", lambda: "0ther0")
    elsewhere = OwnedFolder(tmp_path, PREFIX)
    os.close(elsewhere._descriptor)
    owned_folder._held.discard(elsewhere._descriptor)
    monkeypatch.undo()
    stay = [elsewhere.path, folder.path]
    for name in (PREFIX, f"{PREFIX}notes", "other-1-2-3"):
        (tmp_path / name).mkdir()
        stay.append(tmp_path / name)
    target = tmp_path / "target"
    target.mkdir()
    link = tmp_path / f"{PREFIX}1-{owned_folder._kernel()}-link"
    link.symlink_to(target)
    remove_abandoned(tmp_path, PREFIX)
    assert sorted(tmp_path.iterdir()) == sorted([*stay, target, link])


def test_a_folder_that_its_owner_deleted_is_no_error(folder: OwnedFolder, tmp_path: Path) -> None:
    shutil.rmtree(folder.path)
    remove_abandoned(tmp_path, PREFIX)
    folder.remove()


def test_the_kernel_has_one_short_name() -> None:
    """Ray makes sockets in such a folder, and their paths may not be long."""
    assert owned_folder._kernel() == owned_folder._kernel()
    assert len(owned_folder._kernel()) == 6
