"""Options that packages add to a run: a package of a third party, one that is broken, and one that is not installed."""

from __future__ import annotations

import textwrap

import pytest

from fedcore import ConfigError, RunConfig, UnknownNameError
from fedcore.base import config as module
from fedcore.runs import saved
from tests.sentences import raises, warns

MODULE = """
from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedcore import Section, Trait


class Hurry(Section):
    panel = "Hurry"

    haste: Annotated[int, Trait.NO_EFFECT, Trait.CHANGEABLE] = Field(default=1, ge=1, le=9, description="How fast.")
    pauses: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(default=1, description="How often to rest.")

    @model_validator(mode="after")
    def _check_haste(self):
        if self.haste > self.rounds:
            raise ValueError(f"haste is {self.haste}, but there are {self.rounds} rounds")
        return self

    def settled(self, setup, dataset):
        return {"pauses": setup.config.clients} if self.pauses == "auto" else {}

    def cautions(self, setup):
        return ["--haste has no effect on one client"] if self.haste > 1 and self.clients == 1 else []


class Rests(Section):
    panel = "Hurry"

    rests: list[int] = Field(default=[], description="The rounds after which to rest.")


class Replaces(Section):
    panel = "Training"
    rounds: int = 1


class Overrides(Section):
    panel = "Training"
    modest: int = 1

    @property
    def cohort_size(self):
        return 1
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Install a package with a module ``in_haste`` and these options; returns its folder."""

    def install(**options):
        (tmp_path / "site" / "in_haste-1.0.dist-info").mkdir(parents=True)
        (tmp_path / "site" / "in_haste.py").write_text(MODULE)
        points = "".join(f"{name} = {value}\n" for name, value in options.items())
        folder = tmp_path / "site" / "in_haste-1.0.dist-info"
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: in-haste\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[fedcore.options]\n{points}")
        monkeypatch.syspath_prepend(tmp_path / "site")
        return tmp_path / "site"

    return install


HURRY = {"haste": "in_haste:Hurry", "pauses": "in_haste:Hurry"}


def test_a_package_adds_options(package) -> None:
    package(**HURRY)
    extended = module._with_options_of_packages(RunConfig)
    config = extended.create({"haste": 3})
    assert (config.haste, config.pauses, config.rounds) == (3, 1, 20)
    assert config.written()["haste"] == 3
    assert "pauses" not in config.written()
    with raises(ConfigError, "--haste", "9"):
        extended.create({"haste": 10})
    with raises(ConfigError, "5", "2"):
        extended.create({"haste": 5, "rounds": 2})
    with raises(UnknownNameError, "'haste'"):
        extended.create({"hasty": 5})


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("no_such_module:Hurry", ("modest", "no_such_module")),
        ("in_haste:Literal", ("modest", "fedcore.Section")),
        ("in_haste:Replaces", ("rounds", "'rounds'")),
        ("in_haste:Overrides", ("modest", "'cohort_size'")),
    ],
)
def test_what_cannot_be_added_is_left_out_with_a_warning(package, value: str, named: tuple[str, ...]) -> None:
    package(**{"rounds" if "Replaces" in value else "modest": value})
    with warns(RuntimeWarning, *named):
        assert module._with_options_of_packages(RunConfig) is RunConfig


def test_train_and_resume_have_the_flags_without_torch(package, python) -> None:
    shown = python(
        textwrap.dedent(
            f"""
            import sys
            sys.path.insert(0, {str(package(**HURRY))!r})
            from fedcore.cli.app import app
            for command in (["train", "--help-all"], ["resume", "--help"]):
                app(command, standalone_mode=False)
            assert "torch" not in sys.modules
            """
        )
    ).stdout
    train, resume = shown.split("Usage: ")[1:]
    assert "─ Hurry ─" in train
    assert "--haste" in train
    assert "N|auto" in train
    assert "--haste" in resume
    assert "--pauses" not in resume


def test_an_option_without_a_form_on_the_command_line_is_an_error_for_people(package, python) -> None:
    code = f"""
        import contextlib, io, sys
        sys.path.insert(0, {str(package(rests="in_haste:Rests"))!r})
        from fedcore.cli import main
        try:
            with contextlib.redirect_stderr(io.StringIO()) as errors:
                main()
        except SystemExit as end:
            print(end.code, errors.getvalue())
    """
    said = "2 error: --rests: no flag for list[int]; mark a list: Annotated[..., Repeated('X')]"
    assert python(textwrap.dedent(code)).stdout.strip() == said


@pytest.mark.slow
def test_a_run_with_an_added_option(package, python, tmp_path) -> None:
    done = python(
        textwrap.dedent(
            f"""
            import sys
            sys.path.insert(0, {str(package(**HURRY))!r})
            import fedcore
            from fedcore.tools import WITHOUT_EFFECT, digest
            small = dict(rounds=2, local_epochs=1, workers=0, progress=False)
            notes = []
            result = fedcore.run(clients=1, haste=2, pauses="auto", out={str(tmp_path / "run")!r}, **small)
            config = fedcore.load_run(result.directory).config
            assert (config.haste, config.pauses) == (2, 1), config
            assert "haste" in WITHOUT_EFFECT
            assert digest(config) == digest(config.model_copy(update={{"haste": 1}}))
            assert digest(config) != digest(config.model_copy(update={{"pauses": 2}}))
            again = fedcore.resume(result.directory, changes={{"haste": 3, "rounds": 3}}, progress=False)
            assert again.config.haste == 3
            """
        )
    )
    assert done.returncode == 0, done.stderr
    assert "--haste has no effect on one client" in done.stderr


ABSENT = """
from fedcore.base import registry

scan = registry._scan
registry._scan = lambda kind, path: {{}} if kind in ("option", "runner") else scan(kind, path)
from fedcore.cli.app import app

app({arguments})
"""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("arguments", "package"),
    [
        (["train", "--stack", "25"], "accelerate"),
        (["train", "--no-capture"], "accelerate"),
        (["train", "--config", "FILE"], "accelerate"),
        (["train", "--system", "dropout=0.1"], "simulation"),
    ],
)
def test_an_option_of_a_package_that_is_not_installed_is_answered_with_its_name(
    python, tmp_path, arguments, package
) -> None:
    (tmp_path / "run.yaml").write_text("stack: 25\n")
    given = [str(tmp_path / "run.yaml") if argument == "FILE" else argument for argument in arguments]
    done = python(ABSENT.format(arguments=given))
    assert done.returncode == 2
    assert f"is in the package fedcore-{package}: pip install" in " ".join(done.stderr.replace("│", "").split())
    assert "Traceback" not in done.stderr


def test_a_run_directory_that_holds_one_is_answered_with_its_name(monkeypatch, tmp_path) -> None:
    own = next(base for base in reversed(RunConfig.__mro__) if base.__name__ == "RunConfig")  # without packages
    monkeypatch.setattr(saved, "RunConfig", own)
    file = saved.SavedConfig({**own().written(), "lanes": 8}, "", "", {})
    file.write(tmp_path / "config.yaml")
    with raises(UnknownNameError, "'lanes'"):
        saved.SavedConfig.read(tmp_path / "config.yaml")
