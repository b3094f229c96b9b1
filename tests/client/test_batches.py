"""Batches that are no image tensors: the same run in any process, and models that do not fit them refused."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fedcore
from fedcore.base.errors import ConfigError
from fedcore.cli.app import app
from fedcore.client.messages import ClientSite
from fedcore.data import Dataset
from fedcore.runs.resolve import resolve_config, resolve_partition
from fedcore_workers import pack_site, unpack_site
from fedcore_zoo import SequenceSamples
from tests import support
from tests.sentences import raises

WORDS = {"dataset": "module:tests.client.test_batches.words", "model": "auto", "clients": 3, "lr": 0.5}
VOCABULARY = 30


def words(data_dir=None):
    """Sequences of 0 to 11 tokens, of which a third tell the class."""
    stream = torch.Generator().manual_seed(0)

    def samples(n):
        labels = torch.arange(n) % 3
        lengths = torch.randint(0, 12, (n,), generator=stream)
        texts = []
        for label, length in zip(labels.tolist(), lengths.tolist()):
            noise = torch.randint(0, VOCABULARY, (length,), generator=stream)
            own = torch.rand(length, generator=stream) < 0.3
            texts.append(torch.where(own, label, noise).tolist())
        return SequenceSamples.of(texts, labels.tolist())

    return Dataset("words", samples(150), samples(60), 3, (VOCABULARY,), model="embedding-bag")


class Unmapped(SequenceSamples):
    """Samples that pretend to come from a script, which no worker can import."""


Unmapped.__module__ = "__main__"


def from_a_script(data_dir=None):
    dataset = words()
    train, test = (Unmapped(**part.tensors()) for part in (dataset.train, dataset.test))
    return Dataset("words", train, test, 3, (VOCABULARY,), model="embedding-bag")


def spec(tmp_path, **options):
    config, dataset = resolve_config(support.config(tmp_path, **{**WORDS, **options}))
    return ClientSite(config, dataset, resolve_partition(config, dataset), tmp_path)


@pytest.mark.parametrize(
    "plugins", [("moon", "fedprox"), pytest.param(("fedcd",), marks=pytest.mark.slow)], ids="+".join
)
def test_sequences_give_the_same_bits_for_any_number_of_workers(go, plugins):
    here = go(*plugins, **WORDS, rounds=2, local_epochs=2)
    there = go(*plugins, **WORDS, rounds=2, local_epochs=2, workers=2)
    assert support.model_bytes(here) == support.model_bytes(there)


def test_sequences_are_learned(go):
    result = go(**WORDS, rounds=8, local_epochs=5, batch_size=16)
    assert result.metrics["global"]["accuracy"] > 0.6  # chance is a third


def test_the_pages_model_of_sequences_trains(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "your-data.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(class MeanOfTokens.*?)^```$", page, re.MULTILINE | re.DOTALL)
    space = {"nn": nn, "__name__": __name__}
    exec(block, space)  # noqa: S102 - our own page
    out = tmp_path / "run"
    result = fedcore.run(dataset=words(), model=space["MeanOfTokens"], clients=3, rounds=1, workers=0, out=out)
    assert result.model.state_dict()["classifier.weight"].shape == (3, 32)


def test_workers_map_the_samples(tmp_path):
    packed = pack_site(spec(tmp_path))
    again = unpack_site(packed).dataset
    assert (again.kind, again.input_shape, again.num_classes) == ("sequences", (VOCABULARY,), 3)
    assert any(again.train.values is tensor for tensor in packed.values())
    assert packed["site"].nbytes < again.train.values.nbytes + 8_000


def test_samples_of_a_class_that_workers_cannot_import_are_mapped_too(go):
    dataset = "module:tests.client.test_batches.from_a_script"
    here, there = (go(**{**WORDS, "dataset": dataset}, workers=workers) for workers in (0, 1))
    assert support.model_bytes(here) == support.model_bytes(there)


def test_the_table_trains_from_the_command_line(tmp_path):
    arguments = ["train", "--dataset", "breast-cancer", "--model", "mlp", "--plugin", "fdcl", "--rounds", "3"]
    result = CliRunner().invoke(app, [*arguments, "--workers", "0", "--out", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    from fedcore.runs.directory import RunDirectory

    summary = RunDirectory(tmp_path / "run").read_summary()
    assert summary["metrics"]["global"]["accuracy"] > 0.8  # always saying "benign" gives 0.63


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"model": "mlp"}, ("'mlp'", "'module:tests.client.test_batches.words'", "--model embedding-bag")),
        (
            {"dataset": "digits", "model": "embedding-bag"},
            ("'embedding-bag'", "'digits'", "--model mlp, --model alexnet, "),
        ),
        ({"augment": True}, ("augment",)),
        ({"dataset": "breast-cancer", "model": "simple-cnn"}, ("'simple-cnn'", "--model mlp")),
    ],
    ids=["mlp", "digits", "augment", "table"],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path, go, options, named):
    with pytest.raises(ConfigError) as refused:  # its sentence lists the models that are installed
        go(**{**WORDS, **options}, out=tmp_path / "run")
    assert all(word in str(refused.value) for word in named)
    assert not (tmp_path / "run").exists()


def strange(data_dir=None):
    class Curves(SequenceSamples):
        kind = "curves"

    dataset = words()
    return Dataset("curves", *(Curves(**part.tensors()) for part in (dataset.train, dataset.test)), 3, (1,))


def test_a_kind_of_batch_that_no_model_takes_is_said_so(go):
    with raises(ConfigError, "curves", "takes = ('curves',)"):
        go(dataset="module:tests.client.test_batches.strange", model="auto")
