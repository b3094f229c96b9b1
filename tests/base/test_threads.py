"""Runs compute with one thread, wherever their libraries come from."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress

import pytest
import torch
from threadpoolctl import ThreadpoolController, threadpool_info

from fedcore.base import threads
from fedcore.base.threads import one_thread


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


def test_libraries_are_searched_again_after_an_import(monkeypatch):
    with one_thread():
        pass
    found = []
    monkeypatch.setattr(threads, "ThreadpoolController", lambda: found.append(1) or ThreadpoolController())
    with one_thread(), one_thread():
        pass
    assert found == []
    monkeypatch.setitem(sys.modules, "brings_a_library", sys)
    with one_thread(), one_thread():
        pass
    assert found == [1]


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
        with threads._turn:
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
