"""What belongs together in a run directory is told apart from what does not, by name; what may change is an option."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner, Result

import fedcore
from fedcore.cli.app import app
from fedcore.data import Dataset, TensorSamples, load_dataset
from fedcore.data.dataset import data_digest
from fedcore.runs.api import started
from fedcore.runs.directory import RunDirectory
from fedcore.runs.saved import SavedConfig
from fedcore.runs.training import Experiment
from tests.reliability import damages, kills
from tests.sentences import refused

COMMANDS = ("resume", "evaluate")


def cli(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def said(result: Result) -> str:
    return " ".join(result.stderr.split())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> damages.Made:
    return damages.make(tmp_path_factory.mktemp("bound"), "stateful", finished=False)


@pytest.fixture
def out(made: damages.Made, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made.path, tmp_path / "run"))


def edit(out: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = out / "config.yaml"
    content = yaml.safe_load(file.read_text())
    change(content)
    file.write_text(yaml.safe_dump(content, sort_keys=False))


@pytest.mark.parametrize("digest", [False, True], ids=["by hand", "with its digest"])
@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"seed": 5}, ("seed is 5", 0)),
        ({"plugins": {"moon": {}}}, ("plugins is {'moon'",)),
        ({"rounds": 9}, ("rounds is 9", 3)),
        ({"partition": "shards"}, ("partition is 'shards'", "'iid'")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_changed_option_is_named(out: Path, values: dict[str, Any], named: tuple[object, ...], digest: bool) -> None:
    if digest:
        if "rounds" in values:
            pytest.skip("more rounds are no other run")
        saved = SavedConfig.read(out / "config.yaml")
        replace(saved, values={**saved.values, **values}).write(out / "config.yaml")
    else:
        edit(out, lambda content: content.update(values))
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for command in COMMANDS:
        refused(cli(command, out), *named)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_options_without_an_effect_may_change(out: Path, made: damages.Made) -> None:
    edit(out, lambda content: content.update(workers=1, checkpoint_every=2))
    assert cli("resume", out, "--quiet").exit_code == 0
    assert kills.differences(damages.left(out), made.whole) == []


def test_another_partition_is_named_before_there_is_a_checkpoint(out: Path, made: damages.Made) -> None:
    shutil.rmtree(out / "checkpoint")
    shutil.copy(made.other / "partition.json", out / "partition.json")
    for command in ("resume", "compare", "report"):
        result = cli(command, out)
        assert (result.exit_code, "partition.json" in said(result)) == (2, True), result.output


def test_other_data_are_named(tmp_path: Path) -> None:
    config = damages.configured(tmp_path, "stateless", out=tmp_path / "run")
    out = fedcore.run(config).directory
    arrays = dict(np.load(tmp_path / "data.npz"))
    arrays["x_test"][7, 3, 3] ^= 1
    np.savez(tmp_path / "data.npz", **arrays)
    for command in COMMANDS:
        result = cli(command, out)
        assert (result.exit_code, "the data set's content changed since the run was begun" in said(result)) == (2, True)


def test_the_digest_of_data_sees_one_bit_a_swap_and_a_class() -> None:
    def digest(rows: torch.Tensor, labels: torch.Tensor, classes: int = 2) -> str:
        samples = TensorSamples(rows, labels)
        return data_digest(Dataset("any", samples, samples, classes, (300,)))

    rows, labels = torch.arange(60_000.0).view(200, 300), torch.arange(200) % 2
    flipped, swapped, other = rows.clone(), rows[torch.arange(200).roll(1)], labels.clone()
    flipped.view(torch.int32)[117, 41] ^= 1
    other[3] ^= 1
    neighbours, columns = torch.arange(200), torch.arange(300)
    neighbours[6:8], columns[6:8] = neighbours[[7, 6]], columns[[7, 6]]
    found = [digest(rows, labels), digest(flipped, labels), digest(swapped, labels), digest(rows, other)]
    found += [digest(rows, labels, 3), digest(rows, labels[neighbours]), digest(rows[:, columns], labels)]
    small = rows[:, :10].contiguous()  # hundred of them in a block
    found += [digest(small, labels), digest(small[neighbours], labels), digest(small[neighbours], labels[neighbours])]
    assert len(set(found)) == len(found)
    assert digest(rows.clone(), labels.clone()) == found[0]


def test_the_digest_of_data_is_that_of_the_content_and_not_of_the_name() -> None:
    dataset = load_dataset("digits")
    assert data_digest(dataset) == data_digest(load_dataset("digits"))


def test_a_configuration_cut_before_its_digests_is_refused(out: Path) -> None:
    file = out / "config.yaml"
    whole, found, _ = file.read_text().partition("\ndigests:")
    assert found
    file.write_text(whole)
    for command in ("resume", "evaluate", "compare"):
        result = cli(command, out)
        assert (result.exit_code, "`digests` is incomplete" in said(result)) == (2, True), result.output


def test_more_rounds_are_an_option_and_recorded(out: Path, tmp_path: Path) -> None:
    """To the bits of a run of so many; also from a finished run, and after a stop amid the new rounds."""
    whole = fedcore.run(damages.configured(tmp_path, "stateful", rounds=5, out=tmp_path / "five"))
    assert cli("resume", out, "--quiet").exit_code == 0
    result = cli("resume", out, "--rounds", 2)
    assert (result.exit_code, "has had 3 rounds already" in said(result)) == (2, True)
    assert cli("resume", out, "--rounds", 4, "--quiet").exit_code == 0
    assert cli("resume", out, "--rounds", 5, "--quiet").exit_code == 0
    ours, theirs = damages.left(out), damages.left(whole.directory)
    assert not {"model", "checkpoint", "server", "manifest"} & set(kills.differences(ours, theirs))
    saved = SavedConfig.read(out / "config.yaml")
    assert [(entry["round"], entry["rounds"]) for entry in saved.history] == [(3, [3, 4]), (4, [4, 5])]
    assert cli("evaluate", out).exit_code == 0
    assert cli("compare", out).exit_code == 0
    assert len(RunDirectory(out).metrics.read()) == 5


def test_an_option_that_keeps_its_value_is_no_change(out: Path) -> None:
    before = SavedConfig.read(out / "config.yaml")
    assert cli("resume", out, "--workers", 0, "--rounds", 4, "--quiet").exit_code == 0
    assert [{*entry} for entry in SavedConfig.read(out / "config.yaml").history] == [{"round", "rounds"}]
    assert before.values["workers"] == 0


def test_a_change_that_was_stopped_before_its_first_checkpoint_goes_on(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """config.yaml has the new number of rounds, the checkpoints still have the old one."""

    def stop(*_: object) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(Experiment, "train", stop)
        with pytest.raises(RuntimeError):
            fedcore.resume(out, changes={"rounds": 4})
    assert SavedConfig.read(out / "config.yaml").values["rounds"] == 4
    assert fedcore.resume(out).summary["rounds"] == 4


def test_going_on_elsewhere_leaves_the_first_directory_alone(out: Path, made: damages.Made, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    result = cli("resume", out, "--out", tmp_path / "copy", "--quiet")
    assert result.exit_code == 0, result.output
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert kills.differences(damages.left(tmp_path / "copy"), made.whole) == []
    assert SavedConfig.read(tmp_path / "copy" / "config.yaml").history[0]["out"][0] == str(out)
    result = cli("resume", out, "--out", tmp_path / "copy")
    assert (result.exit_code, "exists already" in said(result)) == (2, True)


def test_training_does_not_need_the_lines_that_were_edited(tmp_path: Path) -> None:
    """But lines of another length are refused: nobody can say which of them belong to the checkpoint."""
    config = damages.configured(tmp_path, "stateless", rounds=5, out=tmp_path / "run")
    with started(config) as (experiment, state):
        for _ in range(4):
            state = experiment.one_round(state)
    file = tmp_path / "run" / "metrics.jsonl"
    first, *rest = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first.replace(b'"round": 0', b'"round": 10') + b"".join(rest))
    result = cli("resume", config.out, "--quiet")
    assert (result.exit_code, "metrics.jsonl was changed: no line of it ends" in said(result)) == (2, True)
    file.write_bytes(first.replace(b'"round": 0', b'"round": 1') + b"".join(rest))
    assert cli("resume", config.out, "--quiet").exit_code == 0
    lines = file.read_bytes().splitlines(keepends=True)
    assert lines[1:4] == rest
    assert [record["round"] for record in RunDirectory(tmp_path / "run").metrics.read()] == [1, 1, 2, 3, 4]
