"""The set-up of a run: plugins, model and layout. Server and clients build the same one from the configuration."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import combinations, permutations
from typing import Any

import torch

from fedcore.base import registry
from fedcore.base.config import ModelOptions, RunConfig, TrainingOptions
from fedcore.base.errors import ConfigError, PluginConflictError, PluginContractError
from fedcore.base.metrics import Metrics
from fedcore.base.seeding import random_stream
from fedcore.base.tensors import digest_of, out_of_range
from fedcore.data import Dataset, PublicSamples
from fedcore.hooks.checks import whole_numbers
from fedcore.hooks.contexts import RunSetup
from fedcore.hooks.declarations import TABLE, require_hooks
from fedcore.hooks.plugin import Plugin, patterns_of
from fedcore.hooks.plugins import PluginSet, match
from fedcore.models import build_model, dtype_hint, require_takes, smallest_batch
from fedcore.models.layout import FlatLayout, Layout
from fedcore.models.placement import Placement, problem_in_channels_last
from fedcore.models.split import ModelTask, SplitModel, keeping_dtype, tried

READ_UPDATES = ("all_updates", "pre_aggregate", "weight", "accumulate", "aggregate")
"""The hooks of the server that see the tensors of updates."""


@dataclass(frozen=True)
class Setup:
    """The set-up of a run on one side, server or client."""

    config: RunConfig
    """The run's configuration."""
    plugins: PluginSet
    """All plugins of the run; ``plugins.implementers("gradients")`` lists those that implement a hook."""
    model: SplitModel
    """The initial model, as all plugins configured it."""
    task: ModelTask
    """The number of classes, the shape of an input and the seed."""
    layout: Layout
    """The model's names, in ``layout.shared``, ``personal``, ``fixed``, ``trainable`` and ``buffers``."""
    breaks: dict[int, list[str]]
    """Epoch -> the plugins that exchange at its start, in user order."""
    kept: Mapping[str, Collection[str]]
    """Plugin -> the names that it keeps on the clients. ``--buffers local`` keeps more in ``layout.personal``."""
    sample: Any
    """A batch with one sample of the training set, on the CPU."""
    public: PublicSamples | None = None
    """The public samples of ``--public``; None without this option."""
    notes: list[str] = field(default_factory=list)
    """The notes of the plugins about the set-up. Those of the server's side are shown when the run begins."""

    @classmethod
    def build(cls, config: RunConfig, dataset: Dataset, plugins: PluginSet | None = None) -> Setup:
        """Build the model as all plugins configure it, and check that everything fits.

        :param plugins: the configuration's plugins, not in use elsewhere; default fresh ones.
        :raises ConfigError: plugins, model and data set cannot be combined.
        :raises PluginConflictError: two plugins cannot be combined.
        :raises PluginContractError: a plugin or the model breaks its contract.
        """
        plugins = PluginSet.create(config.plugins) if plugins is None else plugins
        require_takes(config.model, dataset.kind, config.dataset)
        if not dataset.task.classes and (needy := [p.name for p in plugins if "classes" in p.assumes]):
            reason = f"plugin {needy[0]!r} works on the classes of samples (assumes classes)"
            raise ConfigError(f"{reason}, which task {dataset.task.name!r} does not have; leave one of the two out")
        sample = first_sample(dataset)
        model, task = build_model(
            config.model,
            num_classes=dataset.num_classes,
            input_shape=dataset.input_shape,
            seed=config.seed,
            projection=config.projection,
            sample=sample,
            kind=dataset.task,
        )
        for section in RunConfig.sections():
            section.built(config, model)
        with keeping_dtype(model):
            for _, changed in plugins.each("configure_model", model=model, task=task):
                model = changed or model
        _check_forward(config, model, task, sample, [p.name for p in plugins.implementers("configure_model")])
        if config.memory_format == "channels_last" and (problem := problem_in_channels_last(model, sample)):
            raise ConfigError(
                f"--memory-format channels_last: model {config.model!r} does not run in it: {problem}. Leave the "
                "option out, or write reshape instead of view"
            )
        _check_gradients(config, model)
        _check_untied(config, model)
        kept = _kept(plugins, model)
        personal = set[str]().union(*kept.values(), Layout.of(model).buffers if config.buffers == "local" else ())
        layout, breaks = Layout.of(model, personal), _breaks(config, plugins)
        _check_values(config, model, layout)
        setup = cls(config, plugins, model, task, layout, breaks, kept, sample, dataset.public)
        _check_claims(setup)
        for plugin in plugins:
            _check_needs(setup, plugin)
        for section in RunConfig.sections():
            section.check(config, setup)
        run_setup: RunSetup = setup
        plugins.call_all("check_run", setup=run_setup)
        return setup

    @cached_property
    def metrics(self) -> Metrics:
        """The metrics of an evaluation next to accuracy and loss, by the names of their figures."""
        kind, names = self.task.kind, self.config.metrics
        if names and not kind.classes:
            raise ConfigError(f"--metric {names[0]} is of classes; task {kind.name!r} has {', '.join(kind.metrics)}")
        metrics: Metrics = kind.metrics
        if names:
            metrics = registry.needed("feature", "make_metrics", f"--metric {names[0]}")(names, self.task.num_classes)
        return metrics

    @cached_property
    def placement(self) -> Placement:
        """Where this process trains and evaluates the model."""
        return Placement.of(self.config, self.model, self.sample)

    @cached_property
    def smallest_batch(self) -> int:
        """The number of samples that a training batch needs."""
        return smallest_batch(self.model, self.sample)

    @cached_property
    def uploads(self) -> Layout:
        """The layout of updates: by name if plugins change updates, else with the parameters in one flat tensor."""
        changed = any(map(self.plugins.implementers, ("pre_upload", "guard_upload", "all_updates", "pre_aggregate")))
        return self.layout if changed else FlatLayout.flat(self.layout)

    @cached_property
    def snapshots(self) -> Layout:
        """The layout of whole models that are kept for clients: the personal parameters are in the flat tensor, too."""
        return FlatLayout.flat(replace(self.layout, personal=frozenset()))

    @cached_property
    def reads_updates(self) -> bool:
        """Whether a plugin on the server reads the tensors of updates."""
        return any(map(self.plugins.implementers, READ_UPDATES))

    @property
    def has_own_models(self) -> bool:
        """Whether clients have models of their own: they keep parameters, or a plugin has ``personal_model``."""
        return bool(self.layout.personal or self.plugins.implementers("personal_model"))

    @cached_property
    def fixed_digest(self) -> str:
        """SHA-256, in hex, of the parameters that do not travel; empty if all travel. Server and clients must agree."""
        state = self.model.state_dict()
        return digest_of({name: state[name] for name in sorted(self.layout.fixed)}) if self.layout.fixed else ""

    def keeper_of(self, names: Collection[str]) -> str | None:
        """Return the first plugin that keeps any of some names on the clients; None if no plugin does."""
        return next((plugin for plugin, kept in self.kept.items() if not set(kept).isdisjoint(names)), None)

    def note(self, plugin: str, text: str) -> None:
        """Tell the user once, as a note at the start of the run, what a plugin found in the set-up."""
        self.notes.append(f"{plugin}: {text}")

    def require_shared(self, plugin: str) -> None:
        """Refuse a plugin that works on trained shared parameters if all of them stay on the clients.

        :raises PluginConflictError: names the plugin that keeps the parameters on the clients.
        """
        keeper = self.keeper_of(self.layout.trainable)
        if keeper is not None and not self.layout.trainable - self.layout.personal:
            reason = f"{plugin!r} works on the trained parameters that clients share, but {keeper!r} keeps all of them"
            raise PluginConflictError.of(plugin, keeper, f"{reason} on each client, so it would have no effect")

    def claimed(self, plugin: Plugin, declaration: str, *, personal: bool = False) -> list[str]:
        """Return the names that a plugin ``owns``, ``starts``, ``exchanges``, ``corrects`` or ``encodes``.

        Parameters that are not trained are left out.

        :param personal: include names that stay on the clients.
        """
        names = match(patterns_of(plugin, declaration), self.layout.shapes, plugin, declaration)
        left_out = self.layout.fixed if personal else self.layout.fixed | self.layout.personal
        return [name for name in names if name not in left_out]

    def require_received_start(self, plugin_name: str) -> None:
        """Refuse other plugins that let clients start from other shared values than the received ones.

        For ``check_run`` of a plugin that compares a client's model with the received one.

        :raises PluginConflictError: names both.
        """
        for other in self.plugins:
            if other.name != plugin_name and (names := self.claimed(other, "starts")):
                reason = (
                    f"{plugin_name!r} measures how far a client's model moved from the received one, but "
                    f"{other.name!r} lets clients start from other values of {names[0]!r}"
                )
                raise PluginConflictError.of(plugin_name, other.name, reason)


