"""``fedcore runs``: real small runs of train and of a sweep, listed, shown, compared, labelled and deleted."""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import shlex
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

import fedcore
from fedcore import Interrupted
from fedcore_study.cli.runs import tag
from fedcore_study.runs import labels
from fedcore_study.runs.overview import Rounds, read_rounds
from tests.sentences import refused

SMALL = {"samples": 200, "clients": 4, "local_epochs": 1, "workers": 0}
FIRST, MOON, STOPPED, EMPTY = "20260101-100000-first", "20260102-100000-moon", "20260103-100000-moon", "20260104-fedavg"
SWEPT = "grid/runs/fedprox_seed=0_12345678"


def stop(event, details):
    if event == "round":
        raise KeyboardInterrupt


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Return a folder ``runs``: two finished runs, one of them labelled, two stopped ones, and a sweep of one run."""
    root = tmp_path_factory.mktemp("trained") / "runs"
    labels = {"name": "first", "tags": ["base", "paper"], "note": "the first try"}
    fedcore.run(rounds=2, out=root / FIRST, **labels, **SMALL)
    fedcore.run(rounds=2, out=root / MOON, plugins={"moon": {"mu": 5}}, client_test_fraction=0.2, **SMALL)
    with pytest.raises(Interrupted):
        fedcore.run(rounds=3, out=root / STOPPED, plugins="moon", notify=stop, **SMALL)
    shutil.copytree(root / STOPPED, root / EMPTY, ignore=shutil.ignore_patterns("checkpoint", "clients", "metrics*"))
    fedcore.run(rounds=2, out=root / SWEPT, plugins="fedprox", **SMALL)
    (root / "grid" / "sweep.json").write_text("{}")
    for place, folder in enumerate((FIRST, MOON, STOPPED, EMPTY, SWEPT)):
        sessions = root / folder / "sessions.jsonl"
        record = json.loads(sessions.read_text()) | {"started": f"2026-01-0{place + 1}T10:00:00+00:00"}
        sessions.write_text(json.dumps(record) + "\n")
    return root


@pytest.fixture
def runs(trained: Path, cli, tmp_path: Path) -> Path:
    """Return a copy of the folder, at ``runs`` in the current folder."""
    shutil.copytree(trained, tmp_path / "runs")
    return Path("runs")


@pytest.fixture
def ask():
    """Answer a command's question: ``ask(text, *arguments)``."""
    from typer.testing import CliRunner

    from fedcore.tools import app

    def invoke(answer, *arguments):
        return CliRunner().invoke(app, list(map(str, arguments)), input=answer, catch_exceptions=False)

    return invoke


@pytest.fixture
def listed(cli):
    """Return the folders that a list names, in order."""

    def invoke(*arguments):
        result = cli("runs", "list", "--json", *arguments)
        assert result.exit_code == 0, result.output
        return [run["folder"] for run in json.loads(result.stdout)]

    return invoke


def held(folder: Path) -> int:
    """Lock a run as the process that trains it does."""
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


