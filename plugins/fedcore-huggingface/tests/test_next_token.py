"""The task next-token: packing by hand, federations against loops over transformers' own loss, whole runs, refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from typer.testing import CliRunner

import fedcore
from fedcore import ConfigError, DataError
from fedcore.data import load_dataset
from fedcore.tools import app
from fedcore_huggingface import NextToken, TokenBlocks, dataset
from fedcore_huggingface.causal import TiedHead, causal_model
from fedcore_huggingface.language import IGNORED, language_dataset
from fedcore_testing import model_bytes
from tests.sentences import raises

from .conftest import WORDS, Later, save, texts

Later("datasets")
transformers = Later("transformers")

V, L = 11, 6
PARTS = [range(5), range(5, 18), range(18, 21)]
ROUNDS, STEPS, LR = 5, 2, 0.1
SMALL = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16, "eos_token_id": 0, "bos_token_id": 0}
PLAIN = SMALL | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


def gpt2_config(**others):
    return transformers.GPT2Config(**{"vocab_size": V, **PLAIN, **others})


def network(**others):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return transformers.GPT2LMHeadModel(gpt2_config(**others)).double()


def in_float64(num_classes, input_shape):
    return causal_model(network(vocab_size=num_classes), "gpt2")


in_float64.takes = ("tokens",)


def untied(num_classes, input_shape):
    return causal_model(network(vocab_size=num_classes, tie_word_embeddings=False), "gpt2")


untied.takes = ("tokens",)


def blocks(count, seed):
    """Return blocks of random texts; the last one is filled up."""
    draw = np.random.default_rng(seed)
    own = [draw.integers(1, V, draw.integers(2, 12)).tolist() for _ in range(count)]
    joined = [[token for text in own for token in (*text, 0)][: count * L - 4]]
    return TokenBlocks.of(joined, L, 0)


def random_texts():
    return language_dataset("random", blocks(21, 0), blocks(9, 1), V)


def train(data=None, model=in_float64, **options):
    settings = {"rounds": ROUNDS, "local_epochs": STEPS, "batch_size": 1000, "lr": LR, "momentum": 0.0}
    settings |= {"weight_decay": 0.0, "workers": 0, "eval_every": ROUNDS, "device": "cpu", "partition": PARTS}
    return fedcore.run(model=model, dataset=data or random_texts(), progress=False, **settings | options)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# --- blocks --------------------------------------------------------------------------------------------------------


def test_texts_are_joined_by_the_end_token_and_cut():
    found = TokenBlocks.of([[1, 2], [], [3, 4, 5]], 3, 9)
    assert found.inputs.tolist() == [[1, 2, 9], [9, 3, 4], [5, 9, 9]]
    assert found.labels.tolist() == [[1, 2, 9], [9, 3, 4], [5, 9, IGNORED]]
    assert len(TokenBlocks.of([[1, 2, 3]], 3, 9)) == 1, "a last token alone has no next one"


def test_no_block_has_texts_of_two_keys():
    found, rows = TokenBlocks.by(["a", "b", "a"], [[1, 2], [3], [4]], 2, 0)
    assert found.inputs.tolist() == [[1, 2], [0, 4], [3, 0]]
    assert rows == [0, 0, 1]


def test_the_loss_is_transformers_own_and_0_without_a_next_token():
    net, data = network(), blocks(9, 1)
    task = NextToken(data.labels)
    outputs = net(input_ids=data.inputs, labels=data.labels)
    logits = outputs.logits.transpose(1, 2)
    assert (data.labels == IGNORED).any()
    assert outputs.loss.dtype == torch.float32, "transformers' own loss is rounded"
    torch.testing.assert_close(task.loss(logits, data.labels).float(), outputs.loss)
    nothing = logits.detach().requires_grad_()
    loss = task.loss(nothing, torch.full_like(data.labels, IGNORED))
    loss.backward()
    assert loss.item() == 0
    assert not nothing.grad.any()


def test_counts_of_chunks_add_up():
    data, generator = blocks(40, 2), torch.Generator().manual_seed(1)
    task, logits = NextToken(data.labels), torch.randn(len(data), V, L, generator=generator)
    for figure in task.metrics.values():
        parts = [figure.count(logits[rows], data.labels[rows]) for rows in torch.arange(len(data)).split([1, 30, 9])]
        assert figure.value(sum(parts)) == pytest.approx(figure.value(figure.count(logits, data.labels)))


# --- federations against loops -------------------------------------------------------------------------------------


def shifted(net, inputs, labels):
    """Return the mean cross-entropy of each token by those before it: transformers' loss, without its rounding."""
    logits = net(input_ids=inputs).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


