"""The documentation is true to the code."""

import contextlib
import importlib
import re
from pathlib import Path

import pytest
import yaml

from fedcore.cli import app as cli_app
from fedcore.hooks import hookspecs
from fedcore.hooks.checks import HOOKS
from tests.support import in_one_test

ROOT = Path(__file__).parents[2]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ONE_ROUND = (ROOT / "docs" / "one-round.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


@in_one_test(hook=HOOKS)
def test_every_hook_stands_in_both_call_trees(hook):
    assert re.search(rf"\b{hook}\b", hookspecs.__doc__)
    assert re.search(rf"\b{hook}\b", ONE_ROUND)


@in_one_test(hook=HOOKS)
def test_every_hook_says_when_it_is_called_and_how_several_combine(hook):
    text = HOOKS[hook].__doc__
    assert "When: " in text
    assert "Combining: " in text
    exclusive = HOOKS[hook].fedcore_spec["firstresult"]
    assert exclusive == ("Combining: exclusive" in text)


def test_every_floor_of_the_core_is_described():
    floors = {f"{path.name}/" for path in (ROOT / "fedcore").iterdir() if (path / "__init__.py").exists()}
    assert {floor for floor in floors if f"`{floor}`" not in ARCHITECTURE} == set()


def test_the_call_tree_names_functions_that_exist():
    """Each as ``folder/module.py: name``, a method as ``Class.name``; or after a comma, of the same module."""
    named = re.findall(r"(\w+/\w+\.py): ([\w.]+(?:, \w+)*)", ONE_ROUND)
    assert len(named) > 15
    for module, names in named:
        source = (ROOT / "fedcore" / module).read_text(encoding="utf-8")
        for name in re.split(r", |\.", names):
            assert re.search(rf"\b(?:def|class) {name}\b", source), f"{module}: {name}"


FOLDERS = ("docs/**", "lab", "results", "plugins/*", "examples/*", "benchmarks/*")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in ROOT.glob(f"{folder}/*.md"))])


@in_one_test(page=PAGES)
def test_no_page_has_both_sides_of_a_merge(page):
    assert not re.findall(r"^(?:<{7}|>{7}) .*", page.read_text(encoding="utf-8"), re.MULTILINE)


@in_one_test(page=PAGES)
def test_links_lead_to_files_and_their_labels_name_them(page):
    """In the repository, as it is shown there: no link leads to a page that ``make docs`` makes."""
    links = re.findall(r"\[([^\]]+)\]\(([^)\s]+)[^)]*\)", outside_of_code(page))
    assert not [f"[{label}]({target})" for label, target in links if not is_right(page, label, target)]


def is_right(page, label, target):
    path, _, anchor = target.partition("#")
    aim = (page.parent / path).resolve() if path else page
    if "://" in target or not aim.exists():
        return "://" in target
    if anchor and "." not in anchor and anchor not in anchors(aim):  # with a dot: an object, which the site describes
        return False
    file = re.fullmatch(r"`?(?:[\w./-]+/)?(\w+\.(?:py|md|toml|yaml))`?", label)
    described = re.fullmatch(r"`(fedcore\w*\.[\w.]+)`", label)
    return (not file or file[1] == aim.name) and (not described or defined_in(described[1], aim))


def outside_of_code(page):
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", outside_of_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def defined_in(name, source):
    """Whether a dotted name is the module of a source file, or a class, function or method in it."""
    module = source.relative_to(ROOT).with_suffix("").as_posix().rpartition("/src/")[2].replace("/", ".")
    inner = name.removeprefix(module).split(".")[1:]
    text = source.read_text(encoding="utf-8")
    return name.startswith(module) and all(
        re.search(rf"^ *(?:class |def )?{part}\b", text, re.MULTILINE) for part in inner
    )


