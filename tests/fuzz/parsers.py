"""What reads files and texts from outside, each fed what Hypothesis makes: random input, and altered valid one.

A target draws its input and reads it. It may raise what it documents; whatever else it raises is a bug.
"""

from __future__ import annotations

import copy
import functools
import io
import json
import math
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from hypothesis import strategies as st
from rich.console import Console

from fedcore.base.config import RunConfig
from fedcore.base.errors import ConfigError, DataError, FedcoreError, RunDirectoryError
from fedcore.base.safe_yaml import parse_setting, read_config_file, read_mapping
from fedcore.base.serial import dumps, loads, read_tensors, write_tensors
from fedcore.base.tensors import flatten
from fedcore.cli.settings import build_config
from fedcore.client.store import ClientStore
from fedcore.data import Dataset, Partition, load_dataset, load_partition
from fedcore.data import partition as partition_module
from fedcore.runs.checkpoint import CheckpointStore
from fedcore.runs.directory import RunDirectory
from fedcore.runs.saved import SavedConfig, partition_digest
from fedcore.server.state import ServerState
from fedcore_reproduce.find import recipe_files
from fedcore_reproduce.recipe import read_recipe
from fedcore_study.cli.runs_tables import details_tables, difference_tables, runs_table
from fedcore_study.comparisons import compare, formats
from fedcore_study.comparisons.costs import seconds_per_round
from fedcore_study.comparisons.records import RunRecord, find_runs
from fedcore_study.runs.details import details, difference
from fedcore_study.runs.overview import read_overview
from fedcore_study.sweeps.directory import SweepDirectory
from fedcore_study.sweeps.spec import SweepSpec, override, parse_axis, parse_seeds, read_spec
from fedcore_zoo import read_npz

Draw = Callable[[st.SearchStrategy[Any]], Any]
Target = Callable[[Draw, Path], None]

_NUMBERS = st.one_of(
    st.integers(), st.sampled_from([-1, 0, 1, 2**31, 2**63, 2**64, 10**400]), st.floats(), st.just(1e308)
)
_SCALARS = st.one_of(st.none(), st.booleans(), _NUMBERS, st.text(max_size=12), st.just("module:os.system"))
_JSON = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=8,
)
_DEEP = st.sampled_from(["[\n" * 2000, '{"a":' * 100_000, "- " * 50_000])  # PyYAML takes 0.8 s for 2,000 on one line
_TAGS = st.sampled_from(
    [
        "!!python/object/apply:os.system [echo]",
        "!!int x",
        "!!bool x",
        "!!float",
        "!!set {a}",
        "!!binary '!'",
        "2001-99-99",
    ]
)


def config_file(draw: Draw, folder: Path) -> None:
    """A config file of train."""
    path = _text(draw, folder / "config.yaml", RunConfig(plugins={"moon": {"mu": 1.0}}).model_dump(mode="json"))
    values = _allowed(ConfigError, lambda: read_config_file(path))
    if values is not None:
        _allowed(ConfigError, lambda: RunConfig.create(values, source="x"))
        _allowed(ConfigError, lambda: build_config({}, path, []))


def partition_json(draw: Draw, folder: Path) -> None:
    """A partition file, with all positions in it."""
    path = folder / "partition.json"
    _partition().save(path)
    _alter(draw, path, json.loads(path.read_text()))
    _allowed((DataError, ConfigError), lambda: load_partition(path, _dataset()))


def partition_beside(draw: Draw, folder: Path) -> None:
    """A partition file, with the positions in a file of tensors beside it."""
    path, most = folder / "partition.json", partition_module.MAX_IN_JSON
    partition_module.MAX_IN_JSON = 0
    try:
        _partition().save(path)
    finally:
        partition_module.MAX_IN_JSON = most
    if draw(st.booleans()):
        _alter(draw, path, json.loads(path.read_text()))
    beside = next(folder.glob("*.safetensors"))
    _alter_tensors(draw, beside)
    _allowed((DataError, ConfigError), lambda: load_partition(path, _dataset()))


def checkpoint(draw: Draw, folder: Path) -> None:
    """A run's checkpoint."""
    store = CheckpointStore(folder / "checkpoint", ClientStore(folder / "clients"))
    store.clients.write(1, 0, {"moon": {"previous": torch.ones(3), "seen": 4}})
    state = ServerState({"w": torch.ones(2, 3)}, 1, "train", {"moon": {"a": torch.ones(2), "b": [1]}}, {0: None, 1: 0})
    store.save(state)
    path = next((folder / "checkpoint").iterdir())
    path.write_bytes(_bytes(draw, path.read_bytes()))
    found = _allowed(RunDirectoryError, lambda: CheckpointStore(store.root, store.clients).load())
    if found is not None:
        assert found.round >= 0
        assert all(isinstance(tensor, torch.Tensor) for tensor in found.model.values())


