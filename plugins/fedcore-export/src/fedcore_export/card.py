"""The card of an exported model: its training, its figures, its input and use, and the hashes of its files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from fedcore import SplitModel, __version__
from fedcore.data import Dataset, Inputs, ResidentSamples, TensorSamples
from fedcore.models import build_model
from fedcore.tools import PROTOCOLS, Run, digest, method, output, protocols, rounds, settings

_ROUNDING = 1e-4
"""How far normalised and restored float32 brightness may lie outside of 0..1."""


@dataclass(frozen=True)
class ExportedFile:
    """A file of an exported model; ``sha256`` in hex."""

    name: str
    size: int
    sha256: str


PIPELINE = "pipeline.skops"
"""The file of a transformer of scikit-learn that makes the model's inputs."""


def model_card(
    run: Run,
    summary: Mapping[str, Any],
    session: Mapping[str, Any],
    files: Sequence[ExportedFile],
    *,
    model: nn.Module,
    client: int | None = None,
    took_part: bool = True,
) -> str:
    """Return README.md.

    :param client: the client whose own model it is; None for the global model.
    :param took_part: whether this client has trained.
    :param session: the record of the process that finished the run, see :func:`fedcore.runs.provenance.session`;
        empty where it is missing.
    """
    config, dataset = run.config, run.dataset
    name, network = method(config.plugins), network_of(run, client)
    owner = "" if client is None else f"client {client}"
    if client is not None and "names" in run.partition.info:
        owner += f" ({_text(run.partition.names[client])})"
    title = "Global model" if client is None else f"Own model of {owner}"
    if not took_part:
        title = f"Model for {owner}, which took part in no round,"
    federation = f"{config.training_clients} clients"
    if unseen := config.clients - config.training_clients:
        federation += f", and {unseen} that never train{'s' * (unseen == 1)},"
    names = {file.name for file in files}
    front = {
        "library_name": "transformers" if "config.json" in names else "fedcore",
        "tags": ["federated-learning", *config.plugins],
        "metrics": [*(["accuracy"] if dataset.task.classes else []), *_further(summary["metrics"])],
    }
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {_text(network)} trained with {_text(name)} on {_text(dataset.name)}",
        f"{title} of a federation of {federation} after {summary['rounds']} rounds of {_text(name)}, "
        f"seed {config.seed}. {_origin(summary, session)}",
        "## Figures",
        "\n".join(_figures(summary["metrics"]) if client is None else _own_figures(summary["metrics"], client)),
        "## Input and output",
        "\n".join(_input(dataset)),
        "## Use",
        "\n\n".join(_use(run, model, client, names)),
        "## Training",
        f"Every option that can change the result (digest {digest(config)}):",
        _block("yaml", yaml.safe_dump(settings(config), sort_keys=False)),
        "## Files",
        "\n".join(_table(["file", "bytes", "SHA-256"], [[f.name, f"{f.size:,}", f"`{f.sha256}`"] for f in files])),
    ]
    return "\n\n".join(parts) + "\n"


def network_of(run: Run, client: int | None) -> str:
    """Return the name of the global model's network, or of a client's."""
    return run.config.model if client is None else run.config.model_of(client)


def plain_model(run: Run, client: int | None, model: nn.Module) -> SplitModel:
    """Return the network of a model as it is before plugins configure it, with fresh weights.

    It has a projection head if the model has one: ``--projection`` or a plugin put it on.
    """
    sample = run.dataset.train.gather(torch.zeros(1, dtype=torch.int64))
    task = {**_task(run), "seed": run.config.seed, "projection": _has_projection(model), "sample": sample}
    plain, _ = build_model(network_of(run, client), **task, kind=run.dataset.task)
    return plain


def _has_projection(model: nn.Module) -> bool:
    return isinstance(model, SplitModel) and model.projection_width is not None


def _task(run: Run) -> dict[str, Any]:
    return {"num_classes": run.dataset.num_classes, "input_shape": tuple(run.dataset.input_shape)}


def _origin(summary: Mapping[str, Any], session: Mapping[str, Any]) -> str:
    """Say which code trained the model and when, as far as it is recorded."""
    version = session.get("versions", {}).get("fedcore", "of unknown version")
    parts = [f"Trained with fedcore {version}"]
    parts += [f"commit {session['commit']}"] if session.get("commit") else []
    parts += [f"finished {summary['finished']}"] if summary.get("finished") else []
    return f"{_text(', '.join(parts))}; exported by fedcore {__version__}."


