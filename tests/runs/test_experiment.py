"""Whole runs: the same bits whatever runs them, and nothing lost whatever dies."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import fedcore
from fedcore import Loss, Plugin, RejectUpdate, hookimpl, question
from fedcore.base.errors import ConfigError, FedcoreError, RoundFailedError, RunDirectoryError, StorageError
from fedcore.runs import training
from fedcore.runs.api import evaluate_run, resume, started
from fedcore.runs.checkpoint import CheckpointStore
from fedcore.runs.directory import RunDirectory
from fedcore.runs.training import Interrupted
from fedcore_testing import EqualWeights, PersonalClassifier
from fedcore_testing.problems import with_batch_norm
from tests import support
from tests.exchanges import Rotates
from tests.sentences import raises, warns
from tests.support import client_state, committed, lines, model_bytes, weights

MOON = {"clients": 6, "participation": 0.5, "rounds": 3, "local_epochs": 2}
BATCH_NORM = {"model": "module:tests.toy.batch_norm_mlp"}


# --- the program around a run --------------------------------------------------------------------------------


@pytest.fixture
def set_for_torch():
    """What a notebook may have set: workers and later processes have none of it."""

    def state():
        kept = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        return torch.get_default_dtype(), torch.get_default_device(), *kept

    torch.set_default_dtype(torch.float64)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
        before = state()
        yield
        assert state() == before
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_run_has_its_own_results_whatever_the_program_set_for_torch(go, request, precision):
    """It failed, or had other results, with workers other ones than without."""
    plain = go(workers=0, precision=precision)
    request.getfixturevalue("set_for_torch")
    result = go(workers=0, precision=precision)
    assert model_bytes(result) == model_bytes(plain)
    assert evaluate_run(result.directory)["global"] == plain.metrics["global"]


class InItsOwnAutocast(Plugin):
    """Cross-entropy of a pass in 16 bits."""

    name = "in-its-own-autocast"

    @hookimpl
    def task_loss(self, step):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = step.model(step.x)[1]
        return torch.nn.functional.cross_entropy(logits.float(), step.y)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_in_bf16_learns_what_one_in_float32_does(go, workers):
    """Each step casts the weights anew: torch keeps the first ones as long as another autocast is around."""
    setting = {"workers": workers, "lr": 0.02, "batch_size": 8, "model": "mlp"}
    exact = go(**setting).metrics["global"]["loss"]
    for run in (go(precision="bf16", **setting), go(InItsOwnAutocast, **setting)):
        loss = run.metrics["global"]["loss"]
        assert loss == pytest.approx(exact, rel=0.01)
        assert loss != exact


# --- checkpoints beside the training ------------------------------------------------------------------------


def test_a_checkpoint_is_written_while_the_next_round_trains(go, monkeypatch):
    second, waited = threading.Event(), []
    save = CheckpointStore.save

    def late(store, state, *rest, **options):
        if state.round == 1:
            waited.append(second.wait(20))
        save(store, state, *rest, **options)

    class TellsOfTheSecondRound(Plugin):
        @hookimpl
        def end_local(self, client):
            if client.round == 1:
                second.set()

    monkeypatch.setattr(CheckpointStore, "save", late)
    result = go(TellsOfTheSecondRound, rounds=3, workers=0)
    assert waited == [True]
    assert RunDirectory(result.directory).checkpoints.load().round == 3


@pytest.mark.parametrize(
    ("every", "seconds", "rounds"),
    [
        (None, 1e9, [1, 2, 6, 6]),
        (None, 0.0, [1, 2, 3, 4, 5, 6, 6]),
        (1, 1e9, [1, 2, 3, 4, 5, 6, 6]),
        (4, 0.0, [4, 6, 6]),
    ],
)
def test_checkpoints_are_a_time_or_a_number_of_rounds_apart(go, monkeypatch, every, seconds, rounds):
    """By default the first is on the disk once the second begins, so that a killed run has lost two rounds at most."""
    saved, save = [], CheckpointStore.save
    monkeypatch.setattr(
        CheckpointStore, "save", lambda store, state, *r: (saved.append(state.round), save(store, state, *r))
    )
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", seconds)
    go("moon", **MOON | {"rounds": 6, "checkpoint_every": every})
    assert saved == rounds


def test_a_checkpoint_that_cannot_be_written_ends_the_run_which_goes_on_later(go, moon, monkeypatch, tmp_path):
    save = CheckpointStore.save

    def fails(store, state, *rest, **options):
        if state.round >= 2:
            raise StorageError("cannot write: the disk is full")
        save(store, state, *rest, **options)

    with monkeypatch.context() as patched:
        patched.setattr(CheckpointStore, "save", fails)
        with raises(StorageError):
            go("moon", out=tmp_path / "run", **MOON)
    assert RunDirectory(tmp_path / "run").checkpoints.load().round == 1
    assert model_bytes(resume(tmp_path / "run")) == model_bytes(moon)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_while_a_checkpoint_is_awaited_leaves_it_awaited(go, moon, monkeypatch, tmp_path):
    """The run ends once the checkpoint is on the disk, not before."""
    save, ending = CheckpointStore.save, threading.Event()

    def interrupts(store, state, *rest, **options):
        if state.round == 2:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            ending.wait(0.5)
        save(store, state, *rest, **options)

    with monkeypatch.context() as patched:
        patched.setattr(CheckpointStore, "save", interrupts)
        with pytest.raises(Interrupted):
            go("moon", out=tmp_path / "run", **MOON)
    assert RunDirectory(tmp_path / "run").checkpoints.load().round >= 2
    assert model_bytes(resume(tmp_path / "run")) == model_bytes(moon)


# --- the same bits ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def moon(tmp_path_factory):
    return support.run(tmp_path_factory.mktemp("moon"), "moon", **MOON)


def comparable(result):
    records = lines(result)
    summary = json.loads((Path(result.directory) / "summary.json").read_text())
    return records, summary["metrics"], summary["bytes"]


@pytest.mark.parametrize("workers", [1, 2])
def test_the_number_of_workers_does_not_reach_the_result(go, moon, workers):
    result = go("moon", workers=workers, **MOON)
    assert model_bytes(result) == model_bytes(moon)
    assert comparable(result) == comparable(moon)
    for client in range(6):
        one, other = client_state(result, client), client_state(moon, client)
        assert {name: tensor.tolist() for name, tensor in one.get("fedcore", {}).items()} == {
            name: tensor.tolist() for name, tensor in other.get("fedcore", {}).items()
        }


def test_runs_in_threads_of_one_program_take_turns(tmp_path):
    """Torch's global generator and number of threads are the process's."""
    had, together = torch.get_num_threads(), threading.Barrier(3)
    expected = model_bytes(support.run(tmp_path, model=with_batch_norm))

    def in_a_thread(_):
        together.wait()
        return model_bytes(support.run(tmp_path, model=with_batch_norm))

    with ThreadPoolExecutor(3) as pool, warns(RuntimeWarning):
        assert [*pool.map(in_a_thread, range(3))] == [expected] * 3
    assert torch.get_num_threads() == had


class WithAThread(Plugin):
    draw = staticmethod(lambda: torch.rand(1))

    @hookimpl
    def end_local(self, client):
        thread = threading.Thread(target=self.draw)
        thread.start()
        thread.join()


class OfNumPy(WithAThread):
    draw = staticmethod(lambda: np.random.rand())


class OfPython(WithAThread):
    draw = random.random


@pytest.mark.parametrize("draws", [WithAThread, OfNumPy, OfPython])
def test_draws_from_a_global_generator_during_a_run_are_said_once(go, draws):
    notes = []
    for plugins in [], [draws]:
        go(*plugins, rounds=3, notify=lambda event, details: notes.append(details) if event == "note" else None)
    (note,) = notes
    assert "drew from a global random generator" in note["message"]


def test_another_seed_gives_another_model(go, moon):
    assert model_bytes(go("moon", **MOON, seed=1)) != model_bytes(moon)


class Exchange(Rotates):
    """Exchanges classifiers, and notes the order of updates."""

    @hookimpl
    def end_local(self, client):
        return {"id": torch.tensor([client.id])}

    @hookimpl
    def accumulate(self, server, update):
        server.state["order"] = [*server.state.get("order", []), int(update.payload["id"])]


def test_sessions_and_the_order_of_updates_with_two_workers(go):
    options = {"momentum": 0.0, "local_epochs": 2, "rounds": 2, "max_waiting": 1, "clients": 5}
    plain, parallel = go(Exchange, **options), go(Exchange, workers=2, **options)
    assert model_bytes(parallel) == model_bytes(plain)
    assert comparable(parallel) == comparable(plain)
    assert committed(parallel).plugins == committed(plain).plugins


class TwoQuestions(Plugin):
    """Asks two questions side by side, and leaves a third one half read."""

    @hookimpl
    def begin_round(self, server):
        with at_most(60):
            pairs = zip(server.ask("all", self.a), server.ask("all", self.b))
            server.state["pairs"] = [[int(a.tensors["x"]), int(b.tensors["x"])] for a, b in pairs]
        for _ in server.ask("all", self.a):
            break

    # With two workers: client 1's answer to a comes in while the other generator waits for client 0's to b.

    @question
    def a(self, client):
        time.sleep({1: 0.1}.get(client.id, 0))
        return {"x": torch.tensor([client.id * 10])}

    @question
    def b(self, client):
        time.sleep({0: 0.3}.get(client.id, 0))
        return {"x": torch.tensor([client.id * 10 + 1])}


@contextlib.contextmanager
def at_most(seconds):
    def stop(number, frame):
        raise TimeoutError(f"still running after {seconds} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("workers", [0, 2])
def test_questions_side_by_side(go, workers):
    result = go(TwoQuestions, workers=workers, rounds=2)  # both workers are up by the second round
    assert committed(result).plugins["twoquestions"]["pairs"] == [[10 * k, 10 * k + 1] for k in range(4)]


@pytest.mark.usefixtures("moon")  # rich draws a number when the first run of a process imports it
def test_the_caller_keeps_its_random_numbers_and_threads(go):
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        go("moon", client_test_fraction=0.2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert random.getstate() == before[2]


def test_the_callers_random_numbers_do_not_reach_the_run(go):
    torch.manual_seed(1)
    one = model_bytes(go(model="module:tests.toy.dropout_mlp"))
    torch.manual_seed(2)
    assert model_bytes(go(model="module:tests.toy.dropout_mlp")) == one


def test_a_runs_own_config_gives_the_same_run(go, moon, tmp_path):
    from fedcore.base.config import RunConfig
    from fedcore.base.safe_yaml import read_config_file

    values = read_config_file(moon.directory / "config.yaml")
    again = fedcore.run(RunConfig.create({**values, "out": tmp_path / "again"}))
    assert model_bytes(again) == model_bytes(moon)


def test_the_split_of_a_run_can_be_used_by_another(go, moon):
    result = go("moon", **{**MOON, "partition": str(moon.directory / "partition.json")})
    assert model_bytes(result) == model_bytes(moon)
    with raises(ConfigError, "--clients", "3"):
        go(partition=str(moon.directory / "partition.json"), clients=3)
    with raises(ConfigError, "0.25", "0.0", "--client-test-fract"):
        go(**{**MOON, "partition": str(moon.directory / "partition.json"), "client_test_fraction": 0.25})


def test_evaluate_run_gives_the_same_figures(moon):
    assert evaluate_run(moon.directory, allow_code=True) == moon.summary["metrics"]


def test_a_directory_that_holds_something_is_refused(go, moon):
    with raises(RunDirectoryError):
        go(out=moon.directory)


def test_a_folder_that_is_no_run_is_refused_without_the_advice_to_resume_it(go, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with raises(RunDirectoryError):
        go(out=tmp_path / "mine")


# --- stops and kills -------------------------------------------------------------------------------------


class Stopping(Plugin):
    """Ctrl-C where the test says, once; keeps state on both sides."""

    at: tuple | None = None

    def check(self, where, round_):
        if Stopping.at == (where, round_):
            Stopping.at = None
            raise KeyboardInterrupt

    @hookimpl
    def begin_round(self, server):
        self.check("begin_round", server.round)
        server.state["rounds"] = [*server.state.get("rounds", []), server.round]

    @hookimpl
    def broadcast(self, server):
        return {"n": torch.tensor(server.state["rounds"])}

    @hookimpl
    def local_loss(self, step):
        self.check("local_loss", step.round)

    @hookimpl
    def begin_local(self, client):
        client.state["seen"] = [*client.state.get("seen", []), len(client.received["n"])]

    @hookimpl
    def server_step(self, server, mean):
        self.check("server_step", server.round)

    @hookimpl
    def personal_model(self, client):
        self.check("personal_model", client.round - 1)  # evaluated after this round

    @hookimpl
    def report(self, server):
        self.check("report", server.round)

    @hookimpl
    def post_train(self, server):
        self.check("post_train", 0)
        server.state["end"] = server.state.get("end", 0) + 1


STOPS = [
    *[("begin_round", 1), ("begin_round", 2), ("local_loss", 1), ("server_step", 3)],
    *[("personal_model", 1), ("report", 1), ("post_train", 0)],
]


@pytest.fixture(scope="module")
def stopping(tmp_path_factory):
    Stopping.at = None
    return support.run(tmp_path_factory.mktemp("stopping"), "moon", Stopping, **{**MOON, "rounds": 4})


@pytest.mark.sampled(4)
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("at", STOPS, ids=str)
def test_stop_and_resume(go, tmp_path, stopping, at, every):
    options = {**MOON, "rounds": 4, "checkpoint_every": every}
    Stopping.at = at
    with raises(Interrupted):
        go("moon", Stopping, out=tmp_path / "run", **options)
    done = committed(tmp_path / "run").round
    assert done == (4 if at[0] == "post_train" else at[1]), "what was committed is kept"
    result = resume(tmp_path / "run", allow_code=True)
    assert model_bytes(result) == model_bytes(stopping)
    assert comparable(result) == comparable(stopping)
    assert committed(result).plugins == committed(stopping).plugins
    assert committed(result).manifest == committed(stopping).manifest
    for client in range(6):
        assert client_state(result, client).get("stopping") == client_state(stopping, client).get("stopping")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_listener_that_stops_the_run_loses_no_round(go, tmp_path, error):
    def listen(event, details):
        if event == "round" and details["round"] == 1:
            raise error

    out = tmp_path / "run"
    with pytest.raises(Interrupted if error is KeyboardInterrupt else error):
        go(rounds=4, checkpoint_every=100, notify=listen, out=out)
    assert committed(out).round == 2
    assert (model_bytes(resume(out)), len(lines(out))) == (model_bytes(go(rounds=4)), 4)


def test_a_caller_that_goes_round_by_round_loses_none(tmp_path):
    config = support.config(tmp_path, rounds=4, checkpoint_every=100, out=tmp_path / "run")
    with contextlib.suppress(RuntimeError), started(config) as (experiment, state):
        experiment.one_round(experiment.one_round(state))
        raise RuntimeError("an error of its own")
    assert committed(config.out).round == 2


def test_a_directory_that_was_moved_away_is_not_made_again(tmp_path):
    config = support.config(tmp_path, rounds=4, checkpoint_every=100, out=tmp_path / "run")
    with started(config) as (experiment, state):
        state = experiment.one_round(state)
        config.out.rename(tmp_path / "elsewhere")
        with raises(StorageError, "metrics.jsonl"):
            experiment.one_round(state)
        with raises(StorageError, "metrics.jsonl"):
            experiment.save()
    assert not config.out.exists()


def test_a_run_of_more_rounds_that_is_stopped_in_the_first_of_them_goes_on_to_the_last(go, tmp_path):
    def stop(event, details):
        if event == "client":
            raise KeyboardInterrupt

    out = go("moon", rounds=2, out=tmp_path / "run").directory
    with pytest.raises(Interrupted):
        resume(out, changes={"rounds": 4}, notify=stop)
    longer, whole = resume(out), go("moon", rounds=4)
    assert (model_bytes(longer), lines(longer)) == (model_bytes(whole), lines(whole))


def test_a_run_that_was_shortened_goes_on_to_more_rounds(go, tmp_path):
    def stop(event, details):
        if event == "round" and details["round"] == 1:
            raise KeyboardInterrupt

    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        go("moon", rounds=4, notify=stop, out=out)
    assert resume(out, changes={"rounds": 2}).summary["rounds"] == 2
    longer, whole = resume(out, changes={"rounds": 3, "lanes": 2}), go("moon", rounds=3)
    assert (model_bytes(longer), lines(longer)) == (model_bytes(whole), lines(whole))
    assert longer.config.lanes == 2


def test_a_resume_that_is_refused_changes_nothing(go, tmp_path):
    out = go(rounds=2, out=tmp_path / "run").directory
    before = {path: path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}
    with raises(RunDirectoryError, "2"):
        resume(out, changes={"rounds": 1}, out=tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    with raises(ConfigError):
        resume(out, changes={"rounds": 3, "client_timeout": 5.0})
    assert {path for path in before if not path.exists()} == {max(path for path in before if "done" in path.name)}
    assert fedcore.load_run(out).metrics
    assert resume(out).summary["time"]["rounds"] == 2
    assert model_bytes(resume(out, out=str(tmp_path / "copy"))) == before[out / "model.safetensors"]


def test_a_run_of_fewer_rounds_that_is_stopped_at_its_end_trains_no_more(go, tmp_path):
    """It has had as many rounds as it is to have, and its checkpoint is of a run that was to have more."""

    def stop(event, details):
        if event == "round" and details["round"] == 1:
            raise KeyboardInterrupt

    class StopsAtTheEnd(Plugin):
        stops = True

        @hookimpl
        def post_train(self, server):
            if StopsAtTheEnd.stops:
                StopsAtTheEnd.stops = False
                raise KeyboardInterrupt

    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        go(StopsAtTheEnd, rounds=4, notify=stop, out=out)
    with pytest.raises(Interrupted):
        resume(out, changes={"rounds": 2}, allow_code=True)
    assert resume(out, allow_code=True).summary["rounds"] == 2


def test_resume_of_a_finished_run(go, stopping):
    before = model_bytes(stopping)
    again = resume(stopping.directory, allow_code=True)
    assert again.metrics == stopping.metrics
    assert model_bytes(stopping) == before


def test_resume_where_there_is_no_run(tmp_path):
    with raises(RunDirectoryError):
        resume(tmp_path)


def test_old_versions_of_clients_are_deleted(moon):
    store = RunDirectory(moon.directory).checkpoints
    newest = store.load().manifest
    max(store.root.iterdir()).rename(moon.directory / "aside")
    before = store.load().manifest
    (moon.directory / "aside").rename(store.root / "000003-2-done.safetensors")
    for client, version in newest.items():
        files = sorted(path.name for path in (moon.directory / "clients" / f"{client:06d}").iterdir())
        assert files == [f"{known:06d}.safetensors" for known in sorted({before[client], version})]


class DiesOnce(Plugin):
    """Takes the worker process down in the first step of client 1 in round 0, and in the answers of client 2."""

    @hookimpl
    def begin_round(self, server):
        if server.round == 1:
            server.state["answered"] = [answer.client for answer in server.ask("all", self.here)]

    @question
    def here(self, client):
        if client.id == 2:
            os._exit(3)

    @hookimpl
    def local_loss(self, step):
        if step.round == 0 and step.client.id == 1:
            os._exit(3)


class NotOne(Plugin):
    @hookimpl
    def select_clients(self, server):
        return [0, 2, 3] if server.round == 0 else [0, 1, 2, 3]


def test_a_worker_that_dies_costs_one_client(go):
    result = go(DiesOnce, workers=2, rounds=2)
    first, second = lines(result)
    (failure,) = first["failures"]
    assert (failure["client"], failure["kind"]) == (1, "worker_lost")
    assert first["accepted"] == 3
    assert [(f["client"], f["kind"]) for f in second["failures"]] == [(2, "worker_lost")]
    assert committed(result).plugins["diesonce"]["answered"] == [0, 1, 3]
    assert second["accepted"] == 4
    assert model_bytes(result) == model_bytes(go(NotOne, rounds=2))


class DiesPaused(Exchange):
    """Takes the worker down in client 1's second epoch: every session that lived there is lost."""

    @hookimpl
    def local_loss(self, step):
        if step.round == 0 and step.client.id == 1 and step.epoch == 1:
            os._exit(3)


