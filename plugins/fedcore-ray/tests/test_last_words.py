"""The line that stands for a process that ended without one."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import os
from fedcore_ray.last_words import LastWords
words = LastWords("Go on with: fedcore resume '$HOME' %s")
{then}
"""
LINE = "\nGo on with: fedcore resume '$HOME' %s\n"


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("then", "said"),
    [
        ("os._exit(1)", LINE),
        ("os.kill(os.getpid(), 9)", LINE),
        ("words.take_back(); words.take_back()", ""),
        ("words._shell.kill(); words._shell.wait(); words.take_back()", ""),
    ],
)
def test_a_process_that_ends_without_a_word_leaves_its_last(then, said):
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(then=then)], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", said)
