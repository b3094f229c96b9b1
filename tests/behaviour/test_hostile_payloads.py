"""Malformed payloads and answers to every installed method: each is refused by name, and changes nothing."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from importlib.metadata import entry_points

import pytest
import torch

import fedcore
from fedcore import ClientUpdate, Plugin, RunConfig, hookimpl, question
from fedcore.client.messages import ClientFailure, Reply
from fedcore.data import Dataset, ResidentSamples, load_dataset
from fedcore.engines.in_process import InProcessEngine
from fedcore.hooks.checks import create_plugin
from fedcore.runs.directory import RunDirectory
from fedcore_functional.statistics import check_statistics
from fedcore_testing.fingerprint import fingerprint
from tests.sentences import check, raises
from tests.support import CORRECTED

NAMES = sorted({point.name for point in entry_points(group="fedcore.plugins")} - {"fedavg", "dp", "local-dp"})
HONEST = 3
"""Clients 0 to 2 behave; each of the others sends one thing that is wrong."""
RUN = {"model": "mlp", "workers": 0, "device": "cpu", "rounds": 2, "local_epochs": 2, "batch_size": 32}
OPTIONS = {
    **CORRECTED,
    "fedproc": {"first_round": "contrast"},
    "diagnostics": {"measures": ["classifier", "drift"]},
}
"""With which a method both asks and receives updates, and needs no public samples."""
# Sends the model's names as far as they were trained: one less is a client that froze it.
MAY_BE_ABSENT = {"scaffold", "feddc"}


@functools.cache
def few_digits(data_dir=None):
    digits = load_dataset("digits", None)
    parts = [
        ResidentSamples(part.gather(torch.arange(300)).view(300, 1, 8, 8), part.labels[:300], [0.0], [1.0])
        for part in (digits.train, digits.test)
    ]
    return Dataset("few-digits", *parts, num_classes=10, input_shape=(1, 8, 8))


class Between(InProcessEngine):
    """Lets ``corrupt`` have every outcome, which keeps what was sent."""

    def __init__(self, spec, corrupt):
        super().__init__(spec)
        self.corrupt = corrupt

    def run(self, tasks, *, window=None):
        for task, outcome in super().run(tasks, window=window):
            yield task, self.corrupt(task, outcome) if isinstance(outcome, (ClientUpdate, Reply)) else outcome


def train(tmp_path, plugin, corrupt, clients, options=None, **run):
    given = {
        **RUN,
        "dataset": f"module:{__name__}.few_digits",
        "plugins": {plugin: options or OPTIONS.get(plugin, {})},
        "clients": clients,
        "partition": "iid",
        "client_test_fraction": 0.0,
        "out": tmp_path / f"run-{len(list(tmp_path.iterdir()))}",
    }
    config = RunConfig(**{**given, **run})
    return fedcore.run(config, engine=lambda spec: Between(spec, corrupt))


# --- what can be wrong with a tensor -------------------------------------------------------------------------------

WRONG = {
    "one number": lambda t: t.flatten()[0].clone(),
    "one row": lambda t: t[:1].clone() if t.ndim else None,
    "a dimension more": lambda t: t.unsqueeze(0).clone(),
    "a row more": lambda t: torch.cat([t, t[:1]]) if t.ndim else None,
    "empty": lambda t: t[:0].clone() if t.ndim else None,
    "complex": lambda t: t.to(torch.complex64),
    "missing": lambda t: None,
}


def faults(tensors, plugin):
    """Return (what, name, changed tensors) for every way to be wrong, and one tensor too many."""
    found = []
    for name, tensor in tensors.items():
        for what, change in WRONG.items():
            changed = change(tensor)
            if changed is None and (what != "missing" or plugin in MAY_BE_ABSENT):
                continue
            if changed is not None and changed.shape == tensor.shape and changed.dtype == tensor.dtype:
                continue
            others = {key: value for key, value in tensors.items() if key != name}
            found.append((what, name, others if changed is None else {**others, name: changed}))
    found.append(("unknown", "nobody's", {**tensors, "nobody's": torch.ones(())}))
    return found


SENT_BY = {"fit": ClientUpdate, "ask": Reply}


def own(outcome, plugin):
    """Return what an outcome brings for a plugin."""
    return outcome.tensors if isinstance(outcome, Reply) else outcome.payload.get(plugin, {})


def with_own(outcome, plugin, tensors):
    if isinstance(outcome, Reply):
        return Reply(tensors)
    return replace(outcome, payload={**outcome.payload, plugin: tensors})


def sent_by(tmp_path, plugin, kind):
    """Return what a client sends beside the model in one round, or answers; empty where it sends nothing."""
    seen = {}

    def look(task, outcome):
        if task.client == 0 and isinstance(outcome, SENT_BY[kind]):
            seen.update(own(outcome, plugin))
        return outcome

    train(tmp_path, plugin, look, HONEST)
    return seen


def standing(result):
    directory = RunDirectory(result.directory)
    state = directory.checkpoints.load()
    return (directory.path / "model.safetensors").read_bytes(), fingerprint(state.plugins)


QUICK = ("fedproc", "fedcme", "scaffold", "ccvr")
"""Methods that are tested every time: two of the papers', and two more of other kinds of payload."""


