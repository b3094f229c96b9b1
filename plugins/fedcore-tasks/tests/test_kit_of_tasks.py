"""The conformance kit on runs of each task: ``fedcore plugins check NAME --task regression``."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from fedcore.tools import app
from fedcore_testing import check_plugin
from tests.sentences import refused

TASKS = ["regression", "multilabel", "survival", "survival-discrete", "segmentation"]
METHODS = ["fedavg", "fedprox", "scaffold", "feddyn", "fednova", "fedadam", "fedavgm", "ditto", "fedper", "fedrep"]
METHODS += ["fedbn", "lg-fedavg", "median", "krum", "topk", "qsgd", "attack", "local-dp"]


@pytest.mark.parametrize("task", [*TASKS[:4], pytest.param("segmentation", marks=pytest.mark.slow)])
def test_a_part_of_the_kit_runs_on_each_task(task):
    """The three checks that train; the stack takes the steps of labels of any shape."""
    words = [
        "--only",
        "check_trains",
        "--only",
        "check_the_same_as_one_by_one",
        "--only",
        "check_neutral_options_are_fedavg",
    ]
    done = CliRunner().invoke(app, ["plugins", "check", "fedprox", "--task", task, *words, "--json"])
    assert done.exit_code == 0, done.output
    assert [verdict["status"] for verdict in json.loads(done.stdout)] == ["passed"] * 3


def test_the_kit_names_a_method_that_needs_classes():
    done = CliRunner().invoke(app, ["plugins", "check", "fedproto", "--task", "regression"])
    refused(done, "'fedproto'", "'regression'")


OPTIONS = {"local-dp": {"seed_noise": True}}
RUN = {"local-dp": {"buffers": "local"}}
"""Without these, its noise differs from run to run, and it refuses BatchNorm."""
FAILS = {  # as in tests/behaviour/test_installed_plugins.py
    "attack": {"check_mean_of_equal_updates_is_that_update": "attackers change what they send"},
    "fedbn": {"check_works_with_a_frozen_backbone": "the model's only BatchNorm is frozen: refused, without effect"},
    "local-dp": {"check_runs_beside_another_plugin": "the noise of all that a client sends is one stream"},
}


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("method", METHODS)
def test_the_kit(method, task):
    run, fails = {"task": task, **RUN.get(method, {})}, FAILS.get(method)
    check_plugin(method, slow=False, options=OPTIONS.get(method), run=run, expected_failed_checks=fails)
