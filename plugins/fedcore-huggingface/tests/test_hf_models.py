"""Small classifiers of transformers with fresh or saved weights: split, and trained by a federation."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

import fedcore
from fedcore import ConfigError, RunConfig
from fedcore.data import load_dataset
from fedcore.models import build_model
from fedcore_huggingface import dataset, model
from fedcore_huggingface.models import padded
from fedcore_testing import check_model
from fedcore_zoo import SequenceSamples
from tests.sentences import raises

from .conftest import WORDS, Later

Later("datasets")
transformers = Later("transformers")

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def sequence_configs() -> dict[str, object]:
    made = {"vocab_size": len(WORDS), **SMALL, "pad_token_id": 0, "max_position_embeddings": 64}
    small = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16}
    return {
        "bert": transformers.BertConfig(**made),
        "roberta": transformers.RobertaConfig(**made),
        "distilbert": transformers.DistilBertConfig(vocab_size=len(WORDS), **small, max_position_embeddings=64),
        "gpt2": transformers.GPT2Config(vocab_size=len(WORDS), n_embd=16, n_layer=1, n_head=2, n_positions=64),
    }


def vit() -> object:
    return transformers.ViTConfig(**SMALL, image_size=8, patch_size=4)


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "gpt2"])
def test_sequence_classifiers_keep_the_contract(tmp_path: Path, text_set: str, kind: str) -> None:
    """Among it: in eval mode a text's logits do not depend on the longer ones of its batch, which fill it up."""
    sequence_configs()[kind].save_pretrained(str(tmp_path))
    samples = dataset(text_set)().train
    factory = model(str(tmp_path))
    assert factory.takes == ("sequences", "tokens")
    check_model(split(tmp_path), num_classes=2, input_shape=(len(WORDS),), samples=samples)


