from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedcore
from fedcore.base.safe_yaml import read_config_file

SMALL = ("--workers", 0, "--rounds", 1, "--clients", 2, "--local-epochs", 1)


def test_version(cli) -> None:
    assert cli("--version").output == f"fedcore {fedcore.__version__}\n"


def test_python_dash_m(python) -> None:
    told = python("import runpy, sys; sys.argv[1:] = ['--version']; runpy.run_module('fedcore', run_name='__main__')")
    assert told.stdout == f"fedcore {fedcore.__version__}\n"


def test_train_prints_tables_and_the_directory(cli, tmp_path: Path) -> None:
    result = cli("train", *SMALL, "--plugin", "fedprox", "--client-test-fraction", 0.2, "--out", "run")
    assert result.exit_code == 0
    assert "global_local" in result.stdout
    assert "worst 10 %" in result.stdout
    assert f"run directory: {tmp_path / 'run'}" in result.stdout
    assert result.stderr.startswith("fedprox on digits (mlp), dirichlet, 2 clients, 1 round, sgd with momentum")
    assert "round 1/1  global " in result.stderr


def test_json_is_alone_on_stdout_and_evaluate_finds_the_same(cli, tmp_path: Path) -> None:
    result = cli("train", *SMALL, "--json", "--out", "run")
    summary = json.loads(result.stdout)
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "round 1/1" in result.stderr
    assert "run directory" in result.stderr

    again = cli("evaluate", "run", "--json")
    assert json.loads(again.stdout)["global"] == summary["metrics"]["global"]
    assert "accuracy %" in cli("evaluate", "run").stdout

    resumed = cli("resume", "run", "--json", "--quiet")
    assert json.loads(resumed.stdout)["metrics"] == summary["metrics"]
    assert resumed.stderr == ""


def test_quiet_prints_the_result_in_one_line(cli, tmp_path: Path) -> None:
    result = cli("train", *SMALL, "--quiet", "--client-test-fraction", 0.2, "--out", "run")
    assert result.stderr == ""
    figures = json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]
    shown = [f"{name} {100 * figures[name]['accuracy']:.2f} %" for name in ("global", "global_local")]
    assert result.stdout == ", ".join([*shown, f"run directory: {tmp_path / 'run'}\n"])


def test_epochs_beside_steps_get_a_note(cli) -> None:
    result = cli("train", *SMALL, "--local-steps", 2)
    assert "note: --local-epochs 1 has no effect next to --local-steps 2" in result.stderr


