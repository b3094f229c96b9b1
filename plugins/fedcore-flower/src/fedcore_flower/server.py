"""``fedcore federate server``: starts a SuperLink, waits for the clients, and trains with them."""

from __future__ import annotations

import contextlib
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedcore import ConfigError, FedcoreError, RunConfig, RunResult
from fedcore.data import DECLARED, Dataset, Partition
from fedcore.engines import ClientFailure, ClientRuntime, ClientSite
from fedcore.tools import Run, RunDirectory, code_in, process, public_share, registry, resolve_config
from fedcore_flower import wire
from fedcore_flower.agreement import describe_run, versions_of
from fedcore_flower.courier import Courier, Request
from fedcore_flower.engine import FederationEngine
from fedcore_flower.keys import PublicKey, Tls, check_server_key
from fedcore_flower.members import Member, Members
from fedcore_flower.processes import require_flower, silence_flower

POLL = 0.2
MIN_WAIT = 10.0
"""The seconds that a client has at least to answer at the start, whatever --wait is. After them the server says which
clients it waits for.
"""

MAX_SAMPLES = 100_000_000
"""The most samples that a client may claim. The partition takes 4 bytes for each, and 20 bytes while it is made."""

MAX_NAME = 1000
"""The most characters of a class's name that a client may send: the server stores the names and sends them on."""

Tell = Callable[[str], None]
"""A function for status messages to the user."""

Notify = Callable[[str, Mapping[str, Any]], None]
"""A callback that takes an event's name and its details."""


@dataclass(frozen=True)
class ServerOptions:
    """The options of a federation's server, apart from the run's own."""

    host: str
    port: int
    tls: Tls
    keys: Mapping[str, PublicKey]
    """The clients' public keys by name. The order numbers the clients."""
    wait: float = 300.0
    """The seconds in which all clients, or ``min_online`` of them, must connect; then the seconds to answer."""
    min_online: int | None = None
    """The number of clients that a resumed run needs; None for all."""
    timeout: float = 43200.0
    """The seconds until a task without an answer fails."""
    probe_every: float = 30.0
    """The seconds between probes of a client that does not answer."""
    grace: float = 20.0
    """The seconds in which a client whose connection broke may come back before its task fails."""


def start(config: RunConfig, options: ServerOptions, *, notify: Notify, tell: Tell) -> RunResult:
    """Train with the clients of a federation, in a new run directory.

    All clients must be connected at the start, because they say how many samples they have.

    :param config: the configuration. Its ``clients`` is the number of keys.
    :raises FedcoreError: as ``fedcore.run``; or a client refuses to take part.
    """
    require_flower()
    run_id = uuid.uuid4().hex
    every = config.checkpoint_every or 1  # clients keep the states of the rounds to which the server may go back
    fixed = {
        "engine": "flower",
        "engine_options": {"federation": run_id},
        "partition": DECLARED,
        "checkpoint_every": every,
    }
    config, dataset = resolve_config(_check_config(config.model_copy(update=fixed)))
    _check_weights(config, dataset)
    names = list(options.keys)
    with _open_federation(options, config, list(options.keys.values()), tell) as courier:
        clients = _Clients(courier, names, options.wait, tell)
        described = clients.describe(clients.connect(len(names)))
        sizes = {client: _sizes(names[client], header, dataset) for client, header in described.items()}
        members = Members(
            run=run_id,
            clients=[
                Member(name=name, fingerprint=key.fingerprint, train=sizes[client][0], test=sizes[client][1])
                for client, (name, key) in enumerate(options.keys.items())
            ],
            class_names=_class_names({names[client]: header for client, header in described.items()}, dataset),
        )
        train, test = [member.train for member in members.clients], [member.test for member in members.clients]
        partition = Partition.declared(train, test, config.dataset)
        partition.info["names"] = [*names]
        if getattr(config, "normalize", None) in ("global", "client"):  # an option of fedcore-zoo
            partition.info["statistics"] = registry.resolve("feature", "statistics_of_sites")(
                dataset, clients.ask_statistics
            )
        prepared = dataset
        for section in RunConfig.sections():
            prepared = section.prepared(config, prepared, partition)
        setups = _setups(config, prepared, members)
        clients.join(setups)

        def write_members(event: str, details: Mapping[str, Any]) -> None:
            if event == "start":
                members.write(Path(details["directory"]))
            notify(event, details)

        with process.one_thread(), Run.new(config, dataset=dataset, partition=partition) as run:
            return run.train(
                notify=write_members, make=lambda site: FederationEngine(courier, names, setups, run=run_id)
            )


