"""Notes as a run begins or goes on: figures that it will not have, and a schedule that restarts."""

from __future__ import annotations

import importlib
import linecache
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import fedcore
from fedcore import Loss, Plugin, RunConfig, hookimpl
from fedcore.base import registry
from fedcore.models import build_model
from fedcore.runs import provenance
from fedcore.runs.directory import RunDirectory
from fedcore.runs.provenance import installed_versions
from fedcore_testing import partition_of

OPTIONS = {"clients": 2, "rounds": 2, "local_epochs": 1, "samples": 100, "workers": 0}


class Own(Plugin):
    @hookimpl
    def personal_parameters(self, model):
        return ["classifier.*"]


@pytest.fixture
def notes(tmp_path):
    """Run ``notes(plugin classes, **options)``, or resume it with ``changes``; returns what it noted."""

    def begin(plugins=(), changes=None, **options):
        found = []

        def notify(event, details):
            found.extend(details["notes"] if event == "start" else [])
            found.extend([details["message"]] if event == "note" else [])

        if changes is None:
            fedcore.run(RunConfig(**{**OPTIONS, **options}, out=tmp_path / "run"), plugins=plugins, notify=notify)
        else:
            fedcore.resume(tmp_path / "run", plugins=plugins, changes=changes, notify=notify, allow_code=True)
        return found

    return begin


@pytest.mark.parametrize(
    ("plugins", "options", "said"),
    [
        ([Own], {}, "--client-test-fraction 0.2 measures it on the client's own held-out part, too (personal)"),
        ([Own], {"client_test_fraction": 0.2}, ""),
        ([], {}, ""),
        (
            [],
            {"client_test_fraction": 0.2, "samples": 4, "partition": "iid"},
            "is too small for 4 samples among 2 clients",
        ),
    ],
)
def test_figures_that_need_held_out_parts(notes, plugins, options, said):
    found = [note for note in notes(plugins, **options) if "--client-test-fraction" in note]
    assert [note.endswith(said) for note in found] == [True] * bool(said)


def test_arrays_that_are_not_used(notes, tmp_path):
    rows, labels = np.eye(12).reshape(12, 3, 4), np.arange(12) % 2
    np.savez(tmp_path / "a.npz", x_train=rows, y_train=labels, x_test=2 * rows, y_test=labels, x_val=rows)
    found = notes(dataset=f"npz:{tmp_path / 'a.npz'}", partition="iid", samples=None)
    assert found == [f"{tmp_path / 'a.npz'}: arrays not used: 'x_val'"]


def test_a_cosine_that_restarts(notes):
    """0.02 * (1 + cos(pi / 2)) / 2 = 0.01 in round 2 of 2 and in round 3 of 4."""
    assert not notes(lr_schedule="cosine")
    assert notes(changes={"workers": 0}) == []
    (note,) = notes(changes={"rounds": 4})
    assert note == (
        "the learning rate follows the number of rounds: from 0.01 in round 2 of 2 it goes on with 0.01 in round 3 of "
        "4; a new run of 4 rounds gives other results"
    )
    assert notes(changes={"rounds": 4}) == []


def test_a_method_that_follows_the_number_of_rounds(notes):
    class Fading(Own):
        assumes = ("rounds",)

    notes([Fading])
    said = "plugin 'fading' follows the number of rounds, which was 2: a new run of 4 rounds gives other results"
    assert notes(changes={"rounds": 4}, plugins=[Fading]) == [said]


def test_a_schedule_that_does_not_look_at_the_number_of_rounds(notes):
    notes(lr_schedule="step")
    assert notes(changes={"rounds": 3}) == []


def test_a_run_that_goes_on_with_another_version_of_its_plugin_says_so(notes, monkeypatch):
    def noted(*args, **options):
        return [note for note in notes(*args, **options) if "begun with" in note]

    assert noted(["fedprox", "moon"]) == []
    assert noted(changes={"rounds": 3}) == []
    before = installed_versions()
    later = {**before, "fedcore-fedprox": "9.9", "fedcore-ditto": "9.9"}
    monkeypatch.setattr("fedcore.runs.provenance.installed_versions", lambda: later)
    assert noted(changes={"rounds": 4}) == [
        f"the run was begun with fedcore-fedprox {before['fedcore-fedprox']}, now 9.9: its results may differ from "
        "those of one version"
    ]


def test_a_run_that_goes_on_with_an_edited_package_of_the_same_version_says_so(notes, monkeypatch):
    """A method that is being written is an editable package."""
    assert not [note for note in notes(["fedprox", "moon"]) if "begun with" in note]
    source = provenance._source
    monkeypatch.setattr(provenance, "_source", lambda module: "edited" * (module == "fedcore_moon") or source(module))
    assert notes(changes={"rounds": 3}) == [
        "the run was begun with another source of fedcore-moon: its results may differ from those of one version"
    ]