class TestList:
    def test_the_table_has_every_run_and_fits_80_columns(self, cli, runs, monkeypatch):
        monkeypatch.setenv("COLUMNS", "80")
        shown = cli("runs", "list").stdout
        assert max(map(len, shown.splitlines())) <= 80
        accuracy = 100 * json.loads((runs / FIRST / "summary.json").read_text())["metrics"]["global"]["accuracy"]
        rows = {line.split()[2]: line.split() for line in shown.splitlines() if "01 Jan" in line or "02 Jan" in line}
        assert rows["first"] == [
            *("01", "Jan", "first", "fedavg", "digits", "2/2", f"{accuracy:.2f}", "finished", "base", "paper")
        ]
        assert "1/3" in shown
        assert shown.count("stopped") == 2

    def test_json_has_what_the_table_has_and_more(self, cli, runs):
        found = {run["folder"]: run for run in json.loads(cli("runs", "list", "--json").stdout)}
        summary = json.loads((runs / MOON / "summary.json").read_text())
        assert found[MOON] == {
            "path": f"runs/{MOON}",
            "folder": MOON,
            "name": None,
            "tags": [],
            "note": None,
            "state": "finished",
            "problem": None,
            "begun": "2026-01-02T10:00:00+00:00",
            "method": "moon",
            "dataset": "digits",
            "seed": 0,
            "rounds": 2,
            "planned": 2,
            "protocol": "global",
            "accuracy": summary["metrics"]["global"]["accuracy"],
            "figure": f"{100 * summary['metrics']['global']['accuracy']:.2f} %",
        }
        stopped = found[STOPPED]
        line = json.loads((runs / STOPPED / "metrics.jsonl").read_text())
        assert (stopped["state"], stopped["rounds"], stopped["planned"]) == ("stopped", 1, 3)
        assert stopped["accuracy"] == line["metrics"]["global"]["accuracy"]
        assert (found[EMPTY]["rounds"], found[EMPTY]["accuracy"]) == (0, None)
        assert (found[FIRST]["name"], found[FIRST]["note"]) == ("first", "the first try")

    def test_the_latest_is_first_and_columns_sort(self, runs, listed):
        swept = "grid/fedprox_seed=0_12345678"
        assert listed() == [swept, EMPTY, STOPPED, MOON, FIRST]
        assert listed("--sort", "method")[0] == FIRST
        assert listed("--sort", "rounds")[-1] == EMPTY
        assert listed("--sort", "accuracy")[-1] == EMPTY
        assert listed("--sort", "tags")[0] == FIRST
        assert listed("runs/grid") == ["fedprox_seed=0_12345678"]
        assert listed(f"runs/{MOON}") == [MOON]

    def test_filters(self, cli, runs, listed):
        assert listed("--method", "moon") == [EMPTY, STOPPED, MOON]
        assert listed("--method", "moon", "--state", "finished") == [MOON]
        assert listed("--tag", "base", "--tag", "paper") == [FIRST]
        assert listed("--dataset", "digits", "--state", "stopped") == [EMPTY, STOPPED]
        assert listed("--state", "broken") == []
        missed = cli("runs", "list", "--method", "mooon")
        assert missed.exit_code == 0
        assert "no run here has the method 'mooon'. Did you mean 'moon'?" in missed.stderr
        assert "there is no such run in runs" in missed.stderr

    def test_a_protocol_other_than_global_is_marked(self, cli, runs):
        file = runs / FIRST / "summary.json"
        summary = json.loads(file.read_text())
        summary["metrics"] = {"global": None, "personal": {"accuracy": 0.5, "loss": 1.0}}
        file.write_text(json.dumps(summary))
        shown = cli("runs", "list").stdout
        assert "50.00*" in shown
        assert "* own models on held-out parts" in shown

    def test_a_run_that_a_process_trains_is_running(self, runs, listed):
        descriptor = held(runs / STOPPED)
        assert listed("--state", "running") == [STOPPED]
        os.close(descriptor)
        assert listed("--state", "running") == []

    def test_damaged_runs_are_broken_with_the_reason(self, cli, runs):
        (runs / FIRST / "config.yaml").write_text("plugins: [\n")
        (runs / MOON / "summary.json").write_text("{half")
        (runs / STOPPED / "more").symlink_to(runs.resolve())
        (runs / EMPTY / "config.yaml").write_text("rounds: 3\nout: /tmp\n")
        found = {run["folder"]: run for run in json.loads(cli("runs", "list", "--state", "broken", "--json").stdout)}
        assert "is no configuration of a run" in found[FIRST]["problem"]
        assert "summary.json is damaged" in found[MOON]["problem"]
        assert "is a link" in found[STOPPED]["problem"]
        assert "it has no 'plugins'" in found[EMPTY]["problem"]
        assert cli("runs", "list").stdout.count("broken") == 4

    def test_aliases_are_broken(self, cli, runs):
        """Each of these lines has more values than the one before; the last would have 10^12."""
        file, bomb = runs / FIRST / "config.yaml", "a0: &a0 {b: 1}\n"
        bomb += "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 13))
        file.write_text(file.read_text() + bomb)
        (found,) = json.loads(cli("runs", "list", "--state", "broken", "--json").stdout)
        assert "it has an alias, which fedcore never writes" in found["problem"]
        refused(cli("runs", "show", f"runs/{FIRST}"), f"runs/{FIRST}", "line 1")
        resumed = cli("resume", runs / FIRST)
        assert (resumed.exit_code, "it has an alias" in resumed.stderr) == (2, True)

    def test_links_are_not_followed_and_other_folders_are_no_runs(self, runs, listed, tmp_path):
        (runs / "again").symlink_to(runs.resolve() / FIRST)
        (runs / ".hidden").mkdir()
        shutil.copytree(runs / FIRST, runs / ".hidden" / FIRST)
        (runs / "app").mkdir()
        (runs / "app" / "config.yaml").write_text("rounds: 3\n")
        assert len(listed()) == 5

    def test_mistakes(self, runs, cli, tmp_path):
        refused(cli("runs", "list", "--sort", "acuracy"), "'acuracy'", "'accuracy'")
        refused(cli("runs", "list", "--state", "finishd"), "'finishd'", "'finished'")
        refused(cli("runs", "list", "nowhere"), "nowhere", "fedcore runs list FOLDER")
        shutil.rmtree(runs)
        for _ in range(2):  # without the folder, and with an empty one
            assert "there is no run in runs" in cli("runs", "list").stderr
            assert cli("runs", "list", "--json").stdout == "[]\n"
            assert "there is nothing to delete in runs" in cli("runs", "clean").stderr
            refused(cli("runs", "show", "first"), "'first'")
            runs.mkdir(exist_ok=True)
        shutil.rmtree(runs)
        runs.write_text("")
        refused(cli("runs", "list"), "runs")

    def test_it_imports_no_torch(self, runs, python):
        code = "from fedcore.tools import app; import sys; app(['runs', {}], standalone_mode=False); "
        for arguments in ("'list'", "'list', '--json'", "'show', 'first'", "'diff', 'first', 'runs/" + MOON + "'"):
            done = python(code.format(arguments) + "assert 'torch' not in sys.modules")
            assert done.returncode == 0, done.stderr

    def test_the_last_figures_may_be_of_an_earlier_round(self, tmp_path):
        file = tmp_path / "metrics.jsonl"
        lines = [{"round": n, "metrics": {"global": {"accuracy": n / 100}} if n == 30 else None} for n in range(50)]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"round": 50, "met')
        assert read_rounds(tmp_path) == Rounds(50, {"global": {"accuracy": 0.3}})
        file.unlink()
        assert read_rounds(tmp_path) == Rounds(0, {})


