from __future__ import annotations

import errno
import shlex
from pathlib import Path

import pytest
from typer.testing import Result

from tests.sentences import refused

LONG = "n" * 300
"""More than a file system takes in one name."""

SMALL = ("--workers", 0, "--rounds", 1, "--clients", 2, "--local-epochs", 1)


BAD_FILES = {
    "list.yaml": "- a",
    "broken.yaml": "a: [1",
    "unknown.yaml": "alhpa: 1",
    "rate.yaml": "learning_rate: 0.1",
    "words.yaml": "clients: many",
    "option.yaml": "plugins: {moon: {mu: x}}",
    "python.yaml": "lr: !!python/object/apply:os.system [echo]",
    "code.yaml": "model: module:os.system",
    "grid.yaml": "grid: {nope: [1]}",
    "flat.yaml": "rounds: 1",
    "twice.yaml": "{base: {alpha: 1}, grid: {alpha: [1, 2]}}",
    "grid-code.yaml": "base: {model: module:os.system}",
    "no-seeds.yaml": "{grid: {plugin: [moon]}, seeds: 0}",
    "split.json": "{}",
    "arrays.npz": "x",
    "notes.txt": "mine",
}

BAD_INPUT = [
    # train: names
    ("train --plugin moonn", "'moonn'", "'moon'"),
    ("train --plugin MOON", "'MOON'", "'moon'"),
    ("train --model SimpleCNN", "'SimpleCNN'", "'simple-cnn'"),
    ("train --plugin moon,fedprox", "--plugin moon --plugin fedprox", "plugins: [moon, fedprox]"),
    ("train --plugin moon+uscc", "'moon+uscc'", "--plugin moon --plugin uscc"),
    ("train --plugin mybad.Bad", "'mybad.Bad'", "'module:mybad.Bad'"),
    ("train --partition notes.txt", "partitioner 'notes.txt'"),
    ("train --dataset ok.npz", "'ok.npz'", "'npz:ok.npz'"),
    ("train --dataset t.csv", "'t.csv'", "'hf:t.csv'"),
    ("plugins check tensorboard", "'tensorboard'", "tracker"),
    ("train --plugin module:os.getcwd", "plugin 'getcwd'"),
    ("train --engine flower", "fedcore federate server"),
    ("train --engine locl", "'locl'", "'local'"),
    ("train --engine module:nothing.here", "engine 'module:nothing.here'", "PYTHONPATH"),
    ("train --set local.workers=1", "engine 'local'", "'workers'"),
    ("train --dataset digit", "'digit'", "'digits'"),
    ("train --dataset npz:none.npz", "none.npz", "--data-dir"),
    ("train --dataset imagefolder:.", "train/", "test/"),
    ("train --dataset module:nothing.here", "dataset 'module:nothing.here'", "PYTHONPATH"),
    ("train --model simplecnn", "'simplecnn'", "'simple-cnn'"),
    ("train --plugin fedopt", "fedcore-fedopt", "fedadagrad, fedadam, fedyogi"),
    ("train --dataset shapes", "'shapes'", "Or domains:NAME, hf:NAME, imagefolder:NAME, npz:NAME"),
    ("train --model resnet18", "'resnet50'", "Or hf:NAME, timm:NAME, torchvision:NAME"),
    ("train --model module:os.getcwd", "model 'module:os.getcwd'", "str", "SplitModel"),
    ("train --tracker tensorboad", "'tensorboad'", "'tensorboard'"),
    ("train --tracker tensorboard --plugin tensorboard", "'tensorboard'"),
    ("train --partition none.json", "none.json"),
    ("train --partition split.json", "split.json", "`fedcore data split --out`"),
    # train: options of plugins
    ("train --plugin moon --set moon.muu=1", "'muu'", "'mu'"),
    ("train --plugin moon --set moon.mu=-1", "'moon': mu", "-1"),
    ("train --plugin moon --set moon.mu=x", "'moon': mu", "'x'"),
    ("train --plugin moon --set moon.mu", "'moon.mu'", "plugin.option=value"),
    ("train --plugin moon --set moon.mu=1 --set moon.mu=5", "moon.mu", "twice"),
    ("train --plugin moon --set mu=5", "--set mu=5", "--set moon.mu=5"),
    ("train --plugin moon --plugin fedprox --set mu=5", "--set moon.mu=5 or --set fedprox.mu=5"),
    ("train --plugin moon --set xi=5", "'xi=5'", "plugin.option=value"),
    ("train --set moon.mu=1", "--set moon.mu=1", "--plugin moon"),
    ("train --plugin moon --set mon.mu=1", "'mon'", "'moon'"),
    ("train --set wibble.x=1", "'wibble'", "attack, "),
    ("train --plugin fedala --set fedala.layers=1,4", "'fedala': layers", "[1,4]", "'1,4'"),
    ("train --plugin lora --set lora.layers=base.*", "'lora': layers", "[base.*]"),
    ("train --plugin moon --plugin moon", "'moon'", "2"),
    # train: numbers
    ("train --alpha -1", "--alpha", "-1.0"),
    ("train --lr nan", "--lr", "nan"),
    ("train --lr-decay 2", "--lr-decay", "1"),
    ("train --momentum 1", "--momentum", "1"),
    ("train --weight-decay -1", "--weight-decay", "0"),
    ("train --clip-norm 0", "--clip-norm", "0"),
    ("train --participation 1.5", "--participation", "1"),
    ("train --participation 50", "--participation", "1 (given: 50.0)"),
    ("train --client-test-fraction 1", "--client-test-fraction", "1"),
    ("train --rounds 0", "--rounds", "1"),
    ("train --local-epochs -1", "--local-epochs", "1"),
    ("train --batch-size 99999999999999999999", "--batch-size", "1000000000 "),
    ("train --clients 99999999999", "--clients", "100000000 "),
    ("train --clients 5000", "5000 clients", "1437"),
    ("train --clients 2 --min-clients 3", "min_clients is 3", "2 of 2"),
    ("train --samples 99999", "--samples is 99999", "1437"),
    ("train --seed -1", "--seed", "0"),
    ("train --workers 100000", "--workers", "1024"),
    ("train --buffers none", "--buffers", "'global'", "'local'"),
    ("train --precision float16", "--precision", "'float32'"),
    ("train --memory-format nchw", "--memory-format", "'auto'"),
    ("train --device tpu", "--device", "'tpu'"),
    ("train --augment", "--augment", "'digits'"),
    # train: files
    ("train --out notes.txt", "--out notes.txt"),
    ("train --config missing.yaml", "missing.yaml"),
    ("train --config list.yaml", "list.yaml"),
    ("train --config unknown.yaml", "'alhpa'", "'alpha'", "unknown.yaml"),
    ("train --config rate.yaml", "'learning_rate'", "'lr'", "rate.yaml"),
    ("train --config words.yaml", "words.yaml: --clients", "'many'"),
    ("train --config option.yaml", "'moon': mu", "'x'"),
    ("train --config code.yaml", "code.yaml", "'module:os.system'", "--allow-code"),
    ("train --config arrays.npz", "arrays.npz"),
    # resume and evaluate
    ("resume nowhere", "nowhere", "config.yaml"),
    ("resume .", ". ", "config.yaml"),
    ("resume notes.txt", "notes.txt", "config.yaml"),
    ("evaluate nowhere", "nowhere", "config.yaml"),
    # sweep
    ("sweep", "--grid", "--seeds"),
    ("sweep none.yaml", "none.yaml"),
    ("sweep .", "sweep.json"),
    ("sweep list.yaml", "list.yaml"),
    ("sweep grid.yaml", "grid axis 'nope'"),
    ("sweep flat.yaml", "flat.yaml: 'rounds'", "base", "grid"),
    ("sweep twice.yaml", "twice.yaml: alpha", "grid"),
    ("sweep grid-code.yaml", "grid-code.yaml", "--allow-code"),
    ("sweep no-seeds.yaml", "no-seeds.yaml: seeds", "0 seeds"),
    ("sweep --grid alpha", "--grid 'alpha'", "AXIS=VALUE,VALUE"),
    ("sweep --grid alhpa=1", "'alhpa'", "'alpha'"),
    ("sweep --grid seed=1", "'seed'", "--seeds"),
    ("sweep --grid workers=1", "grid axis 'workers'"),
    ("sweep --grid plugin=moonn", "'moonn'", "'moon'"),
    ("sweep --grid moon.mu=1", "moon.mu", "'moon'"),
    ("sweep --grid clients=0,2", "clients=0", "--clients"),
    ("sweep --grid plugin=moon --seeds 0", "--seeds", "0 seeds"),
    ("sweep --grid plugin=moon --seeds x", "--seeds 'x'"),
    ("sweep --grid plugin=moon --seeds=", "--seeds", "1"),
    ("sweep --grid plugin=moon --seeds 99999999999", "--seeds", "99999999999", "100,000"),
    ("sweep --grid plugin=moon --seeds=-1,2", "--seed", "-1"),
    ("sweep --grid plugin=moon --out notes.txt", "notes.txt: File exists"),
    # compare, report, reproduce
    ("compare nowhere", "nowhere"),
    ("compare .", "config.yaml"),
    ("compare . --format html", "format 'html'"),
    ("report nowhere", "nowhere"),
    ("report . --figure-format bmp", "'bmp'"),
    ("reproduce nope", "'nope'"),
    ("reproduce --table 1", "fedcore reproduce METHOD --table 1"),
    ("reproduce fedcd --table 99", "fedcd", "'99'"),
    ("reproduce fedcd --table 1 --scale big", "scale 'big'"),
    ("reproduce fedcd --table 1 --format html", "format 'html'"),
    # data
    ("data split --partition dirichlett", "'dirichlett'", "'dirichlet'"),
    ("data split --partition x.json", "--partition x.json"),
    ("data split --out x.txt", "--out x.txt", ".json"),
    ("data split --out split.json", "--out split.json", "--force"),
    ("data split --clients 0", "--clients", "1"),
    ("data plot nope.json", "nope.json"),
    ("data plot split.json", "split.json", "fedcore.run(partition=[...])"),
    ("data plot split.json --partition iid", "split.json", "--partition iid"),
    # plugins and bench
    ("train --plugin dp --plugin fedcd", "'dp'", "'fedcd'"),
    ("train --plugin dp --set dp.noise=1", "dp", "'noise'"),
    ("train --plugin fedcd --set fedcd.W=mean", "'W'", "fedcd-variants"),
    ("plugins show fedprx", "'fedprx'", "'fedprox'"),
    ("plugins show module:os.getcwd", "'module:os.getcwd'"),
    ("plugins new Bad_Name", "'Bad_Name'", "'bad-name'"),
    ("plugins new moon", "'moon'"),
    ("plugins new my-x --kind thing", "'thing'"),
    ("plugins new my-x --into notes.txt", "notes.txt"),
    ("plugins check nope", "'nope'"),
    ("plugins check moon --only nothing", "'nothing'"),
    ("bench --workload W9", "'W9'"),
    ("bench --workload W1 --precision float16", "--precision", "'bf16'"),
]