def resume(path: Path, options: ServerOptions, *, notify: Notify, tell: Tell, allow_outside: bool = False) -> RunResult:
    """Resume the run of a federation, to the same bits.

    Clients that are not connected fail in each round until they come back.

    :raises FedcoreError: as ``fedcore.resume``; or a client refuses to take part, or has another number of samples than
        at the start of the run.
    """
    require_flower()
    members = Members.read(RunDirectory.open(path).path)
    keys = members.select_keys(options.keys)
    with process.one_thread():
        run = Run.open(path, allow_code=False, allow_outside=allow_outside)
    names, setups = members.names, _setups(run.config, run.dataset, members)
    with _open_federation(options, run.config, keys, tell) as courier:
        clients = _Clients(courier, names, options.wait, tell)
        present = clients.connect(options.min_online or len(names))
        for client, header in clients.describe(present).items():
            member = members.clients[client]
            train, test = _sizes(member.name, header, run.dataset)
            if (train, test) != (member.train, member.test):
                raise ConfigError(
                    f"client {member.name!r} has {train} + {test} samples, and had {member.train} + {member.test} when "
                    "the run began; it needs the same data"
                )
        clients.join({client: setups[client] for client in present})
        return run.train(notify=notify, make=lambda site: FederationEngine(courier, names, setups, run=members.run))


@contextlib.contextmanager
def _open_federation(
    options: ServerOptions, config: RunConfig, keys: Sequence[PublicKey], tell: Tell
) -> Iterator[Courier]:
    """Start a SuperLink with a run for the clients with these keys. It ends with the block."""
    check_server_key(options.tls)
    with tempfile.TemporaryDirectory(prefix="fedcore-flower-", ignore_cleanup_errors=True) as home:
        silence_flower(Path(home))
        from fedcore_flower.link import FlowerLink
        from fedcore_flower.superlink import SuperLink

        superlink = SuperLink(options.host, options.port, options.tls, Path(home))
        try:
            superlink.start()
            nodes = superlink.register(keys)
            superlink.open_run()
            tell(f"listening on {options.host}:{options.port} for {len(nodes)} clients")
            yield Courier(
                FlowerLink(superlink, nodes),
                timeout=min(options.timeout, config.client_timeout or options.timeout),
                probe_every=options.probe_every,
                grace=options.grace,
            )
        finally:
            superlink.stop()


def _check_config(config: RunConfig) -> RunConfig:
    """Return the configuration if a federation can run it.

    :raises ConfigError: an option has no meaning in a federation, or names code.
    """
    if getattr(config, "system", None) is not None:  # of fedcore-simulation
        raise ConfigError("--system simulates the clients' devices and networks; a federation has real ones")
    if public_share(config.public) is not None:
        raise ConfigError(
            f"--public {config.public}: the samples stay with the clients, so no share of them can be public; name a "
            "data set that the server and every client have, such as --public digits"
        )
    for name in code_in(config.model_copy(update={"dataset": ""})):
        raise ConfigError(f"{name} imports code; clients only run installed packages")
    return config


def _check_weights(config: RunConfig, dataset: Dataset) -> None:
    """Check that clients need no part of the server's file of weights: no path of the server goes to them.

    :raises ConfigError: a part of the model does not travel.
    """
    if getattr(config, "weights", None) is None:  # an option of fedcore-zoo
        return
    nobody = Partition.declared([1] * config.clients, [0] * config.clients, config.dataset)
    layout = ClientRuntime(ClientSite(config, dataset, nobody, Path())).setup.layout  # with plugins of its own
    kept = sorted(layout.personal | layout.fixed)
    if kept:
        raise ConfigError(
            f"--weights: {kept[0]!r} does not travel in this run, and the clients do not have the server's file. Leave "
            "out --weights, or the method or option that keeps a part of the model from travelling"
        )