class TestShow:
    def test_everything_about_a_run(self, cli, runs):
        found = json.loads(cli("runs", "show", "first", "--json").stdout)
        summary = json.loads((runs / FIRST / "summary.json").read_text())
        row = summary["metrics"]["global"]
        assert found["figures"] == {"global": {"accuracy": row["accuracy"], "loss": row["loss"]}}
        assert found["setting"]["samples"] == 200
        assert "lr" not in found["setting"]
        assert "out" not in found["setting"]
        assert found["files"]["model.safetensors"] == (runs / FIRST / "model.safetensors").stat().st_size
        assert found["files"]["checkpoint/"] == sum(f.stat().st_size for f in (runs / FIRST / "checkpoint").iterdir())
        assert found["sessions"][0]["versions"]["fedcore"] == fedcore.__version__
        assert found["bytes"] == {way: summary["bytes"][way] for way in ("down", "up")}
        shown = cli("runs", "show", "first").stdout
        for words in (
            "state    finished",
            "base, paper",
            "the first try",
            "global model on the test set",
            "checkpoint/",
        ):
            assert words in shown

    def test_a_metric_of_the_run_has_a_column(self, cli, tmp_path):
        result = fedcore.run(rounds=1, out=tmp_path / "run", metrics=["macro-f1"], **SMALL)
        shown = cli("runs", "show", tmp_path / "run").stdout
        assert "macro-f1" in shown
        assert f"{result.metrics['global']['macro-f1']:.4f}" in shown

    def test_the_command_that_it_prints_goes_on(self, cli, runs, listed):
        found = json.loads(cli("runs", "show", STOPPED, "--json").stdout)
        words = shlex.split(found["resume"])
        assert words[:2] == ["fedcore", "resume"]
        assert cli(*words[1:]).exit_code == 0
        assert STOPPED in listed("--state", "finished")
        more = shlex.split(json.loads(cli("runs", "show", STOPPED, "--json").stdout)["resume"])
        assert more[-2:] == ["--rounds", "6"]
        assert cli(*more[1:]).exit_code == 0
        assert json.loads(cli("runs", "show", STOPPED, "--json").stdout)["changes"][0]["rounds"] == [3, 6]

    def test_a_run_whose_checkpoints_are_lost_has_no_command(self, cli, runs):
        file = runs / STOPPED / "metrics.jsonl"
        record = json.loads(file.read_text())
        with file.open("a") as lines:
            lines.writelines(json.dumps(record | {"round": number}) + "\n" for number in (1, 2))
        shutil.rmtree(runs / STOPPED / "checkpoint")
        found = cli("runs", "show", STOPPED).stdout
        assert "3 of 3" in found
        assert "fedcore resume" not in found
        assert "It has no checkpoint from which it could go on" in found

    def test_a_running_run_has_no_command(self, cli, runs):
        descriptor = held(runs / STOPPED)
        found = cli("runs", "show", STOPPED)
        assert "running" in found.stdout
        assert "fedcore resume" not in found.stdout
        os.close(descriptor)

    def test_options_that_were_edited_are_said(self, cli, runs):
        file = runs / FIRST / "config.yaml"
        file.write_text(file.read_text().replace("lr: 0.02", "lr: 0.5"))
        shown = cli("runs", "show", "first")
        assert shown.exit_code == 0
        assert "was changed since it was written" in shown.stderr
        assert "or its options were changed" in shown.stdout

    def test_which_run_is_meant(self, cli, runs):
        def meant(text):
            return json.loads(cli("runs", "show", text, "--json").stdout)["folder"]

        assert meant("fir") == meant("20260101") == meant(f"runs/{FIRST}/") == meant(runs.resolve() / FIRST) == FIRST
        assert meant("runs/20260101") == FIRST
        assert meant("grid/fed") == "grid/fedprox_seed=0_12345678"
        assert meant("fedprox_") == "grid/fedprox_seed=0_12345678"
        refused(cli("runs", "show", "2026"), "'2026'", f"4 runs: {FIRST}, {MOON}, ")
        refused(cli("runs", "show", "frist"), "'frist'", "'first'")
        refused(cli("runs", "show", "runs/grid"), "runs/grid")
        refused(cli("runs", "show", "xyzzy"), "'xyzzy'")
        refused(cli("runs", "show", ""), "''")
        Path("link").symlink_to(runs.resolve() / FIRST)
        refused(cli("runs", "show", "link"), "link")
        (runs / FIRST / "config.yaml").write_text("[")
        done = cli("runs", "show", f"runs/{FIRST}")  # with what yaml says
        assert (done.exit_code, "is no configuration of a run" in done.stderr) == (2, True), done.output


