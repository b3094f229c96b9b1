"""Power-of-Choice: the selection by hand, chances in proportion to data, who trains in a run, bytes, identities."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedcore import ConfigError
from fedcore.data import load_dataset
from fedcore.tools import RunDirectory
from fedcore_power_of_choice import draw_candidates, highest
from fedcore_testing import (
    federations,
    initial_weights,
    model_bytes,
    partition_of,
    records,
)
from tests.sentences import raises, warns

OPTIONS = {"clients": 6, "participation": 0.34, "partition": "classes", "rounds": 2}
NAME = "power-of-choice"
go = federations()


@pytest.mark.parametrize(
    ("losses", "count", "expected"),
    [
        ({0: 1.0, 1: 3.0, 2: 2.0}, 2, [1, 2]),
        ({5: 1.0, 3: 1.0, 4: 1.0}, 2, [3, 4]),
        ({7: 0.0}, 3, [7]),
    ],
)
def test_the_highest_losses_by_hand(losses, count, expected):
    assert highest(losses, count) == expected


def test_candidates_are_distinct_and_in_proportion_to_their_data():
    sizes, generator = torch.tensor([1, 0, 3, 6]), torch.Generator().manual_seed(0)
    first = np.zeros(4)
    for _ in range(4000):
        drawn = draw_candidates(sizes, 2, generator)
        assert len(set(drawn)) == 2
        first[drawn[0]] += 1
    np.testing.assert_allclose(first / 4000, [0.1, 0, 0.3, 0.6], atol=0.03)
    assert sorted(draw_candidates(sizes, 3, generator)) == [0, 2, 3]


def test_the_clients_of_the_highest_loss_train(go):
    """All six are candidates, so the two that train are those whose samples the initial model fits worst."""
    result = go({NAME: {"candidates": 6}}, **OPTIONS)
    model, digits = result.model, load_dataset("digits")
    model.load_state_dict(initial_weights(RunDirectory(result.directory).read_config()))
    losses = {}
    for client, rows in enumerate(partition_of(result).train):
        with torch.no_grad():
            logits = model.eval()(digits.train.gather(rows))[1]
        losses[client] = torch.nn.functional.cross_entropy(logits.double(), digits.train.labels[rows]).item()
    assert records(result)[0]["cohort"] == highest(losses, 2)


def test_the_ledger_counts_the_candidates(go):
    result = go({NAME: {"candidates": 5}}, **OPTIONS)
    model = sum(4 * tensor.numel() for tensor in result.model.state_dict().values())
    for line in records(result):
        assert line["bytes"]["by_plugin"]["model"] == {"down": (5 + 2) * model, "up": 2 * model}
        assert line["bytes"]["by_plugin"][NAME] == {"down": 0, "up": 5 * 8}


def test_with_everybody_it_is_fedavg_to_the_bit_and_a_note_says_so(go):
    everybody = {"clients": 3, "participation": 1.0}
    with warns(RuntimeWarning, NAME, "--participation"):
        result = go({NAME: {}}, **everybody)
    assert model_bytes(result) == model_bytes(go({}, **everybody))


def test_a_loss_on_a_few_samples_is_another_estimate(go):
    few = go({NAME: {"candidates": 6, "samples": 3}}, **{**OPTIONS, "rounds": 4})
    again = go({NAME: {"candidates": 6, "samples": 3}}, **{**OPTIONS, "rounds": 4})
    assert model_bytes(few) == model_bytes(again)
    assert all(line["failures"] == [] for line in records(few))


def test_candidates_that_cannot_be_reached_are_left_out(go):
    result = go({NAME: {"candidates": 6}}, **{**OPTIONS, "rounds": 4}, system={"no_show": 0.5}, min_clients=0)
    away = [failure for line in records(result) for failure in line["failures"]]
    assert {failure["kind"] for failure in away} == {"unavailable"}
    for line in records(result):
        missing = {failure["client"] for failure in line["failures"]}
        assert len(missing) == 6 or not missing.intersection(line["cohort"])


@pytest.mark.parametrize("candidates", [1, 7])
def test_too_few_or_too_many_candidates_are_refused(go, candidates):
    with raises(ConfigError, "2", "6"):
        go({NAME: {"candidates": candidates}}, **OPTIONS)
