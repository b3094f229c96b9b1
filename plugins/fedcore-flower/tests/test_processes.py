"""Child processes end with their parent, and the SuperLink's Control API is closed."""

from __future__ import annotations

import ast
import asyncio
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from fedcore import ConfigError, FedcoreError
from fedcore_flower import client, processes
from fedcore_flower.conditions import TrainerOptions
from fedcore_flower.processes import Child, require_flower
from fedcore_flower.superlink_app import HEADER, OwnerOnly
from tests.sentences import raises

STARTS_ONE = """
import sys, time
from pathlib import Path
from fedcore_flower.processes import Child
child = Child("time:sleep_for_ever", log=Path(sys.argv[1]))
print(child.pid, flush=True)
time.sleep(100)
"""


HANGS = 600.0
"""Seconds after which a process counts as one that does not end, even on a busy machine."""


def ended(pid, seconds=HANGS):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def sleeper(tmp_path, monkeypatch):
    """A module whose function never ends."""
    (tmp_path / "sleeper.py").write_text(
        "import time\ndef main():\n    print('here', flush=True)\n    time.sleep(100)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # the parent may be another process
    return "sleeper:main"


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not signal the end of a parent")
def test_a_child_dies_with_a_parent_that_is_killed(tmp_path, sleeper):
    script = STARTS_ONE.replace("time:sleep_for_ever", sleeper)
    command = [sys.executable, "-c", script, str(tmp_path / "log")]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    assert not ended(child, 0.5)
    parent.kill()
    parent.wait()
    assert ended(child)


def test_a_child_is_stopped_and_its_output_kept(tmp_path, sleeper):
    child = Child(sleeper, log=tmp_path / "log")
    while "here" not in child.tail():
        assert child.exit_code is None
        time.sleep(0.02)
    child.stop()
    child.stop()
    assert child.exit_code == -signal.SIGTERM
    assert oct((tmp_path / "log").stat().st_mode & 0o777) == "0o600"


def test_flower_reports_nothing_from_any_child(tmp_path):
    (tmp_path / "shows.py").write_text("import os\ndef main():\n    print(os.environ['FLWR_TELEMETRY_ENABLED'])\n")
    child = Child("shows:main", log=tmp_path / "log", env={"PYTHONPATH": str(tmp_path)})
    while child.exit_code is None:
        time.sleep(0.02)
    assert child.tail() == "0"


@pytest.mark.parametrize("installed", ["1.39.4", "1.43.0", "2.41.0"])
def test_versions_of_flower_that_were_not_tested_are_refused(monkeypatch, installed):
    monkeypatch.setattr("importlib.metadata.version", lambda name: installed)
    with raises(ConfigError, installed, "1.40", "1.42", "1.43"):
        require_flower()


@pytest.mark.parametrize("installed", ["1.40.0", "1.41.3", "1.42.7"])
def test_versions_of_flower_that_were_tested_are_taken(monkeypatch, installed):
    asked = []
    monkeypatch.setattr("importlib.metadata.version", lambda name: asked.append(name) or installed)
    require_flower()
    assert set(asked) == {"flwr"}


def test_the_project_asks_for_the_versions_that_the_code_takes():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    (major, first), (_, below) = processes.FLOWER
    assert f"flwr>={major}.{first},<{major}.{below}" in project["dependencies"]


PUBLIC = {"flwr.app", "flwr.clientapp", "flwr.common", "flwr.serverapp"}
PRIVATE = {
    "link.py": {"flwr.common.constant"},
    "node.py": {
        "flwr.common.constant",
        "flwr.proto.fleet_pb2",
        "flwr.proto.runtime_pb2",
        "flwr.supercore.constant",
        "flwr.supercore.interceptors",
        "flwr.supercore.run",
        "flwr.supercore.runtime",
        "flwr.supernode.fleet_http_client",
        "flwr.supernode.node_auth_http_interceptor",
        "flwr.supernode.runtime.run_clientapp",
    },
    "superlink.py": {"flwr.cli.build", "flwr.proto.control_pb2", "flwr.proto.fab_pb2"},
    "supernode_app.py": {"flwr.supernode"},
}
"""The modules of Flower that are not public, by the file that imports them. The package's page says why."""


def test_only_these_files_import_private_modules_of_flower():
    found = {}
    for file in Path(processes.__file__).parent.glob("*.py"):
        nodes = [
            node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom | ast.Import)
        ]
        modules = {getattr(node, "module", None) or node.names[0].name for node in nodes}
        if private := {name for name in modules if name.partition(".")[0] == "flwr"} - PUBLIC:
            found[file.name] = private
    assert found == PRIVATE


