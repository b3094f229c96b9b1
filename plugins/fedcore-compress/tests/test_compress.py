"""Top-k and QSGD: hand cases, NumPy references, bytes, memory, identities, whole runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedcore import Plugin, PluginConflictError, hookimpl
from fedcore_compress import (
    TopK,
    dequantise,
    keep_count,
    largest,
    pack_bits,
    quantise,
    unpack_bits,
)
from fedcore_testing import (
    FrozenEncoder,
    client_state,
    federations,
    model_bytes,
    records,
    weights,
)
from tests.sentences import raises

go = federations(samples=300)


# --- the equations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3, 17])
def test_top_k_against_numpy(count):
    values = np.random.default_rng(0).standard_normal(17)
    values[[2, 9]] = 0.5, -0.5  # a tie
    expected = np.sort(np.argsort(-np.abs(values), kind="stable")[:count])
    assert largest(torch.tensor(values), count).tolist() == expected.tolist()


def test_top_k_of_equal_values_takes_the_first():
    assert largest(torch.zeros(5), 2).tolist() == [0, 1]
    assert [keep_count(5, fraction) for fraction in (0.001, 0.2, 0.21, 1.0)] == [1, 1, 2, 5]


def test_qsgd_by_hand():
    """Norm 5, s = 3: |v| / norm * s is 1.8, 2.4, 0; chances below 0.8 and 0.4 go up."""
    v, chances = torch.tensor([3.0, -4.0, 0.0]), torch.tensor([0.79, 0.41, 0.0])
    numbers, norms = quantise(v, chances, 3, 3)
    assert (numbers.tolist(), norms.tolist()) == ([2, -2, 0], [5.0])
    assert dequantise(numbers, norms, 3, 3).tolist() == pytest.approx([10 / 3, -10 / 3, 0.0])
    assert quantise(v, torch.tensor([0.81, 0.39, 0.9]), 3, 3)[0].tolist() == [1, -3, 0]


@pytest.mark.parametrize("bucket", [4, 10, 64])
def test_qsgd_against_numpy_in_buckets(bucket):
    rng = np.random.default_rng(1)
    v, chances, s = rng.standard_normal(10), rng.random(10), 7
    expected = np.zeros(10)
    for start in range(0, 10, bucket):
        part = v[start : start + bucket]
        norm = np.sqrt((part**2).sum())
        position = np.abs(part) / norm * s
        level = np.floor(position) + (chances[start : start + bucket] < position - np.floor(position))
        expected[start : start + bucket] = np.sign(part) * norm * level / s
    found = dequantise(*quantise(torch.tensor(v), torch.tensor(chances), s, bucket), s, bucket)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)


def test_qsgd_has_no_bias():
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(40, generator=generator, dtype=torch.float64)
    many = v.repeat(20_000)
    chances = torch.rand(len(many), generator=generator, dtype=torch.float64)
    draws = dequantise(*quantise(many, chances, 1, 40), 1, 40).view(-1, 40)
    standard_error = draws.std(dim=0) / len(draws) ** 0.5
    assert ((draws.mean(dim=0) - v).abs() < 5 * standard_error).all()


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30])
def test_qsgd_of_extreme_vectors_stays_finite(value):
    numbers, norms = quantise(torch.full((6,), value), torch.rand(6), 7, 4)
    assert torch.isfinite(dequantise(numbers, norms, 7, 4)).all() or value == 1e30
    assert numbers.abs().max() <= 7


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("size", [1, 7, 8, 33])
def test_packing_gives_the_numbers_back(bits, size):
    s = (1 << (bits - 1)) - 1
    numbers = torch.randint(-s, s + 1, (size,), dtype=torch.int16)
    packed = pack_bits(numbers, bits)
    assert (packed.dtype, len(packed)) == (torch.uint8, -(-size * bits // 8))
    assert torch.equal(unpack_bits(packed, bits, size), numbers)


# --- whole runs --------------------------------------------------------------------------------------------------


def sizes(result):
    model = result.model.state_dict()
    return sum(tensor.numel() for tensor in model.values())


def test_top_k_by_hand_in_a_round(go):
    """One client: w_1 - w_0 has k entries, the largest of FedAvg's, and the rest is kept."""
    one = {"clients": 1, "rounds": 1}
    before, whole = weights(go({}, **one, lr=1e-30)), weights(go({}, **one))
    result = go({"topk": {"fraction": 0.05}}, **one)
    sparse, state = weights(result), client_state(result, 0)["topk"]
    names = [name for name, _ in result.model.named_parameters()]
    moved = torch.cat([(whole[name] - before[name]).flatten() for name in names])
    sent = torch.cat([(sparse[name] - before[name]).flatten() for name in names])
    kept = torch.cat([state[name].flatten() for name in names])
    chosen = set(largest(moved, keep_count(len(moved), 0.05)).tolist())
    assert len(chosen.symmetric_difference(sent.nonzero().flatten().tolist())) <= 2  # w_0 from a rate of 1e-30
    torch.testing.assert_close(sent + kept, moved, atol=1e-6, rtol=1e-4)


