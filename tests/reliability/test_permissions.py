"""A run directory that may be read and not written, and one with folders that may not be looked into."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reliability import damages, kills

READERS = [("evaluate", "--json"), ("compare", *damages.COMPARED), ("report", "--points", "0", "--out", "page.html")]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> damages.Made:
    return damages.make(tmp_path_factory.mktemp("made"), "stateful", finished=False)


@pytest.fixture
def run(made: damages.Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    out = Path(shutil.copytree(made.path, tmp_path / "run"))
    yield out
    folders = [out]
    while folders:  # from the top: what is below one that is closed cannot be reached
        folders.pop().chmod(0o700)
        folders = [folder for folder in out.rglob("*") if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK)]


def test_a_directory_that_is_read_only_is_read_and_copied(made: damages.Made, run: Path) -> None:
    for path in (*run.rglob("*"), run):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    answers = {command[0]: damages.run(command[0], run, *command[1:]) for command in READERS}
    assert [answer.exit_code for answer in answers.values()] == [0, 0, 0]
    assert (answers["evaluate"].stdout, answers["compare"].stdout) == (made.metrics, made.table)
    refused = damages.run("resume", run, "--quiet")
    assert (refused.exit_code, "Permission denied" in refused.stderr) == (2, True), refused.output
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    copied = damages.run("resume", run, "--out", "copy", "--quiet")
    assert copied.exit_code == 0, copied.output
    assert kills.differences(damages.left(Path("copy")), made.whole) == []


@pytest.mark.parametrize("name", [".", "checkpoint", "clients", "clients/000000"])
def test_a_folder_that_may_not_be_looked_into_is_named(run: Path, name: str) -> None:
    closed = next(run.glob("clients/*")) if name == "clients/000000" else run / name
    closed.chmod(0)
    for command, *words in (*READERS, ("resume", "--quiet")):
        result = damages.run(command, run, *words)
        said = " ".join(result.stderr.split())
        assert "internal error" not in said, said
        assert result.exit_code in (0, 2), said
        if command in ("evaluate", "resume"):
            assert result.exit_code == 2
            assert str(closed.resolve()) in said or "no config.yaml" in said, said
