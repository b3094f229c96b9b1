"""What fedcore's own methods are, for the list of plugins; everything else is third party."""

from __future__ import annotations

from importlib.metadata import EntryPoint

from fedcore.base import registry

PAPERS = ("fedproc", "fedeccr", "uscc", "fedcd", "fdcl", "fedcme")
COMPARISON = (
    "fedavg",
    "fedprox",
    "fedavgm",
    "fedadam",
    "fedyogi",
    "fedadagrad",
    "fednova",
    "scaffold",
    "feddyn",
    "feddc",
    "moon",
    "fedrs",
    "fedlc",
    "fedntd",
    "fedsam",
    "qffl",
    "feddf",
    "power-of-choice",
    "topk",
    "qsgd",
    "lora",
    "fedbuff",
    "ccvr",
    "ditto",
    "fedamp",
    "ifca",
    "fedper",
    "fedrep",
    "fedbabu",
    "per-fedavg",
    "fedala",
    "fedcp",
    "solo",
)
PROTECTION = ("median", "trimmed-mean", "krum", "norm-clip", "dp", "local-dp")
SUMMARIES = {
    "fedavg": "FedAvg (AISTATS 2017): the mean of the clients' models by samples; the base of all methods",
    "local": "Worker processes on this machine, one thread each, or this process, or one CUDA device",
    "tensorboard": "Shows runs in TensorBoard while they train: event files in the run directory",
}

GROUPS = {"papers": PAPERS, "comparison methods": COMPARISON, "robustness and privacy": PROTECTION}
THIRD_PARTY = "third party"
TRACKERS = "trackers"
ENGINES = "engines"


def group(name: str, point: EntryPoint) -> str:
    """Return an installed part's group in the list; a package cannot join our methods by taking a name."""
    if point.group == registry.GROUPS["tracker"]:
        return TRACKERS
    if point.group == registry.GROUPS["engine"]:
        return ENGINES
    own = "fedcore" if name == "fedavg" else registry.package_of("plugin", name)
    if point.dist and point.dist.name == own:
        return next((title for title, names in GROUPS.items() if name in names), THIRD_PARTY)
    return THIRD_PARTY


def summary(name: str, point: EntryPoint) -> str:
    """Return a plugin's description in one line."""
    own = point.dist is not None and point.dist.name == "fedcore"
    return SUMMARIES[name] if own and name in SUMMARIES else registry.summary(point)