def test_a_run_that_goes_on_with_another_commit_of_fedcore_says_so(notes, monkeypatch):
    def noted(*args, **options):
        return [note for note in notes(*args, **options) if "begun with" in note]

    monkeypatch.setattr("fedcore.runs.provenance.commit", lambda: "v0.1.0-3-gaaaa")
    monkeypatch.setattr("fedcore.runs.cautions.commit", provenance.commit)
    assert noted() == []
    assert noted(changes={"rounds": 3}) == []
    for now in ("v0.1.0-4-gbbbb", None):
        monkeypatch.setattr("fedcore.runs.cautions.commit", lambda now=now: now)
        assert noted(changes={"rounds": 4}) == [
            f"the run was begun with fedcore's commit v0.1.0-3-gaaaa, now {now or 'none'}: its results may differ from "
            "those of one version"
        ]


@pytest.mark.parametrize(
    ("file", "imported"),
    [
        ("edited_module.py", ""),
        ("edited_package/parts.py", ""),
        ("module_of_study.py", "from layers_of_study import mlp"),
        ("package_of_study/parts.py", "import math, layers_of_study\nmlp = layers_of_study.mlp"),
    ],
)
def test_a_run_that_goes_on_with_other_code_or_instructions_says_so(notes, tmp_path, monkeypatch, file, imported):
    """A module that was edited, one beside it in its package, or one in the same folder that it imports."""
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(imported or "from fedcore.models import mlp\n")
    (tmp_path / "layers_of_study.py").write_text("from fedcore.models import mlp\n")
    (tmp_path / "another_of_study.py").write_text("")
    name = f"module:{file.removesuffix('.py').replace('/', '.')}.mlp"
    monkeypatch.syspath_prepend(tmp_path)
    assert not [note for note in notes(model=name) if "begun with" in note]
    (tmp_path / "another_of_study.py").write_text("# nobody imports it")
    assert notes(changes={"rounds": 3}) == []
    with (tmp_path / ("layers_of_study.py" if imported else file)).open("a") as edited:
        edited.write("# another text\n")
    provenance._known.clear()  # as in another process
    capability = torch.backends.cpu.get_cpu_capability()
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "OTHER")
    (note,) = notes(changes={"rounds": 4})
    assert note == (
        f"the run was begun with instruction set {capability}, now OTHER; another source of {name}: its results may "
        "differ from those of one version"
    )
    first, *_, last = RunDirectory(tmp_path / "run").sessions.read()
    assert first["versions"][name] != last["versions"][name]
    assert last["versions"]["instruction set"] == "OTHER"


def test_code_that_did_not_change_is_read_once(monkeypatch):
    """Each run asks several times: of a package of a megabyte that took a run longer than its training."""
    first = provenance._source("tests")
    monkeypatch.setattr("pathlib.Path.read_bytes", lambda file: pytest.fail(f"reads {file} again"))
    assert provenance._source("tests") == first


def test_the_text_that_a_process_has_imported_counts(tmp_path, monkeypatch):
    """A script that is edited while it trains one run after the other, and a notebook that reloads what was edited."""
    for name, text in (("looping_study", "import looping_layers\n"), ("looping_layers", "width = 1\n")):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("looping_study")
    before = provenance._source("looping_study")
    (tmp_path / "looping_layers.py").write_text("width = 1000\n")
    assert provenance._source("looping_study") == before
    importlib.reload(sys.modules["looping_layers"])
    after = provenance._source("looping_study")
    assert after != before
    provenance._known.clear()
    assert provenance._source("looping_study") == after


def test_a_run_that_goes_on_with_another_text_of_a_notebooks_class_says_so(notes, tmp_path, monkeypatch):
    def cell(weight):
        text = "class Near(Plugin):\n    @hookimpl\n    def local_loss(self, step):\n"
        text += f"        return Loss(step.logits.square().mean(), weight={weight})\n"
        file, names = f"<cell {weight}>", {"Plugin": Plugin, "hookimpl": hookimpl, "Loss": Loss, "__name__": "__main__"}
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # as IPython does
        exec(compile(text, file, "exec"), names)  # noqa: S102
        return names["Near"]

    monkeypatch.setattr("fedcore.base.registry.main_module", lambda main: None)
    with registry.lent({("plugin", "object:Other"): cell(2)}):  # as the next method of a sweep
        assert notes([cell(0.1)]) == []
    assert notes([cell(0.1)], changes={"rounds": 3}) == []
    assert notes([cell(0.5)], changes={"rounds": 4}) == [
        "the run was begun with another source of Near: its results may differ from those of one version"
    ]
    recorded = RunDirectory(tmp_path / "run").sessions.read()[0]["versions"]
    assert [name for name in recorded if name.startswith("source of")] == ["source of Near"]


