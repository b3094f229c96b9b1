"""What fedcore computes for the cases of the fixtures: one function for each name that a case can call.

Public names only: a method's functions, a plugin's hooks with a stub of the context that they read, or a whole run.
Lists of numbers come as float64 tensors; a result may be a number, a tensor, or lists of either.
"""

from __future__ import annotations

import contextlib
import copy
import math
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fedcore.data
import fedcore_attacks
import fedcore_ccvr
import fedcore_compress
import fedcore_dp
import fedcore_fedala
import fedcore_fedamp
import fedcore_fedavgm
import fedcore_fedbuff
import fedcore_fedcp
import fedcore_feddc
import fedcore_feddecorr
import fedcore_feddyn
import fedcore_fedetf
import fedcore_fedgen
import fedcore_fedlc
import fedcore_fednh
import fedcore_fednova
import fedcore_fedntd
import fedcore_fedopt
import fedcore_fedpac
import fedcore_fedrs
import fedcore_fedsam
import fedcore_fedtgp
import fedcore_fpl
import fedcore_functional
import fedcore_metrics
import fedcore_per_fedavg
import fedcore_power_of_choice
import fedcore_qffl
import fedcore_robust
import fedcore_scaffold
import fedcore_zoo
from fedcore_testing import (
    Cohorts,
    EqualWeights,
    Quadratic,
    W,
    analytic_federation,
    federate,
    hidden_tanh,
    personal_state,
)
from fedcore_testing import weights as trained_weights

CALLS: dict[str, Callable[..., Any]] = {}


