"""Write docs/why-numbers-differ.md from the fixtures of tests/oracles: python tools/oracles.py.

The table of docs/coming-from.md that leads there, and the line of README.md, are written too.

``--covered`` prints how many methods have an oracle, and names those that have none.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "tests" / "oracles" / "fixtures"
PAGE = ROOT / "docs" / "why-numbers-differ.md"
PROSE = ROOT / "tools" / "oracles.md"
INDEX = ROOT / "docs" / "coming-from.md"
README = ROOT / "README.md"

OF_CALL = {
    "fedavg": ("weighted_mean",),
    "fedavgm": ("momentum_steps", "momentum_velocity"),
    "fednova": ("fednova_norm", "fednova_round"),
    "qffl": ("qffl_round",),
    "scaffold": ("scaffold_round", "scaffold_local", "scaffold_control"),
    "feddyn": ("feddyn_rounds",),
    "fedprox": ("proximal", "proximal_gradient", "proximal_run"),
    "fedbuff": ("staleness", "mixed_models"),
    "krum": ("krum", "krum_best_scores"),
    "bulyan": ("bulyan", "bulyan_choice", "mean_around_median"),
    "median": ("median",),
    "trimmed-mean": ("trimmed_mean", "trim_count"),
    "geometric-median": ("geometric_median",),
    "centred-clip": ("centred_clipping", "centred_clipping_twice"),
    "norm-clip": ("norm_clipping", "norm_clip_factor"),
    "attack": ("alie", "alie_z", "inner_product_manipulation"),
    "dp": ("epsilon", "next_clip", "dp_clip", "dp_clip_factor", "update_multiplier"),
    "dp-sgd": ("noised_mean", "epsilon"),
    "local-dp": ("noise_of_mean",),
    "topk": ("top_k", "top_k_count"),
    "qsgd": ("qsgd_mean", "qsgd_norm"),
    "power-of-choice": ("largest_losses",),
    "fedlc": ("fedlc_loss",),
    "fedrs": ("fedrs_loss",),
    "fedrod": ("balanced_softmax",),
    "moon": ("moon_loss",),
    "fedamp": ("fedamp_models",),
    "fedproto": ("prototype_means",),
    "ccvr": ("ccvr_statistics",),
    "fedsam": ("sam_point",),
    "feddecorr": ("decorrelation",),
    "fpl": ("first_groups", "last_groups", "cluster_contrast"),
    "fedtgp": ("tgp_margin", "tgp_loss", "tgp_trained"),
    "fedala": ("ala_share", "ala_mixture"),
    "fednh": ("fednh_prototypes",),
    "per-fedavg": ("hessian_vector",),
}
"""Which calls of tests/oracles/calls.py are a method's."""

BY_EQUATION = ("fedetf",)
"""Methods of which it has single terms."""

BY_PAPER = (
    *("fedproc", "fedeccr", "uscc", "fdcl", "fedcme", "fedcd", "fltrust", "ifca", "fedgen", "class-weights"),
    *("ditto", "fedbabu", "fedbn", "fedcp", "feddf", "fedpac", "fedper", "fedrep", "lg-fedavg", "lora"),
)
"""Methods of which tests/oracles has whole rounds, from their papers: test_papers.py and test_personalised.py."""

NO_METHOD = ("centralised", "diagnostics", "noisy-clients", "solo", "fedcd-variants")
"""Plugins that compute nothing that a paper or a library defines: reports, noise in the data, no federation."""


