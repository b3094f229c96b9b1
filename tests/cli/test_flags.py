from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError, field_validator

from fedcore.base.config import RunConfig
from fedcore.base.errors import ConfigError, UnknownNameError, describe, flag_of
from fedcore.cli import options, training
from fedcore.cli.settings import build_config, set_options
from tests.sentences import raises

OWN = {"settings", "preset", "config_file", "as_json", "quiet", "profile", "debug", "allow_code"}
OWN |= {"fast_dev_run", "help_all"}


def test_train_has_a_flag_for_every_field() -> None:
    assert set(inspect.signature(training.train).parameters) == set(RunConfig.model_fields) - set(options.BY_SET) | OWN


def test_help_says_bounds_and_defaults(cli, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = cli("train", "--help-all").output
    for name in set(RunConfig.model_fields) - set(options.BY_SET):
        assert f"{flag_of(name)} " in text
    assert "[0 < x <= 1; default 1.0]" in text
    assert "[default dirichlet]" in text
    assert "--no-augment" in text
    for title in ("Methods", "Data and model", "Clients", "Training", "Execution", "Records"):
        assert f"─ {title} ─" in text


def test_bounds_that_only_refuse_typos_are_not_printed(cli, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = cli("train", "--help-all").output
    assert "[>= 1; default 20]" in text  # rounds
    assert "[>= 0; default 0]" in text  # seed
    assert not re.search(r"\d{6}|\^|e\+", text)


def test_the_help_fits_a_screen_and_says_where_the_rest_is(cli, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = cli("train", "--help").output
    assert len(text.splitlines()) <= 40
    shown = set(re.findall(r"^│ (--[\w-]+)", text, re.MULTILINE))
    named = {"settings": "--set", "config_file": "--config"}
    assert shown == {named.get(name) or flag_of(name) for name in options.EVERYDAY}
    assert re.search(r"--help-all .* Show all options\.", text)
    assert "Fraction of the clients sampled" in text
    assert "[default 1.0]" in text


def test_the_everyday_options_exist() -> None:
    assert set(options.EVERYDAY) <= set(inspect.signature(training.train).parameters)


def test_help_all_needs_no_valid_options(cli) -> None:
    assert cli("train", "--rounds", "0", "--help-all").exit_code == 0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("alpha: 0.1\nrounds: 7\nplugins:\n  moon: {mu: 5}\n  fedprox: {mu: 0.1}\n", encoding="utf-8")
    return path


def test_flags_override_the_file_and_the_file_the_defaults(file: Path) -> None:
    config = build_config({"rounds": 3}, file, [])
    assert (config.rounds, config.alpha, config.clients) == (3, 0.1, 10)
    assert list(config.plugins) == ["moon", "fedprox"]


def test_plugin_flags_replace_the_files_list_and_keep_options(file: Path) -> None:
    config = build_config({"plugins": ["fedcd", "moon"]}, file, [])
    assert list(config.plugins.items()) == [("fedcd", {}), ("moon", {"mu": 5})]


def test_set_overrides_the_file(file: Path) -> None:
    config = build_config({}, file, ["moon.mu=0.5", "moon.temperature=1"])
    assert config.plugins["moon"] == {"mu": 0.5, "temperature": 1}


@pytest.mark.parametrize(
    ("text", "value"), [("5", 5), ("0.5", 0.5), ("null", None), ("[1, 2]", [1, 2]), ("a=b", "a=b")]
)
def test_set_reads_yaml_values(text: str, value: object) -> None:
    assert set_options({"moon": {}}, [f"moon.mu={text}"]) == {"moon": {"mu": value}}


def test_set_works_for_a_plugin_named_by_its_module() -> None:
    assert set_options({"module:mine.Foo": {}}, ["module:mine.Foo.x=1"]) == {"module:mine.Foo": {"x": 1}}
    assert set_options({"module:mine.Foo": {}, "moon": {}}, ["foo.x=1"]) == {"module:mine.Foo": {"x": 1}, "moon": {}}
    assert set_options({"module:mine.Foo": {}}, ["Foo.x=1"]) == {"module:mine.Foo": {"x": 1}}
    assert set_options({"module:mine.Foo": {}, "Foo": {}}, ["Foo.x=1"])["Foo"] == {"x": 1}  # one of this very name
    with raises(ConfigError, "'Foo'", "module:mine.Foo", "module:yours:Foo"):
        set_options({"module:mine.Foo": {}, "module:yours:Foo": {}}, ["Foo.x=1"])


def test_set_for_a_plugin_that_is_not_there() -> None:
    with raises(ConfigError, "'mooon'", "'moon'"):
        set_options({"moon": {}}, ["mooon.mu=1"])


@pytest.mark.parametrize("text", ["nu=1", "moon.mu", ".mu=1", "moon.=1"])
def test_set_of_another_form(text: str) -> None:
    with raises(ConfigError, repr(text)):
        set_options({"moon": {}}, [text])


def test_the_config_of_a_run_does_not_name_its_directory_again(tmp_path: Path) -> None:
    """Wherever the run or the file has gone since."""
    file = tmp_path / "config.yaml"
    for out in (tmp_path, "elsewhere"):
        file.write_text(f"out: {out}\nversions: {{torch: '2'}}\ndigests: {{settings: x}}\n", encoding="utf-8")
        assert build_config({}, file, []).out is None
    file.write_text("out: elsewhere\n", encoding="utf-8")
    assert build_config({}, file, []).out == Path("elsewhere")


def test_an_option_without_a_value_in_the_file_is_empty(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("plugins:\ntrackers:\nmetrics:\ntags:\nclient_models:\nengine_options:\n", encoding="utf-8")
    assert build_config({}, file, []) == RunConfig()


def test_the_config_of_a_run_does_not_hand_on_its_labels(tmp_path: Path) -> None:
    labels = "name: first\ntags:\n- a\n- b\nnote: seen\n"
    file = tmp_path / "config.yaml"
    file.write_text(labels, encoding="utf-8")
    written = build_config({}, file, [])
    assert (written.name, written.tags, written.note) == ("first", ["a", "b"], "seen")
    file.write_text(f"{labels}digests: {{settings: x}}\n", encoding="utf-8")
    again = build_config({"tags": ["c"]}, file, [])
    assert (again.name, again.tags, again.note) == (None, ["c"], None)


def test_problems_name_the_file_unless_a_flag_made_them(file: Path) -> None:
    file.write_text("alpha: -1\n", encoding="utf-8")
    with raises(ConfigError, f"{file}: --alpha", -1, "\n--lr", -2.0):
        build_config({"lr": -2.0}, file, [])


def test_an_unknown_option_in_the_file(file: Path) -> None:
    file.write_text("alhpa: 0.1\n", encoding="utf-8")
    with raises(UnknownNameError, "'alhpa'", "'alpha'", "run.yaml"):
        build_config({}, file, [])


class Terse(BaseModel):
    mu: float = 0.0
    steps: int = 1
    tau: float = 0.0

    @field_validator("mu")
    @classmethod
    def _check_mu(cls, value):
        raise ValueError

    @field_validator("steps")
    @classmethod
    def _check_steps(cls, value):
        raise AssertionError  # as `assert value > 1` does without pytest

    @field_validator("tau")
    @classmethod
    def _check_tau(cls, value):
        raise ValueError("Only 0 is meant")


def test_a_validator_that_gives_no_reason_is_said_to_give_none():
    with pytest.raises(ValidationError) as caught:
        Terse(mu=2, steps=1, tau=3)
    assert describe(caught.value, flags=False).splitlines() == [
        "mu: a validator refuses it and gives no reason (given: 2)",
        "steps: a validator refuses it and gives no reason (given: 1)",
        "tau: only 0 is meant",
    ]
