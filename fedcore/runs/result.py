"""A finished run in Python: its figures, its history, and its model, which predicts. A picture of it for notebooks."""

from __future__ import annotations

import copy
import html
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedcore.base.config import RunConfig
from fedcore.base.errors import ConfigError, DataError
from fedcore.base.identity import flat, method, short_name
from fedcore.base.protocols import EVALUATED, PROTOCOLS
from fedcore.base.tensors import copy_into
from fedcore.client.evaluation import evaluate, rates
from fedcore.data import TensorSamples
from fedcore.data.inputs import Inputs, is_samples
from fedcore.data.loading import labels_of
from fedcore.models import SplitModel, forward_chunk
from fedcore.runs.directory import RunDirectory
from fedcore.runs.learning_curve import learning_curve


@dataclass(frozen=True, repr=False)
class RunResult:
    """A finished run."""

    metrics: dict[str, Any]
    """The final figures by protocol. A protocol without figures is None or absent."""
    model: SplitModel
    """The global model as encoder and classifier, on the CPU, in eval mode. It takes normalised inputs."""
    inputs: Inputs
    """How raw samples become inputs of the model."""
    directory: Path
    """The run directory."""
    summary: dict[str, Any]
    """The content of ``summary.json``."""
    config: RunConfig
    """The options of the run without its directory and labels. ``fedcore.run(result.config)`` runs it again."""

    @property
    def accuracy(self) -> float | None:
        """The final accuracy, from 0 to 1: of the global model on the test set, else of the first protocol measured."""
        return next((row["accuracy"] for row in evaluated(self.metrics).values()), None)

    @property
    def records(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl``: everything that was recorded about each round."""
        return RunDirectory(self.directory).read_metrics()

    @property
    def history(self) -> list[dict[str, Any]]:
        """One row per round: losses, bytes, seconds, and the figures of every protocol if the round was evaluated.

        ``report.PLUGIN.NAME`` holds the result of a plugin's hook ``report``. ``pandas.DataFrame(result.history)``
        makes a table.
        """
        return history_rows(self.records)

    @property
    def network(self) -> nn.Module:
        """A copy of the trained network, of the class that was given as model. It takes normalised inputs.

        :raises ConfigError: a plugin or ``--projection`` gave the model layers that the network does not have.
        """
        return self.model.network()

    @property
    def best_model(self) -> SplitModel:
        """The global model of the best round on the clients' held-out parts, for ``predict(x, model=...)``.

        :raises ConfigError: the run did not keep it.
        :raises RunDirectoryError: its file is missing or damaged.
        """
        best = self.summary["metrics"].get("best_by_validation")
        if self.config.keep != "best" or best is None:
            raise ConfigError("this run did not keep its best model; train with --keep best")
        model = copy.deepcopy(self.model)
        weights, _ = RunDirectory(self.directory).read_model(model.file_names(), best=best["round"])
        copy_into(model.state_dict(), weights)
        return model

    def predict(self, x: Any, *, model: nn.Module | None = None) -> npt.NDArray[np.int64]:
        """Return the predicted class of every sample, (n,) int64.

        :param x: raw samples as the data set had them, in an array, a tensor or a list: images (n, H, W),
            (n, H, W, C) or (n, C, H, W), uint8 or floating point, or rows (n, ...). Other kinds of samples come as a
            class with ``gather``, like the data set's own. The result normalises the images.
        :param model: the model of a client (:func:`fedcore.client_model`) instead of the global one.
        :raises DataError: x has another shape or type than the samples of the run.
        :raises ConfigError: the run has no global model.
        """
        found: npt.NDArray[np.int64] = self._logits(x, model).argmax(dim=1).numpy()
        return found

    def predict_proba(self, x: Any, *, model: nn.Module | None = None) -> npt.NDArray[np.float32]:
        """Return the softmax of every sample's logits, (n, C) float32. The arguments are as for :meth:`predict`."""
        found: npt.NDArray[np.float32] = self._logits(x, model).softmax(dim=1).numpy()
        return found

    def evaluate(self, x: Any, y: Any = None, *, model: nn.Module | None = None) -> dict[str, Any]:
        """Return accuracy, mean loss, number of samples and accuracy per class on labelled samples.

        :param x: as for :meth:`predict`.
        :param y: classes (n,), whole numbers from 0 to C-1. Samples of a class with ``gather`` have their own labels.
        :param model: as for :meth:`predict`.
        """
        network = self._chosen(model)
        if not is_samples(x):
            inputs = self.inputs.prepare(x)
            labels = labels_of(np.asarray(y), len(inputs), "y")
            if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.model.num_classes:
                raise DataError(f"y holds classes outside of 0 to {self.model.num_classes - 1}")
            x = TensorSamples(inputs, labels)
        return rates(evaluate(network, x, self.model.num_classes, _device(network)))

    def _logits(self, x: Any, model: nn.Module | None) -> Tensor:
        network, inputs = self._chosen(model).eval(), self.inputs.prepare(x)
        device = _device(network)
        parts = inputs.split(forward_chunk(device)) if isinstance(inputs, Tensor) else [inputs]
        with torch.inference_mode():
            logits = [network(part.to(device))[1].cpu() for part in parts]
        return torch.cat(logits) if len(inputs) else torch.empty(0, self.model.num_classes)

    def _chosen(self, model: nn.Module | None) -> nn.Module:
        if model is None and self.metrics.get("global") is None:
            raise ConfigError(
                "this run has no global model, because parameters stay on the clients; give the model of a client: "
                "model=fedcore.client_model(result.directory, 0)"
            )
        return self.model if model is None else model

    def __repr__(self) -> str:
        """Return one line: method, data set, rounds, final accuracy, directory."""
        figures = [f"{name} {100 * row['accuracy']:.2f} %" for name, row in evaluated(self.metrics).items()]
        accuracy = f", accuracy: {', '.join(figures)}" if figures else ""
        return f"<RunResult {headline(self.config)}, {self.summary['rounds']} rounds{accuracy}; {self.directory}>"

    def _repr_html_(self) -> str:
        """Return the final figures and the learning curve, for a notebook."""
        rows = []
        for name, row in evaluated(self.metrics).items():
            loss = "-" if row["loss"] is None else f"{row['loss']:.4f}"
            cells = [name, PROTOCOLS[name].heading, f"{100 * row['accuracy']:.2f}", loss]
            rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
        table = "<table><tr><th>protocol</th><th>of what</th><th>accuracy %</th><th>loss</th></tr>" + "".join(rows)
        return (
            f"<p><b>{html.escape(headline(self.config))}</b>, {self.summary['rounds']} rounds, "
            f"{self.summary['seconds']:.1f} s</p>{table}</table>"
            f"{learning_curve(accuracies(self.records), self.config.rounds)}"
            f"<p><code>{html.escape(str(self.directory))}</code></p>"
        )


def _device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def headline(config: RunConfig) -> str:
    """Return a run in a few words: ``moon+fedprox on digits``."""
    return f"{method({short_name(name): None for name in config.plugins})} on {short_name(config.dataset)}"


def protocols_of(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of protocols alone from a run's metrics."""
    return {name: metrics[name] for name in PROTOCOLS if name in metrics}


def evaluated(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rows of a run's metrics that are figures of a protocol."""
    return {name: metrics[name] for name in PROTOCOLS if metrics.get(name)}


def accuracies(records: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return pairs of a round (from 1) and an accuracy for every protocol that was evaluated in rounds."""
    found: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for name in EVALUATED if record.get("metrics") else ():
            row = record["metrics"].get(name)
            if row:
                found.setdefault(name, []).append((record["round"] + 1, row["accuracy"]))
    return found


def history_rows(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rounds of ``metrics.jsonl`` as flat rows. Values that a round does not have are left out."""
    rows = []
    for record in records:
        if "round" not in record:
            continue  # the record of post_train
        row: dict[str, Any] = {"round": record["round"] + 1}
        row |= {f"loss.{name}": value for name, value in record["losses"].items()}
        for name, figures in evaluated(record.get("metrics") or {}).items():
            for key in ("accuracy", "loss", "std", "worst10"):
                if figures.get(key) is not None:
                    row[f"{name}.{key}"] = figures[key]
        row["clients"], row["failed"] = len(record["cohort"]), len(record["failures"])
        row |= {"bytes.down": record["bytes"]["down"], "bytes.up": record["bytes"]["up"]}
        row |= {f"report.{path}": value for path, value in flat(record.get("reports", {}), ".")}
        row["seconds"] = sum(record["time"][part] for part in ("round", "evaluation") if part in record["time"])
        rows.append(row)
    return rows