class TestDiff:
    def test_options_and_figures_that_differ(self, cli, runs):
        found = json.loads(cli("runs", "diff", "first", MOON, "--json").stdout)
        assert found["runs"] == [f"runs/{FIRST}", f"runs/{MOON}"]
        assert found["options"]["method"] == ["fedavg", "moon"]
        assert found["options"]["moon.mu"] == [None, 5.0]
        assert found["options"]["client_test_fraction"] == [0.0, 0.2]
        assert "rounds" not in found["options"]
        assert found["without_effect"] == {}
        one, other = (
            json.loads((runs / folder / "summary.json").read_text())["metrics"]["global"]["accuracy"]
            for folder in (FIRST, MOON)
        )
        assert found["figures"]["global.accuracy"] == [one, other, pytest.approx(other - one)]
        assert found["figures"]["rounds"] == [2, 2, 0]
        assert found["figures"]["global_local.accuracy"][0] is None
        assert (found["same_data"], found["same_partition"]) == (True, False)
        shown = cli("runs", "diff", "first", MOON).stdout
        assert f"{100 * (other - one):+.2f}" in shown
        assert "the partitions differ" in shown

    def test_runs_with_the_same_options(self, cli, runs):
        shutil.copytree(runs / FIRST, runs / "copy")
        file = runs / "copy" / "config.yaml"
        file.write_text(file.read_text().replace("\nworkers: 0", "\nworkers: 1").replace("torch: ", "torch: 0"))
        found = json.loads(cli("runs", "diff", f"runs/{FIRST}", "runs/copy", "--json").stdout)
        assert found["options"] == {}
        assert found["without_effect"] == {"workers": [0, 1]}
        assert list(found["versions"]) == ["torch"]
        shown = cli("runs", "diff", f"runs/{FIRST}", "runs/copy").stdout
        assert "The runs have the same options" in shown
        assert "the partitions differ" not in shown

    def test_the_seconds_of_a_resumed_run_are_of_all_its_rounds(self, cli, runs):
        again = fedcore.resume(runs / FIRST, changes={"rounds": 3}, out=Path("longer"))
        found = json.loads(cli("runs", "diff", f"runs/{FIRST}", "longer", "--json").stdout)["figures"]["seconds"]
        times = [row["seconds"] for row in again.history]
        assert found == [pytest.approx(sum(times[:2])), pytest.approx(sum(times)), pytest.approx(times[2])]

    def test_a_run_differs_from_another_one(self, runs, cli):
        refused(cli("runs", "diff", "first", f"runs/{FIRST}"), f"first and runs/{FIRST}")


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("sessions.jsonl", {"machine": "x", "versions": [1], "commit": 3}),
        ("sessions.jsonl", {"machine": {"gpu": [1], "cores": {}}, "versions": {"fedcore": 3}}),
        ("sessions.jsonl", {"started": "0001-01-01T00:00:00+14:00"}),
        ("summary.json", {"bytes": [1]}),
        ("summary.json", {"bytes": {"down": "x", "up": 10**400}}),
        ("summary.json", {"rounds": 10**400}),
        ("summary.json", {"metrics": {"global": {"accuracy": True, "loss": 10**400}, "personal": "x"}}),
        ("metrics.jsonl", {"time": {"round": "x", "evaluation": [1]}}),
        ("metrics.jsonl", {"time": {"round": 1e308, "evaluation": 1e308}}),
        ("config.yaml", {"plugins": {1: {}}}),
        ("config.yaml", {"seed": datetime.date(2026, 1, 1), "trackers": {1: 2}, "changes": 5, "versions": [1]}),
    ],
)
def test_values_of_other_types_end_no_command(cli, runs, file, values):
    """In a file that somebody edited, or made."""
    path, text = runs / FIRST / file, (runs / FIRST / file).read_text()
    if file == "config.yaml":
        path.write_text(yaml.safe_dump(yaml.safe_load(text) | values))
    else:
        records = [text] if file == "summary.json" else text.splitlines()
        path.write_text("".join(json.dumps(json.loads(record) | values) + "\n" for record in records))
    for words in (["list"], ["list", "--json"], ["show", f"runs/{FIRST}"], ["diff", f"runs/{FIRST}", MOON]):
        result = cli("runs", *words)
        assert result.exit_code in ((0,) if words[0] == "list" else (0, 2)), result.output


