"""Rounds with packed messages, without Flower: the bits are the same if messages are lost, repeated or refused."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from typer.testing import CliRunner

import fedcore
from fedcore import ConfigError, DataError, FedcoreError, RunConfig, RunDirectoryError
from fedcore.data import Dataset, Partition, TensorSamples, load_dataset, make_partition
from fedcore.engines import ClientFailure, ClientRuntime, ClientTask
from fedcore.tools import RECORDED, RunDirectory
from fedcore_flower import wire
from fedcore_flower.agreement import (
    Setup,
    check_data,
    describe_run,
    own_config,
    read_setup,
    versions_of,
)
from fedcore_flower.commands import app
from fedcore_flower.conditions import TrainerOptions
from fedcore_flower.courier import LostMessage, Request
from fedcore_flower.engine import FederationEngine
from fedcore_flower.handler import RequestHandler, _Run
from fedcore_flower.history import History
from fedcore_flower.keys import make_keys
from fedcore_flower.members import Member, Members
from fedcore_flower.own_data import OwnData, _public
from fedcore_flower.server import ServerOptions, _check_config, _sizes, start
from fedcore_testing import check_engine, federate, model_bytes
from fedcore_zoo import Cells, Recipe, TableSamples
from tests.sentences import raises


def _helpers():
    spec = importlib.util.spec_from_file_location("organisations", Path(__file__).with_name("organisations.py"))
    module = sys.modules.setdefault("organisations", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


helpers = _helpers()
Here, NAMES, SETTINGS, RUN = helpers.Here, helpers.NAMES, helpers.SETTINGS, helpers.RUN
# fedamp and fedbuff send different tensors to each client.
METHODS = [
    ("fedcme",),
    *(pytest.param(plugins, marks=pytest.mark.slow) for plugins in ((), ("moon",), ("fedcd",), ("fedeccr",))),
    *(pytest.param(plugins, marks=pytest.mark.slow) for plugins in (("fedamp",), ("fedbuff",))),
]


def records(result):
    return [line for line in RunDirectory(result.directory).metrics.read() if "round" in line]


def failed(result):
    return [[(failure["client"], failure["kind"]) for failure in record["failures"]] for record in records(result)]


# The same bits


@pytest.mark.parametrize("plugins", METHODS, ids=lambda plugins: "-".join(plugins) or "fedavg")
def test_the_bits_are_those_of_one_machine(tmp_path, plugins):
    here = federate(tmp_path, *plugins, **SETTINGS)
    there = helpers.run_over(Here(helpers.make_handlers(tmp_path / "own")), tmp_path / "there", *plugins)
    assert model_bytes(there) == model_bytes(here)
    for protocol in ("global", "global_local", "personal"):
        assert there.metrics.get(protocol) == here.metrics.get(protocol)


@pytest.mark.parametrize("task", ["regression", "regression-l1"])
def test_the_bits_of_another_task_are_those_of_one_machine(tmp_path, monkeypatch, task):
    """The clients' digits are numbers to predict, standardised by the server's own training labels."""
    tasks = pytest.importorskip("fedcore_tasks", reason="fedcore-tasks is not installed here")
    there = helpers.run_over(Here(helpers.make_handlers(tmp_path / "own")), tmp_path / "there", task=task)
    monkeypatch.setattr(tasks.Regression, "fitted", lambda self, labels: self)
    config, parts = helpers.small_config(tmp_path, **SETTINGS, task=task), helpers.dealt()
    info = make_partition(load_dataset("digits", None, task), config).info
    here = fedcore.run(config, partition=Partition(parts.train, parts.test, info))
    assert model_bytes(there) == model_bytes(here)
    for protocol in ("global", "global_local"):
        assert there.metrics[protocol] == here.metrics[protocol]
    assert 0 < there.metrics["global_local"]["rmse"] < 4


def test_labels_of_another_task_are_refused_with_the_one_that_they_fit(tmp_path):
    pytest.importorskip("fedcore_tasks", reason="fedcore-tasks is not installed here")
    config, dataset = helpers.resolved(tmp_path, task="regression")
    _, _, header = wire.unpack({"setup": helpers.setups_for(config, dataset)[1]}, "setup")
    setup = Setup.model_validate(header["setup"])
    assert setup.form.keys() == {"width", "flat", "mean", "std"}
    data, config = helpers.own_data(0), accepted(setup)
    assert data.site(config, setup, tmp_path).dataset.task.form == setup.form
    with raises(DataError, "--task classification"):
        data.site(config, setup.model_copy(update={"task": "survival"}), tmp_path)
    for form in ({}, {**setup.form, "mean": "high"}, {**setup.form, "std": None}):
        with pytest.raises(ConfigError, match="description of the run is not valid: form"):
            data.site(config, setup.model_copy(update={"form": form}), tmp_path)
    wider = {"form": {"width": 3, "flat": False, "mean": [0.0] * 3, "std": [1.0] * 3}, "num_classes": 3}
    with raises(DataError, "()", 3, "'regression'"):
        data.site(config, setup.model_copy(update=wider), tmp_path)


def test_what_is_for_one_client_goes_to_that_client_alone(tmp_path):
    """FedAMP's mixtures travel with the tasks of their clients and not with the shared payload."""
    link = Sizes(helpers.make_handlers(tmp_path / "own"))
    result = helpers.run_over(link, tmp_path / "run", "fedamp")
    model = sum(tensor.nbytes for tensor in result.model.state_dict().values())
    assert [sorted(link.tasks[round].values()) for round in (0, 1, 2)] == [[0, 0, 0], [model] * 3, [model] * 3]


def test_public_samples_are_a_data_set_that_server_and_clients_have(tmp_path):
    settings = {**SETTINGS, "public": "digits"}
    here = federate(tmp_path, "feddf", **settings)
    there = helpers.run_over(
        Here(helpers.make_handlers(tmp_path / "own")), tmp_path / "there", "feddf", public="digits"
    )
    assert model_bytes(there) == model_bytes(here)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("npz:/etc/samples.npz", "--public"),
        ("module:os.system", "--public"),
        ("0.1", "dataset"),
        ("digits", "[1, 9, 9]"),
    ],
)
def test_a_client_s_public_samples_are_an_installed_data_set_that_fits(tmp_path, name, named):
    setup = setup_of(tmp_path, "feddf", public="digits")
    data, config = helpers.own_data(0), accepted(setup)
    public = data.site(config, setup, tmp_path).dataset.public
    assert torch.equal(public.inputs(torch.arange(5)), load_dataset("digits", None).train.gather(torch.arange(5)))
    if name == "digits":
        setup = setup.model_copy(update={"input_shape": [1, 9, 9]})
    with raises(ConfigError, f"'{name}'", named):
        _public(name, setup, None)


