"""Each attack by hand, who is malicious, what the record says, and runs with other methods."""

from __future__ import annotations

from statistics import NormalDist

import pytest
import torch

from fedcore import ConfigError, Plugin, PluginConflictError, RunConfig, hookimpl, question
from fedcore_attacks import (
    AttackOptions,
    alie,
    alie_z,
    flipped_labels,
    inflated_payload,
    inner_product_manipulation,
    malicious_clients,
    most_spread,
    scaled_payload,
    swapped_payload,
    triggered,
)
from fedcore_testing import RejectsRound1, federations, interrupted, model_bytes, records
from tests.sentences import raises, warns

SIZE = {"clients": 5, "rounds": 2, "participation": 1.0, "local_epochs": 1, "batch_size": 64, "partition": "iid"}
go = federations(**SIZE)
KINDS = ["label-flip", "backdoor", "sign-flip", "scale", "noise", "alie", "ipm", "mimic", "replacement", "payload-flip"]
SEEN: dict[str, list] = {}


class Spy(Plugin):
    """Keeps what the server is given, and the samples of each client."""

    @hookimpl
    def observe(self, step):
        SEEN.setdefault("steps", []).append((step.client.id, step.indices.clone(), step.x.clone(), step.y.clone()))

    @hookimpl
    def pre_upload(self, client, update):
        SEEN.setdefault("sent", []).append((client.round, client.id, _vector(update.model)))

    @hookimpl
    def pre_aggregate(self, server, update):
        SEEN.setdefault("start", []).append(_vector(server.model))
        SEEN.setdefault("got", []).append((server.round, update.client, _vector(update.model)))


def _vector(model):
    return torch.cat([tensor.detach().double().flatten() for tensor in model.values()])


def watched(go, **options):
    """Run one round with an attack; return by client the update that it computed and the one that arrived."""
    SEEN.clear()
    go({"attack": options, Spy: {}}, rounds=1)
    start = SEEN["start"][0]
    computed = {client: vector - start for _, client, vector in SEEN["sent"]}
    return computed, {client: vector - start for _, client, vector in SEEN["got"]}


# --- equations -----------------------------------------------------------------------------------------------


def test_labels_by_hand():
    labels = torch.tensor([0, 3, 3, 9])
    assert flipped_labels(labels, 10).tolist() == [9, 6, 6, 0]
    assert flipped_labels(labels, 10, 3, 1).tolist() == [0, 1, 1, 9]


def test_a_trigger_marks_the_corner_of_every_channel_and_leaves_its_argument():
    images = torch.zeros(2, 3, 5, 5)
    marked = triggered(images, 2, 7.0)
    assert marked.sum() == 2 * 3 * 4 * 7
    assert marked[1, 2, 3:, 3:].unique().tolist() == [7]
    assert images.sum() == 0
    assert triggered(torch.zeros(2, 4), 1, 7.0).tolist() == [[0, 0, 0, 7]] * 2


@pytest.mark.parametrize("inputs", [torch.zeros(2, 4, dtype=torch.int64), {"a text's tokens": 1}])
def test_a_trigger_needs_numbers(inputs):
    """On the server, too: the report of a run on texts ended in an AttributeError."""
    with raises(ValueError):
        triggered(inputs, 1, 7.0)


def test_alies_z_is_the_papers():
    """n = 50, m = 24: s = 2, (50 - 24 - 2) / 26 = 0.923, z = 1.43. n = 20, m = 4: s = 7, 9 / 16, z = 0.157."""
    assert alie_z(50, 24) == pytest.approx(1.4261, abs=1e-4)
    assert alie_z(20, 4) == pytest.approx(0.1573, abs=1e-4)
    assert alie_z(2, 1) > -4  # every client is outvoted: the quantile is bounded


def test_omniscient_updates_by_hand():
    honest = torch.tensor([[0.0, 2.0], [4.0, 2.0], [2.0, 2.0]])
    assert alie(honest, 2.0).tolist() == [2 - 2 * 2, 2]
    assert alie(honest[:1], 2.0).tolist() == [0, 2]
    assert inner_product_manipulation(honest, 0.5).tolist() == [-1, -1]
    assert most_spread(torch.tensor([[0.0, 0.1], [9.0, 0.0], [0.5, 0.0]])) == 1


def test_of_two_honest_clients_the_first_is_mimicked():
    """Both are as far from their mean: rounding chose, and with it the number of threads or the CPU."""
    stream = torch.Generator().manual_seed(0)
    assert {most_spread(torch.randn(2, 500, generator=stream)) for _ in range(100)} == {0}


