"""``fedcore data``: what can be named, and partitions."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

from fedcore import RunConfig
from fedcore_console import data

COMMANDS = ["list", "split", "plot"]
SMALL = ("--workers", 0, "--rounds", 1, "--clients", 2, "--local-epochs", 1)


def test_data_list(cli) -> None:
    found = json.loads(cli("data", "list", "--json").stdout)
    assert found["dataset"]["digits"].startswith("The bundled digits")
    assert {"dirichlet", "iid"} <= set(found["partitioner"])
    assert all(line and "`" not in line for lines in found.values() for line in lines.values())
    assert "imagefolder:NAME" in cli("data", "list").stdout


def test_data_list_names_the_presets(cli) -> None:
    text = " ".join(cli("data", "list").output.split())
    assert "known settings (--preset)" in text
    assert "cifar10-moon cifar10, simple-cnn, dirichlet, alpha 0.5, 10 of 10 clients, 100 rounds, 10 local" in text


def test_data_split_writes_nothing_unasked(cli, tmp_path: Path) -> None:
    result = cli("data", "split", "--clients", 2)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "written" not in result.stdout
    assert [*tmp_path.iterdir()] == []


def test_data_split_writes_what_train_reads(cli, tmp_path: Path) -> None:
    split, out = ("data", "split", "--clients", 2), ("--out", "partition.json")
    result = cli(*split, "--alpha", 0.3, "--seed", 3, *out)
    assert result.exit_code == 0
    assert "written: partition.json" in result.stdout
    digest = json.loads((tmp_path / "partition.json").read_text())["sha256"]
    assert digest in result.stdout

    refused = cli(*split, *out)
    assert refused.exit_code == 2
    assert "--force" in refused.stderr
    assert json.loads((tmp_path / "partition.json").read_text())["sha256"] == digest
    cli("train", *SMALL, "--partition", "partition.json", "--quiet", "--out", "run")
    assert json.loads((tmp_path / "run" / "partition.json").read_text())["sha256"] == digest

    assert cli(*split, *out, "--force").exit_code == 0
    assert json.loads((tmp_path / "partition.json").read_text())["sha256"] != digest


def test_split_takes_its_flags_from_the_same_fields() -> None:
    assert set(data.SPLIT_FIELDS) <= set(RunConfig.model_fields)
    assert set(inspect.signature(data.split).parameters) == {*data.SPLIT_FIELDS, "out", "force", "debug"}


def test_the_help_lists_the_commands_of_both_packages(cli) -> None:
    text = cli("data", "--help").output
    assert "Data sets, and their partitions among clients." in text
    assert [word for line in text.splitlines() if (word := line.strip("│ ").partition(" ")[0]) in COMMANDS] == COMMANDS


def test_a_command_that_is_not_there_gets_a_suggestion(cli) -> None:
    assert "No such command 'splt'. Did you mean 'split'?" in cli("data", "splt").stderr