@pytest.mark.parametrize("normalize", ["as-loaded", "global"])
def test_a_client_s_public_samples_are_normalised_as_the_server_s(tmp_path, normalize):
    """With --normalize global they had their data set's own numbers at the clients, and the run's at the server."""
    setup, train = setup_of(tmp_path, "feddf", public="digits"), load_dataset("digits").train
    config = {**setup.config, "normalize": normalize}
    setup = setup.model_copy(update={"config": config, "normalisation": [[0.4], [0.2]]})
    public = helpers.own_data(0).site(accepted(setup), setup, tmp_path).dataset.public
    rows = torch.arange(5)
    expected = train.gather(rows)
    if normalize == "global":
        expected = (expected * torch.tensor(train.std) + torch.tensor(train.mean) - 0.4) / 0.2
    torch.testing.assert_close(public.inputs(rows), expected, atol=1e-5, rtol=0)


def test_a_round_s_payload_goes_once_to_each_client(tmp_path):
    link = Here(helpers.make_handlers(tmp_path / "own"))
    helpers.run_over(link, tmp_path / "run", "fedcme")
    tasks = [blobs for _, op, blobs in link.log if op == "task"]
    assert sum("setup" in blobs for blobs in tasks) == 3, "each gets the description of the run once, when it asks"
    # Each of three rounds has two halves and an evaluation; the second halves have no payload. The first task of each
    # client is sent again, with the parts that the client asks for.
    assert len(tasks) == 3 * 3 * 3 + 3
    assert sum("shared" in blobs for blobs in tasks) == 2 * 3 * 3 + 3


def test_a_share_of_the_clients_own_samples_cannot_be_public():
    with raises(ConfigError, "--public", "0.1"):
        _check_config(RunConfig(public="0.1"))
    assert _check_config(RunConfig(public="digits")).public == "digits"


class Sizes(Here):
    """Records the bytes of a training task's own tensors, by round and client."""

    def __init__(self, handlers):
        super().__init__(handlers)
        self.tasks = {}

    def deliver(self, client, blobs):
        op, tensors, header = wire.unpack(blobs)
        if op == "task" and header["task"]["kind"] == "fit_begin":
            size = sum(tensor.nbytes for tensor in tensors.values())
            self.tasks.setdefault(header["task"]["round"], {})[client] = size
        return super().deliver(client, blobs)


class Losing(Here):
    """Loses the first message and the second answer of every task."""

    def __init__(self, handlers):
        super().__init__(handlers)
        self.seen = Counter()
        self.worked = Counter()

    def deliver(self, client, blobs):
        op, _, header = wire.unpack(blobs)
        if op != "task":
            return super().deliver(client, blobs)
        task = header["task"]["id"]
        self.seen[task] += 1
        if self.seen[task] == 1:
            return None
        answer = super().deliver(client, blobs)
        if wire.unpack(answer)[0] != "need":
            self.worked[task] += 1
        return None if self.seen[task] == 2 else answer


def test_what_is_lost_is_sent_again_and_never_trained_twice(tmp_path, monkeypatch):
    trained = Counter()
    run_task = helpers.RequestHandler._run_task

    def counted(self, run, task):
        trained[task.id] += 1
        return run_task(self, run, task)

    monkeypatch.setattr(helpers.RequestHandler, "_run_task", counted)
    link = Losing(helpers.make_handlers(tmp_path / "own"))
    there = helpers.run_over(link, tmp_path / "there", "fedcme")
    assert model_bytes(there) == model_bytes(federate(tmp_path, "fedcme", **SETTINGS))
    assert not any(failed(there))
    assert set(trained.values()) == {1}
    assert max(link.worked.values()) >= 2, "no answer was repeated"


class Silent(Here):
    """Loses the answers of client 1 to tasks, but not to probes."""

    def deliver(self, client, blobs):
        return None if client == 1 and "task" in wire.unpack(blobs)[0] else super().deliver(client, blobs)


def test_a_task_that_is_lost_again_and_again_is_a_failure(tmp_path):
    link = Silent(helpers.make_handlers(tmp_path / "own"))
    there = helpers.run_over(link, tmp_path / "run", rounds=1)
    assert failed(there) == [[(1, "worker_lost")]]
    assert "birch" in records(there)[0]["failures"][0]["message"]


def test_a_client_without_an_answer_times_out_and_its_late_answer_is_ignored(tmp_path):
    class Late(Here):
        def deliver(self, client, blobs):
            if client == 1 and wire.unpack(blobs)[0] == "probe":
                return None
            answer = super().deliver(client, blobs)
            if client == 1 and wire.unpack(blobs)[2].get("task", {}).get("round") == 0:
                self.late = answer
                return None
            return answer

        def collect(self, tickets):
            return [*super().collect(tickets), *([("0", self.late)] if hasattr(self, "late") else [])]

    link = Late(helpers.make_handlers(tmp_path / "own"))
    link.numbers = iter(range(1, 10_000))
    times = iter(range(1_000_000))
    make = helpers.make_engine(link, timeout=20, clock=lambda: float(next(times)))
    there = helpers.run_over(link, tmp_path / "run", make=make, rounds=2)
    assert failed(there) == [[(1, "timeout")], []]


def test_a_client_that_is_away_fails_at_once_and_takes_part_again(tmp_path):
    link = Here(helpers.make_handlers(tmp_path / "own"))
    config = helpers.small_config(tmp_path, "moon", **{**SETTINGS, "rounds": 3})

    def notify(event, details):
        if event == "start":
            link.away = {1}
        if event == "round" and details["round"] == 0:
            link.away = set()

    result = fedcore.run(config, engine=helpers.make_engine(link), partition=helpers.declared(), notify=notify)
    assert failed(result) == [[(1, "unreachable")], [], []]


def test_a_training_process_that_starts_again_asks_for_the_run_and_its_sessions_are_lost(tmp_path):
    link = Here(helpers.make_handlers(tmp_path / "own"))
    deliver = link.deliver

    def dies(client, blobs):
        task = wire.unpack(blobs)[2].get("task", {})
        if client == 1 and task.get("kind") == "fit_resume" and task["round"] == 1:
            link.handlers[1] = helpers.make_handler(helpers.own_data(1), tmp_path / "own" / NAMES[1])
        return deliver(client, blobs)

    link.deliver = dies
    there = helpers.run_over(link, tmp_path / "run", "fedcme")
    assert failed(there) == [[], [(1, "session_lost")], []]


def test_a_lost_state_is_its_client_s_failure(tmp_path):
    link = Here(helpers.make_handlers(tmp_path / "own"))

    def notify(event, details):
        if event == "round" and details["round"] == 0:
            for file in (tmp_path / "own" / "birch").rglob("*.safetensors"):
                file.unlink()

    config = helpers.small_config(tmp_path, "moon", **SETTINGS)
    result = fedcore.run(config, engine=helpers.make_engine(link), partition=helpers.declared(), notify=notify)
    assert failed(result) == [[], [(1, "raised")], [(1, "raised")]]
    assert "state of round 0 is lost" in records(result)[1]["failures"][0]["message"]


