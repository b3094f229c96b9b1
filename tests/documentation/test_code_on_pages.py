"""The code of pages that no other test runs: it does what the page says, as it stands there."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

import fedcore
from fedcore.data import Partition
from fedcore_testing import check_partitioner

sys.path.insert(0, str(Path(__file__).parent))
import documented

pytestmark = pytest.mark.slow
RUN = fedcore.run


def code(page: str, first: str, language: str = "python") -> str:
    """Return the block of a page that begins so."""
    text = (documented.ROOT / "docs" / page).read_text(encoding="utf-8")
    (found,) = [block for block in documented.blocks(text, language) if block.startswith(first)]
    return found


@pytest.fixture
def results(tmp_path, monkeypatch):
    """The results of ``fedcore.run`` in the working directory of a test, whose runs are cut short."""
    made = []

    @functools.wraps(RUN)
    def short(*args, **options):
        made.append(RUN(*args, **{**options, "rounds": 1, "local_epochs": 1, "workers": 0}))
        return made[-1]

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(fedcore, "run", short)
    yield made
    for name in ("study", "my_app", "my_app.task"):
        sys.modules.pop(name, None)


def execute(text: str, **names):
    """Run code of a page; return its names. The page itself imports what it is about, seldom NumPy or fedcore."""
    space = {"fedcore": fedcore, "Partition": Partition, "np": np, **names}
    exec(text, space)  # noqa: S102 - our own page
    return space


def images(count, first=0, side=8):
    digits = load_digits()
    return np.resize(digits.images[first : first + count], (count, side, side)), digits.target[first : first + count]


def test_options_and_a_runner_of_a_package(tmp_path):
    package, information = tmp_path / "fedcore_my_hurry", tmp_path / "fedcore_my_hurry-0.1.dist-info"
    package.mkdir()
    information.mkdir()
    (package / "__init__.py").touch()
    (package / "options.py").write_text(code("engines.md", "from typing import Annotated"))
    (package / "runner.py").write_text(
        "from fedcore.client import OneByOne\n\n\nclass Hurry(OneByOne):\n    pass\n\n\n"
        "def offer_hurry(config, dataset):\n    return Hurry() if config.haste > 1 else None\n"
    )
    groups = tomllib.loads(code("engines.md", "[project.entry-points", "toml"))["project"]["entry-points"]
    points = [f"[{group}]\n{name} = {value}\n" for group, named in groups.items() for name, value in named.items()]
    (information / "entry_points.txt").write_text("".join(points))
    (information / "METADATA").write_text("Metadata-Version: 2.4\nName: fedcore-my-hurry\nVersion: 0.1\n")
    test = code("engines.md", "from fedcore_testing import the_same_as_one_by_one")
    calls = f"{test}\n\nif __name__ == '__main__':\n    test_the_runner()\n"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}  # in a new process, as packages are read once
    done = subprocess.run([sys.executable, "-c", calls], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_leafs_files(results):
    for part, names, count in (("train", ["f02", "f01", "f07"], 20), ("test", ["f01", "f02", "f09"], 6)):
        held = {}
        for number, name in enumerate(names):
            x, y = images(count + number, side=28)
            held[name] = {"x": x.reshape(len(x), -1).tolist(), "y": y.tolist()}
        Path(part).mkdir()
        Path(part, "all.json").write_text(json.dumps({"users": names, "user_data": held}))
    execute(code("your-data.md", "def users("), json=json, Path=Path)
    assert results[0].config.clients == 2  # f07 and f09 are in one of the two alone
    assert results[0].metrics["global"]["samples"] == 6 + 7


def test_pfllibs_files(results):
    for part, count in (("train", 10), ("test", 3)):
        Path(part).mkdir()
        for client in range(20):
            x, y = images(count, client)
            np.savez(f"{part}/{client}.npz", data=np.array({"x": x[:, None].astype("float32"), "y": y}, dtype=object))
    execute(code("your-data.md", "def arrays("))
    assert (results[0].config.clients, results[0].metrics["global"]["samples"]) == (20, 60)


def test_a_module_with_augmentation_and_partitioner(results):
    Path("study.py").write_text(
        "import dataclasses\nimport numpy as np\nimport torch\nfrom sklearn.datasets import load_digits\n"
        "from torch.utils.data import TensorDataset\nfrom fedcore.data import as_dataset\n"
        "x, y = (torch.tensor(array) for array in load_digits(return_X_y=True))\n"
        "x = x.float().view(-1, 1, 8, 8) / 16\n"
        "train, test = TensorDataset(x[:200], y[:200]), TensorDataset(x[200:300], y[200:300])\n\n\n"
        + code("your-data.md", "class Flip")
        + "\n\n"
        + code("your-data.md", "def by_brightness")
    )
    import study

    check_partitioner(study.by_brightness)
    plain, flipped = (
        fedcore.run(dataset="module:study.data", partition="module:study.by_brightness", augment=augment, clients=3)
        for augment in (False, True)
    )
    assert plain.records[0]["losses"] != flipped.records[0]["losses"]


def test_a_metric(results):
    metric = execute(code("metrics.md", "import torch"))["Top2"]
    figures = fedcore.run(metrics=[metric], samples=300).metrics["global"]
    assert figures["accuracy"] < figures["Top2"] < 1


def test_numbers_as_labels(results, capsys):
    with pytest.warns(match="the task is regression"):
        execute(code("tasks.md", "import numpy"))
    assert len(capsys.readouterr().out.split()) >= 4  # the rmse and three predictions


def test_a_program_of_flower(results):
    Path("my_app").mkdir()
    Path("my_app", "task.py").write_text(
        "import torch\nfrom torch import nn\nfrom torch.utils.data import TensorDataset\n\n\nclass Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.fc = nn.Linear(64, 10)\n\n"
        "    def forward(self, x):\n        return self.fc(x.flatten(1))\n\n\n"
        "torch.manual_seed(0)\nx, y = torch.rand(300, 1, 8, 8), torch.arange(300) % 10\n"
        "trainset, testset = TensorDataset(x[:200], y[:200]), TensorDataset(x[200:], y[200:])\n"
    )
    execute(code("coming-from.md", "import fedcore"))
    assert type(results[0].network).__name__ == "Net"
