"""The plugin that measures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedcore import (
    ClientContext,
    ClientUpdate,
    ConfigError,
    Plugin,
    PluginConflictError,
    PluginOptions,
    RunSetup,
    ServerContext,
    SplitModel,
    Tensors,
    check_tensors,
    generator,
    hookimpl,
)
from fedcore_diagnostics import measures
from fedcore_functional import check_counts, class_means, refuse_changed_counts, update_vector

Measure = Literal["cka", "collapse", "classifier", "drift", "prototypes"]
ON_SAMPLES = ("cka", "collapse", "prototypes")
"""The measures that need features of public samples."""

WHOLE = {"cka": "encoder.", "prototypes": "encoder.", "collapse": "", "classifier": "classifier."}
"""Measure -> the part of the model that has to be on the server."""

CHUNK = 500
"""Samples per forward pass; a constant, so that the bits do not depend on the machine."""

Figures = dict[str, Any]


class DiagnosticsOptions(PluginOptions):
    """Options of the diagnostics."""

    measures: tuple[Measure, ...] = Field(
        default=("cka", "collapse", "classifier", "drift", "prototypes"), min_length=1, description="What is measured."
    )
    every: int = Field(default=1, ge=1, le=1_000_000, description="Rounds between measurements; the last is measured.")
    samples: int = Field(
        default=500, ge=2, le=1_000_000, description="Public samples at most, the same ones in every round."
    )


class Diagnostics(Plugin[DiagnosticsOptions]):
    """Records figures of the models in each round, next to any method. The training is the same, bit by bit.

    The server runs the clients' models and the new global model on public samples, and looks at their classifiers and
    at their distance from the global model at the start of the round.
    """

    neutral = {}
    assumes = ("one-model", "classes")

    def __init__(self, options: DiagnosticsOptions) -> None:
        super().__init__(options)
        if any(name in ON_SAMPLES for name in options.measures):
            self.reads = ("public",)

    @hookimpl
    def check_run(self, setup: RunSetup) -> None:
        """Refuse changed class counts, parts that stay on the clients, and public labels of other classes."""
        refuse_changed_counts(setup, self.name)
        if setup.public and "public" in self.reads and int(setup.public.labels.max()) >= setup.task.num_classes:
            raise ConfigError(f"plugin {self.name!r}: --public {setup.config.public} has other classes than the run")
        chosen, personal = self.options.measures, setup.layout.personal
        refused = [m for m in chosen if m in WHOLE and any(name.startswith(WHOLE[m]) for name in personal)]
        if not refused:
            return
        left = ",".join(measure for measure in chosen if measure not in refused) or "drift"
        hint = f"leave out {', '.join(refused)}: --set {self.name}.measures=[{left}]"
        keeper = setup.keeper_of([name for name in personal if name.startswith(WHOLE[refused[0]])])
        if keeper is None:
            raise ConfigError(f"plugin {self.name!r} needs whole models, without --buffers local, or {hint}")
        reason = f"{refused[0]!r} needs parts of the model that {keeper!r} keeps on the clients"
        raise PluginConflictError.of(self.name, keeper, f"{reason}; {hint}")

    # --- client --------------------------------------------------------------------------------------------

    @hookimpl
    def end_local(self, client: ClientContext) -> Tensors | None:
        """Send the class counts, with which the classifier's rows and the prototypes are compared."""
        return {"counts": client.class_counts} if self._due(client.round, client.rounds) else None

    # --- server --------------------------------------------------------------------------------------------

    @hookimpl(tryfirst=True)
    def pre_aggregate(self, server: ServerContext, update: ClientUpdate) -> None:
        """Keep the client's features and its update, as it arrived, until the round's end; measure its classifier."""
        if not self._due(server.round, server.rounds):
            return
        check_tensors(update.payload, {"counts": ((server.num_classes,), torch.int64)})
        check_counts(update.payload["counts"], update.samples, complete=True)
        client, state, chosen = update.client, server.state, self.options.measures
        state[f"{client}:counts"] = update.payload["counts"]
        if "cka" in chosen or "prototypes" in chosen:
            state[f"{client}:features"] = self._outputs(server, server.network(update.model))[0]
        if "classifier" in chosen and (rows := _rows(update.model, server)) is not None:
            state[f"{client}:rows"] = rows
        if "drift" in chosen and server.trainable:
            state[f"{client}:update"] = update_vector(update.model, server.model, server.trainable).float()
            state[f"{client}:samples"] = update.samples

    @hookimpl
    def end_round(self, server: ServerContext) -> None:
        """Measure the round's clients against the new global model."""
        if not self._due(server.round, server.rounds):
            return
        state, clients = server.state, sorted(server.accepted)
        kept = {name: [state.pop(f"{k}:{name}", None) for k in clients] for name in KEPT}
        counts = torch.stack(kept["counts"])
        figures: Figures = {"clients": clients}
        chosen = set(self.options.measures)
        if chosen.intersection(ON_SAMPLES):
            features, logits, labels = self._outputs(server, server.network())
            if "cka" in chosen:
                figures |= _cka(kept["features"], features)
            if "collapse" in chosen:
                figures |= _collapse(features, logits, labels, _rows(server.model, server))
            if "prototypes" in chosen:
                figures |= _prototypes(kept["features"], features, labels, counts)
        if "classifier" in chosen:
            figures |= _classifier(kept["rows"], _rows(server.model, server), counts)
        if "drift" in chosen and server.trainable:
            figures |= _drift(kept["update"], kept["samples"])
        state["figures"], state["round"] = _finite(figures), server.round

    @hookimpl
    def report(self, server: ServerContext) -> Figures | None:
        """Report the figures of this round."""
        return server.state["figures"] if server.state.get("round") == server.round else None

    def _due(self, number: int, rounds: int) -> bool:
        """Whether a round, from 0, is measured."""
        return (number + 1) % self.options.every == 0 or number + 1 == rounds

    def _outputs(self, server: ServerContext, model: SplitModel) -> tuple[Tensor, Tensor, Tensor]:
        """Return a model's features (n, d), logits (n, C) and labels (n,) of the chosen public samples, on the CPU."""
        public = server.public
        assert public is not None
        rows = torch.randperm(len(public), generator=generator(server.config.seed, "diagnostics"))
        rows = rows[: self.options.samples]
        device = next(model.parameters()).device
        with torch.no_grad():
            parts = [model(public.inputs(chunk).to(device)) for chunk in rows.split(CHUNK)]
        features, logits = (torch.cat(each).float().cpu() for each in zip(*parts, strict=True))
        return features, logits, public.labels.cpu()[rows]


