"""The engine on a Ray of this machine: its contract, the local engine's bits, workers that are killed."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray_faults import Away, Breaks, CannotSetUp, Hangs, Notes, look_elsewhere

from fedcore import ConfigError, FedcoreError, PluginContractError, RunConfig
from fedcore.tools import RunFiles
from fedcore_testing import check_engine, committed, federate, model_bytes, records
from tests.reliability.processes import wait_for

pytest.importorskip("ray", reason="ray is not installed")

from fedcore_ray import engine as module
from fedcore_ray import nodes
from tests.sentences import raises

SETTINGS = {"rounds": 3, "clients": 4, "local_epochs": 2, "client_test_fraction": 0.2}
ONE_ROUND = {"rounds": 1, "clients": 4}
METHODS = [(), ("moon",), ("fedcd",), ("fedcme",), ("fedeccr",)]


class AllReady(module.RayEngine):
    """Begins when every worker is ready, so that each has something to lose."""

    def __init__(self, spec):
        super().__init__(spec)
        self.wait()

    def wait(self):
        while not all(worker.ready for worker in self._dispatcher.workers):
            self._collect()


def test_a_start_without_a_shell_lets_go_of_the_cluster_and_raises_its_own_error(tmp_path, monkeypatch):
    """LastWords starts /bin/sh."""

    class Held:
        released = False

        def __init__(self, options, gpus):
            pass

        def release(self):
            Held.released = True

    def no_shell(line):
        raise FileNotFoundError("/bin/sh")

    monkeypatch.setattr("fedcore_ray.cluster.Cluster", Held)
    monkeypatch.setattr(module, "LastWords", no_shell)
    site = SimpleNamespace(config=RunConfig(engine="ray", device="cpu"), state_dir=tmp_path / "clients")
    with pytest.raises(FileNotFoundError, match="/bin/sh"):
        module.RayEngine(site)
    assert Held.released


def hosts():
    """Return the processes of this machine that are workers of these tests' Ray."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and (folder / "cmdline").read_bytes().startswith(b"ray::Host"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_it_keeps_the_contract(cluster, tmp_path):
    check_engine("ray", tmp_path, workers=(1, 2, 3))


@pytest.mark.slow
@pytest.mark.parametrize("plugins", METHODS, ids=lambda case: "-".join(case) or "fedavg")
def test_the_bits_are_the_local_engines(cluster, tmp_path, plugins):
    """Model, states, and every figure of the metrics: for this process, one and two, and two of Ray's workers.

    The look at the nodes leaves no file.
    """
    there = federate(tmp_path, *plugins, **SETTINGS, engine="ray", workers=2)
    assert there.summary["time"]["workers"] == 2
    assert {path.name for path in there.directory.glob("clients/*")} <= {f"{client:06d}" for client in range(4)}
    for workers in (0, 1, 2):
        here = federate(tmp_path, *plugins, **SETTINGS, engine="local", workers=workers)
        assert model_bytes(there) == model_bytes(here)
        assert records(there) == records(here)
        assert there.metrics == here.metrics


class Killer:
    """Kills the process of the worker that begins a certain kind of task in round 1; once, in the middle of it."""

    def __init__(self, ray, monkeypatch, kind):
        self.killed = []
        start = module._Worker.start

        def started(worker, task):
            chosen = not self.killed and task.round == 1 and task.kind == kind
            pid = ray.get(worker._actor.__ray_call__.remote(lambda host: os.getpid())) if chosen else None
            start(worker, task)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                self.killed.append((task.client, pid))

        monkeypatch.setattr(module._Worker, "start", started)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fit_begin", "fit_resume"])
