"""The local engine: which of its two forms a run gets, and that worker processes end with it."""

from __future__ import annotations

import errno
import importlib
import inspect
import linecache
import os
import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedcore import ConfigError, FedcoreError, Plugin, hookimpl
from fedcore.data import load_dataset, make_partition
from fedcore.engines import ClientSite, InProcessEngine, LocalEngine
from fedcore.tools import StorageError, registry
from fedcore_testing import federate, model_bytes, records, small_config
from fedcore_workers import TEMPLATE, WorkerEngine, engine, forks, pack_site, pickled, transport, unpickled
from tests.reliability.processes import alive, descendants, open_files
from tests.sentences import raises


@pytest.fixture(params=["from a template", "anew"])
def started(monkeypatch, request):
    """Let workers be started as in production, from a template of the engine's own or without one; return them."""
    found, start = [], engine.start_worker
    monkeypatch.setattr(forks, "_current", [])
    if request.param == "anew":
        monkeypatch.setattr(forks, "sys", SimpleNamespace(platform="darwin"))

    def noted(connection):
        found.append(start(connection))
        return found[-1]

    monkeypatch.setattr(engine, "start_worker", noted)
    return found


def spec(tmp_path, **options):
    config, dataset = small_config(tmp_path, **options), load_dataset("digits")
    return ClientSite(config, dataset, make_partition(dataset, config), tmp_path)


def test_real_workers_give_the_bits_of_this_process_and_end_with_the_engine(tmp_path, started):
    options = {"clients": 4, "participation": 0.5, "client_test_fraction": 0.2}
    batch, policies = getattr(os, "SCHED_BATCH", None), {None}  # Linux alone has it

    def note(event, details):
        if event == "round" and batch is not None:  # another worker may still be on its way
            policies.update(os.sched_getscheduler(worker.pid) for worker in started)

    there = federate(tmp_path, "moon", workers=2, notify=note, **options)
    assert batch in policies, "a worker with a task keeps the engine from sending the next one"
    here = federate(tmp_path, "moon", workers=0, **options)
    assert len({worker.pid for worker in started} - {os.getpid()}) == 2
    assert None not in [worker.returncode for worker in started]
    assert (model_bytes(there), records(there)) == (model_bytes(here), records(here))


class Warns(Plugin):
    @hookimpl
    def end_local(self, client):
        warnings.warn("as a library does", stacklevel=1)


def test_a_warning_of_all_workers_is_printed_once(tmp_path, capfd):
    """Each worker printed it. A notebook did not show it at all: workers write to the terminal of its server."""
    federate(tmp_path, Warns, workers=2, clients=4, rounds=2)
    assert capfd.readouterr().err.count("UserWarning: as a library does") == 1


def test_no_workers_are_this_process(tmp_path):
    before = descendants(os.getpid())
    started = LocalEngine(spec(tmp_path, workers=0))
    assert isinstance(started, InProcessEngine)
    assert [pid for pid in descendants(os.getpid()) if pid not in before and alive(pid)] == []
    with raises(ConfigError, "--client-timeout"):
        LocalEngine(spec(tmp_path, workers=0, client_timeout=1.0))


def test_a_module_that_was_edited_but_not_imported_again_is_refused(tmp_path, monkeypatch):
    """Workers trained with the new text, the server and runs without workers with the old one, in silence."""
    file, text = tmp_path / "edited_method.py", "from fedcore import Plugin\nclass Mine(Plugin):\n    weight = {}\n"
    file.write_text(text.format(0.1))
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("edited_method")
    with registry.lent({("plugin", "object:Mine"): module.Mine}):
        site = spec(tmp_path)
        site = replace(site, config=site.config.model_copy(update={"plugins": {"object:Mine": {}}}))
        pack_site(site)
        pack_site(site)
        file.write_text(text.format(99.1))
        for _ in range(2):
            with raises(ConfigError, "edited_method.py", "importlib.reload(edited_method)"):
                pack_site(site)
        importlib.reload(module)
        pack_site(site)


def test_the_text_of_a_notebooks_class_reaches_other_processes():
    """A sweep's runs had no hash of it: seeds of two versions were averaged in silence, 44.7 +- 40.1 %."""
    text = "class Mine:\n    def step(self):\n        return 1\n"
    file, names = "<a cell>", {"__name__": "__main__"}
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # as IPython does
    exec(compile(text, file, "exec"), names)  # noqa: S102
    with registry.lent({("plugin", "object:Mine"): names["Mine"]}):
        sent = pickled(None)
    del linecache.cache[file]
    with registry.lent({}):
        unpickled(sent, str)
        again = registry.LENT["plugin", "object:Mine"]
    assert inspect.getsource(again.step) == "    def step(self):\n        return 1\n"


