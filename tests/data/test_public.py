"""Public samples: taken out before the split, or another data set; the same on server, clients and workers."""

from __future__ import annotations

import pytest
import torch

from fedcore import ConfigError, Plugin, RunConfig, hookimpl
from fedcore.base.identity import digest
from fedcore.client.messages import ClientSite
from fedcore.data.dataset import data_digest
from fedcore.runs.resolve import resolve_config, resolve_partition
from fedcore_testing import partition_of
from fedcore_workers import pack_site, unpack_site
from tests.sentences import raises
from tests.support import client_state, committed, lines, model_bytes


class Uses(Plugin):
    """Keeps what it sees of the public samples on both sides."""

    reads = ("public",)

    @hookimpl
    def check_run(self, setup):
        assert len(setup.public) == len(setup.public.labels)

    @hookimpl
    def begin_round(self, server):
        server.state["seen"] = server.public.inputs(torch.tensor([3, 0]))
        server.state["labels"] = server.public.labels

    @hookimpl
    def begin_local(self, client):
        client.state["seen"] = client.public.inputs(torch.tensor([3, 0]))
        client.state["labels"] = client.public.labels


def resolved(**options):
    config, dataset = resolve_config(RunConfig(dataset="digits", clients=4, workers=0, **options))
    return config, dataset, resolve_partition(config, dataset)


@pytest.mark.parametrize("options", [{}, {"samples": 500}, {"client_test_fraction": 0.2}])
def test_a_share_is_no_clients_and_in_proportion_to_the_classes(options):
    _, dataset, partition = resolved(public=0.1, partition="iid", **options)
    public = dataset.public
    held = torch.cat([partition.train.positions, partition.test.positions])
    assert len(public) == 144
    assert not torch.isin(public.rows, held).any()
    assert len(held) == options.get("samples", 1437 - 144)
    counts = torch.bincount(public.labels, minlength=10)
    assert counts.min() >= 13
    assert partition.info["public"] == 144
    assert resolved(public=0.1, partition="iid", **options)[2].sha256 == partition.sha256
    assert resolved(public=0.1, partition="iid", seed=1, **options)[1].public.rows.tolist() != public.rows.tolist()


def test_without_public_nothing_changes():
    config, dataset, partition = resolved()
    assert dataset.public is None
    assert "public" not in partition.info
    assert digest(config) != digest(config.model_copy(update={"public": "0.1"}))


@pytest.mark.parametrize("public", ["0.2", "digits"])
def test_server_clients_and_workers_see_the_same(go, public):
    result = go(Uses, public=public)
    assert lines(result)[0]["failures"] == []
    server = committed(result).plugins["uses"]
    for client in range(4):
        own = client_state(result, client)["uses"]
        assert torch.equal(own["seen"], server["seen"])
        assert torch.equal(own["labels"], server["labels"])
    assert len(server["labels"]) == (287 if public == "0.2" else 1437)
    assert int(partition_of(result).train.sizes.sum()) == 1437 - (287 if public == "0.2" else 0)


@pytest.mark.parametrize("public", ["0.2", "digits"])
def test_workers_rebuild_them(tmp_path, public):
    config, dataset, partition = resolved(public=public)
    spec = unpack_site(pack_site(ClientSite(config, dataset, partition, tmp_path)))
    ours, theirs = dataset.public, spec.dataset.public
    positions = torch.arange(len(ours))
    assert torch.equal(ours.inputs(positions), theirs.inputs(positions))
    assert torch.equal(ours.labels, theirs.labels)


@pytest.mark.slow
@pytest.mark.parametrize("public", ["0.2", "digits"])
def test_worker_processes_give_the_same_bits(go, public):
    one, two = go(Uses, public=public), go("fedavg", public=public, workers=2)
    assert model_bytes(one) == model_bytes(two)


def test_another_data_set_is_part_of_what_a_run_is_bound_to():
    plain, other = resolved()[1], resolved(public="digits")[1]
    assert data_digest(plain) != data_digest(other)
    assert data_digest(plain) == data_digest(resolved(public="0.1")[1])  # bound by the option and the partition


def test_what_is_refused(go, tmp_path):
    with raises(ConfigError, "'uses'", "--public", "0.1"):
        go(Uses)
    with raises(ConfigError, "30"):
        go(Uses, public="breast-cancer")
    for share in (0, 1, 1.5, "-0.1"):
        with raises(ConfigError, "--public", "0", "1"):
            RunConfig.create({"public": share})
    *_, partition = resolved()
    partition.save(tmp_path / "split.json")
    with raises(ConfigError, "144"):
        resolved(public=0.1, partition=str(tmp_path / "split.json"))
    *_, apart = resolved(public=0.1, seed=3)
    apart.save(tmp_path / "apart.json")
    assert resolved(public=0.1, seed=3, partition=str(tmp_path / "apart.json"))[2].sha256 == apart.sha256
