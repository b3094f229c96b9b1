"""Networks, samples and metrics that keep values between calls, or draw random numbers: one seed has one result."""

from __future__ import annotations

import functools
import random
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedcore
from fedcore import ConfigError, Metric, PluginContractError
from fedcore.base.process import CORES
from fedcore.client.evaluation import evaluate
from fedcore.data import TensorSamples, load_dataset
from fedcore.models.split import copied
from fedcore.runs.api import evaluate_run
from tests.sentences import raises
from tests.support import model_bytes


class KeepsASkip(nn.Module):
    """Keeps a skip connection on itself until the end of the same forward pass."""

    def __init__(self):
        super().__init__()
        self.flatten, self.hidden = nn.Flatten(), nn.Linear(64, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        self.skip = self.flatten(x)
        hidden = F.relu(self.hidden(self.skip))
        for _ in range(20):  # long enough for another thread
            hidden = hidden @ torch.eye(64)
        return self.head(hidden + self.skip)


class KeepsAState(KeepsASkip):
    """Carries a hidden state from call to call."""

    state = torch.zeros(64)

    def forward(self, x):
        features = F.relu(self.hidden(self.flatten(x)))
        self.state = (0.5 * self.state + features.mean(0)).detach()
        return self.head(features + 3 * self.state)


class KeepsABuffer(KeepsASkip):
    """Carries the hidden state in a buffer that no file of weights holds, and edits it in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.zeros(64), persistent=False)

    def forward(self, x):
        features = F.relu(self.hidden(self.flatten(x)))
        self.state.mul_(0.5).add_(features.detach().mean(0))
        return self.head(features + 3 * self.state.clone())


class Hooked(KeepsASkip):
    """Reads what a forward hook wrote into a dictionary, to which a copy's hook would write, too."""

    def __init__(self):
        super().__init__()
        kept = self.kept = {}
        self.hidden.register_forward_hook(lambda module, inputs, output: kept.update(hidden=output))

    def forward(self, x):
        self.hidden(self.flatten(x))
        return self.head(F.relu(self.kept["hidden"]))


class RandomFeatures(nn.Module):
    """Draws fixed features from NumPy's and Python's global generators."""

    def __init__(self):
        super().__init__()
        directions = np.random.randn(64, 128).astype(np.float32) / 8
        self.register_buffer("directions", torch.from_numpy(directions), persistent=False)
        self.shift, self.flatten, self.head = random.uniform(0.0, 0.1), nn.Flatten(), nn.Linear(128, 10)

    def forward(self, x):
        return self.head(F.relu(self.flatten(x) @ self.directions + self.shift))


class DropsLayers(KeepsASkip):
    """Stochastic depth by Python's generator, and noise by NumPy's, in training."""

    def forward(self, x):
        x = self.flatten(x)
        if self.training:
            x = x + float(np.random.normal(0, 0.1))
            return self.head(x) if random.random() < 0.3 else self.head(x + F.relu(self.hidden(x)))
        return self.head(x + F.relu(self.hidden(x)))


class DropsAlways(KeepsASkip):
    """Dropout that is active in evaluation, too."""

    def forward(self, x):
        return self.head(F.dropout(F.relu(self.hidden(self.flatten(x))), 0.5, training=True))


def by_hand(network, weights) -> float:
    """Return the accuracy of a network with some weights on the test set, chunk after chunk in one thread."""
    test = load_dataset("digits").test
    network.load_state_dict(weights)
    network.eval()
    with torch.no_grad():
        parts = [network(test.gather(rows)).argmax(1) for rows in torch.arange(len(test)).split(100)]
    return int((torch.cat(parts) == test.labels).sum()) / len(test)


@pytest.mark.parametrize("network", [KeepsASkip, KeepsAState, KeepsABuffer, Hooked])
def test_a_network_that_keeps_values_is_evaluated_as_by_one_thread(go, monkeypatch, network):
    monkeypatch.setenv(CORES, "4")
    result = go(model=network, rounds=2, workers=0)
    assert result.metrics["global"]["accuracy"] == by_hand(network(), result.network.state_dict())
    assert evaluate_run(result.directory, model=network)["global"] == result.metrics["global"]
    monkeypatch.setenv(CORES, "1")
    assert evaluate_run(result.directory, model=network)["global"] == result.metrics["global"]


class Counts(KeepsASkip):
    """Grows a list in place, fills a tensor in place, and sets an attribute that it did not have."""

    def __init__(self):
        super().__init__()
        self.seen, self.total = [], torch.zeros(())

    def forward(self, x):
        self.seen.append(len(x))
        self.total += 1
        self.calls = getattr(self, "calls", 0) + 1
        return self.head(self.flatten(x) + 0.01 * (len(self.seen) + self.calls + self.total))


@pytest.mark.parametrize(
    ("network", "plugins"),
    [
        *((network, ()) for network in (KeepsASkip, KeepsAState, KeepsABuffer, Hooked, Counts)),
        *((network, ("fedntd",)) for network in (KeepsAState, KeepsABuffer)),
    ],
)
def test_what_a_network_keeps_does_not_go_from_client_to_client(go, network, plugins):
    """Nor does what a frozen copy of it keeps, such as the one that FedNTD reads."""
    runs = [go(*plugins, model=network, rounds=2, participation=1.0, workers=workers) for workers in (0, 1, 2)]
    assert len({model_bytes(run) for run in runs}) == 1
    assert [run.metrics["global"] for run in runs] == [runs[0].metrics["global"]] * 3


@pytest.mark.parametrize("network", [KeepsAState, KeepsABuffer, Counts])
def test_what_a_network_keeps_survives_a_pause(go, network):
    """FedCME matches no client to one that is alone: its pause in the middle of the epochs leaves no trace."""
    options = {"model": network, "clients": 1, "participation": 1.0, "local_epochs": 5, "rounds": 2}
    matched = ("fedcme", {"mu": 0.0, "exchange": "classifier"})
    assert model_bytes(go(matched, **options)) == model_bytes(go(**options))


@pytest.mark.parametrize("network", [RandomFeatures, DropsLayers, DropsAlways])
def test_draws_from_numpy_and_python_are_those_of_the_seed(go, network):
    outside = random.getstate(), np.random.get_state()
    runs = [go(model=network, rounds=2, workers=workers) for workers in (0, 1, 2)]
    assert random.getstate() == outside[0]
    assert np.array_equal(np.random.get_state()[1], outside[1][1])
    assert len({model_bytes(run) for run in runs}) == 1
    assert [run.metrics["global"] for run in runs] == [runs[0].metrics["global"]] * 3
    for run in runs:
        assert evaluate_run(run.directory, model=network)["global"] == runs[0].metrics["global"]
    assert go(model=network, rounds=2, seed=1).metrics["global"] != runs[0].metrics["global"]


def test_random_features_are_the_same_on_server_and_clients(go):
    """They are not sent: a worker that drew others would train a classifier for these."""
    accuracies = [
        go(model=RandomFeatures, rounds=5, lr=0.1, workers=workers).metrics["global"]["accuracy"] for workers in (0, 2)
    ]
    assert accuracies[0] == accuracies[1] > 0.7


class OneReader(TensorSamples):
    """Samples that one thread alone may read, such as those of an open file."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.readers: set[int] = set()

    def gather(self, indices):
        self.readers.add(threading.get_ident())
        return super().gather(indices)


class Tallies(Metric):
    """Notes which threads count."""

    counters: set[int]

    def count(self, logits, labels):
        self.counters.add(threading.get_ident())
        return torch.ones(1, dtype=torch.float64)

    def value(self, counts):
        return float(counts[0])


def test_samples_are_read_and_metrics_counted_by_one_thread():
    samples = OneReader(torch.randn(1000, 3), torch.arange(1000) % 3)
    metric = Tallies(3)
    metric.counters = set()
    network = fedcore.SplitModel(nn.Identity(), 3, 3)
    counts = evaluate(network, samples, 3, torch.device("cpu"), threads=4, metrics={"tallies": metric})
    assert samples.readers == metric.counters == {threading.get_ident()}
    assert counts.metrics["tallies"].tolist() == [10.0]


class MomentumEncoder(nn.Module):
    """Adds the features of a slowly following copy of its first layer, which forward moves."""

    move = staticmethod(lambda slow, fast: slow.data.mul_(0.9).add_(fast.data, alpha=0.1))

    def __init__(self):
        super().__init__()
        self.flatten, self.fast, self.head = nn.Flatten(), nn.Linear(64, 32), nn.Linear(32, 10)
        self.keep(self.fast.weight.detach().clone())

    def keep(self, weight):
        self.slow = nn.Parameter(weight, requires_grad=False)

    def forward(self, x):
        if self.training:
            self.move(self.slow, self.fast.weight)
        x = self.flatten(x)
        return self.head(F.relu(self.fast(x)) + F.relu(x @ self.slow.T))


class InPlace(MomentumEncoder):
    @torch.no_grad()
    def move(self, slow, fast):
        slow.lerp_(fast, 0.1)


class Assigned(MomentumEncoder):
    def move(self, slow, fast):
        slow.data = 0.9 * slow.data + 0.1 * fast.data


class AsBuffer(MomentumEncoder):
    def keep(self, weight):
        self.register_buffer("slow", weight)


class Unfreezes(MomentumEncoder):
    def move(self, slow, fast):
        slow.requires_grad_(True)


@pytest.mark.parametrize("network", [MomentumEncoder, InPlace, Assigned, Unfreezes])
def test_a_parameter_without_gradients_that_forward_changes_is_refused(go, network):
    """It would go on to the next client of the same worker; one that was unfrozen would not be trained."""
    with raises(PluginContractError):
        go(model=network)


def test_a_momentum_encoder_in_a_buffer_does_not_depend_on_the_workers(go):
    runs = [go(model=AsBuffer, rounds=2, workers=workers) for workers in (0, 1, 2)]
    assert len({model_bytes(run) for run in runs}) == 1


class TiedFrozen(KeepsASkip):
    """Has one frozen tensor under two names."""

    def __init__(self):
        super().__init__()
        self.twin = nn.Linear(64, 64)
        self.twin.weight = self.hidden.weight
        self.hidden.weight.requires_grad_(False)


def test_frozen_weights_may_be_tied(go):
    assert go(model=TiedFrozen).metrics["global"]["accuracy"] > 0


class Bends(nn.Module):
    """Bends its features by a method."""

    def __init__(self):
        super().__init__()
        self.flatten, self.hidden, self.head = nn.Flatten(), nn.Linear(64, 16), nn.Linear(16, 10)

    def bent(self, x):
        return self.hidden(x).tanh()

    def forward(self, x):
        return self.head(self.bent(self.flatten(x)))


class HoldsAFunction(Bends):
    def __init__(self):
        super().__init__()
        self.bent = lambda x: self.hidden(x).tanh() if self.hidden else later(x)
        if not self.hidden:
            later = torch.sigmoid  # never bound: the cell of the function is empty


class WrapsALayer(Bends):
    """Wraps the forward pass of a layer, as programs add to a network that they did not write."""

    def __init__(self):
        super().__init__()
        forward = self.hidden.forward
        self.hidden.forward = lambda x: forward(x).tanh()

    def bent(self, x):
        return self.hidden(x)


class HooksAnotherLayer(Bends):
    def __init__(self):
        super().__init__()
        self.flatten.register_forward_hook(lambda module, inputs, output: self.hidden(output).tanh())

    def bent(self, x):
        return x


class ListsFunctions(Bends):
    def __init__(self):
        super().__init__()
        self.layers = [lambda x: self.hidden(x), torch.tanh]

    def bent(self, x):
        return self.layers[1](self.layers[0](x))


class HasADefault(Bends):
    def __init__(self):
        super().__init__()
        self.bent = lambda x, own=self: own.hidden(x).tanh()


class HasATuple(Bends):
    def __init__(self):
        super().__init__()
        self.layers = (lambda x: self.hidden(x), torch.tanh)

    bent = ListsFunctions.bent


@torch.enable_grad()  # the decorator's function holds the decorated one
def decorated(x):
    return x


def test_a_function_that_holds_no_part_of_a_network_stays_the_same():
    """Pickle finds a function of a module by its name, and refuses another one of that name."""
    network = Bends()
    network.bent, network.pair = decorated, (decorated, {}.get)
    copy = copied(network)
    assert (copy.bent, copy.pair) == (decorated, network.pair)
    assert copy.bent is decorated


def test_a_function_may_hold_a_long_chain():
    """As a linked list or a parser's tree is: a step of Python's stack for each link would be too many."""
    chain, network = None, Bends()
    for _ in range(5_000):
        chain = [chain]
    network.bent = lambda x: network.hidden(x) if chain else x
    copied(network).hidden.weight.data.zero_()
    assert network.hidden.weight.any()


class Frozen(dict):
    """A dictionary that refuses changes, as some libraries keep a network's options."""

    def __setitem__(self, key, value):
        raise TypeError("these options are read-only")

    def clear(self):
        raise TypeError("these options are read-only")

    def __deepcopy__(self, memo):
        return self


def test_a_network_may_keep_options_that_refuse_changes(go):
    class Net(Bends):
        def __init__(self):
            super().__init__()
            self.options = Frozen(width=16)

    go(model=Net)


class WrapsInALoop(Bends):
    """Wraps a layer by a default of an argument, as a loop over layers has to."""

    def __init__(self):
        super().__init__()
        for layer in [self.hidden]:
            layer.forward = lambda x, forward=layer.forward: forward(x).tanh()

    def bent(self, x):
        return self.hidden(x)


class TakesAKeyword(Bends):
    def __init__(self):
        super().__init__()

        def bent(x, *, layer=self.hidden):
            return layer(x).tanh()

        self.bent = bent


class HoldsAPartial(Bends):
    def __init__(self):
        super().__init__()
        layers = [self.hidden]
        self.bent = functools.partial(lambda number, x: layers[number](x).tanh(), 0)


class Helper:
    def __init__(self, network):
        self.bent = lambda x: network.hidden(x).tanh()


class HoldsAHelper(Bends):
    def __init__(self):
        super().__init__()
        self.helper = {"by": [Helper(self)]}

    def bent(self, x):
        return self.helper["by"][0].bent(x)


class HoldsAWeakReference(Bends):
    def __init__(self):
        super().__init__()
        self.parent = parent = weakref.ref(self)
        self.hidden.register_forward_hook(lambda module, inputs, output: output + 0 * parent().hidden.bias)

    def bent(self, x):
        return self.parent().hidden(x).tanh()


class Scripted(Bends):
    def __init__(self):
        super().__init__()
        self.hidden = torch.jit.script(self.hidden)


def bend(x: torch.Tensor) -> torch.Tensor:
    return x.tanh()


class HoldsAScriptedFunction(Bends):
    def __init__(self):
        super().__init__()
        self.tanh = torch.jit.script(bend)

    def bent(self, x):
        return self.tanh(self.hidden(x))


FORMS = [HoldsAFunction, WrapsALayer, HooksAnotherLayer, ListsFunctions, HasADefault, HasATuple, WrapsInALoop]
FORMS += [TakesAKeyword, HoldsAPartial, HoldsAHelper, HoldsAWeakReference, Scripted, HoldsAScriptedFunction]


@pytest.mark.parametrize("network", FORMS)
def test_functions_that_hold_a_network_compute_with_its_copies(tmp_path, network):
    """The clients' network is a copy of the program's, and MOON compares it with frozen copies."""
    results = []
    for kind in (Bends, network):
        torch.manual_seed(0)
        options = {"clients": 3, "rounds": 2, "samples": 100, "progress": False, "out": tmp_path / kind.__name__}
        options["workers"] = 0  # weak references and scripted modules cannot be sent to processes
        results.append(fedcore.run(model=kind(), plugins={"moon": {"projection": False}}, **options))
    expected, result = (each.model.state_dict() for each in results)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    exported, x = results[1].network, torch.ones(1, 1, 8, 8)
    before = exported(x)
    for parameter in results[1].model.parameters():
        parameter.data.zero_()
    assert torch.equal(exported(x), before)


class HalvesAGradient(Bends):
    def bent(self, x):
        half = self.hidden.weight / 2
        return F.linear(x, half + half.detach(), self.hidden.bias).tanh()


class HooksAGradient(Bends):
    def __init__(self):
        super().__init__()
        self.hidden.weight.register_hook(lambda gradient: gradient / 2)


class HooksAfterAGradient(Bends):
    def __init__(self):
        super().__init__()
        self.hidden.weight.register_post_accumulate_grad_hook(self.halve)

    @staticmethod
    def halve(weight):
        weight.grad /= 2


@pytest.mark.parametrize("network", [HooksAGradient, HooksAfterAGradient])
@pytest.mark.parametrize("workers", [0, 2])
def test_hooks_on_gradients_of_a_given_network_are_called(tmp_path, network, workers):
    """deepcopy and pickle leave them out."""
    results = []
    for kind in (HalvesAGradient, network):
        torch.manual_seed(0)
        options = {"clients": 3, "rounds": 1, "samples": 100, "progress": False, "out": tmp_path / kind.__name__}
        results.append(fedcore.run(model=kind(), workers=workers, **options).model.state_dict())
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-6)