def test_memory_reaches_the_model_in_later_rounds(go):
    with_memory, without = (go({"topk": {"fraction": 0.02, "error_feedback": on}}, rounds=4) for on in (True, False))
    assert model_bytes(with_memory) != model_bytes(without)
    assert client_state(without, 0) == {}


@pytest.mark.parametrize(
    ("plugin", "each"),
    [
        ({"topk": {"fraction": 0.01}}, lambda n: 8 * keep_count(n, 0.01)),
        ({"qsgd": {"bits": 2, "bucket": 100}}, lambda n: -(-n // 4) + 4 * -(-n // 100)),
        ({"qsgd": {}}, lambda n: -(-n // 2) + 4 * -(-n // 512)),
    ],
)
def test_the_ledger_shows_the_bytes_that_were_sent(go, plugin, each):
    result = go(plugin)
    for line in records(result):
        assert line["bytes"]["up"] == line["accepted"] * each(sizes(result))
        assert line["bytes"]["down"] == line["accepted"] * 4 * sizes(result)


def test_both_train_beside_rules_that_see_whole_models(go):
    for plugins in ({"topk": {}, "median": {}}, {"qsgd": {}, "norm-clip": {}}, {"topk": {}, "feddyn": {}}):
        assert all(line["failures"] == [] for line in records(go(plugins)))


def test_frozen_parameters_are_not_in_the_vector(go):
    result = go({"topk": {}, FrozenEncoder: {}}, rounds=2)
    assert all(line["failures"] == [] for line in records(result))
    first, second = (line["bytes"]["up"] for line in records(result))
    assert second < first


class SetsFrozenHead(Plugin):
    """Freezes the classifier and puts other values in its place as it goes up, as FedCP does with its head."""

    @hookimpl
    def begin_local(self, client):
        client.freeze(["classifier.*"])

    @hookimpl
    def pre_upload(self, client, update):
        return replace(update, model={**update.model, "classifier.bias": torch.full((10,), 3.0)})


@pytest.mark.parametrize("plugin", ["topk", "qsgd"])
def test_a_frozen_parameter_that_another_plugin_changed_goes_up_as_it_is(go, plugin):
    result = go({SetsFrozenHead: {}, plugin: {}}, rounds=2)
    assert all(line["failures"] == [] for line in records(result))
    found, untouched = weights(result), weights(go({}, lr=1e-30))
    assert found["classifier.bias"].tolist() == [3.0] * 10
    torch.testing.assert_close(found["classifier.weight"], untouched["classifier.weight"])
    assert not all(torch.allclose(found[name], w) for name, w in untouched.items() if name.startswith("encoder."))


@pytest.mark.parametrize("plugins", [{"topk": {}, "qsgd": {}}, {"topk": {}, "local-dp": {}}])
def test_what_is_refused(go, plugins):
    with raises(PluginConflictError):
        go(plugins)


class StartsClassifier(Plugin):
    """Clients start from a classifier of its own, as FedBuff's and IFCA's do."""

    starts = ("classifier.*",)

    @hookimpl
    def begin_local(self, client):
        return None


class StartsOwnClassifier(StartsClassifier):
    """The classifier stays on the clients, as FedPAC's does: it is not compressed."""

    @hookimpl
    def personal_parameters(self):
        return ["classifier.*"]


@pytest.mark.parametrize("plugin", ["topk", "qsgd"])
def test_clients_that_start_from_another_model_are_refused(go, plugin):
    with raises(PluginConflictError, f"'{plugin}'", "'startsclassifier'", "'classifier.weight'"):
        go({plugin: {}, StartsClassifier: {}})
    assert records(go({plugin: {}, StartsOwnClassifier: {}}))[0]["failures"] == []


class KeepsAll(Plugin):
    """Every parameter stays on its client."""

    @hookimpl
    def personal_parameters(self):
        return ["*"]


@pytest.mark.parametrize("plugin", ["topk", "qsgd"])
def test_a_run_in_which_nothing_goes_up_is_refused(go, plugin):
    with raises(PluginConflictError, plugin):
        go({plugin: {}, KeepsAll: {}})


class SharesTheEncoder(Plugin):
    """Odd clients train their own classifier only, as FedPAC's stragglers do."""

    @hookimpl
    def personal_parameters(self):
        return ["classifier.*"]

    @hookimpl
    def begin_local(self, client):
        if client.id % 2:
            client.freeze(["encoder.*"])


@pytest.mark.parametrize("plugin", ["topk", "qsgd"])
def test_a_client_that_trains_nothing_shared_sends_an_empty_vector(go, plugin):
    result = go({plugin: {}, SharesTheEncoder: {}}, clients=3, rounds=2)
    assert [(line["accepted"], line["failures"]) for line in records(result)] == [(3, []), (3, [])]


def test_a_hostile_payload_is_rejected(go):
    class Lies(TopK):
        @hookimpl
        def pre_upload(self, client, update):
            sent = super().pre_upload(client, update)
            if client.id != 1:
                return sent
            wrong = sent.payload["indices"] + 10_000_000
            return replace(sent, payload={**sent.payload, "indices": wrong})

    (failure,) = records(go({Lies: {}}, rounds=1))[0]["failures"]
    assert (failure["client"], failure["kind"]) == (1, "rejected")
    assert "are not positions" in failure["message"]