class TestTag:
    def test_labels_can_change_and_config_yaml_does_not(self, cli, runs, listed):
        config = (runs / FIRST / "config.yaml").read_bytes()
        done = cli("runs", "tag", "first", "--add", "new", "--add", "base", "--remove", "paper", "--note", "")
        assert done.stdout == f"{FIRST}: name first, tags base, new\n"
        kept = json.loads((runs / FIRST / "labels.json").read_text())
        assert kept == {"name": "first", "tags": ["base", "new"], "note": None}
        assert (runs / FIRST / "config.yaml").read_bytes() == config
        assert listed("--tag", "paper") == []
        assert cli("runs", "tag", "first", MOON, "--add", "both").exit_code == 0
        assert listed("--tag", "both") == [MOON, FIRST]
        assert cli("runs", "tag", MOON, "--name", "second", "--note", "two\nlines").exit_code == 0
        assert json.loads(cli("runs", "show", "second", "--json").stdout)["note"] == "two\nlines"
        assert cli("runs", "tag", "second", "--name", "", "--note", "", "--remove", "both").stdout.endswith(
            "no labels\n"
        )

    def test_commands_side_by_side_lose_no_tag(self, runs, monkeypatch):
        """Each waits between reading and writing, as the machine can make it wait."""
        write, names = labels.write_labels, [f"t{number}" for number in range(6)]

        def late(*given):
            time.sleep(0.05)
            write(*given)

        monkeypatch.setattr(labels, "write_labels", late)
        with ThreadPoolExecutor(len(names)) as pool:
            list(pool.map(lambda name: tag([FIRST, MOON], add=[name]), names))
        for folder in (FIRST, MOON):
            assert {*names} <= {*json.loads((runs / folder / "labels.json").read_text())["tags"]}

    @pytest.mark.slow
    def test_checkpoints_do_not_depend_on_labels(self, cli, runs):
        """The run goes on to the same bits, as a copy, too, which has the labels."""
        words = ("--out", "copy", "--quiet")
        assert cli("runs", "tag", STOPPED, "--name", "halted", "--add", "x").exit_code == 0
        assert cli("resume", runs / STOPPED, *words).exit_code == 0
        assert json.loads(cli("runs", "show", "copy", "--json").stdout)["name"] == "halted"
        shutil.rmtree("copy")
        assert not (runs / STOPPED / "model.safetensors").exists()
        assert cli("resume", runs / STOPPED, "--quiet").exit_code == 0
        assert cli("evaluate", runs / STOPPED).exit_code == 0

    def test_mistakes_change_nothing(self, runs, cli):
        refused(cli("runs", "tag", "first"), "--add TAG")
        refused(cli("runs", "tag", "first", "--add", "a b"), "'a b'", "note")
        refused(cli("runs", "tag", "first", "--name", "../x"), "--name", "1 to 50")
        refused(cli("runs", "tag", "first", "--remove", "papr"), "'papr'", "'paper'")
        refused(cli("runs", "tag", MOON, "--remove", "paper"), "tags")
        refused(cli("runs", "tag", "first", MOON, "--name", "x"), "--name x", 2)
        refused(cli("runs", "tag", "first", "nope", "--add", "x"), "'nope'")
        assert not list(runs.glob("*/labels.json"))
        (runs / FIRST / "labels.json").write_text('{"tags": [3]}')
        refused(cli("runs", "tag", f"runs/{FIRST}", "--add", "x"), "labels.json", "config.yaml")