def first_sample(dataset: Dataset) -> Any:
    """Return a batch with the first training sample, on the CPU, contiguous."""
    sample = dataset.train.gather(torch.zeros(1, dtype=torch.int64)).to(torch.device("cpu"))
    return sample.contiguous() if isinstance(sample, torch.Tensor) else sample


def check_client_models(setup: Setup, dataset: Dataset) -> None:
    """Refuse models of clients that differ in what travels, is fixed, or in the width of the features.

    :param setup: the set-up with the first model. The server has this one: updates of all clients fit it.
    :raises ConfigError: names both models and the difference.
    """
    for name in setup.config.client_models[1:]:
        other = Setup.build(with_model(setup.config, name), dataset)
        setup.notes.extend(note for note in other.notes if note not in setup.notes)
        (mine, theirs), widths = map(_travelling, (setup, other)), (setup.model.feature_dim, other.model.feature_dim)
        if mine != theirs:
            tensor = sorted(mine ^ theirs)[0][0]
            raise ConfigError(
                f"--client-models: {setup.config.model!r} and {name!r} differ in {tensor!r}, which clients share; what "
                "differs has to stay on the clients, as with --plugin fedproto or solo, and lg-fedavg for all but the "
                "classifier"
            )
        if widths[0] != widths[1]:
            raise ConfigError(
                f"--client-models: {setup.config.model!r} has features of width {widths[0]}, {name!r} of {widths[1]}; "
                "add --projection, which gives all models one width"
            )