class DropsOut(Bends):
    """Is in training mode in training, and in eval mode in evaluation."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Sequential(nn.BatchNorm1d(16), nn.Dropout(0.5))

    def bent(self, x):
        return self.drop(self.hidden(x))


class ScriptedDropout(DropsOut):
    def __init__(self):
        super().__init__()
        self.drop = torch.jit.script(self.drop)


def test_a_scripted_module_has_the_mode_of_its_network(go):
    """It keeps its mode outside of the attributes of a module."""
    expected, result = (go(model=kind, samples=100, rounds=2, workers=0) for kind in (DropsOut, ScriptedDropout))
    torch.testing.assert_close(result.model.state_dict(), expected.model.state_dict(), rtol=0, atol=1e-6)


@functools.lru_cache
def ramp(samples):
    """Return a factor per row, as masks and positions are kept by their size."""
    return torch.linspace(0.5, 1, samples)[:, None]


class CachesByTheBatch(Bends):
    """Keeps tensors of evaluation for training."""

    def bent(self, x):
        return self.hidden(x) * ramp(len(x))


def test_tensors_that_evaluation_made_serve_in_training(go):
    """The first run's evaluation makes a factor for 100 rows, which the second one trains with."""
    for batch_size in (60, 100):
        go(model=CachesByTheBatch, samples=300, clients=1, workers=0, batch_size=batch_size)


