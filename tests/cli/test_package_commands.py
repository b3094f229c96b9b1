"""Commands and engine options that come with other packages."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import typer
from pydantic import Field
from typer.testing import CliRunner

from fedcore.base import registry
from fedcore.base.errors import ConfigError, UnknownNameError
from fedcore.cli.app import app
from fedcore.cli.settings import build_config
from fedcore.engines.in_process import InProcessEngine
from fedcore.hooks.plugin import PLACE, PluginOptions
from fedcore.runs.resolve import resolve_config
from fedcore.runs.saved import places_in
from fedcore_testing import federate, model_bytes
from tests.sentences import raises

greet = typer.Typer(help="Greets.")


@greet.command()
def hello(name: str) -> None:
    """Say hello."""
    print(f"hello {name}")


@greet.command()
def goodbye() -> None:
    """Say goodbye."""
    raise ConfigError("nobody is there")


class CloudEngine(InProcessEngine):
    class Options(PluginOptions):
        size: int = Field(default=2, ge=1, description="How many.")
        address: str | None = Field(default=None, description="Where it is.", json_schema_extra=PLACE)


@pytest.fixture
def installed(monkeypatch):
    """Make entry points of this module's objects known."""
    scan = registry._scan

    def fake(kind, path):
        added = {
            "command": {
                "greet": [EntryPoint("greet", f"{__name__}:greet", "fedcore.commands")],
                "broken": [EntryPoint("broken", "no_such_module:app", "fedcore.commands")],
            },
            "engine": {"cloud": [EntryPoint("cloud", f"{__name__}:CloudEngine", "fedcore.engines")]},
        }
        return {**scan(kind, path), **added.get(kind, {})}

    monkeypatch.setattr(registry, "_scan", fake)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])


def invoke(*words):
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "160"})


def test_a_packages_command_is_there(installed):
    assert invoke("greet", "hello", "you").output == "hello you\n"
    assert "Greets." in invoke("--help").output


@pytest.mark.parametrize("words", [["sweep"], ["results"], ["runs"], ["data"], ["data", "plot"], ["init"]])
def test_completion_is_an_option_of_fedcore_alone(words):
    assert "--install-completion" in invoke("--help").output
    assert "--install-completion" not in invoke(*words, "--help").output


def test_errors_of_a_packages_command_are_messages(installed):
    outcome = invoke("greet", "goodbye")
    assert outcome.exit_code == 2
    assert outcome.output == "error: nobody is there\n"
    assert invoke("greet", "hello").exit_code == 2  # typer's own: an argument is missing


def test_a_command_that_cannot_be_imported_leaves_the_others(installed):
    outcome = invoke("--help")
    assert outcome.exit_code == 0
    assert "Cannot be loaded" in outcome.output
    broken = invoke("broken", "--anything", "else")
    assert broken.exit_code == 2
    assert "no_such_module" in broken.output
    assert "Traceback" not in broken.output


def test_a_command_that_is_not_installed_names_its_package(monkeypatch):
    monkeypatch.setitem(registry.packages()["command"], "absent", "fedcore-absent")
    outcome = invoke("absent", "server")
    assert outcome.exit_code == 2
    assert "pip install fedcore-absent" in outcome.output
    assert "pip install" not in invoke("nonsense").output


@pytest.mark.parametrize(
    ("command", "package"),
    [
        ("sweep", "fedcore-study"),
        ("compare", "fedcore-study"),
        ("runs", "fedcore-study"),
        ("report", "fedcore-report"),
        ("data plot", "fedcore-report"),
        ("reproduce", "fedcore-reproduce"),
        ("results", "fedcore-reproduce"),
        ("bench", "fedcore-bench"),
    ],
)
def test_without_a_package_its_commands_say_what_brings_them(monkeypatch, command, package):
    scan = registry._scan

    def others(kind, path):
        names = scan(kind, path)
        return {name: points for name, points in names.items() if points[0].dist.name != package}

    monkeypatch.setattr(registry, "_scan", others)
    outcome = CliRunner().invoke(app, [*command.split(), "somewhere"], env={"COLUMNS": "80"})
    assert outcome.exit_code == 2
    folder = Path(__file__).parents[2] / "plugins" / package
    assert outcome.output == f"error: '{command}' needs the package {package}: pip install -e {folder}\n"
    assert "Traceback" not in outcome.output


