"""Runs of objects: models, plugins and data that a program defines, in this process and in workers."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from torch import nn

import fedcore
from fedcore import ConfigError, Plugin, RoundFailedError, RunConfig
from fedcore.data import Dataset, Partition, TensorSamples, load_dataset, make_partition
from fedcore.models import mlp
from fedcore_functional import proximal_term
from fedcore_moon import Moon
from fedcore_study.tools import read_run
from fedcore_testing import Quadratic, model_bytes, partition_of, records
from fedcore_zoo import SequenceSamples
from tests.sentences import raises

SMALL = {"clients": 2, "rounds": 1, "local_epochs": 1, "samples": 100}


class Net(nn.Sequential):
    def __init__(self, num_classes):
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, num_classes))


class Pull(Plugin):
    @fedcore.hookimpl
    def local_loss(self, step):
        return fedcore.Loss(proximal_term(step.parameters, step.reference))


def arrays(width=6):
    drawn = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % 3
    x = torch.randn(60, width, generator=drawn) + labels[:, None]
    return (x[:48], labels[:48], x[48:], labels[48:])


@pytest.fixture
def config(tmp_path):
    return RunConfig(**SMALL, workers=0, out=tmp_path / "run")


def test_classes_of_a_module_are_named_so_that_a_file_can_start_them_again(config, tmp_path):
    result = fedcore.run(config, model=Net, plugins={Pull: {}})
    saved = RunConfig.create({"model": f"module:{__name__}.Net", "plugins": [f"module:{__name__}.Pull"]})
    found = fedcore.runs.directory.RunDirectory(result.directory).read_config()
    assert (found.model, found.plugins) == (saved.model, saved.plugins)
    named = config.model_copy(update={"model": found.model, "plugins": found.plugins, "out": tmp_path / "named"})
    assert model_bytes(fedcore.run(named)) == model_bytes(result)


def test_what_is_installed_keeps_its_name(config):
    result = fedcore.run(config, model=mlp, plugins=["fedprox"])
    found = fedcore.runs.directory.RunDirectory(result.directory).read_config()
    assert (found.model, list(found.plugins)) == ("mlp", ["fedprox"])


def test_a_list_of_plugins_may_hold_options_as_a_file_does(config):
    result = fedcore.run(config, plugins=["fedprox", {"moon": {"mu": 2.0}}])
    assert (list(result.config.plugins), result.config.plugins["moon"]["mu"]) == (["fedprox", "moon"], 2.0)


def test_names_may_stand_in_place_of_objects(config, tmp_path):
    result = fedcore.run(config, model="mlp", dataset="digits")
    found = fedcore.runs.directory.RunDirectory(result.directory).read_config()
    assert (found.model, found.dataset) == ("mlp", "digits")
    again = fedcore.load_run(result.directory, model="mlp", dataset="digits")
    assert again.metrics == result.metrics
    with raises(fedcore.UnknownNameError, "'mpl'", "'mlp'"):
        fedcore.run(config.model_copy(update={"out": tmp_path / "other"}), model="mpl")


def test_networks_and_classes_that_no_import_finds_reach_a_worker_and_are_given_again(tmp_path):
    class Local(Pull):
        pass

    config = RunConfig(clients=2, rounds=1, local_epochs=1)
    torch.manual_seed(0)
    given = {"model": nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)), "plugins": [Local]}
    here, result = (
        fedcore.run(config.model_copy(update={"workers": n, "out": tmp_path / f"{n}"}), **given, dataset=arrays())
        for n in (0, 1)
    )
    assert model_bytes(result) == model_bytes(here)
    with raises(ConfigError, "'object:Local'", "fedcore.resume"):
        fedcore.resume(result.directory)
    again = {**given, "dataset": arrays()}
    longer = fedcore.resume(result.directory, **again, changes={"rounds": 2})
    assert longer.summary["rounds"] == 2
    x, *others = arrays()
    with raises(fedcore.RunDirectoryError):
        fedcore.resume(result.directory, **given, dataset=(x + 1, *others))
    with raises(ConfigError, "'Quadratic'"):
        fedcore.resume(result.directory, model=Net, plugins=[Quadratic])
    assert fedcore.evaluate_run(result.directory, **again)["global"] == longer.metrics["global"]


def test_a_run_goes_on_with_the_plugins_and_options_that_it_has(config):
    path = fedcore.run(config, plugins={Moon: {"mu": 2}}).directory
    for given in (Moon, "moon", {Moon: {"mu": 2.0}}, ["fedavg", "moon"]):
        assert fedcore.load_run(path, plugins=given).config.plugins["moon"]["mu"] == 2.0
    for given, named in (
        ({"moon": {"mu": 9}}, ("moon.mu", 2.0, 9)),
        ({Moon: {"nu": 2}}, ("moon", "'nu'")),
        (["moon", "fedprox"], ("'fedprox'", "moon")),
    ):
        with raises(ConfigError, *named):
            fedcore.resume(path, plugins=given, changes={"rounds": 2})


def test_an_object_that_cannot_be_sent_needs_this_process(config, tmp_path):
    lock = threading.Lock()

    class Locked(Pull):
        @fedcore.hookimpl
        def begin_local(self, client):
            with lock:
                client.scratch["seen"] = True

    with raises(ConfigError, "'object:Locked'", "lock", "workers=0"):
        fedcore.run(config.model_copy(update={"workers": 1}), plugins=[Locked])
    assert not config.out.exists()
    assert fedcore.run(config, plugins=[Locked]).summary["rounds"] == 1


def test_samples_of_a_local_class_reach_a_worker(tmp_path):
    class Local(TensorSamples):
        pass

    x, y, *test = arrays()
    dataset = fedcore.data.Dataset(
        name="local", train=Local(x, y), test=Local(*test), num_classes=3, input_shape=(6,), model="mlp"
    )
    runs = [
        fedcore.run(RunConfig(clients=2, rounds=1, workers=n, out=tmp_path / f"{n}"), dataset=dataset) for n in (0, 1)
    ]
    assert model_bytes(runs[0]) == model_bytes(runs[1])


def test_a_network_starts_the_run_with_its_weights(config):
    network = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    options = config.model_copy(update={"samples": None, "lr": 1e-30})
    result = fedcore.run(options, model=network, dataset=arrays())
    assert torch.allclose(result.model.encoder.base[0].weight, network[0].weight)
    assert network[2].out_features == 3  # it is not changed itself


class Wide(Net):
    def __init__(self, num_classes, width):
        super().__init__(num_classes)


@pytest.mark.parametrize(("factory", "named"), [(Wide, ("'width'",)), (lambda classes: Net(classes), ())])
def test_a_factory_that_cannot_be_called_is_told_how_it_is(config, factory, named):
    with raises(fedcore.PluginContractError, "num_classes", *named):
        fedcore.run(config, model=factory)


class Tokens(nn.Module):
    """Classes by the mean of a text's tokens."""

    takes = ("tensor", "sequences")

    def __init__(self, num_classes):
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(9, 4), nn.Linear(4, num_classes)

    def forward(self, x):
        return self.head(self.bag(x) if isinstance(x, torch.Tensor) else self.bag(x.values, x.offsets[:-1]))