def test_sessions_that_die_with_their_worker(go):
    """With one worker all sessions live in it: the one that ran is worker_lost, the waiting ones session_lost."""
    with raises(RoundFailedError, "1"):
        go(DiesPaused, workers=1, local_epochs=2, momentum=0.0)


class Fails(Plugin):
    """Every client fails in round 2."""

    @hookimpl
    def begin_local(self, client):
        if client.round == 2:
            raise ValueError("no power")


def test_when_all_clients_fail_the_last_good_state_stays(go, tmp_path):
    out = tmp_path / "run"
    with raises(RoundFailedError, "3", "0", "4"):
        go(Fails, rounds=4, checkpoint_every=3, out=out)
    state = committed(out)
    assert (state.round, state.phase) == (2, "train")
    good = go(rounds=2)
    assert all(torch.equal(tensor, weights(good)[name]) for name, tensor in state.model.items())
    assert [record["round"] for record in lines(out)] == [0, 1]


def test_min_clients(go):
    class One(Plugin):
        @hookimpl
        def pre_aggregate(self, update):
            if update.client:
                raise RejectUpdate("no")

    go(One, min_clients=1)
    with raises(RoundFailedError, "1", "4", "--min-clients", "2"):
        go(One, min_clients=2)


# --- numbers that are none -------------------------------------------------------------------------------


