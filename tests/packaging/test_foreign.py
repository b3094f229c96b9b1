"""Another project's distribution ``fedcore`` in the same environment: said before anything else, with the remedy."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from tests.packaging.environments import Environment, foreign, lend

ROOT = Path(__file__).parents[2]
ENTRANCES = {  # with their exit codes
    ("fedcore", "--version"): 2,
    ("python", "-c", "import fedcore; fedcore.run"): 1,
    ("python", "-c", "from fedcore import Plugin"): 1,
    ("python", "-m", "fedcore", "--version"): 1,
}


def remedy(told: str) -> list[list[str]]:
    return [shlex.split(line)[1:] for line in re.findall(r"^ {4}(pip .*)$", told, re.MULTILINE)]


@pytest.mark.slow
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_foreign_distribution_is_named_with_two_commands_that_mend_it(dist, tmp_path, order):
    environment = Environment(tmp_path)
    lend(environment.lent, dist, "fedcore-fl")
    wheels = [foreign(tmp_path), "fedcore-fl"]
    for wheel in wheels if order == "before" else reversed(wheels):
        environment.install(dist, wheel)
    for arguments, code in ENTRANCES.items():
        told = environment.run(*arguments, code=code)
        assert f"{environment.spec} has the distribution fedcore 9.9, which is another project's" in told
        assert "AttributeError" not in told
        if arguments[0] == "fedcore":
            assert told.startswith("error: ")
            assert "Traceback" not in told
        assert remedy(told) == [["uninstall", "--yes", "fedcore", "fedcore-fl"], ["install", "fedcore-fl"]]
    first, second = remedy(told)
    environment.pip(*first)
    environment.install(dist, second[-1])
    assert environment.ours() == {"fedcore-fl"}
    for arguments in ENTRANCES:
        environment.run(*arguments)


def test_a_checkout_is_installed_again_as_it_was(tmp_path):
    """The editable fedcore of these tests, behind a folder with a foreign one on the search path."""
    (tmp_path / "fedcore").mkdir()
    (tmp_path / "fedcore" / "__init__.py").touch()
    imported = [sys.executable, "-c", "import fedcore; print(fedcore.__file__)"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def import_it():
        return subprocess.run(imported, cwd=tmp_path, env=environment, capture_output=True, text=True)

    assert import_it().stdout.strip() == str(tmp_path / "fedcore" / "__init__.py"), "a user's own folder is no matter"
    (tmp_path / "fedcore-1.2.3.dist-info").mkdir()
    done = import_it()
    assert done.returncode == 1
    assert f"ImportError: {tmp_path} has the distribution fedcore 1.2.3" in done.stderr
    assert remedy(done.stderr)[1] == ["install", "-e", str(ROOT)]
    (tmp_path / "fedcore-1.2.3.dist-info").rename(tmp_path / "fedcore_moon-1.2.3.dist-info")
    assert import_it().returncode == 0
