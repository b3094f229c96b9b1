"""A run that diverges: what it says, how it exits, and what its records call it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fedcore
from fedcore import Loss, Plugin, hookimpl
from fedcore.base.errors import DivergedError, RoundFailedError
from fedcore_testing import federate, model_bytes
from tests.sentences import raises

TINY = ("--clients", 2, "--rounds", 1, "--local-epochs", 1, "--batch-size", 256, "--workers", 0)


def test_divergence_has_an_exit_code_of_its_own_and_says_what_to_change(cli):
    result = cli("train", *TINY, "--lr", 1e30, "--out", "run")
    assert result.exit_code == 4
    said = " ".join(result.stderr.split())
    assert "loss 'task' became nan" in said
    assert "smaller --lr (1e+30 now) or bounded gradients, such as --clip-norm 10 (off now) or less --momentum" in said
    assert "resume" not in said, "the same options diverge again"
    assert cli("train", *TINY, "--lr", -1).exit_code == 2


def test_the_help_lists_the_exit_codes(cli):
    said = " ".join(cli("--help").stdout.split())
    assert "2 bad input or a run that cannot go on, 3 some runs of a sweep failed, 4 training diverged" in said


def test_the_hint_names_the_options_in_use(tmp_path):
    with pytest.raises(DivergedError) as failure:
        federate(tmp_path, lr=1e30, clip_norm=1e30, momentum=0.0)
    said = str(failure.value)
    assert "a smaller --lr (1e+30 now) or a smaller bound on gradients, --clip-norm (1e+30 now)." in said
    assert "--momentum" not in said


class Root(Plugin):
    """The distance from the start, whose gradient at the start is nan."""

    @hookimpl
    def local_loss(self, step):
        squares = [(p - w).square().sum() for p, w in zip(step.parameters, step.reference, strict=True)]
        return Loss(sum(squares).sqrt(), weight=0.1)


def test_a_term_that_is_no_number_in_the_first_round_is_named_with_what_finds_its_line(tmp_path):
    with raises(DivergedError, "--fast-dev-run"):
        federate(tmp_path, Root)
    with pytest.raises(RoundFailedError) as failure, pytest.warns(UserWarning, match="squares = "):
        fedcore.run(plugins=[Root], fast_dev_run=True, progress=False)
    assert "returned nan values" in str(failure.value)


class Spoils(Plugin):
    """Makes the updates of the first ``few`` clients nan, after training went well."""

    few = 3

    @hookimpl
    def pre_upload(self, client, update):
        if client.id < self.few:
            update.model["classifier.bias"] = torch.full_like(update.model["classifier.bias"], torch.nan)
        return update


class SpoilsTwo(Spoils):
    few = 2


class AlsoRaises(SpoilsTwo):
    @hookimpl
    def begin_local(self, client):
        if client.id == 2:
            raise ValueError("no power")


def test_an_update_that_is_not_finite_is_recorded_as_diverged(tmp_path):
    result = federate(tmp_path, SpoilsTwo, rounds=1)
    (line,) = (json.loads(text) for text in (result.directory / "metrics.jsonl").read_text().splitlines())
    assert [(failure["client"], failure["kind"]) for failure in line["failures"]] == [(0, "diverged"), (1, "diverged")]


@pytest.mark.parametrize(
    ("plugin", "needed", "error"),
    [
        (Spoils, 1, DivergedError),
        (SpoilsTwo, 2, DivergedError),
        (AlsoRaises, 1, DivergedError),  # with the two that diverged there would have been enough
        (AlsoRaises, 3, RoundFailedError),  # without divergence one would still be missing
    ],
)
def test_a_round_diverged_if_the_updates_that_are_not_finite_are_what_it_lacks(tmp_path, plugin, needed, error):
    with pytest.raises(RoundFailedError) as failure:
        federate(tmp_path, plugin, min_clients=needed)
    assert type(failure.value) is error
    assert ("Training diverged" in str(failure.value)) == (error is DivergedError)


class Poisons(Plugin):
    """In round 2 client 1 sends a model, or a payload that all get in round 3, of values that are finite."""

    sound = False

    @hookimpl
    def end_local(self, client):
        return {"x": torch.tensor(self.value(client, "payload"))}

    @hookimpl
    def pre_upload(self, client, update):
        for name, tensor in update.model.items():
            update.model[name] = tensor + self.value(client, "model")
        return update

    @hookimpl
    def accumulate(self, server, update):
        server.state["x"] = server.state.get("x", torch.tensor(0.0)) + update.payload["x"]

    @hookimpl
    def broadcast(self, server):
        return dict(server.state)

    @hookimpl
    def local_loss(self, step):
        return Loss(step.client.received["x"].square() * step.logits.square().mean()) if step.round else None

    def value(self, client, where):
        return 9e17 if (client.id, client.round, where) == (1, 1, self.where) and not Poisons.sound else 0.0


class PoisonsModel(Poisons):
    where = "model"


class PoisonsPayload(Poisons):
    where = "payload"


@pytest.mark.parametrize("plugin", [PoisonsModel, PoisonsPayload])
def test_an_update_that_makes_all_clients_diverge_is_named_with_the_way_back(tmp_path, monkeypatch, plugin):
    options = {"clients": 4, "rounds": 4, "workers": 0}
    out = tmp_path / "run"
    with pytest.raises(DivergedError) as failure:
        federate(tmp_path, plugin, **options, out=out)
    with pytest.raises(DivergedError) as again:  # also in a process that has not seen that round
        fedcore.resume(out, allow_code=True, progress=False)
    newest = out / "checkpoint" / "000002-0-train.safetensors"
    for error in (failure, again):
        said = str(error.value)
        assert "diverged right after round 2" in said
        assert "client 1 (up to 9.0e+17)" in said
        assert "smaller --lr" not in said
        assert "--plugin median" in said
        assert f"delete {newest} to go back to the checkpoint before it, then: fedcore resume {out}" in said
    monkeypatch.setattr(Poisons, "sound", True)
    newest.unlink()
    result = fedcore.resume(out, allow_code=True, progress=False)
    assert model_bytes(result) == model_bytes(federate(tmp_path, plugin, **options, out=tmp_path / "sound"))


def test_nothing_is_kept_when_the_first_round_diverges(tmp_path: Path):
    with pytest.raises(RoundFailedError):
        federate(tmp_path, Spoils, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