class NotTwo(Plugin):
    @hookimpl
    def select_clients(self, server):
        return [0, 1, 3]


class NanLoss(Plugin):
    @hookimpl
    def local_loss(self, step):
        scale = torch.nan if step.client.id == 2 else 0.0
        return Loss(step.features.mean() * scale, name="odd")


class NanUpdate(Plugin):
    @hookimpl
    def end_local(self, client):
        if client.id == 2:
            with torch.no_grad():
                client.model.classifier.bias[3] = torch.inf


class NanPayload(Plugin):
    @hookimpl
    def end_local(self, client):
        return {"x": torch.tensor([torch.nan if client.id == 2 else 1.0])}


@pytest.mark.parametrize(
    ("cls", "kind", "words"),
    [
        (NanLoss, "diverged", "'nanloss.odd' became nan"),
        (NanUpdate, "diverged", "'classifier.bias'"),
        (NanPayload, "rejected", "'x' of plugin 'nanpay"),
    ],
)
def test_a_client_with_nan_is_rejected_named_and_counted(go, cls, kind, words):
    result, without = go(cls), go(NotTwo, *([] if cls is not NanLoss else [NanLoss]))
    (failure,) = lines(result)[0]["failures"]
    assert (failure["client"], failure["kind"]) == (2, kind)
    assert words in failure["message"]
    assert lines(result)[0]["accepted"] == 3
    assert model_bytes(result) == model_bytes(without)
    assert 2 not in committed(result).manifest


