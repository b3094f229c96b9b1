"""Recipes: what they must say, what is refused, where they are found, and that the installed ones hold together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fedcore import ConfigError, DataError, UnknownNameError
from fedcore.tools import digest, registry
from fedcore_reproduce import run as reproducing
from fedcore_reproduce.find import find_recipe, find_recipes, recipe_files
from fedcore_reproduce.recipe import SCALES, read_recipe
from fedcore_study.sweeps.run import resolved
from tests.sentences import raises

# Every main table of the five papers: rows, columns, and cells of which the paper's text gives a figure.
TABLES = {
    ("fdcl", 1): (8, 9, 72),
    ("fdcl", 2): (6, 5, 30),
    ("fdcl", 3): (1, 7, 7),
    ("fdcl", 4): (4, 3, 12),
    ("fdcl", 5): (4, 2, 8),
    ("fedcd", 1): (12, 9, 108),
    ("fedcd", 3): (8, 4, 32),
    ("fedcd", 4): (7, 2, 0),
    ("fedcme", 2): (8, 16, 128),
    ("fedcme", 3): (8, 8, 64),
    ("fedcme", 4): (9, 2, 18),
    ("fedeccr", 1): (5, 3, 15),
    ("fedeccr", 2): (5, 3, 15),
    ("fedeccr", 3): (4, 2, 8),
    ("fedeccr", 4): (7, 3, 21),
    ("fedproc", 2): (8, 3, 24),
    ("fedproc", 3): (6, 3, 18),
    ("fedproc", 4): (3, 3, 9),
    ("fedproc", 6): (5, 4, 20),
}

SMALL = {
    "method": "fedprox",
    "table": 7,
    "numeral": "VII",
    "title": "two alphas",
    "source": "Somebody, 2026",
    "base": {"clients": 2, "rounds": 9, "local_epochs": 1, "batch_size": 256},
    "columns": [
        {"name": "a", "options": {"alpha": 0.1}},
        {"name": "b", "options": {"alpha": 5, "fedprox.mu": 0.5}},
        {"name": "c", "not_run": "there is no such data set"},
    ],
    "rows": [
        {"name": "FedAvg", "plugins": "fedavg", "paper": [66.3, "70.1 ± 0.4", None]},
        {"name": "FedProx", "plugins": {"fedprox": {"mu": 0.1}}, "paper": ["?", 71, 3]},
        {"name": "Lost", "plugins": "fedavg", "paper": [1, 2, 3], "not_run": {"b": "the text is torn"}},
    ],
    "quick": {"says": "1 round in place of 9.", "options": {"rounds": 1}, "columns": {"b": {"lr": 0.2}}},
}


@pytest.fixture
def write(tmp_path: Path):
    """Write ``write(**changes)`` of a small recipe; a value of None takes the key out. Returns the file."""

    def file(**changes) -> Path:
        path = tmp_path / "table.yaml"
        values = {name: value for name, value in {**SMALL, **changes}.items() if value is not None}
        path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
        return path

    return file


@pytest.fixture(scope="module")
def installed():
    broken = []
    found = find_recipes(broken.append)
    assert not broken
    return {(recipe.method, recipe.table): recipe for recipe in found if recipe.kind == "table"}


CURVE = {"name": "theirs", "column": "a", "source": "a log", "round": [1, 2], "accuracy": [40, 60]}


class TestInstalled:
    def test_every_main_table_has_its_recipe_whole(self, installed):
        sizes = {}
        for table in TABLES.keys() & installed.keys():
            recipe = installed[table]
            figures = [figure for row in recipe.rows for figure in row.paper]
            sizes[table] = (len(recipe.rows), len(recipe.columns), sum(f.mean is not None for f in figures))
            assert all(figure.text == "unreadable" for figure in figures if figure.mean is None)
        assert sizes == TABLES

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{table[0]}-{table[1]}")
    @pytest.mark.parametrize("scale", SCALES)
    def test_every_cell_is_a_run_or_has_a_reason(self, installed, table, scale):
        recipe = installed[table]
        spec = recipe.spec(scale)
        cells = list(recipe.cells(scale))
        assert len(cells) == len(recipe.rows) * len(recipe.columns)
        found = {}
        for cell in cells:
            assert (cell.choice is None) == bool(cell.reason)
            if cell.choice is not None:
                config = resolved(spec.run(cell.choice, 0))  # refuses options that a plugin does not have
                other = found.setdefault(digest(config), cell)
                assert other is cell, f"{cell.row}, {cell.column} is the same run as {other.row}, {other.column}"
        assert found

    def test_the_papers_scale_leaves_out_only_what_fedcore_lacks(self, installed):
        reasons = {cell.reason for recipe in installed.values() for cell in recipe.cells("paper")}
        assert {reason for reason in reasons if "not installed" not in reason} == {
            "",
            "fedcore has no loader for Tiny-ImageNet",
        }

    def test_quick_is_smaller_in_every_cell_and_says_how(self, installed):
        for recipe in installed.values():
            whole, quick = recipe.spec("paper"), recipe.spec("quick")
            assert len(quick.seeds) < len(whole.seeds)
            by_place = {(c.row, c.column): c for c in recipe.cells("paper")}
            for cell in recipe.cells("quick"):
                if cell.choice is None:
                    continue
                large = whole.run(by_place[cell.row, cell.column].choice, 0)
                small = quick.run(cell.choice, 0)
                assert small.rounds < large.rounds
                assert small.local_epochs < large.local_epochs
                if small.samples:
                    assert f"{small.samples:,}" in recipe.quick.says, recipe.file
                if small.lr != large.lr:
                    assert f"learning rate {small.lr:g}" in recipe.quick.says, recipe.file

    def test_moon_has_its_authors_mu_wherever_50_or_100_clients_train_on_cifar_100(self, installed):
        for table in ("fedproc", 6), ("fedcd", 3):
            recipe = installed[table]
            found = [recipe.spec("paper").run(c.choice, 0) for c in recipe.cells("paper") if c.row == "MOON"]
            assert len(found) == 4
            assert all(run.plugins == {"moon": {"mu": 10}} for run in found), table

    def test_two_known_figures_stand_where_the_papers_have_them(self, installed):
        def figure(method, table, row, column):
            (cell,) = [c for c in installed[method, table].cells("paper") if (c.row, c.column) == (row, column)]
            return cell.paper.mean, cell.paper.std

        assert figure("fedcme", 2, "FedCME(0.01)", "FMNIST, alpha 0.5, K 80, M 30") == (89.84, 0.03)
        assert figure("fedcd", 1, "SCAFFOLD", "EMNIST, beta 0.5") == (90.44, 1.2)
        assert figure("fdcl", 1, "FDCL", "MUTAG, alpha 1") == (84.21, None)

    def test_finding_them_imports_no_torch_and_no_plugin(self):
        code = (
            "import sys; from fedcore_reproduce.find import find_recipes; assert find_recipes(print);"
            "print([name for name in ('torch', 'fedcore_fedcd') if name in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout.strip() == "[]"


class TestRecipe:
    def test_cells_column_by_column_with_layers_of_options(self, write):
        recipe = read_recipe(write())
        paper, quick = ({(c.row, c.column): c for c in recipe.cells(scale)} for scale in ("paper", "quick"))
        assert [c.column for c in recipe.cells("paper")] == ["a"] * 3 + ["b"] * 3 + ["c"] * 3
        run = recipe.spec("paper").run(paper["FedProx", "b"].choice, 4)
        assert (run.alpha, run.rounds, run.lr, run.seed) == (5, 9, 0.02, 4)
        assert run.plugins == {"fedprox": {"mu": 0.5}}  # the column's, for rows that have the plugin
        assert recipe.spec("paper").run(paper["FedAvg", "b"].choice, 0).plugins == {"fedavg": {}}
        small = recipe.spec("quick").run(quick["FedProx", "b"].choice, 0)
        assert (small.rounds, small.lr) == (1, 0.2)
        assert paper["Lost", "b"].reason == "the text is torn"
        assert {paper[row, "c"].reason for row in ("FedAvg", "FedProx", "Lost")} == {"there is no such data set"}

    def test_figures_as_printed(self, write):
        figures = [(f.text, f.mean, f.std) for row in read_recipe(write()).rows[:2] for f in row.paper]
        assert figures == [
            ("66.3", 66.3, None),
            ("70.1 ± 0.4", 70.1, 0.4),
            ("-", None, None),
            ("unreadable", None, None),
            ("71", 71, None),
            ("3", 3, None),
        ]

    def test_what_quick_leaves_out_is_run_at_the_papers_scale(self, write):
        quick = {**SMALL["quick"], "leaves_out": {"b": "too long", "FedAvg": "dull"}}
        recipe = read_recipe(write(quick=quick))
        left_out = {(c.row, c.column): c.reason for c in recipe.cells("quick")}
        assert left_out["FedAvg", "a"] == "dull"
        assert left_out["FedProx", "b"] == "too long"
        assert left_out["FedProx", "a"] == ""
        assert sum(c.choice is not None for c in recipe.cells("paper")) == 5

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"tabel": 1}, ("'tabel'", "'table'")),
            ({"file": "x"}, ("'file'",)),
            ({"title": None}, ("title:",)),
            ({"table": 0}, ("table:", 1)),
            ({"base": {"rouns": 1}}, ("option", "'rouns'", "'rounds'")),
            ({"base": {"dataset": "digist"}}, ("dataset", "'digist'", "'digits'")),
            ({"base": {"model": "mpl"}}, ("model", "'mpl'", "'mlp'")),
            ({"columns": [{"name": "a", "options": {"dataset": []}}, *SMALL["columns"][1:]]}, ("dataset",)),
            ({"base": {"clients": 0}}, ("quick, row 'FedAvg', column 'a'", "alpha=0.1")),
            ({"protocols": {"ours": ["globl"]}}, ("'globl'", "'global'")),
            ({"protocols": {"ours": []}}, ("'ours'",)),
            ({"columns": [{"name": "a", "options": {"alhpa": 1}}]}, ("3 figures", "1 columns")),
            ({"columns": [{"name": "a", "opts": {}}, *SMALL["columns"][1:]]}, ("columns.0.opts",)),
            ({"columns": [{"name": "a", "options": {"alhpa": 1}}, *SMALL["columns"][1:]]}, ("'alhpa'", "'alpha'")),
            ({"columns": [{"name": "a", "options": {"moon.mu": 1}}, *SMALL["columns"][1:]]}, ("'moon.mu'",)),
            ({"columns": [{"name": "b"}, *SMALL["columns"][1:]]}, ("'b'", 2)),
            ({"rows": [{"name": "x", "plugins": "fedporx", "paper": [1, 2, 3]}]}, ("'fedprox'",)),
            ({"rows": [{"name": "x", "plugins": "fedprox", "paper": [1, 2]}]}, ("2 figures", "3 columns")),
            ({"rows": [{"name": "x", "plugins": "fedprox", "paper": [1, 2, "66 %"]}]}, ("rows.0.paper.2", "null")),
            ({"rows": [{"name": "x", "plugins": "fedprox", "paper": [1, 2, 166]}]}, (100, 166)),
            (
                {"rows": [{"name": "x", "plugins": "fedprox", "paper": [1, 2, 3], "not_run": {"d": "no"}}]},
                ("not_run", "'x' 'd'"),
            ),
            ({"curves": [{**CURVE, "column": "d"}]}, ("column in curves", "'d'")),
            ({"curves": [{**CURVE, "accuracy": [1]}]}, ("'theirs'", "2 rounds", 1)),
            ({"quick": {"options": {"rounds": 1}}}, ("quick.says",)),
            ({"quick": {"says": "x", "columns": {"d": {}}}}, ("column in quick", "'d'")),
            ({"quick": {"says": "x", "leaves_out": {"Fedprox": "y"}}}, ("'FedProx'",)),
            ({"quick": {"says": "x", "options": {"data_dir": "/d"}}}, ("data_dir",)),
        ],
    )
    def test_what_cannot_work_is_refused_with_the_files_name(self, write, changes, named):
        file = write(**changes)
        with raises(ConfigError, file, *named):
            read_recipe(file)

    def test_an_option_that_a_plugin_does_not_have(self, write):
        rows = [{"name": "x", "plugins": {"fedprox": {"mue": 1}}, "paper": [1, 2, 3]}]
        columns = [{"name": name} for name in "abc"]
        recipe = read_recipe(write(rows=rows, columns=columns, quick={"says": "nothing"}))
        with raises(ConfigError, "table.yaml", "'x'", "'a'"):
            reproducing.plan(recipe, "paper")

    def test_what_another_package_provides_is_not_run_without_it(self, write):
        rows = [
            {"name": "theirs", "plugins": "not-here", "paper": [1, 2, 3]},
            {"name": "ours", "plugins": "fedprox", "paper": [1, 2, 3]},
        ]
        recipe = read_recipe(write(rows=rows, packages={"not-here": "their-package"}))
        cells = {(cell.row, cell.column): cell for cell in recipe.cells("paper")}
        assert "in the package their-package, which is not installed here" in cells["theirs", "a"].reason
        assert cells["ours", "a"].choice is not None

    def test_a_model_and_data_set_of_another_library_are_known_by_their_prefix(self, write, monkeypatch):
        file = write(base={**SMALL["base"], "dataset": "domains:photos", "model": "torchvision:resnet18"})
        cell = next(read_recipe(file).cells("paper"))
        assert not cell.reason
        usual = registry.available

        def without_torchvision(kind):
            return {
                name: point for name, point in usual(kind).items() if (kind, name) != ("model prefix", "torchvision")
            }

        monkeypatch.setattr("fedcore_reproduce.recipe.registry.available", without_torchvision)
        reason = "model torchvision:resnet18 is in the package fedcore-zoo, which is not installed here"
        assert next(read_recipe(file).cells("paper")).reason == reason

    def test_the_recipe_that_the_documentation_shows(self, tmp_path):
        text = (Path(__file__).parents[3] / "docs" / "reproduce.md").read_text(encoding="utf-8")
        shown = text.partition("```yaml\n")[2].partition("```")[0]
        file = tmp_path / "table_2.yaml"
        file.write_text(shown.replace("mymethod: {strength: 0.5}", "fedprox: {mu: 0.5}"), encoding="utf-8")
        recipe = read_recipe(file)
        quick = [(c.row, recipe.spec("quick").run(c.choice, 0)) for c in recipe.cells("quick") if c.choice]
        assert [(row, run.rounds, run.samples) for row, run in quick] == [
            ("FedAvg", 12, 5000),
            ("MOON", 12, 5000),
            ("MyMethod", 12, 5000),
        ]


class TestFind:
    @pytest.fixture
    def third_party(self, tmp_path, monkeypatch):
        """Install a package with a plugin and a recipe, as pip would; returns its folder."""
        package = tmp_path / "site" / "strange_method"
        (package / "inner" / "recipes").mkdir(parents=True)
        (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
        (package / "inner.py").write_text("")
        info = tmp_path / "site" / "strange_method-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strange-method\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[fedcore.plugins]\nstrange = strange_method:Strange\n")
        (package / "recipes").mkdir()
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        return package

    def write(self, folder, name="table_7.yaml", **changes):
        (folder / "recipes" / name).write_text(yaml.safe_dump({**SMALL, "method": "strange", **changes}))

    def test_a_third_partys_recipe_is_found_by_its_package_alone(self, third_party):
        self.write(third_party)
        broken = []
        recipe = find_recipe(broken.append, "strange", "7")
        assert recipe.file == third_party / "recipes" / "table_7.yaml"
        assert find_recipe(broken.append, "strange", "vii") == recipe
        assert not broken

    def test_a_broken_recipe_is_told_and_hides_no_other(self, third_party):
        self.write(third_party)
        self.write(third_party, "table_8.yaml", table="eight")
        broken = []
        found = find_recipes(broken.append)
        assert {("strange", 7), ("fedcd", 1)} <= {(recipe.method, recipe.table) for recipe in found}
        with raises(UnknownNameError, "strange", "'8'", "Known: 7."):
            find_recipe(broken.append, "strange", "8")
        assert len(broken) == 2
        assert all("table_8.yaml: table: input should be a valid integer" in message for message in broken)

    def test_two_recipes_of_one_table_are_refused(self, third_party):
        self.write(third_party)
        self.write(third_party, "table_7b.yaml")
        broken = []
        find_recipes(broken.append)
        assert "table_7b.yaml is about table 7 of strange, as is " in broken[0]
        assert len(broken) == 1

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize(
        ("method", "table", "named"),
        [
            ("fedcdd", "1", ("'fedcdd'", "'fedcd'")),
            ("fedprox", "1", ("'fedprox'", "fdcl, fedcd,")),
            ("absent", "1", ("pip install fedcore-absent",)),
            ("fedcd", "2", ("fedcd", "'2'", "Known: 1, 3, 4.")),
            ("fedcme", "", ("fedcme", "''")),
        ],
    )
    def test_unknown_names(self, method, table, named, monkeypatch):
        monkeypatch.setitem(registry.packages()["plugin"], "absent", "fedcore-absent")
        with raises(ConfigError, *named):
            find_recipe(print, method, table)

    def test_every_file_is_listed_once(self):
        files = recipe_files()
        assert len(files) == len(set(files)) >= len(TABLES)


class TestPlan:
    def test_cells_whose_data_cannot_be_had_are_not_run_and_the_reason_is_told_once(self, write, monkeypatch):
        def load(name, data_dir):
            if name != "digits":
                raise DataError(f"{name}: files are missing")

        monkeypatch.setattr(reproducing, "load_dataset", load)
        columns = [{"name": "a"}, {"name": "b", "options": {"dataset": "mnist"}}, *SMALL["columns"][2:]]
        told = []
        recipe = read_recipe(write(columns=columns, quick={"says": "nothing"}))
        planned = reproducing.plan(recipe, "paper", changes={"data_dir": "/nowhere"}, seeds=2, note=told.append)
        reasons = {(c.row, c.column): c.reason for c in planned.cells}
        assert reasons["FedProx", "b"] == "data set mnist cannot be loaded from /nowhere"
        assert told == ["mnist: files are missing"]
        assert planned.runs.keys() == {(row, "a") for row in ("FedAvg", "FedProx", "Lost")}
        assert all(len(identities) == 2 for identities in planned.runs.values())
        assert planned.runs["FedAvg", "a"] == planned.runs["Lost", "a"]  # one run for both
        assert len(list(planned.sweep.cells())) == 4

    def test_an_unknown_name_keeps_its_suggestion_and_its_package(self, write, monkeypatch):
        with raises(ConfigError, "dataset", "minst", "mnist"):
            read_recipe(write(base={"dataset": "minst"}))
        monkeypatch.setattr(registry, "packages", lambda: {"option": {"draws": "fedcore-zoo"}})
        with raises(ConfigError, "draws", "pip install", "fedcore-zoo"):
            read_recipe(write(base={"draws": 40}))

    def test_rows_and_columns_are_chosen_by_their_names_in_the_tables_order(self, write):
        recipe = read_recipe(write())
        planned = reproducing.plan(recipe, "paper", rows=["FedProx", "FedAvg"], columns=["b"])
        assert [(cell.row, cell.column) for cell in planned.cells] == [("FedAvg", "b"), ("FedProx", "b")]
        assert planned.runs.keys() == {("FedAvg", "b"), ("FedProx", "b")}
        whole = reproducing.plan(recipe, "paper")
        assert all(whole.runs[place] == runs for place, runs in planned.runs.items())  # the same runs, found again
        assert len(list(reproducing.plan(recipe, "paper", rows=["FedAvg"], columns=["b"]).sweep.cells())) == 3
        nothing = reproducing.plan(recipe, "paper", columns=["c"])
        assert (nothing.sweep, {cell.reason for cell in nothing.cells}) == (None, {"there is no such data set"})

    @pytest.mark.parametrize(
        ("chosen", "named"),
        [
            ({"rows": ["Fedprox"]}, ("row", "'Fedprox'", "'FedProx'")),
            ({"rows": ["FedAvg", "MOON"]}, ("row", "'MOON'", "Known: FedAvg, FedProx, Lost.")),
            ({"columns": ["alpha"]}, ("column", "'alpha'", "Known: a, b, c.")),
        ],
    )
    def test_a_row_or_column_that_the_table_does_not_have(self, write, chosen, named):
        with raises(UnknownNameError, "Table VII of fedprox", *named):
            reproducing.plan(read_recipe(write()), "paper", **chosen)