def senders():
    """Yield the plugins and ways by which something may come up."""
    for name in NAMES:
        plugin = create_plugin(name, {})
        if plugin.implements("end_local") or plugin.implements("pre_upload"):
            yield pytest.param(name, "fit", marks=() if name in QUICK else pytest.mark.slow)
        if plugin.questions:
            yield pytest.param(name, "ask", marks=() if name in QUICK else pytest.mark.slow)


@pytest.mark.parametrize(("plugin", "kind"), list(senders()))
def test_every_malformed_tensor_is_refused_by_name(tmp_path, plugin, kind):
    tensors = sent_by(tmp_path, plugin, kind)
    if not tensors:
        pytest.skip(f"{plugin} sends nothing of this kind")
    wrong = faults(tensors, plugin)
    clients = HONEST + len(wrong)

    def is_meant(task, outcome):
        return isinstance(outcome, SENT_BY[kind]) and task.client >= HONEST

    def corrupt(task, outcome):
        if not is_meant(task, outcome):
            return outcome
        what, name, _ = wrong[task.client - HONEST]
        changed = {(w, n): tensors for w, n, tensors in faults(own(outcome, plugin), plugin)}.get((what, name))
        if changed is None:  # this client's own tensor cannot be wrong in this way
            return ClientFailure("unreachable", "not there")
        return with_own(outcome, plugin, changed)

    def absent(task, outcome):
        return ClientFailure("unreachable", "not there") if is_meant(task, outcome) else outcome

    result = train(tmp_path, plugin, corrupt, clients)
    messages = {}
    for record in RunDirectory(result.directory).metrics.read():
        for failure in record["failures"]:
            messages.setdefault(failure["client"], []).append((failure["kind"], failure["message"]))
    for number, (what, name, _) in enumerate(wrong):
        told = messages.get(HONEST + number, [])
        assert told, f"{what} {name!r} was taken"
        for reason, message in told:
            # Where shapes depend on each other, the message may name the tensor that no longer fits this one.
            named = plugin in message and any(repr(n) in message for n in {name, *tensors})
            assert reason == "unreachable" or (reason == "rejected" and named), message
    assert standing(result) == standing(train(tmp_path, plugin, absent, clients))


# --- values that fit no client -------------------------------------------------------------------------------------

SENT = {
    "classes": torch.tensor([0, 2]),
    "counts": torch.tensor([1, 5]),
    "means": torch.zeros(2, 3),
    "covariances": torch.zeros(2, 6),
}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"classes": torch.tensor([0, 0])}, ("'classes'", "0", "3")),
        ({"classes": torch.tensor([0, 4])}, ("'classes'", "0", "4")),
        ({"classes": torch.tensor([-1, 2])}, ("'classes'", "-1", "2")),
        ({"counts": torch.tensor([0, 5])}, ("'counts'", "0", "1")),
        ({"counts": torch.tensor([-3, 5])}, ("'counts'", "-3", "1")),
        ({"means": torch.zeros(2, 4)}, ("'means'", "2", "4", "torch.float32")),
    ],
)
def test_statistics_that_no_client_can_have(changed, named):
    check_statistics(SENT, 4, 3, samples=6)
    check_statistics({name: tensor[:0] for name, tensor in SENT.items()}, 4, 3, samples=6)
    with raises(ValueError, *named):
        check_statistics({**SENT, **changed}, 4, 3, samples=6)