def call(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function one that cases can name."""
    CALLS[function.__name__] = function
    return function


def compute(case: Mapping[str, Any]) -> Any:
    """Return what fedcore computes for a case, as nested lists of numbers."""
    return listed(CALLS[case["call"]](**{key: _tensor(value) for key, value in case["inputs"].items()}))


def listed(value: Any) -> Any:
    """Return tensors and arrays as lists."""
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return value.tolist()
    return [listed(item) for item in value] if isinstance(value, (list, tuple)) else value


def _tensor(value: Any) -> Any:
    """Return a list of floats as a tensor, float64, and whole numbers or ragged lists as they are."""
    if isinstance(value, list) and _floats(value):
        with contextlib.suppress(ValueError, TypeError):  # ragged
            return torch.tensor(value, dtype=torch.float64)
    return value


def _floats(value: Any) -> bool:
    if isinstance(value, list):
        return any(_floats(item) for item in value)
    return isinstance(value, float)


# --- stubs ----------------------------------------------------------------------------------------------------


class _State(dict[str, Any]):
    """The server's state, with its sums in float64."""

    def add(self, key: str, value: Tensor, weight: float = 1.0) -> None:
        self[key] = self.get(key, 0) + value.double() * weight


def _server(start: Tensor, **values: Any) -> Any:
    given = {"state": _State(), "frozen": frozenset(), "trainable": ["w"], "lr": 1.0, "round": 0, "num_clients": 1}
    given["note"] = print
    return SimpleNamespace(**{"model": {"w": start}, "accepted": [], **given, **values})


def _mean(models: Tensor, shares: Any) -> Tensor:
    shares = torch.as_tensor(shares, dtype=torch.float64)
    return (shares / shares.sum()) @ models


def _stepped(plugin: Any, server: Any, mean: Tensor) -> Tensor:
    changed: Tensor = (plugin.server_step(server, {"w": mean}) or {"w": mean})["w"]
    return changed


# --- means and server optimizers -----------------------------------------------------------------------------


@call
def weighted_mean(models: Tensor, shares: Any = None) -> Tensor:
    """A run of one round in which client i's trained model is ``models[i]`` exactly; shares are its samples."""
    models = models.reshape(len(models), -1)
    wide = torch.nn.functional.pad(models, (0, int(models.shape[1] == 1)))  # a run has two classes at least
    counts = [1] * len(models) if shares is None else [round(float(share) * 100) for share in shares]
    counts = [count // math.gcd(*counts) for count in counts]
    plugins = [Quadratic, EqualWeights] if shares is None else [Quadratic]
    with tempfile.TemporaryDirectory() as folder:
        run = federate(Path(folder), *plugins, **analytic_federation(wide.tolist(), counts), lr=1.0, rounds=1)
        return trained_weights(run)[W][: models.shape[1]]


@call
def whole_run(
    x: Tensor,
    labels: Sequence[int],
    parts: Sequence[Any],
    weights: Sequence[Any],
    rounds: int,
    epochs: int,
    lr: float,
    plugins: Mapping[str, Any],
    options: Mapping[str, Any],
    cohorts: Sequence[Sequence[int]] = (),
    kept: str = "",
    equal: bool = False,
) -> Tensor:
    """The weights, flat, after a run of a network of 5, 6 and 3 units with tanh on full batches of plain SGD.

    :param cohorts: the clients of each round; all where it is empty.
    :param kept: who keeps weights on the clients, a plugin or the core: these follow, client by client.
    :param equal: clients count the same.
    """

    def dataset(data_dir: Path | None = None) -> fedcore.data.Dataset:
        rows = x.float().view(len(x), 1, 1, -1)
        samples = fedcore.data.ResidentSamples(rows, torch.tensor(labels), [0.0], [1.0])
        return fedcore.data.Dataset("whole", samples, samples, num_classes=3, input_shape=(1, 1, 5))

    def partition(labels: Any, num_clients: int, **_: Any) -> list[Any]:
        return [np.asarray(part) for part in parts]

    def model(num_classes: int, input_shape: tuple[int, ...]) -> Any:
        made = hidden_tanh(num_classes, input_shape)
        with torch.no_grad():
            for parameter, value in zip(made.parameters(), weights, strict=True):
                parameter.copy_(_double(value))
        return made

    plain = {"momentum": 0.0, "weight_decay": 0.0, "batch_size": 1000, "clients": len(parts), "local_epochs": epochs}
    more: list[Any] = [*([(Cohorts, {"rounds": cohorts})] if cohorts else []), *([EqualWeights] if equal else [])]
    with tempfile.TemporaryDirectory() as folder:
        result = federate(
            Path(folder),
            *plugins.items(),
            *more,
            dataset=dataset,
            partition=partition,
            model=model,
            rounds=rounds,
            lr=lr,
            **{**plain, **options},
        )
        trained = trained_weights(result)
        own = [personal_state(result, client, kept) for client in range(len(parts))] if kept else []
    if kept == "fedcore":
        trained = {name: tensor for name, tensor in trained.items() if name not in own[0]}
    layers = ("encoder.base.1.weight", "encoder.base.1.bias", "classifier.weight", "classifier.bias", "weight", "bias")
    parts_of = [some[name] for some in (trained, *own) for name in layers if name in some]
    return torch.cat([tensor.double().flatten() for tensor in parts_of])


_SERVERS = {
    "fedavgm": (fedcore_fedavgm.FedAvgM, fedcore_fedavgm.FedAvgMOptions),
    "fedadam": (fedcore_fedopt.FedAdam, fedcore_fedopt.FedAdamOptions),
    "fedyogi": (fedcore_fedopt.FedYogi, fedcore_fedopt.FedYogiOptions),
    "fedadagrad": (fedcore_fedopt.FedAdagrad, fedcore_fedopt.FedAdagradOptions),
}


@call
def server_rounds(plugin: str, options: Mapping[str, Any], start: Tensor, means: Tensor) -> list[Tensor]:
    """The global model after each round of a server optimizer, given the clients' mean of each."""
    made, kind = _SERVERS[plugin]
    method, server, models = made(kind(**options)), _server(start), []
    for mean in means:
        server.model = {"w": _stepped(method, server, mean)}
        models.append(server.model["w"])
    return models


@call
def server_moves(plugin: str, options: Mapping[str, Any], start: Tensor, gradients: Tensor) -> list[Tensor]:
    """As :func:`server_rounds`, where a round's clients moved by minus a gradient, wherever they started."""
    made, kind = _SERVERS[plugin]
    method, server, models = made(kind(**options)), _server(start), []
    for gradient in gradients:
        server.model = {"w": _stepped(method, server, server.model["w"] - gradient)}
        models.append(server.model["w"])
    return models


@call
def momentum_steps(variant: str, beta: float, moves: Tensor) -> list[Tensor]:
    """The directions of a server's momentum."""
    velocity, steps = None, []
    for move in moves:
        step, velocity = fedcore_fedavgm.momentum_step(move, velocity, beta, variant)
        steps.append(step)
    return steps


@call
def momentum_velocity(beta: float, moves: Tensor) -> Tensor:
    """The velocity of heavy ball after some moves."""
    velocity = None
    for move in moves:
        _, velocity = fedcore_fedavgm.momentum_step(move, velocity, beta, "heavy-ball")
    return velocity[0]


@call
def adaptive_steps(
    kind: str,
    moves: Tensor,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 0.0,
    corrected: bool = True,
    lr: float = 1.0,
) -> list[Tensor]:
    """The steps of FedOpt's equations from v = 0, with Adam's correction of the bias put in by hand."""
    first, second, steps = None, torch.zeros_like(moves[0]), []
    for number, move in enumerate(moves, 1):
        first = move if kind == "adagrad" else fedcore_fedopt.first_moment(move, first, beta1)
        renewed = {"adam": fedcore_fedopt.adam, "yogi": fedcore_fedopt.yogi}.get(kind)
        second = renewed(move, second, beta2) if renewed else fedcore_fedopt.adagrad(move, second)
        right = (1 - beta1**number, 1 - beta2**number) if corrected and renewed else (1.0, 1.0)
        steps.append(fedcore_fedopt.server_update(first / right[0], second / right[1], lr, tau))
    return steps


@call
def fednova_norm(steps: int, momentum: float = 0.0, shrinkage: float = 0.0) -> float:
    """|a_i|_1: how far so many steps along a constant gradient lead."""
    return fedcore_fednova.local_norm(steps, momentum, shrinkage)


@call
def fednova_round(start: Tensor, models: Tensor, steps: Sequence[int], samples: Sequence[int]) -> Tensor:
    """The global model after a round of FedNova with plain SGD."""
    plugin, server = fedcore_fednova.FedNova(fedcore_fednova.FedNovaOptions()), _server(start)
    shares = []
    for model, count, held in zip(models, steps, samples, strict=True):
        update = SimpleNamespace(model={"w": model}, steps=count, momentum=0.0, lr=0.1, samples=held)
        shares.append(plugin.weight(server, update))
        plugin.accumulate(server, update)
    return _stepped(plugin, server, _mean(models, shares))


@call
def qffl_round(q: float, start: Tensor, models: Tensor, losses: Tensor, lr: float) -> Tensor:
    """The global model after a round of q-FedAvg, with the paper's step and weighting."""
    options = fedcore_qffl.QFedAvgOptions(q=q, step="rate", weighting="uniform")
    plugin, server, shares = fedcore_qffl.QFedAvg(options), _server(start), []
    for model, loss in zip(models, losses, strict=True):
        sent = {"loss": loss.clone()}
        update = SimpleNamespace(model={"w": model}, payload=sent, samples=10, lr=lr, steps=4, momentum=0.0)
        shares.append(plugin.weight(update))
        plugin.accumulate(server, update)
    return _stepped(plugin, server, _mean(models, shares))


@call
def scaffold_round(
    start: Tensor, models: Tensor, changes: Tensor, clients: int, lr: float = 1.0, control: Tensor | None = None
) -> list[Tensor]:
    """The global model and c after a round of SCAFFOLD, clients counting the same."""
    plugin = fedcore_scaffold.Scaffold(fedcore_scaffold.ScaffoldOptions(server_lr=lr, weighting="uniform"))
    state = _State() if control is None else _State({"c.w": control.clone()})
    sizes = torch.full((clients,), 5)
    server = _server(start, state=state, num_clients=clients, client_sizes=sizes)
    for client, change in enumerate(changes):
        plugin.accumulate(server, SimpleNamespace(payload={"w": change}, client=client))
    return [_stepped(plugin, server, models.mean(dim=0)), server.state["c.w"]]


@call
def scaffold_local(start: Tensor, gradients: Tensor, lr: float, control: Tensor, own: Tensor) -> list[Tensor]:
    """A client's model after plain steps along its gradients, corrected, and the change of its c_i (Option II)."""
    corrected, model = fedcore_functional.correction(start, control, own), start
    for gradient in gradients:
        model = model - lr * (gradient + corrected)
    steps = len(gradients)
    renewed = fedcore_functional.renewed_control(start, model, corrected, lr=lr, steps=steps, momentum=0.0)
    return [model, renewed - own]


@call
def scaffold_control(start: Tensor, trained: Tensor, corrected: Tensor | None, lr: float, steps: int) -> Tensor:
    """A client's renewed c_i."""
    start, trained = torch.as_tensor(start), torch.as_tensor(trained)
    corrected = None if corrected is None else torch.as_tensor(corrected)
    return fedcore_functional.renewed_control(start, trained, corrected, lr=lr, steps=steps, momentum=0.0)


@call
def feddyn_rounds(start: Tensor, rounds: Tensor, clients: int, alpha: float) -> list[Tensor]:
    """The global model after each round of FedDyn's server, clients counting the same."""
    plugin = fedcore_feddyn.FedDyn(fedcore_feddyn.FedDynOptions(alpha=alpha, weighting="uniform"))
    server, models = _server(start, num_clients=clients, accepted=list(range(rounds.shape[1]))), []
    for trained in rounds:
        server.model = {"w": _stepped(plugin, server, trained.mean(dim=0))}
        models.append(server.model["w"])
    return models


@call
def proximal(parameters: Tensor, reference: Tensor, weight: float) -> Tensor:
    """The proximal term times a weight: mu of FedProx."""
    return weight * fedcore_functional.proximal_term([parameters], [reference])


@call
def proximal_gradient(parameters: Tensor, reference: Tensor, weight: float) -> Tensor:
    """The gradient of the proximal term times a weight."""
    moved = parameters.clone().requires_grad_()
    (weight * fedcore_functional.proximal_term([moved], [reference])).backward()
    return moved.grad


@call
def proximal_run(start: float, batches: Sequence[Sequence[float]], mu: float, lr: float = 1.0) -> float:
    """How far plain steps on the loss mean(batch) w plus the proximal term lead."""
    w = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    reference = w.detach().clone()
    for batch in batches:
        loss = torch.as_tensor(batch).mean() * w + mu * fedcore_functional.proximal_term([w], [reference])
        (slope,) = torch.autograd.grad(loss, w)
        w = (w - lr * slope).detach().requires_grad_()
    return start - float(w.detach())


@call
def staleness(rounds: int, power: float) -> float:
    """FedBuff's discount."""
    return fedcore_fedbuff.discount(rounds, power)


@call
def mixed_models(server: Tensor, client: Tensor, share: float) -> Tensor:
    """A server's model moved towards a client's by a share."""
    return fedcore_fedbuff.server_update(server, client, share)


# --- robust rules and attacks --------------------------------------------------------------------------------


def _krum(rows: Tensor, attackers: int, keep: int) -> list[int]:
    scores = fedcore_robust.krum_scores(fedcore_robust.squared_distances([rows]), attackers)
    return fedcore_robust.lowest(scores, keep)


@call
def trimmed_mean(rows: Tensor, trim: int) -> Tensor:
    """The mean without the ``trim`` least and largest values of each coordinate."""
    return fedcore_robust.trimmed_mean(rows, trim)


@call
def median(rows: Tensor) -> Tensor:
    """The coordinate-wise median."""
    return fedcore_robust.coordinate_median(rows)


@call
def geometric_median(rows: Tensor, smoothing: float = 1e-6, iterations: int = 3000) -> Tensor:
    """RFA's point."""
    return fedcore_robust.geometric_median(rows, smoothing, iterations)


@call
def krum(rows: Tensor, attackers: int, keep: int = 1) -> Tensor:
    """The mean of the vectors that Krum (keep 1) or Multi-Krum chooses."""
    return rows[_krum(rows, attackers, keep)].mean(dim=0)


@call
def krum_best_scores(rows: Tensor, attackers: int, keep: int) -> Tensor:
    """The scores of the chosen: of multiples of one vector several are equal up to rounding."""
    scores = fedcore_robust.krum_scores(fedcore_robust.squared_distances([rows]), attackers)
    return scores.sort().values[:keep]


@call
def bulyan_choice(rows: Tensor, attackers: int) -> list[int]:
    """The positions that Bulyan's first step chooses."""
    return fedcore_robust.bulyan_selection(fedcore_robust.squared_distances([rows]), attackers)


@call
def bulyan(rows: Tensor, attackers: int) -> Tensor:
    """Bulyan."""
    chosen = rows[bulyan_choice(rows, attackers)]
    return fedcore_robust.mean_around_median(chosen, len(chosen) - 2 * attackers)


@call
def mean_around_median(rows: Tensor, count: int) -> Tensor:
    """The mean of the ``count`` values next to the median, of each coordinate."""
    return fedcore_robust.mean_around_median(rows, count)


@call
def centred_clipping(rows: Tensor, centre: Tensor, radius: float, iterations: int) -> Tensor:
    """Centred clipping."""
    return fedcore_robust.centred_clipping(rows, centre, radius, iterations)


@call
def centred_clipping_twice(rows: Tensor, again: Tensor, radius: float, iterations: int) -> Tensor:
    """Two rounds of centred clipping from 0; the second starts at the first's result."""
    first = fedcore_robust.centred_clipping(rows, torch.zeros_like(rows[0]), radius, iterations)
    return fedcore_robust.centred_clipping(again, first, radius, iterations)


@call
def neighbour_mixing(rows: Tensor, attackers: int) -> Tensor:
    """NNM."""
    return fedcore_robust.neighbour_weights(fedcore_robust.squared_distances([rows]), attackers) @ rows


@call
def bucketing(rows: Tensor, order: Sequence[int], size: int) -> Tensor:
    """The means of buckets, in an order."""
    return fedcore_robust.bucket_weights(torch.tensor(order), size) @ rows


@call
def norm_clipping(rows: Tensor, bound: float, centre: Tensor | None = None) -> list[Tensor]:
    """Each vector's movement from the centre, clipped."""
    middle = torch.zeros_like(rows[0]) if centre is None else centre
    moves = [row - middle for row in rows]
    return [middle + move * fedcore_robust.clip_factor(float(move.norm()), bound) for move in moves]


@call
def norm_clip_factor(norm: float, bound: float) -> float:
    """The factor of norm clipping."""
    return fedcore_robust.clip_factor(norm, bound)


@call
def trim_count(fraction: float, clients: int) -> int:
    """How many values the trimmed mean drops at each side."""
    rule = fedcore_robust.TrimmedMean(fedcore_robust.RuleOptions(fraction=fraction))
    rule.name = "trimmed-mean"
    return rule.attackers(_server(torch.zeros(1)), clients, (clients - 1) // 2)


@call
def alie(rows: Tensor, z: float) -> Tensor:
    """A little is enough, of the honest updates."""
    return fedcore_attacks.alie(rows, z)


@call
def alie_z(clients: int, malicious: int) -> float:
    """ALIE's z."""
    return fedcore_attacks.alie_z(clients, malicious)


@call
def inner_product_manipulation(rows: Tensor, epsilon: float) -> Tensor:
    """Minus epsilon times the honest mean."""
    return fedcore_attacks.inner_product_manipulation(rows, epsilon)


@call
def flipped_labels(labels: Sequence[int], classes: int) -> Tensor:
    """The labels of a client that flips them."""
    return fedcore_attacks.flipped_labels(torch.tensor(labels), classes)


# --- privacy -------------------------------------------------------------------------------------------------


@call
def epsilon(noise: float, rate: float, rounds: int, delta: float, accountant: str = "pld") -> float:
    """What so many rounds have spent."""
    return fedcore_dp.spent_epsilon(noise, rate, rounds, delta, accountant)


@call
def dp_clip_factor(norm: float, bound: float) -> float:
    """The factor that an update of this norm is clipped with."""
    return fedcore_dp.clip_factor(norm, bound)


@call
def dp_clip(tensors: Sequence[Any], bound: float) -> list[float]:
    """An update of several tensors, clipped by their joint norm, flat."""
    parts = [torch.as_tensor(part, dtype=torch.float64).flatten() for part in tensors]
    factor = fedcore_dp.clip_factor(fedcore_dp.joint_norm(parts), bound)
    return [factor * float(value) for part in parts for value in part]


@call
def joint_norm(tensors: Sequence[Any]) -> float:
    """The norm of several tensors together."""
    return fedcore_dp.joint_norm([torch.as_tensor(part, dtype=torch.float64) for part in tensors])


@call
def noised_mean(total: Any, noise: Any, multiplier: float, bound: float, lot: float) -> Tensor:
    """A sum with its noise, divided."""
    return fedcore_dp.noised_mean(torch.as_tensor(total), torch.as_tensor(noise), multiplier, bound, lot)


@call
def noise_of_mean(multiplier: float, bound: float, clients: float) -> float:
    """The standard deviation of the noise of a mean."""
    return float(fedcore_dp.noised_mean(0.0, torch.tensor(1.0, dtype=torch.float64), multiplier, bound, clients))


@call
def update_multiplier(noise: float, count_noise: float) -> float:
    """z_delta, where the count of clipped updates is noised too."""
    return fedcore_dp.update_multiplier(noise, count_noise)


@call
def adaptive_run_is_possible(noise: float, clients: int) -> bool:
    """Whether dp trains with an adaptive bound at the default noise of the count."""
    plugin = ("dp", {"noise_multiplier": noise, "quantile": 0.5})
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = federate(Path(folder), plugin, clients=clients, rounds=1, partition="iid")
    return math.isfinite(result.metrics["global"]["loss"])


@call
def noised_share(centred: float, noise: float, clients: int) -> float:
    """The estimated share of updates within the bound."""
    return fedcore_dp.noised_share(centred, noise, clients)


@call
def next_clip(clip: float, inside: Sequence[float], quantile: float, rate: float) -> float:
    """The next bound; ``inside`` is 1 for each update that was within it."""
    share = fedcore_dp.noised_share(sum(one - 0.5 for one in inside), 0.0, len(inside))
    return fedcore_dp.next_clip(clip, share, quantile, rate)


@call
def noised_clips(
    clip: float, centred: float, noises: Sequence[float], clients: int, quantile: float, rate: float
) -> list[float]:
    """The bounds of several rounds with the same centred count and given noise."""
    bounds = []
    for noise in noises:
        clip = fedcore_dp.next_clip(clip, fedcore_dp.noised_share(centred, float(noise), clients), quantile, rate)
        bounds.append(clip)
    return bounds


@call
def clip_after(clip: float, norms: Tensor, rounds: int, quantile: float, rate: float) -> float:
    """The bound after many rounds with updates of these norms, without noise."""
    for _ in range(rounds):
        centred = sum(0.5 if norm <= clip else -0.5 for norm in norms.tolist())
        clip = fedcore_dp.next_clip(clip, fedcore_dp.noised_share(centred, 0.0, len(norms)), quantile, rate)
    return clip


# --- partitions ----------------------------------------------------------------------------------------------

_SCHEMES: dict[str, Callable[..., Any]] = {
    "iid": fedcore.data.iid,
    "dirichlet": fedcore.data.dirichlet,
    "dirichlet-clients": fedcore_zoo.dirichlet_clients,
    "shards": fedcore_zoo.shards,
    "classes": fedcore_zoo.classes,
    "quantity": fedcore_zoo.quantity,
    "niid-bench": fedcore_zoo.niid_bench,
}


@call
def capped_counts(counts: Sequence[int], draws: Tensor) -> Any:
    """Samples by class and client from the draws of a Dirichlet partition that stops where a client is full."""
    return fedcore.data.capped_counts(np.asarray(counts), draws.numpy())


@call
def partition(
    scheme: str, labels: Sequence[int], clients: int, figures: Sequence[str], seed: int = 0, **options: Any
) -> list[Any]:
    """Figures of a partition that are the same whatever the draws."""
    known = np.asarray(labels)
    parts = _SCHEMES[scheme](known, clients, seed=seed, **options)
    return [float(one) for figure in figures for one in np.atleast_1d(partition_figure(parts, known, figure))]


def partition_figure(parts: Sequence[Any], labels: Any, figure: str) -> Any:
    """Return one figure of a partition; ``benchmarks/oracles/cases.py`` has the libraries' own."""
    held = np.concatenate([np.asarray(part, dtype=int) for part in parts])
    classes = [set(labels[np.asarray(part, dtype=int)].tolist()) for part in parts]
    number = int(labels.max()) + 1
    figures: dict[str, Callable[[], Any]] = {
        "sizes": lambda: sorted(len(part) for part in parts),
        "samples": lambda: len(held),
        "every sample once": lambda: int(sorted(held.tolist()) == list(range(len(labels)))),
        "sizes differ": lambda: int(len({len(part) for part in parts}) > 1),
        "at least ten each": lambda: int(min(len(part) for part in parts) >= 10),
        "most classes": lambda: max(len(some) for some in classes),
        "least classes": lambda: min(len(some) for some in classes),
        "at most two classes": lambda: int(max(len(some) for some in classes) <= 2),
        "at most three classes": lambda: int(max(len(some) for some in classes) <= 3),
        "client k has class k mod C": lambda: int(all(k % number in some for k, some in enumerate(classes))),
        "mean entropy": lambda: round(
            float(np.mean([_entropy(labels[np.asarray(part, dtype=int)]) for part in parts])), 2
        ),
    }
    return figures[figure]()


def _entropy(labels: Any) -> float:
    shares = np.bincount(labels)[np.bincount(labels) > 0] / len(labels)
    return float(-(shares * np.log(shares)).sum())


# --- metrics and compression ---------------------------------------------------------------------------------

_METRICS = {
    "macro-f1": fedcore_metrics.MacroF1,
    "balanced-accuracy": fedcore_metrics.BalancedAccuracy,
    "calibration-error": fedcore_metrics.CalibrationError,
    "auroc": fedcore_metrics.AUROC,
}


@call
def metric_value(metric: str, logits: Tensor, labels: Sequence[int]) -> float:
    """A metric of samples."""
    counted = _METRICS[metric](logits.shape[1])
    return counted.value(counted.count(logits.float(), torch.tensor(labels)).double())


@call
def top_k(values: Tensor, fraction: float) -> list[int]:
    """The positions that top-k sends."""
    kept = fedcore_compress.keep_count(len(values), fraction)
    return sorted(fedcore_compress.largest(values, kept).tolist())


@call
def top_k_count(size: int, fraction: float) -> int:
    """How many entries top-k sends."""
    return fedcore_compress.keep_count(size, fraction)


@call
def qsgd_norm(values: Tensor, levels: int = 7, bucket: int = 4) -> Tensor:
    """The norm that QSGD sends."""
    return fedcore_compress.quantise(values, torch.full((len(values),), 0.5), levels, bucket)[1][0]


@call
def qsgd_mean(values: Tensor, levels: int = 7, bucket: int = 4) -> Tensor:
    """The mean over evenly spread chances of what QSGD's receiver gets: without bias it is the vector."""
    chances = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
    got = [
        fedcore_compress.dequantise(
            *fedcore_compress.quantise(values, torch.full((len(values),), float(chance)), levels, bucket),
            levels,
            bucket,
        )
        for chance in chances
    ]
    return torch.stack(got).mean(dim=0)


# --- losses and personalised methods -------------------------------------------------------------------------


@call
def fedlc_loss(logits: Tensor, labels: Sequence[int], counts: Sequence[int], tau: float) -> Tensor:
    """FedLC's calibrated cross-entropy."""
    margins = fedcore_fedlc.margins(torch.tensor(counts), tau)
    return fedcore_fedlc.calibrated_cross_entropy(logits, torch.tensor(labels), margins)


@call
def fedrs_loss(
    logits: Tensor, labels: Sequence[int], counts: Sequence[int], alpha: float, restrict: str = "missing"
) -> Tensor:
    """FedRS's cross-entropy of the restricted softmax."""
    factors = fedcore_fedrs.missing_factors if restrict == "missing" else fedcore_fedrs.frequency_factors
    return fedcore_fedrs.restricted_cross_entropy(logits, torch.tensor(labels), factors(torch.tensor(counts), alpha))


@call
def balanced_softmax(logits: Tensor, labels: Sequence[int], counts: Sequence[int]) -> Tensor:
    """FedROD's loss of the generic head."""
    prior = fedcore_functional.log_prior(torch.tensor(counts), 1.0)
    return fedcore_functional.balanced_cross_entropy(logits, torch.tensor(labels), prior)


@call
def moon_loss(anchor: Tensor, positive: Tensor, negative: Tensor, temperature: float = 0.5) -> Tensor:
    """MOON's contrastive term."""
    return fedcore_functional.model_contrastive_loss(anchor, positive, negative, temperature=temperature)


@call
def fedamp_models(models: Tensor, alpha: float, sigma: float) -> list[Tensor]:
    """FedAMP's cloud model of each client."""
    clouds = []
    for number, own in enumerate(models):
        others = [model for other, model in enumerate(models) if other != number]
        apart = [fedcore_fedamp.squared_distance({"w": own}, {"w": model}) for model in others]
        shares = fedcore_fedamp.attention(apart, alpha, sigma)
        clouds.append(fedcore_fedamp.mixture({"w": own}, [{"w": model} for model in others], shares)["w"])
    return clouds


@call
def prototype_means(features: Sequence[Any], labels: Sequence[Sequence[int]], classes: int) -> Tensor:
    """FedProto's global prototypes: the mean over the clients that hold a class."""
    total: Any = {}
    for own, known in zip(features, labels, strict=True):
        sent = fedcore_functional.class_prototypes(_double(own), torch.tensor(known), classes)
        total = fedcore_functional.add_prototypes(total, sent)
    return fedcore_functional.mean_over_holders(total)["prototypes"]


def _double(value: Any) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64)


@call
def ccvr_statistics(features: Sequence[Any], labels: Sequence[Sequence[int]], classes: int, figure: str) -> Tensor:
    """CCVR's pooled means, or the pooled covariance of class 0."""
    own = [fedcore_functional.class_statistics(_double(f), torch.tensor(y), classes) for f, y in zip(features, labels)]
    _, means, covariances = fedcore_functional.pool_statistics(*[torch.stack(part) for part in zip(*own)])
    return means if figure == "means" else covariances[0]


@call
def sam_point(
    weights: Mapping[str, Any], gradients: Mapping[str, Any], rho: float, adaptive: bool = False
) -> list[float]:
    """FedSAM's worst point near the weights, flat; adaptive with T = |w|."""
    at = {name: _double(value) for name, value in weights.items()}
    slopes = {name: _double(value) for name, value in gradients.items()}
    scale = {name: value.abs() for name, value in at.items()} if adaptive else None
    point = fedcore_fedsam.ascended(at, slopes, rho, scale)
    return [float(value) for name in at for value in point[name].flatten()]


@call
def fednh_prototypes(
    prototypes: Tensor, features: Sequence[Any], labels: Sequence[Sequence[int]], rho: float
) -> Tensor:
    """FedNH's prototypes after a round."""
    total: Any = {}
    for own, known in zip(features, labels, strict=True):
        sent = fedcore_functional.class_prototypes(
            _double(own), torch.tensor(known), len(prototypes), weights="samples"
        )
        sent = {**sent, "prototypes": fedcore_fednh.directions(sent["prototypes"])}
        total = fedcore_functional.add_prototypes(total, sent)
    means = fedcore_functional.mean_over_holders(total)
    return fedcore_fednh.smoothed_prototypes(prototypes.double(), means["prototypes"].double(), means["known"], rho)


def _network(weights: Mapping[str, Any]) -> nn.Module:
    layers = sorted({name.split(".")[0] for name in weights})
    network = nn.Sequential()
    for layer in layers:
        rows, columns = _double(weights[f"{layer}.weight"]).shape
        network.add_module(layer, nn.Linear(columns, rows).double())
        if layer != layers[-1]:
            network.add_module(f"{layer}-tanh", nn.Tanh())
    network.load_state_dict({name: _double(value) for name, value in weights.items()})
    return network


@call
def hessian_vector(
    weights: Mapping[str, Any], x: Tensor, y: Sequence[int], direction: Mapping[str, Any], delta: float
) -> list[float]:
    """Per-FedAvg's Hessian times a vector by differences of gradients, of a tanh network, flat."""
    network, along = _network(weights), {name: _double(value) for name, value in direction.items()}

    def slope(at: Mapping[str, Tensor]) -> dict[str, Tensor]:
        other = copy.deepcopy(network)
        other.load_state_dict(dict(at))
        nn.functional.cross_entropy(other(x), torch.tensor(y)).backward()
        return {name: parameter.grad for name, parameter in other.named_parameters()}

    at = {name: parameter.detach() for name, parameter in network.named_parameters()}
    above = slope(fedcore_per_fedavg.moved(at, along, delta))
    below = slope(fedcore_per_fedavg.moved(at, along, -delta))
    product = fedcore_per_fedavg.curvature(above, below, delta)
    return [float(value) for name in weights for value in product[name].flatten()]


@call
def not_true_distillation(local: Tensor, received: Tensor, labels: Sequence[int], temperature: float = 1.0) -> Tensor:
    """FedNTD's term."""
    return fedcore_fedntd.not_true_distillation(local, received, torch.tensor(labels), temperature)


@call
def decorrelation(features: Tensor, form: str = "frobenius") -> Tensor:
    """FedDecorr's term."""
    forms = {"frobenius": fedcore_feddecorr.frobenius_term, "off-diagonal": fedcore_feddecorr.off_diagonal_term}
    return forms[form](features)


@call
def ala_share(share: Tensor, gradient: Tensor, own: Tensor, received: Tensor, eta: float) -> Tensor:
    """FedALA's renewed share of each weight."""
    return fedcore_fedala.renewed_share(share, gradient, own, received, eta)


@call
def ala_mixture(own: Tensor, received: Tensor, share: Tensor) -> Tensor:
    """FedALA's start."""
    return fedcore_fedala.mixed(own, received, share)


@call
def etf_gram(classes: int, width: int) -> Tensor:
    """The products of the columns of FedETF's classifier: a simplex whatever the draws."""
    columns = fedcore_fedetf.simplex_etf(classes, width).double()
    return columns.T @ columns


@call
def tukey(values: Tensor, power: float) -> Tensor:
    """CCVR's power transform."""
    return fedcore_ccvr.tukey(values, power)


@call
def finch_groups(points: Tensor) -> list[list[int]]:
    """FPL's first partition of prototypes, as sorted groups of positions."""
    groups = fedcore_fpl.first_neighbour_groups(points).tolist()
    return sorted([number for number, group in enumerate(groups) if group == one] for one in set(groups))


@call
def tgp_margin(means: Tensor, known: Sequence[bool], threshold: float) -> float:
    """FedTGP's margin."""
    return fedcore_fedtgp.adaptive_margin(means, torch.tensor(known), threshold)


@call
def tgp_loss(sent: Tensor, labels: Sequence[int], prototypes: Tensor, margin: float) -> Tensor:
    """FedTGP's contrastive loss of the server."""
    return fedcore_fedtgp.margin_contrast(sent, torch.tensor(labels), prototypes, margin)


def _groups(found: Tensor) -> list[int]:
    """Return the groups of points, numbered by their first points."""
    numbers = {int(one): place for place, one in enumerate(dict.fromkeys(found.tolist()))}
    return [numbers[int(one)] for one in found.tolist()]


@call
def first_groups(points: Tensor) -> list[int]:
    """FPL's first partition of prototypes."""
    return _groups(fedcore_fpl.first_neighbour_groups(points))


@call
def last_groups(points: Tensor) -> list[int]:
    """FPL's last partition of prototypes."""
    return _groups(fedcore_fpl.finch(points))


@call
def cluster_contrast(
    features: Tensor, labels: Sequence[int], clusters: Tensor, classes: Sequence[int], temperature: float
) -> Tensor:
    """FPL's contrast of features with cluster prototypes."""
    known = torch.tensor(classes)
    return fedcore_fpl.cluster_contrast(features, torch.tensor(labels), clusters, known, temperature=temperature)


@call
def tgp_trained(
    sent: Tensor, labels: Sequence[int], parameters: Mapping[str, Any], margin: float, epochs: int, lr: float
) -> Tensor:
    """FedTGP's prototypes after the server's training on full batches."""
    start = {name: _double(value) for name, value in parameters.items()}
    draws = torch.Generator().manual_seed(0)
    done = fedcore_fedtgp.equations.trained(
        start, sent, torch.tensor(labels), margin=margin, epochs=epochs, lr=lr, batch_size=len(sent), generator=draws
    )
    return fedcore_fedtgp.prototypes_of(done)


@call
def generated(
    generator: Mapping[str, Any],
    noise: Tensor,
    labels: Sequence[int],
    train: bool,
) -> Tensor:
    """FedGen's generated features."""
    tensors = {name: _double(value) for name, value in generator.items()}
    return fedcore_fedgen.generate(tensors, noise, torch.tensor(labels), train=train)


@call
def generated_diversity(noise: Tensor, features: Tensor) -> Tensor:
    """FedGen's diversity loss."""
    return fedcore_fedgen.diversity_loss(noise, features)


@call
def mean_discrepancy(x: Tensor, y: Tensor) -> Tensor:
    """FedCP's MMD of two sets of features."""
    return fedcore_fedcp.maximum_mean_discrepancy(x, y)


@call
def head_context(head: Tensor) -> Tensor:
    """FedCP's context of a personal head."""
    return fedcore_fedcp.context_of([head])


@call
def halved_head(own: Tensor, received: Tensor) -> Tensor:
    """What a client of FedCP uploads of its head."""
    return fedcore_fedcp.mixed_head(own, received)


@call
def head_statistics(features: Tensor, labels: Sequence[int], classes: int) -> Tensor:
    """FedPAC's V and h, flat."""
    variance, means = fedcore_fedpac.head_statistics(features, torch.tensor(labels), classes)
    return torch.cat([variance.reshape(1), means.flatten()])


@call
def head_shares(variances: Tensor, means: Tensor) -> list[Tensor]:
    """How FedPAC combines the heads, for each client."""
    return [fedcore_fedpac.combination(variances, means, client) for client in range(len(variances))]


@call
def feddc_weight(samples: int, mean_samples: float) -> float:
    """How much a client's loss counts in FedDC."""
    return fedcore_feddc.client_weight(samples, mean_samples)


@call
def largest_losses(losses: Mapping[str, float], count: int) -> list[int]:
    """Power of choice: the candidates with the largest losses."""
    return sorted(fedcore_power_of_choice.highest({int(key): value for key, value in losses.items()}, count))
