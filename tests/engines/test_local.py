"""The local engine: which of its two forms a run gets, and that worker processes end with it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from fedcore.base.errors import ConfigError, FedcoreError, StorageError
from fedcore.client.messages import ClientSite
from fedcore.engines import local, transport
from fedcore.runs.resolve import resolve_config, resolve_partition
from fedcore_testing import federate, model_bytes, records, small_config
from tests.reliability.processes import alive, descendants, open_files

REAL = local.start_worker  # before the fixture of the root conftest.py puts forks in its place
assert REAL.__module__ == local.__name__


@pytest.fixture
def started(monkeypatch):
    """Let workers be started as in production, and return them."""
    found = []

    def start(connection):
        found.append(REAL(connection))
        return found[-1]

    monkeypatch.setattr(local, "start_worker", start)
    return found


def spec(tmp_path, **options):
    config, dataset = resolve_config(small_config(tmp_path, **options))
    return ClientSite(config, dataset, resolve_partition(config, dataset), tmp_path)


def test_real_workers_give_the_bits_of_this_process_and_end_with_the_engine(tmp_path, started):
    options = {"clients": 4, "participation": 0.5, "client_test_fraction": 0.2}
    there = federate(tmp_path, "moon", workers=2, **options)
    here = federate(tmp_path, "moon", workers=0, **options)
    assert len({worker.pid for worker in started} - {os.getpid()}) == 2
    assert None not in [worker.returncode for worker in started]
    assert (model_bytes(there), records(there)) == (model_bytes(here), records(here))


def test_no_workers_are_this_process(tmp_path):
    before = descendants(os.getpid())
    engine = local.LocalEngine(spec(tmp_path, workers=0))
    assert isinstance(engine, local.InProcessEngine)
    assert [pid for pid in descendants(os.getpid()) if pid not in before and alive(pid)] == []
    with pytest.raises(ConfigError, match="--client-timeout needs worker processes"):
        local.LocalEngine(spec(tmp_path, workers=0, client_timeout=1.0))


def test_there_are_no_more_workers_than_clients(tmp_path):
    engine = local.LocalEngine(spec(tmp_path, workers=9, clients=2))
    try:
        assert isinstance(engine, local.WorkerEngine)
        assert engine.workers == 2
    finally:
        engine.close()
        engine.close()  # a second time does nothing


def test_an_engine_that_does_not_start_leaves_no_process_and_no_shared_memory(tmp_path, monkeypatch):
    local.LocalEngine(spec(tmp_path, workers=1)).close()  # the server that forks workers begins with the first one
    begun, start, before = [], local.start_worker, open_files(os.getpid())

    def refuse_the_second(connection):
        if begun:
            raise BlockingIOError("Resource temporarily unavailable")
        begun.append(start(connection))
        return begun[0]

    monkeypatch.setattr(local, "start_worker", refuse_the_second)
    with pytest.raises(BlockingIOError):
        local.LocalEngine(spec(tmp_path, workers=2, clients=2))
    assert open_files(os.getpid()) == before
    assert not alive(begun[0].pid)


def test_an_engine_without_room_for_the_data_leaves_no_shared_memory(tmp_path, monkeypatch):
    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = open_files(os.getpid())
    monkeypatch.setattr(transport, "_pieces", full)
    with pytest.raises(StorageError, match="make room"):
        local.LocalEngine(spec(tmp_path, workers=1))
    assert open_files(os.getpid()) == before


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ("os._exit(3)", r"ended \(exit code 3\) before it was ready; its output above says why"),
        ("os.kill(os.getpid(), 9)", r"ended \(signal 9\) before it was ready, 4 times"),  # it has no output
    ],
)
def test_workers_that_never_become_ready_end_the_run(tmp_path, monkeypatch, ends, said):
    command = [sys.executable, "-S", "-c", f"import os; {ends}"]
    monkeypatch.setattr(local, "start_worker", lambda connection: subprocess.Popen(command))
    with pytest.raises(FedcoreError, match=rf"{said}\. --workers 0 runs everything in one process\.$"):
        federate(tmp_path, workers=1)


def test_the_longest_limit_can_be_waited_for(tmp_path):
    result = federate(tmp_path, workers=1, rounds=1, client_timeout=1e6)
    assert [record["failures"] for record in records(result)] == [[]]


def test_a_worker_has_one_thread_and_the_allocators_settings():
    environment = local.worker_environment()
    assert (environment["OMP_NUM_THREADS"], environment["MKL_NUM_THREADS"]) == ("1", "1")
    assert environment["PYTHON_CPU_COUNT"] == "1", "it hashes with one thread, too"
    assert "glibc.malloc.hugetlb=1" in environment["GLIBC_TUNABLES"]
    assert {name for name in environment if name.startswith("MALLOC_")} == {*local.ALLOCATOR} - {"GLIBC_TUNABLES"}