def by_hand(data, *, controls):
    """Return the model after the rounds, by steps of SGD."""
    net = network()
    w = [p.detach().clone() for p in net.parameters()]
    shares = [len(part) / 21 for part in PARTS]
    own, common = [[torch.zeros_like(p) for p in w] for _ in PARTS], [torch.zeros_like(p) for p in w]
    for _ in range(ROUNDS):
        ends = []
        for client, part in enumerate(PARTS):
            inputs, labels = data.train.inputs[[*part]], data.train.labels[[*part]]
            fix = [c - k if controls else 0 for c, k in zip(common, own[client], strict=True)]
            with torch.no_grad():
                for p, start in zip(net.parameters(), w, strict=True):
                    p.copy_(start)
            for _ in range(STEPS):
                slopes = torch.autograd.grad(shifted(net, inputs, labels), [*net.parameters()])
                with torch.no_grad():
                    for p, slope, f in zip(net.parameters(), slopes, fix, strict=True):
                        p -= LR * (slope + f)
            ends.append([p.detach().clone() for p in net.parameters()])
            if controls:
                moved = [(start - end) / (STEPS * LR) for start, end in zip(w, ends[-1], strict=True)]
                own[client] = [step - f for step, f in zip(moved, fix, strict=True)]
        w = [sum(s * end for s, end in zip(shares, each, strict=True)) for each in zip(*ends, strict=True)]
        common = [sum(s * c for s, c in zip(shares, each, strict=True)) for each in zip(*own, strict=True)]
    with torch.no_grad():
        for p, end in zip(net.parameters(), w, strict=True):
            p.copy_(end)
    return net


def perplexity(net, inputs, labels):
    """Return exp of the mean loss over all tokens, block by block."""
    nll = tokens = 0.0
    with torch.no_grad():
        for block, own in zip(inputs, labels, strict=True):
            count = int((own[1:] != IGNORED).sum())
            nll += float(shifted(net, block[None], own[None])) * count
            tokens += count
    return math.exp(nll / tokens)


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_five_rounds(method):
    data = random_texts()
    result = train(data, plugins=[] if method == "fedavg" else [method])
    expected = by_hand(data, controls=method == "scaffold")
    final = result.model.network().network
    assert final.lm_head.weight is final.transformer.wte.weight
    before = network().state_dict()
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(final.state_dict()[name], tensor, rtol=1e-9, atol=1e-12)
        assert name.endswith("c_attn.bias") or not torch.allclose(tensor, before[name], atol=1e-6), name
    row = result.metrics["global"]
    assert row["perplexity"] == pytest.approx(perplexity(expected, data.test.inputs, data.test.labels), rel=1e-9)
    assert row["token-loss"] == pytest.approx(math.log(row["perplexity"]), rel=1e-9)
    right = result.predict(data.test.inputs)[:, :-1] == data.test.labels[:, 1:].numpy()
    known = (data.test.labels[:, 1:] != IGNORED).numpy()
    assert row["token-accuracy"] == pytest.approx(right[known].mean())


def test_the_clients_perplexity_is_of_all_their_tokens():
    """It is exp of the mean over the tokens of all clients, which is no mean of the clients' perplexities."""
    data = random_texts()
    result = train(data, rounds=1, client_test_fraction=0.4)
    row = result.metrics["global_local"]
    held_out = json.loads((result.directory / "partition.json").read_text())["test"]
    rows = [place for part in held_out for place in part]
    net = result.model.network().network
    assert len({len(part) for part in held_out}) > 1
    assert row["perplexity"] == pytest.approx(perplexity(net, data.train.inputs[rows], data.train.labels[rows]))
    assert row["perplexity"] != pytest.approx(row["perplexity_mean"], rel=1e-6)


def test_an_untied_last_layer_is_the_classifier_and_stays_with_fedper():
    assert "classifier.weight" in train(rounds=1, model=untied).model.state_dict()
    result = train(rounds=1, model=untied, plugins=["fedper"], client_test_fraction=0.4)
    assert result.metrics["personal"]["perplexity"] > 1
    tied = train(rounds=1).model
    assert isinstance(tied.classifier, TiedHead)


