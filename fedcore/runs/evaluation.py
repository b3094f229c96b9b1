"""The evaluation protocols of a run, and their figures for a committed state."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import cached_property, reduce
from operator import add
from typing import Any

from torch import Tensor

from fedcore.base.config import FederationOptions
from fedcore.base.identity import judged_by
from fedcore.base.metrics import Counts, sign
from fedcore.base.process import cores
from fedcore.base.protocols import EVALUATED, ON_CLIENTS, PROTOCOLS, VALIDATION
from fedcore.base.seeding import derive_seed, random_stream
from fedcore.base.tensors import copy_into
from fedcore.client.evaluation import MAX_CONFUSION, by_domain, evaluate, repeats, summarise_clients
from fedcore.client.messages import ClientTask, Outcome
from fedcore.models.split import SplitModel, copied_for_calls
from fedcore.server.cohort import Broadcasts
from fedcore.server.scope import Federation, ServerScope
from fedcore.server.state import ServerState

ON_SERVER = {*EVALUATED} - {*ON_CLIENTS}
"""The protocols that the server measures, of the global model."""


class Evaluator:
    """Evaluates committed states, without changing them.

    :param protocols: those that are asked for; none: all. Those on validation parts are always measured.
    """

    def __init__(self, federation: Federation, protocols: Collection[str] = ()) -> None:
        self.federation = federation
        self.protocols = [p for p in EVALUATED if not protocols or p in protocols or PROTOCOLS[p].validation]
        """The protocols that are measured if they apply."""
        self.device = federation.setup.placement.device
        self.further = federation.setup.metrics
        """The metrics next to accuracy and loss."""
        self._repeats: bool | None = None
        self.counted: dict[str, Counts] = {}
        """Protocol -> what the last evaluation counted of all its samples together.

        There are confusion matrices, of the global model on the test set and of the clients' own models, if the
        evaluation was asked for them, and for at most ``MAX_CONFUSION`` classes.
        """

    def evaluate(self, state: ServerState, *, with_confusion: bool = False) -> dict[str, Any]:
        """Return the figures of every protocol that applies to this run."""
        federation, dataset = self.federation, self.federation.dataset
        with_confusion = with_confusion and dataset.task.classes and dataset.num_classes <= MAX_CONFUSION
        self.counted = {}
        metrics: dict[str, Any] = {"global": None}
        if not self._global:
            example = sorted(federation.setup.layout.personal)[0]
            metrics["global_reason"] = f"no global model: parameters such as {example!r} stay on the clients"
        elif not ON_SERVER & {*self.protocols}:
            metrics["global_reason"] = "not measured: --protocol leaves it out"
        else:
            model, of = self.load_model(state), (dataset.num_classes, self.device, dataset.task)
            how: dict[str, Any] = {"confusion": with_confusion, "metrics": self.further}
            how["threads"] = self._threads(model)
            seed = derive_seed(federation.config.seed, "evaluation", round=state.round)
            with random_stream(seed, self.device):  # for a network that draws in evaluation, too
                counts = {
                    domain: evaluate(model, dataset.test, *of, indices=rows, **how)
                    for domain, rows in self._domains.items()
                }
            hidden = str(federation.partition.info.get("unseen_domain", ""))
            unseen = counts.pop(hidden, None) if hidden else None
            self.counted["global"] = total = reduce(add, counts.values())
            metrics["global"] = total.rates(self.further)
            if dataset.domains:
                by_name = {domain: each.rates(self.further) for domain, each in counts.items()}
                metrics |= by_domain(metrics["global"], by_name, self.further)
            if unseen is not None:
                metrics["unseen_domain"] = unseen.rates(self.further) | {"domain": hidden}
        return metrics | self.evaluate_clients(state, with_confusion=with_confusion)

    @cached_property
    def _domains(self) -> Mapping[str, Tensor | None]:
        """The test samples of each domain, as positions; without domains, all samples under an empty name."""
        domains = self.federation.dataset.domains
        if domains is None:
            return {"": None}
        rows = {name: (domains.test == number).nonzero().flatten() for number, name in enumerate(domains.names)}
        return {name: positions for name, positions in rows.items() if len(positions)}

    @property
    def _global(self) -> bool:
        """Whether there is a global model."""
        return not self.federation.setup.layout.personal

    @cached_property
    def _on_clients(self) -> list[str]:
        """The protocols of the clients that take part."""
        federation, (held_out, _) = self.federation, self._held_out
        personal = federation.setup.has_own_models
        share = held_out and federation.config.validation_share
        possible = {
            "global_local": held_out and self._global,
            "personal": held_out and personal,
            "personal_global": personal and not federation.partition.is_declared,  # such clients lack the test set
            "global_validation": share and self._global,
            "personal_validation": share and personal,
        }
        return [name for name in self.protocols if possible.get(name)]

    @cached_property
    def _held_out(self) -> tuple[list[int], list[int]]:
        """The clients that hold samples out: those that take part, and the unseen ones."""
        held_out, first_unseen = self.federation.partition.test, self.federation.config.training_clients
        clients: list[int] = held_out.sizes.nonzero().flatten().tolist() if len(held_out.positions) else []
        return [each for each in clients if each < first_unseen], [each for each in clients if each >= first_unseen]

    def _work(self, **how: Any) -> list[tuple[int, dict[str, Any]]]:
        """Return what each client measures, as a client and the values for its task.

        :param how: further values for all tasks.
        """
        options: FederationOptions = self.federation.config
        protocols = self._on_clients
        held_out, unseen = self._held_out
        everybody = {"personal", "personal_global"} & {*protocols}
        clients = (range(options.training_clients) if everybody else held_out) if protocols else ()
        work = [(client, {"protocols": protocols, **how}) for client in clients]
        if "unseen" in self.protocols:
            work += [(client, {"protocols": ["unseen"], **how}) for client in unseen]
        if options.adapt_epochs and "unseen_adapted" in self.protocols:
            adapt = {"protocols": ["unseen_adapted"], "adapt": options.adapt_epochs, **how}
            work += [(client, adapt) for client in unseen]
        return work

    def evaluate_clients(self, state: ServerState, *, with_confusion: bool = False) -> dict[str, Any]:
        """Return the figures of the protocols that run on clients."""
        federation, work = self.federation, self._work(confusion=with_confusion)
        if not work:
            return {}
        with ServerScope(federation, state, state.round, "evaluation") as scope:
            tasks = evaluation_tasks(scope, work)

            def counts(task: ClientTask, outcome: Outcome) -> dict[str, Counts]:
                by_protocol, failed = federation.validator.evaluation(task, outcome, self._samples(task))
                if failed:
                    scope.fail(task.client, "raised", failed)
                return by_protocol

            results: dict[int, dict[str, dict[str, Any]]] = {}
            pooled: dict[str, Counts] = {}
            for task, by_protocol in scope.answers(tasks, counts):
                for protocol, own in (by_protocol or {}).items():
                    # Matrices and counts of metrics of all clients together would take more memory than all else.
                    pooled[protocol] = pooled[protocol] + own if protocol in pooled else own
                    row = own.rates(self.further) | {"loss": own.loss.item()}
                    results.setdefault(task.client, {})[protocol] = row
        self.counted |= pooled
        further = {protocol: each.figures(self.further) for protocol, each in pooled.items()}
        untrained = (c for c in results if c not in state.manifest and c < federation.config.training_clients)
        summary = summarise_clients(results, untrained, further)
        if scope.failures:
            summary |= {"failed": len(scope.failures), "failures": scope.failures}
        return summary

    def _samples(self, task: ClientTask) -> dict[str, int]:
        """Return the number of a client's samples for each protocol of its task."""
        held_out, test = self.federation.partition.test.size(task.client), len(self.federation.dataset.test)
        chooses = int(held_out * self.federation.config.validation_share)
        protocols = [PROTOCOLS[name] for name in task.meta["protocols"]]
        sizes = {p.name: (chooses if p.validation else held_out - chooses) if p.held_out else test for p in protocols}
        return {protocol: size for protocol, size in sizes.items() if size}

    def best(self, state: ServerState, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return the best round so far by the figure of ``best_by`` on the held-out parts; empty if there are none.

        A round in which fewer clients could be evaluated is never the best: its mean is over other clients. Neither is
        a round with undefined samples.
        """
        kept = self.federation.config.keep == "best"
        # If the global model is kept, it is judged.
        protocols = [name for name in VALIDATION if not (kept and PROTOCOLS[name].own_model)]
        protocol = next((name for name in protocols if name in self._on_clients), None)
        if protocol is None or protocol not in metrics:  # no client's own model could be evaluated
            return state.best
        name = judged_by(self.federation.config, self.federation.dataset.task.metrics)
        clients, value, best = metrics[protocol]["clients"], metrics[protocol][name], state.best
        if value is None or "undefined" in metrics[protocol]:  # a loss that is not finite, a metric that is not defined
            return best
        better = sign(name, self.further)
        # An older checkpoint does not say how many clients: it counts as the same number.
        before = best and (best.get("clients", clients), better * best[f"validation_{name}"])
        if before and (clients, better * value) <= before:
            return best
        new_best = {"round": state.round - 1, "validation": protocol, f"validation_{name}": value, "clients": clients}
        if name in (metrics["global"] or {}):
            new_best[f"global_{name}"] = metrics["global"][name]
        return new_best

    def load_model(self, state: ServerState) -> SplitModel:
        """Return the server's model with the committed weights, in eval mode.

        It is a copy if possible: a network that keeps values from call to call begins each evaluation without them.
        """
        setup = self.federation.setup
        model = setup.placement.model(copied_for_calls(setup.model) or setup.model)
        copy_into(model.state_dict(), state.model)
        return model.eval()

    def _threads(self, model: SplitModel) -> int:
        """Return the number of threads for the global model's evaluation: one if its outputs depend on its calls."""
        if self.device.type != "cpu" or cores() == 1:
            return 1
        if self._repeats is None:
            dataset = self.federation.dataset
            with random_stream(0):
                self._repeats = repeats(model, dataset.test, self.device, dataset.num_classes, *dataset.task.grid)
        return cores() if self._repeats else 1


def evaluation_tasks(scope: ServerScope, work: Iterable[tuple[int, Mapping[str, Any]]]) -> list[ClientTask]:
    """Send the broadcasts of an evaluation; return the tasks that evaluate the committed state on clients.

    :param work: a client, and the values that :func:`fedcore.client.evaluation.evaluate_client` reads next to
        ``took_part``; with ``adapt``, the client first adapts for so many local epochs.
    """
    state = scope.committed
    key = f"evaluate-{state.round}-{state.phase}"
    broadcasts = Broadcasts(scope, key)
    return [
        ClientTask(
            id=f"{key}-{client}{'-adapted' * ('adapt' in meta)}",
            kind="evaluate",
            client=client,
            round=state.round,
            version=state.manifest.get(client),
            shared=key,
            compute=broadcasts.to(client),
            meta={**meta, "took_part": client in state.manifest or "adapt" in meta},
        )
        for client, meta in work
    ]
