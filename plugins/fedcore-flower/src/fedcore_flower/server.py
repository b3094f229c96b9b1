"""What ``fedcore federate server`` does: a SuperLink, its clients called together, and a run over them."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedcore import ConfigError, FedcoreError, RunConfig, RunResult, Setup
from fedcore.base.config import public_share
from fedcore.base.process import one_thread
from fedcore.data import DECLARED, Dataset, Partition
from fedcore.engines import ClientSite
from fedcore.runs.directory import RunDirectory
from fedcore.runs.resolve import resolve
from fedcore.runs.run import Run
from fedcore.runs.saved import check_code, code_in
from fedcore_flower import wire
from fedcore_flower.agreement import describe_run, versions_of
from fedcore_flower.courier import Courier, Errand, Trouble
from fedcore_flower.engine import FederationEngine
from fedcore_flower.keys import PublicKey, Tls, check_server_key
from fedcore_flower.processes import require_flower, silence_flower
from fedcore_flower.roll import Roll

ENGINE = "flower"
STEP = 0.2
SILENCE = 10.0
"""Seconds after which the server says for whom it waits; an answer has at least so long, whatever --wait says."""

MOST_SAMPLES = 100_000_000
"""Samples that a client may claim: the server's partition takes 4 bytes for each, and 20 while it is made."""

Tell = Callable[[str], None]
Notify = Callable[[str, Mapping[str, Any]], None]
"""A callback that takes an event's name and its details."""


@dataclass(frozen=True)
class Hosting:
    """Where and for whom a server waits.

    :param keys: the clients' public keys by name, in the order that numbers them.
    :param wait: seconds until all clients, or ``min_online`` of them, have to be there; then until each has answered.
    :param timeout: seconds until a task without an answer is given up.
    :param probe_every: seconds between looks at a client that is quiet.
    :param grace: seconds that a client whose connection broke has to come back before its task is a failure.
    """

    host: str
    port: int
    tls: Tls
    keys: Mapping[str, PublicKey]
    wait: float = 300.0
    min_online: int | None = None
    timeout: float = 43200.0
    probe_every: float = 30.0
    grace: float = 20.0


def start(config: RunConfig, hosting: Hosting, *, notify: Notify, tell: Tell) -> RunResult:
    """Run a federation, in a new run directory.

    All clients have to be there at its start: they say how much they hold.

    :param config: ``clients`` as many as there are keys.
    :raises FedcoreError: as ``fedcore.run``; and a client that refuses to take part, by name.
    """
    require_flower()
    run_id = uuid.uuid4().hex
    served = {"engine": ENGINE, "engine_options": {"federation": run_id}, "partition": DECLARED}
    config = _checked(config.model_copy(update=served))
    config, dataset = resolve(config)
    _check_weights(config, dataset)
    names = list(hosting.keys)
    with _federation(_limited(hosting, config), list(hosting.keys.values()), tell) as courier:
        _wait(courier, names, hosting.wait, len(names), tell)
        described = _describe(courier, names, range(len(names)), hosting.wait, tell)
        sizes = [_sizes(name, described[client], dataset) for client, name in enumerate(names)]
        roll = Roll(run_id, names, [key.fingerprint for key in hosting.keys.values()], sizes)
        setups = _setups(config, dataset, roll)
        _join(courier, names, setups, hosting.wait, tell)
        partition = Partition.declared([train for train, _ in sizes], [test for _, test in sizes], config.dataset)

        def noting(event: str, details: Mapping[str, Any]) -> None:
            if event == "start":
                roll.write(Path(details["directory"]))
            notify(event, details)

        def make(spec: ClientSite) -> FederationEngine:
            return FederationEngine(courier, names, setups, attempt=uuid.uuid4().hex, run=roll.run)

        with one_thread(), Run.new(config, dataset=dataset, partition=partition) as run:
            return run.train(notify=noting, make=make)