# --- folders, on the command line ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    folder = tmp_path_factory.mktemp("tokenizers")
    for name, special in (("end", {"eos_token": "[SEP]"}), ("endless", {})):
        words = {word: number for number, word in enumerate(WORDS)}
        made = Tokenizer(WordLevel(words, unk_token="[UNK]"))  # noqa: S106
        made.pre_tokenizer = Whitespace()
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", **special)  # noqa: S106
        fast.save_pretrained(str(folder / name))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("language") / "set", train=texts(), test=texts(20))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    place = tmp_path_factory.mktemp("gpt2")
    gpt2_config(vocab_size=99).save_pretrained(str(place))
    return place


@pytest.fixture
def name(folder, tokenizer):
    return f"hf:{folder}?text=sentence&source=writer&tokenizer={tokenizer / 'end'}&block_size=8"


def command(*words):
    return CliRunner().invoke(app, list(map(str, words)))


def test_blocks_of_a_folder_keep_to_their_source(name):
    data = load_dataset(name)
    assert (data.num_classes, data.input_shape) == (len(WORDS), (len(WORDS), 8))
    assert isinstance(data.task, NextToken)
    assert data.source_names == tuple(f"writer {k}" for k in range(5))
    own = texts()
    for source, writer in enumerate(data.source_names):
        said = [s for s, of in zip(own["sentence"], own["writer"], strict=True) if of == writer]
        expected = [token for text in said for token in (*map(WORDS.index, text.split()), 3)]
        labels = data.train.labels[data.sources == source]
        assert labels[labels != IGNORED].tolist() == expected
    assert len(data.train) == len(data.sources)


def test_groups_stay_on_one_side(folder, tokenizer):
    only = save(folder.parent / "only", only=texts())
    data = load_dataset(f"hf:{only}?text=sentence&groups=writer&tokenizer={tokenizer / 'end'}&block_size=8")
    assert len(data.groups) == len(data.train)
    assert len(set(data.groups.tolist())) < 5, "a part of the writers is the test set"


@pytest.mark.parametrize("division", [("natural",), ("iid",), ("quantity",)], ids=lambda d: d[0])
def test_a_run_on_the_command_line(name, model, division):
    words = ["train", "--task", "next-token", "--dataset", name, "--model", f"hf:{model}", "--clients", 5]
    words += ["--partition", *division, "--rounds", 2, "--local-epochs", 1, "--batch-size", 4, "--lr", 0.1]
    words += ["--client-test-fraction", 0.3, "--workers", 0, "--device", "cpu", "--out", "run"]
    done = command(*words)
    assert done.exit_code == 0, done.output
    assert "global perplexity" in done.output
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["metrics"]["global"]["perplexity"] > 1
    assert "accuracy" not in summary["metrics"]["global"]


def test_the_row_of_lowest_perplexity_is_the_best(name, model):
    common = {"dataset": name, "model": f"hf:{model}", "clients": 3, "workers": 0, "local_epochs": 1, "batch_size": 4}
    for lr in (0.0001, 0.2):
        fedcore.run(rounds=2, lr=lr, out=f"runs/{lr}", progress=False, **common)
    figures = [json.loads(Path(f"runs/{lr}/summary.json").read_text())["metrics"]["global"] for lr in (0.0001, 0.2)]
    assert figures[1]["perplexity"] < figures[0]["perplexity"]
    done = command("compare", "runs/0.0001", "runs/0.2")
    assert done.exit_code == 0, done.output
    assert "perplexity" in done.output
    options = {"patience": 5, "client_test_fraction": 0.4, "validation_share": 0.5}
    result = fedcore.run(rounds=3, lr=0.2, out="best", progress=False, **options, **common)
    values = [line["metrics"]["global_validation"]["perplexity"] for line in result.records if "round" in line]
    assert result.summary["metrics"]["best_by_validation"]["validation_perplexity"] == min(values)


def test_unseen_clients_and_a_resumed_run(name, model):
    options = {"dataset": name, "model": f"hf:{model}", "clients": 5, "partition": "natural", "workers": 0}
    options |= {
        "local_epochs": 1,
        "batch_size": 4,
        "rounds": 3,
        "client_test_fraction": 0.4,
        "unseen_clients": "writer 1,writer 3",
    }

    class Stopped(Exception):
        pass

    def stop(event, details):
        if event == "round" and details["round"] == 1:
            raise Stopped

    with pytest.raises(Stopped):
        fedcore.run(**options, out="stopped", notify=stop, progress=False)
    again = fedcore.resume("stopped", progress=False)
    whole = fedcore.run(**options, out="whole", progress=False)
    assert model_bytes(again) == model_bytes(whole)
    assert again.metrics == whole.metrics
    assert whole.metrics["unseen"]["perplexity"] > 1