def test_a_stopped_run_goes_on_to_the_same_bits_with_clients_that_stayed(tmp_path):
    whole = helpers.run_over(Here(helpers.make_handlers(tmp_path / "a")), tmp_path / "whole", "fedcme")
    link = Here(helpers.make_handlers(tmp_path / "b"))
    deliver = link.deliver

    def stops(client, blobs):
        task = wire.unpack(blobs)[2].get("task", {})
        if task.get("kind") == "fit_resume" and task["round"] == 1 and stops.armed:
            stops.armed = False
            raise KeyboardInterrupt
        return deliver(client, blobs)

    stops.armed, link.deliver = True, stops
    with pytest.raises(fedcore.Interrupted):
        helpers.run_over(link, tmp_path / "stopped", "fedcme")
    (stopped,) = [path.parent for path in (tmp_path / "stopped").rglob("config.yaml")]
    resumed = fedcore.resume(stopped, engine=helpers.make_engine(link))
    assert model_bytes(resumed) == model_bytes(whole)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda task: {}, "without 'head'"),
        (lambda task: {"head": b"nonsense"}, "cannot be read"),
        (lambda task: {"head": wire.pack("outcome", {}, outcome=[1])}, "an answer of kind"),
        (lambda task: {"head": wire.pack("dance")}, "an answer of kind"),
        (lambda task: {"head": wire.pack("need", {}, names=["the moon"])}, "a request for parts that do not exist"),
        (lambda task: {"head": wire.dumps({}, {"op": "result", "protocol": 99})}, "of protocol 99"),
        (lambda task: {"head": wire.pack("outcome", {}, outcome={}, task="other")}, "an answer to task 'other'"),
        (lambda task: {"head": wire.pack("outcome", {}, outcome={}, task=task)}, "not an outcome of a task"),
        (
            lambda task: {
                "head": wire.pack(
                    "outcome",
                    {},
                    outcome={"outcome": "ClientFailure", "kind": "magic", "message": "\x1b[2Jboo"},
                    task=task,
                )
            },
            "?[2Jboo",
        ),
    ],
)
def test_nonsense_is_rejected_and_named(tmp_path, answer, words):
    link = Here(helpers.make_handlers(tmp_path / "own"))
    deliver = link.deliver

    def lies(client, blobs):
        header = wire.unpack(blobs)[2]
        return answer(header["task"]["id"]) if client == 1 and "task" in header else deliver(client, blobs)

    link.deliver = lies
    there = helpers.run_over(link, tmp_path / "run", rounds=1)
    assert failed(there) == [[(1, "rejected")]]
    assert words in records(there)[0]["failures"][0]["message"]


def test_an_answer_that_flower_lost_is_asked_for_again(tmp_path):
    link = Here(helpers.make_handlers(tmp_path / "own"))
    deliver, lost = link.deliver, []

    def loses(client, blobs):
        answer = deliver(client, blobs)
        if client == 1 and wire.unpack(answer)[0] == "outcome" and len(lost) < 2:
            lost.append(client)
            return LostMessage("worker_lost", "the reply is unavailable")
        return answer

    link.deliver = loses
    there = helpers.run_over(link, tmp_path / "run", rounds=1)
    assert (failed(there), lost) == ([[]], [1, 1])


class Broken(Here):
    """Breaks the connection to client 1 during its first training."""

    def __init__(self, handlers, back):
        super().__init__(handlers)
        self.back = back

    def deliver(self, client, blobs):
        if client == 1 and wire.unpack(blobs)[0] == "task" and self.back is not None:
            self.away, self.looks = {1}, self.back
            self.back = None
            return ClientFailure("unreachable", "the node is gone")
        return super().deliver(client, blobs)

    def online(self):
        if self.away:
            self.looks -= 1
            if self.looks < 0:
                self.away = set()
        return super().online()


@pytest.mark.parametrize(("back", "expected"), [(3, []), (10**6, [(1, "unreachable")])])
def test_a_client_whose_connection_breaks_may_come_back_within_its_grace(tmp_path, back, expected):
    link = Broken(helpers.make_handlers(tmp_path / "own"), back)
    times = iter(range(1_000_000))
    make = helpers.make_engine(link, grace=50, probe_every=1000, timeout=10_000, clock=lambda: float(next(times)))
    there = helpers.run_over(link, tmp_path / "run", make=make, rounds=1)
    assert failed(there) == [expected]


# What a client takes part in


def setup_of(tmp_path, *plugins, public=None, **changes):
    config, dataset = helpers.resolved(tmp_path, *plugins, public=public)
    _, _, header = wire.unpack({"setup": helpers.setups_for(config, dataset)[1]}, "setup")
    return Setup.model_validate({**header["setup"], **changes})


def accepted(setup, allowed=None, models=(), tell=print):
    return own_config(setup, TrainerOptions("own", "", allowed=allowed, models=models, device="cpu"), "own", tell)


def test_a_client_uses_its_own_paths_and_device(tmp_path):
    setup = setup_of(tmp_path)
    config = {**setup.config, "out": "/etc", "data_dir": "/root", "device": "cuda", "trackers": {"mlflow": {}}}
    config["weights"] = "/etc/passwd"
    found = accepted(setup.model_copy(update={"config": config}))
    assert found.weights is None, "the server's path opens a file of the client"
    assert (found.out, found.data_dir, found.device, found.trackers, found.workers) == (None, None, "cpu", {}, 0)
    assert found.dataset == "own"
    sent = yaml.safe_dump(setup.config)
    assert str(tmp_path) not in sent, "a path of the server's goes to clients"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"plugins": {"module:os.system": {}}}, "'module:os.system'"),
        ({"model": "module:os.system"}, "'module:os.system'"),
        ({"plugins": {"mooon": {}}}, "'moon'"),
        ({"rounds": "many"}, "--rounds"),
        ({"shell": "rm"}, "'shell'"),
        ({"clients": 7}, "7 clients"),
        ({"model": "no-such"}, "'no-such'"),
    ],
)
def test_a_server_s_configuration_is_validated(tmp_path, change, named):
    setup = setup_of(tmp_path)
    with raises(ConfigError, named):
        accepted(setup.model_copy(update={"config": {**setup.config, **change}}))


def test_methods_may_be_restricted(tmp_path):
    setup = setup_of(tmp_path, "moon")
    assert accepted(setup, {"moon"}).plugins == setup.config["plugins"]
    with raises(ConfigError, "'moon'", "--allow-plugin"):
        accepted(setup, {"fedcme"})


@pytest.mark.parametrize("named", [{"model": "hf:/etc"}, {"client_models": ["mlp", "hf:/etc"]}])
def test_a_model_reads_files_where_the_client_allows_it_alone(tmp_path, named):
    setup = setup_of(tmp_path)
    setup = setup.model_copy(update={"config": {**setup.config, **named}})
    with raises(ConfigError, "'hf:/etc'", "--allow-model"):
        accepted(setup)
    with pytest.raises(ConfigError, match="/etc"):  # it holds no model
        accepted(setup, models=["hf:/etc"])
    named = {"model": "torchvision:resnet18", "client_models": []}
    versions = versions_of(RunConfig(model="torchvision:resnet18"))
    accepted(setup.model_copy(update={"config": {**setup.config, **named}, "versions": versions}))


