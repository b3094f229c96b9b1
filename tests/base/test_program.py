"""The source that a program has executed so far."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys, threading
from fedcore.base.program import main_source

def show():
    print(repr(main_source()))

A = 1
{call}
A = 2
"""


def shown(folder, call, *flags, typed=""):
    """Run a script; return the sources that it shows as the values that A has there."""
    (folder / "study.py").write_text(SCRIPT.format(call=call))
    command = [sys.executable, *flags, "study.py"] if "-m" not in flags else [sys.executable, *flags]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, input=typed)
    sources = map(eval, done.stdout.splitlines())
    return [source and [line for line in source.splitlines() if "A = " in line] for source in sources]


@pytest.mark.parametrize(
    "call",
    [
        "show()",
        "if __name__ == '__main__':\n    show()\n",
        "list(\n    map(lambda _: show(), [1]))",
        "exec('\\n\\n\\nshow()')",
        "thread = threading.Thread(target=show)\nthread.start()\nthread.join()",
    ],
)
def test_a_script_is_read_up_to_what_runs(tmp_path, call):
    assert shown(tmp_path, call) == [["A = 1"]]
    assert shown(tmp_path, call, "-m", "study") == [["A = 1"]]


def test_a_script_that_was_edited_since_it_started_has_no_source(tmp_path):
    assert shown(tmp_path, "open(__file__, 'a').write('# nothing else')\nshow()") == [["A = 1"]]
    assert shown(tmp_path, "open(__file__, 'a').write('B = 3')\nshow()") == [None]


def test_what_is_typed_after_a_script_has_no_source(tmp_path):
    """``python -i``: what is typed may have changed what the file says."""
    assert shown(tmp_path, "show()", "-i", typed="A = 3\nshow()\n") == [["A = 1"], None]


NOTEBOOK = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in (
    "from fedcore.base.program import main_source",
    "A = 1",
    "A = wrong syntax",
    "\\nprint(repr(main_source()))\\nA = 2",
    "A = 3",
    "%%time\\nprint(repr(main_source()))",
):
    shell.run_cell(cell, store_history=True)
"""


def test_a_notebook_is_read_as_its_cells_were_executed(tmp_path):
    pytest.importorskip("IPython")
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    done = subprocess.run([sys.executable, "notebook.py"], cwd=tmp_path, capture_output=True, text=True)
    sources = [eval(line) for line in done.stdout.splitlines() if line[:1] in ("'", '"')]  # noqa: S307 - they are shown so
    values = [[line for line in source.splitlines() if line.startswith("A = ")] for source in sources]
    assert values == [["A = 1"], ["A = 1", "A = 2", "A = 3"]]