def _setups(config: RunConfig, dataset: Dataset, members: Members) -> dict[int, bytes]:
    """Return the description of the run for each client."""
    versions = versions_of(config)
    if members.class_names:
        dataset = replace(dataset, class_names=tuple(members.class_names))
    return {
        client: describe_run(config, dataset, run=members.run, client=client, name=name, versions=versions)
        for client, name in enumerate(members.names)
    }


class _Clients:
    """The clients before the first round. They connect, say how many samples they have, and join the run.

    :param wait: the seconds for each of these steps.
    """

    def __init__(self, courier: Courier, names: Sequence[str], wait: float, tell: Tell) -> None:
        self._courier, self._names, self._wait, self._tell = courier, names, wait, tell

    def connect(self, enough: int) -> list[int]:
        """Wait until all clients are connected, or as long as permitted. Return the connected ones.

        :raises FedcoreError: fewer than ``enough`` are connected.
        """
        names, give_up = self._names, time.monotonic() + self._wait
        nodes: set[int] = set()
        while True:
            online = set(self._courier.link.online())
            for client in sorted(online - nodes):
                self._tell(f"{names[client]} is connected ({len(online)} of {len(names)})")
            nodes = online
            if len(online) == len(names):
                return sorted(online)
            if time.monotonic() > give_up:
                break
            time.sleep(POLL)
        if len(online) >= enough:
            return sorted(online)
        missing = ", ".join(name for client, name in enumerate(names) if client not in online)
        raise FedcoreError(
            f"after {self._wait:.0f} s {len(online)} of {len(names)} clients are connected; missing: {missing}. "
            "--wait gives them longer"
        )

    def describe(self, clients: Iterable[int]) -> dict[int, dict[str, Any]]:
        """Return what each client says of its data (:meth:`fedcore_flower.own_data.OwnData.describe`).

        :raises FedcoreError: a client does not answer.
        """
        answers = self._ask("hello", {client: {} for client in clients})
        for client, (op, header) in answers.items():
            if op != "described":
                raise ConfigError(f"client {self._names[client]!r} does not describe its data: {_reason(op, header)}")
        return {client: answers[client][1] for client in sorted(answers)}

    def ask_statistics(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Return each client's counts or sums over its training samples, by its name.

        :raises FedcoreError: a client does not answer, or has no such sums.
        """
        names = self._names
        answers = self._ask("statistics", {client: {} for client in range(len(names))}, question=dict(question))
        for client, (op, header) in answers.items():
            if op != "statistics":
                raise ConfigError(f"client {names[client]!r} gives no sums: {_reason(op, header)}")
        return {names[client]: answers[client][1].get("found") for client in sorted(answers)}

    def join(self, setups: Mapping[int, bytes]) -> None:
        """Send each client the description of the run.

        :raises FedcoreError: a client does not answer, or refuses to take part.
        """
        answers = self._ask("join", {client: {wire.SETUP: setup} for client, setup in setups.items()})
        refused = [
            f"client {self._names[client]!r} does not take part: {_reason(op, header)}"
            for client, (op, header) in sorted(answers.items())
            if op != "joined"
        ]
        if refused:
            raise ConfigError("\n".join(refused))

    def _ask(
        self, op: str, parts: Mapping[int, Mapping[str, bytes]], **header: Any
    ) -> dict[int, tuple[str, dict[str, Any]]]:
        """Send a request with parts to each client. Return the ``op`` and the header of each answer.

        :raises FedcoreError: a client does not answer.
        """
        courier, names = self._courier, self._names
        answers: dict[int, tuple[str, dict[str, Any]]] = {}
        failed: list[str] = []
        for client, blobs in parts.items():
            failure = courier.send(Request(client, "query", wire.pack(op, {}, **header), blobs, list(blobs)))
            if failure is not None:
                failed.append(f"client {names[client]!r}: {failure.message}")
        wait, began, noted = max(self._wait, MIN_WAIT), time.monotonic(), False
        while courier.busy and time.monotonic() - began < wait:
            for request, answer in courier.collect():
                if isinstance(answer, ClientFailure):
                    failed.append(f"client {names[request.client]!r}: {wire.printable(answer.message)}")
                else:
                    answers[request.client] = (answer[0], answer[2])
            if courier.busy and not noted and time.monotonic() - began > MIN_WAIT:
                self._tell(f"no answer yet from {', '.join(names[client] for client in courier.busy)}")
                noted = True
        failed += [
            f"client {names[client]!r} is connected, but did not answer within {wait:.0f} s; it may still be at work "
            "for an earlier run. --wait gives it longer"
            for client in courier.busy
        ]
        if failed:
            raise FedcoreError("\n".join(failed))
        return answers


def _reason(op: str, header: Mapping[str, Any]) -> str:
    return wire.printable(header.get("message", op))


def _sizes(name: str, described: Mapping[str, Any], dataset: Dataset) -> tuple[int, int]:
    """Return how many samples a client says that it trains on and holds out.

    :raises ConfigError: the numbers are not plausible, or the samples have another kind or shape than the run's.
    """
    train, test = described.get("train"), described.get("test")
    by_name = getattr(dataset.test, "columns", ())
    if type(train) is not int or type(test) is not int or train < 1 or test < 0 or train + test > MAX_SAMPLES:
        raise ConfigError(
            f"client {name!r} claims {wire.printable(train)} training and {wire.printable(test)} held-out samples; it "
            f"needs at least 1 to train on, and may have at most {MAX_SAMPLES:,} in total"
        )
    for trait, own, expected in (
        ("kind", described.get("kind"), dataset.kind),
        ("shape", described.get("input_shape"), list(dataset.input_shape)),
    ):
        if own != expected and not (trait == "shape" and by_name):  # the client says which columns differ
            raise ConfigError(
                f"client {name!r} has samples of {trait} {wire.printable(repr(own))}, but the run's have the {trait} "
                f"{expected!r}"
            )
    return train, test


def _class_names(described: Mapping[str, Mapping[str, Any]], dataset: Dataset) -> list[str] | None:
    """Return the names by which all clients number their classes in a run whose data set has no names.

    A client may lack classes: the names are those of a client that has them all. None if no client has names, or the
    data set has: then a client compares its own with these.

    :param described: what each client says of its data, by the client's name.
    :raises ConfigError: two clients have other classes or another order, no client has all, or a list is not plausible.
    """
    if dataset.class_names or not dataset.task.classes:
        return None
    lists: dict[str, list[str]] = {}
    for client, header in described.items():
        names = header.get("class_names")
        if names is None:
            continue
        texts = isinstance(names, list) and all(isinstance(name, str) and len(name) <= MAX_NAME for name in names)
        if not texts or not 0 < len(set(names)) == len(names) <= dataset.num_classes:
            raise ConfigError(
                f"client {client!r} has the class names {_listed(names)}; expected different ones of at most "
                f"{dataset.num_classes} classes"
            )
        lists[client] = names
    if not lists:
        return None
    most = max(lists, key=lambda client: len(lists[client]))
    hint = "Give the server a data set with class names, as folders of images or a table have"
    for client, names in lists.items():
        if not {*names} <= {*lists[most]} or (len(names) == len(lists[most]) and names != lists[most]):
            raise ConfigError(
                f"client {most!r} has the classes {_listed(lists[most])}, client {client!r} has {_listed(names)}, and "
                f"the server's data set has no class names to number them by. {hint}"
            )
    if len(lists[most]) < dataset.num_classes:
        raise ConfigError(
            f"the run has {dataset.num_classes} classes without names, and no client names them all: client {most!r} "
            f"has {_listed(lists[most])}. {hint}"
        )
    return lists[most]


def _listed(names: Any) -> str:
    return wire.printable(", ".join(map(repr, names)) if isinstance(names, list) else repr(names))
