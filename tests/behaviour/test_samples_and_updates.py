"""Hooks that change a client's samples, that see all updates of a round, and figures from the test samples."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedcore import Plugin, PluginContractError, RunConfig, hookimpl
from fedcore.data.client_data import ClientData
from fedcore.data.images import ResidentSamples
from fedcore_testing import federate, model_bytes, records
from tests.sentences import raises

SIZE = {"rounds": 2, "clients": 4, "participation": 1.0, "local_epochs": 1, "batch_size": 64, "partition": "iid"}
SEEN: dict[str, list] = {}


class Relabels(Plugin):
    """Every client but 0 holds class 3 only, of inputs that are all 0.5; notes what hooks and questions see."""

    @hookimpl
    def local_samples(self, client, samples):
        assert isinstance(client.config, RunConfig)
        if client.id == 0:
            return None
        inputs = samples.inputs(torch.arange(len(samples), device=client.device))
        return samples.changed(inputs=torch.full_like(inputs, 0.5), labels=torch.full_like(samples.labels, 3))

    @hookimpl
    def observe(self, step):
        SEEN.setdefault("steps", []).append((step.client.id, step.x.unique().tolist()[:2], step.y.unique().tolist()))

    @hookimpl
    def end_local(self, client):
        _, _, labels = client.forward()
        SEEN.setdefault("counts", []).append((client.id, client.class_counts.tolist(), labels.unique().tolist()))


class Shifts(Plugin):
    """Adds 1 to each label that the plugin before left."""

    @hookimpl
    def local_samples(self, client, samples):
        return samples.changed(labels=(samples.labels + 1) % 10)


@pytest.mark.parametrize(("plugins", "label"), [((Relabels,), 3), ((Relabels, Shifts), 4)])
def test_the_whole_client_works_on_changed_samples(tmp_path, plugins, label):
    SEEN.clear()
    federate(tmp_path, *plugins, **SIZE)
    for client, values, labels in SEEN["steps"]:
        assert (labels == [label] and values == [0.5]) == (client != 0)
    for client, counts, labels in SEEN["counts"]:
        assert (counts[label] == sum(counts) and labels == [label]) == (client != 0)


def test_changed_samples_keep_their_number_and_are_augmented():
    class Doubles:
        def draw(self, n, generator):
            return torch.full((n, 1), 2.0)

        def apply(self, x, drawn, mean, std):
            return x * drawn[:, :, None, None]

    samples = ResidentSamples(torch.ones(4, 1, 1, 1), torch.arange(4), [0.0], [1.0])
    data = ClientData(samples, torch.tensor([1, 3]), torch.device("cpu"), Doubles())
    with raises(ValueError, "2"):
        data.changed(labels=torch.zeros(3, dtype=torch.int64))
    changed = data.changed(inputs=torch.full((2, 1, 1, 1), 5.0)).changed(labels=torch.tensor([7, 8]))
    (batch,) = changed.batches(torch.tensor([1, 0]), 2, torch.Generator)
    assert batch.labels.tolist() == [8, 7]
    assert changed.inputs_of(batch).flatten().tolist() == [10, 10]
    assert changed.inputs(torch.tensor([0])).item() == 5
    assert data.labels.tolist() == [1, 3]


class Neutral(Plugin):
    @hookimpl
    def local_samples(self, samples):
        return samples.changed(inputs=samples.inputs(torch.arange(len(samples))), labels=samples.labels)

    @hookimpl
    def all_updates(self, updates):
        SEEN["updates"] = [update.client for update in updates]
        return updates


def test_hooks_that_change_nothing_change_no_bit(tmp_path):
    assert model_bytes(federate(tmp_path, Neutral, **SIZE)) == model_bytes(federate(tmp_path, **SIZE))
    assert sorted(SEEN["updates"]) == [0, 1, 2, 3]


class Copies(Plugin):
    """Every client sends what client 0 sent; client 3 sends nan."""

    @hookimpl
    def all_updates(self, server, updates):
        (first,) = [update for update in updates if update.client == 0]
        broken = {name: tensor * torch.nan for name, tensor in first.model.items()}
        return [replace(u, model=broken if u.client == 3 else first.model) for u in updates]

    @hookimpl
    def accumulate(self, server, update):
        SEEN.setdefault("model", []).append(next(iter(update.model.values())))


def test_replaced_updates_are_checked_and_added(tmp_path):
    SEEN.clear()
    result = federate(tmp_path, Copies, **{**SIZE, "rounds": 1})
    (record,) = records(result)
    assert [failure["client"] for failure in record["failures"]] == [3]
    assert all(torch.equal(tensor, SEEN["model"][0]) for tensor in SEEN["model"])


class Invents(Plugin):
    @hookimpl
    def all_updates(self, updates):
        return [replace(updates[0], client=77)]


def test_an_update_of_a_client_that_sent_none_is_refused(tmp_path):
    with raises(PluginContractError, "77"):
        federate(tmp_path, Invents, **SIZE)


class Figures(Plugin):
    """Its report is the accuracy on the test samples."""

    @hookimpl
    def report(self, server):
        test = server.test
        logits = server.network()(test.inputs(torch.arange(len(test)))).logits
        return {"accuracy": (logits.argmax(dim=1) == test.labels).double().mean().item()}


class Peeks(Plugin):
    @hookimpl
    def end_round(self, server):
        return server.test


def test_a_report_computes_figures_from_the_test_samples(tmp_path):
    result = federate(tmp_path, Figures, **SIZE)
    expected = result.metrics["global"]["accuracy"]
    assert records(result)[-1]["reports"]["figures"]["accuracy"] == pytest.approx(expected)


def test_no_other_hook_sees_the_test_samples(tmp_path):
    with raises(PluginContractError, "server.test"):
        federate(tmp_path, Peeks, **SIZE)
