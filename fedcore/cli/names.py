"""What fedcore's own methods are, for the list of plugins; everything else is third party."""

from __future__ import annotations

from importlib.metadata import EntryPoint

from fedcore import registry

PAPERS = ("fedproc", "fedeccr", "uscc", "fedcd", "fdcl", "fedcme")
COMPARISON = (
    "fedavg",
    "fedprox",
    "fedavgm",
    "fednova",
    "scaffold",
    "feddyn",
    "feddc",
    "moon",
    "fedrs",
    "ccvr",
    "ditto",
    "fedper",
    "fedcp",
    "solo",
)
SUMMARIES = {"fedavg": "FedAvg (AISTATS 2017): the mean of the clients' models by samples; what every run begins with"}

GROUPS = {"papers": PAPERS, "comparison methods": COMPARISON}
THIRD_PARTY = "third party"


def group(name: str, point: EntryPoint) -> str:
    """Return the group of an installed plugin; a package cannot join ours by taking a name."""
    own = "fedcore" if name == "fedavg" else registry.PACKAGES.get(name)
    if point.dist and point.dist.name == own:
        return next((title for title, names in GROUPS.items() if name in names), THIRD_PARTY)
    return THIRD_PARTY


def summary(name: str, point: EntryPoint) -> str:
    """Return the one line that says what a plugin is."""
    return SUMMARIES[name] if group(name, point) != THIRD_PARTY and name in SUMMARIES else registry.summary(point)
