"""A method's card: its options, and what it says of what travels, beside what its ledger counts in a run."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from fedcore.base import registry
from fedcore.hooks.plugin import BUILTIN
from fedcore_testing.traffic import Traffic, watch
from tests.support import CORRECTED, in_one_test

ROOT = Path(__file__).parents[2]
HEADING = "## What travels, and what it reveals"
OURS = {
    name: ROOT / "plugins" / point.dist.name / "README.md"
    for name, point in registry.available("plugin").items()
    if name != BUILTIN and (ROOT / "plugins" / point.dist.name).is_dir()
}
PAPERS = ["fedcd", "fedcme", "fedproc", "fedeccr", "uscc", "fdcl"]
PARAMETERS = {"classifier.weight", "encoder.base.fc1.weight"}
"""Of those that ``mlp`` has: a method that sends these by name sends as much as a model."""


def what_travels(card: Path) -> str:
    found = re.search(rf"^{HEADING}$(.*?)(?=^## |\Z)", card.read_text(), re.MULTILINE | re.DOTALL)
    assert found, f"{card} has no section {HEADING!r}"
    return found[1]


@pytest.fixture(scope="module")
def watched() -> dict[str, Traffic]:
    return {}


def seen(watched: dict[str, Traffic], name: str) -> Traffic:
    if name not in watched:
        watched[name] = watch(name, CORRECTED.get(name))
    return watched[name]


def test_the_cards_are_found() -> None:
    assert len(OURS) >= 24


INSTALLED = re.compile(r"^    pip install -e \. -e (.+?)  # in a checkout$", re.MULTILINE)


@in_one_test(card=sorted((ROOT / "plugins").glob("*/README.md")))
def test_the_card_installs_every_package_of_ours_that_is_needed(card: Path) -> None:
    """No index has them yet, so that pip finds a package of ours only where the command names its folder."""
    for line in INSTALLED.findall(card.read_text(encoding="utf-8")):
        named = {Path(word.partition("[")[0]).name for word in line.split(" -e ")}
        assert card.parent.name in named
        for name in named:
            project = tomllib.loads((ROOT / "plugins" / name / "pyproject.toml").read_text(encoding="utf-8"))["project"]
            needed = {Requirement(need).name for need in project["dependencies"]}
            assert {need for need in needed if need.startswith("fedcore-")} <= {
                "fedcore-fl",
                *named,
            }  # the first is "."


def forms(default: object) -> set[str]:
    """Return how a table may write a default."""
    return {str(default), repr(default), str(default).lower(), *(["null"] if default is None else [])}


@in_one_test(name=OURS)
def test_the_card_lists_every_option_with_its_default(name: str) -> None:
    listed = set()
    for line in OURS[name].read_text(encoding="utf-8").splitlines():
        cells = [cell.strip(" |`") for cell in line.split(" | ")]
        option, *others = cells[1:] if cells[0] == name and len(cells) > 1 else cells  # a card of several plugins
        listed.add((option.removeprefix(f"{name}."), *others[:1]))
    options = registry.resolve("plugin", name).Options
    missing = [
        f"{option}, default {field.default}"
        for option, field in ((field.alias or key, field) for key, field in options.model_fields.items())
        if not any((option, form) in listed for form in forms(field.default))
    ]
    assert not missing, f"{OURS[name]} has no row for {missing}"


def test_the_functions_of_the_equations_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The card's page on the site shows their code; of others, such as ``step.gradients_at``, it shows none."""
    monkeypatch.syspath_prepend(ROOT / "tools" / "site")
    from sources import package_definitions, plugin_packages, shared_definition

    for package in plugin_packages():
        known, place = package_definitions(package), None
        for line in (package / "README.md").read_text(encoding="utf-8").splitlines():
            cells = re.split(r"(?<!\\)\|", line)[1:-1]
            if not cells or " function " in cells:
                place = cells.index(" function ") if cells else None
            elif place is not None:
                for name in re.findall(r"`((?:fedcore_[\w.]+\.)?[a-z]\w*)`", cells[place]):
                    assert known.get(name) or shared_definition(name), f"{package.name}: {name}"


@pytest.mark.parametrize("name", PAPERS)
def test_the_table_of_options_has_the_options_own_descriptions(name: str) -> None:
    card = OURS[name].read_text(encoding="utf-8")
    fields = registry.resolve("plugin", name).Options.model_fields.values()
    missing = [field.description for field in fields if f"| {field.description} |" not in card]
    assert not missing


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore::UserWarning")  # Krum about two clients
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in PAPERS else pytest.mark.slow) for name in OURS], ids=str
)
def test_the_card_names_what_is_sent(name: str, watched: dict[str, Traffic]) -> None:
    section = what_travels(OURS[name])
    tensors, counted = seen(watched, name)
    for way in ("up", "down"):
        assert bool(counted[way]) == any(seen_way.startswith(way) for seen_way in tensors), (way, counted)
    sent = {tensor.rpartition(":")[2] for way in tensors.values() for tensor in way}  # "1:w" is w of a further model
    if sent >= PARAMETERS:
        assert "one model's size" in section
        return
    unnamed = sorted(tensor for tensor in sent if f"`{tensor}`" not in section)
    assert not unnamed, f"the card of {name} does not name {', '.join(unnamed)}, which it sends"
    if sent:
        assert "nothing else" not in section


@pytest.mark.parametrize(
    ("name", "figure", "each", "times"),
    [
        ("fedcd", "30,960", 10 * 3 * (4 * 256 + 8), 2),
        ("fedproc", "10,320", 10 * (4 * 256 + 8), 2),
    ],
)
def test_the_cards_bytes_are_the_ledgers(
    name: str, figure: str, each: int, times: int, watched: dict[str, Traffic]
) -> None:
    assert f"{each:,}" == figure
    assert figure in what_travels(OURS[name])
    assert seen(watched, name).bytes["up"] == 2 * times * each  # two clients


@pytest.mark.parametrize("name", ["uscc", "ccvr"])
def test_statistics_take_what_the_card_says(name: str, watched: dict[str, Traffic]) -> None:
    def size(width: int) -> float:
        return 8 * (2 + width + width * (width + 1) / 2)

    assert re.search(r"8 \*? ?\(2 \+ d \+ d ?\(d \+ 1\)/2\) bytes a class", what_travels(OURS[name]))
    assert re.search(r"2\.7\sMB", what_travels(OURS[name]))
    assert 10 * size(256) == pytest.approx(2.7e6, rel=0.02)
    assert seen(watched, name).bytes["up"] == 2 * 10 * size(64)