OF_OTHERS = [  # with more, which libraries and the system say
    ("train --dataset mnist --data-dir nowhere", "mnist: data files are missing"),
    ("train --dataset cifar10 --data-dir nowhere", "cifar10: data files are missing"),
    ("train --dataset npz:arrays.npz", "arrays.npz is not a usable .npz file"),
    ("train --dataset module:os.system", "dataset 'module:os.system' raised TypeError"),
    ("train --model embedding-bag", "--model simple-cnn"),  # and all that are installed
    ("train --partition module:os.getcwd", "partitioner 'module:os.getcwd' raised TypeError"),
    ("train --plugin moon --set moon.mu=[1", "--set 'moon.mu=[1': the value is not valid YAML"),
    ("train --config broken.yaml", "config file broken.yaml cannot be read"),
    ("train --config python.yaml", "config file python.yaml cannot be read"),
    (f"train --out {LONG}", "File name too long"),
    (f"train --dataset npz:{LONG}", LONG[:50]),  # a file that does not exist from Python 3.14 on
    (f"train --dataset imagefolder:{LONG}", LONG[:50]),  # a file that does not exist from Python 3.14 on
    (f"train --dataset mnist --data-dir {LONG}", "File name too long"),
    (f"sweep {LONG}", "File name too long"),
]


