"""The evaluation protocols.

- ``global``: the global model on the server's test set.
- ``global_local``: the global model on each client's held-out part.
- ``personal``: each client's own model on its held-out part.
- ``personal_global``: each client's own model on the server's test set.
- ``global_validation``, ``personal_validation``: on the share of the held-out part that chooses the best round.
- ``unseen``, ``unseen_adapted``: of clients that never train, on their held-out parts, before and after an adaptation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import replace
from functools import reduce
from operator import add
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedcore.base.errors import FedcoreError, PluginCallError, print_traceback
from fedcore.base.metrics import NO_METRICS, Counts, Metrics, finite_loss, sign
from fedcore.base.process import one_torch_thread
from fedcore.base.protocols import ON_CLIENTS, PROTOCOLS, figure_of
from fedcore.base.tensors import flatten, on_cpu
from fedcore.client.context import context_of
from fedcore.client.messages import Evaluation
from fedcore.client.session import LocalSession
from fedcore.data import Dataset, Samples, Task
from fedcore.data.task import CLASSIFICATION
from fedcore.models.placement import forward_chunk
from fedcore.models.split import copied, copied_for_calls

QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
"""The quantiles of the clients' accuracies that are recorded, whatever the number of clients is."""

MAX_CONFUSION = 100
"""A finished run's summary has confusion matrices for at most this many classes."""

MAX_PER_CLIENT = 1000
"""An evaluated round records each client's figures for at most this many clients."""

Key = TypeVar("Key", int, str)


@torch.no_grad()  # not inference_mode: a network may keep tensors of the pass, such as a mask, for its training
def evaluate(
    model: nn.Module,
    samples: Samples,
    num_classes: int,
    device: torch.device,
    task: Task = CLASSIFICATION,
    *,
    indices: Tensor | None = None,
    threads: int = 1,
    confusion: bool = False,
    metrics: Metrics = NO_METRICS,
) -> Counts:
    """Return the counts of a model's outputs on samples.

    Chunks are fixed, each is computed by one thread, and they are added in order. The result therefore does not depend
    on the number of threads.

    :param threads: more than 1 only if the model :func:`repeats` its outputs. Each thread then has a copy of it.
        Metrics are counted, and samples of classes that are not fedcore's own gathered, by the caller's thread: they
        may have state, too.
    :param confusion: count the confusion matrix, too.
    :param metrics: count what these metrics need, too.
    """
    model.eval()
    positions = torch.arange(len(samples)) if indices is None else indices
    chunks = positions.to(samples.labels.device).split(forward_chunk(device, num_classes, *task.grid))

    def read(chunk: Tensor) -> Any:
        return samples.gather(chunk).to(device)

    @torch.no_grad()  # in threads of its own, too
    def counts_of(network: nn.Module, chunk: Tensor, inputs: Any) -> Counted:
        labels = samples.labels[chunk].to(device)
        logits = _logits(network(read(chunk) if inputs is None else inputs))
        if logits.shape != (shape := (len(chunk), num_classes, *task.grid)):
            raise ValueError(f"its logits have the shape {tuple(logits.shape)}, expected {shape}")
        return task.count(logits, labels, confusion=confusion), logits, labels

    by_any_thread = hasattr(type(samples).gather, "by_any_thread")
    batches = ((chunk, None if by_any_thread else read(chunk)) for chunk in chunks)
    counted = {metric.shared or name: metric for name, metric in metrics.items()}
    parts: list[Counts] = []
    with one_torch_thread() if device.type == "cpu" else nullcontext():
        for part, *outputs in _side_by_side(counts_of, model, batches, min(threads, len(chunks))):
            counts = {name: metric.count(*outputs) for name, metric in counted.items()}
            rows = {name: counts.pop(name) for name, metric in counted.items() if metric.by_row}
            parts.append(replace(part, metrics=counts, rows=rows))
    return Counts.join(on_cpu(reduce(add, parts).tensors()))


def repeats(model: nn.Module, samples: Samples, device: torch.device, *shape: int) -> bool:
    """Return whether a model gives the same logits for the same samples, whatever it computed before.

    A network that keeps a hidden state from call to call does not, nor does one that draws random numbers. A model that
    cannot be copied counts as one that does not: threads would share what its calls write to.

    :param shape: of a sample's logits.
    """
    trial = copied_for_calls(model)
    if trial is None:
        return False

    def logits_of(rows: Tensor) -> Tensor:
        return _logits(trial(samples.gather(rows.to(samples.labels.device)).to(device)))

    chunk = forward_chunk(device, *shape)
    first, *others = torch.arange(min(len(samples), 2 * chunk)).split(chunk)
    trial.eval()
    with one_torch_thread(), torch.no_grad():
        before, _, after = logits_of(first), [*map(logits_of, others)], logits_of(first)
    return torch.allclose(before, after, rtol=0, atol=0, equal_nan=True)