# --- data at the edge ------------------------------------------------------------------------------------


def test_a_client_of_one_sample_trains(go):
    result = go(partition="module:tests.toy.single_and_rest")
    assert lines(result)[0]["failures"] == []
    assert lines(result)[0]["accepted"] == 4


def test_a_client_of_one_sample_with_batch_norm_makes_no_step(go):
    result = go(partition="module:tests.toy.single_and_rest", **BATCH_NORM)
    (failure,) = lines(result)[0]["failures"]
    assert (failure["client"], failure["kind"]) == (0, "no_steps")
    assert lines(result)[0]["accepted"] == 3


class CountSteps(Plugin):
    @hookimpl
    def end_local(self, client):
        client.state["steps"] = client.steps


@pytest.mark.parametrize(("model", "expected"), [("mlp", 2), (BATCH_NORM["model"], 1)])
def test_a_last_batch_of_one_sample(go, model, expected):
    result = go(CountSteps, partition="module:tests.toy.one_over", model=model, participation=1.0)
    assert lines(result)[0]["failures"] == []
    assert client_state(result, 0)["countsteps"]["steps"] == expected
    assert client_state(result, 1)["countsteps"]["steps"] == 1


def test_a_client_without_some_classes(go):
    result = go("moon", partition="module:tests.toy.by_class", client_test_fraction=0.2, rounds=2)
    assert all(record["failures"] == [] for record in lines(result))