def resume(path: Path, hosting: Hosting, *, notify: Notify, tell: Tell, allow_outside: bool = False) -> RunResult:
    """Go on with a federation's run, to the same bits.

    Those who are there go on; the others are failures of their rounds until they come back.

    :raises FedcoreError: as ``fedcore.resume``; and a client whose data has another size than at the start.
    """
    require_flower()
    directory = RunDirectory.open(path)
    roll = Roll.read(directory.path)
    keys = roll.keys(hosting.keys)
    config = _checked(directory.read_config())
    check_code(code_in(config), path / "config.yaml", allow=False)
    with one_thread():
        run = Run.open(directory.path, allow_code=False, allow_outside=allow_outside)
    dataset, setups = run.dataset, _setups(run.config, run.dataset, roll)
    with _federation(_limited(hosting, config), keys, tell) as courier:
        enough = hosting.min_online or len(roll.names)
        _wait(courier, roll.names, hosting.wait, enough, tell)
        present = sorted(courier.link.online())
        described = _describe(courier, roll.names, present, hosting.wait, tell)
        for client in present:
            found = _sizes(roll.names[client], described[client], dataset)
            if found != roll.sizes[client]:
                raise ConfigError(
                    f"client {roll.names[client]!r} holds {found[0]} + {found[1]} samples, and held "
                    f"{roll.sizes[client][0]} + {roll.sizes[client][1]} when the run began; it needs the same data"
                )
        _join(courier, roll.names, {client: setups[client] for client in present}, hosting.wait, tell)

        def make(spec: ClientSite) -> FederationEngine:
            return FederationEngine(courier, roll.names, setups, attempt=uuid.uuid4().hex, run=roll.run)

        return run.train(notify=notify, make=make)


@contextlib.contextmanager
def _federation(hosting: Hosting, keys: Sequence[PublicKey], tell: Tell) -> Iterator[Courier]:
    """Start a SuperLink with a run of these clients; it ends with the block."""
    check_server_key(hosting.tls)
    home = Path(tempfile.mkdtemp(prefix="fedcore-flower-"))
    superlink = None
    try:
        silence_flower(home)
        from fedcore_flower.link import FlowerLink
        from fedcore_flower.superlink import SuperLink

        superlink = SuperLink(hosting.host, hosting.port, hosting.tls, home)
        superlink.start()
        nodes = superlink.register(keys)
        superlink.open_run()
        tell(f"listening on {hosting.host}:{hosting.port} for {len(nodes)} clients")
        yield Courier(
            FlowerLink(superlink, nodes),
            timeout=hosting.timeout,
            probe_every=hosting.probe_every,
            grace=hosting.grace,
        )
    finally:
        if superlink is not None:
            superlink.stop()
        shutil.rmtree(home, ignore_errors=True)


def _limited(hosting: Hosting, config: RunConfig) -> Hosting:
    """Return the hosting with the shorter of its own limit per task and the run's ``client_timeout``."""
    return replace(hosting, timeout=min(hosting.timeout, config.client_timeout or hosting.timeout))


def _checked(config: RunConfig) -> RunConfig:
    """Refuse options that a federation has no place for."""
    if config.system is not None:
        raise ConfigError("--system simulates clients; those of a federation are as they are")
    if public_share(config.public) is not None:
        raise ConfigError(
            f"--public {config.public}: the samples stay with the clients, and no share of them can be public; name a "
            "data set that the server and every client have, such as --public digits"
        )
    for name in code_in(config.model_copy(update={"dataset": ""})):
        raise ConfigError(f"{name}: clients run installed packages only, and refuse code that is named by its path")
    return config


def _check_weights(config: RunConfig, dataset: Dataset) -> None:
    """Refuse weights of which a part would have to be read by clients: no path of the server's goes to them."""
    if config.weights is None:
        return
    layout = Setup.build(config, dataset).layout  # with plugins of its own
    kept = sorted(layout.personal | layout.fixed)
    if kept:
        raise ConfigError(
            f"--weights: {kept[0]!r} does not travel in this run, and clients do not have the server's file. Leave "
            "--weights out, or the method or option that keeps a part of the model in its place"
        )


def _setups(config: RunConfig, dataset: Dataset, roll: Roll) -> dict[int, bytes]:
    versions = versions_of(config)
    return {
        client: describe_run(config, dataset, run=roll.run, client=client, name=name, versions=versions)
        for client, name in enumerate(roll.names)
    }


