"""The benchmark of other simulators: what they are given, how they are run, what the table says; none is installed."""

import json
import os
import shutil
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from fedcore.models import build_model
from fedcore.runs.resolve import resolve_config, resolve_partition
from fedcore_bench.measure import Spread
from fedcore_bench.workloads import AGAINST_REFERENCE, PFL, W1, W2, Workload
from tests.sentences import raises

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
sys.path.append(str(PEERS))

import blazefl_cifar10  # noqa: E402
import environments  # noqa: E402
import export  # noqa: E402
import exported  # noqa: E402
import models  # noqa: E402
import processes  # noqa: E402
import run  # noqa: E402
import table  # noqa: E402

TINY = Workload(
    "tiny",
    {"dataset": "digits", "model": "mlp", "clients": 4, "participation": 0.5, "local_epochs": 1, "batch_size": 64,
     "partition": "dirichlet", "weight_decay": 0.0, "eval_every": 2},
)  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return folder, export.export(TINY, folder)


def test_clients_that_share_samples_are_exported(tmp_path):
    workload = AGAINST_REFERENCE["tiny"]
    written = export.export(workload, tmp_path)
    config, dataset = resolve_config(export.config_of(exported.Job(tmp_path, rounds=3, cores=1)))
    partition = resolve_partition(config, dataset)
    assert len(partition.train) == len(written.holds) == 1000
    assert {len(held) for held in partition.train} == {16}
    assert torch.equal(partition.train[999], written.holds[999])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workload", "W9"], "'W9'"),
        (["--peer", "flowr"], "'flowr'"),
        (["--rounds", "0"], "0 is not at least 1"),
        (["--blocks", "many"], "many"),
    ],
)
def test_mistakes_on_the_command_line_end_with_2(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        run.main(arguments)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_what_is_exported_comes_back(tiny):
    folder, written = tiny
    read = exported.Exported.load(folder)
    for name in ("images", "labels", "test_images", "test_labels"):
        assert torch.equal(getattr(read, name), getattr(written, name)), name
    assert [held.tolist() for held in read.holds] == [held.tolist() for held in written.holds]
    assert list(read.weights) == list(written.weights)
    assert all(torch.equal(read.weights[name], weight) for name, weight in written.weights.items())
    assert read.settings == written.settings


def test_fedcore_trains_what_was_exported(tiny):
    folder, written = tiny
    config, dataset = resolve_config(export.config_of(exported.Job(folder, rounds=3, cores=1)))
    partition = resolve_partition(config, dataset)
    everything = torch.arange(len(written.labels))
    assert torch.equal(dataset.train.gather(everything), written.images)
    assert [held.tolist() for held in partition.train] == [held.tolist() for held in written.holds]
    assert {name: getattr(config, name) for name in export.NEEDED} == {
        name: written.settings[name] for name in export.NEEDED
    }
    assert (config.rounds, config.workers) == (3, 1)


@pytest.mark.parametrize(
    ("workload", "shape"),
    [
        (W1, (1, 28, 28)),
        (W2, (3, 32, 32)),
        (AGAINST_REFERENCE["tiny"], (1, 8, 8)),
        (PFL, (3, 32, 32)),
        (blazefl_cifar10.BLAZEFL_CIFAR10, (3, 32, 32)),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_the_plain_network_is_fedcores(workload, shape):
    settings = {"projection": False, **workload.config}
    ours = build_model(settings["model"], num_classes=10, input_shape=shape, seed=3, projection=settings["projection"])[
        0
    ]
    plain = models.build(ours.state_dict())
    assert sum(p.numel() for p in plain.parameters()) == sum(p.numel() for p in ours.parameters())
    x = torch.randn(5, *shape)
    torch.testing.assert_close(plain.eval()(x), ours.eval()(x).logits)
    dropout = [[each.p for each in model.modules() if isinstance(each, torch.nn.Dropout)] for model in (plain, ours)]
    assert dropout[0] == dropout[1]
    with torch.no_grad():
        next(plain.parameters()).zero_()
    assert next(ours.parameters()).abs().sum() > 0  # copies, not views


def test_the_plain_loop_takes_sgds_step(monkeypatch, tmp_path):
    monkeypatch.setenv(f"{exported.STARTED}_FILE", str(tmp_path / "first"))
    exported.first_batch.cache_clear()
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    x, y = torch.randn(7, 1, 2, 2), torch.randint(3, (7,))
    held = torch.tensor([1, 4, 5])
    settings = {"lr": 0.1, "momentum": 0.9, "local_epochs": 1, "batch_size": 3}
    workload = exported.Exported(x, y, x, y, [torch.tensor([0]), held], {}, settings)
    F.cross_entropy(model(x[held]), y[held]).backward()
    expected = [(p - 0.1 * p.grad).detach() for p in model.parameters()]
    workload.train(model, 1)
    torch.testing.assert_close(list(model.parameters()), expected)
    assert float((tmp_path / "first").read_text()) <= time.monotonic()


def test_an_epoch_has_every_sample_once_and_the_short_batch_last(monkeypatch, tmp_path):
    monkeypatch.setenv(f"{exported.STARTED}_FILE", str(tmp_path / "first"))
    numbers = torch.arange(20)
    workload = exported.Exported(numbers.float(), numbers, numbers, numbers, [numbers[:7]], {}, {})
    batches = list(workload.client(0).batches(3))
    assert [len(y) for _, y in batches] == [3, 3, 1]
    assert sorted(torch.cat([y for _, y in batches]).tolist()) == list(range(7))
    assert all(x.tolist() == y.tolist() for x, y in batches)


def line(*seconds, accuracy=0.5):
    return json.dumps({"seconds": seconds, "start_up": 3.0, "accuracy": accuracy, "peak_rss_mib": 10.0})


def finished(side, block, *seconds, accuracy=0.5):
    found = table.parse(f"noise\n{line(*seconds, accuracy=accuracy)}\nnull\n{{}}", len(seconds))
    return table.Run("W1", side, block, **found, total=9.0, peak_mib=20.0)


@pytest.mark.parametrize(("sampled", "of_main", "most"), [(20.0, 10.0, 20.0), (20.0, 30.0, 30.0), (None, 10.0, 10.0)])
def test_a_peak_between_two_samples_counts(sampled, of_main, most):
    run = table.Run("W1", "flgo", 1, seconds=[1.0], peak_mib=sampled, peak_rss_mib=of_main)
    (row,) = table.rows([run])
    assert row.peak == most


def test_ratios_are_to_the_reference_of_the_same_block_without_the_warm_up():
    runs = [
        finished("reference", 1, 99, 1.0, 2.0, 3.0, 6.0),
        finished("pfl", 1, 99, 3.0, 2.0, 4.0, 3.0),
        table.Run("W1", "flgo", 1, error="exit 1: no"),
        finished("reference", 2, 99, 10.0, 10.0, 10.0),
        finished("pfl", 2, 99, 20.0, 20.0, 20.0),
    ]
    reference, pfl, flgo = table.rows(runs)
    assert reference.ratio == Spread(1.0, 1.0, 1.0)
    assert pfl.seconds == Spread(4.0, 2.0, 20.0)
    assert pfl.ratio == Spread(1.75, 1.5, 2.0)  # medians 3 to 2 and 20 to 10, without the last rounds
    assert pfl.mean_ratio == Spread(1.5, 1.0, 2.0)
    assert (pfl.start_up, pfl.total, pfl.accuracy, pfl.rounds) == (3.0, 9.0, 0.5, 7)
    assert (flgo.seconds, flgo.ratio, flgo.error) == (None, None, "exit 1: no")
    printed = table.markdown([reference, pfl, flgo]).splitlines()
    assert printed[3].startswith("| W1 | pfl | 4.00 (2.00-20.00) | 1.75 (1.50-2.00) | 1.50 (1.00-2.00) | 3.0 |")
    assert "failed: exit 1: no" in printed[4]
    assert len({text.count("|") for text in printed}) == 1
    content = json.loads(table.as_json([pfl], runs, {"cores": 2}))
    assert content["rows"][0]["ratio"]["median"] == 1.75
    assert [len(each["seconds"]) for each in content["runs"]] == [4, 4, 0, 3, 3]


def test_clients_of_a_number_of_steps(monkeypatch, tmp_path):
    """Whole batches from several passes, each in an order of its own, or from a part of one pass."""
    monkeypatch.setenv(f"{exported.STARTED}_FILE", str(tmp_path / "first"))
    numbers = torch.arange(40)
    holds = [numbers[:6], numbers[6:]]
    workload = exported.Exported(numbers.float(), numbers, numbers, numbers, holds, {}, {"local_steps": 5})
    few, many = ([y.tolist() for _, y in workload.client(client).batches(3)] for client in (0, 1))
    assert [len(batch) for batch in few + many] == [3] * 10
    assert [sorted(few[k] + few[k + 1]) for k in (0, 2)] == [list(range(6))] * 2
    assert len({y for batch in many for y in batch}) == 15


def test_without_a_reference_there_is_no_ratio():
    runs = [table.Run("W1", "reference", 1, error="stopped"), finished("pfl", 1, 9, 3.0)]
    assert table.rows(runs)[1].ratio is None
    assert table.rows(runs)[1].seconds == Spread(3.0, 3.0, 3.0)


def test_a_side_that_learns_something_else_is_remarked_upon():
    runs = [finished("reference", 1, 9, 9, 1.0), finished("pfl", 1, 9, 9, 1.0, accuracy=0.52)]
    assert table.strayed(table.rows(runs)) == []
    runs.append(finished("flgo", 1, 9, 9, 1.0, accuracy=0.1))
    assert table.strayed(table.rows(runs)) == ["W1 flgo: accuracy 0.100, the reference's 0.500"]


@pytest.mark.parametrize(("output", "named"), [("", ()), ("12\n[]\n{}", ()), (line(1, 2), ("2",))])
def test_an_output_without_the_asked_for_rounds_is_no_result(output, named):
    with raises(table.NoResult, *named):
        table.parse(output, 3)


def test_a_failing_peer_is_reported_and_does_not_stop_the_others(tmp_path, capsys):
    def side(name, code):
        return run.Side(name, None, lambda python, arguments, cores: [python, "-c", code, *arguments])

    good = f"import sys; assert sys.argv[2:] == ['--rounds', '2', '--cores', '2']; print({line(1, 2)!r})"
    sides = [
        (side("reference", good), sys.executable),
        (side("breaks", "import sys; sys.exit('no module named flower')"), sys.executable),
        (side("silent", "print('done')"), sys.executable),
        (side("hangs", "import time; time.sleep(60)"), sys.executable),
        (side("uninstalled", good), environments.EnvironmentFailed("pip: no such version")),
        (side("pfl", good.replace("2.0", "3.0").replace("2]", "3]")), sys.executable),
    ]
    runs = run.run_block("W1", 1, sides, run.Setting(tmp_path, rounds=1, cores=2, timeout=2))
    assert [each.error for each in runs] == [
        None, "exit 1: no module named flower", "it printed no result", "stopped after 2 s", "pip: no such version",
        None,
    ]  # fmt: skip
    assert [row.ratio.median for row in table.rows(runs) if row.ratio] == [1.0, 1.5]
    assert "W1 block 1 breaks: failed: exit 1" in capsys.readouterr().err
    others = ["reference", "breaks", "silent", "uninstalled", "pfl"]
    assert [side.name for side, _ in run.in_time(sides, runs)] == others  # a side that was stopped does not run again


def test_what_a_command_leaves_running_is_ended(tmp_path):
    if not Path("/proc/self/stat").exists():
        pytest.skip("no /proc")
    command = ["sh", "-c", "sleep 300 & echo $!; sleep 0.5"]
    output = tmp_path / "out"
    ended = processes.watched(
        command, log=tmp_path / "log", output=output, environment={"PATH": "/usr/bin:/bin"}, timeout=60,
        every=0.1, patience=0.2,
    )  # fmt: skip
    assert (ended.code, ended.timed_out) == (0, False)
    assert ended.seconds >= 0.5
    assert ended.peak_mib > 0
    assert not processes._alive(int(output.read_text()))


def test_an_environment_has_what_is_pinned_or_says_what_it_lacks(tmp_path):
    requirements = tmp_path / "some.txt"
    requirements.write_text(f"# two of ours\ntorch=={version('torch').split('+')[0]}\nPyYAML=={version('PyYAML')}\n")
    assert environments.missing(Path(sys.executable), requirements) == []
    requirements.write_text("torch==0.1\nno_such.thing==2\n")
    assert environments.missing(Path(sys.executable), requirements) == ["torch==0.1", "no-such-thing==2"]


def test_an_environment_that_does_not_run_is_an_error(tmp_path):
    python = tmp_path / "pfl" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho broken link >&2\nexit 3\n")
    python.chmod(0o755)
    with raises(environments.EnvironmentFailed):
        environments.python_of("pfl", tmp_path)


def test_a_peer_can_need_another_python(tmp_path, monkeypatch):
    monkeypatch.setitem(environments.PYTHONS, "blazefl", ("python9.8t", "python9.8"))
    with raises(environments.EnvironmentFailed, "python9.8t", "python9.8"):
        environments.python_of("blazefl", tmp_path)
    other = tmp_path / "python9.8"
    other.write_text("#!/bin/sh\necho was asked for $2 >&2\nexit 3\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(environments.EnvironmentFailed, match="exit 3: was asked for venv"):
        environments.python_of("blazefl", tmp_path)


def test_every_peer_has_pinned_requirements_and_a_runner():
    packages = {
        "flower": "flwr", "pfl": "pfl", "flgo": "flgo", "fedlab": "fedlab", "fluke": "fluke-fl", "blazefl": "blazefl",
    }  # fmt: skip
    assert {name: side.package for name, side in run.PEERS.items()} == packages
    for name, package in packages.items():
        pins = environments.pins(PEERS / "requirements" / f"{name}.txt")
        assert package in pins
        assert "torch" in pins
        script = next(word for word in run.PEERS[name].command("python", [], 2) if word.endswith(".py"))
        assert Path(script).is_file()


@pytest.mark.slow
def test_reference_and_fedcore_run_to_the_same_accuracy(tiny, tmp_path):
    folder, _ = tiny
    for file in (exported.FILE, export.PARTITION):
        shutil.copy(folder / file, tmp_path)
    sides = [(side, sys.executable) for side in run.OWN]
    runs = run.run_block("tiny", 1, sides, run.Setting(tmp_path, rounds=3, cores=1, timeout=120))
    assert [each.error for each in runs] == [None, None, None]
    reference, ours, _ = table.rows(runs)
    assert ours.rounds == reference.rounds == 3
    assert ours.accuracy == pytest.approx(reference.accuracy, abs=0.15)
    assert 0 < ours.start_up < ours.total