def test_versions_have_to_be_the_server_s(tmp_path):
    setup = setup_of(tmp_path, "moon")
    known = {"python", "instruction set", *RECORDED, "fedcore", "fedcore-moon", "fedcore-functional"}
    assert set(setup.versions) == known
    assert set(versions_of(RunConfig(client_models=["torchvision:resnet18", "mlp"]))) == {
        *known - {"fedcore-moon", "fedcore-functional"},
        "fedcore-zoo",
    }
    for name, package in {"fedcore": "fedcore-fl", "fedcore-moon": "fedcore-moon"}.items():
        with raises(ConfigError, name, package, "9.9"):
            accepted(setup.model_copy(update={"versions": {**setup.versions, name: "9.9"}}))
    told = []
    accepted(setup.model_copy(update={"versions": {**setup.versions, "torch": "9.9"}}), tell=told.append)
    assert told == [f"torch is {version('torch')} here and 9.9 at the server: results may differ in their last bits"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kind": "graphs"}, ("'graphs'",)),
        ({"input_shape": [3, 8, 8]}, ("3", "8", "1")),
        ({"num_classes": 9}, ("9", "10")),
    ],
)
def test_data_has_to_fit(tmp_path, change, named):
    with raises(ConfigError, *named):
        check_data(setup_of(tmp_path, **change), helpers.own_part(0))


def test_a_refusal_is_an_answer(tmp_path):
    told = []
    options = TrainerOptions("own", str(tmp_path), allowed=["fedcme"], device="cpu")
    handler = RequestHandler(helpers.own_data(1), options, told.append)
    config, dataset = helpers.resolved(tmp_path, "moon")
    answer = handler.answer({"head": wire.pack("join"), "setup": helpers.setups_for(config, dataset)[1]})
    op, _, header = wire.unpack(answer)
    assert op == "refused"
    assert "not allowed at the client" in header["message"]
    assert "not allowed at the client" in told[0]
    task = ClientTask("t", "fit_begin", 1, 0)
    request = {"head": wire.pack_request(task, attempt="a", run=RUN)}
    assert wire.unpack(handler.answer(request))[0] == "need"
    with_setup = handler.answer({**request, "setup": helpers.setups_for(config, dataset)[1]})
    outcome = wire.unpack_answer(task, *wire.unpack(with_setup))
    assert isinstance(outcome, ClientFailure)
    assert outcome.kind == "rejected"


def test_a_task_of_another_client_is_not_worked_on(tmp_path):
    handler = helpers.make_handlers(tmp_path)[1]
    config, dataset = helpers.resolved(tmp_path)
    handler.answer({"head": wire.pack("join"), "setup": helpers.setups_for(config, dataset)[1]})
    task = ClientTask("t", "evaluate", 2, 0)
    answer = handler.answer({"head": wire.pack_request(task, attempt="a", run=RUN)})
    outcome = wire.unpack_answer(task, *wire.unpack(answer))
    assert isinstance(outcome, ClientFailure)
    assert "a task of client 2 came to client 1" in outcome.message


def test_a_run_s_id_contains_no_path(tmp_path):
    for run in ("../" * 10 + "0" * 2, "0" * 31, "/etc"):
        with pytest.raises(ValueError, match="run"):
            setup_of(tmp_path, run=run)


def test_only_sizes_and_shapes_are_told(tmp_path):
    answer = helpers.make_handlers(tmp_path)[0].answer({"head": wire.pack("hello")})
    op, tensors, header = wire.unpack(answer)
    assert (op, tensors) == ("described", {})
    assert set(header) == {
        *("op", "protocol", "fedcore", "train", "test", "kind", "input_shape", "num_classes", "class_names"),
    }


# The start of a federation


def serve(link, folder, monkeypatch, *plugins, wait=60.0, tell=lambda words: None, **options):
    """Start a federation as the command does, over a link without Flower."""
    monkeypatch.setattr("fedcore_flower.server.require_flower", lambda: None)
    monkeypatch.setattr("fedcore_flower.server._open_federation", lambda *_: nullcontext(helpers.courier(link)))
    folder.mkdir(parents=True, exist_ok=True)
    config = helpers.small_config(folder, *plugins, **{**SETTINGS, "client_test_fraction": 0.0, **options})
    server = ServerOptions("localhost", 0, None, {name: SimpleNamespace(fingerprint=name) for name in NAMES}, wait)
    return start(config, server, notify=lambda event, details: None, tell=tell)


def without_names(folder, classes=10):
    """Return the digits as a data set whose classes have no names."""
    digits = load_dataset("digits")
    arrays = {}
    for part, samples in (("train", digits.train), ("test", digits.test)):
        rows = samples.labels < classes
        arrays |= {f"x_{part}": samples.images[rows].numpy(), f"y_{part}": samples.labels[rows].numpy()}
    np.savez(folder / "digits.npz", **arrays)
    return f"npz:{folder / 'digits.npz'}"


def site(names):
    """Return a handler's data: digits 0, 1, 2 with these names by number, and those of other numbers left out."""
    part = helpers.own_part(0)
    order = {number: name for number, name in enumerate(("nought", "one", "two")) if name in names}
    rows = torch.isin(part.train.labels, torch.tensor(list(order)))
    numbers = torch.tensor([names.index(order[label]) for label in part.train.labels[rows].tolist()])
    samples = TensorSamples(part.train.inputs[rows], numbers)
    own = Dataset("own", samples, samples, len(names), part.input_shape, class_names=tuple(names))
    return OwnData(own, torch.arange(len(numbers)), torch.arange(0))


def serve_sites(folder, monkeypatch, *names, **options):
    handlers = [helpers.make_handler(site(each), folder / "own" / str(k)) for k, each in enumerate(names)]
    return handlers, serve(Here(handlers), folder, monkeypatch, dataset=without_names(folder, classes=3), **options)


def test_clients_with_other_class_folders_are_matched_by_name(tmp_path, monkeypatch):
    """At a server without names, the client that has all classes numbers them for the others."""
    names = ["nought", "one", "two"]
    handlers, result = serve_sites(tmp_path, monkeypatch, ["nought", "two"], names, ["one", "two"], rounds=1)
    assert Members.read(result.directory).class_names == names
    members = Members.read(result.directory).names
    session = json.loads((result.directory / "sessions.jsonl").read_text().splitlines()[0])
    assert session["clients"] == members, "tables and failures name the members"
    assert json.loads((result.directory / "partition.json").read_text())["info"]["names"] == members
    for handler, own in zip(handlers, ([0, 2], [0, 1, 2], [1, 2]), strict=True):
        found = handler._run.runtime.dataset
        assert found.class_names == tuple(names)
        assert found.train.labels.unique().tolist() == own
        rows = torch.isin(helpers.own_part(0).train.labels, torch.tensor(own))
        assert torch.equal(found.train.labels, helpers.own_part(0).train.labels[rows])


