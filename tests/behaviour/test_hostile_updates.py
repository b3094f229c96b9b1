"""Updates that are none: refused by name, counted, and the round is, bit by bit, the one without that client."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest
import torch

import fedcore
from fedcore import Metric, Plugin, hookimpl, question
from fedcore.base.errors import ConfigError, RoundFailedError
from fedcore.client.messages import ClientFailure, Reply
from fedcore.data import Dataset, ResidentSamples, load_dataset
from fedcore.engines.in_process import InProcessEngine
from fedcore.runs.directory import RunDirectory
from fedcore.server.validation import MIB
from fedcore_testing import PersonalClassifier
from tests import support
from tests.exchanges import Rotates
from tests.sentences import check, raises
from tests.support import client_state, committed, lines, model_bytes

BAD = 2
"""The hostile client."""
W, B = "classifier.weight", "classifier.bias"
RUN = {
    "rounds": 1,
    "client_test_fraction": 0.2,
    "dataset": "module:tests.behaviour.test_hostile_updates.few_digits",
    "model": "module:tests.toy.batch_norm_mlp",
    "partition": "iid",
    "batch_size": 32,
}
DEEP: list = []
for _ in range(100_000):
    DEEP = [DEEP]


def few_digits(data_dir=None):
    """Enough to train on, few enough for a hundred runs."""
    digits = load_dataset("digits", None)
    parts = [
        ResidentSamples(part.gather(torch.arange(200)).view(200, 1, 8, 8), part.labels[:200], [0.0], [1.0])
        for part in (digits.train, digits.test)
    ]
    return Dataset("few-digits", *parts, num_classes=10, input_shape=(1, 8, 8))


class Sends(Plugin):
    """Sends a tensor up, sums it on the server and counts its client's rounds."""

    @hookimpl
    def end_local(self, client):
        client.state["rounds"] = client.state.get("rounds", 0) + 1
        return {"x": torch.full((3,), float(client.id + 1))}

    @hookimpl
    def pre_aggregate(self, server, update):
        server.state["seen"] = server.state.get("seen", 0) + 1

    @hookimpl
    def accumulate(self, server, update):
        server.state["names"] = [*server.state.get("names", []), update.client]
        server.state["sum"] = server.state.get("sum", torch.zeros(3)) + update.payload["x"].view(3)


class Quiet(Plugin):
    """Sends nothing."""

    @hookimpl
    def accumulate(self, server, update):
        server.state["clients"] = server.state.get("clients", 0) + 1


class Hostile:
    """An engine that lets ``corrupt`` have every outcome on its way to the server; it gives the pairs that arrive."""

    workers = 1

    def __init__(self, spec, corrupt):
        self._inner, self._corrupt = InProcessEngine(spec), corrupt

    def share(self, key, payload):
        self._inner.share(key, payload)

    def unshare(self, key):
        self._inner.unshare(key)

    def run(self, tasks, *, window=None):
        for task, outcome in self._inner.run(tasks, window=window):
            yield from self._corrupt(task, outcome)

    def close(self):
        self._inner.close()


def hostile(tmp_path, corrupt, *plugins, **options):
    config = support.config(tmp_path, *(plugins or (Sends, Quiet)), **{**RUN, **options})
    return fedcore.run(config, engine=lambda spec: Hostile(spec, corrupt))


def only(kind, corrupt):
    """Corrupt one kind of task of the hostile client."""

    def run(task, outcome):
        yield task, corrupt(task, outcome) if task.client == BAD and task.kind == kind else outcome

    return run


def without(task, outcome):
    return ClientFailure("unreachable", "not there")


@pytest.fixture(scope="module")
def absent(tmp_path_factory):
    """The same run, in which the client never answers."""
    return hostile(tmp_path_factory.mktemp("absent"), only("fit_begin", without))


def standing(result):
    """Return all that a run comes to, but for the words about the hostile client."""
    state = committed(result)
    records = [{**line, "failures": len(line["failures"])} for line in lines(result)]
    plugins = {
        plugin: {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in values.items()}
        for plugin, values in state.plugins.items()
    }
    return model_bytes(result), records, plugins, state.manifest, [client_state(result, k) for k in (0, 1, 3)]