def test_negative_counts_of_prototypes_are_refused(tmp_path):
    pytest.importorskip("fedcore_fedcd")

    def corrupt(task, outcome):
        if task.client != 1 or not isinstance(outcome, ClientUpdate):
            return outcome
        sent = own(outcome, "fedcd")
        return with_own(outcome, "fedcd", {**sent, "counts": torch.full_like(sent["counts"], -100)})

    result = train(tmp_path, "fedcd", corrupt, HONEST)
    for record in RunDirectory(result.directory).metrics.read():
        (failure,) = record["failures"]
        assert (failure["client"], failure["kind"]) == (1, "rejected")
        check(failure["message"], "client 1", "'counts'", -100, 0)


class Asks(Plugin):
    """Checks answers by a function that stumbles."""

    @hookimpl
    def begin_round(self, server):
        answers = server.ask("all", self.x, check=lambda answer: answer.tensors["x"].item())
        server.state["found"] = [answer.client for answer in answers]

    @question
    def x(self, client):
        return {"x": torch.zeros(1 + client.id)} if client.id < 2 else {}


def test_whatever_a_check_raises_leaves_that_answer_out(tmp_path):
    result = train(tmp_path, f"module:{__name__}.Asks", lambda task, outcome: outcome, HONEST)
    record = RunDirectory(result.directory).metrics.read()[0]
    told = {failure["client"]: failure["message"] for failure in record["failures"]}
    assert re.match(r"client 1: its answer to plugin 'asks': RuntimeError: .*Tensor", told[1])
    assert told[2] == "client 2: its answer to plugin 'asks': KeyError: 'x'"
    assert set(told) == {1, 2}
    assert RunDirectory(result.directory).checkpoints.load().plugins["asks"]["found"] == [0]


# --- values that would poison the server's state -------------------------------------------------------------------


def fit(**changes):
    """Let client 1 send something else in its updates: ``change(tensor)`` for each name."""

    def corrupt(task, outcome):
        if task.client != 1 or not isinstance(outcome, ClientUpdate):
            return outcome
        payload = {plugin: changed(tensors, changes) for plugin, tensors in outcome.payload.items()}
        return replace(outcome, model=changed(outcome.model, changes), payload=payload)

    return corrupt


def asked(**changes):
    """Let client 1 answer something else."""

    def corrupt(task, outcome):
        meant = task.client == 1 and isinstance(outcome, Reply)
        return Reply(changed(outcome.tensors, changes)) if meant else outcome

    return corrupt


def changed(tensors, changes):
    return {name: changes[name](tensor) if name in changes else tensor for name, tensor in tensors.items()}


def full(value, dtype=None):
    return lambda tensor: torch.full_like(tensor, value, dtype=dtype)


def one(value):
    def change(tensor):
        tensor = tensor.clone()
        tensor.view(-1)[0] = value
        return tensor

    return change


