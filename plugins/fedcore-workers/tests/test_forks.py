"""A forked worker begins as a fresh process does, and how it ends is told."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch

from fedcore import ConfigError, FedcoreError, Plugin, RunConfig, hookimpl
from fedcore.hooks import create_plugin
from fedcore.tools import process, registry
from fedcore_testing import client_state, federate, forked_workers
from fedcore_workers import ForkedProcess, current, early_template, engine, forks
from tests.reliability import kills
from tests.reliability.processes import alive, descendants, start, wait_for
from tests.sentences import raises

PLACE = []
"""Filled by a worker that was forked for an earlier engine, were it to serve a second one."""


class Noted(Plugin):
    """Notes about its process."""

    @hookimpl
    def end_local(self, client):
        PLACE.append(client.id)
        with open("/proc/self/status") as file:
            threads = next(line for line in file if line.startswith("Threads:"))
        client.state["pid"], client.state["parent"] = os.getpid(), os.getppid()
        client.state["threads"], client.state["group"] = int(threads.split()[1]), os.getpgid(0)
        client.state["environment"] = [os.environ.get("NOTED"), os.environ.get("OMP_NUM_THREADS"), os.getcwd()]
        client.state["alone"] = len(PLACE)
        client.state["random"] = torch.initial_seed()


@pytest.fixture
def notes(tmp_path, monkeypatch):
    monkeypatch.setenv("NOTED", "yes")
    monkeypatch.chdir(tmp_path)

    def run():
        result = federate(tmp_path, Noted, workers=1, clients=2, rounds=1)
        return [client_state(result, client)["noted"] for client in (0, 1)]

    return run


def test_a_worker_has_its_engines_environment_and_one_thread(notes, tmp_path):
    first, second = notes()
    assert first["pid"] == second["pid"] == first["group"] != os.getpid()
    assert first["threads"] == 1
    assert first["environment"] == ["yes", "1", str(tmp_path)]
    assert [first["alone"], second["alone"]] in ([1, 2], [2, 1])


def test_each_engine_has_a_process_of_its_own(notes):
    one, other = notes()[0], notes()[0]
    assert one["pid"] != other["pid"]
    assert one["random"] == other["random"]


@pytest.fixture
def processes(monkeypatch):
    """The worker processes that are started."""
    found, start = [], engine.start_worker

    def started(connection):
        found.append(start(connection))
        return found[-1]

    monkeypatch.setattr(engine, "start_worker", started)
    return found


def tell(number, word):
    os.write(number, f"{word} {os.getsid(0) == os.getpid()}".encode())
    return 3


def test_a_function_is_called_with_open_files_by_their_numbers():
    read, write = os.pipe()
    options = {"environment": process.environment(), "descriptors": {0: write, 50: write}}
    worker = current().fork(f"{__name__}:tell", [50, "hello"], **options)
    os.close(write)
    assert worker.wait(60) == 3
    with os.fdopen(read) as told:
        assert told.read() == "hello True"


def test_a_process_has_what_a_worker_has_and_nothing_for_tests(tmp_path):
    (tmp_path / "modules.py").write_text(
        "import sys\ndef missing(): return 2 * ('torch' not in sys.modules) + ('fedcore_testing' in sys.modules)\n"
    )
    worker = current().fork("modules:missing", [], environment={"PYTHONPATH": str(tmp_path)}, descriptors={})
    assert worker.wait(60) == 0


def searches_again():
    begun_with = registry._read.cache_info().misses
    create_plugin("fedprox", {})
    runners = {point.module for point in registry.available("runner").values()}
    done = process._libraries.cache_info().currsize == 1 and runners <= set(sys.modules)
    return 0 if done and registry._read.cache_info().misses == begun_with else 1


def test_what_each_worker_would_look_for_is_found_before_the_fork():
    """Installed packages, libraries with threads, runners. A program's own path may name a folder twice."""
    twice = {"PYTHONPATH": f"{sys.path[0]}{os.pathsep}{process.search_path()}"}
    own = forks.Template()  # other tests have changed the path since that of all tests has begun
    for environment in (process.environment(), process.environment(**twice)):
        assert own.fork(f"{__name__}:searches_again", [], environment=environment, descriptors={}).wait(60) == 0
    own.close()


class Dies(Plugin):
    """Ends its worker at two of three clients; in the first round each has a message of its own."""

    @hookimpl
    def begin_local(self, client):
        if client.round == 0 and client.id < 2:
            os.kill(os.getpid(), signal.SIGKILL) if client.id == 0 else os._exit(3)


def test_how_a_worker_ends_is_told(tmp_path, processes):
    federate(tmp_path, Dies, workers=1, clients=3)
    assert all(isinstance(worker, ForkedProcess) for worker in processes)
    assert [worker.returncode for worker in processes] == [-signal.SIGKILL, 3, 0]


