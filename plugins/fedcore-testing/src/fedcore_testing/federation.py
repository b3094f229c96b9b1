"""Short functions to run a federation in a test and to read its run directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from fedcore import Interrupted, RunConfig, RunResult, Tensors, resume, run
from fedcore.data import Dataset, Partition, load_dataset, load_partition
from fedcore.engines import ClientSite, Engine
from fedcore.hooks import create_plugin
from fedcore.server import Notify, ServerState
from fedcore.tools import Run, RunDirectory, process, registry
from fedcore_testing import importable as offered
from fedcore_workers import current

SMALL: dict[str, Any] = {
    "dataset": "digits",
    "model": "mlp",
    "clients": 3,
    "rounds": 2,
    "local_epochs": 1,
    "batch_size": 64,
    "lr": 0.05,
    "workers": 0,
    "device": "cpu",
}
"""A run of a second: digits, in this process; a larger rate than the default, as there are few steps."""

_KILLED = "import sys; from fedcore_testing.federation import run_and_die; run_and_die(*sys.argv[1:])"

_REGISTERED_AS = {"dataset": "dataset", "model": "model", "partition": "partitioner"}
"""Options that take classes and functions -> the kind under which the registry has these."""

Choice = str | type | tuple[str | type, Mapping[str, Any]]
"""A plugin by name or class, alone or with its options."""


def federate(
    folder: Path,
    *plugins: Choice,
    notify: Notify | None = None,
    engine: str | Callable[[ClientSite], Engine] | None = None,
    **options: Any,
) -> RunResult:
    """Run a small federation on digits with these plugins.

    :param folder: in which each run gets a new directory.
    :param engine: a name, or a function that makes one from a ``ClientSite``.
    :param options: options of RunConfig. ``dataset``, ``model`` and ``partition`` may also be functions.

    >>> federate(tmp_path, "moon", (FedProx, {"mu": 0.1}), rounds=3)  # doctest: +SKIP
    """
    if isinstance(engine, str):
        options, engine = {**options, "engine": engine}, None
    return run(small_config(folder, *plugins, **options), notify=notify, engine=engine)


def runner(folder: Path, **defaults: Any) -> Callable[..., RunResult]:
    """Return ``go(*plugins, **options)``, which runs a small federation in a new directory below ``folder``.

    A plugin is one of :func:`federate`'s, or a mapping from plugins to their options.

    :param defaults: options of :func:`federate`; the options of a call override them. A number of ``samples`` is of
        the default data set, and not of one that a call names.
    """

    def go(*plugins: Choice | Mapping[Any, Mapping[str, Any]], **options: Any) -> RunResult:
        choices: list[Choice] = []
        for plugin in plugins:
            choices += plugin.items() if isinstance(plugin, Mapping) else [plugin]
        usual = {name: value for name, value in defaults.items() if not (name == "samples" and "dataset" in options)}
        return federate(folder, *choices, **{**usual, **options})

    return go


def federations(scope: Literal["function", "module", "session"] = "module", **defaults: Any) -> Any:
    """Return a pytest fixture: :func:`runner` on a temporary folder.

    >>> go = federations(clients=4)  # doctest: +SKIP
    >>> def test_it_learns(go):  # doctest: +SKIP
    ...     assert go({"moon": {"mu": 1.0}}, rounds=3).metrics["global"]["accuracy"] > 0.5
    """
    import pytest

    @pytest.fixture(scope=scope)
    def go(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RunResult]:
        return runner(tmp_path_factory.mktemp("runs"), **defaults)

    return go


def small_config(folder: Path, *plugins: Choice, **options: Any) -> RunConfig:
    """Return the configuration of :func:`federate`."""
    pairs = [plugin if isinstance(plugin, tuple) else (plugin, {}) for plugin in plugins]
    out = options.pop("out", None) or tempfile.mkdtemp(dir=folder)
    options = {key: name_of(value, _REGISTERED_AS[key]) if callable(value) else value for key, value in options.items()}
    return RunConfig(**{**SMALL, **options}, plugins={name_of(cls): dict(own) for cls, own in pairs}, out=out)


def initial_weights(config: RunConfig) -> Tensors:
    """Return the model that a run with this configuration starts from, by name."""
    with (
        tempfile.TemporaryDirectory(prefix="fedcore-") as folder,
        Run.new(config.model_copy(update={"out": Path(folder) / "run"})) as new,
    ):
        return dict(new.setup.model.state_dict())


def data_of(result: RunResult | Path) -> tuple[Dataset, Partition]:
    """Return a run's data set, and which samples each client has."""
    directory = RunDirectory(_directory(result))
    config = directory.read_config()
    dataset = load_dataset(config.dataset, config.data_dir, config.task)
    return dataset, load_partition(directory.partition_file, dataset)


def partition_of(result: RunResult | Path) -> Partition:
    """Return which samples each client of a run has."""
    return data_of(result)[1]