HUGE = fit(prototypes=full(1e200, torch.float64))
BEYOND = "has values up to 1.0e+30, more than 1e+18 counts as diverged"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("plugin", "corrupt", "words"),
    [
        *((plugin, HUGE, "'prototypes' of plugin .* up to 1.0e\\+200") for plugin in ("fedcd", "fedproc", "fedeccr")),
        ("fedproc", asked(prototypes=full(1e200, torch.float64)), "'prototypes' of plugin .* up to 1.0e\\+200"),
        ("fedproc", asked(counts=one(2**53)), "'counts' add up to .* expected the client's"),
        ("fedcd", fit(counts=full(2**63 - 1)), "'counts' add up to .* expected at most the client's .* training"),
        ("fedcd", fit(counts=one(2**53)), "'counts' add up to .* expected at most the client's .* training"),
        ("ccvr", asked(covariances=full(1e30)), "'covariances' of plugin 'ccvr' " + re.escape(BEYOND)),
        ("uscc", asked(covariances=full(1e30)), "'covariances' of plugin 'uscc' " + re.escape(BEYOND)),
        ("fedeccr", asked(covariances=full(1e30)), "'covariances' of plugin 'fedeccr' " + re.escape(BEYOND)),
        ("ccvr", asked(counts=one(2**62)), "'counts' add up to .* expected at most the client's"),
        ("scaffold", fit(**{"classifier.weight": full(1e30)}), "'classifier.weight' .*" + re.escape(BEYOND)),
        ("moon", fit(parameters=one(1e30)), r"client 1: 'encoder[\w.]+' " + re.escape(BEYOND)),
    ],
)
def test_a_client_whose_values_would_poison_a_state_is_left_out(tmp_path, plugin, corrupt, words):
    result = train(tmp_path, plugin, corrupt, HONEST)
    failures = [failure for record in RunDirectory(result.directory).metrics.read() for failure in record["failures"]]
    assert failures
    for failure in failures:
        assert (failure["client"], failure["kind"] in ("rejected", "diverged")) == (1, True)
        assert re.search(words, failure["message"]), failure["message"]
    state = RunDirectory(result.directory).checkpoints.load()
    tensors = [*state.model.values(), *(v for values in state.plugins.values() for v in values.values())]
    assert all(bool(tensor.isfinite().all()) for tensor in tensors if isinstance(tensor, torch.Tensor))


def times(factor):
    return lambda tensor: tensor * factor


LONG = r"holds a mean of length .*; no feature is longer than"


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("plugin", "options", "corrupt", "words"),
    [
        ("fedproc", {"feature_norm": 50}, fit(prototypes=times(1e3)), f"'prototypes' {LONG} 50"),
        ("fedproc", {"normalize": True}, fit(prototypes=times(2)), f"'prototypes' {LONG} 1"),
        ("fedeccr", {"feature_norm": 50}, fit(prototypes=times(1e3)), f"'prototypes' {LONG} 50"),
        ("fedeccr", {"feature_norm": 50}, asked(means=times(1e3)), f"'means' {LONG} 50"),
        ("fedcd", {}, fit(prototypes=times(2)), r"'prototypes' moved .*, but \d+ steps of SGD move at most"),
        ("fedcd", {"feature_norm": 50}, fit(prototypes=times(1e3)), f"'prototypes' ({LONG} 50|moved)"),
        ("fedcd-variants", {"normalize": True, "hpc": False}, fit(prototypes=times(2)), f"'prototypes' {LONG} 1"),
        ("fedcme", {"feature_norm": 50}, fit(features=times(1e3)), f"'features' {LONG} 50"),
        ("fedcme", {}, fit(vector=times(10)), "'vector' is .*, expected accuracies from 0 to 1"),
        ("fedcme", {}, fit(vector=times(-1)), "'vector' is .*, expected accuracies from 0 to 1"),
        ("ccvr", {}, asked(means=times(-1)), "'means' holds -.*; features after a ReLU are not negative"),
        ("ccvr", {"tukey": 0.5}, asked(means=times(-1)), "'means' holds -.*; features after a ReLU are not negative"),
        ("ccvr", {}, asked(covariances=times(1e4)), r"'covariances' holds a variance above n mean\^2"),
        ("ccvr", {}, asked(covariances=times(-1)), "'covariances' holds a matrix that is not positive semi-definite"),
        ("uscc", {"feature_norm": 50}, asked(covariances=times(1e4)), "'covariances' holds a trace of .* at most"),
    ],
)
def test_statistics_of_no_samples_are_refused_by_name(tmp_path, plugin, options, corrupt, words):
    result = train(tmp_path, plugin, corrupt, HONEST, options=options, local_epochs=2)
    failures = [failure for record in RunDirectory(result.directory).metrics.read() for failure in record["failures"]]
    assert failures
    for failure in failures:
        assert (failure["client"], failure["kind"]) == (1, "rejected")
        assert re.search(f"client 1.*{words}", failure["message"]), failure["message"]


def test_a_calibration_that_diverges_by_its_own_says_so(tmp_path):
    with raises(fedcore.DivergedError, "ccvr.lr", "1e+38"):
        train(
            tmp_path, "ccvr", lambda task, outcome: outcome, HONEST, options={"per_class": 4, "epochs": 2, "lr": 1e38}
        )