def test_there_are_no_more_workers_than_clients(tmp_path):
    started = LocalEngine(spec(tmp_path, workers=9, clients=2))
    try:
        assert isinstance(started, WorkerEngine)
        assert started.workers == 2
    finally:
        started.close()
        started.close()  # a second time does nothing


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("of_program", [False, True])
def test_this_process_maps_the_data_too_unless_the_program_holds_it(tmp_path, of_program):
    site = spec(tmp_path, workers=1)
    images = site.dataset.train.images
    before, values = images.data_ptr(), images.clone()
    with registry.lent({("dataset", site.config.dataset): site.dataset} if of_program else {}):
        started = LocalEngine(site)
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps if "memfd:fedcore" in line]
    started.close()
    assert any(begin <= images.data_ptr() < end for begin, end in spans) != of_program
    assert (images.data_ptr() == before) == of_program
    assert torch.equal(images, values)
    images[0] = 0.5  # it stays writable


def test_an_engine_that_does_not_start_leaves_no_process_and_no_shared_memory(tmp_path, monkeypatch):
    LocalEngine(spec(tmp_path, workers=1)).close()  # descriptors that stay open are open from here on
    begun, start, before = [], engine.start_worker, open_files(os.getpid())

    def refuse_the_second(connection):
        if begun:
            raise BlockingIOError("Resource temporarily unavailable")
        begun.append(start(connection))
        return begun[0]

    monkeypatch.setattr(engine, "start_worker", refuse_the_second)
    with pytest.raises(BlockingIOError):
        LocalEngine(spec(tmp_path, workers=2, clients=2))
    assert open_files(os.getpid()) <= before  # files of earlier tests may be closed meanwhile
    assert not alive(begun[0].pid)


def test_an_engine_without_room_for_the_data_leaves_no_shared_memory(tmp_path, monkeypatch):
    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = open_files(os.getpid())
    monkeypatch.setattr(transport, "_pieces", full)
    with pytest.raises(StorageError, match="make room"):
        LocalEngine(spec(tmp_path, workers=1))
    assert open_files(os.getpid()) <= before  # files of earlier tests may be closed meanwhile


@pytest.mark.parametrize(
    ("ends", "named"),
    [
        ("os._exit(3)", ("3",)),
        ("os.kill(os.getpid(), 9)", ("9", "4")),  # it has no output
    ],
)
def test_workers_that_never_become_ready_end_the_run(tmp_path, monkeypatch, ends, named):
    command = [sys.executable, "-S", "-c", f"import os; {ends}"]
    monkeypatch.setattr(engine, "start_worker", lambda connection: subprocess.Popen(command))
    with raises(FedcoreError, "--workers", "0", *named):
        federate(tmp_path, workers=1)


def test_the_longest_limit_can_be_waited_for(tmp_path):
    result = federate(tmp_path, workers=1, rounds=1, client_timeout=1e6)
    assert [record["failures"] for record in records(result)] == [[]]


def test_a_worker_has_one_thread_and_the_allocators_settings():
    environment = engine.worker_environment()
    assert (environment["OMP_NUM_THREADS"], environment["MKL_NUM_THREADS"]) == ("1", "1")
    assert environment["PYTHON_CPU_COUNT"] == "1", "it hashes with one thread, too"
    assert "glibc.malloc.hugetlb=1" in environment["GLIBC_TUNABLES"]
    assert {name for name in environment if name.startswith("MALLOC_")} == {
        name for name in TEMPLATE if name.startswith("MALLOC_")
    }


@pytest.mark.slow  # templates import torch
def test_a_template_that_is_killed_is_replaced_and_clients_train_again_in_the_next_round(tmp_path, monkeypatch):
    monkeypatch.setattr(forks, "_current", [])
    killed = []

    def kill(event, details):
        if event == "round" and not killed:
            killed.append(forks.current()._process.pid)
            os.kill(killed[0], signal.SIGKILL)

    result = federate(tmp_path, workers=2, clients=4, rounds=4, notify=kill)
    failures = [[failure["kind"] for failure in record["failures"]] for record in records(result)]
    assert failures[0] == []
    assert set(failures[1]) <= {"worker_lost"}
    assert failures[2:] == [[], []]
    assert not alive(killed[0])
