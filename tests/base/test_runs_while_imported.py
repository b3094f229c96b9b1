"""Scripts whose objects a saved run names: they are imported without the runs that they start."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fedcore
from fedcore.base import registry
from fedcore_testing import model_bytes

SCRIPT = """
import fedcore
from torch import nn

WIDTH = 8

class Net(nn.Sequential):
    def __init__(self, num_classes):
        super().__init__(nn.Flatten(), nn.Linear(64, WIDTH), nn.Tanh(), nn.Linear(WIDTH, num_classes))

config = fedcore.RunConfig(rounds=1, clients=2, local_epochs=1, samples=100, workers=1, out="run")
fedcore.run(config, model=Net)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Write a script that can be imported in this process; returns its name, which no other test uses."""
    monkeypatch.syspath_prepend(tmp_path)
    written = []

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        written.append(name)
        return name

    yield write
    for name in written:
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_a_run_of_a_script_without_a_guard_is_not_started_again(cli, script, tmp_path, monkeypatch):
    name = script("unguarded", SCRIPT)
    subprocess.run([sys.executable, f"{name}.py"], cwd=tmp_path, check=True)
    straight = model_bytes(tmp_path / "run")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    refused = cli("evaluate", "run", "--allow-code")
    assert refused.exit_code == 2
    assert 'unguarded.py starts a run when it is imported; put fedcore.run below if __name__ == "__main__":' in (
        refused.stderr.replace("\n", " ")
    )
    assert not (tmp_path / "runs").exists()
    assert model_bytes(tmp_path / "run") == straight
    (tmp_path / f"{name}.py").write_text(
        SCRIPT.replace("\nfedcore.run", '\nif __name__ == "__main__":\n    fedcore.run')
    )
    for command in (("evaluate", "run"), ("export", "run", "--to", "safetensors", "--out", "model"), ("resume", "run")):
        done = cli(*command, "--allow-code")
        assert done.exit_code == 0, done.stderr
    assert model_bytes(tmp_path / "run") == straight


def test_a_run_may_start_after_an_import(script):
    registry.resolve("model", f"module:{script('guarded', 'def net(): pass')}.net")
    with pytest.raises(fedcore.RunDirectoryError):
        fedcore.resume("nothing")
