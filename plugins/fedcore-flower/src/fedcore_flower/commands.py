"""``fedcore federate``: keys, server and client. Imports neither torch nor Flower before a command needs them."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedcore import ConfigError, RunConfig
from fedcore.base import output
from fedcore.base.identity import PARTITION_OPTIONS
from fedcore.cli import options
from fedcore.cli.settings import build_config
from fedcore.cli.training import show_summary, training

if TYPE_CHECKING:
    from fedcore_flower.server import Hosting

app = typer.Typer(
    help="Federations across organisations, on Flower's SuperLink and SuperNodes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

NOT_THE_SERVERS = {
    *PARTITION_OPTIONS,
    "adapt_epochs",
    "system",
    "engine",
    "engine_options",
    "workers",
    "autotune",
    "capture",
    "lanes",
    "stack",
    "client_timeout",
} - {"dataset"}
"""Options of a run without a flag of the server: how data is split and where clients run, among others."""

FLAGS = tuple(name for name in RunConfig.model_fields if name not in NOT_THE_SERVERS)

FEDERATION = "Federation"

Keys = Annotated[
    Path | None,
    options.option(
        "--keys",
        "Folder of fedcore federate keys: ca.crt, server.crt, server.key and the clients' .pub files.",
        FEDERATION,
        metavar="DIR",
    ),
]


@app.command("keys")
def keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for them.")],
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--host",
            metavar="NAME_OR_IP",
            help="Name or address under which clients reach the server; can be given again. Leave it out to add "
            "clients to a folder that has its certificates.",
        ),
    ] = None,
    client: Annotated[
        list[str] | None, typer.Option("--client", metavar="NAME", help="A client's name; can be given again.")
    ] = None,
    debug: options.Debug = False,
) -> None:
    """Make a CA, the server's certificate and a key pair for each client."""
    from fedcore_flower.keys import SERVER_DAYS, make_keys

    files = make_keys(folder, host or [], client or [])
    names = {path.name for path in files}
    output.line(f"{len(files)} files in {folder}, each for its owner alone (0600)")
    if host:
        output.line(f"stay with the server: server.crt, good for {SERVER_DAYS} days, and server.key")
        output.line("to every client: ca.crt; another --host later is another folder, with a ca.crt of its own")
    for name in client or []:
        if f"{name}.key" in names:
            output.line(f"to {name}: {name}.key, over a channel that you trust; {name}.pub stays with the server")


@app.command("server")
@options.config_flags(only=FLAGS)
def server(
    given: dict[str, Any],
    *,
    host: Annotated[str, options.option("--host", "Interface to listen on; 0.0.0.0 for all.", FEDERATION)] = "0.0.0.0",  # noqa: S104 - a server is there to be reached
    port: Annotated[int, options.option("--port", "Port to listen on.", FEDERATION, min=1, max=65535)] = 9443,
    keys: Keys = None,
    ca: Annotated[Path | None, options.option("--ca", "The CA's certificate, PEM.", FEDERATION)] = None,
    certificate: Annotated[
        Path | None, options.option("--certificate", "The server's certificate, PEM.", FEDERATION)
    ] = None,
    key: Annotated[Path | None, options.option("--key", "The server's private key, PEM.", FEDERATION)] = None,
    client: Annotated[
        list[str] | None,
        options.option(
            "--client",
            "A client and its public key, default NAME.pub of --keys; can be given again, in the order that "
            "numbers them. Default all .pub files of --keys.",
            FEDERATION,
            metavar="NAME[=FILE]",
        ),
    ] = None,
    wait: Annotated[
        float,
        options.option("--wait", "Seconds to wait for the clients at the start.", FEDERATION, min=0),
    ] = 300.0,
    min_online: Annotated[
        int | None,
        options.option(
            "--min-online", "With --resume: go on after --wait with so many clients; default all.", FEDERATION, min=1
        ),
    ] = None,
    task_timeout: Annotated[
        float,
        options.option("--task-timeout", "Seconds until a task without an answer is given up.", FEDERATION, min=1),
    ] = 43200.0,
    probe_every: Annotated[
        float,
        options.option(
            "--probe-every",
            "Seconds between looks at a client that is quiet: whether it has lost its task.",
            FEDERATION,
            min=1,
        ),
    ] = 30.0,
    grace: Annotated[
        float,
        options.option(
            "--grace",
            "Seconds that a client whose connection broke has to come back before its task is a failure.",
            FEDERATION,
            min=0,
        ),
    ] = 20.0,
    resume: Annotated[
        Path | None,
        options.option(
            "--resume", "Go on with this run, with its options and to the same bits.", FEDERATION, metavar="RUN_DIR"
        ),
    ] = None,
    settings: options.RunSettings = None,
    config_file: options.RunConfigFile = None,
    allow_outside: options.AllowOutside = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    profile: options.RunProfile = False,
    debug: options.Debug = False,
) -> None:
    """Run a federation: wait for its clients and train with them, each on its own data.

    The data set is the server's own; the global model is evaluated on its test samples. Ctrl-C leaves a checkpoint.
    """
    from fedcore_flower.keys import Tls, public_keys
    from fedcore_flower.server import Hosting

    tls, clients = Tls.of(keys, ca, certificate, key), public_keys(keys, client or [])
    hosting = Hosting(host, port, tls, clients, wait, min_online, task_timeout, probe_every, grace)
    if resume is not None and (given or settings or config_file):
        first = next(iter(given), "set" if settings else "config")
        flag = {"plugins": "plugin", "trackers": "tracker"}.get(first, first).replace("_", "-")
        raise ConfigError(f"--resume goes on with the options of its run; leave --{flag} out")
    if resume is None and min_online is not None:
        raise ConfigError("--min-online is for --resume: at its start a run needs all clients, to know what they hold")
    if resume is None:
        config = build_config({**given, "clients": len(clients)}, config_file, settings or [])
    with training(quiet, _how_to_resume) as display:
        if resume is not None:
            result = _resume(resume, hosting, display, quiet, allow_outside)
        else:
            from fedcore_flower.server import start

            result = start(config, hosting, notify=display, tell=_teller(quiet))
    show_summary(result.summary, as_json=as_json, quiet=quiet, profile=profile)


