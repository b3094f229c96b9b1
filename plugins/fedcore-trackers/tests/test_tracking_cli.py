"""Trackers from the command line."""

from __future__ import annotations

import json

from fedcore import ConfigError
from fedcore.tools import build_config
from tests.sentences import raises, refused


def test_a_switched_off_tracker_is_a_note_and_the_run_succeeds(cli, tmp_path):
    small = ["--model", "mlp", "--clients", 2, "--rounds", 1, "--local-epochs", 1, "--workers", 0]
    result = cli("train", *small, "--quiet", "--tracker", "module:odd_trackers.InStart", "--out", tmp_path / "run")
    assert result.exit_code == 0
    assert result.stderr.count("note: ") == 1
    assert "tracker 'module:odd_trackers.InStart' is switched off: start raised ValueError: boom" in result.stderr


def test_flags_and_a_file_name_trackers_with_their_options(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("plugins: [moon]\ntrackers:\n  tensorboard: {patience: 3}\n", encoding="utf-8")
    config = build_config({}, file, ["tensorboard.dir=events", "moon.mu=2"])
    assert config.trackers == {"tensorboard": {"patience": 3, "dir": "events"}}
    assert config.plugins == {"moon": {"mu": 2}}
    named = build_config({"trackers": ["wandb", "tensorboard"]}, file, [])
    assert list(named.trackers.items()) == [("wandb", {}), ("tensorboard", {"patience": 3})]


def test_an_option_of_a_tracker_that_is_not_used_says_how_to_use_it():
    with raises(ConfigError, "'tensorboard'", "--tracker"):
        build_config({}, None, ["tensorboard.dir=events"])


def test_an_unknown_tracker_ends_with_the_nearest_name(cli):
    refused(cli("train", "--tracker", "tensorbord"), "'tensorbord'", "'tensorboard'")


def test_trackers_are_in_a_group_of_the_list_and_have_a_card(cli):
    rows = {row["name"]: row for row in json.loads(cli("plugins", "list", "--json").stdout)}
    assert rows["tensorboard"]["group"] == "trackers"
    assert rows["tensorboard"]["package"] == "fedcore-trackers"
    assert "trackers (--tracker NAME)" in cli("plugins", "list").stdout
    card = json.loads(cli("plugins", "show", "tensorboard", "--json").stdout)
    assert [option["name"] for option in card["options"]] == ["patience", "dir"]
    assert "tensorboard.dir" in cli("plugins", "show", "tensorboard").stdout
