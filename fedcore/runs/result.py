"""A finished run in Python: its figures, its history, and its model, which predicts. A picture of it for notebooks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from fedcore.base import registry
from fedcore.base.config import RunConfig
from fedcore.base.errors import ConfigError
from fedcore.base.identity import title
from fedcore.base.metrics import Metrics
from fedcore.base.protocols import PROTOCOLS
from fedcore.data import Task
from fedcore.data.inputs import Inputs
from fedcore.models.split import SplitModel
from fedcore.runs.directory import RunDirectory
from fedcore.runs.rounds import evaluated, history_rows, in_short


@dataclass(frozen=True, repr=False)
class RunResult:
    """A finished run."""

    model: SplitModel
    """The global model as encoder and classifier, on the CPU, in eval mode. It takes normalised inputs.

    Parameters that stay on the clients have their initial values in it.
    """
    inputs: Inputs
    """How raw samples become inputs of the model."""
    directory: Path
    """The run directory."""
    summary: dict[str, Any]
    """The content of ``summary.json``."""
    config: RunConfig
    """The options of the run without its directory and labels. ``fedcore.run(result.config)`` runs it again.

    Objects that the program gave to the run have to be given again: ``fedcore.run(result.config, model=Net)``.
    """
    further: Metrics
    """The run's metrics next to accuracy and loss, by name."""
    task: Task
    """What the labels are."""

    @property
    def metrics(self) -> dict[str, Any]:
        """The final figures by protocol. A protocol without figures is None or absent."""
        metrics = self.summary["metrics"]
        return {name: metrics[name] for name in PROTOCOLS if name in metrics}

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes, in the order of their numbers; empty if the data set has no names."""
        return self.inputs.class_names

    @property
    def accuracy(self) -> float | None:
        """The final accuracy, from 0 to 1: of the global model on the test set, else of the first protocol measured.

        It is None for a task without classes.
        """
        return next((row.get("accuracy") for row in evaluated(self.metrics).values()), None)

    @property
    def records(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl``: everything that was recorded about each round.

        A last one has ``phase`` instead of ``round``: of ``post_train``, if it changed the model or a client failed.
        """
        return RunDirectory(self.directory).metrics.read()

    @property
    def history(self) -> list[dict[str, Any]]:
        """One row per round: rate, losses, bytes, seconds, and all figures of protocols if the round was evaluated.

        ``report.PLUGIN.NAME`` holds the result of a plugin's hook ``report``. ``pandas.DataFrame(result.history)``
        makes a table.
        """
        return history_rows(self.records)

    @property
    def network(self) -> nn.Module:
        """A copy of the trained network, of the class that was given as model. It takes normalised inputs.

        :raises ConfigError: the run has no global model, or a plugin or ``--projection`` gave the model layers that the
            network does not have.
        """
        self.require_global()
        return self.model.network()

    @property
    def best_model(self) -> SplitModel:
        """The global model of the best round on the clients' held-out parts, for ``predict(x, model=...)``.

        :raises ConfigError: the run did not keep it.
        :raises RunDirectoryError: its file is missing or damaged.
        """
        best: SplitModel = _function("best_model")(self)
        return best

    def predict(self, x: Any, *, model: nn.Module | None = None) -> npt.NDArray[Any]:
        """Return the predicted class of every sample, (n,) int64; for another task its predictions, (n, ...).

        :param x: raw samples as the data set had them, in an array, a tensor or a list: images (n, H, W),
            (n, H, W, C) or (n, C, H, W), uint8 or floating point, or rows (n, ...). Other kinds of samples come as a
            class with ``gather``, like the data set's own. The result normalises images, and rows of a table that the
            data set normalised, as those of ``hf:FILE.csv``.
        :param model: the model of a client (:func:`fedcore.client_model`), or a network with logits as output, instead
            of the global model. It keeps its mode, of training or evaluation.
        :raises DataError: x has another shape or type than the samples of the run, or the model's output is nan or
            infinite.
        :raises ConfigError: the run has no global model, or the package fedcore-zoo, which predicts, is not installed.
        """
        predictions: npt.NDArray[Any] = _function("predict")(self, x, model)
        return predictions

    def predict_proba(self, x: Any, *, model: nn.Module | None = None) -> npt.NDArray[np.float32]:
        """Return the softmax of every sample's logits, (n, C) float32. The arguments are as for :meth:`predict`.

        :raises ConfigError: the run's task has no probabilities.
        """
        probabilities: npt.NDArray[np.float32] = _function("predict_proba")(self, x, model)
        return probabilities

    def evaluate(self, x: Any, y: Any = None, *, model: nn.Module | None = None) -> dict[str, Any]:
        """Return accuracy, mean loss, number of samples, accuracy per class and the run's metrics on labelled samples.

        :param x: as for :meth:`predict`.
        :param y: classes (n,), whole numbers from 0 to C-1, or their names; labels of another task as it takes them.
            Samples of a class with ``gather`` have their own labels.
        :param model: as for :meth:`predict`.
        """
        figures: dict[str, Any] = _function("evaluate")(self, x, y, model)
        return figures

    def require_global(self) -> None:
        """Refuse to use the global model if the run has none.

        :raises ConfigError: with the way to a client's own model.
        """
        if self.metrics.get("global") is None:
            raise ConfigError(
                "this run has no global model, because parameters stay on the clients; take the model of a client: "
                "model=fedcore.client_model(result.directory, 0)"
            )

    def __repr__(self) -> str:
        """Return one line: method, data set, rounds, final accuracy, directory."""
        figures = [f"{name} {in_short(row)}" for name, row in evaluated(self.metrics).items()]
        kind = "accuracy" if self.task.classes else "figures"
        accuracy = f", {kind}: {', '.join(figures)}" if figures else ""
        return f"<RunResult {title(self.config)}, {self.summary['rounds']} rounds{accuracy}; {self.directory}>"

    def _repr_html_(self) -> str | None:
        """Return the final figures for a notebook, as a package draws them; None without one."""
        if "result" not in registry.available("table"):
            return None
        page: str = registry.resolve("table", "result")(self)
        return page


def _function(name: str) -> Any:
    """Return the function of the package fedcore-zoo behind a method of a result.

    :raises ConfigError: the package is not installed.
    """
    return getattr(registry.needed("feature", "predictions", f"result.{name}"), name)