@app.command("client")
def client(
    server: Annotated[str, typer.Option("--server", metavar="HOST:PORT", help="The federation's server.")],
    ca: Annotated[Path, typer.Option("--ca", help="ca.crt, which the server's operator gave you.")],
    key: Annotated[Path, typer.Option("--key", help="This client's private key.")],
    data: Annotated[
        str,
        typer.Option("--data", metavar="npz:FILE|imagefolder:DIR|NAME", help="This client's data; it stays here."),
    ],
    state: Annotated[
        Path, typer.Option("--state", metavar="DIR", help="Folder for this client's states; keep it between runs.")
    ],
    test_fraction: Annotated[
        float | None,
        typer.Option(
            "--test-fraction",
            min=0,
            max=1,
            help="Part of the training samples to hold out, class by class; default the data's own test samples.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="What the hold-out is drawn by.")] = 0,
    data_dir: Annotated[Path | None, typer.Option("--data-dir", help="Folder that holds a named data set.")] = None,
    allow_plugin: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-plugin",
            metavar="NAME",
            help="A method that this client takes part in; can be given again. Default all that are installed.",
        ),
    ] = None,
    allow_model: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-model",
            metavar="NAME",
            help="A model that may read files of this machine, such as hf:FOLDER; can be given again.",
        ),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")] = "auto",
    patience: Annotated[
        float, typer.Option("--patience", min=0, help="Seconds that a server may refuse this client's key.")
    ] = 60.0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Say nothing of what is going on.")] = False,
    debug: options.Debug = False,
) -> None:
    """Take part in federations with this machine's own data, until Ctrl-C."""
    from fedcore_flower.client import Membership, join
    from fedcore_flower.keys import check_private_key

    fingerprint = check_private_key(key)
    if not ca.is_file():
        raise ConfigError(f"--ca: there is no file {ca}")
    if ":" not in server:
        raise ConfigError(f"--server {server}: write HOST:PORT")
    tell = _teller(quiet)
    tell(f"this client's key: {fingerprint}")
    membership = Membership(
        server=server,
        ca=ca,
        key=key,
        data=data,
        state=state,
        data_dir=data_dir,
        test_fraction=test_fraction,
        seed=seed,
        allowed=None if allow_plugin is None else frozenset(allow_plugin),
        models=frozenset(allow_model or ()),
        device=device,
        quiet=quiet,
        patience=patience,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    join(membership, tell)


def _resume(path: Path, hosting: Hosting, display: Any, quiet: bool, allow_outside: bool) -> Any:
    from fedcore_flower.server import resume

    return resume(path, hosting, notify=display, tell=_teller(quiet), allow_outside=allow_outside)


def _teller(quiet: bool) -> Any:
    return (lambda message: None) if quiet else output.note


def _how_to_resume(directory: Path) -> str:
    return f"fedcore federate server --resume {directory}, with the same --host, --port, --keys and --client"