class TestRm:
    def test_it_asks_and_deletes(self, cli, ask, runs):
        kept = ask("n\n", "runs", "rm", "first")
        assert kept.exit_code == 0
        assert "nothing was deleted" in kept.stderr
        silent = ask("", "runs", "rm", "first")
        assert silent.exit_code == 2
        assert "add --yes to delete" in silent.stderr
        assert (runs / FIRST).exists()
        bytes_ = sum(file.stat().st_size for file in (runs / FIRST).rglob("*") if file.is_file())
        assert f"Delete {bytes_ / 1000:.0f} kB of 1 run?" in silent.stderr
        gone = ask("y\n", "runs", "rm", "first")
        assert gone.exit_code == 0
        assert not (runs / FIRST).exists()
        assert cli("runs", "rm", MOON, f"runs/{MOON}", STOPPED, "--yes").stdout.startswith("deleted ")
        assert {path.name for path in runs.iterdir()} == {EMPTY, "grid"}

    def test_what_is_no_run_or_is_running_or_a_link_stays(self, runs, cli, monkeypatch, tmp_path):
        descriptor = held(runs / STOPPED)
        refused(cli("runs", "rm", "first", STOPPED, "--yes"), f"runs/{STOPPED}")
        os.close(descriptor)
        refused(cli("runs", "rm", "first", "runs/grid", "--yes"), "runs/grid")
        Path("link").symlink_to(runs.resolve() / FIRST)
        refused(cli("runs", "rm", "link", "--yes"), "link")
        (runs / MOON / "clients" / "more").symlink_to(runs.resolve())
        refused(cli("runs", "rm", MOON, "--yes"), f"runs/{MOON}/clients/more")
        monkeypatch.chdir(runs / FIRST)
        refused(cli("runs", "rm", ".", "--yes"), ". ")
        monkeypatch.chdir(tmp_path)
        assert len(list(runs.iterdir())) == 5

    def test_a_broken_run_can_go(self, cli, runs):
        (runs / FIRST / "config.yaml").write_text("[")
        assert cli("runs", "rm", f"runs/{FIRST}", "--yes").exit_code == 0
        assert not (runs / FIRST).exists()