def _travelling(setup: Setup) -> set[tuple[str, ...]]:
    """Return what server and clients have to agree on: the shared tensors, and the values of the fixed ones."""
    layout, fixed = setup.layout, setup.model.state_dict()
    shared = {(name, f"{layout.shapes[name]}", f"{name in layout.trainable}") for name in layout.shared}
    return shared | {(name, digest_of({name: fixed[name]})) for name in layout.fixed}


def with_model(config: RunConfig, name: str) -> RunConfig:
    """Return the configuration of the clients that have a model."""
    return config.model_copy(update={"model": name, "client_models": []})


def _check_forward(config: RunConfig, model: SplitModel, task: ModelTask, sample: Any, configured: list[str]) -> None:
    """Try a sample: a model that does not fit the data fails before the run starts.

    :param sample: a batch with one sample.
    :param configured: the plugins that configured the model.
    """
    by = f", as configured by plugin {', '.join(map(repr, configured))}," if configured else ""
    broken = partial(PluginContractError.of, config.model, kind="model")
    if not isinstance(model.encoder, torch.nn.Sequential):  # what methods append would never run
        hint = "append by model.encoder.add_module(name, module), or wrap: nn.Sequential(OrderedDict(base=encoder))"
        raise broken(f"has{by} an encoder of class {type(model.encoder).__name__}", expected="nn.Sequential", hint=hint)
    model.eval()
    try:
        with tried(model), task.random("lazy"):  # lazy modules draw their weights
            features, logits = model(sample)
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
        raise ConfigError(
            f"model {config.model!r}{by} does not take samples of shape {tuple(task.input_shape)} "
            f"(data set {config.dataset!r}): {error}{dtype_hint(model, sample)}"
        ) from error
    expected = (1, task.num_classes, *task.kind.grid)
    if features.ndim != len(expected) or logits.shape != expected:
        fault = f"gives features {tuple(features.shape)} and logits {tuple(logits.shape)} for one sample"
        raise broken(fault, expected=f"{str(expected).replace(str(task.num_classes), 'd', 1)} and {expected}")
    if features.shape[1] != model.feature_dim:
        fault = f"gives features of width {features.shape[1]}{by} but its feature_dim is {model.feature_dim}"
        hint = "after a change of the encoder's width set model.feature_dim, or call model.renew_classifier(width)"
        raise broken(fault, hint=hint)
    with tried(model), random_stream(0):
        one, again = model.classifier(features), model.classifier(features)
    if torch.equal(one, again) and not torch.allclose(one, logits, rtol=1e-2, atol=1e-3):  # else it draws numbers
        hint = "methods call model.classifier(features): put there what forward does behind the encoder"
        raise broken(f"gives other logits{by} than its classifier does for its features", hint=hint)