def test_waiting_has_a_limit_and_killing_ends_it(processes):
    connection, theirs = socket.socketpair()
    with theirs:
        worker = engine.start_worker(theirs)
    other, end = socket.socketpair()
    with end:
        silent = engine.start_worker(end)
    wait_for(lambda: select.select([silent._status], [], [], 0)[0])  # the template has told its process id
    silent.kill()  # nobody has read that yet
    assert silent.wait(60) == -signal.SIGKILL
    other.close()
    connection.close()  # it waits for its specification: there is none
    assert worker.wait(60) == 0
    assert worker.poll() == 0
    worker.kill()  # it is gone: nothing happens
    status, write = os.pipe()
    os.write(write, b"1\n")
    waiting = ForkedProcess(status)
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(0.01)
    os.close(write)
    assert waiting.wait() == -signal.SIGKILL, (
        "a template that is gone without a word was killed, and with it its worker"
    )


def test_blocks_within_each_other_share_a_template():
    outer = current()
    with forked_workers():
        assert current() is outer
    assert current() is outer


@pytest.mark.parametrize("times", [2, forks.MOST_STARTS])
def test_a_template_that_is_killed_again_before_it_is_asked_is_replaced_or_named(monkeypatch, times):
    """A ConnectionError would end the command as if the reader of its output had gone: quietly."""
    send, failed = socket.send_fds, []

    def send_fds(*message):
        if len(failed) < times:
            failed.append(message)
            raise BrokenPipeError
        return send(*message)

    with forked_workers():
        monkeypatch.setattr(socket, "send_fds", send_fds)
        fork = partial(current().fork, "os:getpid", [], environment=os.environ, descriptors={})
        if times == forks.MOST_STARTS:
            with raises(FedcoreError, times):
                fork()
        else:
            assert fork().wait() is not None


@pytest.mark.parametrize(
    ("options", "threads", "on_cuda", "expected"),
    [
        ({"workers": 2}, 1, False, [True]),
        ({"workers": 2}, 2, False, [False]),
        ({"workers": 2}, 1, True, [False]),
        ({"workers": 2, "device": "cuda"}, 1, False, [False]),
        ({"workers": 0}, 1, False, []),
    ],
)
def test_a_template_is_forked_from_here_if_nothing_forbids_it(monkeypatch, options, threads, on_cuda, expected):
    asked = []
    monkeypatch.setattr(forks, "template", lambda from_here: asked.append(from_here) or nullcontext())
    monkeypatch.setattr(threading, "active_count", lambda: threads)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: on_cuda)
    with early_template(RunConfig(**options)):
        assert asked == expected


def test_what_all_processes_need_of_a_run_is_imported_before_the_fork(monkeypatch):
    resolved = []

    def resolve(kind, name):
        resolved.append((kind, name))
        raise ConfigError("the run says so")

    monkeypatch.setattr(forks, "template", lambda from_here: nullcontext())
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(registry, "resolve", resolve)
    plugins = {"fedprox": {}, "module:tests.nowhere.Method": {}}
    with early_template(RunConfig(workers=2, model="mlp", plugins=plugins, device="cpu")):
        assert {*resolved} >= {("plugin", "fedprox"), ("model", "mlp")}
        assert not any("nowhere" in name for _, name in resolved), "a user's code can start threads"


def rolled_up(pid, field):
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def check_shared(command):
    """Check that a command, its template and its two workers share the memory of what they imported."""
    template, *workers = descendants(command.pid)
    assert len(workers) == 2
    together = sum(rolled_up(pid, "Pss_Anon") for pid in (command.pid, template, *workers))
    assert together < 1.8 * rolled_up(command.pid, "Anonymous"), "a process of its own would have all of it again"
    return template, workers


@pytest.mark.slow
def test_processes_of_the_command_share_what_they_imported_and_a_killed_template_is_replaced(tmp_path):
    config = kills.configure(tmp_path, "fedavgm", workers=2, rounds=5_000)
    out = tmp_path / "run"
    command = start("train", "--config", config, "--out", out, "--quiet", log=tmp_path / "log", fresh=True)
    try:
        wait_for(lambda: kills.rounds_done(out) >= 2)
        template, workers = check_shared(command)
        if os.path.exists("/sys/kernel/mm/transparent_hugepage"):
            parts = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{workers[0]}/smaps").read_text())
            assert any("[heap]" in part and " hg" in part for part in parts), "its heap has huge pages"
        killed = {template, *workers}
        for _ in range(3):  # the last two while they import, before a worker is ready
            os.kill(template, signal.SIGKILL)
            wait_for(lambda: {*descendants(command.pid)} - killed)
            template = ({*descendants(command.pid)} - killed).pop()
            killed.add(template)
        before = kills.rounds_done(out)
        wait_for(lambda: kills.rounds_done(out) >= before + 3)
        assert not any(map(alive, killed - {template}))
        assert len(descendants(command.pid)) == 3
    finally:
        command.kill()
        command.wait()
    command = start("resume", out, "--quiet", log=tmp_path / "log", fresh=True)
    try:
        before = kills.rounds_done(out)
        wait_for(lambda: kills.rounds_done(out) >= before + 2)
        check_shared(command)
    finally:
        command.kill()
        command.wait()


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "closed"), [(0, "2>&-"), (1, ">&-"), (1, ">&- 2>&-")])
def test_a_program_without_an_output_trains(tmp_path, workers, closed):
    """Python has None for a stream that is closed from the start. A worker then has the null device in its place."""
    code = f"import fedcore; fedcore.run(rounds=1, clients=2, workers={workers})"
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=process.environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