def test_the_last_token_of_a_text_counts_if_it_is_number_0(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=9, eos_token_id=8, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    config.save_pretrained(str(tmp_path))
    factory = model(str(tmp_path))
    network = factory(2, (9,)).eval()
    texts = SequenceSamples.of([[3, 4], [3, 4, 0]], [0, 1])
    features, _ = network(texts.gather(torch.arange(2)))
    assert not torch.allclose(features[0], features[1])


def split(folder: Path):
    def factory(num_classes, input_shape):
        options = {"num_classes": num_classes, "input_shape": input_shape, "seed": 0, "projection": False}
        return build_model(f"hf:{folder}", **options)[0]

    return factory


def test_image_classifiers_keep_the_contract(tmp_path: Path) -> None:
    vit().save_pretrained(str(tmp_path))
    check_model(split(tmp_path), num_classes=3, input_shape=(3, 8, 8))
    check_model(split(tmp_path), num_classes=3, input_shape=(1, 12, 12))  # another size than in the folder


def test_saved_weights_are_those_of_the_encoder(tmp_path: Path, text_set: str) -> None:
    torch.manual_seed(3)
    network = transformers.BertForSequenceClassification(sequence_configs()["bert"]).eval()
    network.save_pretrained(str(tmp_path))
    made = split(tmp_path)(5, (len(WORDS),)).eval()
    assert made.classifier.weight.shape == (5, 16)  # of two classes there
    tokens = torch.tensor([[2, 4, 6, 3], [2, 5, 3, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    expected = network.bert(input_ids=tokens, attention_mask=mask).pooler_output
    batch = dataset(text_set)().train.gather(torch.tensor([0, 1]))
    torch.testing.assert_close(made(batch).features, expected)


def test_what_cannot_be_built_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    transformers.ViTMAEConfig(**SMALL).save_pretrained(str(tmp_path / "other"))
    vit().save_pretrained(str(tmp_path / "vit"))
    transformers.ViTForImageClassification(vit()).save_pretrained(str(tmp_path / "trained"))
    for folder, shape, named in (
        ("none", (3, 8, 8), (tmp_path / "none",)),
        ("other", (3, 8, 8), ("'vit_mae'",)),
        ("vit", (30,), ("(30,)",)),
        ("trained", (3, 12, 12), ("image_size 8", 12)),
    ):
        with raises(ConfigError, *named):
            split(tmp_path / folder)(2, shape)
    with pytest.raises(ConfigError, match=r"holds no config\.json of transformers"):  # the rest is their own
        split(tmp_path / "empty")(2, (3, 8, 8))
    (tmp_path / "trained" / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match="cannot be used"):
        split(tmp_path / "trained")(2, (3, 8, 8))


def test_a_federation_trains_texts_by_writer_and_images(tmp_path: Path, text_set: str, image_set: str) -> None:
    sequence_configs()["bert"].save_pretrained(str(tmp_path / "bert"))
    vit().save_pretrained(str(tmp_path / "vit"))
    common = {"rounds": 1, "local_epochs": 1, "workers": 0, "lr": 0.1, "batch_size": 8, "plugins": ["fedprox"]}
    by_writer = {"partition": "natural", "clients": 5, "client_test_fraction": 0.2}
    text = {"dataset": f"hf:{text_set}", "model": f"hf:{tmp_path / 'bert'}", **by_writer}
    found = fedcore.run(RunConfig(**common, **text, out=tmp_path / "text"))
    assert found.metrics["global_local"]["clients"] == 5
    before = split(tmp_path / "bert")(2, (len(WORDS),)).state_dict()
    assert any(not torch.equal(before[name], tensor) for name, tensor in found.model.state_dict().items())
    bag = fedcore.run(RunConfig(**common, dataset=f"hf:{text_set}", clients=2, out=tmp_path / "bag"))
    assert "embedding-bag" in (bag.directory / "config.yaml").read_text()
    images = {"dataset": f"hf:{image_set}", "model": f"hf:{tmp_path / 'vit'}", "clients": 2}
    assert fedcore.run(RunConfig(**common, **images, out=tmp_path / "image")).metrics["global"]["samples"] == 8


def test_the_prefixes_are_installed() -> None:
    points = [point for kind in ("dataset", "model") for point in entry_points(group=f"fedcore.{kind}_prefixes")]
    found = {point.group: point.value for point in points if point.name == "hf"}
    assert found == {
        "fedcore.dataset_prefixes": "fedcore_huggingface:dataset",
        "fedcore.model_prefixes": "fedcore_huggingface:model",
    }


@pytest.mark.parametrize("kind", ["bert", "gpt2", "vit"])
def test_transformers_loads_what_export_writes(tmp_path: Path, text_set: str, image_set: str, kind: str) -> None:
    """``from_pretrained`` makes the same logits from the folder, with the classes' names."""
    from fedcore_export import export_run

    config = vit() if kind == "vit" else sequence_configs()[kind]
    config.save_pretrained(str(tmp_path / kind))
    data = image_set if kind == "vit" else text_set
    options = {"rounds": 1, "local_epochs": 1, "workers": 0, "lr": 0.1, "batch_size": 8, "clients": 2, "alpha": 9.0}
    options |= {"dataset": f"hf:{data}", "model": f"hf:{tmp_path / kind}", "out": tmp_path / "run"}
    result = fedcore.run(RunConfig(**options, metrics=["macro-f1"]), progress=False)
    done = export_run(result.directory, "transformers", tmp_path / "out")
    assert {"config.json", "model.safetensors", "README.md"} <= set(done.files)
    made = "AutoModelForImageClassification" if kind == "vit" else "AutoModelForSequenceClassification"
    loaded = getattr(transformers, made).from_pretrained(str(tmp_path / "out"), local_files_only=True).eval()
    test = load_dataset(f"hf:{data}", None).test
    batch = test.gather(torch.arange(6))
    if kind == "vit":
        inputs = {"pixel_values": batch}
    else:
        tokens, mask = padded(batch, loaded.config.pad_token_id)
        inputs = {"input_ids": tokens, "attention_mask": mask}
        assert loaded.config.id2label == {0: "neg", 1: "pos"}
    with torch.no_grad():
        torch.testing.assert_close(loaded(**inputs).logits, result.model.eval()(batch).logits)
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"from transformers import {type(loaded).__name__}" in card
    assert "library_name: transformers" in card
    assert f"| {result.metrics['global']['macro-f1']:.4f} |" in card


def test_a_network_of_another_library_is_not_written_for_transformers(tmp_path: Path) -> None:
    from fedcore_export import export_run

    result = fedcore.run(
        RunConfig(rounds=1, clients=2, local_epochs=1, workers=0, out=tmp_path / "run"), progress=False
    )
    with raises(ConfigError, "--to transformers", "--to safetensors"):
        export_run(result.directory, "transformers", tmp_path / "out")
    assert not (tmp_path / "out").exists()