@pytest.mark.parametrize(
    ("second", "named"),
    [
        (["two", "one", "nought"], ("'nought'", "'one'", "'two'", "'birch'")),
        (["nought", "deux"], ("'nought'", "'one'", "'two'", "'birch'", "'deux'")),
    ],
)
def test_class_names_that_differ_are_refused_with_both_lists(tmp_path, monkeypatch, second, named):
    names = ["nought", "one", "two"]
    with raises(ConfigError, "'alder'", *named):
        serve_sites(tmp_path, monkeypatch, names, second, names)


def test_class_names_of_some_classes_only_say_nothing_of_the_numbers(tmp_path, monkeypatch):
    with raises(ConfigError, "3", "'one'", "'two'"):
        serve_sites(tmp_path, monkeypatch, *[["one", "two"]] * 3)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"train": 1 << 39}, "client 'birch' claims 549755813888 training and"),
        ({"test": 10**4000}, "client 'birch' claims .* held-out"),
        ({"train": 0}, "client 'birch' claims 0 training"),
        ({"kind": "k" * 50_000_000}, "client 'birch' has samples of kind 'kkk"),
        (
            {"op": "refused", "message": "\x1b[2J" + "no" * 25_000_000},
            r"'birch' does not describe .*: \?\[2Jnono",
        ),
        ({"class_names": ["n" * 50_000_000]}, "client 'birch' has the class names 'nnn"),
        ({"class_names": list(map(str, range(11)))}, "client 'birch' has the class names '0', '1', .* most 10 classes"),
        ({"class_names": {"0": "zero"}}, r"client 'birch' has the class names \{'0': 'zero'\}"),
        ({"op": "o" * 50_000_000}, "client 'birch' does not describe its data: ooo"),
        ({"protocol": "p" * 50_000_000}, "client 'birch': sent a message of protocol 'ppp"),
    ],
)
def test_what_a_client_says_of_itself_is_bounded_before_the_run(tmp_path, monkeypatch, said, words):
    link = Here(helpers.make_handlers(tmp_path / "own"))
    deliver = link.deliver

    def lies(client, blobs):
        answer = deliver(client, blobs)
        return answer if client != 1 else {"head": wire.dumps({}, {**wire.unpack(answer)[2], **said})}

    link.deliver = lies
    with pytest.raises(FedcoreError, match=words) as raised:
        serve(link, tmp_path, monkeypatch, dataset=without_names(tmp_path))
    assert len(str(raised.value)) < 5000


def test_the_most_that_a_client_may_claim_is_taken():
    dataset = load_dataset("digits", None)
    said = {"kind": dataset.kind, "input_shape": list(dataset.input_shape), "train": 99_999_999, "test": 1}
    assert _sizes("birch", said, dataset) == (99_999_999, 1)
    with raises(ConfigError, "100", "000"):
        _sizes("birch", {**said, "test": 2}, dataset)


@pytest.mark.parametrize("request_", ["hello", "join"])
def test_a_client_without_an_answer_holds_the_start_no_longer_than_wait(tmp_path, monkeypatch, request_):
    monkeypatch.setattr("fedcore_flower.server.MIN_WAIT", 0.05)
    link, told = Here(helpers.make_handlers(tmp_path / "own")), []
    deliver = link.deliver

    def silent(client, blobs):
        op = wire.unpack(blobs)[0]
        return None if client == 1 and op in (request_, "probe") else deliver(client, blobs)

    link.deliver = silent
    with raises(FedcoreError, "'birch'", "--wait") as raised:
        serve(link, tmp_path, monkeypatch, wait=0.3, tell=told.append)
    assert "alder" not in str(raised.value)
    assert told[-1] == "no answer yet from birch"


@pytest.fixture
def weights(tmp_path):
    return federate(tmp_path, rounds=1, seed=3).directory / "model.safetensors"


def test_initial_weights_are_the_server_s_and_no_path_travels(tmp_path, monkeypatch, weights):
    whole = federate(tmp_path, weights=str(weights), **SETTINGS)
    link = Here(helpers.make_handlers(tmp_path / "own"))
    sent = []
    deliver = link.deliver
    link.deliver = lambda client, blobs: sent.extend(blobs.values()) or deliver(client, blobs)
    there = serve(link, tmp_path / "there", monkeypatch, weights=str(weights))
    assert model_bytes(there) == model_bytes(whole)
    assert not any(str(tmp_path).encode() in blob for blob in sent)
    assert model_bytes(there) != model_bytes(federate(tmp_path, **SETTINGS))


def test_initial_weights_that_would_have_to_be_at_the_clients_are_refused(tmp_path, monkeypatch, weights):
    pytest.importorskip("fedcore_fedper", reason="fedcore-fedper is not installed here")
    link = Here(helpers.make_handlers(tmp_path / "own"))
    with raises(ConfigError, "--weights"):
        serve(link, tmp_path, monkeypatch, "fedper", weights=str(weights))


# A client's own data


def write_npz(path, classes, n=40):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (n, 8, 8), np.uint8), np.array(classes)[np.arange(n) % len(classes)]
    np.savez(path, x_train=x, y_train=y, x_test=x[:6], y_test=y[:6])
    return f"npz:{path}"


def test_a_client_need_not_have_every_class(tmp_path):
    spec = write_npz(tmp_path / "a.npz", [1, 3])
    own = OwnData.load(spec, None, None, 0)
    for again in (f"{spec}?part=yes", write_npz(tmp_path / "part=yes.npz", [1, 3])):
        assert OwnData.load(again, None, None, 0).describe() == own.describe()
    shape = {"kind": "tensor", "input_shape": [1, 8, 8], "num_classes": 4, "class_names": None}
    assert own.describe() == {"train": 40, "test": 6, **shape}
    assert own.test.tolist() == list(range(40, 46))
    assert own.dataset.train.labels[own.test].tolist() == [1, 3, 1, 3, 1, 3]


def test_a_hold_out_is_drawn_by_class_and_by_the_client_s_own_seed(tmp_path):
    spec = write_npz(tmp_path / "a.npz", [0, 0, 0, 1])
    one, same, other = (OwnData.load(spec, None, 0.25, seed) for seed in (1, 1, 2))
    assert one.test.tolist() == same.test.tolist() != other.test.tolist()
    assert sorted([*one.train.tolist(), *one.test.tolist()]) == list(range(40))
    labels = one.dataset.train.labels
    assert torch.bincount(labels[one.test]).tolist() == [8, 2] or torch.bincount(labels[one.test]).tolist() == [7, 3]
    with raises(ConfigError, "--test-fraction", 1.0):
        OwnData.load(spec, None, 1.0, 0)
    with pytest.raises(DataError):
        OwnData.load(f"npz:{tmp_path / 'none.npz'}", None, None, 0)


