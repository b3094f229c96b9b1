"""Names of installed objects: what two packages provide is refused where it is used."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint

import pytest
from typer.testing import CliRunner

from fedcore.base import registry
from fedcore.base.errors import ConfigError, PluginContractError
from fedcore.cli.app import app
from tests.sentences import raises

TWICE = "plugin 'same' is provided twice: by first-package and by second-package. Uninstall one of the two packages."


@pytest.fixture
def twice(tmp_path, monkeypatch):
    """Install two packages that register the same name."""
    for package in ("first", "second"):
        info = tmp_path / f"{package}_package-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}-package\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[fedcore.plugins]\nsame = {package}_module:Same\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_a_name_that_two_packages_provide_is_refused_where_it_is_used(twice):
    assert registry.resolve("plugin", "fedavg")
    with pytest.raises(ConfigError) as caught:
        registry.resolve("plugin", "same")
    assert str(caught.value) == TWICE


def test_a_class_that_was_renamed_is_answered_with_what_to_do(monkeypatch):
    point = EntryPoint("mine", "fedcore.base.registry:OldName", "fedcore.plugins")
    monkeypatch.setattr(registry, "available", lambda kind: {"mine": point})
    monkeypatch.setattr(registry, "conflict", lambda kind, name: "")
    with raises(PluginContractError, "'OldName'"):
        registry.resolve("plugin", "mine")


def test_a_script_that_ends_the_program_when_it_is_imported_is_an_error(tmp_path, monkeypatch):
    """argparse read the arguments of fedcore itself, and its usage was all that a user saw."""
    (tmp_path / "its_own_command.py").write_text("import argparse\nargparse.ArgumentParser().parse_args(['--rounds'])")
    monkeypatch.syspath_prepend(tmp_path)
    with raises(ConfigError, "'its_own_command'", "SystemExit"):
        registry.resolve("model", "module:its_own_command.net")


def test_the_list_of_plugins_shows_a_name_that_two_packages_provide(twice):
    result = CliRunner().invoke(app, ["plugins", "list", "--json"])
    assert result.exit_code == 0
    assert TWICE in result.stdout


@pytest.mark.parametrize(
    ("summary", "shown"),
    [
        ("FedOne (2021): one; FedTwo (2022): two", ["FedOne (2021): one", "FedTwo (2022): two"]),
        ("Robust aggregation: one; or two", ["Robust aggregation: one; or two"] * 2),
    ],
)
def test_each_plugin_of_a_package_has_its_part_of_the_summary(tmp_path, monkeypatch, summary, shown):
    info = tmp_path / "both_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: both-package\nVersion: 1.0\nSummary: {summary}\n")
    (info / "entry_points.txt").write_text("[fedcore.plugins]\nfedone = both:One\nfedtwo = both:Two\n")
    monkeypatch.syspath_prepend(tmp_path)
    rows = json.loads(CliRunner().invoke(app, ["plugins", "list", "--json"]).stdout)
    assert [row["summary"] for row in rows if row["package"] == "both-package"] == shown


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("dataset", "cifar10"),
        ("dataset", "imagefolder:images"),
        ("dataset", "npz:images.npz"),
        ("partitioner", "shards"),
        ("partitioner", "natural"),
        ("partitioner", "niid-bench"),
        ("partitioner", "dirichlet-clients"),
        ("augmentation", "cifar10"),
        ("model", "simple-cnn"),
        ("model", "torchvision:resnet18"),
        ("model", "timm:resnet18"),
    ],
)
def test_a_name_of_a_package_that_is_not_installed_is_answered_with_it(monkeypatch, kind, name):
    monkeypatch.setattr(registry, "available", lambda kind: {})
    with raises(ConfigError, repr(name), registry.how_to_install("fedcore-zoo")):
        registry.resolve(kind, name)


@pytest.mark.parametrize(
    ("kind", "group"),
    [
        ("plugin", "fedcore.plugins"),
        ("model prefix", "fedcore.model_prefixes"),
        ("tracking", "fedcore.tracking"),
    ],
)
def test_the_group_of_a_kind(kind, group):
    assert registry.group_of(kind) == group
    assert registry.available(kind), "a group of fedcore's own packages that nobody finds is misspelled"


def test_an_object_of_a_program_is_found_while_it_is_lent_and_before_an_entry_point():
    with registry.lent({("model", "mlp"): int, ("model", "object:Net"): float}):
        assert registry.resolve("model", "mlp") is int
        assert registry.resolve("model", "object:Net") is float
        assert registry.is_lent("object:Net")
    assert registry.resolve("model", "mlp") is not int
    with raises(ConfigError):
        registry.resolve("model", "object:Net")