# --- options ---------------------------------------------------------------------------------------------


def test_participation(go):
    result = go(clients=6, participation=0.3, rounds=4)
    cohorts = [record["cohort"] for record in lines(result)]
    assert all(len(cohort) == 2 and cohort == sorted(set(cohort)) for cohort in cohorts)
    assert len({tuple(cohort) for cohort in cohorts}) > 1
    assert [len(record["cohort"]) for record in lines(go(participation=0.01))] == [1]


def test_lr_decay(toy):
    """One client at (2, 0) from 0, one step per round: lr 0.5, 0.25."""
    result = toy(dataset="module:tests.toy.one_centre", clients=1, local_epochs=1, rounds=2, lr_decay=0.5)
    assert [record["lr"] for record in lines(result)] == [0.5, 0.25]
    assert weights(result)["encoder.base.w"].tolist() == [1.25, 0.0]


def test_clip_norm(toy):
    options = {"dataset": "module:tests.toy.one_centre", "clients": 1, "local_epochs": 1}
    assert weights(toy(clip_norm=1.0, **options))["encoder.base.w"].tolist() == pytest.approx([0.5, 0.0], abs=1e-5)
    assert weights(toy(clip_norm=9.0, **options))["encoder.base.w"].tolist() == [1.0, 0.0]


