"""Files are whole or absent, on the disk before they have their name, and never written through a link."""

from __future__ import annotations

import contextlib
import json
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


def test_json_is_strict():
    assert files.parse_json(r'["\ud83d\ude00", "\u00e9"]') == ["\U0001f600", "\u00e9"]
    for text in (r'"\ud83d"', r'{"\ude00": 1}', r'["a", "\ude00\ud83d"]'):
        with pytest.raises(ValueError, match="unpaired surrogate"):
            files.parse_json(text)
    with pytest.raises(ValueError, match="decode"):
        files.parse_json(b'"\xed\xa0\xbd"')
    with pytest.raises(ValueError, match="nested too deeply"):
        files.parse_json("[" * 100_000)


def test_records_hold_no_nan():
    record = files.finite({"a": 1.0, "b": {"c": [float("nan"), 2.0], "d": float("inf")}})
    assert record == {"a": 1.0, "b": {"c": [None, 2.0], "d": None}, "not_finite": ["b.c.0", "b.d"]}
    assert files.finite({"a": 1.0}) == {"a": 1.0}


def test_a_checksum_is_of_the_values_and_not_of_how_they_are_written():
    value = files.sealed({"a": [1.5, None, "\u00e9"], "b": {"c": 1e-300}})
    assert files.unsealed(json.loads(json.dumps(value, indent=2, ensure_ascii=False))) == {
        "a": [1.5, None, "\u00e9"],
        "b": {"c": 1e-300},
    }
    with pytest.raises(ValueError, match="checksum"):
        files.unsealed({**value, "a": [1.25, None, "\u00e9"]})


def test_a_record_of_another_run_does_not_fit():
    line = files.sealed({"round": 0}, mark="one run")
    assert files.unsealed(line, "one run") == {"round": 0}
    with pytest.raises(ValueError, match="another run's"):
        files.unsealed(line, "another")
    with pytest.raises(ValueError, match="checksum"):
        files.unsealed({"round": 0})
    with pytest.raises(ValueError, match="is no record"):
        files.unsealed([1])
