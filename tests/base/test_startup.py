"""Imports without garbage collections, a process that ends without one, and standard streams that were closed."""

from __future__ import annotations

import gc
import platform
import subprocess
import sys

import pytest

from fedcore.base.startup import importing
from fedcore.base.subprocesses import environment

MEMORY = """
import concurrent.futures
import resource
import sys
from fedcore.base.startup import keep_freed_memory

print(keep_freed_memory())
import torch

def activations(_):
    for _ in range(20):
        torch.ones(3 << 20).add_(1)  # 12 MiB, 3072 pages

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(activations, range(2)))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(min(faults() for _ in range(3)))
"""

CODE = """
import gc
from fedcore.base.startup import end_without_collecting, importing

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


def test_streams_that_are_closed_are_opened(tmp_path):
    """Files that are opened next do not take the numbers of the streams, into which libraries print."""
    script = (
        "import os, sys; from fedcore.base.startup import open_standard_streams; open_standard_streams();"
        "os.write(2, b'warning'); print('said'); print('said', file=sys.stderr); sys.stdin.read();"
        "print(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT) > 2, file=open(sys.argv[1], 'w'))"
    )
    command = f'exec "{sys.executable}" -P -c "$1" "$2" <&- >&- 2>&-'
    done = subprocess.run(["sh", "-c", command, "sh", script, tmp_path / "file"], check=False)
    assert done.returncode == 0
    assert (tmp_path / "file").read_text() == "True\n"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the options are glibc's")
@pytest.mark.parametrize(
    "given", [{}, {"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.perturb=0"}]
)
def test_freed_memory_stays_with_the_process_unless_the_user_chose_otherwise(given):
    command = [sys.executable, "-P", "-c", MEMORY]
    done = subprocess.run(command, env={**environment(), **given}, capture_output=True, text=True, check=True)
    kept, faults = done.stdout.split()
    assert kept == str(not given)
    if not given:
        assert int(faults) < 3072, "every activation's pages would be 120,000 faults"