def answer_of(path, headers=(), kind="http"):
    """Return the status that a request gets from OwnerOnly in front of an app that answers 200."""
    sent = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "path": path, "headers": list(headers)}
    asyncio.run(OwnerOnly(app, b"\x01" * 32)(scope, None, send))
    return sent[0]["status"] if sent else None


SECRET = (HEADER.encode(), b"01" * 32)


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/fleet/pull-messages", [], 200),
        ("/v1/runtime/acquire-task", [], 200),
        ("/v1/control/start-run", [], 403),
        ("/v1/control/start-run", [SECRET], 200),
        ("/v1/control/start-run", [(HEADER.encode(), b"00" * 32)], 403),
        ("/v1/control/start-run", [SECRET, SECRET], 403),
        ("/v1/fleet", [], 403),
        ("/docs", [], 403),
        ("/", [], 403),
    ],
)
def test_only_the_owner_reaches_the_control_api(path, headers, status):
    assert answer_of(path, headers) == status


def test_other_kinds_of_connections_are_not_served():
    assert answer_of("/v1/fleet/", kind="websocket") is None
    assert answer_of("", kind="lifespan") == 200


def test_the_training_process_says_what_is_wrong_with_the_data(tmp_path):
    options = TrainerOptions(f"npz:{tmp_path / 'none.npz'}", str(tmp_path / "state"))
    with raises(FedcoreError, "none.npz"):
        client.Trainer(options)


@pytest.mark.slow
def test_a_killed_training_process_is_an_answer_and_is_replaced(tmp_path):
    trainer = client.Trainer(TrainerOptions("digits", str(tmp_path / "state"), test_fraction=0.1))
    try:
        assert trainer.description["train"] + trainer.description["test"] == 1437
        first = trainer.pid
        os.kill(first, signal.SIGKILL)
        answer = trainer.ask({"head": b""}, lambda: None)
        assert answer == {"lost": b"the training process ended (signal 9)"}
        trainer.keep_running()
        assert trainer.pid != first
        assert "head" in trainer.ask({"head": b"nonsense"}, lambda: None)
    finally:
        trainer.stop()
    assert ended(trainer.pid)


DIES = """
import os, signal, socket, struct, sys
from multiprocessing.connection import Connection
from fedcore_flower.trainer import receive_blobs, send_blobs

def main():
    connection = Connection(int(sys.argv[1]))
    if {ready}:
        send_blobs(connection, {{"ready": b'{{"train": 1}}'}})
        receive_blobs(connection)
    connection.send_bytes(b'["head"]')
    os.write(connection.fileno(), struct.pack("!i", 1000) + b"x" * 10)  # ten of a thousand bytes
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def dies(tmp_path, monkeypatch):
    """Make training processes that are killed in the middle of a message: the first one, or the first answer."""

    def write(*, ready):
        (tmp_path / "dies.py").write_text(DIES.format(ready=ready))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(client, "TRAINER", "dies:main")

    return write


def test_a_training_process_that_is_killed_in_the_middle_of_a_message_is_replaced(tmp_path, dies):
    dies(ready=True)
    trainer = client.Trainer(TrainerOptions("digits", str(tmp_path / "state")))
    try:
        for _ in range(2):
            first = trainer.pid
            assert trainer.ask({"head": b""}, lambda: None) == {"lost": b"the training process ended (signal 9)"}
            trainer.keep_running()
            assert trainer.pid != first
    finally:
        trainer.stop()


def test_a_training_process_that_is_killed_while_it_starts_is_an_error_for_the_user(tmp_path, dies):
    dies(ready=False)
    with raises(FedcoreError, "-9"):
        client.Trainer(TrainerOptions("digits", str(tmp_path / "state")))


def test_two_clients_do_not_share_their_states(tmp_path):
    with (
        client._locked(tmp_path),
        raises(ConfigError),
        client._locked(tmp_path),
    ):
        pass


def test_connections_to_this_machine_use_no_proxy(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "example.org")
    for name in ("FLWR_HOME", "no_proxy", *processes.SILENT):
        monkeypatch.setenv(name, "")
    processes.silence_flower(tmp_path)
    assert os.environ["NO_PROXY"] == "example.org,127.0.0.1,localhost,::1"
    assert os.environ["FLWR_TELEMETRY_ENABLED"] == "0"