def test_classes_are_numbered_by_the_server_s_names(tmp_path):
    for split in ("train", "test"):
        for name, value in (("zebra", 10), ("ant", 200)):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for k in range(4):
                Image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(folder / f"{k}.png")
    own = OwnData.load(f"imagefolder:{tmp_path / 'images'}", None, None, 0)
    names = ["mole", "zebra", "ant"]
    changes = {"class_names": names, "num_classes": 3, "input_shape": [3, 8, 8], "normalisation": None}
    setup = setup_of(tmp_path, **changes)
    spec = own.site(helpers.small_config(tmp_path), setup, tmp_path)
    found = {names[label] for label in spec.dataset.train.labels[own.train[:4]].tolist()}
    assert found == {"ant"}, "the folder of ants comes first, and is class 2 of the run"
    assert spec.dataset.num_classes == 3
    assert [len(part) for part in spec.partition.train] == [0, 8, 0]
    setup = setup.model_copy(update={"class_names": ["mole", "zebra", "bee"]})
    with raises(DataError, "'ant'"):
        own.site(helpers.small_config(tmp_path), setup, tmp_path)


def test_images_are_normalised_by_the_server_s_statistics(tmp_path):
    """A pixel of 100 means the same at a client with dark images, at one with bright ones, and at the server."""
    found = []
    for name, value in (("dark", 60), ("bright", 180)):
        x = np.full((8, 8, 8), value, np.uint8)
        x[:, ::2] += 30
        x[0, 0, 0] = 100
        np.savez(tmp_path / name, x_train=x, y_train=np.arange(8) % 2, x_test=x[:2], y_test=[0, 1])
        own = OwnData.load(f"npz:{tmp_path / name}.npz", None, None, 0)
        setup = setup_of(tmp_path, normalisation=[[0.25], [0.5]])
        found.append(own.site(helpers.small_config(tmp_path), setup, tmp_path).dataset.train.gather(torch.tensor([0])))
    expected = (100 / 255 - 0.25) / 0.5
    assert [float(images[0, 0, 0, 0]) for images in found] == pytest.approx([expected, expected], abs=1e-6)
    digits = load_dataset("digits").test
    assert setup_of(tmp_path).normalisation == [list(digits.mean), list(digits.std)]


def test_tables_are_normalised_by_the_server_s_statistics(tmp_path):
    """A value of a column means the same at clients whose rows have different means."""
    raw = torch.tensor([[1.0, 50.0], [3.0, 70.0]])
    found = []
    for mean, std in (([0.0, 0.0], [1.0, 1.0]), ([2.0, 60.0], [1.0, 10.0])):
        rows = (raw - torch.tensor(mean)) / torch.tensor(std)
        samples = TensorSamples(rows, torch.tensor([0, 1]), mean=mean, std=std, columns=("age", "weight"))
        own = OwnData(Dataset("table", samples, samples, 2, (2,)), torch.tensor([0, 1]), torch.tensor([]), None)
        setup = setup_of(
            tmp_path, kind="tensor", input_shape=[2], num_classes=2, class_names=None, normalisation=[[1, 40], [2, 20]]
        )
        found.append(own.site(helpers.small_config(tmp_path), setup, tmp_path).dataset.train)
    for train in found:
        torch.testing.assert_close(train.inputs, torch.tensor([[0.0, 0.5], [1.0, 1.5]]))
        assert (train.mean, train.std, train.columns) == ((1.0, 40.0), (2.0, 20.0), ("age", "weight"))
    table = load_dataset("breast-cancer")
    described = describe_run(helpers.small_config(tmp_path), table, run="0" * 32, client=0, name="a", versions={})
    setup = read_setup(wire.unpack({"setup": described}, "setup")[2])
    assert setup.normalisation == [list(table.test.mean), list(table.test.std)]


def site_of(table: TensorSamples, rows: slice, columns: list[str]) -> OwnData:
    """Return rows of a table as the data of an organisation, whose columns have this order."""
    place = [table.columns.index(column) for column in columns]
    pick = [[of[k] for k in place] for of in (table.mean, table.std)]
    own = TensorSamples(table.inputs[rows][:, place], table.labels[rows], mean=pick[0], std=pick[1], columns=columns)
    positions = torch.arange(len(own))
    return OwnData(Dataset("own", own, own, 2, (len(columns),)), positions[:100], positions[100:])


def test_columns_of_organisations_are_matched_by_name(tmp_path):
    """Organisations that store the same columns in other orders train the same bits."""
    table = load_dataset("breast-cancer").train
    orders = [np.random.default_rng(seed).permutation(table.columns).tolist() for seed in range(3)]
    found = []
    for name, columns in (("one", [list(table.columns)] * 3), ("own", orders)):
        sites = [site_of(table, slice(140 * k, 140 * k + 140), columns[k]) for k in range(3)]
        link = Here([helpers.make_handler(site, tmp_path / name / NAMES[k]) for k, site in enumerate(sites)])
        config = helpers.small_config(tmp_path, "ditto", dataset="breast-cancer", client_test_fraction=40 / 140)
        partition = Partition.declared([100] * 3, [40] * 3, "breast-cancer")
        result = fedcore.run(config, engine=helpers.make_engine(link), partition=partition)
        found.append((model_bytes(result), result.metrics))
    assert found[0] == found[1]


def organisations_of_breast_cancer(folder):
    """Return handlers of three organisations, 100 rows to train on each, their raw rows, and what they told."""
    table, told = load_dataset("breast-cancer").train, []
    sites = [site_of(table, slice(140 * k, 140 * k + 140), list(table.columns)[::-1]) for k in range(3)]
    raw = table.inputs.double() * torch.tensor(table.std) + torch.tensor(table.mean)
    handlers = [
        RequestHandler(site, TrainerOptions("own", str(folder / NAMES[k]), device="cpu"), told.append)
        for k, site in enumerate(sites)
    ]
    return handlers, [raw[140 * k : 140 * k + 140] for k in range(3)], told


def test_statistics_travel_as_sums(tmp_path, monkeypatch):
    """--normalize global: mean and deviation of all organisations' training rows, and a resume has them, too."""
    handlers, raw, told = organisations_of_breast_cancer(tmp_path)
    result = serve(Here(handlers), tmp_path, monkeypatch, dataset="breast-cancer", normalize="global", rounds=1)
    rows = torch.cat([part[:100] for part in raw])
    np.testing.assert_allclose(result.inputs.mean, rows.mean(dim=0), rtol=1e-6)
    np.testing.assert_allclose(result.inputs.std, rows.std(dim=0, correction=0), rtol=1e-4)
    seen = handlers[1]._run.runtime.dataset.train
    own = (raw[1] - rows.mean(dim=0)) / rows.std(dim=0, correction=0)
    torch.testing.assert_close(seen.inputs.double(), own, atol=2e-3, rtol=1e-3)
    assert sum("asked for sums over" in line for line in told) == 3
    assert sum("sums of squared distances" in line for line in told) == 3
    assert fedcore.load_run(result.directory).inputs == result.inputs