def _logits(output: Any) -> Tensor:
    """Return the logits of a model's output.

    :raises ValueError: the output is not (features, logits).
    """
    if not (isinstance(output, (tuple, list)) and len(output) == 2 and isinstance(output[1], Tensor)):
        raise ValueError(f"its forward returned {type(output).__name__}, expected (features, logits)")
    return output[1]


Counted = tuple[Counts, Tensor, Tensor]
"""The counts of a chunk, its logits and its labels."""


def _side_by_side(
    function: Callable[[nn.Module, Tensor, Any], Counted],
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Any]],
    threads: int,
) -> Iterator[Counted]:
    """Yield the function's result on each chunk and its inputs, in order."""
    if threads < 2:
        yield from (function(model, *batch) for batch in batches)
        return
    networks = SimpleQueue[nn.Module]()
    for network in (model, *(copied(model, share=True) for _ in range(threads - 1))):
        networks.put(network)

    def by_one(*batch: Any) -> Counted:
        network = networks.get()
        try:
            return function(network, *batch)
        finally:
            networks.put(network)

    under_way: deque[Future[Counted]] = deque()
    # OpenMP's number of threads is a setting of each thread, so every thread of the pool sets its own.
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for batch in batches:
            under_way.append(pool.submit(by_one, *batch))
            if batch[1] is not None and len(under_way) > 4 * threads:  # inputs take memory
                yield under_way.popleft().result()
        wait(under_way)  # this thread would take turns with the others for every result
        yield from (done.result() for done in under_way)


def by_domain(
    overall: dict[str, Any], rows: Mapping[str, Mapping[str, Any]], metrics: Metrics = NO_METRICS
) -> dict[str, Any]:
    """Return the metrics of a model on samples of several domains: ``global`` with ``domains``, the mean and the worst.

    The worst value of each figure is by its own sign, and ``domain_of`` names its domain. A figure of which neither
    more nor less is better has no worst value.

    :param overall: the rates on all samples.
    :param rows: the rates by domain.
    """
    mean: dict[str, Any] = {}
    worst: dict[str, Any] = {}
    domain_of: dict[str, str] = {}
    for name in (*(["accuracy"] if "accuracy" in overall else []), "loss", *metrics):
        mean[name] = worst[name] = None
        if known := _known(name, rows):
            mean[name] = float(np.mean([*known.values()]))
            if lowest_or_highest := {1: min, -1: max}.get(sign(name, metrics)):
                domain_of[name] = lowest_or_highest(known, key=known.__getitem__)
                worst[name] = known[domain_of[name]]
    domains = {f"{name}_domains": _known(name, rows) for name in metrics}
    return {
        "global": {**overall, "domains": _known(figure_of(overall), rows), **domains},
        "mean_domain": {**mean, "samples": overall["samples"], **_mean_over(metrics, rows)},
        "worst_domain": {**worst, "domain_of": domain_of},
    }


def _known(name: str, rows: Mapping[Key, Mapping[str, Any]]) -> dict[Key, float]:
    """Return a figure of the clients or domains for which it is defined: AUROC is not, for samples of one class.

    The result is empty if the model is the reason: its loss is not finite, or samples are undefined. The others' mean
    would hide it.
    """
    lost = any(row[name] is None and (name == "loss" or row.get("undefined")) for row in rows.values())
    return {} if lost else {key: row[name] for key, row in rows.items() if row[name] is not None}