def test_payloads_by_hand():
    sent = {"means": torch.tensor([[1.0], [-2.0]]), "covariances": torch.tensor([3.0]), "classes": torch.tensor([0, 2])}
    scaled = scaled_payload(sent, -10.0)
    assert scaled["means"].tolist() == [[-10], [20]]
    assert scaled["covariances"].tolist() == [300]
    assert scaled["classes"].tolist() == [0, 2]
    # Listed classes are renamed; without such a list the rows move.
    assert swapped_payload(sent, 3)["classes"].tolist() == [2, 0]
    assert swapped_payload(sent, 3, 2, 1)["classes"].tolist() == [0, 1]
    assert swapped_payload(sent, 3)["means"] is sent["means"]
    assert swapped_payload({"known": torch.tensor([True, False, False])}, 3)["known"].tolist() == [False, False, True]
    counts = {"counts": torch.tensor([[1, 0], [0, 3]]), "n": torch.tensor([1])}
    assert inflated_payload(counts, 2.5) == {"counts": pytest.approx(torch.tensor([[2, 0], [0, 8]])), "n": counts["n"]}


# --- model attacks in a run ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"kind": "sign-flip", "strength": 3.0}, lambda own, honest, evil: -3 * own),
        ({"kind": "scale"}, lambda own, honest, evil: 10 * own),
        ({"kind": "scale", "strength": 2.0, "collude": True}, lambda own, honest, evil: 2 * evil.mean(0)),
        ({"kind": "ipm"}, lambda own, honest, evil: -0.5 * honest.mean(0)),
        ({"kind": "alie", "strength": 1.5}, lambda own, honest, evil: honest.mean(0) - 1.5 * honest.std(0)),
    ],
)
def test_what_malicious_clients_send(go, options, expected):
    computed, arrived = watched(go, clients=[1, 4], **options)
    honest = torch.stack([computed[client] for client in (0, 2, 3)])
    evil = torch.stack([computed[client] for client in (1, 4)])
    for client in (0, 2, 3):
        assert torch.equal(arrived[client], computed[client])
    for client in (1, 4):
        torch.testing.assert_close(arrived[client], expected(computed[client], honest, evil), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("kind", ["alie", "ipm", "mimic"])
def test_a_round_of_malicious_clients_alone(go, kind):
    """As a small cohort can be. ALIE's z divided by the number of honest clients."""
    computed, arrived = watched(go, clients=[0, 1, 2, 3, 4], kind=kind)
    own = torch.stack([computed[client] for client in range(5)])
    z = NormalDist().inv_cdf(0.999)
    sent = {"alie": own.mean(0) - z * own.std(0), "ipm": -0.5 * own.mean(0)}
    for client in range(5):
        torch.testing.assert_close(arrived[client], sent.get(kind, computed[client]), atol=1e-5, rtol=1e-4)


def test_noise_has_its_deviation_and_is_common_if_they_collude(go):
    for collude in (False, True):
        computed, arrived = watched(go, kind="noise", strength=0.3, clients=[1, 4], collude=collude)
        own = torch.stack([computed[client] for client in (1, 4)])
        noise = torch.stack([arrived[client] for client in (1, 4)]) - (own.mean(0) if collude else own)
        assert noise.std(dim=1).tolist() == pytest.approx([0.3, 0.3], rel=0.05)
        assert torch.allclose(noise[0], noise[1], atol=1e-5) == collude


def test_mimics_send_what_one_honest_client_sent_in_every_round(go):
    SEEN.clear()
    go({"attack": {"kind": "mimic", "clients": [1, 4]}, Spy: {}})
    arrived = {(number, client): vector for number, client, vector in SEEN["got"]}
    victims = [
        [c for c in (0, 2, 3) if torch.equal(arrived[number, c], arrived[number, m])]
        for number in (0, 1)
        for m in (1, 4)
    ]
    assert len(victims[0]) == 1
    assert victims == [victims[0]] * 4


def test_a_replacement_is_scaled_by_the_weights_of_the_mean(go):
    computed, arrived = watched(go, kind="replacement", clients=[2])
    assert arrived[2].norm() / computed[2].norm() == pytest.approx(5, rel=0.02)  # five clients of about one size


# --- payload attacks in a run --------------------------------------------------------------------------------


class Sends(Plugin):
    """Sends means and counts of ten classes with an update and as an answer; the client's id tells them apart."""

    @question
    def own(self, client):
        means = torch.arange(10.0).unsqueeze(1) + 100 * client.id  # (10, 1)
        return {"means": means, "counts": torch.arange(10), "held": torch.arange(10) < 5}

    @hookimpl
    def begin_round(self, server):
        SEEN["answers"] = [(answer.client, dict(answer.tensors)) for answer in server.ask("all", self.own)]

    @hookimpl
    def end_local(self, client):
        return self.own(client)

    @hookimpl
    def accumulate(self, server, update):
        SEEN.setdefault("payloads", []).append((update.client, dict(update.payload)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("options", "means", "counts", "held"),
    [
        ({"kind": "payload-flip"}, lambda m: -m, lambda n: n, 5),
        ({"kind": "payload-scale"}, lambda m: 10 * m, lambda n: n, 5),
        ({"kind": "payload-swap"}, lambda m: m.flip(0), lambda n: n.flip(0), 5),
        ({"kind": "payload-swap", "names": "means"}, lambda m: m.flip(0), lambda n: n, 5),
        ({"kind": "payload-counts", "strength": 3.0}, lambda m: m, lambda n: 3 * n, 10),
        ({"kind": "payload-counts", "names": ["counts"]}, lambda m: m, lambda n: 10 * n, 5),
    ],
)
def test_what_malicious_clients_send_next_to_the_model_and_answer(go, options, means, counts, held):
    SEEN.clear()
    honest = model_bytes(go({Sends: {}}, rounds=1))
    SEEN.clear()
    assert model_bytes(go({"attack": {"clients": [1, 4], **options}, Sends: {}}, rounds=1)) == honest
    for found in (SEEN["answers"], SEEN["payloads"]):
        assert sorted(client for client, _ in found) == [0, 1, 2, 3, 4]
        for client, sent in found:
            true, evil = torch.arange(10.0).unsqueeze(1) + 100 * client, client in (1, 4)
            assert torch.equal(sent["means"], means(true) if evil else true)
            assert torch.equal(sent["counts"], counts(torch.arange(10)) if evil else torch.arange(10))
            assert int(sent["held"].sum()) == (held if evil else 5)


@pytest.mark.parametrize(
    ("plugins", "named"),
    [
        ({"attack": {"kind": "payload-flip"}}, ("payload-flip", "attack.kind")),
        (
            {"attack": {"kind": "payload-flip", "names": ["mean"]}, Sends: {}},
            ("attack.names=['mean']", "(counts, held, means)"),
        ),
    ],
)
def test_a_payload_attack_that_finds_nothing_says_so(go, plugins, named):
    with warns(RuntimeWarning, "attack", *named):
        go(plugins, rounds=1)


# --- data attacks in a run -----------------------------------------------------------------------------------


def test_labels_are_flipped_on_malicious_clients_only(go):
    SEEN.clear()
    go({Spy: {}}, rounds=1)
    plain = {(client, int(i)): int(y) for client, indices, _, ys in SEEN["steps"] for i, y in zip(indices, ys)}
    SEEN.clear()
    go({"attack": {"kind": "label-flip", "clients": 3}, Spy: {}}, rounds=1)
    for client, indices, _, ys in SEEN["steps"]:
        before = torch.tensor([plain[client, int(i)] for i in indices])
        assert torch.equal(ys, 9 - before if client == 3 else before)


def test_a_backdoor_marks_the_same_samples_in_every_round_from_its_start_on(go):
    SEEN.clear()
    go({"attack": {"kind": "backdoor", "clients": 3, "start": 2, "target": 7, "value": 5.0}, Spy: {}}, rounds=3)
    rounds, seen = [], set()
    for client, indices, x, y in SEEN["steps"]:
        if client != 3:
            assert (x != 5).all()
            continue
        if int(indices[0]) in seen:  # a new pass over the samples
            seen = set()
        if not seen:
            rounds.append(set())
        seen.update(indices.tolist())
        hit = (x.flatten(1) == 5).any(dim=1)
        assert (y[hit] == 7).all()
        rounds[-1].update(indices[hit].tolist())
    assert rounds[0] == set()
    assert rounds[1] == rounds[2]
    assert 0.3 < len(rounds[1]) / len(seen) < 0.7


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
def test_records_name_the_malicious_and_measure_the_attack(go, kind):
    result = go({"attack": {"kind": kind, "share": 0.4}}, eval_every=2)
    first, last = (record["reports"]["attack"] for record in records(result))
    assert len(last["malicious"]) == 2
    assert last["honest_loss"] > 0
    assert last["malicious_loss"] > 0
    assert ("success" in last) == (kind in ("label-flip", "backdoor", "replacement"))
    assert "success" not in first  # not evaluated
    assert result.history[-1].get("report.attack.success") == last.get("success")


def test_a_round_without_an_update_does_not_report_the_losses_of_the_round_before(go):
    result = go({"attack": {}, RejectsRound1: {}}, rounds=3, min_clients=0)
    assert ["honest_loss" in record["reports"]["attack"] for record in records(result)] == [True, False, True]


class KeepsTheClassifier(Plugin):
    """There is no global model."""

    @hookimpl
    def personal_parameters(self):
        return ["classifier.*"]


def test_without_a_global_model_the_report_says_why_it_has_no_success(go):
    result = go({"attack": {"kind": "label-flip"}, KeepsTheClassifier: {}}, rounds=1)
    report = records(result)[-1]["reports"]["attack"]
    assert "success" not in report
    assert report["success_reason"] == "no global model: parameters such as 'classifier.weight' stay on the clients"


@pytest.mark.slow
def test_a_replacement_succeeds_against_the_mean_and_fails_against_the_median(go):
    size = {"rounds": 4, "local_epochs": 3, "batch_size": 32}
    attack = {"kind": "replacement", "clients": [0]}
    broken = go({"attack": attack}, **size).history[-1]["report.attack.success"]
    held = go({"attack": attack, "median": {}}, **size).history[-1]["report.attack.success"]
    assert broken > 0.9 > 0.3 > held


class Peeks(Plugin):
    """A defence that looks for the attack in what it is given."""

    @hookimpl
    def pre_aggregate(self, server, update):
        SEEN.setdefault("names", []).append((sorted(server.state), sorted(update.payload)))


def test_a_defence_does_not_see_who_is_malicious(go):
    SEEN.clear()
    go({"attack": {"kind": "sign-flip"}, Peeks: {}})
    assert set(map(str, SEEN["names"])) == {"([], [])"}


# --- who, options and company --------------------------------------------------------------------------------


def test_malicious_clients_are_drawn_from_the_seed():
    options = AttackOptions(kind="noise", share=0.2)
    drawn = [malicious_clients(RunConfig(clients=20, seed=seed), options) for seed in range(20)]
    assert {len(ids) for ids in drawn} == {4}
    assert len(set(drawn)) > 15
    assert malicious_clients(RunConfig(clients=20), AttackOptions(kind="noise", clients=[1, 4])) == {1, 4}
    assert len(malicious_clients(RunConfig(clients=4), AttackOptions(share=0.1))) == 1, "a share is no silent none"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["backdoor", "noise", "mimic"])
def test_seeds_and_resumed_runs_have_the_same_bits(go, tmp_path, kind):
    options = {"attack": {"kind": kind}}
    size = {**SIZE, "rounds": 3}
    straight = model_bytes(go(options, **size))
    assert straight == model_bytes(go(options, **size, workers=2))
    assert straight != model_bytes(go(options, **size, seed=1))
    assert straight == model_bytes(interrupted(tmp_path, ("attack", options["attack"]), after=1, **size))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kind": "noise", "clients": [5]}, ("0", "4")),
        ({"kind": "backdoor", "target": 10}, ("0", "9")),
        ({"kind": "label-flip", "source": 0}, ("0",)),
        ({"kind": "backdoor", "source": 3}, ()),
        ({"kind": "payload-swap", "target": 7}, ("attack.source",)),
    ],
)
def test_options_without_a_meaning_are_refused(go, options, named):
    with raises(ConfigError, *named):
        go({"attack": options})


