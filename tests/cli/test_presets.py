"""Presets: ``train --preset`` and ``fedcore.run(preset=...)``."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedcore
from fedcore.base import registry
from fedcore.base.config import RunConfig
from fedcore.base.errors import PluginContractError
from fedcore.base.identity import preset_options
from fedcore.base.safe_yaml import read_config_file
from fedcore.cli.settings import build_config
from tests.sentences import raises, refused

LABORATORY = {"alpha": 0.1, "rounds": 3, "clients": 4, "plugins": {"moon": {"mu": 5}}}
MISSPELT = {"alhpa": 0.1}
OUT_OF_BOUNDS = {"alpha": -1}
A_LIST = ["alpha"]

HERE = "module:tests.cli.test_presets"


def test_flags_override_the_file_and_the_file_overrides_the_preset(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("rounds: 7\nclients: 6\n", encoding="utf-8")
    config = build_config({"clients": 8}, file, [], preset=f"{HERE}.LABORATORY")
    assert (config.alpha, config.rounds, config.clients, config.lr) == (0.1, 7, 8, RunConfig().lr)


def test_a_plugin_flag_replaces_the_presets_plugins() -> None:
    preset = f"{HERE}.LABORATORY"
    assert build_config({}, None, [], preset=preset).plugins == {"moon": {"mu": 5}}
    assert build_config({"plugins": ["fedprox"]}, None, [], preset=preset).plugins == {"fedprox": {}}
    assert build_config({}, None, ["moon.mu=1"], preset=preset).plugins == {"moon": {"mu": 1}}


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("MISSPELT", ("'alhpa'", "'alpha'")),
        ("OUT_OF_BOUNDS", ("--alpha", "0")),
        ("A_LIST", ()),
    ],
)
def test_a_wrong_preset_breaks_its_contract(name: str, named: tuple[str, ...]) -> None:
    with raises(PluginContractError, HERE, name, *named):
        preset_options(f"{HERE}.{name}")


def test_an_unknown_preset(cli) -> None:
    refused(cli("train", "--preset", "digits-quik"), "'digits-quik'", "'digits-quick'")


def test_a_preset_of_an_absent_package_is_answered_with_the_package(monkeypatch) -> None:
    monkeypatch.setattr(registry, "available", lambda kind: {})
    with raises(fedcore.UnknownNameError):
        preset_options("cifar10-moon")


def test_train_and_python_take_the_same_preset(cli, tmp_path: Path) -> None:
    small = {"rounds": 1, "workers": 0, "clients": 2}
    flags = [text for name, value in small.items() for text in (f"--{name}", value)]
    result = cli("train", "--preset", "digits-quick", *flags, "--quiet", "--out", "run")
    assert result.exit_code == 0, result.stderr
    in_python = fedcore.run(preset="digits-quick", **small, out=tmp_path / "again")
    trained, again = (read_config_file(tmp_path / name / "config.yaml") for name in ("run", "again"))
    assert {**trained, "out": None} == {**again, "out": None}
    assert (trained["local_epochs"], trained["client_test_fraction"]) == (2, 0.2)
    assert in_python.config.alpha == 0.1