def _mean_over(metrics: Iterable[str], rows: Mapping[Key, Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Return an entry with the number of clients or domains of each mean that leaves some out; empty without any."""
    numbers = {name: len(_known(name, rows)) for name in metrics}
    left_out = {name: number for name, number in numbers.items() if 0 < number < len(rows)}
    return {"mean_over": left_out} if left_out else {}


def evaluate_client(
    session: LocalSession, dataset: Dataset, parts: tuple[Tensor, Tensor], meta: Mapping[str, Any]
) -> Evaluation:
    """Evaluate one client, whose session is loaded.

    If the model of a plugin's ``personal_model`` fails, the protocols of own models have no counts.

    :param parts: the client's held-out samples, as positions in the training set, int64 (m,): those that choose the
        best round, and those that are reported.
    :param meta: the task's ``protocols``; ``took_part``, whether the client trained or adapted; ``confusion``, whether
        to count the confusion matrix of its own model.
    """
    working, metrics = session.working, session.working.setup.metrics
    validation, reported = parts
    expected = dataset.num_classes, working.device, dataset.task

    def counts(model: nn.Module, *, own_model: bool, **how: Any) -> dict[str, Counts]:
        protocols = [PROTOCOLS[name] for name in meta["protocols"] if PROTOCOLS[name].own_model == own_model]
        held_out = {p.name: validation if p.validation else reported for p in protocols if p.held_out}
        sets = {p.name: (dataset.train, held_out[p.name]) if p.held_out else (dataset.test, None) for p in protocols}
        return {
            name: evaluate(model, samples, *expected, indices=indices, metrics=metrics, **how)
            for name, (samples, indices) in sets.items()
            if indices is None or len(indices)
        }

    by_protocol, failed = counts(working.module, own_model=False), ""
    model: nn.Module = working.module
    try:
        if any(PROTOCOLS[name].own_model for name in meta["protocols"]):
            model = own_model(session, took_part=meta["took_part"])
            own = counts(model, own_model=True, confusion=meta["confusion"])
            # An infinite loss does not mean a broken model: a model may rule a class out.
            if model is not working.module and any(counted.undefined for counted in own.values()):
                raise ValueError("its logits are nan or infinite")
            by_protocol |= own
    except PluginCallError as error:
        print_traceback()
        failed = str(error)
    except FedcoreError:
        raise
    except Exception as error:  # third-party code can raise anything
        if model is working.module:
            raise
        plugin = session.plugins.implementers("personal_model")[0].name
        reason = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        problem = f"returned {type(model).__name__}, which cannot be evaluated: {reason}"
        print_traceback()
        broken = PluginCallError.of(plugin, problem, hook="personal_model", round=session.round, client=session.client)
        failed = str(broken)
    return Evaluation(flatten({name: counted.tensors() for name, counted in by_protocol.items()})[0], failed)


def own_model(session: LocalSession, *, took_part: bool) -> nn.Module:
    """Return a client's own model: the result of ``personal_model``, else the loaded model.

    A client that never took part is not asked if it is to keep parameters: they have their initial values.

    :raises PluginCallError: the hook raised.
    """
    has_own = took_part or not session.working.layout.personal
    model = session.plugins.first("personal_model", client=context_of(session, ""))[1] if has_own else None
    return session.working.module if model is None else model


def summarise_clients(
    results: Mapping[int, Mapping[str, Mapping[str, Any]]],
    untrained: Iterable[int],
    pooled: Mapping[str, Mapping[str, float | None]],
) -> dict[str, Any]:
    """Join the clients' rates into the metrics of each protocol.

    :param results: client -> protocol -> its rates, whose ``loss`` is the sum over its samples.
    :param untrained: clients that never took part.
    :param pooled: protocol -> the metrics' figures of all clients' counts together.
    """
    untrained, summary = set(untrained), {}
    for protocol in ON_CLIENTS:
        rows = {client: own[protocol] for client, own in sorted(results.items()) if protocol in own}
        if not rows:
            continue
        main = figure_of(next(iter(rows.values())))
        totals, accuracies, losses = (
            np.array([row[name] for row in rows.values()], dtype=np.float64) for name in ("samples", main, "loss")
        )
        weights = totals if PROTOCOLS[protocol].held_out else np.ones_like(totals)
        ordered, tenth = np.sort(accuracies), max(1, round(0.1 * len(accuracies)))
        undefined = sum(row.get("undefined", 0) for row in rows.values())
        of_classes: dict[str, Any] = {
            "accuracy": float((weights * accuracies).sum() / weights.sum()),
            "mean": float(accuracies.mean()),
            "std": float(accuracies.std()),
            "worst10": float(ordered[:tenth].mean()),
            "best10": float(ordered[-tenth:].mean()),
            "quantiles": [float(value) for value in np.quantile(accuracies, QUANTILES)],
        }
        joined: dict[str, Any] = {
            **(of_classes if main == "accuracy" else {}),
            **finite_loss(float(losses.sum() / totals.sum())),
            "clients": len(accuracies),
            "untrained": sum(client in untrained for client in rows) if PROTOCOLS[protocol].own_model else 0,
            **({"undefined": undefined} if undefined else {}),
        }
        per_client = {"per_client": {k: v for k, v in zip(rows, accuracies.tolist(), strict=True) if v == v}}
        for name, value in pooled.get(protocol, {}).items():
            per_client[f"{name}_per_client"] = own = _known(name, rows)
            known = [*own.values()]
            over_clients = (float(np.mean(known)), float(np.std(known))) if known else (None, None)
            joined |= {name: value, f"{name}_mean": over_clients[0], f"{name}_std": over_clients[1]}
        joined |= _mean_over(pooled.get(protocol, {}), rows)
        if len(rows) <= MAX_PER_CLIENT:
            joined |= {name: {str(k): round(value, 6) for k, value in own.items()} for name, own in per_client.items()}
        summary[protocol] = joined
    return summary
