"""``fedcore federate``: keys, server and client. torch and Flower are imported only when a command needs them."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from fedcore import ConfigError, RunConfig
from fedcore.cli import group
from fedcore.tools import PARTITION_OPTIONS, build_config, options, output, show_summary, training

app = group("Federations across organisations, on Flower's SuperLink and SuperNodes.")

WITHOUT_FLAG = {
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
"""The options of a run for which the server has no flag. Most say how data is split and where clients run."""

FLAGS = tuple(name for name in RunConfig.model_fields if name not in WITHOUT_FLAG)

FEDERATION = "Federation"


@app.command("keys")
def keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for the files.")],
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--host",
            metavar="NAME_OR_IP",
            help="Name or address under which clients reach the server; can be given again. Leave it out to add "
            "clients to a folder that already has certificates.",
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
    output.line(f"{len(files)} files in {folder}, readable only by their owner (0600)")
    if host:
        output.line(f"stay with the server: server.crt, valid for {SERVER_DAYS} days, and server.key")
        output.line("to every client: ca.crt; for another --host make another folder, with a ca.crt of its own")
    for name in client or []:
        output.line(f"to {name}: {name}.key, over a channel that you trust; {name}.pub stays with the server")


@app.command("server")
@options.config_flags(only=FLAGS)
def server(
    flags: dict[str, Any],
    *,
    host: Annotated[str, options.option("--host", "Interface to listen on; 0.0.0.0 for all.", FEDERATION)] = "0.0.0.0",  # noqa: S104 - a server is there to be reached
    port: Annotated[int, options.option("--port", "Port to listen on.", FEDERATION, min=1, max=65535)] = 9443,
    keys: Annotated[
        Path | None,
        options.option(
            "--keys",
            "Folder of fedcore federate keys: ca.crt, server.crt, server.key and the clients' .pub files.",
            FEDERATION,
            metavar="DIR",
        ),
    ] = None,
    ca: Annotated[Path | None, options.option("--ca", "The CA's certificate, PEM.", FEDERATION)] = None,
    certificate: Annotated[
        Path | None, options.option("--certificate", "The server's certificate, PEM.", FEDERATION)
    ] = None,
    key: Annotated[Path | None, options.option("--key", "The server's private key, PEM.", FEDERATION)] = None,
    client: Annotated[
        list[str] | None,
        options.option(
            "--client",
            "A client and its public key, by default NAME.pub of --keys; can be given again. The order numbers the "
            "clients. Default: all .pub files of --keys.",
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
            "--min-online",
            "With --resume: the clients needed to go on after --wait. Default: all.",
            FEDERATION,
            min=1,
        ),
    ] = None,
    task_timeout: Annotated[
        float,
        options.option("--task-timeout", "Seconds until a task without an answer fails.", FEDERATION, min=1),
    ] = 43200.0,
    probe_every: Annotated[
        float,
        options.option(
            "--probe-every",
            "Seconds between checks whether a client that does not answer has lost its task.",
            FEDERATION,
            min=1,
        ),
    ] = 30.0,
    grace: Annotated[
        float,
        options.option(
            "--grace",
            "Seconds in which a client whose connection broke may come back before its task fails.",
            FEDERATION,
            min=0,
        ),
    ] = 20.0,
    resume: Annotated[
        Path | None,
        options.option(
            "--resume", "Resume this run, with its options and to the same bits.", FEDERATION, metavar="RUN_DIR"
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
    from fedcore_flower import server as federation
    from fedcore_flower.keys import Tls, public_keys

    tls, clients = Tls.of(keys, ca, certificate, key), public_keys(keys, client or [])
    serving = federation.ServerOptions(host, port, tls, clients, wait, min_online, task_timeout, probe_every, grace)
    if resume is not None and (flags or settings or config_file):
        first = next(iter(flags), "set" if settings else "config")
        flag = {"plugins": "plugin", "trackers": "tracker"}.get(first, first).replace("_", "-")
        raise ConfigError(f"--resume uses the options of its run; leave --{flag} out")
    if resume is None and min_online is not None:
        raise ConfigError(
            "--min-online needs --resume: a new run needs all clients, to know how many samples they have"
        )
    if resume is None:
        config = build_config({**flags, "clients": len(clients)}, config_file, settings or [])
    with training(quiet, _how_to_resume) as display:
        if resume is None:
            result = federation.start(config, serving, notify=display, tell=_teller(quiet))
        else:
            tell = _teller(quiet)
            result = federation.resume(resume, serving, notify=display, tell=tell, allow_outside=allow_outside)
    show_summary(result.summary, as_json=as_json, quiet=quiet, profile=profile)


@app.command("client")
def client(
    server: Annotated[str, typer.Option("--server", metavar="HOST:PORT", help="The federation's server.")],
    ca: Annotated[Path, typer.Option("--ca", help="The file ca.crt from the server's operator.")],
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
            help="Part of the training samples to hold out, class by class. Default: the data's own test samples.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed by which samples to hold out are drawn.")] = 0,
    data_dir: Annotated[Path | None, typer.Option("--data-dir", help="Folder of a named data set.")] = None,
    allow_plugin: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-plugin",
            metavar="NAME",
            help="A method that this client takes part in; can be given again. Default: all that are installed.",
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
        float, typer.Option("--patience", min=0, help="Seconds in which a server may refuse this client's key.")
    ] = 60.0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no status messages.")] = False,
    debug: options.Debug = False,
) -> None:
    """Take part in federations with this machine's own data, until Ctrl-C."""
    from fedcore_flower.client import join
    from fedcore_flower.conditions import TrainerOptions
    from fedcore_flower.keys import check_private_key

    fingerprint = check_private_key(key)
    if not ca.is_file():
        raise ConfigError(f"--ca: there is no file {ca}")
    if ":" not in server:
        raise ConfigError(f"--server {server}: write HOST:PORT")
    tell = _teller(quiet)
    tell(f"this client's key: {fingerprint}")
    own = TrainerOptions(
        data,
        str(state),
        data_dir=str(data_dir) if data_dir else None,
        test_fraction=test_fraction,
        seed=seed,
        allowed=allow_plugin,
        models=allow_model or (),
        device=device,
        quiet=quiet,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    join(server, ca, key, own, patience=patience, tell=tell)


def _teller(quiet: bool) -> Callable[[str], None]:
    return (lambda message: None) if quiet else output.note


def _how_to_resume(directory: Path) -> str:
    return f"fedcore federate server --resume {directory}, with the same --host, --port, --keys and --client"
