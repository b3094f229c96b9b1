"""Scripts whose objects a saved run names: they are imported without the runs that they start."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fedcore
from fedcore import ConfigError
from fedcore.base import registry
from fedcore_testing import model_bytes

SCRIPT = """
import fedcore
from torch import nn

WIDTH = 8

class Net(nn.Sequential):
    def __init__(self, num_classes):
        super().__init__(nn.Flatten(), nn.Linear(64, WIDTH), nn.Tanh(), nn.Linear(WIDTH, num_classes))

print("executed")
config = fedcore.RunConfig(rounds=1, clients=2, local_epochs=1, samples=100, workers=1, out="run")
fedcore.run(config, model=Net)

class Later(Net):
    pass
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


def test_a_script_without_a_guard_is_evaluated_exported_and_resumed(cli, script, tmp_path, monkeypatch):
    name = script("unguarded", SCRIPT)
    subprocess.run([sys.executable, f"{name}.py"], cwd=tmp_path, check=True)
    straight = model_bytes(tmp_path / "run")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for command in (("evaluate", "run"), ("export", "run", "--to", "safetensors", "--out", "model"), ("resume", "run")):
        done = cli(*command, "--allow-code")
        assert done.exit_code == 0, done.stderr
    assert model_bytes(tmp_path / "run") == straight
    assert not (tmp_path / "runs").exists()
    longer = cli("resume", "run", "--rounds", "2", "--allow-code")
    assert longer.exit_code == 0, longer.stderr


def test_classes_of_one_script_are_the_same_ones(script):
    name = script("unguarded_twice", SCRIPT)
    net, later = (registry.resolve("model", f"module:{name}.{attribute}") for attribute in ("Net", "Later"))
    assert issubclass(later, net)
    assert (net.__module__, sys.modules[name].Net) == (name, net)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Net = print()\n", r"'Net' is not defined without running it"),
        ("def Net(): return WIDTH\n", r"'Net' is not defined without running it"),
        ("", ""),
    ],
)
def test_what_only_the_run_defines_is_told(script, text, says):
    """Computed, or defined otherwise after the run."""
    name = script(f"unguarded_{len(text)}", "import fedcore\nWIDTH = 1\n" + text + "fedcore.run()\nWIDTH = 2\n")
    message = rf'^{name}\.py starts a run when it is imported; put fedcore.run below if __name__ == "__main__":.*{says}'
    with pytest.raises(ConfigError, match=message):
        registry.resolve("model", f"module:{name}.Net")


def test_a_module_that_imports_such_a_script_names_the_script(script):
    script("unguarded_inner", "import fedcore\nfedcore.resume('nothing')\n")
    name = script("outer", "import unguarded_inner\nclass Net(unguarded_inner.Base): pass\n")
    with pytest.raises(ConfigError, match=r"^unguarded_inner\.py starts a run"):
        registry.resolve("model", f"module:{name}.Net")


def test_a_run_may_start_after_an_import(script):
    registry.resolve("model", f"module:{script('guarded', 'def net(): pass')}.net")
    with pytest.raises(fedcore.RunDirectoryError):
        fedcore.resume("nothing")
