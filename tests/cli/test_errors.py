from __future__ import annotations

import errno
import shlex
from pathlib import Path

import pytest

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
    ("train --plugin moonn", "unknown plugin 'moonn'. Did you mean 'moon'?"),
    ("train --plugin MOON", "unknown plugin 'MOON'. Did you mean 'moon'?"),
    ("train --model SimpleCNN", "Did you mean 'simple-cnn'?"),
    ("train --plugin moon,fedprox", "Write --plugin moon --plugin fedprox, in a file plugins: [moon, fedprox]"),
    ("train --plugin moon+uscc", "unknown plugin 'moon+uscc'. Write --plugin moon --plugin uscc"),
    ("train --plugin mybad.Bad", "unknown plugin 'mybad.Bad'. Did you mean 'module:mybad.Bad'?"),
    ("train --partition notes.txt", "unknown partitioner 'notes.txt'. Known: "),
    ("train --dataset ok.npz", "unknown dataset 'ok.npz'. Did you mean 'npz:ok.npz'?"),
    ("train --dataset t.csv", "unknown dataset 't.csv'. Did you mean 'hf:t.csv'?"),
    ("plugins check tensorboard", "'tensorboard' is the name of an installed tracker"),
    ("train --plugin module:os.getcwd", "plugin"),
    ("train --engine flower", "fedcore federate server"),
    ("train --engine locl", "Did you mean 'local'?"),
    ("train --engine module:nothing.here", "make sure the package is installed"),
    ("train --set local.workers=1", "engine"),
    ("train --dataset mnist --data-dir nowhere", "mnist: data files are missing"),
    ("train --dataset cifar10 --data-dir nowhere", "cifar10: data files are missing"),
    ("train --dataset digit", "unknown dataset 'digit'. Did you mean 'digits'?"),
    ("train --dataset npz:none.npz", "none.npz"),
    ("train --dataset npz:arrays.npz", "arrays.npz is not a usable .npz file"),
    ("train --dataset imagefolder:.", "is not a directory; expected train/"),
    ("train --dataset module:nothing.here", "make sure the package is installed"),
    ("train --dataset module:os.system", "dataset 'module:os.system' raised TypeError"),
    ("train --model simplecnn", "unknown model 'simplecnn'. Did you mean 'simple-cnn'?"),
    ("train --plugin fedopt", "The package fedcore-fedopt has: fedadagrad, fedadam, fedyogi"),
    ("train --dataset shapes", "Or domains:NAME, hf:NAME, imagefolder:NAME, npz:NAME"),
    ("train --model resnet18", "Did you mean 'resnet50'? Or hf:NAME, timm:NAME, torchvision:NAME"),
    ("train --model embedding-bag", "--model simple-cnn"),
    ("train --model module:os.getcwd", "model 'module:os.getcwd' returned str, expected a SplitModel"),
    ("train --tracker tensorboad", "Did you mean 'tensorboard'?"),
    ("train --tracker tensorboard --plugin tensorboard", "remove one of them"),
    ("train --partition none.json", "cannot read the partition file none.json"),
    ("train --partition split.json", "`fedcore data split --out` writes one"),
    ("train --partition module:os.getcwd", "partitioner 'module:os.getcwd' raised TypeError"),
    # train: options of plugins
    ("train --plugin moon --set moon.muu=1", "Did you mean 'mu'?"),
    ("train --plugin moon --set moon.mu=-1", "mu: input should be greater than or equal to 0"),
    ("train --plugin moon --set moon.mu=x", "mu: input should be a valid number"),
    ("train --plugin moon --set moon.mu=[1", "--set 'moon.mu=[1': the value is not valid YAML"),
    ("train --plugin moon --set moon.mu", "write plugin.option=value"),
    ("train --plugin moon --set mu=5", "--set mu=5: write --set moon.mu=5\n"),
    ("train --plugin moon --plugin fedprox --set mu=5", "write --set moon.mu=5 or --set fedprox.mu=5\n"),
    ("train --plugin moon --set xi=5", "write plugin.option=value"),
    ("train --set moon.mu=1", "To use it, add --plugin moon"),
    ("train --plugin moon --set mon.mu=1", "there is no plugin 'mon'. Did you mean 'moon'?"),
    ("train --set wibble.x=1", "there is no plugin 'wibble'. Known: attack, "),
    ("train --plugin fedala --set fedala.layers=1,4", "layers: input should be a list, such as [1,4] (given: '1,4')"),
    ("train --plugin lora --set lora.layers=base.*", "layers: input should be a list, such as [base.*] (given"),
    ("train --plugin moon --plugin moon", "plugin 'moon' is listed 2 times"),
    # train: numbers
    ("train --alpha -1", "--alpha: input should be greater than 0 (given: -1.0)"),
    ("train --lr nan", "--lr: input should be a finite number"),
    ("train --lr-decay 2", "--lr-decay: input should be less than or equal to 1"),
    ("train --momentum 1", "--momentum: input should be less than 1"),
    ("train --weight-decay -1", "--weight-decay: input should be greater than or equal to 0"),
    ("train --clip-norm 0", "--clip-norm: input should be greater than 0"),
    ("train --participation 1.5", "--participation: input should be less than or equal to 1"),
    ("train --participation 50", "less than or equal to 1 (given: 50.0)\n"),
    ("train --client-test-fraction 1", "--client-test-fraction: input should be less than 1"),
    ("train --rounds 0", "--rounds: input should be greater than or equal to 1"),
    ("train --local-epochs -1", "--local-epochs: input should be greater than or equal to 1"),
    ("train --batch-size 99999999999999999999", "--batch-size: input should be less than or equal to"),
    ("train --clients 99999999999", "--clients: input should be less than or equal to"),
    ("train --clients 5000", "5000 clients"),
    ("train --clients 2 --min-clients 3", "min_clients is 3"),
    ("train --samples 99999", "--samples is 99999, but there are 1437"),
    ("train --seed -1", "--seed: input should be greater than or equal to 0"),
    ("train --workers 100000", "--workers: input should be less than or equal to 1024"),
    ("train --buffers none", "--buffers: input should be 'global' or 'local'"),
    ("train --precision float16", "--precision: input should be 'float32'"),
    ("train --memory-format nchw", "--memory-format: input should be 'auto'"),
    ("train --device tpu", "tpu"),
    ("train --augment", "--augment: data set 'digits' has no augmentation; leave the flag out"),
    # train: files
    ("train --out notes.txt", "--out notes.txt exists already. Choose another directory"),
    ("train --config missing.yaml", "config file missing.yaml does not exist"),
    ("train --config list.yaml", "must be a mapping of option names to values"),
    ("train --config broken.yaml", "config file broken.yaml cannot be read"),
    ("train --config unknown.yaml", "unknown option 'alhpa'. Did you mean 'alpha'? (in unknown.yaml)"),
    ("train --config rate.yaml", "unknown option 'learning_rate'. Did you mean 'lr'? (in rate.yaml)"),
    ("train --config words.yaml", "words.yaml: --clients: input should be a valid integer"),
    ("train --config option.yaml", "mu: input should be a valid number"),
    ("train --config python.yaml", "config file python.yaml cannot be read"),
    ("train --config code.yaml", "code.yaml names 'module:os.system', which is code"),
    ("train --config arrays.npz", "arrays.npz must be a mapping"),
    (f"train --out {LONG}", "File name too long"),
    (f"train --dataset npz:{LONG}", "File name too long"),
    (f"train --dataset imagefolder:{LONG}", "File name too long"),
    (f"train --dataset mnist --data-dir {LONG}", "File name too long"),
    # resume and evaluate
    ("resume nowhere", "nowhere is not a run directory"),
    ("resume .", "it has no config.yaml. Name the folder that train printed"),
    ("resume notes.txt", "notes.txt is not a run directory"),
    ("evaluate nowhere", "nowhere is not a run directory"),
    # sweep
    ("sweep", "nothing to sweep: name a file"),
    ("sweep none.yaml", "config file none.yaml does not exist"),
    ("sweep .", "holds no sweep"),
    (f"sweep {LONG}", "File name too long"),
    ("sweep list.yaml", "must be a mapping"),
    ("sweep grid.yaml", "unknown grid axis 'nope'"),
    ("sweep flat.yaml", "write it under base, or under grid"),
    ("sweep twice.yaml", "alpha is an axis of the grid and an option of every run; give it once"),
    ("sweep grid-code.yaml", "add --allow-code"),
    ("sweep no-seeds.yaml", "0 seeds are no sweep"),
    ("sweep --grid alpha", "write AXIS=VALUE,VALUE"),
    ("sweep --grid alhpa=1", "Did you mean 'alpha'?"),
    ("sweep --grid seed=1", "write --seeds"),
    ("sweep --grid workers=1", "it does not change a run's results"),
    ("sweep --grid plugin=moonn", "Did you mean 'moon'?"),
    ("sweep --grid moon.mu=1", "no run of this sweep has the plugin 'moon'"),
    ("sweep --grid clients=0,2", "--clients: input should be greater than or equal to 1"),
    ("sweep --grid plugin=moon --seeds 0", "0 seeds are no sweep"),
    ("sweep --grid plugin=moon --seeds x", "write how many, or the seeds themselves"),
    ("sweep --grid plugin=moon --seeds=", "--seeds"),
    ("sweep --grid plugin=moon --seeds 99999999999", "are too many"),
    ("sweep --grid plugin=moon --seeds=-1,2", "--seed: input should be greater than or equal to 0"),
    ("sweep --grid plugin=moon --out notes.txt", "notes.txt: File exists"),
    # compare, report, reproduce
    ("compare nowhere", "nowhere does not exist. Name folders that train or sweep printed"),
    ("compare .", "is neither a run nor a sweep"),
    ("compare . --format html", "unknown format 'html'"),
    ("report nowhere", "nowhere does not exist"),
    ("report . --figure-format bmp", "bmp"),
    ("reproduce nope", "unknown method with recipes 'nope'"),
    ("reproduce --table 1", "of which method? Write fedcore reproduce METHOD --table 1"),
    ("reproduce fedcd --table 99", "unknown table of fedcd '99'"),
    ("reproduce fedcd --table 1 --scale big", "unknown scale 'big'"),
    ("reproduce fedcd --table 1 --format html", "unknown format 'html'"),
    # data
    ("data split --partition dirichlett", "Did you mean 'dirichlet'?"),
    ("data split --partition x.json", "name a partitioner instead"),
    ("data split --out x.txt", "must end with .json"),
    ("data split --out split.json", "replace it with --force"),
    ("data split --clients 0", "--clients: input should be greater than or equal to 1"),
    ("data plot nope.json", "cannot read the partition file nope.json"),
    ("data plot split.json", "lists of your own: fedcore.run(partition=[...])"),
    ("data plot split.json --partition iid", "name either split.json or --partition iid"),
    # plugins and bench
    ("train --plugin dp --plugin fedcd", "plugins 'dp' and 'fedcd' cannot be combined"),
    ("train --plugin dp --set dp.noise=1", "unknown dp option 'noise'"),
    ("train --plugin fedcd --set fedcd.W=mean", "The plugin fedcd-variants has it"),
    ("plugins show fedprx", "unknown plugin 'fedprx'. Did you mean 'fedprox'?"),
    ("plugins show module:os.getcwd", "getcwd"),
    ("plugins new Bad_Name", "Write 'bad-name'"),
    ("plugins new moon", "exists already; choose another name"),
    ("plugins new my-x --kind thing", "thing"),
    ("plugins new my-x --into notes.txt", "cannot be written"),
    ("plugins check nope", "unknown plugin 'nope'"),
    ("plugins check moon --only nothing", "nothing"),
    ("bench --workload W9", "unknown workload 'W9'"),
    ("bench --workload W1 --precision float16", "--precision"),
]


def everything(folder: Path) -> dict[str, bytes | None]:
    """Return all that there is in a folder."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize(("command", "message"), BAD_INPUT, ids=[command for command, _ in BAD_INPUT])
def test_bad_input_is_one_message_and_exit_code_2(cli, tmp_path: Path, command: str, message: str) -> None:
    for name, content in BAD_FILES.items():
        (tmp_path / name).write_text(content)
    before = everything(tmp_path)
    result = cli(*shlex.split(command))
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert everything(tmp_path) == before


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
    ],
    ids=["a path", "a device", "a closed file", "no number"],
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