def everything(folder: Path) -> dict[str, bytes | None]:
    """Return all that there is in a folder."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def among_bad_files(cli, folder: Path, command: str) -> Result:
    """Run a command, which writes one message and nothing else."""
    for name, content in BAD_FILES.items():
        (folder / name).write_text(content)
    before = everything(folder)
    result = cli(*shlex.split(command))
    assert (result.stdout, result.stderr.partition(" ")[0]) == ("", "error:"), result.output
    assert everything(folder) == before
    return result


@pytest.mark.parametrize("command", BAD_INPUT, ids=[command for command, *_ in BAD_INPUT])
def test_bad_input_is_one_message_and_exit_code_2(cli, tmp_path: Path, command: tuple[str, ...]) -> None:
    refused(among_bad_files(cli, tmp_path, command[0]), *command[1:])


@pytest.mark.parametrize(("command", "message"), OF_OTHERS, ids=[command for command, _ in OF_OTHERS])
def test_what_others_say_of_bad_input_is_one_message_and_exit_code_2(cli, tmp_path, command, message) -> None:
    result = among_bad_files(cli, tmp_path, command)
    assert (result.exit_code, message in result.stderr, "Traceback" in result.output) == (2, True, False), result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "--alhpa", "1"), "--alpha"),
        (("train", "--learning-rate", "1"), "--lr"),
        (("train", "--clients", "abc"), "--clients"),
        (("tarin",), "train"),
        (("plugins", "shw"), "show"),
        (("plugins", "list", "moon"), "moon"),
        (("plugins", "list", "--group"), "--group"),
        (("data", "list", "digits"), "digits"),
        (("data", "list", "--kind"), "--kind"),
    ],
)
def test_usage_errors_name_what_is_near(cli, arguments, message: str) -> None:
    result = cli(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_an_unknown_flag_gets_a_suggestion_among_the_flags_of_its_command(cli) -> None:
    assert "(Possible options: --lr)" in cli("train", "--learning-rate", 1).stderr
    told = cli("data", "list", "--dataset", "digits").stderr
    assert "No such option: --dataset. A new run has it: fedcore train --dataset" in told
    assert "Possible" not in told
    assert "ENGINE.OPTION=VALUE" in cli("train", "--engine-options", "x").stderr


def test_an_unknown_command_gets_one_suggestion(cli) -> None:
    for words, meant in ((["trai"], "train"), (["plugins", "chek"], "check")):
        told = cli(*words).stderr
        assert f"No such command '{words[-1]}'. Did you mean '{meant}'?" in told
        assert told.count("Did you mean") == 1


def test_markup_in_a_name_is_text(cli) -> None:
    result = cli("train", "--plugin", "[bold]x[/nope]\x1b[2J")
    assert result.exit_code == 2
    assert "[bold]x[/nope]" in result.stderr
    assert "\x1b" not in result.stderr


def test_debug_adds_the_traceback(cli) -> None:
    result = cli("train", "--plugin", "moonn", "--debug")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "error: unknown plugin 'moonn'" in result.stderr


def test_what_is_a_bug_says_so(cli, monkeypatch) -> None:
    monkeypatch.setattr("fedcore.runs.api.run", lambda config, **_: 1 / 0)
    result = cli("train")
    assert result.exit_code == 1
    assert result.stderr == (
        "internal error: ZeroDivisionError: division by zero; run again with --debug for the traceback\n"
    )
    assert "Traceback" in cli("train", "--debug").stderr


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (OSError(errno.EACCES, "Permission denied", "there"), 2, "error: there: Permission denied\n"),
        (OSError(errno.EIO, "Input/output error"), 2, "error: [Errno 5] Input/output error\n"),
        (OSError(errno.EBADF, "Bad file descriptor"), 1, "internal error: OSError: [Errno 9] Bad file descriptor; run"),
        (OSError("truncated"), 1, "internal error: OSError: truncated; run again with --debug for the traceback\n"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1, "internal error: BrokenPipeError: [Errno 32] Broken pipe; "),
    ],
    ids=["a path", "a device", "a closed file", "no number", "a pipe other than stdout"],
)
def test_a_refusal_of_the_system_is_told_from_a_bug(cli, monkeypatch, error: OSError, code: int, said: str) -> None:
    def run(config, **_):
        raise error

    monkeypatch.setattr("fedcore.runs.api.run", run)
    result = cli("train")
    assert result.exit_code == code
    assert result.stderr.startswith(said)


def test_ctrl_c_before_there_is_a_run(cli, monkeypatch) -> None:
    def run(config, **_):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedcore.runs.api.run", run)
    result = cli("train")
    assert (result.exit_code, result.stderr) == (130, "error: interrupted\n")


def test_ctrl_c_leaves_a_run_that_can_go_on(cli, monkeypatch, tmp_path: Path) -> None:
    def interrupt(federation, state, notify):
        if state.round == 1:
            raise KeyboardInterrupt
        return run_round(federation, state, notify)

    from fedcore.runs.training import run_round

    monkeypatch.setattr("fedcore.runs.training.run_round", interrupt)
    result = cli("train", *SMALL, "--rounds", 2, "--out", "stopped")
    assert result.exit_code == 130
    assert f"fedcore resume {tmp_path / 'stopped'}" in result.stderr
    assert result.stdout == ""
    monkeypatch.undo()
    assert cli("resume", tmp_path / "stopped", "--quiet").exit_code == 0
    assert len((tmp_path / "stopped" / "metrics.jsonl").read_text().splitlines()) == 2


RAISES = """
from fedcore import Plugin, hookimpl