def test_a_killed_worker_costs_its_clients_one_round(cluster, tmp_path, monkeypatch, kind):
    """In the first and in the second half of FedCME's round; the others go on, and all take part again later."""
    killer = Killer(cluster, monkeypatch, kind)
    result = federate(tmp_path, "fedcme", **{**SETTINGS, "participation": 1.0}, engine=AllReady, workers=2)
    ((victim, pid),) = killer.killed
    assert not os.path.exists(f"/proc/{pid}")
    lines = RunFiles(result.directory).metrics.read()
    assert [line["round"] for line in lines] == [0, 1, 2]
    assert [line["failures"] for line in lines if line["round"] != 1] == [[], []]
    failed = {failure["client"]: failure["kind"] for failure in lines[1]["failures"]}
    assert failed[victim] == "worker_lost"
    others = {client: what for client, what in failed.items() if client != victim}
    assert set(others.values()) <= {"session_lost"}
    assert lines[1]["accepted"] == 4 - len(failed)
    assert 1 <= lines[1]["accepted"] <= 3
    assert lines[2]["accepted"] == 4


@pytest.mark.slow
def test_a_lost_worker_is_replaced_and_works_again(cluster, tmp_path, monkeypatch):
    killer = Killer(cluster, monkeypatch, "fit_begin")
    engines = []

    class Watched(AllReady):
        def __init__(self, spec):
            super().__init__(spec)
            engines.append(self)

    def wait(event, details):
        if event == "round" and details["round"] == 1:
            engines[0].wait()

    result = federate(tmp_path, Notes, **SETTINGS, engine=Watched, workers=2, notify=wait)
    assert len(killer.killed) == 1
    trained_by = committed(result).plugins["notes"]["seen"][:, 0].tolist()
    assert len(trained_by) == 4 + 3 + 4
    first, last = set(trained_by[:4]), set(trained_by[-4:])
    assert len(first) == len(last) == 2
    assert first - last == {killer.killed[0][1]}


@pytest.mark.slow
def test_a_client_that_hangs_is_given_up(cluster, tmp_path):
    """Its worker is replaced; its time begins when a worker takes the task, not when it is queued."""
    result = federate(tmp_path, Hangs, **ONE_ROUND, engine="ray", engine_options={"timeout": 3}, workers=2)
    (line,) = RunFiles(result.directory).metrics.read()
    assert [(failure["client"], failure["kind"], failure["message"]) for failure in line["failures"]] == [
        (1, "timeout", "no answer within 3 s; its worker was replaced")
    ]
    assert line["accepted"] == 3


@pytest.mark.slow
def test_workers_are_processes_of_one_thread(cluster, tmp_path):
    result = federate(tmp_path, Notes, **ONE_ROUND, engine=AllReady, workers=2)
    seen = committed(result).plugins["notes"]["seen"]
    assert len(set(seen[:, 0].tolist()) - {os.getpid()}) == 2
    assert seen[:, 1].tolist() == [1, 1, 1, 1]


@pytest.mark.slow
def test_a_broken_contract_ends_the_run(cluster, tmp_path):
    with raises(PluginContractError, "'breaks'", "local_loss") as caught:
        federate(tmp_path, Breaks, **ONE_ROUND, engine="ray", workers=2)
    assert (caught.value.plugin, caught.value.hook) == ("breaks", "local_loss")


@pytest.mark.slow
def test_a_worker_that_always_ends_before_it_is_ready_ends_the_run(cluster, tmp_path):
    with pytest.raises(FedcoreError, match=r"lost before it was ready, 4 times in a row: .*--debug"):
        federate(tmp_path, (Away, {"driver": os.getpid()}), **ONE_ROUND, engine="ray", workers=1)


