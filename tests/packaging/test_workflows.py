"""The workflows run what the project declares: its Python versions, its checks, a release without stored secrets."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github"
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in FOLDER.glob("workflows/*.yml")}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def commands(job: dict) -> str:
    return "\n".join(step["run"] for step in job["steps"] if "run" in step)


def test_every_python_that_is_named_is_tested_on_both_systems():
    named = [re.search(r":: Python :: (3\.\d+)$", each) for each in PROJECT["classifiers"]]
    matrix = WORKFLOWS["tests"]["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == [version[1] for version in named if version]
    assert [re.match(r"[a-z]+", system)[0] for system in matrix["os"]] == ["ubuntu", "macos"]


def test_every_check_of_ci_is_a_job():
    jobs = WORKFLOWS["tests"]["jobs"]
    run = {*jobs["check"]["strategy"]["matrix"]["check"], *re.findall(r"^make (\w+)$", commands(jobs["test"]), re.M)}
    assert run > set(re.findall(r"^make (\w+)$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.M))


@pytest.mark.parametrize("name", WORKFLOWS)
def test_every_target_exists_and_no_job_has_rights_that_it_does_not_name(name):
    targets = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[1].split()
    workflow = WORKFLOWS[name]
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        choices = job.get("strategy", {}).get("matrix", {}).get("check", [])
        assert {*re.findall(r"\bmake ([a-z-]+)", commands(job)), *choices} <= set(targets)
        assert "timeout-minutes" in job


def test_a_release_is_approved_by_a_person_and_needs_no_secret():
    publish = WORKFLOWS["release"]["jobs"]["publish"]
    assert WORKFLOWS["release"][True] == {"push": {"tags": ["v*"]}}  # YAML reads the key "on" as true
    assert (publish["environment"], publish["needs"]) == ("release", "build")
    assert publish["permissions"] == {"id-token": "write"}
    assert "secrets." not in (FOLDER / "workflows" / "release.yml").read_text(encoding="utf-8")
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Release")[2]
    assert {"`release`", "`release.yml`"} <= set(re.findall(r"`[^`]+`", page))


@pytest.mark.parametrize("form", sorted(FOLDER.glob("ISSUE_TEMPLATE/*.yml")), ids=lambda path: path.stem)
def test_a_form_has_what_github_asks_of_one(form):
    content = yaml.safe_load(form.read_text(encoding="utf-8"))
    if form.stem == "config":
        return
    assert content["name"]
    assert content["description"]
    for part in content["body"]:
        assert part["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes")
        assert part["attributes"]["label"]