def test_pages_show_files_as_they_are(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools" / "site")
    import includes

    assert sum(len(includes.INCLUDE.findall(page.read_text(encoding="utf-8"))) for page in includes.pages()) > 12
    changed = [page.name for page in includes.pages() if page.read_text(encoding="utf-8") != includes.current(page)]
    assert not changed, "run: python tools/site/includes.py"


@in_one_test(page=PAGES)
def test_modules_that_a_page_names_exist(page):
    """``fedcore/server/round.py``, ``fedcore.server.round`` and ``fedcore_study.sweep``, in text and in code."""
    text = page.read_text(encoding="utf-8")
    wrong = [path for path in re.findall(r"(?<![\w/])fedcore/[\w/]+\.py", text) if not (ROOT / path).exists()]
    names = set(re.findall(r"(?<![\w./-])fedcore(?!_my_)\w*(?:\.[A-Za-z_]\w*)+", text)) - ENTRY_POINT_GROUPS
    wrong += [name for name in sorted(names) if not _exists(name)]
    assert not wrong


ENTRY_POINT_GROUPS = {
    f"fedcore.{kind}"
    for kind in ("plugins", "datasets", "models", "partitioners", "engines", "commands", "presets", "tasks")
}
ENTRY_POINT_GROUPS |= {
    "fedcore.augmentations",
    "fedcore.displays",
    "fedcore.options",
    "fedcore.runners",
    "fedcore.tables",
    "fedcore.trackers",
    "fedcore.metrics",
    "fedcore.metric_prefixes",
}
ENTRY_POINT_GROUPS |= {"fedcore.run_dir"}  # a tag in MLflow


def _exists(name: str) -> bool:
    """Whether a dotted name is a module, or a member of one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        with contextlib.suppress(ImportError):
            found = importlib.import_module(".".join(parts[:length]))
            for part in parts[length:]:
                found = getattr(found, part, None)
            return found is not None
    return False


@pytest.mark.parametrize("line", re.findall(r"^    fedcore (.+)$", README, re.MULTILINE))
def test_every_flag_in_the_readme_exists(line, run_cli):
    words = line.split()
    helped = run_cli([words[0], "--help"])
    for flag in (word for word in words if word.startswith("--")):
        assert flag in helped, f"{flag} of: fedcore {line}"


@pytest.fixture
def run_cli(monkeypatch):
    from typer.testing import CliRunner

    monkeypatch.setenv("COLUMNS", "200")

    def run(arguments):
        result = CliRunner().invoke(cli_app.app, arguments)
        assert result.exit_code == 0, result.output
        return re.sub(r"\x1b\[[0-9;]*m", "", result.output)

    return run


def test_the_readmes_plugin_is_the_packages():
    """The code block of the README runs, and trains as the real plugin does."""
    block = next(b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "class FedProx(" in b)
    space: dict = {}
    exec(block, space)  # noqa: S102 - our own README
    from fedcore_fedprox import FedProx

    assert space["FedProxOptions"]().mu == FedProx.Options().mu
    assert space["FedProx"].neutral == FedProx.neutral


def test_configuration_of_the_tests_cannot_rot():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for path in project["tool"]["pytest"]["ini_options"]["testpaths"]:
        assert (ROOT / path).is_dir()
    minimum = project["project"]["requires-python"].removeprefix(">=")
    assert project["tool"]["ruff"]["target-version"] == "py" + minimum.replace(".", "")
    assert project["tool"]["mypy"]["python_version"] == minimum
    members = {path.name for path in (ROOT / "plugins").iterdir() if path.is_dir()}
    assert {"fedcore-fl", *members} == set(project["tool"]["uv"]["sources"])
    assert members < set(project["dependency-groups"]["dev"])


def test_constraints_name_no_address_and_pin_every_dependency():
    lines = (ROOT / "constraints.txt").read_text().split()
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines)


def test_no_lock_file_is_tracked():
    assert "uv.lock" in (ROOT / ".gitignore").read_text().split()


def test_yaml_of_a_config_round_trips(tmp_path):
    from fedcore.base.config import RunConfig
    from fedcore.base.safe_yaml import read_config_file

    config = RunConfig.create({"plugins": ["moon", {"fedprox": {"mu": 0.5}}], "alpha": 0.1})
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    assert RunConfig.create(read_config_file(file)) == config