def test_each_organisation_is_normalised_by_its_own_rows(tmp_path, monkeypatch):
    """The server's test set belongs to nobody: it has the mean and deviation of all."""
    handlers, raw, _ = organisations_of_breast_cancer(tmp_path)
    result = serve(Here(handlers), tmp_path, monkeypatch, dataset="breast-cancer", normalize="client", rounds=1)
    np.testing.assert_allclose(result.inputs.mean, torch.cat([part[:100] for part in raw]).mean(dim=0), rtol=1e-6)
    for handler, part in zip(handlers, raw, strict=True):
        own = (part - part[:100].mean(dim=0)) / part[:100].std(dim=0, correction=0)
        torch.testing.assert_close(handler._run.runtime.dataset.train.inputs.double(), own, atol=2e-3, rtol=1e-3)


def test_sums_that_are_not_plausible_are_refused(tmp_path, monkeypatch):
    handlers, _, _ = organisations_of_breast_cancer(tmp_path)
    link = Here(handlers)
    deliver = link.deliver

    def lies(client, blobs):
        is_asked = client == 1 and wire.unpack(blobs)[0] == "statistics"
        return {"head": wire.pack("statistics", {}, found=[])} if is_asked else deliver(client, blobs)

    link.deliver = lies
    with raises(ConfigError, "'birch'"):
        serve(link, tmp_path, monkeypatch, dataset="breast-cancer", normalize="global", rounds=1)


def tables_of_sites(folder):
    """Return handlers of three organisations with mixed tables, the server's data set, and all their rows as one."""
    rng, columns, words, frames = np.random.default_rng(3), ("age", "sex", "ward", "dose"), ["sex", "ward"], []
    for k in range(4):  # the last one is the server's own
        n = 40 + 5 * k
        age = rng.integers(40 + 10 * k, 90, n).astype(float)
        age[rng.random(n) < 0.2] = np.nan
        ward = rng.choice([*"AB", f"only {k}", None], n)
        frames.append([list(row) for row in zip(age, rng.choice(["F", "M"], n), ward, rng.normal(1e4, 1, n))])
    labels = [torch.from_numpy(rng.integers(0, 2, len(frame))) for frame in frames]

    def dataset(rows, of):
        cells = Cells.read(rows, columns, words)
        recipe = Recipe.of(cells, missing="median", indicators=True)
        samples = TableSamples(cells, of, recipe, "t", "median", True)
        return Dataset("t", samples, samples, 2, (len(recipe.outputs),), ("no", "yes"), model="mlp")

    handlers = []
    for k in range(3):
        positions = torch.arange(len(frames[k]))
        own = OwnData(dataset(frames[k], labels[k]), positions[:30], positions[30:])
        handlers.append(helpers.make_handler(own, folder / NAMES[k]))
    whole = dataset([*frames[0], *frames[1], *frames[2]], torch.cat(labels[:3]))
    return handlers, dataset(frames[3], labels[3]), whole