def fixtures() -> list[dict[str, Any]]:
    """Return all fixtures, by library."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in FIXTURES.glob("*.json")]
    return sorted(found, key=lambda fixture: (fixture["library"].lower(), fixture["source"]))


def text() -> str:
    """Return the page."""
    found = fixtures()
    counts = [[_verdict(fixture, case) for case in fixture["cases"]] for fixture in found]
    total = [verdict for some in counts for verdict in some]
    rows = ["| library | version | cases | agree | by decision | the library leaves its paper |"]
    rows.append("| --- | --- | ---: | ---: | ---: | ---: |")
    for fixture, some in zip(found, counts, strict=True):
        where = "" if "was not run" not in fixture["source"] else " (its tests)"
        numbers = " | ".join(str(some.count(kind)) for kind in ("agrees", "decision", "library"))
        rows.append(f"| {fixture['library']}{where} | {fixture['version']} | {len(some)} | {numbers} |")
    numbers = " | ".join(str(total.count(kind)) for kind in ("agrees", "decision", "library"))
    rows.append(f"| all | | {len(total)} | {numbers} |")
    words = {
        "TABLE": "\n".join(rows),
        "CASES": str(len(total)),
        "LIBRARIES": str(len({fixture["library"] for fixture in found})),
        "AGREE": str(total.count("agrees")),
        "DECISIONS": "\n\n".join(_differences(found, "decision")),
        "LIBRARY": "\n\n".join(_differences(found, "library")),
        "DATE": max(fixture["date"] for fixture in found),
        "COVERED": covered(),
    }
    page = PROSE.read_text(encoding="utf-8")
    for word, value in words.items():
        page = page.replace(f"{{{word}}}", value)
    return page


def index() -> str:
    """Return docs/coming-from.md with its table of links, a row for each library that differs."""
    rows: dict[str, list[str]] = {}
    for fixture in fixtures():
        for key in fixture["differences"]:
            title = f"{_of(fixture, key)}: {key}"
            anchor = re.sub(r"[^\w\- ]", "", _heading(fixture, key).lower()).replace(" ", "-")
            rows.setdefault(fixture["library"], []).append(f"[{title}](why-numbers-differ.md#{anchor})")
    table = "\n".join(f"| {library} | {'; '.join(links)} |" for library, links in rows.items())
    page = INDEX.read_text(encoding="utf-8")
    head = "| moving from | rows |\n| --- | --- |\n"
    before, _, after = page.partition(head)
    return f"{before}{head}{table}\n\n{after.partition(chr(10) * 2)[2]}"


def readme() -> str:
    """Return README.md with the number of cases."""
    found = fixtures()
    total, libraries = sum(len(fixture["cases"]) for fixture in found), len({fixture["library"] for fixture in found})
    line = f"On {total} inputs from the tests and code of {libraries} libraries"
    return re.sub(r"On \d+ inputs from the tests and code of \d+ libraries", line, README.read_text(encoding="utf-8"))


def covered() -> str:
    """Return how many methods have an oracle, and which have none."""
    plugins = set()
    for path in (ROOT / "pyproject.toml", *(ROOT / "plugins").glob("*/pyproject.toml")):
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        plugins |= set(project.get("entry-points", {}).get("fedcore.plugins", {}))
    methods = plugins - set(NO_METHOD)
    have = {*BY_PAPER, *BY_EQUATION}
    for fixture in fixtures():
        for case in fixture["cases"]:
            have |= {method for method, calls in OF_CALL.items() if case["call"] in calls}
            have |= {case["inputs"]["plugin"]} if "plugin" in case["inputs"] else set()
            have |= set(case["inputs"].get("plugins", {}))
    without = sorted(methods - have)
    names = f"; without: {', '.join(without)}" if without else ""
    return f"{len(methods & have)} of {len(methods)} methods have an oracle{names}."


def _verdict(fixture: dict[str, Any], case: dict[str, Any]) -> str:
    return str(fixture["differences"][case["differs"]]["verdict"]) if "differs" in case else "agrees"


def _differences(found: list[dict[str, Any]], verdict: str) -> Iterator[str]:
    """Yield a section for each difference: what it is, and a row for each of its cases."""
    for fixture in found:
        for key, difference in fixture["differences"].items():
            if difference["verdict"] != verdict:
                continue
            cases = [case for case in fixture["cases"] if case.get("differs") == key]
            lines = [f"### {_heading(fixture, key)}", "", difference["why"], ""]
            lines.append(f"- Follows the paper: {difference['follows']}.")
            lines.append(f"- Where: `{difference['where']}`.")
            lines.append(f"- The other's number in fedcore: {difference.get('option', 'no option')}.")
            if verdict == "library" or "tracker" in difference:
                lines.append(
                    f"- The project's tracker: {difference.get('tracker', 'not found in the stored threads')}."
                )
            lines += ["", "| case | there | fedcore | difference |", "| --- | --- | --- | ---: |"]
            for case in cases:
                one, other, apart = (_shown(case["library"]), _shown(case["fedcore"]), _apart(case))
                lines.append(f"| {case['name'].replace('|', '&#124;')} | {one} | {other} | {apart} |")
            yield "\n".join(lines)


def _of(fixture: dict[str, Any], key: str) -> str:
    """Return what a difference is about: the area of its first case, or a whole run's method."""
    case = next(case for case in fixture["cases"] if case.get("differs") == key)
    return str(case["name"].partition(",")[0] if case["area"] == "whole run" else case["area"])


def _heading(fixture: dict[str, Any], key: str) -> str:
    return f"{fixture['library']} {fixture['version']}: {_of(fixture, key)}, {key}"


def _shown(value: Any) -> str:
    """Return a number, or the first of several."""
    numbers = np.array(value, dtype=float).ravel()
    first = ", ".join("not a number" if np.isnan(number) else f"{number:.5g}" for number in numbers[:2])
    return first + (", ..." if len(numbers) > 2 else "")


def _apart(case: dict[str, Any]) -> str:
    """Return the norm of the difference over that of fedcore's value."""
    one, other = (np.array(case[side], dtype=float).ravel() for side in ("library", "fedcore"))
    if len(one) != len(other) or not np.isfinite(one - other).all():
        return ""
    length = float(np.linalg.norm(other))
    apart = float(np.linalg.norm(one - other))
    return f"{apart / length:.2g}" if length > 0 else f"{apart:.2g} (absolute)"


if __name__ == "__main__":
    if "--covered" in sys.argv:
        print(covered())
    else:
        for path, written in ((PAGE, text()), (INDEX, index()), (README, readme())):
            path.write_text(written, encoding="utf-8")
