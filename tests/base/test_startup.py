"""Imports without garbage collections, and a process that ends without one."""

from __future__ import annotations

import gc
import subprocess
import sys

from fedcore.base.startup import importing
from fedcore.base.subprocesses import environment

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
