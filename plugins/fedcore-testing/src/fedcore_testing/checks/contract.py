"""Checks without a run: the class's declarations and its package's metadata."""

from __future__ import annotations

import inspect
import math
import re
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from fedcore import FedcoreError, Plugin, PluginOptions
from fedcore.hooks import check_class, create_plugin, require_hooks
from fedcore.tools import option_names, registry
from fedcore_testing.checks.base import NotApplicable, check
from fedcore_testing.federation import entry_point_of, initial_weights
from fedcore_testing.fingerprint import fingerprint, global_settings, random_states
from fedcore_testing.scaffold import CORE
from fedcore_testing.trial import Trial


@check("let the entry point name a subclass of fedcore.Plugin; fedcore makes the objects.")
def check_is_a_plugin_class(trial: Trial) -> None:
    """The entry point gives a class derived from ``fedcore.Plugin``."""
    assert inspect.isclass(trial.target), f"it is {trial.target!r}, no class"
    assert issubclass(trial.target, Plugin), f"{trial.target.__name__} is not derived from fedcore.Plugin"
    assert issubclass(trial.target.Options, PluginOptions), f"Options is {trial.target.Options!r}"


@check("mark each hook with @hookimpl, and take any of its specified arguments, without defaults.")
def check_hooks_are_known_and_marked(trial: Trial) -> None:
    """Every hook exists, is marked, and takes the specified arguments only."""
    check_class(trial.label, trial.target)


@check("give every option a default, the paper's.")
def check_options_have_defaults(trial: Trial) -> None:
    """The plugin works without any setting."""
    create_plugin(trial.name, {})


@check("derive Options from fedcore.PluginOptions and leave its model_config alone.")
def check_options_refuse_what_they_do_not_know(trial: Trial) -> None:
    """Unknown options and numbers that are not finite are refused, and values are fixed."""
    options = trial.target.Options
    for name, value in {"no_such_option": 1, **dict.fromkeys(_numbers(options), math.nan)}.items():
        try:
            options.model_validate({name: value})
        except ValidationError:
            continue
        raise AssertionError(f"Options accepts {name}={value!r}")
    assert options.model_config.get("frozen"), "options can be changed after they were validated"


@check('write Field(default=..., ge=..., description="...") for each option; users see it in `fedcore plugins show`.')
def check_options_are_described(trial: Trial) -> None:
    """Every option has a description."""
    for name, field in trial.target.Options.model_fields.items():
        assert field.description, f"option {name!r} has no description"


@check('give every number a bound: Field(default=..., ge=..., le=..., description="...").')
def check_options_are_bounded(trial: Trial) -> None:
    """Every number has a bound; values beyond it and unknown choices are refused."""
    for name, field in trial.target.Options.model_fields.items():
        for value in _refused(name, field):
            try:
                create_plugin(trial.name, {field.alias or name: value})
            except FedcoreError:
                continue
            raise AssertionError(f"option {field.alias or name!r} accepts {value!r}")


@check("write a docstring: method, authors, venue, and the equation that it computes.")
def check_is_documented(trial: Trial) -> None:
    """The class has a docstring, not an inherited one."""
    assert vars(trial.target).get("__doc__"), f"class {trial.target.__name__} has no docstring"


@check("add the hook that the declaration names, or leave the declaration out; see fedcore.Plugin for all of them.")
def check_declarations_fit_the_hooks(trial: Trial) -> None:
    """Declarations match the implemented hooks, and the neutral options exist."""
    plugin = trial.plugin
    require_hooks(plugin)
    if plugin.neutral is not None:
        unknown = sorted(set(plugin.neutral) - set(option_names(trial.target)))
        assert not unknown, f"neutral names {unknown[0]!r}, which is no option"
        create_plugin(trial.name, plugin.neutral)


@check("keep __init__ to reading options: no random numbers, no global settings.")
def check_creation_has_no_side_effects(trial: Trial) -> None:
    """Making the plugin changes no random state and no setting of the process."""
    before = {**random_states(), **global_settings()}
    create_plugin(trial.name, trial.options)
    for name, value in {**random_states(), **global_settings()}.items():
        assert value == before[name], f"making the plugin changes {name}'s state"


@check("build what you add inside `with task.random('name of the part'):`.")
def check_configures_the_same_model_each_time(trial: Trial) -> None:
    """``configure_model`` gives the same names, shapes and weights on server and clients."""
    models = [initial_weights(trial.config) for _ in range(2)]
    for name in sorted({*models[0], *models[1]}):
        one, other = models[0].get(name), models[1].get(name)
        assert fingerprint(one) == fingerprint(other), f"built twice, the model differs in {name!r}"


@check("complete pyproject.toml: description, license, and dependencies = ['fedcore-fl>=X.Y,<...'].")
def check_package_is_complete(trial: Trial) -> None:
    """The package has a summary, a licence and a bounded dependency on fedcore."""
    point = entry_point_of(trial.target)
    if point is None or point.dist is None:
        raise NotApplicable("the plugin is in no installed package")
    metadata = point.dist.metadata
    # Not metadata["License"]: the importlib_metadata package, where something imported it, raises for a missing key.
    assert metadata.get_all("Summary"), f"package {point.dist.name} has no description"
    licences = [metadata.get_all(key) for key in ("License-Expression", "License", "License-File")]
    assert any(licences), f"package {point.dist.name} names no license"
    if point.dist.name == CORE:
        return
    needs = [need for need in point.dist.requires or [] if re.match(r"fedcore(-fl)?(?![\w.-])", need)]  # no fedcore-X
    assert any(need.startswith(CORE) and "<" in need and ">" in need for need in needs), (
        f"package {point.dist.name} does not say which versions of {CORE} it works with (it requires {needs})"
    )
    twice = registry.conflict("plugin", trial.name)
    assert not twice, twice


def _refused(name: str, field: FieldInfo) -> list[Any]:
    """Return values beyond an option's bounds, or outside its choices.

    :raises AssertionError: it is a number without bounds.
    """
    kinds = set(get_args(field.annotation) or [field.annotation]) - {type(None)}
    if get_origin(field.annotation) is Literal:
        return ["no such choice"]
    if not kinds <= {int, float}:
        return []
    step = 1 if int in kinds else 0.5
    beyond = {"gt": 0, "ge": -step, "lt": 0, "le": step}
    values = [
        getattr(bound, kind) + away for bound in field.metadata for kind, away in beyond.items() if hasattr(bound, kind)
    ]
    assert values, f"option {name!r} is a number without any bound"
    return values


def _numbers(options: type[PluginOptions]) -> list[str]:
    return [field.alias or name for name, field in options.model_fields.items() if field.annotation is float]