LAYER = nn.Linear(64, 16)


class TakesAGlobalLayer(Bends):
    def bent(self, x):
        return LAYER(x)


class ListsLayers(Bends):
    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(64, 16)]

    def bent(self, x):
        return self.layers[0](x)


class CachesALayer(Bends):
    """Computes with its own layer, and so do its copies."""

    def __init__(self):
        super().__init__()
        self.layer = functools.lru_cache(lambda: self.hidden)

    def bent(self, x):
        return self.layer()(x)


def splits(network):
    """Return a factory of SplitModels with the layers of a network below the last one."""

    def make(num_classes, input_shape):
        whole = network()
        last, whole.head = whole.head, nn.Identity()
        return fedcore.SplitModel(whole, last.in_features, num_classes)

    return make


class AsksATeacher(ListsLayers):
    def bent(self, x):
        with torch.no_grad():
            return self.layers[0](x)


def test_a_network_that_computes_with_layers_of_others_is_refused(go):
    """They are neither trained nor sent. Of a network with a cache, evaluation makes a copy, which uses its layers."""
    for network in (TakesAGlobalLayer, ListsLayers, CachesALayer):
        with raises(ConfigError, (16, 64)):
            go(model=network)
        with raises(ConfigError, (16, 64)):
            go(model=splits(network))
    assert go(model=AsksATeacher).metrics["global"]["accuracy"] > 0
