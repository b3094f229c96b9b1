"""What a run notes about the code, the machine and the model that its figures come from."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

import fedcore
from fedcore.runs import provenance
from fedcore.runs.directory import RunDirectory
from fedcore_testing import interrupted

ROOT = Path(__file__).parents[2]


def sessions(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "sessions.jsonl").read_text().splitlines()]


def test_a_line_for_each_process_that_trained_the_run(tmp_path):
    result = interrupted(tmp_path, after=0, rounds=2, projection=True)
    first, again = sessions(result.directory)
    assert again["model"] == {
        "parameters": sum(parameter.numel() for parameter in result.model.parameters()),
        "projection": 256,
    }
    assert again["versions"]["torch"] == version("torch")  # the CUDA wheel's __version__ says +cu130, too
    assert again["versions"]["fedcore"] == fedcore.__version__
    assert again["machine"]["gpu"] is None
    assert again["machine"]["cores"] >= 1
    assert again["started"] >= first["started"]
    assert RunDirectory(result.directory).sessions.read() == [first, again]
    text = (result.directory / "sessions.jsonl").read_text()
    assert platform.node() not in json.dumps([again["machine"], again["versions"]])
    assert str(tmp_path) not in text


def test_the_commit_is_that_of_fedcores_own_checkout(tmp_path, monkeypatch):
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git, or no checkout")
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    monkeypatch.setenv("GIT_DIR", str(tmp_path))  # as in a hook of another repository
    provenance.commit.cache_clear()
    found = provenance.commit()
    assert head[:12] in found
    monkeypatch.setattr(provenance, "_ROOT", tmp_path)  # an installed fedcore, perhaps in somebody's checkout
    provenance.commit.cache_clear()
    assert provenance.commit() is None
    provenance.commit.cache_clear()


def test_a_package_without_metadata_is_passed_over(tmp_path, monkeypatch):
    (tmp_path / "broken-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    found = provenance.installed_versions.__wrapped__()
    assert found == provenance.installed_versions()