def _further(metrics: Mapping[str, Any]) -> list[str]:
    """Return the metrics next to accuracy and loss that the run measured."""
    rows = rounds.evaluated(metrics).values()
    return list(dict.fromkeys(name for row in rows for name in protocols.further(row)))


def _figures(metrics: Mapping[str, Any]) -> Iterator[str]:
    rows, further = [], _further(metrics)
    for protocol, meaning in PROTOCOLS.items():
        row = metrics.get(protocol)
        if isinstance(row, Mapping):
            over = [row.get(part) for part in ("std", "worst10")]
            rows.append(
                [
                    meaning.measures,
                    output.percent(row["accuracy"]) if "accuracy" in row else rounds.in_short(row),
                    _number(row.get("loss")),
                    *map(output.percent, over),
                    *(_number(row.get(name)) for name in further),
                ]
            )
    figure = "accuracy %" if any("accuracy" in (metrics.get(name) or {}) for name in PROTOCOLS) else "figure"
    heads = ["of what", figure, "loss", "std over clients %", "worst 10 % of clients %", *map(_text, further)]
    yield from _table(heads, rows)
    yield ""
    yield "The samples behind these figures are the run's own; on other data the model can be worse."


def _own_figures(metrics: Mapping[str, Any], client: int) -> Iterator[str]:
    rows, further = [], _further(metrics)
    of_classes = any("accuracy" in (metrics.get(name) or {}) for name in PROTOCOLS)
    for protocol, meaning in PROTOCOLS.items():
        row = metrics.get(protocol) or {}
        accuracy, *others = (
            row.get(name, {}).get(str(client)) for name in ("per_client", *(f"{name}_per_client" for name in further))
        )
        is_kept = protocol != "unseen_adapted"
        exported = (meaning.own_model or protocol == "unseen") and is_kept
        if accuracy is not None and exported:
            where = "its held-out part" if meaning.held_out else "the server's test set"
            rows.append([where, *([output.percent(accuracy)] if of_classes else []), *map(_number, others)])
    yield from _table(["measured on", *(["accuracy %"] if of_classes else []), *map(_text, further)], rows)


def _input(dataset: Dataset) -> Iterator[str]:
    shape = ", ".join(map(str, ("B", *dataset.input_shape)))
    sample = dataset.test.gather(torch.zeros(1, dtype=torch.int64, device=dataset.test.labels.device))
    if isinstance(sample, Tensor):
        yield f"- `x`: ({shape}), {str(sample.dtype).removeprefix('torch.')}."
    else:
        yield f"- Batches of kind {_span(dataset.kind)}, `input_shape` {tuple(dataset.input_shape)}."
    train, recipe = dataset.train, dict(Inputs.of(dataset).recipe)
    by_client = recipe.pop("clients", None)
    if isinstance(train, ResidentSamples):
        yield f"- {_normalisation(train)}."
    elif isinstance(train, TensorSamples):
        if recipe.pop("skops", None) is not None:
            load = f"skops.io.load({PIPELINE!r}, trusted=['numpy.dtype'])"
            yield f"- A DataFrame of raw columns becomes `x` by `{load}.transform`, the transformer of scikit-learn"
            yield f"  that the run was given. The columns: {_span(json.dumps(recipe['columns']))}"
        elif recipe:
            yield "- Raw columns become `x` by this recipe, as `fedcore_zoo.Recipe` reads it: numbers, words of each"
            yield f"  column, indicators of empty cells. {_span(json.dumps(recipe, ensure_ascii=False))}"
        if train.columns:
            yield f"- Columns in order: {_span(json.dumps(train.columns, ensure_ascii=False))}"
        if train.mean:
            stats = f"minus mean {list(train.mean)}, divided by std {list(train.std)}, per column"
            yield f"- Numbers as in the training data, {stats}."
    if by_client is not None:
        yield "- That is by the samples of all clients. In training each client's samples had its own mean and std"
        yield f"  (`--normalize client`), by client: {_span(json.dumps(by_client))}"
    task, form = dataset.task, dataset.task.form
    if task.classes:
        yield f"- Logits (B, {dataset.num_classes}); the class is that of the largest."
    else:
        yield f"- Outputs ({', '.join(map(str, ('B', dataset.num_classes, *task.grid)))}) of the task {task.name}."
    if "std" in form:
        yield f"- A prediction is the output times {form['std']}, plus {form['mean']}."
    if "ends" in form:
        yield f"- Each output is the log-odds of an event in its interval of time. The intervals end at {form['ends']}."
    if dataset.class_names:
        yield f"- Classes in order: {_span(json.dumps(list(dataset.class_names), ensure_ascii=False))}"