@pytest.mark.sampled(4)
@pytest.mark.parametrize("other", ["scaffold", "moon", "fedproc", "krum", "norm-clip", "feddyn"])
@pytest.mark.parametrize("kind", ["backdoor", "alie"])
def test_next_to_other_methods(go, other, kind):
    pytest.importorskip(f"fedcore_{ {'krum': 'robust', 'norm-clip': 'robust'}.get(other, other) }")
    more = {"projection": True} if other in ("moon", "fedproc") else {}
    result = go({"attack": {"kind": kind}, other: {}}, **more)
    assert [record["accepted"] for record in records(result)] == [5, 5]


def test_a_model_attack_needs_a_model_that_travels(go):
    pytest.importorskip("fedcore_fedproto")
    pytest.importorskip("fedcore_fedbn")
    with raises(PluginConflictError, "'attack'", "'fedproto'"):
        go({"attack": {}, "fedbn": {}, "fedproto": {}})  # FedBN keeps nothing of this model
    go({"attack": {"kind": "payload-flip"}, "fedproto": {}}, client_test_fraction=0.2)


@pytest.mark.parametrize("other", ["fedbuff", "ifca"])
def test_a_model_attack_needs_the_clients_start(go, other):
    """It sends w_t - (y - w_t). A client that started from another model than w_t has not moved by y - w_t."""
    pytest.importorskip(f"fedcore_{other}")
    with raises(PluginConflictError):
        go({"attack": {}, other: {}})
    go({"attack": {"kind": "label-flip"}, other: {}}, client_test_fraction=0.2)


def test_next_to_encoded_uploads(go):
    pytest.importorskip("fedcore_compress")
    go({"attack": {"kind": "label-flip"}, "topk": {}})
    with raises(PluginConflictError):
        go({"attack": {"kind": "alie"}, "topk": {}})