def _check_gradients(options: ModelOptions, model: SplitModel) -> None:
    """Refuse a model that works in evaluation, but cannot be trained by a step."""
    for path, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise ConfigError(
                f"model {options.model!r}: {path!r}, of class {type(module).__name__}, has sparse gradients, which no "
                "optimizer of a run takes; make it with sparse=False"
            )


def _check_untied(options: ModelOptions, model: SplitModel) -> None:
    """Refuse tied weights that are trained: under two names one tensor is averaged, changed and kept twice."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad and names[id(parameter)] != name:
            raise ConfigError(
                f"model {options.model!r}: {names[id(parameter)]!r} and {name!r} are one tensor (tied weights), which "
                "cannot be averaged under two names; register one module under one name, or give the model two tensors"
            )


def _check_values(options: ModelOptions, model: SplitModel, layout: Layout) -> None:
    """Refuse tensors that no client can train and send: complex ones, and values that no update may have."""
    state = model.state_dict()
    tensors = {name: state[name] for name in layout.shapes if name in layout.trainable or name in layout.shared}
    faults = ((name, "is complex, which is not averaged") for name, tensor in tensors.items() if tensor.is_complex())
    if problem := next(faults, None) or out_of_range(tensors):
        name, fault = problem
        hint = "parameters have to be finite real numbers"
        if name in layout.buffers:
            hint = "a buffer that is the same everywhere need not travel: register_buffer(..., persistent=False)"
        raise ConfigError(f"model {options.model!r}: {name!r} {fault}; {hint}")


def _check_needs(setup: Setup, plugin: Plugin) -> None:
    """Refuse a plugin that the run does not have what it needs for."""
    if "sgd" in plugin.assumes and setup.config.optimizer != "sgd":
        raise ConfigError(
            f"plugin {plugin.name!r} derives gradients from the length of SGD's steps (assumes sgd), but "
            f"steps of {setup.config.optimizer} have another length; leave out --optimizer"
        )
    require_hooks(plugin)
    for other in setup.plugins if "one-model" in plugin.assumes else ():
        # It chooses the model that a client starts from, and averages each.
        if other is not plugin and set(setup.claimed(other, "starts")) & set(setup.claimed(other, "owns")):
            reason = f"{plugin.name!r} works with one global model, but {other.name!r} trains several"
            raise PluginConflictError.of(plugin.name, other.name, reason)
    if "cross-entropy" in plugin.assumes:
        for other in setup.plugins.implementers("task_loss"):
            reason = (
                f"{plugin.name!r} trains, adapts or chooses a model by cross-entropy of its own, but {other.name!r} "
                "replaces the task loss, which that model would not follow"
            )
            raise PluginConflictError.of(plugin.name, other.name, reason)
    if plugin.server_optimizer or plugin.encodes or "displacement" in plugin.assumes:
        setup.require_shared(plugin.name)
    if "displacement" in plugin.assumes:
        setup.require_received_start(plugin.name)
    if "public" in plugin.reads and not setup.public:
        raise ConfigError(
            f"plugin {plugin.name!r} needs public samples: --public 0.1 takes a tenth of the training set out of "
            "the clients' data, --public NAME takes another data set of the same shape"
        )


def _kept(plugins: PluginSet, model: SplitModel) -> dict[str, set[str]]:
    """Return the names of the parameters and buffers that each plugin keeps on the clients."""
    names, whole = list(model.state_dict()), Layout.of(model)
    by_plugin: dict[str, set[str]] = {}
    for plugin, patterns in plugins.each("personal_parameters", model=model):
        kept = match(patterns or (), names, plugin, "personal_parameters")
        if kept and whole.fixed.issuperset(kept):
            raise ConfigError(
                f"plugin {plugin.name!r} keeps {kept[0]!r} on each client, but no part of what it keeps is trained "
                "(requires_grad=False), so it would have no effect"
            )
        by_plugin[plugin.name] = set(kept)
    keepers = [name for name, kept in by_plugin.items() if kept]
    for one, other in permutations(keepers, 2):
        if by_plugin[one] <= by_plugin[other]:
            raise PluginConflictError.of(one, other, f"all that {one!r} keeps on the clients, {other!r} keeps, too")
    for one, other in combinations(keepers, 2):
        if by_plugin[one] | by_plugin[other] >= set(names):
            raise PluginConflictError.of(one, other, "together they keep the whole model on the clients")
    plugins.check_names(names, by_plugin)
    return by_plugin


def _check_claims(setup: Setup) -> None:
    """Refuse a plugin that works only on parameters that are neither trained nor sent, or that it keeps on clients."""
    layout = setup.layout
    for declaration in (declaration for declaration in TABLE.values() if declaration.shared):
        for plugin in setup.plugins:
            for pattern in patterns_of(plugin, declaration.name):
                names = match((pattern,), layout.shapes, plugin, declaration.name)
                claim = f"{plugin.name!r} {declaration.name} {pattern!r}"
                if layout.fixed.issuperset(names):
                    raise ConfigError(
                        f"plugin {claim}, but no part of that is trained: "
                        f"{names[0]!r} has requires_grad=False after every configure_model, so it never changes"
                    )
                stays = layout.personal | layout.fixed
                if declaration.name != "starts" and stays.issuperset(names):  # a client starts from its own
                    keeper = setup.keeper_of(names)
                    if keeper not in (None, plugin.name):
                        reason = f"{claim}, of which nothing travels next to {keeper!r}"
                        raise PluginConflictError.of(plugin.name, keeper, reason)
                    raise ConfigError(
                        f"plugin {claim}, but each client keeps all of that and never sends it, so it would have no "
                        "effect"
                    )


def _breaks(options: TrainingOptions, plugins: PluginSet) -> dict[int, list[str]]:
    breaks: dict[int, list[str]] = {}
    for plugin in plugins:
        if plugin.exchanges is None:
            continue
        epochs = set(whole_numbers(plugin.exchanges.epochs(options.local_epochs), plugin.name, "exchanges"))
        if epochs and options.local_steps is not None:
            raise ConfigError(
                f"plugin {plugin.name!r} pauses all clients at the start of a local epoch, but with --local-steps each "
                "client is in another pass over its samples then; leave out --local-steps"
            )
        for epoch in sorted(epochs):
            if not 0 < epoch < options.local_epochs:
                raise PluginContractError.of(
                    plugin.name,
                    f"exchanges at the start of epoch {epoch}",
                    expected=f"epochs from 1 to {options.local_epochs - 1} (local_epochs is {options.local_epochs})",
                )
            breaks.setdefault(epoch, []).append(plugin.name)
    return dict(sorted(breaks.items()))
