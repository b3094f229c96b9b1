"""A client's own model after a run is the one that evaluation measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fedcore
from fedcore.base import registry
from fedcore.data import load_dataset, load_partition
from tests import support
from tests.sentences import raises, refused

PERSONAL = [
    "ditto",
    "fdcl",
    "fedala",
    "fedbabu",
    "fedper",
    "fedproto",
    "fedrep",
    "fedrod",
    "ifca",
    "lg-fedavg",
    "per-fedavg",
]


def trained(folder: Path, *plugins: object, **options: object) -> fedcore.RunResult:
    usual = {"rounds": 2, "participation": 0.5, "client_test_fraction": 0.3, "seed": 3}
    return support.run(folder, *plugins, **{**usual, **options})


def accuracy(model: torch.nn.Module, directory: Path, client: int) -> float:
    """Return the accuracy on the client's held-out part, in one plain loop."""
    dataset = load_dataset("digits", None)
    held_out = load_partition(directory / "partition.json", dataset).test[client]
    with torch.no_grad():
        _, logits = model(dataset.train.gather(held_out))
    return float((logits.argmax(dim=1) == dataset.train.labels[held_out]).double().mean())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("plugin", PERSONAL)
def test_it_is_the_model_that_was_evaluated(tmp_path: Path, plugin: str) -> None:
    result = trained(tmp_path, plugin)
    per_client = result.metrics["personal"]["per_client"]
    models = {client: fedcore.client_model(result.directory, int(client)) for client in per_client}
    found = {client: accuracy(model, result.directory, int(client)) for client, model in models.items()}
    assert found == pytest.approx(per_client, abs=1e-6)
    assert not any(model.training for model in models.values())


@pytest.fixture(scope="module")
def ditto(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("ditto"), "ditto", participation=0.25, rounds=1, samples=None)


def test_export_writes_it_with_a_card(cli, ditto, tmp_path: Path, monkeypatch) -> None:
    (client,) = support.committed(ditto).manifest
    own = fedcore.client_model(ditto.directory, client)
    for form, file in (("safetensors", "model.safetensors"), ("torch", "model.pt")):
        done = cli("export", ditto.directory, "--client", client, "--to", form, "--out", form)
        assert done.exit_code == 0, done.output
        assert "note" not in done.output
        read = load_file if form == "safetensors" else lambda path: torch.load(path, weights_only=True)
        weights = read(tmp_path / form / file)
        assert all(torch.equal(weights[name], tensor) for name, tensor in own.state_dict().items())
        assert any(not torch.equal(weights[name], tensor) for name, tensor in ditto.model.state_dict().items())
        card = (tmp_path / form / "README.md").read_text()
        assert f"Own model of client {client} of a federation of 4 clients" in card
        measured = ditto.metrics["personal"]["per_client"][str(client)]
        assert re.search(rf"\| its held-out part \| {100 * measured:.2f} \|", card), card
    x = load_dataset("digits", None).test.gather(torch.arange(5))
    monkeypatch.chdir(tmp_path / "torch")
    for lines in re.findall(r"```python\n(.*?)```", card, re.DOTALL):
        space = {"x": x}
        exec(lines, space)  # noqa: S102
        assert torch.allclose(space["logits"], own(x).logits, atol=1e-6)


def test_a_client_that_never_took_part_has_the_global_model(cli, ditto) -> None:
    absent = next(client for client in range(4) if client not in support.committed(ditto).manifest)
    own = fedcore.client_model(ditto.directory, absent).state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in ditto.model.state_dict().items())
    done = cli("export", ditto.directory, "--client", absent, "--to", "safetensors")
    assert done.exit_code == 0, done.output
    assert f"client {absent} took part in no round" in done.output
    card = Path(f"{ditto.directory.name}-client-{absent}-safetensors", "README.md").read_text()
    assert f"Model for client {absent}, which took part in no round, of a federation of 4 clients" in card


def test_what_there_is_not_is_refused(cli, ditto, tmp_path: Path) -> None:
    for directory, client, named in (
        (ditto.directory, 4, ("client 4", "0 to 3")),
        (ditto.directory, -1, ("client -1", "0 to 3")),
        (trained(tmp_path).directory, 0, ("global",)),
    ):
        refused(cli("export", directory, "--client", client, "--to", "torch"), *named)


def test_a_final_checkpoint_that_is_missing_is_told(cli, tmp_path: Path) -> None:
    """Another one is read then; a method's correction is only in the final one."""
    out = trained(tmp_path, "ditto", rounds=1).directory
    next((out / "checkpoint").glob("*-done.safetensors")).unlink()
    for words in (("evaluate", out), ("export", out, "--client", 0, "--to", "torch")):
        done = cli(*words)
        assert done.exit_code == 0, done.output
        assert "note: rounds recorded: 1; the last checkpoint is of round 1, before any correction" in done.stderr
    with pytest.warns(RuntimeWarning, match="the last checkpoint"):
        fedcore.client_model(out, 0)


def test_the_package_that_makes_the_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = trained(tmp_path, "ditto", rounds=1)
    installed = registry.available
    monkeypatch.setattr(registry, "available", lambda kind: {} if kind == "feature" else installed(kind))
    with raises(fedcore.ConfigError, "client_model", "fedcore-export"):
        fedcore.client_model(result.directory, 0)