class TestClean:
    def test_states_and_runs_without_a_round_go_and_results_stay(self, cli, ask, runs, listed):
        before = {file for file in runs.rglob("*") if file.is_file()}
        going = {file for file in before if {"checkpoint", "clients"} & set(file.parts)}
        going = {file for file in going if runs / STOPPED not in file.parents} | set((runs / EMPTY).iterdir())
        count = sum(file.stat().st_size for file in going)

        dry = cli("runs", "clean", "--dry-run")
        assert dry.exit_code == 0
        assert f"{count / 1e6:.3g} MB of 4 runs would be deleted" in dry.stderr
        assert "cannot get more rounds or be evaluated again" in " ".join(dry.stderr.split())
        assert ask("", "runs", "clean").exit_code == 2
        assert {file for file in runs.rglob("*") if file.is_file()} == before

        assert cli("runs", "clean", "--yes").exit_code == 0
        assert {file for file in runs.rglob("*") if file.is_file()} == before - going
        assert not (runs / EMPTY).exists()
        assert not (runs / SWEPT / "checkpoint").exists()
        assert fedcore.load_run(runs / MOON).accuracy is not None
        assert cli("evaluate", runs / MOON).exit_code == 2
        assert "It has no checkpoint from which it could go on" in cli("runs", "show", MOON).stdout
        assert cli("resume", runs / STOPPED, "--quiet").exit_code == 0
        assert "there is nothing to delete in runs/grid" in cli("runs", "clean", "runs/grid").stderr

    def test_running_and_broken_runs_stay(self, cli, runs):
        descriptor = held(runs / EMPTY)
        (runs / MOON / "summary.json").write_text("{half")
        (runs / FIRST / "checkpoint" / "link").symlink_to("/")
        done = cli("runs", "clean", "--yes")
        os.close(descriptor)
        assert done.exit_code == 0
        assert (runs / EMPTY / "config.yaml").exists()
        assert (runs / MOON / "checkpoint").exists()
        assert (runs / FIRST / "checkpoint").exists()
        assert f"{MOON} is left as it is: " in done.stderr
        assert f"{FIRST} is left as it is: " in done.stderr

    def test_where_nothing_can_be_locked_no_run_goes(self, cli, runs, monkeypatch):
        def flock(descriptor, operation):
            raise OSError(95, "Operation not supported")

        monkeypatch.setattr("fcntl.flock", flock)
        done = cli("runs", "clean", "--yes")
        assert (runs / EMPTY).exists()
        assert f"{EMPTY} is left as it is: runs/{EMPTY} cannot be locked" in done.stderr
        assert not (runs / MOON / "checkpoint").exists()


def test_runs_of_sweeps_stand_in_the_list_beside_the_others(cli, runs):
    Path("sweeps").mkdir()
    (runs / "grid").rename("sweeps/grid")
    listed = json.loads(cli("runs", "list", "--json").stdout)
    assert listed[0]["folder"] == "sweeps/grid/fedprox_seed=0_12345678"
    assert len(listed) == 5
    assert json.loads(cli("runs", "show", "sweeps/grid/fedprox", "--json").stdout)["path"] == f"sweeps/{SWEPT}"
    assert len(json.loads(cli("runs", "list", "runs", "--json").stdout)) == 4


def test_the_command_line_labels_a_run(cli, tmp_path):
    words = ["--samples", "200", "--clients", "4", "--local-epochs", "1", "--workers", "0", "--rounds", "1", "--quiet"]
    assert cli("train", *words, "--name", "mine", "--tag", "a", "--tag", "b", "--note", "a remark").exit_code == 0
    (folder,) = Path("runs").iterdir()
    assert folder.name.endswith("-mine")
    found = json.loads(cli("runs", "show", "mine", "--json").stdout)
    assert (found["name"], found["tags"], found["note"]) == ("mine", ["a", "b"], "a remark")
    assert cli("train", *words, "--config", folder / "config.yaml", "--tag", "again").exit_code == 0
    (again,) = json.loads(cli("runs", "list", "--tag", "again", "--json").stdout)
    assert (again["name"], again["tags"], again["note"]) == (None, ["again"], None)
    assert "'a b' is none" in cli("train", *words, "--tag", "a b").stderr
