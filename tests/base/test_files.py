"""Files are whole or absent and on the disk before they have their name; JSON is strict; records are lines."""

from __future__ import annotations

import contextlib
import os

import pytest

from fedcore.base import files
from fedcore.base.errors import RunDirectoryError, StorageError
from tests.sentences import raises


@pytest.fixture
def disk(monkeypatch):
    """Record what is done to the disk, in order: what was waited for, and what was renamed."""
    done = []
    replace = os.replace

    def sync(descriptor):
        done.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))

    def rename(source, target):
        done.append(("rename", target.name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", rename)
    return done


def test_a_file_is_on_the_disk_before_it_has_its_name_and_then_the_name_is(tmp_path, disk):
    files.write_text(tmp_path / "a.txt", "new")
    assert disk == [("sync", f".a.txt.{os.getpid()}.tmp"), ("rename", "a.txt"), ("sync", tmp_path.name)]
    disk.clear()
    files.write_bytes(tmp_path / "b", b"x", sync=False)
    assert disk == [("rename", "b")]


def test_the_names_of_new_folders_are_on_the_disk(tmp_path, disk):
    folders = [tmp_path / "a" / "b", tmp_path / "a"]
    assert files.make_folders(folders[0]) == folders
    assert sorted(disk) == sorted([("sync", "a"), ("sync", tmp_path.name)])
    disk.clear()
    assert files.make_folders(folders[0]) == []
    assert disk == []


def test_an_error_in_the_middle_leaves_the_old_file_and_no_other(tmp_path):
    files.write_text(tmp_path / "a.txt", "old")
    with contextlib.suppress(KeyError), files.replacing(tmp_path / "a.txt", sync=True) as temporary:
        temporary.write_text("half")
        raise KeyError
    assert (tmp_path / "a.txt").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_other_rounds_are_deleted_and_a_folder_that_is_not_there_is_empty(tmp_path):
    for name in ("000001-0-train", "000002-0-train", ".000003.7.tmp", "mine", ".mine"):
        (tmp_path / name).write_text("")
    files.delete_others(tmp_path, {"000002-0-train"}.__contains__)
    assert {path.name for path in tmp_path.iterdir()} == {"000002-0-train", "mine", ".mine"}
    files.delete_others(tmp_path / "none", bool)


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with raises(StorageError):
        files.write_text(tmp_path / "file" / "x", "")


def test_links_are_refused_at_any_depth(tmp_path):
    """But for W&B's, which makes some in its own folder."""
    deep, own = tmp_path / "run" / "events" / "deep", tmp_path / "run" / "wandb"
    deep.mkdir(parents=True)
    own.mkdir()
    (own / "latest-run").symlink_to(tmp_path)
    files.refuse_links(tmp_path / "run")
    (deep / "out").symlink_to(tmp_path)
    files.refuse_links(tmp_path / "run", deep=False)
    with raises(RunDirectoryError):
        files.refuse_links(tmp_path / "run")


def test_json_is_strict():
    with pytest.raises(ValueError, match="Expecting value"):
        files.parse_json("[1,")
    with raises(ValueError):
        files.parse_json("[" * 100_000)


def test_records_hold_no_nan():
    record = files.finite({"a": 1.0, "b": {"c": [float("nan"), 2.0], "d": float("inf")}})
    assert record == {"a": 1.0, "b": {"c": [None, 2.0], "d": None}}
    assert files.finite({"a": 1.0}) == {"a": 1.0}


def test_a_torn_line_of_records_is_cut_and_what_was_edited_is_noticed(tmp_path):
    records = files.RecordFile(tmp_path / "metrics.jsonl")
    first = records.append({"round": 0})
    length = records.append({"round": 1})
    with records.path.open("a") as file:
        file.write('{"round": 2')
    again, said = files.RecordFile(records.path), []
    assert again.read() == [{"round": 0}, {"round": 1}]
    again.restore()
    assert (again.length, again.path.stat().st_size) == (length, length)
    again.check(length)
    records.path.write_text('{"round": 7}\nx\n{"round": 1}\n')
    assert again.read(said.append) == [{"round": 7}, {"round": 1}]
    assert "damaged in line 2" in said[0]
    again.check(first)
    for edited in (first + 1, 99):
        with raises(RunDirectoryError, "metrics.jsonl", edited):
            again.check(edited)
    with raises(StorageError):
        again.append({"round": 2})
