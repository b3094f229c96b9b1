"""This process and those it starts: imports, memory, processors, threads, command lines."""

from __future__ import annotations

import gc
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from types import ModuleType

import pytest
import threadpoolctl
import torch
from threadpoolctl import ThreadpoolController, threadpool_info

from fedcore.base import process
from fedcore.base.process import cores, environment, importing, one_thread, python_command, search_path

MEMORY = """
import concurrent.futures
import resource
import sys
from fedcore.base.process import keep_freed_memory

print(keep_freed_memory())
import threadpoolctl
import torch

def activations(_):
    for _ in range(20):
        torch.ones(3 << 20).add_(1)  # 12 MiB, 3072 pages

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(activations, range(2)))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

held = [torch.ones(3 << 20) for _ in range(2)]  # both threads may hold one at a time
del held
faults()
print(min(faults() for _ in range(10)))
"""

CODE = """
import gc
from fedcore.base.process import end_without_collecting, importing

end_without_collecting()
collected = []
gc.callbacks.append(lambda phase, info: collected.append(phase))
with importing():
    assert not gc.isenabled()
    kept = [[index] for index in range(100_000)]
    import torch
    assert not collected
assert gc.isenabled()
assert gc.get_freeze_count() > 100_000
gc.callbacks.clear()


class Loud:
    def __del__(self):
        print("collected")


loud = Loud()
loud.itself = loud
"""


def test_nothing_is_collected_while_torch_is_imported_nor_at_the_end():
    done = subprocess.run([sys.executable, "-P", "-c", CODE], env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_it_does_nothing_where_torch_is_there():
    import torch  # noqa: F401

    before = gc.get_freeze_count()
    with importing():
        assert gc.isenabled()
    assert gc.get_freeze_count() == before


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the options are glibc's")
@pytest.mark.parametrize(
    "given",
    [{}, {"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.perturb=0"}],
)
def test_freed_memory_stays_with_the_process_unless_the_user_chose_otherwise(given):
    command = [sys.executable, "-P", "-c", MEMORY]
    done = subprocess.run(command, env={**environment(), **given}, capture_output=True, text=True, check=True)
    kept, faults = done.stdout.split()
    assert kept == str(not given)
    if not given:
        assert int(faults) < 3072, "every activation's pages would be 120,000 faults"


def test_the_number_of_processors_is_that_of_the_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHON_CPU_COUNT", raising=False)
    assert cores() == len(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "cpu_count", lambda: 1000)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 8})
    assert cores() == 3


@pytest.mark.parametrize(("given", "found"), [("1", 1), ("12", 12), ("default", 3), ("0", 3), ("", 3), ("²", 3)])
def test_the_environment_may_say_another(monkeypatch: pytest.MonkeyPatch, given: str, found: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 8})
    monkeypatch.setenv("PYTHON_CPU_COUNT", given)
    assert cores() == found


def test_modules_of_this_process_are_found_and_those_of_the_folder_are_not(tmp_path, monkeypatch):
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "beside_a_script.py").write_text("print('found')\n")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "json.py").write_text("raise SystemExit('a module of the working folder was imported')\n")
    monkeypatch.syspath_prepend(tmp_path / "ours")
    line = python_command("beside_a_script", "x")
    assert line[-3:] == ["-m", "beside_a_script", "x"]
    done = subprocess.run(line, cwd=tmp_path / "here", env=environment(MORE="1"), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "found\n"), done.stderr
    done = subprocess.run(
        [*line[:-2], "json.tool", "--help"], cwd=tmp_path / "here", env=environment(), capture_output=True
    )
    assert done.returncode == 0, done.stderr


def test_the_empty_entry_is_the_folder_that_it_means_now(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "/a"])
    assert search_path() == f"{tmp_path}:/a"
    assert environment(MORE="1")["MORE"] == "1"


def threads_of_libraries():
    return [library["num_threads"] for library in threadpool_info()]


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with ThreadpoolController().limit(limits=2):
        yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_everything_has_one_thread_and_what_it_had_afterwards():
    had = threads_of_libraries()
    assert max(had) == 2
    with suppress(ZeroDivisionError), one_thread():
        assert torch.get_num_threads() == 1
        assert set(threads_of_libraries()) == {1}
        raise ZeroDivisionError
    assert torch.get_num_threads() == 2
    assert threads_of_libraries() == had


def test_libraries_are_looked_for_once_until_a_module_is_imported(monkeypatch):
    """It takes longer than all else of a block, and a run has two."""
    looked = []
    monkeypatch.setattr(threadpoolctl, "ThreadpoolController", lambda: looked.append(1) or ThreadpoolController())
    monkeypatch.setitem(sys.modules, "imported_since", ModuleType("imported_since"))
    for _ in range(3):
        with one_thread():
            pass
    assert len(looked) == 1
    monkeypatch.setitem(sys.modules, "imported_then", ModuleType("imported_then"))
    with one_thread():
        pass
    assert len(looked) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_fork_does_not_wait_for_a_thread_that_it_does_not_have():
    inside, done = threading.Event(), threading.Event()

    def hold():
        with one_thread():
            inside.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    child = os.fork()
    if not child:
        with process._turn:
            os._exit(0)
    gone = wait_for_end(child)
    done.set()
    thread.join()
    assert gone


def wait_for_end(child):
    """Return whether a child ends within seconds; kill one that does not."""
    give_up = time.monotonic() + 5
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > give_up:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        time.sleep(0.005)
    return True