def interrupted(folder: Path, *plugins: Choice, after: int, **options: Any) -> RunResult:
    """Run a small federation, interrupt it after a round and resume it; returns the result.

    :param after: the round, from 0.
    """
    directories: list[Path] = []

    def stop(event: str, details: Mapping[str, Any]) -> None:
        if event == "start":
            directories.append(details["directory"])
        if event == "round" and details["round"] == after:
            raise KeyboardInterrupt

    with suppress(Interrupted):
        result = federate(folder, *plugins, notify=stop, **options)
        raise AssertionError(f"the run ended in {result.directory} before round {after} did")
    return resume(directories[0], allow_code=True)


def killed(folder: Path, *plugins: Choice, after: int, **options: Any) -> RunResult:
    """Run a small federation in another process, kill it after a round and resume it here; returns the result.

    A new process must be able to import the plugins and options.

    :param after: the round, from 0.
    """
    config = small_config(folder, *plugins, **options)
    arguments, server = [config.model_dump_json(), str(after)], current()
    if server is not None:
        call = f"{__name__}:{run_and_die.__name__}"
        code = server.fork(call, arguments, environment=process.environment(), descriptors={}).wait(120)
    else:
        command = [sys.executable, "-P", "-c", _KILLED, *arguments]
        code = subprocess.run(command, env=process.environment(), timeout=120, check=False).returncode  # noqa: S603 - our own
    assert code == -signal.SIGKILL, f"the run in {config.out} ended before round {after} did"
    assert config.out is not None
    return resume(config.out, allow_code=True)


def run_and_die(config: str, after: str) -> None:
    """Run a configuration, as JSON, and kill this process after a round: what :func:`killed` starts."""

    def kill(event: str, details: Mapping[str, Any]) -> None:
        if event == "round" and details["round"] == int(after):
            os.kill(os.getpid(), signal.SIGKILL)

    run(RunConfig.model_validate_json(config), notify=kill)


def name_of(plugin: object, kind: str = "plugin") -> str:
    """Return a plugin's name for a configuration: of its entry point, of its module, or a new one in this package."""
    if isinstance(plugin, str):
        return plugin
    point = entry_point_of(plugin, kind)
    if point is not None:
        return point.name
    module, name = getattr(plugin, "__module__", ""), getattr(plugin, "__qualname__", "")
    if name and getattr(sys.modules.get(module), name, None) is plugin:
        return f"module:{module}.{name}"
    name = f"{getattr(plugin, '__name__', type(plugin).__name__)}_{id(plugin)}"
    setattr(offered, name, plugin)
    return f"module:{offered.__name__}.{name}"


def entry_point_of(plugin: object, kind: str = "plugin") -> EntryPoint | None:
    """Return a plugin's installed entry point; imports nothing.

    Another class of the same name and module, such as a watched one, has none.
    """
    for point in registry.available(kind).values():
        package, _, attribute = point.value.partition(":")
        if getattr(sys.modules.get(package), attribute, None) is plugin:
            return point
    return None


def needs_of(*plugins: Choice) -> dict[str, Any]:
    """Return the options of a run that these plugins require: ``public`` if one of them uses public samples."""
    pairs = (plugin if isinstance(plugin, tuple) else (plugin, {}) for plugin in plugins)
    uses = any("public" in create_plugin(name_of(cls), own).reads for cls, own in pairs)
    return {"public": "0.1"} if uses else {}


def installed(name: str) -> str:
    """Return a plugin's name; skips the test where that plugin is not installed."""
    import pytest

    if name not in registry.available("plugin"):
        pytest.skip(f"{name} is not installed")
    return name


def _directory(result: RunResult | Path) -> Path:
    """Return a result's run directory; a path, as of a run that did not finish, is one already."""
    return result if isinstance(result, Path) else result.directory


def model_bytes(result: RunResult | Path) -> bytes:
    """Return the bytes of the run's model file: equal for equal bits."""
    return (_directory(result) / "model.safetensors").read_bytes()


def weights(result: RunResult | Path) -> Tensors:
    """Return the final global model by name."""
    return load_file(_directory(result) / "model.safetensors")


def records(result: RunResult | Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without the measured times, which differ from run to run."""
    return [
        {key: value for key, value in record.items() if key != "time"}
        for record in RunDirectory(_directory(result)).metrics.read()
    ]


def committed(result: RunResult | Path) -> ServerState:
    """Return the state of the last checkpoint."""
    state = RunDirectory(_directory(result)).checkpoints.load()
    assert state is not None
    return state


def client_state(result: RunResult | Path, client: int) -> dict[str, dict[str, Any]]:
    """Return one client's committed state by plugin."""
    return RunDirectory(_directory(result)).clients.read(client, committed(result).manifest.get(client))


def plugin_state(result: RunResult | Path, plugin: str, client: int | None = None) -> dict[str, Any]:
    """Return a plugin's committed state on the server, or on a client; empty if it has none."""
    states = committed(result).plugins if client is None else client_state(result, client)
    return states.get(plugin, {})


def personal_state(result: RunResult | Path, client: int, plugin: str = "fedcore") -> Tensors:
    """Return the parameters and buffers that a client keeps, as committed, by name.

    :param plugin: the plugin that keeps them; the core does for ``personal_parameters``.
    :raises KeyError: the client keeps none.
    """
    state = client_state(result, client)[plugin]
    return {name.removeprefix("personal/"): tensor for name, tensor in state.items()}


def same_tensors(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Return whether two mappings have the same names and equal tensors."""
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)