def by_options(labels, num_clients, **options):
    assert options["alpha"] == 0.1
    return np.array_split(np.arange(len(labels)), num_clients)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"alpha": 0.1, "partition": "iid"}, ["--alpha 0.1 has no effect with --partition iid"]),
        ({"alpha": 0.1, "partition": f"module:{__name__}.by_options"}, []),
        ({"alpha": 0.1}, []),
        ({"classes_per_client": 3}, ["--classes-per-client 3 has no effect with --partition dirichlet"]),
        ({"classes_per_client": 3, "partition": "shards"}, []),
        ({"optimizer": "adam", "momentum": 0.5}, ["--momentum 0.5 has no effect with --optimizer adam"]),
        ({"beta1": 0.5}, ["--beta1 0.5 has no effect with --optimizer sgd"]),
        ({"lr_step_factor": 0.5}, ["--lr-step-factor 0.5 has no effect with --lr-schedule constant"]),
        ({"lr_step_factor": 0.5, "lr_schedule": "step"}, []),
        ({"buffers": "local"}, ["--buffers local has no effect with --model mlp, which has no buffers"]),
    ],
)
def test_options_of_another_choice_are_noted(notes, options, said):
    assert [note for note in notes(**options) if "has no effect" in note] == said


HEAD, BOTH = "fresh classifier", "fresh projection head and classifier"
TAKES = "; --projection takes the file's projection head"


class Projects(Plugin):
    @hookimpl
    def configure_model(self, model, task):
        task.ensure_projection(model)


class Wraps(Plugin):
    @hookimpl
    def configure_model(self, model):
        model.classifier = torch.nn.Sequential(torch.nn.LayerNorm(model.feature_dim), model.classifier)


@pytest.mark.parametrize(
    ("classes", "projected", "plugins", "options", "said"),
    [
        (10, False, [], {}, None),
        (10, False, [Wraps], {}, None),
        (10, True, [], {"projection": True}, None),
        (10, True, [Projects], {"projection": True}, None),
        (10, True, [], {}, f"leaves out the file's projection head and classifier and starts with a {HEAD}{TAKES}"),
        (
            10,
            True,
            [Projects],
            {},
            f"leaves out the file's projection head and classifier and starts with a {BOTH}{TAKES}",
        ),
        (10, False, [], {"projection": True}, f"leaves out the file's classifier and starts with a {BOTH}"),
        (10, False, [Projects], {}, f"leaves out the file's classifier and starts with a {BOTH}"),
        (4, False, [], {}, f"leaves out the file's classifier and starts with a {HEAD}"),
    ],
)
def test_a_head_that_is_not_the_one_in_the_file_is_noted(notes, tmp_path, classes, projected, plugins, options, said):
    model, _ = build_model("mlp", num_classes=classes, input_shape=(1, 8, 8), seed=5, projection=projected)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    found = [note for note in notes(plugins, weights=str(tmp_path / "w.safetensors"), **options) if "--weights" in note]
    assert found == [f"--weights: the run {said}"] * (said is not None)


class Normed(torch.nn.Module):
    def __init__(self, norm=torch.nn.BatchNorm2d):
        super().__init__()
        self.conv, self.norm, self.head = torch.nn.Conv2d(1, 4, 3), norm(4), torch.nn.Linear(4, 10)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).mean(dim=(2, 3)))


class Grouped(Normed):
    def __init__(self):
        super().__init__(lambda width: torch.nn.GroupNorm(2, width))


class Renames(Plugin):
    """Puts a loaded layer into one of its own."""

    @hookimpl
    def configure_model(self, model):
        model.encoder.base.conv = torch.nn.Sequential(model.encoder.base.conv)


@pytest.mark.parametrize(
    ("model", "plugins", "said"),
    [
        (
            "Grouped",
            [],
            ["3 of the file's tensors, 'norm.num_batches_tracked', 'norm.running_mean', 'norm.running_var'"],
        ),
        ("Normed", [], []),
        ("Normed", [Renames], []),
    ],
)
def test_tensors_of_the_file_without_a_place_are_noted(notes, tmp_path, model, plugins, said):
    network = Normed()
    network.norm.running_mean += 0.5
    save_file(network.state_dict(), tmp_path / "w.safetensors")
    found = notes(plugins, model=f"module:{__name__}.{model}", weights=str(tmp_path / "w.safetensors"), rounds=1)
    assert [note for note in found if "place" in note] == [
        f"--weights: the model has no place for {text}" for text in said
    ]


def test_without_a_display_each_note_of_the_start_is_one_warning(tmp_path):
    options = {**OPTIONS, "clients": 300, "samples": None, "optimizer": "adam", "momentum": 0.5, "rounds": 1}
    with pytest.warns() as caught:
        notes = partition_of(fedcore.run(**options, out=tmp_path / "run", progress=False)).info["notes"]
    assert len(notes) > 0
    caution = "--momentum 0.5 has no effect with --optimizer adam"
    assert [str(warning.message) for warning in caught] == [*notes, caution]


def test_options_of_a_programs_partitioner_are_not_noted_where_the_run_goes_on(tmp_path):
    def halves(labels, num_clients, *, alpha, **_):
        return np.array_split(np.arange(len(labels)), num_clients)

    told = []
    options = {**OPTIONS, "alpha": 0.1, "workers": 0}
    run = fedcore.run(**options, partition=halves, out=tmp_path / "run", progress=False)
    fedcore.resume(run.directory, changes={"rounds": 3}, notify=lambda event, d: told.extend(d.get("notes", ())))
    assert not told