def test_buffers_are_averaged_by_default_and_never_by_weights(go):
    one, other = weights(go(**BATCH_NORM)), weights(go(EqualWeights, **BATCH_NORM))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(one[f"encoder.base.2.{name}"], other[f"encoder.base.2.{name}"])
    assert not torch.equal(one["classifier.weight"], other["classifier.weight"])
    assert one["encoder.base.2.num_batches_tracked"].dtype == torch.int64


def test_buffers_on_the_clients(go):
    result = go(buffers="local", rounds=2, client_test_fraction=0.2, **BATCH_NORM)
    assert result.metrics["global"] is None
    assert "confusion" not in result.summary
    assert "encoder.base.2" in result.summary["metrics"]["global_reason"]
    assert "global_local" not in result.metrics
    assert result.metrics["personal"]["clients"] == 4
    kept = [client_state(result, client)["fedcore"] for client in range(4)]
    name = "personal/encoder.base.2.running_mean"
    assert len({tuple(state[name].tolist()) for state in kept}) == 4
    assert weights(result)["encoder.base.2.running_mean"].tolist() == [0.0] * 16
    shared = 4 * (64 * 16 + 16 + 2 * 16 + 16 * 10 + 10)
    assert committed(result).ledger["by_plugin"]["model"] == {"down": 8 * shared, "up": 8 * shared}


