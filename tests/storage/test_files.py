"""Files are whole or absent, on the disk before they have their name, and never written through a link."""

from __future__ import annotations

import contextlib
import os

import pytest

from fedcore.base.errors import StorageError
from fedcore.storage import files


@pytest.fixture
def disk(monkeypatch):
    """Record what is done to the disk, in order: what was waited for, and what was renamed."""
    done = []
    replace = os.replace

    def sync(descriptor):
        done.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))

    def rename(source, target, **folders):
        done.append(("rename", target))
        replace(source, target, **folders)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", rename)
    return done


def test_a_file_is_on_the_disk_before_it_has_its_name_and_then_the_name_is(tmp_path, disk):
    files.write_text(tmp_path / "a.txt", "new")
    assert disk == [("sync", f".a.txt.{os.getpid()}.tmp"), ("rename", "a.txt"), ("sync", tmp_path.name)]
    disk.clear()
    with files.replacing(tmp_path / "b", sync=False) as temporary:
        temporary.write_text("x")
    assert disk == [("rename", "b")]


def test_a_file_is_on_the_disk_with_its_name_when_it_is_asked_for(tmp_path, disk):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    files.sync_inside(tmp_path / "metrics.jsonl", inside=tmp_path)
    assert disk == [("sync", "metrics.jsonl"), ("sync", tmp_path.name)]


def test_a_tree_is_on_the_disk_with_all_its_names(tmp_path, disk):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "deep.txt").write_text("")
    (tmp_path / "top.txt").write_text("")
    (tmp_path / "link").symlink_to("/nowhere")
    files.sync_tree(tmp_path)
    assert sorted(disk) == sorted([("sync", name) for name in ("top.txt", tmp_path.name, "deep.txt", "a")])


def test_the_names_of_new_folders_are_on_the_disk(tmp_path, disk):
    folders = [tmp_path / "a" / "b", tmp_path / "a"]
    assert files.make_folders(folders[0]) == folders
    assert sorted(disk) == sorted([("sync", "a"), ("sync", tmp_path.name)])
    disk.clear()
    assert files.make_folders(folders[0]) == []
    files.write_text(tmp_path / "a" / "c" / "d" / "x", "", inside=tmp_path / "a")
    assert disk[:2] == [("sync", "a"), ("sync", "c")]
    disk.clear()
    files.sync_folders(tmp_path / "a" / "c" / "d", inside=tmp_path / "a")
    assert disk == [("sync", "d"), ("sync", "c"), ("sync", "a")]


def test_an_error_in_the_middle_leaves_the_old_file_and_no_other(tmp_path):
    files.write_text(tmp_path / "a.txt", "old")
    with contextlib.suppress(KeyError), files.replacing(tmp_path / "a.txt", sync=True) as temporary:
        temporary.write_text("half")
        raise KeyError
    assert (tmp_path / "a.txt").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_folders_are_made_below_the_named_one_and_no_link_is_followed(tmp_path):
    files.write_json(tmp_path / "run" / "deep" / "x.json", {"b": 1, "a": 2}, inside=tmp_path / "run")
    assert (tmp_path / "run" / "deep" / "x.json").read_text() == '{\n  "b": 1,\n  "a": 2\n}\n'
    (tmp_path / "else").mkdir()
    (tmp_path / "run" / "link").symlink_to(tmp_path / "else")
    with pytest.raises(StorageError, match="link is a link; put the file or folder itself there"):
        files.write_text(tmp_path / "run" / "link" / "x", "", inside=tmp_path / "run")
    with pytest.raises(OSError, match="is a link"):
        files.open_inside(tmp_path / "run" / "link", os.O_WRONLY, inside=tmp_path / "run")
    assert not [*(tmp_path / "else").iterdir()]


def test_others_are_deleted_and_a_folder_that_is_not_there_is_empty(tmp_path):
    for name in "abc":
        (tmp_path / name).write_text("")
    files.delete_others(tmp_path, {"b"}.__contains__, inside=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    files.delete_others(tmp_path / "none", bool, inside=tmp_path)


def test_what_is_no_file_is_named(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for read in (files.read_bytes, files.read_text, files.require_file):
        with pytest.raises(OSError, match="pipe is a pipe, not a file"):
            read(tmp_path / "pipe")
        with pytest.raises(OSError, match=r"a folder|directory"):
            read(tmp_path)


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot write .*file/x: Not a directory"):
        files.write_text(tmp_path / "file" / "x", "")
