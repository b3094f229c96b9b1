"""A federation over loopback, with TLS and node keys: real SuperLink, real SuperNodes, a process for each client.

make test-flower runs these, in an environment of Flower's own (.venv-flower).
"""

from __future__ import annotations

import contextlib
import datetime
import http.server
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="flwr is not installed here: make test-flower runs these in .venv-flower")

import httpx

from fedcore_flower.keys import make_keys
from fedcore_testing import federate, model_bytes

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
NAMES = ["alder", "birch", "cedar"]
FRACTION = 0.25
SMALL = {"rounds": 3, "local_epochs": 2, "batch_size": 64, "lr": 0.05, "model": "mlp", "device": "cpu"}
METHODS = [(), ("moon",), ("fedcd",), ("fedcme",), ("fedeccr",)]

PATIENCE = 1800
"""Seconds after which something counts as hanging. It is long, so that no result depends on the load of the machine."""

ENDLESS = 100_000
"""The rounds of a run that the test stops."""


def fedcore(*arguments, script=("-m", "fedcore")):
    return [sys.executable, *script, *map(str, arguments)]


class Federation:
    """Three clients that keep running, and one server after the other on one port."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.keys = folder, folder / "keys"
        make_keys(self.keys, ["localhost"], [*NAMES, "stranger"])
        (self.keys / "stranger.pub").unlink()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.clients: dict[str, subprocess.Popen] = {}
        self.server: subprocess.Popen | None = None

    def join(self, name, *more, key=None, ca=None, script=(str(HERE / "gated.py"),)):
        log = (self.folder / f"{name}.log").open("ab")
        self.clients[name] = subprocess.Popen(
            fedcore(
                *("federate", "client", "--server", f"127.0.0.1:{self.port}", "--ca", ca or self.keys / "ca.crt"),
                *("--key", self.keys / f"{key or name}.key", "--data", "module:organisations.part"),
                *("--state", self.folder / name, "--device", "cpu", *more),
                script=script,
            ),
            stdout=log,
            stderr=log,
            env={
                **os.environ,
                "PYTHONPATH": str(HERE),
                "FEDCORE_TEST_CLIENT": str(NAMES.index(name) if name in NAMES else 0),
                "FEDCORE_TEST_GATES": str(self._gates(name)),
            },
        )
        log.close()
        return self.clients[name]

    def gate(self, name, task):
        """Stop a training process before a task. Return the file that exists while it is stopped (see gated.py)."""
        gate = self._gates(name) / task
        reached = gate.with_suffix(".reached")
        reached.unlink(missing_ok=True)  # left by a process that was killed
        gate.touch()
        return reached

    def _gates(self, name):
        folder = self.folder / f"{name}-gates"
        folder.mkdir(exist_ok=True)
        return folder

    def leave(self, name):
        process = self.clients.pop(name)
        process.terminate()
        process.wait(timeout=PATIENCE)  # its folder is locked until then

    def serve(self, out, *plugins, more=(), **options):
        if self.server is not None and self.server.poll() is None:  # left by a failed test: it has the port
            self.server.kill()
            self.server.communicate()
        command = ["federate", "server", "--host", "127.0.0.1", "--port", self.port, "--keys", self.keys]
        command += ["--probe-every", 5, "--wait", PATIENCE, "--quiet", *more]
        for name in plugins:
            command += ["--plugin", name]
        for name, value in options.items():
            command += [f"--{name.replace('_', '-')}", value]
        if out is not None:
            command += ["--out", out]
        self.server = subprocess.Popen(fedcore(*command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return self.server

    def run(self, out, *plugins, more=(), **options):
        server = self.serve(out, *plugins, more=more, **options)
        output, _ = server.communicate(timeout=PATIENCE)
        return server.returncode, output

    def log(self, name):
        return (self.folder / f"{name}.log").read_text()

    def close(self):
        for process in self.clients.values():
            process.terminate()
        for process in self.clients.values():
            process.wait(timeout=PATIENCE)


@contextlib.contextmanager
def https_server(port, keys, status):
    """Serve on a port with the certificate of some keys; answer everything with a status."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keys / "server.crt", keys / "server.key")
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("days", "words"),
    [
        (-900, "has expired; its operator makes new ones by fedcore federate keys. Or compare this machine's clock"),
        (2, "is not valid yet; compare this machine's clock, which says 2"),
        (0, "refuses the time of this client's signatures; compare its clock with this machine's clock, which says 2"),
    ],
)
def test_a_client_says_that_a_certificate_expired_or_that_clocks_differ(tmp_path, monkeypatch, days, words):
    class Then(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.datetime.now(tz) + datetime.timedelta(days=days)

    times = SimpleNamespace(datetime=Then, timedelta=datetime.timedelta, UTC=datetime.UTC)
    monkeypatch.setattr("fedcore_flower.keys.datetime", times)
    make_keys(tmp_path / "keys", ["localhost"], [])
    federation = Federation(tmp_path / "federation")
    with https_server(federation.port, tmp_path / "keys", 401):  # as Flower answers a signature of another time
        client = federation.join("stranger", "--patience", 1, ca=tmp_path / "keys" / "ca.crt")
        assert client.wait(timeout=PATIENCE) == 2
    assert words in " ".join(federation.log("stranger").split())


def children(pid):
    """Return the child processes of a process, by the module that they run."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            words = (status.parent / "cmdline").read_bytes().decode().split("\0")
        except (OSError, ValueError):
            continue
        if parent == pid and "fedcore_flower.child" in words:
            found[words[words.index("fedcore_flower.child") + 3].partition(":")[0]] = int(status.parent.name)
    return found


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition, server=None):
    """Wait for a condition. If a server is given and ends, fail with its output."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        assert server is None or server.poll() is None, server.communicate()[0]
        time.sleep(0.02)
    raise AssertionError("it did not happen in time")


def metrics(directory):
    file = directory / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def failures(directory):
    return {
        line["round"]: [(failure["client"], failure["kind"]) for failure in line["failures"]]
        for line in metrics(directory)
        if "round" in line
    }


def model(directory):
    return (directory / "model.safetensors").read_bytes()


@pytest.fixture(scope="module", autouse=True)
def interruptible():
    """Let servers be interrupted even if the tests are a background job of a shell, which ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    found = Federation(tmp_path_factory.mktemp("federation"))
    for name in NAMES:
        found.join(name)
    yield found
    found.close()


@pytest.mark.parametrize("plugins", METHODS, ids=lambda plugins: "-".join(plugins) or "fedavg")
def test_the_bits_are_those_of_one_machine(federation, tmp_path, plugins):
    here = federate(tmp_path, *plugins, client_test_fraction=FRACTION, **SMALL)
    code, output = federation.run(tmp_path / "run", *plugins, **SMALL)
    assert code == 0, output
    assert model(tmp_path / "run") == model_bytes(here)
    assert not any(failures(tmp_path / "run").values())
    roll = json.loads((tmp_path / "run" / "federation.json").read_text())
    assert [member["name"] for member in roll["clients"]] == NAMES
    assert all(member["fingerprint"].startswith("SHA256:") for member in roll["clients"])
    assert not (tmp_path / "run" / "clients").exists(), "a client's state stays with it"


def test_a_killed_server_goes_on_to_the_same_bits(federation, tmp_path):
    here = federate(tmp_path, "moon", client_test_fraction=FRACTION, **{**SMALL, "rounds": 4})
    server = federation.serve(tmp_path / "run", "moon", **{**SMALL, "rounds": 4})
    until(lambda: len(metrics(tmp_path / "run")) >= 2, server)
    superlink = children(server.pid)["fedcore_flower.superlink_app"]
    server.kill()
    server.communicate()
    until(lambda: not alive(superlink))
    code, output = federation.run(None, more=["--resume", tmp_path / "run"])
    assert code == 0, output
    assert model(tmp_path / "run") == model_bytes(here)


def test_ctrl_c_leaves_a_checkpoint_and_no_process(federation, tmp_path):
    server = federation.serve(tmp_path / "run", **{**SMALL, "rounds": ENDLESS})
    until(lambda: metrics(tmp_path / "run"), server)
    below = children(server.pid)
    server.send_signal(signal.SIGINT)
    output, _ = server.communicate(timeout=PATIENCE)
    assert server.returncode == 130, output
    assert "fedcore federate server --resume" in output
    assert below
    until(lambda: not any(map(alive, below.values())))


HALVES = {1: "fit_begin-1", 2: "fit_resume-1"}
"""The tasks of round 1 of a method with an exchange in the middle of an epoch."""


@pytest.mark.parametrize("half", HALVES)
def test_a_killed_training_process_is_named_and_takes_part_again(federation, tmp_path, half):
    reached = federation.gate("birch", HALVES[half])
    server = federation.serve(tmp_path / "run", "fedcme", **SMALL)
    until(reached.exists, server)
    os.kill(children(federation.clients["birch"].pid)["gated"], signal.SIGKILL)
    output, _ = server.communicate(timeout=PATIENCE)
    assert server.returncode == 0, output
    found = failures(tmp_path / "run")
    assert found[1] == [(1, "worker_lost")] or found[1] == [(1, "session_lost")], found
    assert found[2] == []
    assert "birch" in json.dumps(metrics(tmp_path / "run")[1]["failures"])


@pytest.mark.parametrize("half", HALVES)
def test_a_killed_supernode_is_replaced_and_nothing_is_lost(federation, tmp_path, half):
    """A SuperNode is killed while its client trains. Another one is started, and the task is not computed again."""
    here = federate(tmp_path, "fedcme", client_test_fraction=FRACTION, **SMALL)
    task, round = HALVES[half].split("-")
    worked = federation.log("birch").count(f"round {round}: {task}")
    reached = federation.gate("birch", HALVES[half])
    server = federation.serve(tmp_path / "run", "fedcme", more=["--grace", PATIENCE], **SMALL)
    until(reached.exists, server)
    killed = children(federation.clients["birch"].pid)["fedcore_flower.supernode_app"]
    os.kill(killed, signal.SIGKILL)
    until(
        lambda: children(federation.clients["birch"].pid).get("fedcore_flower.supernode_app", killed) != killed, server
    )
    reached.unlink()
    output, _ = server.communicate(timeout=PATIENCE)
    assert server.returncode == 0, output
    assert not any(failures(tmp_path / "run").values())
    assert federation.log("birch").count(f"round {round}: {task}") == worked + 1
    assert model(tmp_path / "run") == model_bytes(here)


def test_a_killed_client_leaves_no_process_is_named_and_comes_back(federation, tmp_path):
    server = federation.serve(tmp_path / "run", "fedcme", more=["--grace", "1"], **{**SMALL, "rounds": ENDLESS})
    until(lambda: metrics(tmp_path / "run"), server)
    below = children(federation.clients["birch"].pid)
    assert len(below) == 2
    federation.clients["birch"].kill()
    federation.clients["birch"].wait()
    until(lambda: not any(map(alive, below.values())))
    until(lambda: any(failures(tmp_path / "run").values()), server)
    federation.join("birch")
    until(lambda: list(failures(tmp_path / "run").values())[-1] == [], server)
    server.send_signal(signal.SIGINT)
    output, _ = server.communicate(timeout=PATIENCE)
    assert server.returncode == 130, output
    found = [failed for failed in failures(tmp_path / "run").values() if failed]
    assert {client for failed in found for client, _ in failed} == {1}


def test_lies_are_rejected_and_named(federation, tmp_path):
    federation.leave("birch")
    federation.join("birch", script=(str(HERE / "tampered.py"),))
    code, output = federation.run(tmp_path / "run", **{**SMALL, "rounds": 3})
    federation.leave("birch")
    federation.join("birch")
    assert code == 0, output
    kinds = ["rejected", "diverged", "rejected"]
    assert failures(tmp_path / "run") == {round: [(1, kind)] for round, kind in enumerate(kinds)}
    words = [line["failures"][0]["message"] for line in metrics(tmp_path / "run") if "round" in line]
    assert "is (1, 2, 3)" in words[0]
    assert "finite" in words[1]
    assert "client is 2" in words[2] or "client 2" in words[2]


def test_strangers_are_kept_out(federation, tmp_path):
    """An unregistered key, another CA, plain HTTP, and Flower's Control API without the owner's secret."""
    make_keys(tmp_path / "other", ["localhost"], ["stranger"])
    server = federation.serve(tmp_path / "run", **{**SMALL, "rounds": ENDLESS})
    try:
        until(lambda: metrics(tmp_path / "run"), server)
        refused = federation.join("stranger", "--patience", 3)
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{federation.port}/health")
        trusted = ssl.create_default_context(cafile=str(federation.keys / "ca.crt"))
        secure = httpx.Client(verify=trusted, base_url=f"https://127.0.0.1:{federation.port}")
        for path in ("/v1/control/list-nodes", "/v1/control/register-node", "/v1/control/start-run", "/docs"):
            assert secure.post(path, content=b"", headers={"content-type": "application/x-protobuf"}).status_code == 403
        assert refused.wait(timeout=PATIENCE) == 2
        assert "does not know the key" in federation.log("stranger")
        federation.clients.pop("stranger")
        elsewhere = federation.join("stranger", ca=tmp_path / "other" / "ca.crt")
        assert elsewhere.wait(timeout=PATIENCE) == 2
        assert "did not sign" in federation.log("stranger")
        federation.clients.pop("stranger")
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=PATIENCE)


def test_what_a_client_does_not_allow_is_refused_before_the_run(federation, tmp_path):
    federation.leave("birch")
    federation.join("birch", "--allow-plugin", "fedcme")
    code, output = federation.run(tmp_path / "run", "moon", **SMALL)
    federation.leave("birch")
    federation.join("birch")
    assert code == 2
    assert "client 'birch' does not take part: method 'moon' is not allowed at the client" in " ".join(output.split())
    assert not (tmp_path / "run").exists()


def _namespaces(tmp_path):
    """Make two network namespaces that are connected, and return their names; or skip the test."""
    if shutil.which("ip") is None:
        pytest.skip("there is no ip command to make network namespaces with")
    names = [f"fedcore{os.getpid()}{side}" for side in "ab"]
    commands = [["ip", "netns", "add", name] for name in names]
    commands += [["ip", "link", "add", "fc0", "netns", names[0], "type", "veth", "peer", "fc1", "netns", names[1]]]
    for name, device, address in zip(names, ("fc0", "fc1"), ("10.97.0.1/24", "10.97.0.2/24"), strict=True):
        commands += [["ip", "-n", name, "addr", "add", address, "dev", device]]
        commands += [["ip", "-n", name, "link", "set", up, "up"] for up in ("lo", device)]
    for command in commands:
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            for name in names:
                subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            pytest.skip(f"no right to make network namespaces: {made.stderr.strip()}")
    return names


def test_two_hosts(tmp_path):
    """The server in one network namespace, its clients in another."""
    names = _namespaces(tmp_path)
    federation = Federation(tmp_path)
    shutil.rmtree(federation.keys)
    make_keys(federation.keys, ["10.97.0.1"], NAMES)
    processes = []
    try:
        for number, name in enumerate(NAMES):
            command = ["ip", "netns", "exec", names[1]]
            command += fedcore(
                *("federate", "client", "--server", "10.97.0.1:9443", "--ca", federation.keys / "ca.crt"),
                *("--key", federation.keys / f"{name}.key", "--data", "module:organisations.part"),
                *("--state", tmp_path / name, "--quiet"),
            )
            env = {**os.environ, "PYTHONPATH": str(HERE), "FEDCORE_TEST_CLIENT": str(number)}
            processes.append(subprocess.Popen(command, env=env))
        command = ["ip", "netns", "exec", names[0]]
        command += fedcore(
            *("federate", "server", "--host", "10.97.0.1", "--port", "9443", "--keys", federation.keys, "--quiet"),
            *("--out", tmp_path / "run", "--rounds", "2", "--model", "mlp", "--device", "cpu"),
        )
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert done.returncode == 0, done.stderr
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(timeout=PATIENCE)
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)
    assert not any(failures(tmp_path / "run").values())