@pytest.mark.parametrize("of_one_length", [True, False])
def test_a_network_of_tokens_gives_logits_as_others_do(config, of_one_length):
    tokens, labels = np.arange(360).reshape(120, 3) * 7 % 9, np.arange(120) % 2
    samples = SequenceSamples.of([row[: 1 + k % 3] for k, row in enumerate(tokens)], labels)
    dataset = (tokens, labels, tokens, labels) if of_one_length else Dataset("texts", samples, samples, 2, (9,))
    result = fedcore.run(config, model=Tokens, dataset=dataset)
    assert type(result.network) is Tokens
    assert result.evaluate(samples if not of_one_length else tokens, labels) == result.metrics["global"]


@pytest.mark.parametrize("plugins", [Pull(fedcore.PluginOptions()), [Pull(fedcore.PluginOptions())]])
def test_an_object_of_a_plugin_is_told_to_be_its_class(config, plugins):
    with raises(ConfigError):
        fedcore.run(config, plugins=plugins)


def test_the_options_of_a_result_run_again_with_its_objects(config, tmp_path):
    options = config.model_copy(update={"samples": None})
    result = fedcore.run(options, dataset=arrays())
    with raises(ConfigError, "fedcore.run"):
        fedcore.run(result.config)
    assert model_bytes(fedcore.run(result.config, dataset=arrays(), out=tmp_path / "again")) == model_bytes(result)


