"""Clients that hold data and states of their own: the server knows their sizes, and the bits are the same."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from fedcore import RunConfig
from fedcore.base.errors import ConfigError, DataError
from fedcore.cli.app import app
from fedcore.client.messages import ClientFailure, ClientSite
from fedcore.data import Partition, TensorSamples, load_dataset, load_partition, make_partition
from fedcore.engines.in_process import InProcessEngine
from fedcore.runs import api, training
from fedcore.runs.directory import RunDirectory
from fedcore_testing import federate, model_bytes
from fedcore_testing.federation import small_config
from fedcore_testing.problems import few_digits
from tests.sentences import raises
from tests.support import brief

CLIENTS = 3
METHODS = ["moon", "fedcme", "fedeccr", "ditto", "fedper", "fedcd"]
SETTINGS = {
    "dataset": few_digits,
    "client_test_fraction": 0.25,
    "participation": 0.7,
    "rounds": 3,
    "local_epochs": 2,
    "batch_size": 16,
}


class Organisations:
    """An engine of clients each of which sees a data set and a folder of its own."""

    workers = 1

    def __init__(self, spec: ClientSite, dealt: Partition, folder) -> None:
        whole = few_digits()
        self.engines = []
        for client in range(dealt.num_clients):
            held = torch.cat([dealt.train[client], dealt.test[client]])
            own = TensorSamples(whole.train.gather(held), whole.train.labels[held])
            train, test = ([[]] * dealt.num_clients for _ in range(2))
            train[client] = range(len(dealt.train[client]))
            test[client] = range(len(dealt.train[client]), len(held))
            dataset = replace(whole, name="own", train=own, test=own)
            partition = Partition(train, test, spec.partition.info)
            self.engines.append(InProcessEngine(ClientSite(spec.config, dataset, partition, folder / str(client))))

    def share(self, key, payload):
        for engine in self.engines:
            engine.share(key, payload)

    def unshare(self, key):
        for engine in self.engines:
            engine.unshare(key)

    def run(self, tasks, *, window=None):
        for task in tasks:
            yield from self.engines[task.client].run([task])

    def close(self):
        for engine in self.engines:
            engine.close()


def dealt(seed=0):
    fraction = SETTINGS["client_test_fraction"]
    return make_partition(few_digits(), RunConfig(clients=CLIENTS, client_test_fraction=fraction, seed=seed))


def declared(parts):
    return Partition.declared(parts.train.sizes.tolist(), parts.test.sizes.tolist(), "digits")


def own_data(folder, *plugins, engine=Organisations, **options):
    folder.mkdir(exist_ok=True)
    config = small_config(folder, *plugins, **{**SETTINGS, **options})
    parts = dealt()
    make = functools.partial(engine, dealt=parts, folder=folder / "organisations")
    return api.run(config, engine=make, partition=declared(parts))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("moon", "fedcme") else pytest.mark.slow) for name in METHODS]
)
def test_the_bits_are_those_of_one_machine(tmp_path, name):
    """Clients with state, an exchange, statistics, own models and personal parameters."""
    here = federate(tmp_path, brief(name), **SETTINGS)
    there = own_data(tmp_path / "there", brief(name))
    assert model_bytes(there) == model_bytes(here)
    assert not list((there.directory / "clients").glob("*"))
    for protocol in ("global", "global_local", "personal"):
        assert there.metrics.get(protocol) == here.metrics.get(protocol)


def test_nobody_is_asked_about_a_test_set_that_only_the_server_has(tmp_path):
    assert "personal_global" in federate(tmp_path, "ditto", **SETTINGS).metrics
    assert "personal_global" not in own_data(tmp_path / "there", "ditto").metrics


def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path):
    whole = own_data(tmp_path / "whole", "moon")

    class Stops(Organisations):
        def run(self, tasks, *, window=None):
            for task in tasks:
                if task.round == 2:
                    raise KeyboardInterrupt
                yield from super().run([task])

    with pytest.raises(training.Interrupted):
        own_data(tmp_path / "stopped", "moon", engine=Stops)
    (stopped,) = [path.parent for path in (tmp_path / "stopped").rglob("config.yaml")]
    make = functools.partial(Organisations, dealt=dealt(), folder=tmp_path / "stopped" / "organisations")
    resumed = api.resume(stopped, engine=make, allow_code=True)
    assert model_bytes(resumed) == model_bytes(whole)


def test_a_client_whose_disk_lost_its_state_is_named_and_the_others_go_on(tmp_path):
    class Forgetful(Organisations):
        def run(self, tasks, *, window=None):
            for task in tasks:
                if task.client == 1 and task.version is not None:
                    yield task, ClientFailure("raised", "its state is lost")
                else:
                    yield from super().run([task])

    result = own_data(tmp_path, "moon", engine=Forgetful, participation=1.0)
    records = [line for line in RunDirectory(result.directory).metrics.read() if line["round"]]
    assert [[failure["client"] for failure in record["failures"]] for record in records] == [[1], [1]]


def test_a_local_engine_is_refused_what_it_cannot_reach(tmp_path):
    result = own_data(tmp_path, "moon")
    assert api.load_run(result.directory, allow_code=True).summary == result.summary  # this only reads
    for command in ("resume", "evaluate"):
        outcome = CliRunner().invoke(app, [command, str(result.directory), "--allow-code"])
        assert outcome.exit_code == 2
        assert "fedcore federate server --resume" in " ".join(outcome.output.split())
    before = set(tmp_path.rglob("*"))
    with raises(ConfigError):
        api.run(small_config(tmp_path), partition=declared(dealt()))
    assert [path for path in set(tmp_path.rglob("*")) - before if path.is_file()] == []


def test_clients_and_partition_have_to_be_as_many(tmp_path):
    with raises(ConfigError, "4", "3"):
        api.run(small_config(tmp_path), clients=4, partition=declared(dealt()))


def test_a_declared_partition_is_written_and_read(tmp_path):
    digits = load_dataset("digits", None)
    partition = Partition.declared([5000, 1, 3], [0, 2, 1], "digits")
    partition.save(tmp_path / "partition.json")
    read = load_partition(tmp_path / "partition.json", digits)
    assert read.is_declared
    assert read.sha256 == partition.sha256
    assert (read.train.sizes.tolist(), read.test.sizes.tolist()) == ([5000, 1, 3], [0, 2, 1])
    Partition.declared([3, 0], [1, 1], "digits").save(tmp_path / "none.json")
    with raises(DataError, "1"):
        load_partition(tmp_path / "none.json", digits)