def _wait(courier: Courier, names: Sequence[str], seconds: float, enough: int, tell: Tell) -> None:
    """Wait until enough clients are connected.

    :raises FedcoreError: they are not, by name.
    """
    give_up = time.monotonic() + seconds
    seen: set[int] = set()
    while True:
        online = set(courier.link.online())
        for client in sorted(online - seen):
            tell(f"{names[client]} is here ({len(online)} of {len(names)})")
        seen = online
        if len(online) == len(names) or (time.monotonic() > give_up and len(online) >= enough):
            return
        if time.monotonic() > give_up:
            missing = ", ".join(name for client, name in enumerate(names) if client not in online)
            raise FedcoreError(
                f"after {seconds:.0f} s {len(online)} of {len(names)} clients are connected; missing: {missing}. "
                "--wait gives them longer"
            )
        time.sleep(STEP)


def _describe(
    courier: Courier, names: Sequence[str], clients: Sequence[int] | range, wait: float, tell: Tell
) -> dict[int, dict[str, Any]]:
    """Ask clients what they hold.

    :raises FedcoreError: one does not say.
    """
    found = {}
    requests: dict[int, tuple[bytes, dict[str, bytes]]] = {client: (wire.pack("hello"), {}) for client in clients}
    for client, (op, header) in _ask(courier, names, requests, wait, tell).items():
        if op != "described":
            raise ConfigError(f"client {names[client]!r} does not say what it holds: {_refusal(op, header)}")
        found[client] = header
    return found


def _join(courier: Courier, names: Sequence[str], setups: Mapping[int, bytes], wait: float, tell: Tell) -> None:
    """Tell clients of the run.

    :raises ConfigError: what stands against it, by client.
    """
    requests = {client: (wire.pack("join"), {wire.SETUP: setup}) for client, setup in setups.items()}
    refused = [
        f"client {names[client]!r} does not take part: {_refusal(op, header)}"
        for client, (op, header) in sorted(_ask(courier, names, requests, wait, tell).items())
        if op != "joined"
    ]
    if refused:
        raise ConfigError("\n".join(refused))


def _refusal(op: str, header: Mapping[str, Any]) -> str:
    return wire.shown(header.get("message", op))


def _ask(
    courier: Courier,
    names: Sequence[str],
    requests: Mapping[int, tuple[bytes, Mapping[str, bytes]]],
    wait: float,
    tell: Tell,
) -> dict[int, tuple[str, dict[str, Any]]]:
    """Send each client a request and wait for all answers.

    :param wait: seconds until each has to have answered.
    :raises FedcoreError: a client gives none.
    """
    found: dict[int, tuple[str, dict[str, Any]]] = {}
    failed: list[str] = []
    for client, (head, parts) in requests.items():
        trouble = courier.send(Errand(client, "query", head, parts, list(parts)))
        if trouble is not None:
            failed.append(f"client {names[client]!r}: {trouble.message}")
    wait, began, told = max(wait, SILENCE), time.monotonic(), False
    while courier.busy and time.monotonic() - began < wait:
        for errand, answer in courier.collect():
            if isinstance(answer, Trouble):
                failed.append(f"client {names[errand.client]!r}: {wire.shown(answer.message)}")
            else:
                op, _, header = answer
                found[errand.client] = (op, header)
        if courier.busy and not told and time.monotonic() - began > SILENCE:
            tell(f"no answer yet from {', '.join(names[client] for client in courier.busy)}")
            told = True
    failed += [
        f"client {names[client]!r} is connected, but gave no answer within {wait:.0f} s; it may still be at work for "
        "an earlier run. --wait gives it longer"
        for client in courier.busy
    ]
    if failed:
        raise FedcoreError("\n".join(failed))
    return found


def _sizes(name: str, described: Mapping[str, Any], dataset: Dataset) -> tuple[int, int]:
    """Return how much a client holds.

    :raises ConfigError: it is not what the run is about.
    """
    train, test = described.get("train"), described.get("test")
    if type(train) is not int or type(test) is not int or train < 1 or test < 0 or train + test > MOST_SAMPLES:
        raise ConfigError(
            f"client {name!r} claims {wire.shown(train)} training and {wire.shown(test)} held-out samples; it has to "
            f"hold at least 1 to train on, and at most {MOST_SAMPLES:,} in all"
        )
    for what, found, expected in (
        ("data of kind", described.get("kind"), dataset.kind),
        ("samples of shape", described.get("input_shape"), list(dataset.input_shape)),
    ):
        if found != expected:
            raise ConfigError(f"client {name!r} holds {what} {wire.shown(repr(found))}; the run is about {expected!r}")
    return train, test