@pytest.mark.slow
def test_relative_names_mean_the_same_to_a_worker(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (federate(tmp_path, **ONE_ROUND).directory / "model.safetensors").rename("first.safetensors")
    start = {**ONE_ROUND, "weights": "first.safetensors"}
    assert model_bytes(federate(tmp_path, **start, engine="ray", workers=1)) == model_bytes(federate(tmp_path, **start))


@pytest.mark.slow
def test_a_worker_that_cannot_be_set_up_says_why(cluster, tmp_path):
    with raises(PluginContractError, "'cannotsetup'", "no such file on this machine"):
        federate(tmp_path, (CannotSetUp, {"driver": os.getpid()}), **ONE_ROUND, engine="ray", workers=1)


@pytest.mark.slow
def test_workers_end_with_their_engine_and_the_cluster_stays(cluster, tmp_path):
    federate(tmp_path, **ONE_ROUND, engine="ray", workers=2)
    wait_for(lambda: not hosts())
    assert cluster.is_initialized()


@pytest.mark.slow
def test_two_runs_in_one_cluster_do_not_meet(cluster, tmp_path):
    """Same names of tasks, sessions and payloads, other seeds: one trains between two rounds of the other."""
    alone = [federate(tmp_path, "fedcme", **SETTINGS, seed=seed) for seed in (0, 1)]
    together = {"engine": "ray", "workers": 2}
    inner = []

    def train_another(event, details):
        if event == "round" and details["round"] == 0:
            inner.append(federate(tmp_path, "fedcme", **SETTINGS, **together, seed=1))

    outer = federate(tmp_path, "fedcme", **SETTINGS, **together, seed=0, notify=train_another)
    assert [model_bytes(result) for result in (outer, *inner)] == [model_bytes(result) for result in alone]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--workers", "0"], "--workers 0 is this process, but --engine ray runs the clients on Ray's workers"),
        (["--set", "ray.cpus_per_worker=2000"], "less than or equal to 1024"),
        (["--set", "ray.cpus_per_worker=1.5"], "more than one is a whole number"),
        (["--set", "ray.gpus_per_worker=1"], "ray.gpus_per_worker is 1, but the run's device is cpu"),
        (["--set", "ray.timeout=0"], "greater than 0"),
        (["--set", "ray.adress=auto"], "Did you mean 'address'?"),
        (["--set", "ray.address=ray://host:10001"], "not through Ray's client protocol ray://"),
        (["--set", "ray.address=somewhere"], "write auto, or the head's HOST:PORT"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_cannot_work_are_refused_before_a_cluster_is_looked_for(monkeypatch, cli, options, words):
    monkeypatch.setattr("fedcore_ray.cluster.Cluster", None)
    check_refused(cli, options, words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--workers", "99", "--clients", "99"],
            "has room for 6 workers of 1 CPUs each; it offers 6 CPUs and 0 GPUs on",
        ),
        (["--set", "ray.cpus_per_worker=7"], "no node of the Ray cluster has the 7 CPUs that a worker takes"),
        (["--set", "ray.address=127.0.0.1:1"], "but this process is connected to the Ray at"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_do_not_fit_the_cluster_are_refused(cluster, cli, options, words):
    check_refused(cli, options, words)


def check_refused(cli, options, words):
    result = cli("train", "--engine", "ray", "--device", "cpu", "--out", "run", *options)
    assert result.exit_code == 2
    assert words in " ".join(result.output.replace("│", " ").split())
    assert "Traceback" not in result.output


@pytest.mark.slow
def test_a_run_directory_does_not_decide_what_is_connected_to(cluster, tmp_path, cli):
    """An address in a configuration from someone else is not connected to unasked."""
    result = federate(tmp_path, **ONE_ROUND)
    saved = RunFiles.open(result.directory).read_saved()
    changed = {"engine": "ray", "engine_options": {"address": "host:6379"}}
    replace(saved, values={**saved.values, **changed}).write(
        result.directory / "config.yaml"
    )  # as somebody would who knows of its digest
    refused = cli("resume", result.directory)
    assert refused.exit_code == 2
    assert "--allow-outside" in refused.output


@pytest.mark.slow
def test_a_node_with_other_software_is_named(cluster, tmp_path, monkeypatch):
    here = nodes.describe()
    monkeypatch.setattr(nodes, "describe", lambda: {**here, "versions": {**here["versions"], "torch": "1.0", "x": "2"}})
    with pytest.raises(
        ConfigError, match=r"node .+ has other software than this machine: torch is .+ \(here 1\.0\), x is "
    ):
        federate(tmp_path, **ONE_ROUND, engine="ray", workers=1)


@pytest.mark.slow
def test_a_node_that_does_not_share_the_runs_folder_is_named(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(nodes, "look", look_elsewhere)
    with pytest.raises(ConfigError, match=r"node .+ does not share .+/clients with this machine .*--out"):
        federate(tmp_path, **ONE_ROUND, engine="ray", workers=1)