@pytest.mark.parametrize("objects", [{}, {"model": Net}])
def test_options_that_are_no_configuration_are_told_how_they_become_one(objects):
    with raises(ConfigError, "fedcore.run", "5"):
        fedcore.run({"rounds": 5}, **objects)


def test_options_are_arguments_and_replace_those_of_a_configuration(config, tmp_path):
    plain = fedcore.run(config.model_copy(update={"seed": 4}))
    again = fedcore.run(config, seed=4, out=tmp_path / "again")
    assert model_bytes(again) == model_bytes(plain)
    assert again.config == plain.config
    moon = fedcore.run(plain.config, plugins="moon", partition="iid", engine="local", out=tmp_path / "moon")
    assert list(moon.config.plugins) == ["moon"]
    assert moon.config.partition == "iid"
    with raises(fedcore.UnknownNameError, "'round'", "'rounds'"):
        fedcore.run(round=3)
    with raises(ConfigError, "1", "0"):
        fedcore.run(config, rounds=0)


def test_the_configuration_of_a_result_runs_again(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = fedcore.run(config, model=Net, plugins=[Pull], dataset=arrays(64), samples=None)
    assert first.config.out is None
    again = fedcore.run(first.config, model=Net, plugins=[Pull], dataset=arrays(64))
    assert again.directory.parent == tmp_path / "runs"
    assert model_bytes(again) == model_bytes(first)


def test_a_class_without_options_keeps_those_of_the_configuration(config, tmp_path):
    class Near(Moon):
        pass

    first = fedcore.run(config, plugins={Near: {"mu": 3}})
    again = fedcore.run(first.config, plugins=Near, out=tmp_path / "again")
    assert again.config.plugins == first.config.plugins
    assert again.config.plugins["object:Near"]["mu"] == 3.0


@pytest.mark.parametrize("values", [{"model": Net}, {"plugins": [Pull]}, {"plugins": {Pull: {}}}])
def test_a_configuration_says_where_objects_go(values):
    with raises(ConfigError, "fedcore.run"):
        RunConfig.create(values)


SCRIPT = """
import torch
from pydantic import Field
from torch import nn
import fedcore

WIDTH = 4

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.one, self.two = nn.Linear(6, WIDTH), nn.Linear(WIDTH, num_classes)

    def forward(self, x):
        return self.two(self.one(x).relu())

def pull(step):
    return fedcore_functional.proximal_term(step.parameters, step.reference)

class Options(fedcore.PluginOptions):
    weight: float = Field(default=0.5, ge=0)

class Pull(fedcore.Plugin[Options]):
    @fedcore.hookimpl
    def local_loss(self, step):
        return fedcore.Loss(pull(step), weight=self.options.weight)

print("executed")
labels = torch.arange(60) % 3
x = torch.randn(60, 6, generator=torch.Generator().manual_seed(0)) + labels[:, None]
for workers in (0, 1):
    config = fedcore.RunConfig(clients=2, rounds=1, workers=workers, out=f"run-{workers}")
    fedcore.run(config, model=Net, plugins=[Pull], dataset=(x[:48], labels[:48], x[48:], labels[48:]))
"""


CHANGING = """
import fedcore
import fedcore_functional

STRENGTH = 0.0

class Pull(fedcore.Plugin):
    @fedcore.hookimpl
    def local_loss(self, step):
        return fedcore.Loss(fedcore_functional.proximal_term(step.parameters, step.reference), weight=STRENGTH)

def run(workers, strength=None):
    global STRENGTH
    STRENGTH = STRENGTH if strength is None else strength
    config = fedcore.RunConfig(clients=2, rounds=1, samples=100, workers=workers, out=f"run-{workers}-{STRENGTH}")
    notes = []
    fedcore.run(config, plugins=[Pull], notify=lambda event, d: notes.append(d.get("message", "")))
    print(workers, STRENGTH, *filter(None, notes))

run(0)
run(1)
run(0, 50.0)
run(1)
STRENGTH = 60.0
"""


@pytest.mark.slow
def test_workers_have_the_constants_that_the_program_has_when_it_runs(tmp_path):
    """Not what is written further down."""
    (tmp_path / "study.py").write_text(CHANGING)
    done = subprocess.run([sys.executable, "study.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["0 0.0", "1 0.0", "0 50.0", "1 50.0"]
    zero, pulled = (
        [model_bytes(tmp_path / f"run-{workers}-{strength}") for workers in (0, 1)] for strength in (0.0, 50.0)
    )
    assert zero[0] == zero[1] != pulled[0] == pulled[1]


def test_a_script_reaches_its_worker_and_is_executed_once(tmp_path):
    (tmp_path / "study.py").write_text(
        SCRIPT.replace("import fedcore\n", "import fedcore\nimport fedcore_functional\n")
    )
    done = subprocess.run([sys.executable, "study.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "executed\n"
    assert done.stderr == ""
    assert model_bytes(tmp_path / "run-0") == model_bytes(tmp_path / "run-1")
    saved = fedcore.runs.directory.RunDirectory(tmp_path / "run-1").read_config()
    assert (saved.model, list(saved.plugins), saved.workers) == ("module:study.Net", ["module:study.Pull"], 1)
    assert saved.dataset == "object:arrays"


def in_halves(labels, num_clients, **_):
    return np.array_split(np.arange(len(labels)), num_clients)


@pytest.mark.parametrize("as_what", ["function", "lists", "partition", "partition without info"])
def test_a_partition_of_the_program(tmp_path, as_what):
    lists = in_halves(range(1437), 2)
    dataset = load_dataset("digits")
    made = make_partition(dataset, RunConfig(partition="iid", clients=2, seed=3))
    own = Partition(lists, [[], []])
    given = {"function": in_halves, "lists": lists, "partition": made, "partition without info": own}[as_what]
    options = {**SMALL, "samples": None, "workers": 0}
    if as_what != "function":
        del options["clients"]
    result = fedcore.run(partition=given, **options, out=tmp_path / "run")
    parts = [part.tolist() for part in partition_of(result).train]
    assert parts == ([part.tolist() for part in made.train] if as_what == "partition" else [*map(list, lists)])
    assert result.config.partition.startswith("module:" if as_what == "function" else "object:")
    if as_what != "function":
        others = {"config": RunConfig(**options, clients=3, client_test_fraction=0), "preset": "digits-quick"}
        assert fedcore.run(**others, partition=given, fast_dev_run=True).config.partition == result.config.partition
    longer = fedcore.resume(result.directory, changes={"rounds": 2}, allow_code=True)
    assert model_bytes(longer) == model_bytes(
        fedcore.run(partition=given, **options | {"rounds": 2}, out=tmp_path / "longer")
    )
    if as_what != "function":
        with raises(ConfigError, "fedcore.run"):
            fedcore.run(result.config)


@pytest.mark.parametrize(
    ("given", "options", "named"),
    [
        (3, {}, ("a int",)),
        ({"North": [0, 1], "South": [2, 0]}, {}, ("sample 0", "client 0 and 1")),
        ({"North": [0, 1], "South": [2], "East": [4]}, {"samples": None}, ("clients is 2", "clients=3")),
        (lambda labels, clients, seed: [], {}, ("'alpha'",)),
        (lambda labels, clients, **_: None, {}, ("NoneType",)),
        ([[0, 1], [2, 3], [4]], {"samples": None}, ("clients is 2", "clients=3")),
        ([[0, 1], [2, 0]], {}, ("sample 0", "client 0 and 1")),
        ([[0, 1], [2, 1437]], {}, ("0..1436",)),
        ([[0, 1], []], {}, ("client 1", "training")),
        ([[0, 1], np.array([0.5, 2.7])], {}, ("client 1", "float64", "(2,)")),
        ([np.arange(1437) < 9, [9]], {}, ("client 0", "bool", "numpy.flatnonzero")),
        ([[[1, 2]], [[3, 4]]], {}, ("client 0", "int64", "(1, 2)", "fedcore.data.Partition(train, test)")),
        ([([1, 2], [3]), ([4], [5])], {}, ("client 0", "fedcore.data.Partition(train, test)")),
        ([(torch.arange(2), torch.arange(3)), ([4], [5])], {}, ("client 0", "fedcore.data.Partition(train, test)")),
        (lambda labels, clients, **_: [([1, 2], [3]), ([4], [5])], {}, ("client 0", "returned")),
        (lambda labels, clients, **_: [["a"], ["b"]], {}, ("client 0", "<U1")),
    ],
)
def test_what_is_no_partition(given, options, named):
    with raises(fedcore.FedcoreError, *named):
        fedcore.run(partition=given, **{**SMALL, **options})


class FailsAtSouth(Plugin):
    """Client 1 fails, in training and in evaluation."""

    @fedcore.hookimpl
    def begin_local(self, client):
        if client.id == 1:
            raise ValueError("the disk is full")


def test_clients_of_a_partition_by_names_have_these_in_records_and_failures(tmp_path):
    """A mapping has the bits of its values as a list."""
    named = dict(zip(("North", "South", "East"), in_halves(range(1437), 3), strict=True))
    options = {**SMALL, "samples": None, "workers": 0, "client_test_fraction": 0.2}
    del options["clients"]
    notes = []
    result = fedcore.run(
        partition=named,
        plugins=FailsAtSouth,
        **options,
        out=tmp_path / "run",
        notify=lambda event, details: notes.append(str(details.get("message"))),
    )
    assert partition_of(result).names == [*named]
    assert json.loads((result.directory / "partition.json").read_text())["info"]["names"] == [*named]
    assert read_run(result.directory, print).client("2") == "East"
    (failure,) = records(result)[0]["failures"]
    assert failure["client"] == 1
    assert failure["message"].startswith("South: plugin 'failsatsouth'")
    assert any("The first: South: plugin 'failsatsouth'" in note for note in notes)
    plain = fedcore.run(partition=[*named.values()], plugins=FailsAtSouth, **options, out=tmp_path / "plain")
    assert model_bytes(plain) == model_bytes(result)
    assert records(plain)[0]["failures"][0]["message"].startswith("plugin 'failsatsouth'")
    with raises(RoundFailedError, "client 1: raised, South: plugin"):
        fedcore.run(partition=named, plugins=FailsAtSouth, **options, min_clients=3, out=tmp_path / "few")


@pytest.mark.parametrize("options", [{"public": "0.3"}, {"samples": 700}])
def test_lists_are_positions_in_the_training_set_whatever_is_left_out(tmp_path, options):
    options = {**SMALL, "samples": None, "workers": 0, **options}
    free = partition_of(fedcore.run(**options, partition="iid", out=tmp_path / "run")).train
    lists = [part.flip(0).tolist() for part in free]
    result = fedcore.run(**options, partition=lists, out=tmp_path / "again")
    assert [positions.tolist() for positions in partition_of(result).train] == lists
    left_out = min({*range(1437)}.difference(*lists))
    lists[1].append(left_out)
    with raises(ConfigError, "1", left_out):
        fedcore.run(**options, partition=lists)


DIGITS = load_dataset("digits")
IID = make_partition(DIGITS, RunConfig(partition="iid", clients=2))


@pytest.mark.parametrize(
    ("partition", "options", "named"),
    [
        (IID, {"public": "0.3"}, ("431", "--public")),
        (IID, {"clients": 3}, ("--clients", "3", "2")),
        (IID, {"dataset": arrays()}, ("'digits'",)),
        (Partition(list(IID.train), list(IID.train), IID.info), {}, ()),
        (Partition([[0]], [[]], {"seed": 1}), {"clients": 1}, ("'dataset'", "make_partition")),
        (Partition({"N": [0]}, {"N": [1]}, {"seed": 1}), {"clients": 1}, ("'dataset'", "make_partition")),
    ],
)
def test_a_given_partition_that_does_not_fit(partition, options, named):
    with raises(fedcore.FedcoreError, *named):
        fedcore.run(partition=partition, **{**SMALL, "samples": None, "workers": 0, **options})


def test_clients_with_test_sets_of_their_own(tmp_path):
    x_train, y_train, x_test, y_test = arrays()
    train, test = [range(30), range(30, 40)], [range(40, 45), range(45, 48)]
    result = fedcore.run(
        dataset=(x_train, y_train, x_test, y_test),
        partition=Partition(train, test),
        **{**SMALL, "samples": None, "workers": 0, "out": tmp_path / "run"},
    )
    saved = json.loads((result.directory / "partition.json").read_text())
    assert saved["test"] == [list(part) for part in test]
    assert (saved["info"]["partitioner"], saved["info"]["alpha"]) == ("python", 0.0)
    own = [result.evaluate(x_train[part], y_train[part])["accuracy"] for part in test]
    assert result.metrics["global_local"]["per_client"] == pytest.approx({"0": own[0], "1": own[1]})


def test_clients_with_test_sets_of_their_own_have_names(tmp_path):
    x_train, y_train, x_test, y_test = arrays()
    result = fedcore.run(
        dataset=(x_train, y_train, x_test, y_test),
        partition=Partition({"North": range(30), "South": range(30, 40)}, {"South": range(45, 48), "North": [40]}),
        unseen_clients=["North"],
        **{**SMALL, "samples": None, "workers": 0, "out": tmp_path / "run"},
    )
    saved = json.loads((result.directory / "partition.json").read_text())
    assert (saved["info"]["names"], saved["test"]) == (["South", "North"], [[45, 46, 47], [40]])
    with raises(fedcore.DataError, "only-tested"):
        Partition({"North": [0]}, {"North": [1], "only-tested": [2]})


def test_options_that_contradict_a_given_partition():
    with raises(ConfigError):
        fedcore.run(partition=IID, **SMALL)
    with raises(ConfigError, "--imbalance"):
        fedcore.run(partition=IID, **{**SMALL, "samples": None}, imbalance=10)
    with raises(ConfigError, "0.0"):
        fedcore.run(partition=IID, **{**SMALL, "samples": None}, client_test_fraction=0.2)


@pytest.mark.parametrize("projection", [False, True])
def test_a_trained_network_keeps_its_head_unless_a_projection_replaces_it(config, tmp_path, projection):
    network, events = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)), []
    options = {"rounds": 1, "lr": 1e-9, "momentum": 0.0, "weight_decay": 0.0, "samples": None}
    result = fedcore.run(
        config.model_copy(update={"projection": projection} | options),
        model=network,
        dataset=arrays(),
        notify=lambda event, details: events.append((event, details)),
    )
    (notes,) = [details["notes"] for event, details in events if event == "start"]
    assert any("last layer is not used" in note for note in notes) == projection
    if not projection:
        assert torch.allclose(result.network[2].weight, network[2].weight, atol=1e-6)
