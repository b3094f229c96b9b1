"""Plugins that report figures, that refuse a run, and that guard what goes up."""

from __future__ import annotations

import inspect
import json
import textwrap
from dataclasses import replace

import pytest
import torch

import fedcore
from fedcore import Plugin, hookimpl, question
from fedcore.base.errors import ConfigError, PluginConflictError, PluginContractError
from fedcore.data import load_dataset
from fedcore.hooks.checks import HOOKS
from fedcore.runs.api import resume
from fedcore.runs.directory import RunDirectory
from fedcore.runs.training import Interrupted
from fedcore_console.summary import report_line
from fedcore_trackers.scalars import round_scalars
from tests import support
from tests.sentences import raises
from tests.support import lines, model_bytes, weights


class Counts(Plugin):
    """Reports a figure of its state and the round."""

    @hookimpl
    def accumulate(self, server, update):
        server.state["updates"] = server.state.get("updates", 0) + 1

    @hookimpl
    def report(self, server):
        return {"updates": server.state["updates"], "mean": server.state["updates"] / (server.round + 1), "none": None}


EXPECTED = [{"updates": 2 * (n + 1), "mean": 2.0, "none": None} for n in range(3)]


def test_what_is_reported_stands_in_every_record_and_in_the_summary(toy):
    result = toy(Counts, rounds=3)
    assert [line["reports"] for line in lines(result)] == [{"counts": figures} for figures in EXPECTED]
    summary = json.loads((result.directory / "summary.json").read_text())
    assert summary["reports"] == result.summary["reports"] == {"counts": EXPECTED[-1]}


def test_a_resumed_run_reports_the_same(toy, tmp_path):
    def stop(event, details):
        if event == "round" and details["round"] == 1:
            raise KeyboardInterrupt

    whole = toy(Counts, rounds=3)
    with pytest.raises(Interrupted):
        support.run_toy(tmp_path, Counts, rounds=3, out=tmp_path / "stopped", notify=stop)
    resumed = resume(tmp_path / "stopped", allow_code=True)
    assert lines(resumed) == lines(whole)
    assert resumed.summary["reports"] == whole.summary["reports"]


def test_the_example_of_the_hooks_description_reports_on_the_new_model(go):
    code = inspect.getdoc(HOOKS["report"]).partition("::\n\n")[2].partition("\n\n")[0]
    named = {"torch": torch, "hookimpl": hookimpl}
    exec(textwrap.dedent(code), named)  # noqa: S102 - our own
    result = go(type("Example", (Plugin,), {"report": named["report"]}), public="digits", rounds=2)
    digits = load_dataset("digits").train
    with torch.no_grad():
        right = result.model(digits.gather(torch.arange(len(digits)))).logits.argmax(dim=1) == digits.labels
    assert result.summary["reports"] == {"example": {"public_accuracy": pytest.approx(float(right.float().mean()))}}


def test_a_run_without_reports_has_no_such_entry(toy):
    result = toy()
    assert all("reports" not in line for line in lines(result))
    assert "reports" not in result.summary


@pytest.mark.parametrize("value", [{"x": torch.ones(1)}, [1], "text"], ids=str)
def test_a_report_that_is_no_json_stops_the_run_with_its_name(toy, value):
    class Broken(Plugin):
        @hookimpl
        def report(self):
            return value

    with raises(PluginContractError, "'broken'"):
        toy(Broken)


def test_trackers_and_the_terminal_show_it(toy):
    result = toy(Counts, rounds=1)
    (record,) = RunDirectory(result.directory).metrics.read()
    shown = {name: value for name, value in round_scalars(record).items() if name.startswith("report/")}
    assert shown == {"report/counts/updates": 2.0, "report/counts/mean": 2.0}
    assert report_line("counts", {"each": [1, 3]}) is None
    assert report_line("counts\x1b", {"mean": 1 / 3, "n": 2, "each": [1, 3]}).plain == "counts�: mean 0.3333, n 2"


# --- refusing a run ----------------------------------------------------------------------------------------------


class Choosy(Plugin):
    """Wants full participation, no buffers and nobody who answers."""

    @hookimpl
    def check_run(self, setup):
        others = [plugin.name for plugin in setup.plugins if plugin.questions]
        if others:
            raise PluginConflictError(f"plugins 'choosy' and {others[0]!r} cannot be combined: it answers")
        if setup.config.participation < 1 or setup.layout.buffers & set(setup.layout.shared):
            raise ConfigError("choosy: everybody has to take part, and buffers stay where they are")


class Answers(Plugin):
    @question
    def anything(self, client):
        return {}


@pytest.mark.parametrize(
    ("others", "options", "named"),
    [
        ((), {"participation": 0.5}, ()),
        ((), {"model": "module:tests.toy.batch_norm_mlp", "dataset": "digits", "partition": "iid"}, ()),
        ((Answers,), {}, ("'choosy'", "'answers'")),
    ],
)
def test_a_refused_run_writes_nothing(tmp_path, others, options, named):
    out = tmp_path / "run"
    with raises(ConfigError, *named):
        support.run(tmp_path, Choosy, *others, out=out, **{**support.TOY, **options})
    assert not out.exists()


def test_what_fits_runs(toy):
    assert model_bytes(toy(Choosy)) == model_bytes(toy())


# --- guarding what goes up ---------------------------------------------------------------------------------------

SEEN: list = []


class Sends(Plugin):
    @hookimpl
    def end_local(self, client):
        return {"x": torch.full((2,), 1.0 + client.id)}

    @hookimpl
    def pre_upload(self, client, update):
        return replace(update, payload={**update.payload, "late": torch.ones(1)})

    @hookimpl
    def accumulate(self, server, update):
        SEEN.append((update.client, {name: tensor.tolist() for name, tensor in update.payload.items()}))


class Guard(Plugin):
    """Halves everything that goes up."""

    @hookimpl
    def end_local(self, client):
        return {"own": torch.tensor(8.0)}

    @hookimpl
    def guard_upload(self, client, update):
        halves = {plugin: {name: t / 2 for name, t in tensors.items()} for plugin, tensors in update.payload.items()}
        return replace(update, model={name: t / 2 for name, t in update.model.items()}, payload=halves)

    @hookimpl
    def accumulate(self, server, update):
        SEEN.append(("own", update.payload["own"].tolist()))


@pytest.mark.parametrize("order", [1, -1])
def test_a_guard_is_last_and_changes_all_that_goes_up(tmp_path, order):
    SEEN.clear()
    result = support.run_toy(tmp_path, *[Sends, Guard][::order])
    sent = {client: payload for client, payload in SEEN if client != "own"}
    assert sent == {k: {"x": [(1.0 + k) / 2] * 2, "late": [0.5]} for k in (0, 1)}
    assert [what for who, what in SEEN if who == "own"] == [4.0, 4.0]
    plain = weights(support.run_toy(tmp_path))
    assert {name: (tensor * 2).tolist() for name, tensor in weights(result).items()} == {
        name: tensor.tolist() for name, tensor in plain.items()
    }


def test_a_guard_that_only_looks_changes_nothing(toy):
    class Looks(Plugin):
        @hookimpl
        def guard_upload(self, client, update):
            assert set(update.payload) >= {"sends"}

    assert model_bytes(toy(Sends, Looks)) == model_bytes(toy(Sends))


def test_there_is_one_guard():
    class Other(Guard):
        pass

    names = {support.name_of(Guard): {}, support.name_of(Other): {}}
    with raises(PluginConflictError, "'guard'", "'other'", "guard_upload"):
        fedcore.hooks.plugins.PluginSet.create(names)
