"""``fedcore init``: a config file with all options."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fedcore import RunConfig
from fedcore.tools import build_config, preset_options
from tests.sentences import refused

HERE = "module:tests.cli.test_presets"


def test_init_writes_every_option_with_its_default_in_a_comment(cli, tmp_path: Path) -> None:
    result = cli("init")
    assert result.exit_code == 0, result.stderr
    assert "fedcore train --config fedcore.yaml" in result.stdout
    text = (tmp_path / "fedcore.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(text) is None
    assert build_config({}, tmp_path / "fedcore.yaml", []) == RunConfig()
    assert "# Fraction of the clients sampled in each round. [0 < x <= 1]\n# participation: 1.0\n" in text
    assert "- Data and model -" in text
    assert max(map(len, text.splitlines())) <= 100


def test_the_comments_of_init_are_the_defaults(cli, tmp_path: Path) -> None:
    cli("init")
    lines = (tmp_path / "fedcore.yaml").read_text(encoding="utf-8").splitlines()
    options = [line.removeprefix("# ") for line in lines if line[2:].partition(":")[0] in RunConfig.model_fields]
    values = yaml.safe_load("\n".join(options))
    assert values == RunConfig().model_dump(mode="json")


def test_init_with_a_preset_and_plugins(cli, tmp_path: Path) -> None:
    result = cli("init", "own.yaml", "--preset", "digits-quick", "--plugin", "moon", "--plugin", "fedprox")
    assert result.exit_code == 0, result.stderr
    config = build_config({}, tmp_path / "own.yaml", [])
    assert config == RunConfig(**preset_options("digits-quick"), plugins={"moon": {}, "fedprox": {}})
    text = (tmp_path / "own.yaml").read_text(encoding="utf-8")
    assert "    # Temperature tau of the contrast (Eq. 3). [> 0]\n    # temperature: 0.5\n" in text
    trained = cli("train", "--config", "own.yaml", "--fast-dev-run")
    assert trained.exit_code == 0, trained.stderr


def test_init_keeps_the_options_of_a_presets_plugin(cli, tmp_path: Path) -> None:
    assert cli("init", "own.yaml", "--preset", f"{HERE}.LABORATORY").exit_code == 0
    assert build_config({}, tmp_path / "own.yaml", []).plugins == {"moon": {"mu": 5}}


def test_init_overwrites_nothing(cli, tmp_path: Path) -> None:
    (tmp_path / "fedcore.yaml").write_text("rounds: 3\n", encoding="utf-8")
    refused(cli("init"), "fedcore.yaml", "fedcore init FILE")
    assert (tmp_path / "fedcore.yaml").read_text(encoding="utf-8") == "rounds: 3\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--plugin", "mooon"), ("'mooon'", "'moon'")),
        (("--preset", "nope"), ("'nope'",)),
        (("--plugin", "moon", "--plugin", "moon"), ("'moon'", 2)),
        (("absent/own.yaml",), ("absent/own.yaml: No such file",)),
    ],
)
def test_init_refuses_and_writes_nothing(cli, tmp_path: Path, arguments: tuple[str, ...], named) -> None:
    refused(cli("init", *arguments), *named)
    assert not list(tmp_path.iterdir())