def test_paths_begin_at_the_home_where_no_shell_says_so(cli, tmp_path: Path, monkeypatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    cli("data", "split", "--clients", 2, "--out", home / "split.json")
    (home / "file.yaml").write_text("data_dir: ~/data\nout: ~/one\n")
    for flags in ([], ["--partition=~/split.json", "--out=~/two"]):
        assert cli("train", *SMALL, "--config=~/file.yaml", *flags).exit_code == 0
    assert cli("resume", "~/one", "--rounds", 2, "--out=~/three").exit_code == 0
    for name in ("one", "two", "three"):
        assert read_config_file(home / name / "config.yaml")["data_dir"] == str(home / "data")
    assert not (tmp_path / "~").exists()


def test_a_config_of_a_run_makes_another_one(cli, tmp_path: Path) -> None:
    cli("train", *SMALL, "--out", "one", "--seed", 5)
    result = cli("train", "--config", "one/config.yaml", "--out", "two", "--json", "--quiet")
    assert json.loads(result.stdout)["metrics"] == json.loads((tmp_path / "one/summary.json").read_text())["metrics"]


def test_plugins_list_in_groups(cli) -> None:
    text = cli("plugins", "list").stdout
    titles = ("local training", "moon", "papers", "fedcd", "trackers (--tracker NAME)", "engines (--engine NAME)")
    order = [text.index(word) for word in titles]
    assert order == sorted(order)
    rows = {row["name"]: row for row in json.loads(cli("plugins", "list", "--json").stdout)}
    assert rows["moon"]["package"] == "fedcore-moon"
    assert rows["moon"]["group"] == "local training"
    assert rows["moon"]["summary"]


def test_a_package_names_the_heading_of_its_methods(cli, tmp_path: Path, monkeypatch) -> None:
    for name, keywords in (("topical", "learning,fedcore: weather"), ("plain", "learning")):
        info = tmp_path / "site" / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nKeywords: {keywords}\n")
        (info / "entry_points.txt").write_text(f"[fedcore.plugins]\n{name} = no_such_module:Method\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    rows = {row["name"]: row for row in json.loads(cli("plugins", "list", "--json").stdout)}
    assert (rows["topical"]["group"], rows["plain"]["group"]) == ("weather", "other methods")
    text = cli("plugins", "list").stdout
    order = [text.index(word) for word in ("weather", "topical", "other methods", "plain", "trackers")]
    assert order == sorted(order)


def test_plugins_show_has_no_warnings_of_the_run_in_which_it_sees_what_is_sent(cli, recwarn) -> None:
    cli("plugins", "show", "krum")
    assert not [str(warning.message) for warning in recwarn if "krum" in str(warning.message)]


def test_plugins_show_is_taken_from_the_code(cli) -> None:
    text = cli("plugins", "show", "moon").stdout
    for word in ("CVPR 2021", "moon.temperature", "> 0", "local_loss", "client", "global, previous", "mu=0.0"):
        assert word in text
    assert "--plugin moon --plugin OTHER --fast-dev-run" in " ".join(text.split())
    code = cli("plugins", "show", "module:fedcore_moon.Moon").stdout
    assert "Moon.temperature" in code
    assert "module:fedcore_moon.Moon.temperature" not in code, "--set takes the short name"
    card = json.loads(cli("plugins", "show", "fedavg", "--json").stdout)
    assert {hook["name"]: hook["side"] for hook in card["hooks"]} == {
        "select_clients": "server",
        "weight": "server",
        "task_loss": "client",
    }
    assert card["excludes"] == []
    fedcd = json.loads(cli("plugins", "show", "fedcd", "--json").stdout)
    assert "another plugin that implements task_loss" in fedcd["excludes"]


def test_every_command_reads_a_tilde_that_the_shell_leaves(cli, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    cli("data", "split", "--clients", 2, "--out=~/part.json")
    cli("plugins", "new", "mine", "--into=~")
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert sorted(path.name for path in (tmp_path / "home").iterdir()) == ["fedcore-mine", "part.json"]
    assert cli("train", *SMALL, "--partition=~/part.json", "--fast-dev-run").exit_code == 0


def test_letters_that_a_terminal_does_not_have_are_replaced() -> None:
    command = [sys.executable, "-c", "from fedcore.cli import main; main()", "data", "split", "--clients", "50"]
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b"\n? " in done.stdout


def test_help_and_lists_need_no_torch(python) -> None:
    """Modules are counted, because seconds say more about the machine: 480 were 0.2 s of computing."""
    code = """
import sys
from fedcore.cli.app import app
for arguments in (["--help"], ["train", "--help"], ["plugins", "list"], ["plugins", "new", "--help"], ["--version"]):
    try:
        app(arguments)
    except SystemExit as end:
        assert end.code == 0, arguments
heavy = {"torch", "torchvision", "numpy", "scipy", "sklearn", "safetensors", "threadpoolctl", "jinja2", "matplotlib"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert len(sys.modules) < 600, sorted({name.partition(".")[0] for name in sys.modules})
"""
    result = python(code)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "words",
    [["plugins", "list", "--json"], ["plugins", "list"], ["--help"]],
    ids=["print", "rich", "typer"],
)
def test_a_closed_pipe_is_no_error(python, words) -> None:
    code = f"""
import subprocess, sys
command = [sys.executable, "-c", "from fedcore.cli import main; main()", *{words}]
process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
process.stdout.close()
message = process.stderr.read().decode()
assert process.wait() == 141, message
assert message == "", message
"""
    result = python(code)
    assert result.returncode == 0, result.stderr


@pytest.mark.sampled(4)
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"], ids=["stdout", "stderr", "all"])
@pytest.mark.parametrize(("words", "code"), [(["--version"], 0), (["plugins", "list"], 0), (["nope"], 2)], ids=str)
def test_a_stream_that_is_closed_from_the_start_takes_nothing(words, code: int, closed: str) -> None:
    """As git and ruff do it, the stream is opened on nothing: no later file gets its descriptor."""
    command = [sys.executable, "-c", "from fedcore.cli import main; main()", *words]
    done = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *command], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "internal error" not in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
@pytest.mark.parametrize("words", [["--version"], ["--help"], ["plugins", "--help"], ["plugins", "list"]])
def test_output_to_a_full_disk_is_one_message(words) -> None:
    command = [sys.executable, "-c", "from fedcore.cli import main; main()", *words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("error: [Errno 28]")


def test_processes_that_a_command_starts_have_its_streams() -> None:
    """A descriptor that they lack would be that of the first file that they open, and prints would go there."""
    code = """
import subprocess, sys
from fedcore.cli import app, main
prints = "import sys; print('to nobody'); sys.exit(any(s is None for s in (sys.stdin, sys.stdout, sys.stderr)))"
app.app = lambda prog_name: sys.exit(subprocess.run([sys.executable, "-c", prints]).returncode)
main()
"""
    done = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code])
    assert done.returncode == 0