@pytest.mark.parametrize("normalize", ["global", "client"])
def test_a_federation_of_mixed_tables_is_the_run_of_one_machine(tmp_path, monkeypatch, normalize):
    """Categories, medians, means and deviations of all sites' training rows, none of which leaves its site."""
    handlers, own, whole = tables_of_sites(tmp_path / "own")
    monkeypatch.setattr("fedcore_flower.server.resolve_config", lambda config: (config, own))
    there = serve(Here(handlers), tmp_path / "there", monkeypatch, dataset="t", model="mlp", normalize=normalize)
    starts = [0, 40, 85]
    parts = [[start + torch.arange(30) for start in starts]]
    parts += [[start + torch.arange(30, size) for start, size in zip(starts, (40, 45, 50), strict=True)]]
    options = {**SETTINGS, "client_test_fraction": 0.0, "model": "mlp", "normalize": normalize}
    config = helpers.small_config(tmp_path, **options)
    here = fedcore.run(config, dataset=replace(whole, test=own.test.by(whole.train.made)), partition=Partition(*parts))
    recipes = [dict(result.inputs.recipe) for result in (there, here)]
    for name in ("columns", "words", "fill", "indicators"):
        assert recipes[0][name] == recipes[1][name]
    assert recipes[0]["fill"]["age"] not in (None, 0.0)
    assert "only 2" in recipes[0]["words"]["ward"]
    assert "only 3" not in recipes[0]["words"]["ward"], "the server's own rows say nothing"
    np.testing.assert_allclose(recipes[0]["mean"], recipes[1]["mean"], rtol=1e-14)
    np.testing.assert_allclose(recipes[0]["std"], recipes[1]["std"], rtol=1e-12)
    for name, value in here.model.state_dict().items():
        torch.testing.assert_close(there.model.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    for protocol in ("global", "global_local"):
        assert there.metrics[protocol]["accuracy"] == pytest.approx(here.metrics[protocol]["accuracy"], abs=0.01)


def test_class_weights_of_a_federation_are_those_of_one_machine(tmp_path, monkeypatch):
    pytest.importorskip("fedcore_class_weights", reason="fedcore-class-weights is not installed here")
    here = federate(tmp_path, class_weights="balanced", **SETTINGS)
    there = serve(
        Here(helpers.make_handlers(tmp_path / "own")), tmp_path / "there", monkeypatch, class_weights="balanced"
    )
    assert model_bytes(there) == model_bytes(here)
    assert model_bytes(there) != model_bytes(federate(tmp_path, **SETTINGS))


def test_sums_of_few_samples_would_tell_them_and_are_refused(tmp_path, monkeypatch):
    handlers, own, _ = tables_of_sites(tmp_path)
    handlers[2]._own = replace(handlers[2]._own, train=torch.arange(4))
    monkeypatch.setattr("fedcore_flower.server.resolve_config", lambda config: (config, own))
    with raises(ConfigError, "'cedar'", "--normalize"):
        serve(Here(handlers), tmp_path, monkeypatch, dataset="t", model="mlp", normalize="global", rounds=1)


def test_a_table_with_words_becomes_numbers_by_the_server_s_recipe(tmp_path):
    """A client's own categories would be other columns: it takes the server's, and its strange words are none."""
    frames = [[["F", 50.0], ["M", 70.0], ["F", float("nan")]], [["M", 40.0], ["X", 60.0], ["M", 80.0]]]
    cells = [Cells.read(rows, ("sex", "age"), ["sex"]) for rows in frames]
    labels = torch.tensor([0, 1, 0])
    server, client = (
        TableSamples(part, labels, Recipe.of(part, missing="median"), "t", "median", False) for part in cells
    )
    dataset = Dataset("table", server, server, 2, (3,))
    described = describe_run(helpers.small_config(tmp_path), dataset, run="0" * 32, client=0, name="a", versions={})
    setup = read_setup(wire.unpack({"setup": described}, "setup")[2])
    own = OwnData(Dataset("own", client, client, 2, (3,)), torch.tensor([0, 1, 2]), torch.tensor([]), None)
    found = own.site(helpers.small_config(tmp_path, clients=1), setup, tmp_path).dataset
    assert found.train.columns == ("age", "sex=F", "sex=M")
    assert found.train.inputs[:, 1:].tolist() == [[0.0, 1.0], [0.0, 0.0], [0.0, 1.0]]
    expected = (torch.tensor([40.0, 60.0, 80.0]) - 60) / torch.tensor([50.0, 70.0, 60.0]).std(correction=0)
    torch.testing.assert_close(found.train.inputs[:, 0], expected)
    with pytest.raises(DataError, match="the run's recipe does not fit its columns"):
        own.site(helpers.small_config(tmp_path, clients=1), setup.model_copy(update={"recipe": {"by": 3}}), tmp_path)


def test_other_columns_than_the_run_s_are_refused_with_both_lists(tmp_path, monkeypatch):
    table = load_dataset("breast-cancer").train
    columns, told = list(table.columns), []
    renamed = TensorSamples(table.inputs, table.labels, columns=["age", *columns[1:]])
    fewer = TensorSamples(table.inputs[:, 2:], table.labels, columns=columns[2:])
    unnamed = TensorSamples(table.inputs, table.labels)
    handlers = [
        RequestHandler(
            OwnData(Dataset("own", own, own, 2, own.inputs.shape[1:]), *parts),
            TrainerOptions("own", str(tmp_path), device="cpu"),
            told.append,
        )
        for own, parts in ((each, torch.arange(140).split(100)) for each in (renamed, fewer, unnamed))
    ]
    with raises(ConfigError, "'alder'", "mean radius; ", "age.", "mean radius, mean texture; ", "none.") as raised:
        serve(Here(handlers), tmp_path, monkeypatch, dataset="breast-cancer")
    assert "cedar" not in str(raised.value)
    assert any("columns have no names, so their order must be: mean radius, mean texture" in line for line in told)


# States


def test_states_are_kept_as_long_as_the_server_could_go_back(tmp_path):
    states, kept = tmp_path / "000000", {}
    states.mkdir()
    for round in range(12):
        history = History(states, reach=3)  # a process that starts again reads what was named
        history.note(round, None if round == 0 else round - 1)
        (states / f"{round:06d}.safetensors").touch()
        history.prune(round)
        kept[round] = sorted(int(path.stem) for path in states.iterdir())
    assert kept[3] == [0, 1, 2, 3]
    assert kept[11] == [6, 7, 8, 9, 10, 11]


def test_a_state_that_still_counts_outlives_rejected_ones(tmp_path):
    states = tmp_path / "000000"
    states.mkdir()
    (states / "000000.safetensors").touch()
    for round in range(1, 20):  # nothing after round 0 is accepted
        history = History(tmp_path / "000000", reach=3)
        history.note(round, 0)
        (states / f"{round:06d}.safetensors").touch()
        history.prune(round)
    assert sorted(int(path.stem) for path in states.iterdir()) == [0, 16, 17, 18, 19]


def test_going_back_forgets_what_never_was(tmp_path):
    history = History(tmp_path / "000000", reach=3)
    for round in range(10):
        history.note(round, round)
    history.note(8, 7)
    assert History(tmp_path / "000000", reach=3)._named == [(5, 5), (6, 6), (7, 7), (8, 7)]


def test_states_of_a_run_stay_with_the_client_and_are_pruned(tmp_path):
    link = Here(helpers.make_handlers(tmp_path / "own"))
    result = helpers.run_over(link, tmp_path / "run", "moon", rounds=8)
    assert not (result.directory / "clients").exists() or not list((result.directory / "clients").iterdir())
    for client, name in enumerate(NAMES):
        folder = tmp_path / "own" / name / "runs" / RUN / f"{client:06d}"
        assert sorted(int(path.stem) for path in folder.iterdir()) == [1, 2, 3, 4, 5, 6, 7]


# The record of who takes part


def test_the_members_are_written_and_read(tmp_path):
    clients = [Member(name=name, fingerprint=f"SHA256:{name}", train=3, test=1) for name in NAMES]
    members = Members(run=RUN, clients=clients)
    members.write(tmp_path)
    assert Members.read(tmp_path) == members
    with raises(ConfigError, "'alder'"):
        members.select_keys({})
    (tmp_path / "federation.json").write_text('{"run": "x", "clients": []}')
    with pytest.raises(RunDirectoryError, match="is damaged"):
        Members.read(tmp_path)
    with raises(RunDirectoryError):
        Members.read(tmp_path / "elsewhere")


def test_the_courier_reports_a_failed_send(tmp_path):
    link = Here(helpers.make_handlers(tmp_path))
    link.send = lambda *arguments: None
    found = helpers.courier(link).send(Request(0, "query", wire.pack("hello")))
    assert isinstance(found, ClientFailure)
    assert found.kind == "unreachable"


def test_a_process_that_ended_is_a_lost_worker(tmp_path):
    link = Here(helpers.make_handlers(tmp_path / "own"))
    link.deliver = lambda client, blobs: {"lost": b"the training process ended (signal 9)"}
    courier = helpers.courier(link)
    courier.send(Request(0, "train", wire.pack("hello")))
    ((_, failure),) = courier.collect()
    assert failure == ClientFailure("worker_lost", "the training process ended (signal 9)")


# The command line


def test_the_engine_is_not_for_train(tmp_path):
    with raises(ConfigError):
        fedcore.run(engine="flower", out=tmp_path / "run")


def test_a_run_of_another_kind_is_not_resumed(tmp_path):
    run = federate(tmp_path, rounds=1).directory
    make_keys(tmp_path / "keys", ["localhost"], ["a"])
    resumes = ["server", "--keys", str(tmp_path / "keys"), "--resume", str(run)]
    refused = CliRunner().invoke(app, [*resumes, "--rounds", "3"])
    assert (refused.exit_code, "leave --rounds out" in refused.output) == (2, True)
    refused = CliRunner().invoke(app, resumes)
    assert refused.exit_code == 2
    assert "not the run of a federation" in refused.output or "fedcore federate needs version" in refused.output


class Open(RequestHandler):
    """Takes part in every run, on the data and states of a site. The check of engines needs this."""

    def __init__(self, spec):
        super().__init__(None, TrainerOptions("", str(spec.state_dir)))
        self._site = spec

    def _set_up(self, blobs):
        setup = read_setup(wire.unpack(blobs, wire.SETUP)[2])
        self._run = _Run(setup, ClientRuntime(self._site))
        return self._run


def test_the_engine_keeps_the_contract(tmp_path):
    """The engine, its requests and the handlers' answers. test_deployment tests Flower's transport."""

    def make(spec):
        names = [f"client-{k}" for k in range(spec.config.clients)]
        setups = {
            client: describe_run(spec.config, spec.dataset, run=RUN, client=client, name=name, versions={})
            for client, name in enumerate(names)
        }
        link = Here(Open(spec) for _ in names)
        return FederationEngine(helpers.courier(link), names, setups, run=RUN)

    check_engine(make, tmp_path, workers=[1])