def test_buffers_local_without_buffers_is_the_same_run(go):
    local, plain = go(buffers="local"), go()
    assert model_bytes(local) == model_bytes(plain)
    assert local.metrics == plain.metrics


def test_the_hold_out_is_not_trained_on(go):
    result = go(Payloadless, client_test_fraction=0.25)
    partition = json.loads((result.directory / "partition.json").read_text())
    for client in range(4):
        assert client_state(result, client)["payloadless"]["n"] == len(partition["train"][client])
        assert not set(partition["train"][client]) & set(partition["test"][client])
    assert sum(map(len, partition["train"] + partition["test"])) == 4 * support.FEW


class Payloadless(Plugin):
    @hookimpl
    def end_local(self, client):
        client.state["n"] = client.n


def test_what_a_run_directory_holds(moon):
    names = {path.name for path in moon.directory.iterdir()}
    assert names == {
        "config.yaml",
        "partition.json",
        "metrics.jsonl",
        "sessions.jsonl",
        "summary.json",
        "model.safetensors",
        "checkpoint",
        "clients",
    }
    for record in lines(moon):
        text = json.dumps(record)
        assert str(moon.directory) not in text
        assert "seconds" not in text
    summary = json.loads((moon.directory / "summary.json").read_text())
    assert set(summary) == {
        *("run_dir", "plugins", "rounds", "seconds", "finished", "metrics", "confusion", "bytes", "time"),
    }
    assert summary["rounds"] == 3
    sizes = sum(tensor.numel() * tensor.element_size() for tensor in weights(moon).values())
    assert lines(moon)[0]["bytes"]["by_plugin"]["model"] == {"down": 3 * sizes, "up": 3 * sizes}