def _normalisation(samples: ResidentSamples) -> str:
    """Return how an image becomes ``x``. If its numbers leave 0..1, they have the data's own unit."""
    mean, std = list(samples.mean), list(samples.std)
    then = f"minus mean {mean}, divided by std {std}, per channel"
    brightness = f"Brightness from 0 to 1 (8-bit images divided by 255), then {then}"
    if samples.images.dtype == torch.uint8:
        return brightness
    low, high = (
        torch.tensor([extreme(plane) for plane in samples.images.unbind(1)]).double() * torch.tensor(std)
        + torch.tensor(mean)
        for extreme in (torch.min, torch.max)
    )
    smallest, largest = round(float(low.min()), 4) + 0.0, round(float(high.max()), 4)  # + 0.0: no -0
    if smallest >= -_ROUNDING and largest <= 1 + _ROUNDING:
        return brightness
    return f"Numbers as in the training data, which are from {smallest:.4g} to {largest:.4g}, {then}"


def _use(run: Run, model: nn.Module, client: int | None, files: set[str]) -> Iterator[str]:
    if "model.pt2" in files:
        yield _code("import torch", 'program = torch.export.load("model.pt2").module()', "logits = program(x)")
    if "model.onnx" in files:
        load = 'session = onnxruntime.InferenceSession("model.onnx")'
        yield _code("import onnxruntime", load, '(logits,) = session.run(None, {"x": x.numpy()})')
    if "config.json" in files and isinstance(model, SplitModel):
        network = type(model.network().get_submodule("network")).__name__
        inputs = "pixel_values=x" if run.dataset.kind == "tensor" else "input_ids=tokens, attention_mask=mask"
        yield _code(
            f"from transformers import {network}",
            f'model = {network}.from_pretrained("this folder")',
            f"logits = model({inputs}).logits",
        )
        return
    if not files & {"model.pt", "model.safetensors"}:
        return
    config, name = run.config, network_of(run, client)
    weights = ("import torch", 'weights = torch.load("model.pt", weights_only=True)')
    if "model.safetensors" in files:
        weights = ("from safetensors.torch import load_file", 'weights = load_file("model.safetensors")')
    if isinstance(model, SplitModel) and any(name != own for name, own in model.file_names().items()):
        yield _code(*weights, "network.load_state_dict(weights)", "logits = network.eval()(x)")
        yield f"`network` is a `{type(model.network()).__name__}`, the class behind the run's model {_span(name)}."
        return
    plain = plain_model(run, client, model)
    own, expected = ({name: t.shape for name, t in each.state_dict().items()} for each in (model, plain))
    if own != expected:
        yield _code(*weights)
        yield f"The names are those of the network as {_text(method(config.plugins))} configures it."
        return
    arguments = ", ".join(f"{name}={value!r}" for name, value in _task(run).items())
    built = f"build_model({name!r}, {arguments}, seed={config.seed}, projection={_has_projection(model)})"
    yield _code(
        *weights,
        "from fedcore.models import build_model",
        f"model, _ = {built}",
        "model.load_state_dict(weights)",
        "logits = model.eval()(x).logits",
    )


def _code(*lines: str) -> str:
    return _block("python", "\n".join(lines))


def _block(language: str, text: str) -> str:
    """Return a block of code, which no backticks of the text end."""
    fence = "`" * max(3, 1 + _longest_run(text))
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _span(text: str) -> str:
    """Return a text as code within a line, which no backticks of the text end."""
    ticks = "`" * (1 + _longest_run(text))
    line = " ".join(output.clean(text).split())
    return f"{ticks} {line} {ticks}" if "`" in line else f"{ticks}{line}{ticks}"


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


def _text(text: str) -> str:
    """Return a name as Markdown that shows it: no HTML, link, code, emphasis or formula begins in it."""
    return re.sub(r"[\\`*_\[\]<>&|~#$]|:(?=//)|(?<=www)\.", r"\\\g<0>", " ".join(output.clean(text).split()))


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for row in (heads, ["---"] * len(heads), *rows):
        yield f"| {' | '.join(row)} |"


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, (int, float)) else "-"
