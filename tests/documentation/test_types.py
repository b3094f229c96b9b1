"""What a user writes is correct for plain mypy and for pyright: no plugin of pydantic's, no settings of ours."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedcore.cli.app import app
from fedcore_testing.scaffold import KINDS

sys.path.insert(0, str(Path(__file__).parent))
import documented

ROOT = Path(__file__).parents[2]
# sklearn, which an example imports, has no types.
MYPY = (
    "mypy",
    "--config-file=",
    "--cache-dir",
    str(ROOT / ".mypy_cache" / "plain"),
    "--disable-error-code=import-untyped",
)
PYRIGHT = ("pyright", "--pythonpath", sys.executable)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """A folder with the Python of the README and of studies, the examples, and a new package of each kind."""
    folder = tmp_path_factory.mktemp("programs")
    for page in (ROOT / "README.md", ROOT / "docs" / "sweeps.md"):
        for number, block in enumerate(documented.blocks(page.read_text(encoding="utf-8"), "python")):
            (folder / f"{page.stem.lower()}_{number}.py").write_text(block, encoding="utf-8")
    for script in (ROOT / "examples").glob("*.py"):
        shutil.copy(script, folder)
    for kind in KINDS:
        new = ["plugins", "new", f"my-{kind}", "--kind", kind, "--into", str(folder)]
        assert CliRunner().invoke(app, new).exit_code == 0
        shutil.rmtree(folder / f"fedcore-my-{kind}" / "tests")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("checker", [MYPY, PYRIGHT], ids=lambda checker: checker[0])
def test_a_users_programs_are_correct(programs, checker):
    done = subprocess.run(
        [sys.executable, "-m", *checker, str(programs)], cwd=programs, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_option_that_may_be_left_out_is_known_as_such():
    """For ``Field(3)`` type checkers take an option as required; they know ``Field(default=3)`` only."""
    folders = [ROOT / folder for folder in ("fedcore", "plugins", "examples", "docs")]
    texts = [path for folder in folders for kind in ("py", "tmpl", "md", "ipynb") for path in folder.rglob(f"*.{kind}")]
    positional = [
        f"{path.relative_to(ROOT)}: {found[0]}"
        for path in [ROOT / "README.md", *texts]
        for found in re.finditer(r"(?<!\w)Field\(\s*(?!\w+=)[^\s)].*", path.read_text(encoding="utf-8"))
    ]
    assert not positional
