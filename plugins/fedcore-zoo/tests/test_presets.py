"""The presets are settings of the papers' recipes, by names that exist."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest
import yaml

from fedcore import RunConfig
from fedcore_zoo import presets

PLUGINS = Path(__file__).parents[2]
POINTS = {point.name: point for point in entry_points(group="fedcore.presets")}


def preset_options(name):
    return POINTS[name].load()


@pytest.mark.parametrize("name", POINTS)
def test_a_preset_names_what_exists_and_no_plugin(name):
    values = preset_options(name)
    config = RunConfig.create(values)
    for group, chosen in (("datasets", config.dataset), ("models", config.model), ("partitioners", config.partition)):
        assert chosen == "auto" or chosen in entry_points(group=f"fedcore.{group}").names
    assert not {"plugins", "seed", "workers", "device", "out", "trackers"} & set(values)


def test_every_setting_of_the_module_has_a_name():
    named = {point.attr for point in POINTS.values()}
    assert named == {name for name in vars(presets) if name.isupper()}


def recipe(method, table, column):
    path = PLUGINS / f"fedcore-{method}" / "src" / f"fedcore_{method}" / "recipes" / f"table_{table}.yaml"
    written = yaml.safe_load(path.read_text(encoding="utf-8"))
    (options,) = (entry["options"] for entry in written["columns"] if entry["name"] == column)
    return {**written["base"], **{name: value for name, value in options.items() if "." not in name}}


@pytest.mark.parametrize(
    ("preset", "source"),
    [
        ("fmnist-fdcl", ("fdcl", 1, "FMNIST, alpha 0.1")),
        ("fmnist-fedcme", ("fedcme", 2, "FMNIST, alpha 0.1, K 50, M 10")),
        ("cifar10-fedeccr", ("fedeccr", 1, "CIFAR-10")),
    ],
)
def test_a_papers_preset_is_its_recipe(preset, source):
    assert preset_options(preset) == recipe(*source)


def test_moons_presets_are_the_setting_that_fedeccr_takes_from_moon():
    assert {**preset_options("cifar10-moon"), "eval_every": 10} == recipe("fedeccr", 1, "CIFAR-10")
    assert {**preset_options("cifar100-moon"), "eval_every": 10} == recipe("fedeccr", 1, "CIFAR-100")