def test_the_summary_has_the_confusion_matrix_of_the_final_model(moon):
    data = fedcore.data.load_dataset("digits").test
    with torch.inference_mode():
        predicted = moon.model(data.gather(torch.arange(len(data)))).logits.argmax(dim=1).tolist()
    expected = [[0] * 10 for _ in range(10)]
    for label, prediction in zip(data.labels.tolist(), predicted, strict=True):
        expected[label][prediction] += 1
    assert moon.summary["confusion"] == expected
    text = (Path(moon.directory) / "summary.json").read_text()
    assert json.loads(text) == moon.summary
    assert str(expected[0]) in text  # a row of numbers is one line
    again = evaluate_run(moon.directory)
    assert again.keys() <= moon.summary["metrics"].keys()  # the matrix is no figure of a protocol


@pytest.mark.filterwarnings("ignore:stopped after round")
@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"rounds": 6, "patience": 1}])
def test_the_summary_has_the_confusion_matrices_of_the_clients_own_models(go, options):
    """Of all clients together; the rounds before the last one do not count them."""
    result = go(PersonalClassifier, **{"rounds": 2, "client_test_fraction": 0.2, "samples": None} | options)
    assert ("stopped_early" in result.summary) == ("patience" in options)
    partition = json.loads((result.directory / "partition.json").read_text())
    held_out = fedcore.data.load_dataset("digits").train.labels[[i for held in partition["test"] for i in held]]
    matrix = torch.tensor(result.summary["confusion_personal"])
    assert matrix.sum(dim=1).tolist() == held_out.bincount(minlength=10).tolist()
    right = result.metrics["personal"]["accuracy"] * len(held_out)
    assert matrix.trace().item() == pytest.approx(right)
    on_test = torch.tensor(result.summary["confusion_personal_global"])
    assert on_test.sum().item() == 4 * 360
    assert on_test.trace().item() == pytest.approx(4 * 360 * result.metrics["personal_global"]["accuracy"])
    assert "confusion" not in result.summary  # there is no global model
    resumed = fedcore.resume(result.directory, allow_code=True)  # of a finished run: its models are evaluated once more
    assert resumed.summary["confusion_personal"] == matrix.tolist()


def test_notify(go):
    events = []
    go(rounds=2, notify=lambda event, details: events.append(event))
    assert events == ["start", *["client"] * 4, "round", *["client"] * 4, "round", "done"]


def test_notify_counts_every_client_that_gave_nothing_as_failed(go):
    """One is rejected by the server, one diverges, one fails in training."""

    class Refuses(Plugin):
        @hookimpl
        def begin_local(self, client):
            if client.id == 3:
                raise ValueError("no power")

        @hookimpl
        def pre_aggregate(self, update):
            if update.client == 0:
                raise RejectUpdate("no")

    failed = {}

    def note(event, details):
        if event == "client":
            failed[details["client"]] = details["failed"]

    result = go(Refuses, NanUpdate, notify=note)
    assert failed == {0: True, 1: False, 2: True, 3: True}
    assert len(lines(result)[0]["failures"]) == 3


def test_a_broken_client_process_is_told_with_its_plugin(go):
    """A contract error on a client ends the run, with the same words from a worker process."""
    told = []
    for workers in (0, 1):
        with pytest.raises(FedcoreError) as caught:
            go(Wrong, workers=workers)
        told.append(str(caught.value))
    assert told[0] == told[1]
    assert "'wrong' hook local_loss" in told[0]


class Wrong(Plugin):
    @hookimpl
    def local_loss(self, step):
        return step.features
