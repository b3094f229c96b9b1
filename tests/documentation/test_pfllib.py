"""The table of PFLlib's methods, and the page for users of Flower and PFLlib: true to what is installed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fedcore.base.config import RunConfig
from fedcore.base.registry import available
from fedcore.data import load_dataset
from fedcore.hooks.checks import HOOKS
from fedcore.runs.resolve import usual_model

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "lab" / "pfllib.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if re.match(r"\| (?!method|---)", line)
]


def test_it_has_39_methods_each_with_a_plugin_or_hooks():
    assert len(ROWS) == 39
    assert len({row[0] for row in ROWS}) == 39
    assert not [row[0] for row in ROWS if not row[1] and not row[2]]


def test_every_plugin_that_it_names_exists():
    named = {name for row in ROWS for name in re.findall(r"`([\w-]+)`", row[1])}
    assert {"fedavg", "moon", "fedntd", "fedlc", "fedamp"} <= named
    assert named <= set(available("plugin"))


def test_every_hook_that_it_names_exists():
    words = {name for row in ROWS for name in re.findall(r"`([a-z_]+)`", row[2])}
    assert words - set(HOOKS) <= {"owns", "encodes", "add_parameters"}


def hooks_of(method):
    """Return the hooks that a row names."""
    (row,) = (row for row in ROWS if row[0] == method)
    return {name for name in re.findall(r"`([a-z_]+)`", row[2]) if name in HOOKS}


def test_methods_whose_clients_start_from_models_of_their_own_evaluate_these():
    """But FedCross: its models are candidates for the one global model."""
    own = [row[0] for row in ROWS if "`broadcast_to`, `begin_local` (start)" in row[2]]
    assert {"FedPAC", "FedCross", "FedFomo"} <= set(own)
    without = [name for name in own if not hooks_of(name) & {"personal_model", "personal_parameters"}]
    assert without == ["FedCross"]


COMING = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")


def test_the_page_for_newcomers_names_options_and_hooks_that_exist():
    options = {name.replace("_", "-") for name in RunConfig.model_fields}
    known = options | {"plugin", "metric", "set", "preset", "seeds"}
    assert set(re.findall(r"`--([a-z-]+)", COMING)) <= known
    third = [line.split(" | ")[2] for line in COMING.splitlines() if line.count(" | ") == 2]
    words = {name for cell in third for name in re.findall(r"`([a-z_]+)`", cell)}
    assert words - set(HOOKS) <= {"global", "global_local", "personal", "self"}
    assert len(words & set(HOOKS)) > 15


@pytest.mark.parametrize(
    ("shape", "row"), [((3, 15, 15), "images lower than 16"), ((1, 16, 16), "grey"), ((3, 16, 16), "colour")]
)
def test_the_page_for_newcomers_names_the_usual_network(shape, row):
    model = usual_model(replace(load_dataset("digits"), input_shape=shape))
    assert re.search(rf"^\| {row} .*`{model}` \|$", COMING, re.MULTILINE)