def test_set_reaches_the_engine_and_the_run_records_it(installed, tmp_path):
    config = build_config({"engine": "cloud"}, None, ["cloud.size=3"])
    assert config.engine_options == {"size": 3}
    resolved, _ = resolve_config(config)
    assert resolved.engine_options == {"size": 3, "address": None}


def test_engine_options_leave_the_bits_alone(installed, tmp_path):
    here = federate(tmp_path)
    there = federate(tmp_path, engine="cloud", engine_options={"size": 7})
    assert model_bytes(here) == model_bytes(there)


def test_a_files_options_go_with_the_files_engine(installed, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("engine: cloud\nengine_options: {size: 5, address: here}\n", encoding="utf-8")
    assert build_config({}, file, ["cloud.size=6"]).engine_options == {"size": 6, "address": "here"}
    assert build_config({"engine": "local"}, file, []).engine_options == {}


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"engine": "cloud", "engine_options": {"sise": 1}}, UnknownNameError, ()),
        ({"engine": "cloud", "engine_options": {"size": 0}}, ConfigError, ("'cloud'",)),
        ({"engine": "local", "engine_options": {"size": 1}}, ConfigError, ("'local'",)),
    ],
)
def test_wrong_engine_options_are_refused(installed, options, error, named, tmp_path):
    with raises(error, *named):
        federate(tmp_path, **options)


def test_an_engine_that_is_not_the_runs_is_named():
    with raises(ConfigError, "'ray'", "--engine"):
        build_config({}, None, ["ray.address=auto"])


def test_a_strangers_run_connects_nowhere_by_itself(installed, tmp_path):
    config = build_config({"engine": "cloud"}, None, ["cloud.address=far.example:6379"])
    assert places_in(config, tmp_path) == ["cloud.address=far.example:6379"]
    assert places_in(build_config({"engine": "cloud"}, None, []), tmp_path) == []


def test_engines_are_listed_and_shown(installed):
    listed = invoke("plugins", "list").output
    assert "engines (--engine NAME)" in listed
    assert "local" in listed.partition("engines (")[2]
    shown = invoke("plugins", "show", "cloud")
    assert shown.exit_code == 0, shown.output
    assert "cloud.size" in shown.output
    assert "cloud.address" in shown.output
    assert ":raises" not in invoke("plugins", "show", "local").output


def test_without_fedcore_workers_a_run_has_none_and_an_asked_for_worker_names_it(cli, monkeypatch, tmp_path):
    scan = registry._scan

    def others(kind, path):
        return {name: points for name, points in scan(kind, path).items() if (kind, name) != ("engine", "workers")}

    monkeypatch.setattr(registry, "_scan", others)
    small = ("--rounds", 1, "--clients", 2, "--local-epochs", 1, "--out", "run")
    refused = cli("train", *small, "--workers", 2)
    assert refused.exit_code == 2
    remedy = registry.how_to_install("fedcore-workers")
    assert refused.stderr.splitlines()[-1] == f"error: --workers 2 needs the package fedcore-workers: {remedy}"
    assert not (tmp_path / "run").exists()
    assert cli("train", *small).exit_code == 0


def test_completion_below_the_command_of_an_absent_package_offers_nothing(monkeypatch):
    monkeypatch.setattr(registry, "_scan", lambda kind, path: {})
    line = {"COMP_WORDS": "fedcore data l", "COMP_CWORD": "2", "_FEDCORE_COMPLETE": "complete_bash"}
    outcome = CliRunner().invoke(app, prog_name="fedcore", env=line)
    assert (outcome.exit_code, outcome.output.strip()) == (0, "")
