"""The wheels in an environment with nothing else of fedcore, from an index with another project's ``fedcore``."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from tests.packaging.environments import Environment, foreign, lend

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STUDIES = {
    "sweep": "fedcore-study",
    "compare": "fedcore-study",
    "runs": "fedcore-study",
    "report": "fedcore-report",
    "reproduce": "fedcore-reproduce",
    "results": "fedcore-reproduce",
    "bench": "fedcore-bench",
}
"""The commands of the extra ``study``, and their packages."""
ALONE = "fedcore-flower"
"""What it requires is not installed next to the others."""
EXTRAS = [
    f"{project['name']}[{extra}]"
    for path in (ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml")))
    if (project := tomllib.loads(path.read_text(encoding="utf-8"))["project"])["name"] != ALONE
    for extra in project.get("optional-dependencies", {})
]


@pytest.fixture(scope="session")
def index(dist, tmp_path_factory):
    """Return a folder of all wheels, with another project's fedcore of a higher version than ours."""
    folder = tmp_path_factory.mktemp("index")
    for wheel in dist.glob("*.whl"):
        (folder / wheel.name).hardlink_to(wheel)
    foreign(folder, "9.9")
    return folder


def test_wheels_in_an_empty_environment(index, tmp_path):
    environment = Environment(tmp_path)
    lend(environment.lent, index, "fedcore-fedcd")
    assert not [path.name for path in environment.lent.iterdir() if "fedcore" in path.name]
    assert "No module named 'fedcore'" in environment.run("python", "-c", "import fedcore", code=1)

    environment.install(index, "fedcore-fedcd")
    assert environment.ours() == {"fedcore-fl", "fedcore-functional", "fedcore-fedcd"}
    assert "No broken requirements found" in environment.pip("check")
    origin = environment.run("python", "-c", "import fedcore, fedcore_fedcd as p; print(fedcore.__file__, p.__file__)")
    assert all(Path(path).is_relative_to(environment.spec) for path in origin.split())
    assert environment.plugins() == {
        "fedavg": "fedcore-fl",
        "fedcd": "fedcore-fedcd",
        "fedcd-variants": "fedcore-fedcd",
        "local": "fedcore-fl",
    }
    summary = environment.train("with", "--plugin", "fedcd")
    assert summary["metrics"]["global"]["accuracy"] > 0.2
    assert [path.name for path in environment.empty.iterdir()] == ["with"], "a run leaves its directory and no more"

    assert "pip install fedcore-testing" in environment.run("fedcore", "plugins", "new", "my-own", code=2)
    assert "pip install fedcore-zoo" in environment.run("fedcore", "train", "--dataset", "cifar10", code=2)

    for command, package in STUDIES.items():
        refused = environment.run("fedcore", command, code=2)
        assert f"pip install {package}" in refused, command
        assert "Traceback" not in refused, command
    lend(environment.lent, index, "fedcore-fl[study]")
    environment.install(index, "fedcore-fl[study]")
    for command in STUDIES:
        environment.run("fedcore", command, "--help")
    assert "fedcore reproduce fedcd --table 1" in environment.run("fedcore", "reproduce", "fedcd")

    needed = ["fedcore-console", "fedcore-workers", "fedcore-zoo"]
    environment.pip("uninstall", "--quiet", "--yes", "fedcore-fedcd", *dict.fromkeys(STUDIES.values()), *needed)
    assert environment.plugins() == {"fedavg": "fedcore-fl", "local": "fedcore-fl"}
    refused = environment.run("fedcore", "train", "--plugin", "fedcd", code=2)
    assert "pip install fedcore-fedcd" in refused
    assert "Traceback" not in refused
    alone = environment.train("alone")
    assert alone["metrics"]["global"]["accuracy"] > 0.2
    environment.run("fedcore", "resume", "alone", "--rounds", 3, "--quiet")
    assert json.loads((environment.empty / "alone" / "summary.json").read_text())["rounds"] == 3
    evaluated = json.loads(environment.run("fedcore", "evaluate", "alone", "--json"))
    assert evaluated["global"]["samples"] > 0
    assert "pip install fedcore-console" in environment.run("fedcore", "data", "list", code=2)
    environment.install(index, "fedcore-console")
    assert "digits" in environment.run("fedcore", "data", "list")


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_brings_our_packages_and_what_it_declares(index, tmp_path, extra):
    environment = Environment(tmp_path)
    lend(environment.lent, index, extra)
    environment.install(index, extra)
    installed = environment.ours()
    assert {extra.partition("[")[0], "fedcore-fl"} <= installed
    assert "fedcore" not in installed
    assert "No broken requirements found" in environment.pip("check")
    assert environment.plugins()["fedavg"] == "fedcore-fl"