def client_state(draw: Draw, folder: Path) -> None:
    """A client's state."""
    store = ClientStore(folder)
    store.write(0, 3, {"moon": {"previous": torch.arange(6.0), "seen": 4}})
    _alter_tensors(draw, store.path(0, 3))
    states = {0: {"moon": {"previous": torch.arange(6.0)}}, 1: {"moon": {"seen": 4}}}
    store.write_together(4, {client: (dumps(*flatten(state)), b"") for client, state in states.items()})
    bundle = next(store.together.iterdir())
    bundle.write_bytes(_bytes(draw, bundle.read_bytes()))
    for version in (3, 4):
        found = _allowed(RunDirectoryError, lambda version=version: store.read(0, version))
        assert found is None or all(isinstance(values, dict) for values in found.values())


def payload(draw: Draw, folder: Path) -> None:
    """What comes over a channel of an engine, or through its shared folder."""
    blob = dumps({"a": torch.ones(2, 2), "b": torch.zeros(0, dtype=torch.int64)}, {"kind": "result", "meta": [1]})
    _allowed(ValueError, lambda: loads(_bytes(draw, blob)))
    path = folder / "spool.safetensors"
    write_tensors(path, {"a": torch.ones(2, 2)}, {"kind": "result"})
    path.write_bytes(_bytes(draw, path.read_bytes()))
    _allowed(ValueError, lambda: read_tensors(path))


def records(draw: Draw, folder: Path) -> None:
    """The records of a run, as compare reads them; figures that are read can be computed with."""
    run = _run(folder / "run")
    lines = [{"round": n, **_LINE} for n in range(2)]
    which = draw(st.sampled_from(["config.yaml", "partition.json", "metrics.jsonl", "summary.json"]))
    if which == "metrics.jsonl":
        text = json.dumps(_replaced(draw, lines[1]))
        (run / which).write_bytes((run / which).read_bytes() + _bytes(draw, text.encode()) + b"\n")
    elif which == "summary.json":
        _alter(draw, run / which, _SUMMARY)
    else:
        (run / which).write_bytes(_bytes(draw, (run / which).read_bytes()))
    found = _allowed(FedcoreError, lambda: find_runs([run], lambda message: None))
    if found is not None:
        _compute(found[0])


def run_details(draw: Draw, folder: Path) -> None:
    """A run's files, as runs list, show and diff read them; what is read can be drawn."""
    run, other = _run(folder / "run"), read_overview(_run(folder / "other"), "other")
    if draw(st.booleans()):
        (run / "summary.json").unlink()
    contents = {"summary.json": _SUMMARY, "metrics.jsonl": {"round": 1, **_LINE}, "sessions.jsonl": _SESSION}
    which = draw(st.sampled_from([*contents, "labels.json", "config.yaml"]))
    if which == "config.yaml":
        _text(draw, run / which, read_mapping(run / which))
    else:
        value = _replaced(draw, contents.get(which, {"name": "a", "tags": ["b"], "note": "c"}))
        (run / which).write_text(json.dumps(value) + "\n")
    overview = read_overview(run, "run")
    json.dumps(overview.to_json())
    console = Console(file=io.StringIO())
    console.print(runs_table([overview, other]))
    one = _allowed(FedcoreError, lambda: details(overview, lambda message: None))
    if one is not None:
        pair = difference(one, details(other, lambda message: None))
        console.print(*details_tables(one), *difference_tables(pair, ["run", "other"], ["run", "other"]))


def sweep_file(draw: Draw, folder: Path) -> None:
    """A sweep's YAML file."""
    spec = SweepSpec.create({"base": {"rounds": 2}, "grid": {"plugin": ["moon", "fedavg"], "moon.mu": [1]}, "seeds": 2})
    path = _text(draw, folder / "sweep.yaml", yaml.safe_load(spec.as_yaml()))
    found = _allowed(ConfigError, lambda: read_spec(path))
    if found is not None:
        _allowed(ConfigError, lambda: list(islice(found.cells(), 20)))


def sweep_plan(draw: Draw, folder: Path) -> None:
    """A sweep's plan; no name of a run leads out of its folder."""
    runs = {"moon_seed=0_12345678": RunConfig(plugins={"moon": {}}).model_dump(mode="json")}
    odd = draw(st.sampled_from(["../..", "/etc", ".", "", "a/b", "runs/../../x", "\0", "ok"]))
    value = {"format": "fedcore-sweep-1", "runs": {odd: runs["moon_seed=0_12345678"], **runs}}
    _alter(draw, folder / "sweep.json", value)
    directory = SweepDirectory(folder)
    plan = _allowed(FedcoreError, directory.plan)
    for name in plan or ():
        assert directory.run_directory(name).parent == directory.path / "runs"
        assert directory.run_directory(name).name not in ("", ".", "..")


