"""Identity of a run: the options that determine its results, for sweeps and comparisons.

Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from fedcore.base import registry
from fedcore.base.config import RecordOptions, RunConfig, options_with
from fedcore.base.errors import ConfigError, PluginContractError, UnknownNameError
from fedcore.base.protocols import SIGNS
from fedcore.base.registry import CODE, OBJECT
from fedcore.base.section import Trait

LABELS = options_with(Trait.LABEL)
"""Options that describe a run to people."""

WITHOUT_EFFECT = options_with(Trait.NO_EFFECT, Trait.LABEL)
"""Options that say where and how a run is executed, and its labels. They do not change the bits of the results.

Except for one: next to ``patience``, ``keep`` says by which figure a run of clients' own models ends."""

CHANGEABLE = frozenset(options_with(Trait.CHANGEABLE))
"""Options that may change when a run is resumed. Only rounds, patience and device can change its bits;
metrics add figures to its records."""

PARTITION_OPTIONS = options_with(Trait.PARTITION)
"""Options that determine, together with the seed, which client holds which samples."""


def preset_options(name: str) -> dict[str, Any]:
    """Return the options of a preset: a known setting, which a package names in its entry points.

    :raises UnknownNameError: no installed package has such a preset.
    :raises PluginContractError: it is not a dictionary of options of a run.
    """
    values = registry.resolve("preset", name)
    if not isinstance(values, Mapping):
        fault = f"is an object of type {type(values).__name__}"
        raise PluginContractError.of(name, fault, kind="preset", expected="a dictionary of options")
    try:
        RunConfig.create(dict(values))
    except ConfigError as error:
        raise PluginContractError.of(name, f"has a wrong option: {error}", kind="preset") from error
    return dict(values)


def settings(config: RunConfig) -> dict[str, Any]:
    """Return every option that can change a run's results, the seed included, as plain values."""
    values = config.model_dump(mode="json", exclude=set(WITHOUT_EFFECT))
    values["plugins"].pop("fedavg", None)  # the built-in plugin is always there, named or not
    return values


def key(value: Any) -> str:
    """Return a text that is equal for equal plain values. The order of a mapping counts: plugins have an order."""
    return json.dumps(value)


def digest(config: RunConfig) -> str:
    """Return 12 hexadecimal digits that are equal for two runs that must have the same results.

    Options at their defaults do not count. A sweep that started before an option existed thus finds its runs again.
    """
    defaults = settings(RunConfig())
    values = {name: value for name, value in sorted(settings(config).items()) if value != defaults[name]}
    return hashlib.sha256(key(values).encode()).hexdigest()[:12]


def flat(values: Mapping[str, Any], separator: str) -> Iterator[tuple[str, Any]]:
    """Yield a nested mapping's values by path."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}{separator}{path}", inner) for path, inner in flat(value, separator))
        else:
            yield name, value


def short_name(name: str) -> str:
    """Return a name without the module that it is imported from: ``Near`` of ``module:study.Near``."""
    return name.replace(":", ".").rpartition(".")[2]


def judged_by(options: RecordOptions, own: Collection[str] = ()) -> str:
    """Return the figure of ``best_by`` as a protocol's row names it: ``accuracy``, ``macro-f1``, ``macro-f1_mean``.

    :param own: the figures of a task without accuracy. The first of them takes its place.
    :raises UnknownNameError: the run does not measure it.
    """
    name, metrics = short_name(options.best_by), [*own, *map(short_name, options.metrics)]
    if own and name == "accuracy":
        name = metrics[0]
    known = [*(["loss"] if own else SIGNS), *metrics, *(f"{metric}_mean" for metric in metrics)]
    if name not in known:
        hint = f"--best-by takes one of {', '.join(known)}; --metric NAME adds a metric"
        raise UnknownNameError("figure", options.best_by, known, hint)
    return name


def full_name(name: str, names: Collection[str]) -> str:
    """Return ``module:study.Near`` for ``Near`` or ``near`` if ``names`` has one such class, else the name."""
    if name in names:
        return name
    short = {known: short_name(known) for known in names if known.startswith((CODE, OBJECT))}
    meant = [known for known, own in short.items() if name in (own, own.lower())]
    return meant[0] if len(meant) == 1 else name


def method(plugins: Mapping[str, Any]) -> str:
    """Return the name of a combination of plugins: ``moon+uscc``. Without plugins it is ``fedavg``."""
    return "+".join(plugins) or "fedavg"


def title(config: RunConfig) -> str:
    """Return a run in a few words: ``moon+fedprox on digits``."""
    dataset = short_name(config.dataset) if config.dataset.startswith((CODE, OBJECT)) else config.dataset
    return f"{method({short_name(name): None for name in config.plugins})} on {dataset}"
