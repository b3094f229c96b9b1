"""Whole runs from the command line: their processes, their ends, several nodes. Each starts a Ray of its own."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from fedcore.tools import RunDirectory
from fedcore_testing import federate, model_bytes
from tests.reliability import processes
from tests.reliability.processes import alive, descendants

pytest.importorskip("ray", reason="ray is not installed")
pytestmark = pytest.mark.slow

WORKERS_END_WITHIN, ALL_END_WITHIN = 30.0, 120.0
"""Seconds until a killed run's workers are gone, and the last of Ray's processes: two of its agents try for a minute to
reach the head that was killed with the run."""
OPTIONS = {
    "dataset": "digits",
    "model": "mlp",
    "clients": 4,
    "local_epochs": 2,
    "batch_size": 64,
    "lr": 0.05,
    "device": "cpu",
}
BIN = Path(sys.executable).parent


def command(*words):
    return [sys.executable, "-m", "fedcore", *map(str, words)]


def configured(tmp_path, plugins=(), **options):
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps({**OPTIONS, "plugins": list(plugins), **options}))
    return file


def begin(log, *words, **environment):
    with log.open("ab") as file:
        return subprocess.Popen(
            command(*words),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            env={**os.environ, **environment},
        )


def title(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def wait_for(condition, seconds=90.0, saying=""):
    return processes.wait_for(condition, seconds, saying=saying)


def rounds_done(out):
    file = out / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def folders(pid):
    return list(Path("/tmp").glob(f"fedcore-ray-{pid}-*"))  # noqa: S108 - where the engine makes them


def test_a_run_leaves_nothing_behind(tmp_path):
    config = configured(tmp_path, rounds=2, engine="ray", workers=2)
    run = begin(tmp_path / "log", "train", "--config", config, "--out", tmp_path / "run", "--json", "--quiet")
    wait_for(lambda: rounds_done(tmp_path / "run") >= 1, saying=(tmp_path / "log").read_text)
    below = descendants(run.pid)
    assert folders(run.pid)
    assert run.wait(60) == 0, (tmp_path / "log").read_text()
    wait_for(lambda: not any(map(alive, below)), ALL_END_WITHIN)
    assert not folders(run.pid)
    assert json.loads((tmp_path / "log").read_text())["rounds"] == 2, "nothing of Ray's is printed"


def test_a_killed_run_leaves_no_process_and_goes_on_to_the_same_bits(tmp_path):
    """Usage statistics stay off though the environment asks for them."""
    options = {"rounds": 6, "client_test_fraction": 0.2}
    whole = federate(tmp_path, "moon", **{**OPTIONS, **options, "workers": 1})
    out, log = tmp_path / "run", tmp_path / "log"
    config = configured(tmp_path, ["moon"], engine="ray", workers=2, **options)
    run = begin(log, "train", "--config", config, "--out", out, "--quiet", RAY_USAGE_STATS_ENABLED="1")
    wait_for(lambda: rounds_done(out) >= 2, saying=log.read_text)
    below = descendants(run.pid)
    environments = [Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in below]
    assert all(b"RAY_USAGE_STATS_ENABLED=0" in environment for environment in environments if environment[0])
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    assert rounds_done(out) < 6
    workers = [pid for pid in below if any(word in title(pid) for word in (b"ray::Host", b"ray::IDLE"))]
    assert len(workers) >= 2
    took = wait_for(lambda: not any(map(alive, workers)), WORKERS_END_WITHIN)
    print(f"the workers were gone {took:.1f} s after the run was killed")
    again = begin(log, "resume", out, "--quiet")
    assert again.wait(120) == 0, log.read_text()
    assert (out / "model.safetensors").read_bytes() == model_bytes(whole)
    assert not folders(again.pid)
    wait_for(lambda: not any(map(alive, below)), ALL_END_WITHIN)


@pytest.mark.parametrize("part", [b"raylet/raylet", b"ray::RuntimeEnvAgent", b"ray::DashboardAgent"])
def test_a_run_whose_ray_is_killed_says_so_and_how_to_go_on(tmp_path, part):
    """Ray ends the run's process itself, past Python."""
    out, log = tmp_path / "run", tmp_path / "log"
    config = configured(tmp_path, rounds=10_000, engine="ray", workers=2)
    run = begin(log, "train", "--config", config, "--out", out, "--quiet")
    wait_for(lambda: rounds_done(out) >= 2, saying=log.read_text)
    below = descendants(run.pid)
    (killed,) = [pid for pid in below if part in title(pid)]
    os.kill(killed, signal.SIGKILL)
    assert run.wait(120) == 1, log.read_text()
    wait_for(lambda: f"Go on with: fedcore resume {out}" in log.read_text(), saying=log.read_text)
    assert "Traceback" not in log.read_text()
    wait_for(lambda: not any(map(alive, below)), ALL_END_WITHIN)
    done = rounds_done(out)
    again = begin(log, "resume", out, "--quiet", "--rounds", done + 1)
    assert again.wait(120) == 0, log.read_text()