def refused(result):
    """Return the messages about the hostile client, one a round; nobody else failed."""
    messages = []
    for line in lines(result):
        (failure,) = line["failures"]
        assert failure["client"] == BAD
        assert failure["kind"] in ("rejected", "diverged")
        assert line["accepted"] == 3
        messages.append(failure["message"])
    return messages


# --- every way to send something wrong -----------------------------------------------------------------------------


def tensor(name, change, group="model"):
    def corrupt(task, outcome):
        tensors = dict(getattr(outcome, group))
        changed = change(tensors.pop(name).clone())
        return replace(outcome, **{group: {**tensors, **({} if changed is None else {name: changed})}})

    return corrupt


def extra(name, value, group="model"):
    return lambda task, outcome: replace(outcome, **{group: {**getattr(outcome, group), name: value}})


def payload(name, change):
    """Change what is sent for the plugin ``sends``."""

    def corrupt(task, outcome):
        tensors = dict(outcome.payload["sends"])
        changed = change(tensors.pop(name, None))
        own = {**tensors, **({} if changed is None else {name: changed})}
        return replace(outcome, payload={**outcome.payload, "sends": own})

    return corrupt


def says(**changes):
    return lambda task, outcome: replace(outcome, **changes)


def losses(value):
    return says(metrics={"losses": value})


def with_value(value):
    def change(tensor):
        tensor.view(-1)[0] = value
        return tensor

    return change


