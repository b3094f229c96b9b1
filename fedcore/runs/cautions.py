"""Cautions for the user when a run begins or goes on.

They are about the data, options without effect, figures that the run will not have, other versions, and a changed
schedule.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from fedcore.base.config import RunConfig
from fedcore.base.errors import FedcoreError, flag_of
from fedcore.base.registry import CODE, available, resolve
from fedcore.client.setup import Setup
from fedcore.data import Partition
from fedcore.runs.provenance import COMMIT, INSTRUCTIONS, commit, versions
from fedcore.runs.saved import SOURCE


def option_cautions(setup: Setup) -> list[str]:
    """Return the cautions about options without effect, the labels, and of plugins and packages."""
    config, sgd = setup.config, setup.config.optimizer == "sgd"
    with_optimizer, with_partition = f"with --optimizer {config.optimizer}", f"with --partition {config.partition}"
    rules: list[tuple[tuple[str, ...], bool, str]] = [  # options, whether they are idle, next to what
        (("local_epochs",), config.local_steps is not None, f"next to --local-steps {config.local_steps}"),
        (("momentum",), not sgd, with_optimizer),
        (("beta1", "beta2", "epsilon"), sgd, with_optimizer),
        (("buffers",), not setup.layout.buffers, f"with --model {config.model}, which has no buffers"),
        (("alpha",), not _partitioner_takes("alpha", config.partition), with_partition),
        (("classes_per_client",), not _partitioner_takes("classes_per_client", config.partition), with_partition),
    ]
    cautions = [
        f"{flag_of(option)} {getattr(config, option)} has no effect {why}"
        for options, idle, why in rules
        for option in options
        if idle and getattr(config, option) != RunConfig.model_fields[option].default
    ]
    if config.task == "auto" and not setup.task.kind.classes:
        cautions.append(f"the task is {setup.task.kind.name}, as the labels are; --task NAME chooses another")
    if setup.task.kind.classes and setup.task.num_classes < 2:
        cautions.append("the data set has a single class, so every model is right on all samples; check the labels")
    of_packages = [caution for section in RunConfig.sections() for caution in section.cautions(config, setup)]
    return [*cautions, *setup.notes, *of_packages]


def _partitioner_takes(option: str, name: str) -> bool:
    """Return whether a partition is made by a function that takes an option: by its name, or by ``**options``."""
    try:
        parameters = inspect.signature(resolve("partitioner", name)).parameters
    except FedcoreError:  # the partition was made before the run
        return False
    rest = [each.name for each in parameters.values() if each.kind is inspect.Parameter.VAR_KEYWORD]
    return option in parameters or rest not in ([], ["_"])


def evaluation_cautions(setup: Setup, partition: Partition) -> list[str]:
    """Return the cautions about a run on clients' own figures in which no client has a held-out part."""
    share = setup.config.client_test_fraction
    if partition.is_declared or setup.config.partition.endswith(".json") or partition.test.sizes.any():
        return []  # the split was made elsewhere, or clients do hold samples out
    if share:
        return [
            "no client has a held-out sample, so the run has no figures on held-out parts: --client-test-fraction "
            f"{share:g} is too small for {len(partition.train.positions)} samples among {partition.num_clients} clients"
        ]
    if setup.has_own_models:
        return [
            "each client's own model is measured on the server's test set only (personal_global); "
            "--client-test-fraction 0.2 measures it on the client's own held-out part, too (personal)"
        ]
    return []


def version_cautions(config: RunConfig, begun_with: Mapping[str, Any]) -> list[str]:
    """Return the cautions about a run that goes on with other versions than it was begun with.

    The versions are of fedcore and its checkout's commit, torch, the plugins' packages and their source, the CPU's
    instruction set, and the user's own code.

    :param begun_with: the result of :func:`fedcore.runs.provenance.versions` at the beginning, and the commit. Values
        of other types than text are ignored.
    """
    points, now = available("plugin"), {**versions(config), COMMIT: commit() or "none"}
    used = [point.dist.name for name in config.plugins if (point := points.get(name)) is not None and point.dist]
    sources = {name: f"another {SOURCE}{name.removeprefix(SOURCE)}" for name in now if name.startswith((SOURCE, CODE))}
    changed = [
        sources.get(name) or f"{name} {before}, now {now[name]}"
        for name in dict.fromkeys(("fedcore", COMMIT, "torch", INSTRUCTIONS, *used, *sources))
        if isinstance(before := begun_with.get(name), str) and before != now.get(name, before)
    ]
    if not changed:
        return []
    return [f"the run was begun with {'; '.join(changed)}: its results may differ from those of one version"]


def schedule_cautions(before: int, setup: Setup, trained: int) -> list[str]:
    """Return the cautions about a changed number of rounds on which the learning rate or a method depends.

    :param before: the number of rounds before the change.
    :param trained: the number of rounds that the run has trained.
    """
    config = setup.config
    if not 0 < trained < config.rounds or before == config.rounds:
        return []
    cautions = [
        f"plugin {plugin.name!r} follows the number of rounds, which was {before}: a new run of {config.rounds} rounds "
        "gives other results"
        for plugin in setup.plugins
        if "rounds" in plugin.assumes
    ]
    was = config.model_copy(update={"rounds": before})
    if any(was.learning_rate(number) != config.learning_rate(number) for number in range(trained)):
        cautions.append(
            f"the learning rate follows the number of rounds: from {was.learning_rate(trained - 1):.3g} in round "
            f"{trained} of {before} it goes on with {config.learning_rate(trained):.3g} in round {trained + 1} of "
            f"{config.rounds}; a new run of {config.rounds} rounds gives other results"
        )
    return cautions