def test_predictions_are_next_tokens_and_their_probabilities(name, model):
    result = fedcore.run(dataset=name, model=f"hf:{model}", clients=2, rounds=1, workers=0, progress=False)
    tokens = load_dataset(name).test.inputs
    predicted, shares = result.predict(tokens.numpy()), result.predict_proba(tokens.numpy())
    assert predicted.shape == tuple(tokens.shape)
    assert shares.shape == (len(tokens), len(WORDS), 8)
    np.testing.assert_allclose(shares.sum(axis=1), 1, rtol=1e-5)
    assert (shares.argmax(axis=1) == predicted).all()


@pytest.mark.parametrize("tie", [True, False])
def test_transformers_loads_what_export_writes(name, tmp_path, tie):
    """The model starts from saved weights, of which the vocabulary is larger than the tokenizer's."""
    from fedcore_export import export_run

    torch.manual_seed(3)
    before = transformers.GPT2LMHeadModel(gpt2_config(vocab_size=20, tie_word_embeddings=tie)).eval()
    before.bfloat16().save_pretrained(str(tmp_path / "before"))
    before.float()
    options = {"rounds": 1, "local_epochs": 1, "workers": 0, "clients": 2, "batch_size": 8}
    result = fedcore.run(dataset=name, model=f"hf:{tmp_path / 'before'}", lr=1e-3, progress=False, **options)
    done = export_run(result.directory, "transformers", tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "out"), local_files_only=True).eval()
    assert type(loaded) is transformers.GPT2LMHeadModel
    assert (loaded.lm_head.weight is loaded.transformer.wte.weight) is tie
    tokens = load_dataset(name).test.inputs
    with torch.no_grad():
        logits = loaded(input_ids=tokens).logits
        torch.testing.assert_close(logits.transpose(1, 2), result.model.eval()(tokens).logits)
        assert not torch.equal(logits, before(input_ids=tokens).logits[..., : len(WORDS)])
        torch.testing.assert_close(logits, before(input_ids=tokens).logits[..., : len(WORDS)], rtol=0.1, atol=0.1)
    assert "from transformers import GPT2LMHeadModel" in (tmp_path / "out" / "README.md").read_text()
    assert {"config.json", "model.safetensors"} <= set(done.files)


@pytest.mark.parametrize("mean", ["factors", "products", "frozen-a"])
def test_adapters_on_gpt2_are_merged_by_the_export(name, tmp_path, mean):
    """GPT-2's layers are Conv1D, whose weights are (in, out). All else than adapters stays as it was."""
    from fedcore_export import export_run

    torch.manual_seed(3)
    before = transformers.GPT2LMHeadModel(gpt2_config(vocab_size=len(WORDS)))
    before.save_pretrained(str(tmp_path / "before"))
    lora = {"lora": {"rank": 2, "layers": ["*.c_attn", "*.c_fc"], "mean": mean}}
    options = {"rounds": 2, "local_epochs": 1, "workers": 0, "clients": 3, "batch_size": 8, "lr": 0.5}
    result = fedcore.run(dataset=name, model=f"hf:{tmp_path / 'before'}", plugins=lora, progress=False, **options)
    each = 2 * 2 * (32 + 96) + 2 * 2 * (32 + 128)
    sent = result.records[0]["bytes"]["by_plugin"]["model"]
    assert sent["up"] == 3 * 4 * {"frozen-a": each - 4 * 2 * 32}.get(mean, each)
    assert sent["down"] == sent["up"] + (3 * 4 * 2 * (32 * 96 + 32 * 128) if mean == "products" else 0)
    export_run(result.directory, "transformers", tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "out"), local_files_only=True).eval()
    tokens = load_dataset(name).test.inputs
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits.transpose(1, 2), result.model.eval()(tokens).logits)
    old, new = before.state_dict(), loaded.state_dict()
    changed = {key.rpartition("h.")[2] for key in old if not torch.equal(old[key], new[key])}
    assert changed == {f"{k}.{part}.weight" for k in range(2) for part in ("attn.c_attn", "mlp.c_fc")}


# --- refusals --------------------------------------------------------------------------------------------------------