NAN, INF = float("nan"), float("inf")
RUNNING = "encoder.base.2.running_var"
CASES = {
    # tensors of the model
    "nan": (tensor(W, with_value(NAN)), f"'{W}' has values that are not finite"),
    "infinite": (tensor(W, with_value(-INF)), f"'{W}' has values that are not finite"),
    "nan in a buffer": (tensor(RUNNING, with_value(NAN)), "running_var' has values that are not finite"),
    "shape": (tensor(W, lambda t: t.T), r"\(16, 10\) torch.float32, expected \(10, 16\) torch.float32"),
    "one number": (tensor(W, lambda t: t.sum()), r"is \(\) torch.float32, expected \(10, 16\)"),
    "dtype": (tensor(W, lambda t: t.double()), "torch.float64, expected .* torch.float32"),
    "complex": (tensor(W, lambda t: t.to(torch.complex64)), "torch.complex64, expected"),
    "float8": (tensor(W, lambda t: t.to(torch.float8_e4m3fn)), "float8_e4m3fn.*expected a dense tensor"),
    "sparse": (tensor(W, lambda t: t.to_sparse()), "sparse_coo.*expected a dense tensor"),
    "no memory": (tensor(W, lambda t: t.to("meta")), "on meta; expected a dense tensor on the CPU"),
    "no tensor": (tensor(W, lambda t: t.tolist()), "is a list, expected a tensor"),
    "missing": (tensor(W, lambda t: None), f"'{W}' is missing"),
    "unknown name": (extra("backdoor", torch.ones(1)), "'backdoor' is not expected"),
    "name is no text": (extra(7, torch.ones(1)), "expected a tensor"),
    "no name": (extra("", torch.ones(1)), "'' is not expected"),
    "nothing": (says(model={}), "is missing"),
    "no mapping": (says(model=[1]), "sent a list, expected tensors by name"),
    # payloads
    "silent plugin": (extra("quiet", {"x": torch.ones(1)}, "payload"), "'quiet', which has no hook that sends"),
    "no plugin of this run": (extra("moon", {"x": torch.ones(1)}, "payload"), "'moon', which is not a plugin"),
    "the builtin": (extra("fedavg", {"x": torch.ones(1)}, "payload"), "'fedavg', which is not a plugin"),
    "payload without a plugin": (extra("", {"x": torch.ones(1)}, "payload"), "'', which is not a plugin"),
    "payload no mapping": (extra("sends", torch.ones(1), "payload"), "sent a Tensor, expected tensors by name"),
    "nan in a payload": (payload("x", with_value(NAN)), "'x' of plugin 'sends' has values"),
    "nan, complex": (payload("y", lambda t: torch.full((1,), NAN * 1j)), "'y' of plugin 'sends' has values"),
    "nan without a name": (payload("", lambda t: torch.full((1,), NAN)), "'' of plugin 'sends' has values"),
    "payload of odd dtype": (payload("y", lambda t: torch.zeros(2).to(torch.float8_e5m2)), "expected a dense"),
    "oversize": (payload("y", lambda t: torch.zeros(17 * MIB)), r"take 68.0 MiB, at most 64 .*--max-payload"),
    "missing payload": (payload("x", lambda t: None), "hook accumulate .* client 2.* KeyError: 'x'"),
    "payload that breaks the hook": (payload("x", lambda t: t[:2]), "hook accumulate .* RuntimeError"),
    # who and what for
    "another client's": (says(client=1), "client is 1, expected 2"),
    "no outcome": (lambda task, outcome: None, "sent NoneType, expected ClientUpdate"),
    "another kind": (lambda task, outcome: Reply(outcome.model), "sent Reply, expected ClientUpdate"),
    # counts
    "no samples": (says(samples=0), r"samples: input should be greater than or equal to 1 \(given: 0\)"),
    "negative samples": (says(samples=-5), r"samples: .* \(given: -5\)"),
    "more samples than it holds": (says(samples=41), "samples is 41, expected at most the 40 that it holds"),
    "huge": (says(samples=10**400), "samples: .*less than or equal to"),
    "samples True": (says(samples=True), r"samples: .*valid integer \(given: True\)"),
    "samples 3.0": (says(samples=3.0), r"samples: .*valid integer \(given: 3.0\)"),
    "samples nan": (says(samples=NAN), "samples: "),
    "samples text": (says(samples="9" * 10_000), r"samples: .*given: '9999.*\.\.\..*999'"),
    "no steps": (says(steps=0), "steps: "),
    "more steps than there are": (says(steps=999), r"steps is 999, expected at most \d, in 1 epochs"),
    "lr": (says(lr=0.1), "lr is 0.1, expected the round's 0.05"),
    "lr nan": (says(lr=NAN), "lr: input should be a finite number"),
    "momentum": (says(momentum=0.0), "momentum is 0.0, expected the run's 0.9"),
    "momentum text": (says(momentum="0.9"), "momentum: input should be a valid number"),
    # versions of its state
    "version of another round": (says(version=17), r"version is 17, expected a state of round \d"),
    "version text": (says(version="../../etc"), "version: input should be a valid integer"),
    # numbers that are none
    "no metrics": (says(metrics=None), "metrics: input should be a valid dictionary"),
    "losses no mapping": (losses([1.0]), "metrics losses: input should be a valid dictionary"),
    "loss text": (losses({"task": "0.3"}), "metrics losses task: input should be a valid number"),
    "loss nan": (losses({"task": NAN}), "metrics losses task: input should be a finite number"),
    "loss True": (losses({"task": True}), "metrics losses task: input should be a valid number"),
    "loss beyond all": (losses({"task": 1e300}), "metrics losses task: "),
    "loss of nobody": (losses({"<script>": 0.5}), "loss '<script>' belongs to no plugin of this run"),
    "metrics too long": (says(metrics={"note": "x" * 100_000}), r"metrics take \d+ bytes, at most 65536"),
    "metrics too deep": (says(metrics={"note": DEEP}), "metrics are not JSON"),
    "metrics no JSON": (says(metrics={"note": {1, 2}}), "metrics are not JSON with finite numbers"),
    "metrics infinite": (says(metrics={"note": [INF]}), "metrics are not JSON with finite numbers"),
    "seconds nan": (says(seconds=NAN), "seconds: "),
    "seconds negative": (says(seconds=-1.0), "seconds: "),
    "seconds beyond all": (says(seconds=1e300), "seconds: "),
    "plugin_seconds": (says(plugin_seconds={"sends": "long"}), "plugin_seconds sends: "),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_by_name_and_the_round_is_that_without_the_client(tmp_path, absent, case):
    corrupt, words = CASES[case]
    result = hostile(tmp_path, only("fit_begin", corrupt))
    for message in refused(result):
        assert len(message) <= 1100
        assert f"client {BAD}" in message
        assert re.search(words, message), message
    assert standing(result) == standing(absent)


@pytest.mark.parametrize("case", ["payload that breaks the hook", "more samples than it holds"])
def test_it_goes_on_for_rounds(tmp_path, case):
    result = hostile(tmp_path, only("fit_begin", CASES[case][0]), rounds=3)
    assert len(refused(result)) == 3
    assert standing(result) == standing(hostile(tmp_path, only("fit_begin", without), rounds=3))
    assert client_state(result, 1)["sends"] == {"rounds": 3}


def test_an_honest_client_is_taken(tmp_path, absent):
    result = hostile(tmp_path, only("fit_begin", lambda task, outcome: outcome))
    assert [(line["accepted"], line["failures"], line["ignored"]) for line in lines(result)] == [(4, [], [])]
    assert standing(result) != standing(absent)


def test_an_oversize_payload_that_the_run_allows(tmp_path):
    """The limit is an option, in MiB, both ways."""
    send = only("fit_begin", payload("y", lambda t: torch.zeros(3 * MIB // 4)))
    allowed = hostile(tmp_path, send, rounds=1, max_payload=4)
    assert lines(allowed)[0]["accepted"] == 4
    (message,) = refused(hostile(tmp_path, send, rounds=1, max_payload=2))
    check(message, "3.0 MiB", 2, "--max-payload")


@pytest.mark.parametrize("bad", [0, -1, 1.5, 2**40])
def test_the_limit_is_bounded(bad):
    with raises(ConfigError, "--max-payload", bad):
        fedcore.RunConfig.create({"max_payload": bad})


def test_when_everybody_is_hostile_the_round_fails_with_their_names(tmp_path):
    def corrupt(task, outcome):
        yield task, CASES["nan"][0](task, outcome) if task.kind == "fit_begin" else outcome

    with raises(RoundFailedError, "0", "4", "3", W):
        hostile(tmp_path, corrupt)


def test_a_failure_in_words_of_its_own(tmp_path, absent):
    """Messages have a length for people. The kinds of clients on a network are checked where they arrive."""
    failure = only("fit_begin", lambda task, outcome: ClientFailure("rejected", "x" * 10**6))
    result = hostile(tmp_path, failure)
    assert [len(message) for message in refused(result)] == [1004]
    assert standing(result) == standing(absent)


# --- twice, for another, or not at all -----------------------------------------------------------------------------


def test_a_second_answer_changes_nothing_and_is_counted(tmp_path):
    def twice(task, outcome):
        yield task, outcome
        if task.client == BAD and task.kind == "fit_begin":
            yield task, tensor(W, with_value(1e6))(task, outcome)

    result, honest = hostile(tmp_path, twice), hostile(tmp_path, lambda task, outcome: [(task, outcome)])
    assert model_bytes(result) == model_bytes(honest)
    for number, line in enumerate(lines(result)):
        assert (line["accepted"], line["failures"]) == (4, [])
        (ignored,) = line["ignored"]
        assert (ignored["client"], ignored["kind"]) == (BAD, "repeated")
        assert f"round-{number}-fit-{BAD}" in ignored["message"]


def test_a_bad_answer_is_not_made_good_by_a_second_one(tmp_path, absent):
    def regret(task, outcome):
        if task.client == BAD and task.kind == "fit_begin":
            yield task, CASES["nan"][0](task, outcome)
        yield task, outcome

    result = hostile(tmp_path, regret)
    assert len(refused(result)) == 1
    assert model_bytes(result) == model_bytes(absent)


def test_answers_that_nobody_asked_for(tmp_path):
    def old(task, outcome):
        yield task, outcome
        if task.client == BAD and task.kind == "fit_begin":
            yield replace(task, id="round-99-fit-2"), outcome

    result, honest = hostile(tmp_path, old), hostile(tmp_path, lambda task, outcome: [(task, outcome)])
    assert model_bytes(result) == model_bytes(honest)
    assert [[i["kind"] for i in line["ignored"]] for line in lines(result)] == [["unasked"]]


def test_a_client_that_never_answers_is_named_and_keeps_nobody_waiting(tmp_path, absent):
    def silent(task, outcome):
        if task.client != BAD or task.kind != "fit_begin":
            yield task, outcome

    result = hostile(tmp_path, silent)
    for line in lines(result):
        (failure,) = line["failures"]
        assert (failure["client"], failure["kind"], line["accepted"]) == (BAD, "unreachable", 3)
    assert standing(result) == standing(absent)


# --- the other things that clients are asked for --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("corrupt", "words"),
    [
        (tensor(W, with_value(NAN), "tensors"), "'classifier.weight' has values that are not finite"),
        (tensor(W, lambda t: t.half(), "tensors"), "torch.float16, expected"),
        (tensor(B, lambda t: None, "tensors"), "'classifier.bias' is missing"),
        (extra("encoder.base.1.weight", torch.ones(1), "tensors"), "'encoder.base.1.weight' is not expected"),
        (says(epoch=0), "did not pause at epoch 1"),
        (lambda task, outcome: Reply(outcome.tensors), "sent Reply, expected Pause"),
        (lambda task, outcome: 7, "sent int, expected Pause"),
    ],
)
def test_at_an_exchange(tmp_path, corrupt, words):
    options = {"local_epochs": 2, "rounds": 1}
    result = hostile(tmp_path, only("fit_begin", corrupt), Rotates, **options)
    (message,) = refused(result)
    assert re.search(f"client {BAD}.*{words}", message), message
    assert model_bytes(result) == model_bytes(hostile(tmp_path, only("fit_begin", without), Rotates, **options))


class Asks(Plugin):
    """Keeps who answers what."""

    @hookimpl
    def begin_round(self, server):
        found = {str(answer.client): answer.tensors["x"].tolist() for answer in server.ask("all", self.x)}
        server.state["found"] = found

    @question
    def x(self, client):
        return {"x": torch.tensor([float(client.id)])}


@pytest.mark.parametrize(
    ("corrupt", "words"),
    [
        (tensor("x", with_value(INF), "tensors"), "'x' of plugin 'asks' has values that are not finite"),
        (extra("y", torch.zeros(17 * MIB), "tensors"), "take 68.0 MiB"),
        (tensor("x", lambda t: t.to_sparse(), "tensors"), "expected a dense tensor"),
        (lambda task, outcome: "yes", "sent str, expected Reply"),
    ],
)
def test_an_answer(tmp_path, corrupt, words):
    result = hostile(tmp_path, only("ask", corrupt), Asks, rounds=1)
    (line,) = lines(result)
    assert line["accepted"] == 4
    assert [(f["client"], f["kind"]) for f in line["failures"]] == [(BAD, "rejected")]
    assert re.search(f"client {BAD}: .*{words}", line["failures"][0]["message"])
    assert committed(result).plugins["asks"]["found"] == {str(k): [float(k)] for k in (0, 1, 3)}


def counts(name, value):
    """An evaluation with other counts; a list or a number is sent as a tensor."""
    sent = value
    if isinstance(value, (list, int)):
        tensor = torch.tensor(value)
        sent = tensor.double() if tensor.is_floating_point() else tensor
    return lambda task, outcome: replace(outcome, tensors={**outcome.tensors, name: sent})


def own(name, value):
    return counts(f"global_local/counts/{name}", value)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "corrupt",
    [
        says(tensors={"global_local": None}),
        says(tensors={}),
        says(tensors=[1]),
        says(failed=None),
        own("correct", [10**6] * 10),
        own("correct", [-1] * 10),
        own("correct", [0.5] * 10),
        own("correct", "1"),
        own("correct", [0]),
        own("correct", torch.zeros(10, dtype=torch.int64).to_sparse()),
        own("total", [0] * 10),
        own("total", [1 << 62] * 4 + [1] * 6),
        own("loss", "0"),
        own("loss", True),
        own("loss", torch.zeros(3, dtype=torch.float64)),
        own("undefined", 10**6),
        own("more", 1),
        lambda task, outcome: None,
    ],
    ids=range(18),
)
def test_an_evaluation(tmp_path, corrupt):
    """It is left out of the figures, named and counted; the run trains on."""
    result = hostile(tmp_path, only("evaluate", corrupt), rounds=1)
    gone = hostile(tmp_path, only("evaluate", without), rounds=1)
    found, expected = lines(result)[0]["metrics"], lines(gone)[0]["metrics"]
    assert found["failed"] == expected["failed"] == 1
    (failure,) = found["failures"]
    assert (failure["client"], failure["kind"]) == (BAD, "rejected")
    assert f"client {BAD}: " in failure["message"]
    assert found["global_local"] == expected["global_local"]
    assert model_bytes(result) == model_bytes(gone)


@pytest.mark.parametrize("matrix", [None, [], [[1]], [[0] * 10] * 10, [[1.0] * 10] * 10, [[10**6] * 10] * 10])
def test_a_confusion_matrix(tmp_path, matrix):
    """One that is no matrix, or not of the counts beside it, is rejected with them."""

    def corrupt(task, outcome):
        assert task.meta["confusion"]
        return counts("personal/counts/confusion", matrix)(task, outcome)

    result = hostile(tmp_path, only("evaluate", corrupt), PersonalClassifier, rounds=1)
    (failure,) = result.summary["metrics"]["failures"]
    assert (failure["client"], failure["kind"]) == (BAD, "rejected")
    assert "confusion" in failure["message"]
    assert result.metrics["personal"]["clients"] == 3


class Share(Metric):
    """The share of samples that are predicted as class 0, which fails for more of them than samples."""

    def count(self, logits, labels):
        return torch.tensor([(logits.argmax(dim=1) == 0).sum(), len(labels)])

    def value(self, counts):
        if counts[0] > counts[1]:
            raise ValueError("more predictions than samples")
        return float(counts[0] / counts[1])


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "sent",
    [None, [], [1.0], [1.0, 2, 3], "1", [True, True], [math.nan, 2], [math.inf, 2], [5, 2], [[1.0, 2]], [5.0, 2]],
    ids=str,
)
def test_counts_of_a_metric(tmp_path, sent):
    """Counts that the metric cannot have are rejected with the other ones of the client."""
    result = hostile(
        tmp_path,
        only("evaluate", counts("global_local/metrics/Share", sent)),
        rounds=1,
        metrics=[f"module:{__name__}.Share"],
    )
    metrics = result.summary["metrics"]
    (failure,) = metrics["failures"]
    assert (failure["client"], failure["kind"]) == (BAD, "rejected")
    assert "Share'" in failure["message"]
    assert metrics["global_local"]["clients"] == 3
    assert 0 <= metrics["global_local"]["Share_mean"] <= 1


def test_a_claim_of_a_state_that_is_not_there(tmp_path):
    """A version that the manifest would name, and the next round would look for in vain."""
    claim = only("fit_begin", lambda task, outcome: says(version=task.round)(task, outcome))
    for message in refused(hostile(tmp_path, claim, Quiet, rounds=2)):
        assert re.search(r"client 2: version is \d, expected a state of round \d that is there, or None", message)


def test_a_claim_of_an_older_state_that_is_there(tmp_path):
    first, second = lines(hostile(tmp_path, only("fit_begin", says(version=0)), Sends, rounds=2))
    assert first["failures"] == []
    (failure,) = second["failures"]
    check(failure["message"], "client 2", "version is 0", "round 1")


def test_what_is_written_of_it_is_json(tmp_path):
    """No NaN, no infinity: every line can be read by any parser."""
    result = hostile(tmp_path, only("fit_begin", losses({"task": 3.4e38, "sends.<b>": -3.4e38})))
    text = (RunDirectory(result.directory).path / "metrics.jsonl").read_text()

    def none_such(constant):
        raise AssertionError(constant)

    for line in text.splitlines():
        assert json.loads(line, parse_constant=none_such)["accepted"] == 4