def recipe(draw: Draw, folder: Path) -> None:
    """A recipe of a paper's table."""
    path = _text(draw, folder / "table.yaml", copy.deepcopy(_recipe()))
    found = _allowed(ConfigError, lambda: read_recipe(path))
    if found is not None:
        assert math.isfinite(sum(cell.paper.mean or 0 for cell in found.cells("quick")))


def settings(draw: Draw, folder: Path) -> None:
    """What stands behind --set, --grid and --seeds."""
    value = st.one_of(st.text(max_size=40), _TAGS, st.sampled_from(["[" * 300, "{a: *b}", "&a [*a]", "1" * 5000]))
    text = draw(value)
    _allowed(ConfigError, lambda: parse_setting(draw(st.sampled_from([text, f"moon.mu={text}", f".={text}"]))))
    _allowed(ConfigError, lambda: parse_axis(draw(st.sampled_from([text, f"alpha={text}", f"plugin=moon,{text}"]))))
    numbers = st.text("0123456789,-+ _", max_size=30)
    _allowed(ConfigError, lambda: parse_seeds(draw(st.one_of(value, numbers))))
    axis = draw(st.sampled_from(["alpha", "plugin", "moon.mu", "clients", "tracker", "dataset"]))
    spec = _allowed(ConfigError, lambda: override(SweepSpec(), {}, [f"{axis}={text}"], None, []))
    if spec is not None:
        _allowed(ConfigError, lambda: list(islice(spec.cells(), 20)))


def npz(draw: Draw, folder: Path) -> None:
    """A user's arrays; objects in them are never unpickled."""
    path = folder / "data.npz"
    shapes = st.lists(st.integers(0, 5), max_size=5).map(tuple)
    kinds = st.sampled_from(["u1", "i8", "f4", "f8", "b1", "U3", "c8", "M8[s]", "O", "u8"])
    arrays = {
        name: np.zeros(draw(shapes), draw(kinds)) if draw(st.booleans()) else good
        for name, good in (
            ("x_train", np.zeros((4, 3, 3), "u1")),
            ("y_train", np.arange(4)),
            ("x_test", np.zeros((2, 3, 3), "u1")),
            ("y_test", np.arange(2)),
        )
    }
    np.savez(path, **arrays)
    if draw(st.booleans()):
        path.write_bytes(_bytes(draw, path.read_bytes()))
    _allowed(DataError, lambda: read_npz(path))


TARGETS: tuple[Target, ...] = (
    config_file,
    partition_json,
    partition_beside,
    checkpoint,
    client_state,
    payload,
    records,
    run_details,
    sweep_file,
    sweep_plan,
    recipe,
    settings,
    npz,
)

_METRICS = {"global": {"accuracy": 0.5, "loss": 1.0, "per_class": [0.5, None]}}
_LINE = {
    "cohort": [0, 1],
    "metrics": _METRICS,
    "losses": {"task": 1.0},
    "bytes": {"down": 10, "up": 12, "by_plugin": {"fedavg": {"down": 10, "up": 12}}},
    "time": {"round": 0.1, "evaluation": 0.2},
}
_SESSION = {
    "started": "2026-01-01T10:00:00+00:00",
    "commit": "1a2b3c",
    "machine": {"cpu": "x", "gpu": None, "cores": 2},
    "versions": {"fedcore": "0.1.0", "torch": "2"},
}
_SUMMARY = {"rounds": 2, "metrics": _METRICS, "bytes": {"down": 20, "up": 24}, "seconds": 1.0, "plugins": []}


def _run(run: Path) -> Path:
    """Write a run's files except for its checkpoints and models."""
    run.mkdir()
    partition = partition_digest("0", {"labels_sha256": "1"})
    values = RunConfig(rounds=2, plugins={"moon": {"mu": 1.0}}).model_dump(mode="json")
    RunDirectory(run).write_config(
        SavedConfig(values, partition, "2", {"torch": "1"}, [{"round": 1, "rounds": [1, 2]}])
    )
    (run / "partition.json").write_text('{"sha256": "0", "info": {"labels_sha256": "1"}}')
    (run / "metrics.jsonl").write_text("".join(json.dumps({"round": n, **_LINE}) + "\n" for n in range(2)))
    (run / "sessions.jsonl").write_text(json.dumps(_SESSION) + "\n")
    (run / "summary.json").write_text(json.dumps(_SUMMARY))
    return run