def test_models_that_do_not_fit_are_refused(name, tmp_path):
    bert = {"vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert |= {"intermediate_size": 16, "max_position_embeddings": 64}
    distil = transformers.DistilBertConfig(vocab_size=len(WORDS), dim=16, n_layers=1, n_heads=2, hidden_dim=16)
    for folder, config, says in (
        ("distilbert", distil, ("no causal language model of type 'distilbert'", "gpt2")),
        ("bert", transformers.BertConfig(**bert), ("is not causal", "gpt2")),
        ("short", gpt2_config(n_positions=4), ("reads up to 4 tokens, but the data set's blocks have 8",)),
    ):
        config.save_pretrained(str(tmp_path / folder))
        with raises(ConfigError, *says):
            fedcore.run(dataset=name, model=f"hf:{tmp_path / folder}", rounds=1, progress=False)
    llama = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    llama |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    transformers.LlamaConfig(**llama).save_pretrained(str(tmp_path / "llama"))
    one = {"clients": 2, "rounds": 1, "local_epochs": 1, "workers": 0, "batch_size": 8}
    found = fedcore.run(dataset=name, model=f"hf:{tmp_path / 'llama'}", progress=False, **one)
    assert found.metrics["global"]["perplexity"] > 1
    transformers.GPT2LMHeadModel(gpt2_config(vocab_size=5)).save_pretrained(str(tmp_path / "few"))
    with raises(ConfigError, "are for vocab_size 5, this data set needs 10"):
        fedcore.run(dataset=name, model=f"hf:{tmp_path / 'few'}", progress=False, **one)


def test_data_that_do_not_fit_are_refused(folder, tokenizer):
    texts_of = f"{folder}?text=sentence"
    for rest, says in (
        (f"{texts_of}&block_size=8", "name a tokenizer"),
        (f"{texts_of}&block_size=8&tokenizer={tokenizer / 'endless'}", "no end token"),
        (f"{texts_of}&block_size=8&tokenizer={tokenizer / 'none'}", "is no folder on this machine"),
        (f"{texts_of}&block_size=8&label=label&tokenizer={tokenizer / 'end'}", "without ?label"),
        (f"{texts_of}&block_size=8&part=yes&tokenizer={tokenizer / 'end'}", "without ?part"),
        (f"{folder}?block_size=8&tokenizer={tokenizer / 'end'}", "which column holds the texts"),
    ):
        with raises(ConfigError, says):
            dataset(rest)()
    with raises(ConfigError, "'block_size'", 2):
        dataset(f"{texts_of}&block_size=1&tokenizer={tokenizer / 'end'}")
    done = command("train", "--task", "next-token", "--dataset", f"hf:{texts_of}&tokenizer={tokenizer / 'end'}")
    assert done.exit_code == 2
    assert "?block_size=128" in "".join(done.output.split("\n"))
    with raises(DataError, "fewer than two tokens"):
        language_dataset("none", TokenBlocks.of([[]], 4, 0), blocks(3, 0), V)


@pytest.mark.parametrize("method", ["fedproto", "fedrs", "ccvr"])
def test_methods_of_classes_are_refused_with_both_names(method):
    with raises(ConfigError, f"plugin '{method}'", "task 'next-token' does not have"):
        train(plugins=[method])


@pytest.mark.parametrize("method", ["moon", "feddecorr"])
def test_methods_of_one_vector_for_each_sample_are_refused(method):
    with pytest.raises(ConfigError, match=method):
        train(plugins=[method])


METHODS = ["fedprox", "feddyn", "fednova", "fedadam", "fedavgm", "ditto", "fedrep", "median", "krum", "topk", "qsgd"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("method", METHODS)
def test_other_methods_train(method):
    options = {"plugins": [method], "client_test_fraction": 0.3, "rounds": 2, "eval_every": 1}
    result = train(model=untied, partition="iid", clients=4, **options)
    assert [line["failures"] for line in result.records] == [[], []]


@pytest.mark.parametrize("own", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["folder", "example"])
def test_a_part_of_the_kit_runs(name, own):
    """On a folder, and on the task's own example, whose test set is larger."""
    words = [word for check in ("trains", "neutral_options_are_fedavg") for word in ("--only", f"check_{check}")]
    words += ["--dataset", name, "--model", "tiny-gpt2"] if own else []
    done = command("plugins", "check", "fedprox", "--task", "next-token", *words, "--json")
    assert done.exit_code == 0, done.output
    assert [verdict["status"] for verdict in json.loads(done.stdout)] == ["passed"] * 2