KEPT = ("counts", "features", "rows", "update", "samples")
"""What the state holds of each client until the round's end."""


def _rows(model: Any, server: ServerContext) -> Tensor | None:
    """Return a linear classifier's rows with the biases as last column, (C, d + 1) float64; None for another one."""
    weight, bias = model.get("classifier.weight"), model.get("classifier.bias")
    if weight is None or weight.shape != (server.num_classes, server.feature_dim):
        return None
    bias = torch.zeros(len(weight)) if bias is None else bias
    return torch.cat([weight.double(), bias.double().unsqueeze(1)], dim=1)


def _cka(each: Sequence[Tensor], features: Tensor) -> Figures:
    similarities = [measures.linear_cka(own.double(), features.double()) for own in each]
    lowest = min(filter(math.isfinite, _floats(similarities)), default=math.nan)
    return {"cka": _mean(similarities), "cka_lowest": lowest, "cka_of_clients": _floats(similarities)}


def _collapse(features: Tensor, logits: Tensor, labels: Tensor, rows: Tensor | None) -> Figures:
    """Measure neural collapse on the classes that have samples."""
    classes, labels = labels.unique(return_inverse=True)
    features = features.double()
    means, _ = class_means(features, labels, len(classes))
    centred = means - means.mean(0)
    figures = {
        "nc1": float(measures.within_class_variability(features, labels, means)),
        "nc2_norms": float(measures.norm_spread(centred)),
        "nc2_angles": float(measures.angle_spread(centred)),
        "nc2_simplex": float(measures.distance_from_simplex(centred)),
        "nc4": float(measures.nearest_mean_mismatch(logits[:, classes], features, means)),
    }
    if rows is not None:
        weights = rows[classes, :-1]
        figures["nc2_norms_rows"] = float(measures.norm_spread(weights))
        figures["nc2_angles_rows"] = float(measures.angle_spread(weights))
        figures["nc2_simplex_rows"] = float(measures.distance_from_simplex(weights))
        figures["nc3"] = float(measures.duality_distance(weights, means))
    return figures


def _prototypes(each: Sequence[Tensor], features: Tensor, labels: Tensor, counts: Tensor) -> Figures:
    """Measure the drift of class means, apart for the classes that a client holds and for those that it lacks."""
    classes, labels = labels.unique(return_inverse=True)
    means, _ = class_means(features.double(), labels, len(classes))
    own = [class_means(one.double(), labels, len(classes))[0] for one in each]
    drift = torch.stack([measures.prototype_drift(one, means) for one in own])  # (K, C)
    held = counts[:, classes] > 0
    return {"prototypes_held": float(drift[held].mean()), "prototypes_lacked": float(drift[~held].mean())}


def _classifier(each: Sequence[Tensor | None], rows: Tensor | None, counts: Tensor) -> Figures:
    """Report norms and biases of the global classifier with the shares, and the clients' correlations with theirs."""
    if rows is None:
        return {}
    shares = counts.double() / counts.sum(1, keepdim=True)  # (K, C)
    of_all = counts.sum(0).double() / counts.sum()
    pairs = [(own, share) for own, share in zip(each, shares, strict=True) if own is not None]
    return {
        "norms_by_shares": _mean(measures.correlation(own[:, :-1].norm(dim=1), share) for own, share in pairs),
        "biases_by_shares": _mean(measures.correlation(own[:, -1], share) for own, share in pairs),
        "norms": _floats(rows[:, :-1].norm(dim=1)),
        "biases": _floats(rows[:, -1]),
        "shares": _floats(of_all),
    }


def _drift(updates: Sequence[Tensor], samples: Sequence[int]) -> Figures:
    mean = torch.zeros(len(updates[0]), dtype=torch.float64)
    for update, n in zip(updates, samples, strict=True):
        mean.add_(update.double(), alpha=n / sum(samples))
    norms = [update.double().norm() for update in updates]
    cosines = [measures.update_cosine(update.double(), mean) for update in updates]
    return {
        "drift": _mean(norms),
        "drift_cosine": _mean(cosines),
        "drift_of_clients": _floats(norms),
        "drift_cosine_of_clients": _floats(cosines),
    }


def _floats(values: Iterable[Tensor]) -> list[float]:
    return [float(value) for value in values]


def _mean(values: Iterable[Tensor]) -> float:
    """Return the mean of the values that are defined; nan if none is."""
    defined = [value for value in _floats(values) if math.isfinite(value)]
    return sum(defined) / len(defined) if defined else math.nan


def _finite(value: Any) -> Any:
    """Return JSON values with null for numbers that are not finite."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
