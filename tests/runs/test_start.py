"""One way to start a run: plugins created once, the set-up built once with the final configuration."""

from __future__ import annotations

import pytest

from fedcore.base.errors import RunDirectoryError
from fedcore.hooks.plugins import PluginSet
from fedcore.hooks.setup import Setup
from fedcore.runs.start import begin, reopen
from fedcore.testing.federation import small_config


@pytest.fixture
def counted(monkeypatch):
    """Count the sets of plugins and the set-ups that are made."""
    made = {"plugins": 0, "setups": []}
    create, build = PluginSet.create.__func__, Setup.build.__func__

    def creating(cls, choices):
        made["plugins"] += 1
        return create(cls, choices)

    def building(cls, *arguments):
        made["setups"].append(build(cls, *arguments))
        return made["setups"][-1]

    monkeypatch.setattr(PluginSet, "create", classmethod(creating))
    monkeypatch.setattr(Setup, "build", classmethod(building))
    return made


def test_a_new_run_and_a_reopened_one_are_set_up_once(tmp_path, counted):
    config = small_config(tmp_path, autotune=True, model="simple-cnn", dataset="digits")
    first = begin(config)
    assert (counted["plugins"], counted["setups"]) == (1, [first.setup])
    assert first.config.out == first.directory.path
    assert first.config.memory_format != "auto"
    again = reopen(first.directory.path, allow_code=False)
    assert (counted["plugins"], counted["setups"][1:]) == (2, [again.setup])
    assert again.config == first.config


def test_a_copy_is_set_up_with_its_own_directory(tmp_path):
    first = begin(small_config(tmp_path))
    copy = reopen(first.directory.path, allow_code=False, out=tmp_path / "copy")
    assert copy.config.out == copy.directory.path == tmp_path / "copy"
    assert copy.changed == {"out": (str(first.directory.path), str(tmp_path / "copy"))}
    assert copy.directory.partition_file.exists()


def test_a_directory_that_holds_something_is_refused_before_the_set_up(tmp_path, counted):
    first = begin(small_config(tmp_path))
    with pytest.raises(RunDirectoryError, match="exists already"):
        begin(small_config(tmp_path, out=first.directory.path))
    assert len(counted["setups"]) == 1