def _compute(run: RunRecord) -> None:
    """Do with a run's figures what compare does."""
    seconds_per_round(run)
    for protocol in run.protocols:
        run.curve(protocol)
        run.final(protocol)
        run.reached(protocol, 0.5, None)

    def table() -> None:
        made = compare.compare_runs([run], protocol="global", by=["plugin"], warn=lambda message: None)
        for form in formats.FORMATS.values():
            form([made])

    _allowed(FedcoreError, table)


def _allowed(errors: type[Exception] | tuple[type[Exception], ...], read: Callable[[], Any]) -> Any:
    """Return what a reader gives, None where it refuses with one of the errors, which say something."""
    try:
        return read()
    except errors as error:
        said = str(error)
    assert said
    return None


def _text(draw: Draw, path: Path, value: Any) -> Path:
    """Write a YAML file: random text, odd tags, or a valid value that is altered."""
    kind = draw(st.sampled_from(["altered", "altered", "damaged", "text", "odd"]))
    if kind == "altered":
        path.write_text(json.dumps(_replaced(draw, value)))
    elif kind == "damaged":
        path.write_bytes(_bytes(draw, yaml.safe_dump(value).encode()))
    elif kind == "text":
        path.write_bytes(draw(st.one_of(st.binary(max_size=60), st.text(max_size=60).map(lambda t: t.encode("utf8")))))
    else:
        odd = draw(st.one_of(_DEEP, _TAGS))
        key = draw(st.sampled_from(list(value) if isinstance(value, dict) else ["a"]))
        path.write_text(draw(st.sampled_from([odd, f"{key}: {odd}"])))
    return path


def _alter(draw: Draw, path: Path, value: Any) -> None:
    """Write a JSON file: a valid value that is altered, damaged bytes, or something else."""
    kind = draw(st.sampled_from(["altered", "altered", "damaged", "other"]))
    if kind == "altered":
        path.write_text(json.dumps(_replaced(draw, value)))
    elif kind == "damaged":
        path.write_bytes(_bytes(draw, json.dumps(value).encode()))
    else:
        path.write_text(draw(st.one_of(_DEEP, _JSON.map(json.dumps))))


def _alter_tensors(draw: Draw, path: Path) -> None:
    """Alter a file of tensors: its bytes, or its contents under a checksum that is right."""
    if draw(st.booleans()):
        path.write_bytes(_bytes(draw, path.read_bytes()))
        return
    tensors, meta = read_tensors(path)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from([*sorted(tensors), "model/w", "manifest/clients", "plugins/moon", "odd", "/"]))
        kind = draw(st.sampled_from([torch.float32, torch.int32, torch.int64, torch.bool, torch.bfloat16]))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        fill = draw(st.sampled_from([0, 1, -1, 2**31 - 1]))
        tensors[name] = torch.full(shape, fill, dtype=torch.int64).to(kind)
    if tensors and draw(st.booleans()):
        del tensors[draw(st.sampled_from(sorted(tensors)))]
    write_tensors(path, tensors, _replaced(draw, meta) if draw(st.booleans()) else meta)


def _bytes(draw: Draw, whole: bytes) -> bytes:
    """Return bytes that are cut, altered, grown, or others."""
    at = draw(st.integers(0, max(0, len(whole) - 1)))
    how = draw(st.sampled_from(["cut", "flip", "insert", "repeat", "other", "none"]))
    if how == "cut":
        return whole[:at]
    if how == "flip":
        return whole[:at] + bytes([draw(st.integers(0, 255))]) + whole[at + 1 :]
    if how == "insert":
        return whole[:at] + draw(st.binary(min_size=1, max_size=9)) + whole[at:]
    if how == "repeat":
        return whole[:at] + whole
    return draw(st.binary(max_size=80)) if how == "other" else whole


def _replaced(draw: Draw, value: Any) -> Any:
    """Return a value in which a part, at some depth, is another JSON value or gone."""
    if isinstance(value, dict) and value and draw(st.integers(0, 4)):
        name = draw(st.sampled_from(sorted(value)))
        rest = {key: part for key, part in value.items() if key != name}
        if draw(st.integers(0, 5)) == 0:
            return rest
        return {**rest, name: _replaced(draw, value[name])}
    if isinstance(value, list) and value and draw(st.booleans()):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], _replaced(draw, value[at]), *value[at + 1 :]]
    return draw(_JSON)


@functools.cache
def _dataset() -> Dataset:
    return load_dataset("breast-cancer")


@functools.cache
def _partition() -> Partition:
    from fedcore.data import make_partition

    return make_partition(_dataset(), RunConfig(partition="iid", clients=3, client_test_fraction=0.2, samples=30))


@functools.cache
def _recipe() -> Any:
    return yaml.safe_load(recipe_files()[0].read_text(encoding="utf-8"))
