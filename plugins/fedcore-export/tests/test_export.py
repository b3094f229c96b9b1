"""Exported models are the run's, in formats that load without fedcore and without pickled code."""

from __future__ import annotations

import hashlib
import json
import re
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from markdown_it import MarkdownIt
from safetensors.torch import load_file

from fedcore.data import Dataset, load_dataset
from fedcore_export import export
from fedcore_export.card import _block, _input, _span
from fedcore_zoo import SequenceSamples, embedding_bag
from tests import support
from tests.sentences import refused
from tests.support import weights


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return support.run(tmp_path_factory.mktemp("export"), "moon", rounds=1, client_test_fraction=0.2)


def test_safetensors_with_a_card(cli, trained, tmp_path: Path) -> None:
    result = cli("export", trained.directory, "--to", "safetensors", "--out", "model")
    assert result.exit_code == 0, result.output
    assert result.stdout == "written: model (model.safetensors, README.md)\n"
    found = load_file(tmp_path / "model" / "model.safetensors")
    own = weights(trained)
    assert found.keys() == own.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in own.items())

    card = (tmp_path / "model" / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["tags"] == ["federated-learning", "moon"]
    assert "# mlp trained with moon on digits" in card
    assert (
        f"| {100 * trained.metrics['global']['accuracy']:.2f} | {trained.metrics['global']['loss']:.4f} | - |" in card
    )
    assert f"| {100 * trained.metrics['global_local']['worst10']:.2f} |" in card
    options = yaml.safe_load(re.search(r"```yaml\n(.*?)```", card, re.DOTALL)[1])
    assert options["plugins"]["moon"]["mu"] == 1.0
    assert not {"out", "data_dir"} & options.keys()  # no paths of this machine
    content = (tmp_path / "model" / "model.safetensors").read_bytes()
    assert f"| {len(content):,} | `{hashlib.sha256(content).hexdigest()}` |" in card


def test_the_card_counts_clients_that_never_train_apart(cli, tmp_path: Path) -> None:
    trained = support.run(tmp_path, rounds=1, clients=5, unseen_clients=0.2, client_test_fraction=0.2)
    assert cli("export", trained.directory, "--to", "safetensors", "--out", "model").exit_code == 0
    card = (tmp_path / "model" / "README.md").read_text()
    assert "Global model of a federation of 4 clients, and 1 that never trains, after 1 rounds of fedavg" in card


@pytest.mark.parametrize("plugin", [None, "moon"])  # moon puts a projection head on
def test_torch_loads_without_pickled_code_for_batches_of_any_size(cli, tmp_path: Path, monkeypatch, plugin) -> None:
    """The card's own lines are run."""
    trained = support.run(tmp_path, *[plugin] * bool(plugin), rounds=1, model="simple-cnn")
    assert cli("export", trained.directory, "--to", "torch", "--out", "model").exit_code == 0
    card = (tmp_path / "model" / "README.md").read_text()
    program, by_name = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    monkeypatch.chdir(tmp_path / "model")
    test = load_dataset("digits").test
    for count in (1, 3):
        x = test.gather(torch.arange(count))
        expected = trained.model(x).logits
        for code in (program, by_name):
            names = {"x": x}
            exec(code, names)  # noqa: S102 - what a reader of the card runs
            torch.testing.assert_close(names["logits"], expected)
    assert "weights_only=True" in by_name


@pytest.mark.parametrize(
    ("dtype", "scale", "says"),
    [
        (np.uint8, 255, "- Brightness from 0 to 1 (8-bit images divided by 255), then minus mean [0.0"),
        (np.float32, 1, "- Brightness from 0 to 1 (8-bit images divided by 255), then minus mean [0.0"),
        (np.float32, 16, "- Numbers as in the training data, which are from 0 to 16, minus mean [0.25"),
    ],
)
def test_the_card_says_how_samples_become_inputs(cli, tmp_path: Path, dtype, scale, says) -> None:
    x = np.zeros((12, 8, 8), dtype)
    x[:, 0, 0] = scale
    y = np.arange(12) % 3
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    trained = support.run(tmp_path, dataset=f"npz:{tmp_path / 'own.npz'}", rounds=1, clients=2)
    assert cli("export", trained.directory, "--to", "safetensors", "--out", "model").exit_code == 0
    assert says in (tmp_path / "model" / "README.md").read_text()


def test_the_card_says_how_rows_of_a_table_become_inputs(cli, tmp_path: Path) -> None:
    trained = support.run(tmp_path, dataset="breast-cancer", rounds=1, clients=2)
    assert cli("export", trained.directory, "--to", "safetensors", "--out", "model").exit_code == 0
    card = (tmp_path / "model" / "README.md").read_text()
    assert '- Columns in order: `["mean radius", "mean texture", ' in card
    mean, std = (", ".join(map(str, stats)) for stats in (trained.inputs.mean, trained.inputs.std))
    assert f"- Numbers as in the training data, minus mean [{mean}], divided by std [{std}], per column." in card


@pytest.mark.parametrize("dataset", ["digits", "breast-cancer"])
def test_the_card_has_the_numbers_of_each_client_where_the_clients_differ(cli, tmp_path: Path, dataset) -> None:
    trained = support.run(tmp_path, rounds=1, dataset=dataset, normalize="client", clients=2)
    assert cli("export", trained.directory, "--to", "safetensors", "--out", "m").exit_code == 0
    card = (tmp_path / "m" / "README.md").read_text()
    assert "(`--normalize client`), by client: `{" in card
    assert "by this recipe" not in card


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", [form for form in export.FORMATS if form != "transformers"])
def test_a_full_disk_is_named_and_nothing_stays(cli, trained, tmp_path: Path, form: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = set(tmp_path.iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        result = cli("export", trained.directory, "--to", form, "--out", "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert result.exit_code == 2, result.output
    assert re.fullmatch(r"error: cannot write model: .*File too large; make room there.*\n", result.stderr), (
        result.stderr
    )
    assert set(tmp_path.iterdir()) == before


class Branches(torch.nn.Linear):
    """Looks at values, which no program of a network can hold."""

    def forward(self, x):
        hidden = super().forward(x.flatten(1))
        return hidden.relu() if hidden.sum() > 0 else hidden


def branching(num_classes, input_shape):
    return torch.nn.Sequential(Branches(64, 8), torch.nn.Linear(8, num_classes))


def test_the_reason_is_told_why_a_network_cannot_be_written(cli, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    trained = support.run(tmp_path, rounds=1, model="module:test_export.branching", workers=0)
    arguments = ("export", trained.directory, "--allow-code", "--out", "model", "--to")
    assert "data-dependent" in cli(*arguments, "onnx").stderr
    written = cli(*arguments, "torch")
    assert written.exit_code == 0
    assert "data-dependent" in written.stderr


def test_onnx_gives_the_same_logits(cli, trained, tmp_path: Path) -> None:
    from onnx.reference import ReferenceEvaluator

    assert cli("export", trained.directory, "--to", "onnx", "--out", "model").exit_code == 0
    x = load_dataset("digits").test.gather(torch.arange(3))
    (logits,) = ReferenceEvaluator(str(tmp_path / "model" / "model.onnx")).run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), trained.model(x).logits)


def topics(data_dir=None):
    """Sequences of one or two tokens."""
    samples = SequenceSamples.of([[k % 2, 2][: 1 + k % 3 % 2] for k in range(40)], [k % 2 for k in range(40)])
    return Dataset("topics", samples, samples, 2, (3,))


def test_batches_that_are_no_tensors_have_the_weights_alone(cli, tmp_path: Path) -> None:
    trained = support.run(tmp_path, dataset=topics, model=embedding_bag, rounds=1)
    result = cli("export", trained.directory, "--to", "torch", "--out", "model", "--allow-code")
    assert result.exit_code == 0, result.output
    assert result.stderr == "note: no model.pt2: torch.export takes tensors, and the batches of topics are sequences\n"
    found = torch.load(tmp_path / "model" / "model.pt", weights_only=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in weights(trained).items())
    refused = cli("export", trained.directory, "--to", "safetensors", "--out", "other")
    assert "add --allow-code" in refused.stderr


EVIL = "a`b ![x](https://www.evil.example) <img src=x> *b* _c_ &lt; $d$ # |"
CLASSES = (f"{EVIL}\n\n# Heading\n```\n<script>", *map(str, range(9)))


def evil(data_dir=None):
    """Names from a stranger's folder, such as a class's."""
    samples = load_dataset("digits").test
    return Dataset(EVIL, samples, samples, 10, (1, 8, 8), class_names=CLASSES)


def test_names_mean_nothing_in_the_card_s_markdown(cli, tmp_path: Path) -> None:
    trained = support.run(tmp_path, dataset=evil, rounds=1, clients=2)
    result = cli("export", trained.directory, "--to", "safetensors", "--out", "model", "--allow-code")
    assert result.exit_code == 0, result.output
    card = (tmp_path / "model" / "README.md").read_text().partition("\n---\n")[2]
    tokens = MarkdownIt("commonmark").enable("table").parse(card)
    inline = [(of, token) for of, token in zip([None, *tokens], tokens, strict=False) if token.type == "inline"]
    kinds = {child.type for _, token in inline for child in token.children}
    assert kinds <= {"text", "text_special", "softbreak", "code_inline"}
    assert "html_block" not in {token.type for token in tokens}
    headings = ["".join(c.content for c in token.children) for of, token in inline if of.type == "heading_open"]
    assert headings[0] == f"mlp trained with fedavg on {EVIL}"
    assert headings[1:] == ["Figures", "Input and output", "Use", "Training", "Files"]
    assert not re.search(r"[^\\]://|www[^\\]", card.partition("## Figures")[0])  # GitHub makes links of addresses
    codes = [child.content for _, token in inline for child in token.children if child.type == "code_inline"]
    assert json.dumps(CLASSES) in codes
    fences = {token.info: token.content for token in tokens if token.type == "fence"}
    assert list(fences) == ["python", "yaml"]


@pytest.mark.parametrize("text", ["a", "a`b", "```", "`a``b"])
def test_no_backticks_end_a_span_or_a_block_of_code(text: str) -> None:
    (paragraph,) = [token for token in MarkdownIt("commonmark").parse(_span(text)) if token.type == "inline"]
    assert [(child.type, child.content) for child in paragraph.children] == [("code_inline", text)]
    (block,) = MarkdownIt("commonmark").parse(_block("yaml", f"{text}\n"))
    assert (block.type, block.info, block.content) == ("fence", "yaml", f"{text}\n")


def test_a_batch_of_several_inputs_is_described() -> None:
    class Several(SequenceSamples):
        kind = "tensor"  # its network needs no attribute takes

    samples = Several.of([[1], [0]], [0, 1])
    assert next(_input(Dataset("own", samples, samples, 2, (3,)))) == (
        "- Batches of kind `tensor`, `input_shape` (3,)."
    )


def test_what_cannot_be_exported_is_refused(cli, trained, tmp_path: Path, monkeypatch) -> None:
    stopped, damaged = (Path(shutil.copytree(trained.directory, tmp_path / name)) for name in ("stopped", "damaged"))
    (stopped / "summary.json").unlink()
    content = bytearray((damaged / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (damaged / "model.safetensors").write_bytes(content)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    personal = support.run(tmp_path, rounds=1, buffers="local", model="module:tests.toy.batch_norm_mlp")
    monkeypatch.setattr(export, "ONNX_PACKAGES", ("onnx", "no_such_package"))
    for arguments, named in (
        ([trained.directory, "--to", "pickle"], ("'pickle'",)),
        ([trained.directory, "--to", "torch", "--out", "mine"], ("mine",)),
        ([tmp_path, "--to", "torch"], (tmp_path, "config.yaml")),
        ([stopped, "--to", "torch"], (f"fedcore resume {stopped}",)),
        ([trained.directory, "--to", "onnx"], ("no_such_package",)),
        ([damaged, "--to", "torch"], (damaged / "model.safetensors",)),
        ([personal.directory, "--to", "torch", "--allow-code"], (personal.directory.name,)),
    ):
        refused(cli("export", *arguments), *named)
    assert not [path for path in tmp_path.iterdir() if "torch" in path.name or "onnx" in path.name]
