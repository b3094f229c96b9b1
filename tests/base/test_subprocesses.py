"""A subprocess imports what this process can, and nothing from the folder in which it starts."""

from __future__ import annotations

import subprocess
import sys

from fedcore.base.subprocesses import command, environment, search_path


def test_modules_of_this_process_are_found_and_those_of_the_folder_are_not(tmp_path, monkeypatch):
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "beside_a_script.py").write_text("print('found')\n")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "json.py").write_text("raise SystemExit('a module of the working folder was imported')\n")
    monkeypatch.syspath_prepend(tmp_path / "ours")
    line = command("beside_a_script", "x")
    assert line[-3:] == ["-m", "beside_a_script", "x"]
    done = subprocess.run(line, cwd=tmp_path / "here", env=environment(MORE="1"), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "found\n"), done.stderr
    done = subprocess.run(
        [*line[:-2], "json.tool", "--help"], cwd=tmp_path / "here", env=environment(), capture_output=True
    )
    assert done.returncode == 0, done.stderr


def test_the_empty_entry_is_the_folder_that_it_means_now(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "/a"])
    assert search_path() == f"{tmp_path}:/a"
    assert environment(MORE="1")["MORE"] == "1"
