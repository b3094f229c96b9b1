"""The aggregation of a round: from the accepted updates to the next global model w_{t+1}, with its checks."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fedcore.base.errors import DivergedError, RoundFailedError
from fedcore.base.tensors import first_nonfinite, on_cpu
from fedcore.base.types import Tensors
from fedcore.hooks.plugin import Plugin
from fedcore.hooks.setup import Setup
from fedcore.server.collection import Collector
from fedcore.server.context import RoundContext
from fedcore.server.plugin_results import check_partial
from fedcore.server.scope import Round


def aggregate(current: Round, collector: Collector) -> Tensors:
    """Return w_{t+1}: owned parameters by ``aggregate``, the weighted mean for the rest, then every ``server_step``.

    :raises RoundFailedError: all weights are 0.
    :raises DivergedError: the new model is not finite.
    """
    setup = current.federation.setup
    plugins = setup.plugins
    try:
        mean = setup.uploads.split(on_cpu(collector.running_mean.mean()))
    except ZeroDivisionError as error:
        raise RoundFailedError(f"round {current.number}: {error}") from None
    model = {name: mean.get(name, tensor) for name, tensor in current.model.items()}
    current.phase = "aggregate"
    for plugin in plugins.implementers("aggregate"):
        updates = collector.kept[plugin.name]
        owned = plugins.call(plugin.name, "aggregate", server=RoundContext(current), updates=updates)
        model.update(_checked(setup, plugin, "aggregate", owned, setup.claimed(plugin, "owns")))
    current.phase = "round"
    trainable = [name for name in setup.layout.shared if name in setup.layout.trainable]
    current.buffers = {name: model[name] for name in setup.layout.shared if name in setup.layout.buffers}
    for plugin in plugins.implementers("server_step"):
        mean = {name: model[name] for name in trainable}
        stepped = plugins.call(plugin.name, "server_step", server=RoundContext(current), mean=mean)
        model.update(_checked(setup, plugin, "server_step", stepped, trainable))
    broken = first_nonfinite(model)
    if broken:
        raise DivergedError(
            f"round {current.number}: the aggregated {broken!r} is not finite. {_against_divergence(current)} "
            "The last good state is kept."
        )
    return model


def require_enough(current: Round) -> None:
    """Refuse a round with fewer accepted updates than ``--min-clients``.

    :raises RoundFailedError: with the failures of the first clients.
    :raises DivergedError: updates that were not finite are why.
    """
    needed = current.federation.config.min_clients
    if len(current.accepted) >= needed:
        return
    if not current.cohort:
        raise RoundFailedError(
            f"round {current.number}: no client is available, --min-clients asks for {needed}. The last good state is "
            "kept; with --min-clients 0 such a round changes nothing and the run goes on."
        )
    reasons = "; ".join(f"client {f['client']}: {f['kind']}, {f['message']}" for f in current.failures[:5])
    more = f"; and {len(current.failures) - 5} more" if len(current.failures) > 5 else ""
    what = (
        f"round {current.number}: {len(current.accepted)} of {len(current.cohort)} clients gave a usable update, "
        f"--min-clients asks for {needed}. {reasons}{more}."
    )
    diverged = sum(failure["kind"] == "diverged" for failure in current.failures)
    if diverged and len(current.accepted) + diverged >= needed:  # the other failures alone leave enough clients
        raise DivergedError(f"{what} {_against_divergence(current)} The last good state is kept.")
    raise RoundFailedError(f"{what} The last good state is kept.")


def _checked(
    setup: Setup, plugin: Plugin, hook: str, returned: Mapping[str, Tensor] | None, allowed: list[str]
) -> Tensors:
    tensors = {name: tensor.detach().cpu() for name, tensor in (returned or {}).items()}
    check_partial(setup, tensors, allowed, plugin.name, hook)
    return tensors


def _against_divergence(current: Round) -> str:
    """Return which options make local steps smaller, with their current values."""
    config = current.federation.config
    clip = "off" if config.clip_norm is None else f"{config.clip_norm:g}"
    ways = [f"a smaller --lr ({config.lr:g} now)", f"a smaller bound on gradients, --clip-norm ({clip} now)"]
    if config.clip_norm is None:
        ways[1] = f"bounded gradients, such as --clip-norm 10 ({clip} now)"
    if config.momentum and config.optimizer == "sgd":
        ways.append(f"less --momentum ({config.momentum:g} now)")
    return f"Training diverged; try {', '.join(ways[:-1])} or {ways[-1]}."