class InRound0(Plugin):
    fails = 0

    @hookimpl
    def begin_local(self, client):
        if client.round == self.fails:
            raise KeyError("previous")

class InRound1(InRound0):
    fails = 1

class OnTheServer(Plugin):
    @hookimpl
    def server_step(self, server, mean):
        raise KeyError("previous")

class OnUpdates(Plugin):
    @hookimpl
    def weight(self, update):
        raise KeyError("previous")
"""


@pytest.mark.parametrize(
    ("plugin", "line", "rounds"),
    [("InRound0", 10, 0), ("InRound1", 10, 1), ("OnTheServer", 18, 0), ("OnUpdates", 23, 0)],
)
def test_a_plugin_that_raises_is_a_bug_that_is_told_once(
    cli, tmp_path: Path, monkeypatch, plugin: str, line: int, rounds: int
) -> None:
    (tmp_path / "raising.py").write_text(RAISES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    before = everything(tmp_path)
    result = cli("train", *SMALL, "--rounds", 2, "--plugin", f"module:raising.{plugin}")
    assert result.exit_code == 1
    assert result.stderr.count(f"raised KeyError: 'previous' (raising.py:{line})") == 1
    assert result.stderr.endswith("; run again with --debug for the traceback\n")
    assert result.stderr.count("fedcore resume") == rounds
    assert "good state" not in result.stderr
    if not rounds:
        assert everything(tmp_path) == before


def test_clients_that_cannot_go_on_are_no_bug(cli, tmp_path: Path) -> None:
    result = cli("train", *SMALL, "--system", "dropout=1", "--out", "broken")
    assert result.exit_code == 2
    assert "error: round 1" in result.stderr
    assert "resume" not in result.stderr
    assert not (tmp_path / "broken").exists()


@pytest.mark.parametrize("out", [(), ("--out", "deep/er/run"), ("--out", "empty")])
def test_an_engine_that_cannot_start_leaves_nothing(cli, tmp_path: Path, out) -> None:
    (tmp_path / "empty").mkdir()
    result = cli("train", *SMALL, "--engine", "module:os.getcwd", *out)
    assert result.exit_code == 2
    assert "error: engine 'module:os.getcwd' raised TypeError" in result.stderr
    assert "resume" not in result.stderr
    assert everything(tmp_path) == {str(tmp_path / "empty"): None}


def test_ctrl_c_in_the_first_round_leaves_nothing(cli, monkeypatch, tmp_path: Path) -> None:
    def interrupt(federation, state, notify):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedcore.runs.training.run_round", interrupt)
    result = cli("train", *SMALL, "--quiet")
    assert (result.exit_code, result.stderr) == (
        130,
        "stopped: interrupted before a round was finished; nothing is kept\n",
    )
    assert everything(tmp_path) == {}


def test_a_directory_that_is_taken(cli, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").write_text("x")
    result = cli("train", *SMALL, "--out", "taken")
    assert result.exit_code == 2
    assert "exists already" in result.stderr
    assert (tmp_path / "taken" / "mine").read_text() == "x"