def test_a_run_that_is_told_to_stop_leaves_a_checkpoint(tmp_path):
    out, log = tmp_path / "run", tmp_path / "log"
    config = configured(tmp_path, rounds=10_000, engine="ray", workers=2)
    run = begin(log, "train", "--config", config, "--out", out, "--quiet")
    wait_for(lambda: rounds_done(out) >= 2, saying=log.read_text)
    below = descendants(run.pid)
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait(60) == 130
    wait_for(lambda: not any(map(alive, below)), ALL_END_WITHIN)
    assert "fedcore resume" in log.read_text()
    assert RunDirectory(out).checkpoints.load().round >= 1


def test_a_cluster_that_is_not_there_is_said(tmp_path):
    for address in ("auto", "127.0.0.1:1"):
        done = subprocess.run(
            command("train", "--engine", "ray", "--set", f"ray.address={address}", "--out", tmp_path / address[:4]),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 2, done.stderr
        assert f"there is no Ray that this run can join at '{address}'" in " ".join(
            done.stderr.replace("│", " ").split()
        )
        assert "Traceback" not in done.stderr


@contextmanager
def short_folder():
    """Give Ray a folder of its own: it makes sockets in it, whose paths may not be long."""
    with tempfile.TemporaryDirectory(prefix="fcrt-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield folder


TWO_NODES = """
    import json, logging, os, sys, threading, time
    from pathlib import Path
    import ray
    from ray.cluster_utils import Cluster
    from fedcore.tools import RunDirectory
    from fedcore_testing import federate, model_bytes
    from fedcore_ray import cluster as module

    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    quick = {"health_check_period_ms": 1000, "health_check_failure_threshold": 3, "health_check_timeout_ms": 1000,
             "health_check_initial_delay_ms": 1000}
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False,
                    "object_store_memory": 100 << 20, "_system_config": quick})
    second = nodes.add_node(num_cpus=1, object_store_memory=100 << 20)
    nodes.wait_for_nodes()
    where = {}
    start = module.Cluster.start_worker

    def started(self):
        actor = start(self)
        actor.__ray_call__.remote(lambda host: None)
        where[actor._actor_id.hex()] = actor
        return actor

    module.Cluster.start_worker = started
    found = {}

    def notify(event, details):
        if event != "round":
            return
        if details["round"] == 0:
            ids = [ray.get(actor.__ray_call__.remote(lambda host: ray.get_runtime_context().get_node_id()))
                   for actor in where.values()]
            found["nodes"] = len(set(ids))
            if options["kill"]:
                threading.Timer(0.5, nodes.remove_node, [second], {"allow_graceful": False}).start()

    result = federate(folder, "fedcme", rounds=options["rounds"], clients=4, local_epochs=2, engine="ray", workers=2,
                      engine_options={"address": nodes.address}, notify=notify)
    lines = RunDirectory(result.directory).metrics.read()
    found["failures"] = [[(f["client"], f["kind"]) for f in line["failures"]] for line in lines]
    found["accepted"] = [line["accepted"] for line in lines]
    (folder / "model").write_bytes(model_bytes(result))
    (folder / "found.json").write_text(json.dumps(found))
    nodes.shutdown()
"""


def two_nodes(folder, **options):
    folder.mkdir()
    script = folder / "two_nodes.py"
    script.write_text(textwrap.dedent(TWO_NODES))
    with short_folder() as temporary:
        done = subprocess.run(
            [sys.executable, script, folder, json.dumps(options)],
            capture_output=True,
            text=True,
            timeout=240,
            env={**os.environ, "RAY_TMPDIR": temporary},
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "found.json").read_text())


def test_two_nodes_give_the_same_bits(tmp_path):
    """Two raylets stand for two nodes: each has a worker, and an object store of its own."""
    found = two_nodes(tmp_path / "there", kill=False, rounds=3)
    here = federate(tmp_path, "fedcme", rounds=3, clients=4, local_epochs=2)
    assert found["nodes"] == 2
    assert found["failures"] == [[], [], []]
    assert (tmp_path / "there" / "model").read_bytes() == model_bytes(here)


def test_a_node_that_is_lost_costs_its_clients_one_round(tmp_path):
    """The raylet and its worker are killed; the other node's worker goes on alone."""
    found = two_nodes(tmp_path / "there", kill=True, rounds=120)
    lost = [number for number, failures in enumerate(found["failures"]) if failures]
    assert 1 <= len(lost) <= 2, found
    for number in lost:
        kinds = {kind for _, kind in found["failures"][number]}
        assert kinds <= {"worker_lost", "session_lost"}
        assert found["accepted"][number] == 4 - len(found["failures"][number])
    assert found["accepted"][-1] == 4


HOSTS = {"fcray-a": "10.213.7.1", "fcray-b": "10.213.7.2"}


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def hosts():
    """Make two network namespaces with a cable between them; return how to run something in one."""
    network = [["ip", "link", "add", "fcray-a", "type", "veth", "peer", "name", "fcray-b"]]
    for name, address in HOSTS.items():
        network += [
            ["ip", "netns", "add", name],
            ["ip", "link", "set", name, "netns", name],
            ["ip", "-n", name, "address", "add", f"{address}/24", "dev", name],
            ["ip", "-n", name, "link", "set", name, "up"],
            ["ip", "-n", name, "link", "set", "lo", "up"],
        ]
    try:
        for words in network:
            try:
                done = subprocess.run(words, capture_output=True, text=True)
            except FileNotFoundError:
                pytest.skip("there is no ip command to make network namespaces with")
            if done.returncode:
                pytest.skip(f"network namespaces cannot be made here: {' '.join(words)}: {done.stderr.strip()}")
        yield lambda name, *words: ["ip", "netns", "exec", name, *map(str, words)]
    finally:
        for name in HOSTS:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def test_two_network_namespaces_stand_for_two_hosts(tmp_path, hosts, stack):
    """As docs/engines.md says for two machines: ray start on each, the run on the head."""
    head = f"{HOSTS['fcray-a']}:6379"
    starts = {
        "fcray-a": ["--head", "--port=6379", "--include-dashboard=false"],
        "fcray-b": [f"--address={head}"],
    }
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment = {**os.environ, **token, "RAY_USAGE_STATS_ENABLED": "0"}
    rays, log = [], tmp_path / "log"
    temporary = stack.enter_context(short_folder())
    environment["RAY_TMPDIR"] = temporary
    try:
        with log.open("ab") as file:
            for name, words in starts.items():
                shared = ["--num-cpus=1", "--object-store-memory=100000000", "--block"]
                node = [BIN / "ray", "start", *words, f"--node-ip-address={HOSTS[name]}", *shared]
                rays.append(
                    subprocess.Popen(
                        hosts(name, *node), stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment
                    )
                )
                wait_for(lambda: b"Ray runtime started" in log.read_bytes(), saying=log.read_text)
                time.sleep(5)  # until the second has joined; workers are counted when the run begins
        run = hosts(
            "fcray-a",
            *command("train", "--plugin", "fedcme", "--engine", "ray", "--set", f"ray.address={head}", "--workers", 2),
            *("--rounds", 3, "--clients", 4, "--local-epochs", 2, "--model", "mlp", "--device", "cpu"),
            *("--batch-size", 64, "--lr", 0.05, "--out", tmp_path / "run", "--quiet"),
        )
        done = subprocess.run(run, capture_output=True, text=True, timeout=180, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr + log.read_text()
    finally:
        below = [process for ray in rays for process in [ray.pid, *descendants(ray.pid)]]
        for pid in below:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        for ray in rays:
            ray.wait()
    here = federate(tmp_path, "fedcme", **{**OPTIONS, "rounds": 3, "workers": 1})
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == model_bytes(here)
    assert [line["failures"] for line in RunDirectory(tmp_path / "run").metrics.read()] == [[], [], []]


def test_a_folder_with_modules_of_known_names_is_not_imported_from(tmp_path):
    strange = tmp_path / "strange"
    strange.mkdir()
    for name in ("torch", "numpy", "safetensors", "fedcore", "fedcore_ray", "yaml", "sklearn"):
        (strange / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name + ' '!r})\n")
    words = ["train", "--config", configured(tmp_path), "--rounds", 1, "--engine", "ray", "--workers", 1, "--quiet"]
    done = subprocess.run(
        [str(word) for word in (BIN / "fedcore", *words, "--out", "run")],
        cwd=strange,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, os.environ.get("PYTHONPATH", "").split(":")))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists(), f"imported: {(tmp_path / 'ran').read_text()}"
