"""Every command of the README, the documentation and the cards: it is one, its options fit, and it runs.

Files that commands read are stood in for by small ones of the same layout; runs are cut to one round, benches to one
block. A paper's table is planned and not run: what runs it has tests of its own.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer import Context
from typer.main import get_command
from typer.testing import CliRunner

from fedcore.base import registry
from fedcore.base.safe_yaml import parse_setting
from fedcore.cli.app import app
from fedcore.client.setup import Setup
from fedcore.hooks.plugin import parse_options
from fedcore.runs import resolve as prepare
from tests.support import in_one_test

sys.path.insert(0, str(Path(__file__).parent))
import documented

ALL = [command for path in documented.documents() for command in documented.commands(path)]
TRAIN = [command for command in ALL if command.words[0] == "train"]
SWEEPS = [command for command in ALL if command.words[0] == "sweep" and len(command.words) > 1]
SHORT = ["--rounds", "1", "--local-epochs", "2", "--clients", "4", "--batch-size", "32", "--workers", "0", "--quiet"]
SETTINGS = sorted({setting for path in documented.documents() for setting in documented.settings(path)})
NAMED = [["data", "split"], ["federate"], ["plugins", "check"], ["plugins", "new"], ["results", "add"]]
"""Named in a sentence, without what they need."""


def ids(command: documented.Shown) -> str:
    return f"{Path(command.document).parent.name or '.'}/{Path(command.document).stem}: {' '.join(command.words)[:60]}"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with what commands read: data sets of 12 samples a class in the real ones' layouts, own files."""
    folder = tmp_path_factory.mktemp("files")
    for name, directory, classes, first, parts in (
        ("mnist", "MNIST", 10, 0, ("train", "t10k")),
        ("fashion-mnist", "FashionMNIST", 10, 0, ("train", "t10k")),
        ("emnist", "EMNIST", 26, 1, ("emnist-letters-train", "emnist-letters-test")),
    ):
        for part in parts:
            images, labels = drawn(name, classes, (28, 28))
            write_idx(folder / "data" / directory / "raw" / f"{part}-images-idx3-ubyte", images)
            write_idx(folder / "data" / directory / "raw" / f"{part}-labels-idx1-ubyte", labels + first)
    for name, classes in (("cifar10", 10), ("cifar100", 100)):
        images, labels = drawn(name, classes, (32, 32, 3))
        np.savez(folder / "data" / f"{name}.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    write_graphs(folder / "data" / "MUTAG" / "raw", 40)
    shutil.copy(folder / "data" / "cifar10.npz", folder / "my-data.npz")
    rows = (f"{n % 40},{'FM'[n % 2]},{n % 3 % 2},{'ABCD'[n % 4]}" for n in range(120))
    (folder / "patients.csv").write_text("\n".join(["age,sex,death,site", *rows, ""]))
    sweeps = (documented.ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
    (folder / "study.yaml").write_text(documented.blocks(sweeps, "yaml")[0].replace("[0.01, 0.1]", "[0.01]"))
    (folder / "grid.yaml").write_text("grid: {plugin: [fedavg, fedprox]}\nseeds: 1\n")
    images, labels = drawn("own", 3, (16, 16, 3))
    for part in ("train", "test"):
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            path = folder / "my-images" / part / f"class-{label}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
    (folder / "PACS").symlink_to("my-images")  # folders of classes in folders of domains
    return folder


def drawn(name, classes, shape):
    stream = np.random.default_rng(len(name))
    labels = np.arange(12 * classes) % classes
    return stream.integers(0, 256, (len(labels), *shape), dtype=np.uint8), labels.astype(np.uint8)


def write_idx(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes())


def write_graphs(raw, count):
    """Write paths of three nodes of 7 kinds, in two classes, as the files of MUTAG."""
    raw.mkdir(parents=True)
    first = range(1, 3 * count, 3)
    edges = [f"{a}, {b}" for n in first for a, b in ((n, n + 1), (n + 1, n), (n + 1, n + 2), (n + 2, n + 1))]
    nodes = range(3 * count)
    content = {
        "A": edges,
        "graph_indicator": [n // 3 + 1 for n in nodes],
        "graph_labels": [n % 2 for n in range(count)],
        "node_labels": [n % 7 for n in nodes],
    }
    for name, lines in content.items():
        (raw / f"MUTAG_{name}.txt").write_text("\n".join(map(str, lines)) + "\n")


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    """A place where the first tutorial's package is installed; one for all, as installed packages are read once."""
    spec = tmp_path_factory.mktemp("site")
    shutil.copy(documented.ROOT / "examples" / "first_method" / "fedcore_my_method.py", spec)
    information = spec / "fedcore_my_method-0.1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: fedcore-my-method\nVersion: 0.1.0\nSummary: MyMethod\n"
        "License-Expression: Apache-2.0\nRequires-Dist: fedcore-fl>=0.1,<0.2\n"
    )
    (information / "entry_points.txt").write_text("[fedcore.plugins]\nmy-method = fedcore_my_method:MyMethod\n")
    return spec


@pytest.fixture
def folder(files, spec, tmp_path, monkeypatch):
    """A working directory with the files, in which the first tutorial's package counts as installed."""
    for path in ("my-data.npz", "my-images", "patients.csv", "PACS", "grid.yaml", "study.yaml", "data"):
        (tmp_path / path).symlink_to(files / path)
    monkeypatch.syspath_prepend(spec)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDCORE_DATA", "data")
    monkeypatch.setenv("COLUMNS", "200")
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("fedcore_my_method")]:
        del sys.modules[name]


def run(words):
    return CliRunner().invoke(app, list(words), catch_exceptions=False)


def told(result):
    return " ".join(result.output.split())


@pytest.fixture(scope="module")
def commands():
    return get_command(app)


@in_one_test(command=ALL)
def test_the_command_exists_and_takes_these_options(command, commands):
    here, rest = commands, list(command.words)
    context = Context(here)
    while hasattr(here, "get_command") and (rest or list(command.words) not in NAMED):
        assert rest, f"{command.line}: which command?"
        found = here.get_command(context, rest[0])
        assert found is not None, f"{command.line}: there is no {rest.pop(0)!r}"
        here, context = found, Context(found, parent=context, info_name=rest[0])
        rest.pop(0)
    if rest:  # else it is only named
        here.make_context(here.name, rest)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("command", TRAIN, ids=ids)
def test_the_options_of_a_run_fit_together(command, folder, monkeypatch):
    """All the way to plugins, data and model; the run itself is left out."""
    if "own.yaml" in command.words:
        pytest.skip("own.yaml is what an earlier command wrote")
    built = []

    def stop_here(config, **_):
        config, dataset = prepare.resolve_config(config)
        built.append(Setup.build(config, dataset))
        raise SystemExit

    monkeypatch.setattr("fedcore.runs.api.run", stop_here)
    result = run([*fitting(command.words), *(["--data-dir", "data"] if "--data-dir" in command.words else [])])
    if command.output:
        assert (result.exit_code, told(result)) == (2, " ".join(command.output.split()))
    else:
        assert built, told(result)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("command", SWEEPS, ids=ids)
def test_the_axes_of_a_sweep_are_ones(command, folder):
    if not Path(command.words[1]).exists() and not command.words[1].startswith("-"):
        pytest.skip(f"{command.words[1]} is what an earlier command wrote")
    result = run([*fitting(command.words), "--dry-run"])
    assert result.exit_code == 0, told(result)
    assert "none started" in told(result)


@in_one_test(setting=SETTINGS)
def test_the_option_of_a_setting_takes_its_value(setting, folder):
    """Of those in a sentence or a table, too."""
    name, option, value = parse_setting(setting)
    kind = next(kind for kind in ("plugin", "tracker", "engine") if name in registry.available(kind))
    options = parse_options(name, registry.resolve(kind, name), {option: value}, kind=kind)
    assert len(options.model_fields_set) == 1


@pytest.mark.slow
@pytest.mark.parametrize("path", documented.documents(), ids=lambda path: path.relative_to(documented.ROOT).as_posix())
def test_the_commands_of_a_document_run_one_after_the_other(path, folder):
    shown = documented.commands(path)
    if not shown:
        pytest.skip("shows no command that runs")
    for command in shown:
        words = shortened(command.words, folder)
        if words is None:
            continue
        result = run(words)
        if command.output:
            assert (result.exit_code, told(result)) == (2, " ".join(command.output.split()))
        else:
            assert result.exit_code == 0, f"fedcore {' '.join(words)}\n{told(result)}"


def shortened(words, folder):
    """Return a command as it can run here; None where it is only named, or needs a GPU or a cluster."""
    if (len(words) == 1 and words[0] != "reproduce") or list(words) in NAMED:
        return None
    if any(word.startswith("ray.address=") for word in words) or words[0] == "federate":
        return None  # needs other machines; plugins/fedcore-ray/tests and fedcore-flower/tests have some
    words = fitting(words)
    if importlib.util.find_spec("flwr_datasets") is None:  # it needs an environment of its own
        words = ["iid" if word.startswith("flwr:") else word for word in words]
    words = [re.sub(r"^(runs/[^/]+|RUN_DIR)", lambda _: str(newest_run(folder)), word) for word in words]
    words = [re.sub(r"=https?://.*", "=sqlite:///tracked.db", word) for word in words]
    if words[:2] == ["plugins", "new"] and words[2] == "my-method":
        return [*words[:2], f"{words[2]}-by-hand"]  # this one is already installed
    if words[-1] == "NAME":
        words[-1] = "my-other" if words[1] == "new" else "fedproto"
    data = ["--data-dir", "data"] if "--data-dir" in words else []
    if words[0] == "train":
        more = [
            *(["--workers", "2"] if "ray" in words else []),
            *(["--warmup-rounds", "0"] if "--warmup-rounds" in words else []),
        ]
        return [*words, *data, *SHORT, *more]
    if words[0] == "sweep":
        if "slurm" in words:
            return None  # needs a cluster; plugins/fedcore-study/tests has submitit's local executor
        return [*words, "--seeds", "1", *SHORT, *(["--optuna", "1"] if "--optuna" in words else [])]
    if words[0] == "export" and "transformers" in words:
        return None  # needs a network of transformers; plugins/fedcore-huggingface/tests has some
    if words[:2] == ["data", "split"]:
        return [*words, *data, "--clients", "4"]
    if words[0] == "bench":
        if "cuda" in words and not torch.cuda.is_available():
            return None
        few = {"W3": ["--plugin", "fedprox"], "scale": ["--plugin", "fedavg", "--clients", "100"]}
        return [*words, *few.get(words[-1], []), *few.get(words[2], []), "--blocks", "1", "--rounds", "1"]
    if words[0] == "reproduce":
        return [*words, *data, *(["--dry-run"] if {"--table", "--figure"} & {*words} else [])]
    if words[:2] in (["runs", "rm"], ["runs", "clean"]):
        return [*words, *(["--yes"] if "--dry-run" not in words else [])]
    if words[:2] == ["results", "page"]:
        return None  # needs evidence of the paper's runs; test_results.py has the page
    if words[0] == "results":
        return [there(word, folder) for word in words]
    if words[0] in ("report", "compare"):
        if "--protocol" in words:
            return None  # needs runs with samples held out; plugins/fedcore-report/tests has some
        return [*dict.fromkeys(there(word, folder) for word in words), *data]
    return words


def fitting(words):
    """Return a command without what the small files and the four clients cannot do."""
    pairs = enumerate(zip(words, [*words[1:], ""], strict=True))
    many = ("--samples", "concurrency=", "power-of-choice.candidates=")
    too_much = {n for n, (word, value) in pairs if word == many[0] or value.startswith(many[1:])}
    return [word for n, word in enumerate(words) if not {n, n - 1} & too_much]


def there(word, folder):
    """Return a folder of runs that a command is asked for, or a run instead where no command made it."""
    made = not word.startswith(("sweeps/", "reproduce/")) or Path(word).exists()
    return word if made else str(newest_run(folder))


def newest_run(folder):
    runs = sorted((folder / "runs").glob("*"), key=lambda path: path.stat().st_mtime)
    if not runs:  # the document names a run that the reader has: any will do
        assert run(["train", *SHORT]).exit_code == 0
        return newest_run(folder)
    return runs[-1]


def test_commands_are_found_wherever_they_stand():
    """The tests above would pass over commands that nobody finds."""
    assert len(ALL) > 80
    assert {command.document for command in ALL} >= {"README.md", "docs/quickstart.md", "docs/results.md"}
    assert all("$" not in " ".join(command.words) for command in ALL)
    assert sum(bool(command.output) for command in ALL) >= 3
    assert "fedproc.two_stage=true" in SETTINGS  # stands in a sentence only
