"""Aggregation: the weighted mean of the accepted updates, and the next global model w_{t+1} with its checks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm

from fedcore.base.config import TrainingOptions
from fedcore.base.errors import DivergedError, RoundFailedError
from fedcore.base.tensors import copy_into, on_cpu, out_of_range
from fedcore.base.types import ClientUpdate, Tensors
from fedcore.client.setup import Setup
from fedcore.hooks.contexts import ServerContext
from fedcore.hooks.plugin import Plugin
from fedcore.models.layout import Layout
from fedcore.models.split import copied
from fedcore.server.scope import Round
from fedcore.server.validation import check_partial

BLOCK = 1 << 16
"""The number of values that are added at once: few enough for a CPU's cache."""


def aggregate(
    current: Round, server: ServerContext, running: RunningMean, for_owners: Mapping[str, list[ClientUpdate]]
) -> None:
    """Compute w_{t+1}, which becomes the model of the round, then call ``end_round``.

    Owned parameters come from ``aggregate``, the others from the weighted mean. Then every ``server_step`` follows.

    :param server: the round as hooks see it.
    :param running: the mean of the accepted updates.
    :param for_owners: by plugin, the updates that the plugin aggregates itself.
    :raises RoundFailedError: the weights add up to 0 or to infinity.
    :raises DivergedError: the new model is not finite.
    """
    setup = current.federation.setup
    plugins = setup.plugins
    try:
        mean = setup.uploads.named(on_cpu(running.mean()))
    except ArithmeticError as error:
        origin = "".join(f", given by plugin {plugin.name!r} hook weight" for plugin in plugins.implementers("weight"))
        raise RoundFailedError(f"round {current.number + 1}: {error}{origin}") from None
    model = {name: mean.get(name, tensor) for name, tensor in current.model.items()}
    current.phase = "aggregate"
    for name, updates in for_owners.items():
        owned = plugins.call(name, "aggregate", server=server, updates=updates)
        model.update(_checked(setup, plugins[name], "aggregate", owned, setup.claimed(plugins[name], "owns")))
    current.phase = "round"
    for plugin in plugins.implementers("server_step"):
        model = with_singular_vectors(setup, model)  # server.network({**mean, **server.buffers}) is the next model
        current.buffers = {name: model[name] for name in setup.layout.shared if name in setup.layout.buffers}
        mean = {name: model[name] for name in server.trainable}
        stepped = plugins.call(plugin.name, "server_step", server=server, mean=mean)
        model.update(_checked(setup, plugin, "server_step", stepped, server.trainable))
    model = with_singular_vectors(setup, model)
    if broken := out_of_range(model, math.inf):
        raise DivergedError(
            f"round {current.number + 1}: the aggregated {broken[0]!r} is not finite. {_against_divergence(current)}"
        )
    current.model, current.phase = model, "end_round"
    plugins.call_all("end_round", server=server)


POWER_ITERATIONS = 100
"""As many bring the largest singular value close to 1, also where the second largest is close to it."""


def with_singular_vectors(setup: Setup, tensors: Tensors) -> Tensors:
    """Return a model's tensors in which spectral normalisation has the singular vectors of the model's weights.

    It keeps them in buffers, as unit vectors. Their mean is shorter, so the weights would be divided by too little.
    """
    names = [name for name in setup.layout.shared if name in setup.layout.buffers and name.endswith(("_u", "_v"))]
    if not names:
        return tensors
    model = copied(setup.model)
    state = model.state_dict()
    copy_into(state, {name: tensor for name, tensor in tensors.items() if name in state})
    iterations: list[Callable[[], object]] = []
    for module in model.modules():
        if isinstance(module, ParametrizationList) and any(type(each).__name__ == "_SpectralNorm" for each in module):
            iterations.append(module.train())
        hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
        iterations += [partial(hook, module.train(), ()) for hook in hooks]
    with torch.no_grad():
        for iterate in iterations * POWER_ITERATIONS:
            iterate()
    return {**tensors, **{name: state[name] for name in names}}


def require_enough(current: Round) -> None:
    """Refuse a round with fewer accepted updates than ``--min-clients``.

    :raises RoundFailedError: with the failures of the first clients.
    :raises DivergedError: updates are missing because they were not finite.
    :raises PluginCallError: plugins raised for every update that arrived.
    """
    needed = current.federation.config.min_clients
    if current.raised and len(current.raised) == current.arrived:
        raise current.raised[0]
    if len(current.accepted) >= needed:
        return
    if not current.cohort:
        raise RoundFailedError(
            f"round {current.number + 1}: no client is available, --min-clients asks for {needed}. With "
            "--min-clients 0 such a round changes nothing and the run goes on."
        )
    failures = [failure for failure in current.failures if "question" not in failure]
    shortage = (
        f"round {current.number + 1}: {len(current.accepted)} of {len(current.cohort)} clients gave a usable update, "
        f"--min-clients asks for {needed}. {_reasons(failures) or 'No other client was selected'}."
    )

    kinds = Counter(failure["kind"] for failure in failures)
    lacking = needed - len(current.accepted)
    if lacking <= kinds["diverged"]:  # there would be enough if they had not diverged
        raise DivergedError(f"{shortage} {_against_divergence(current)}")
    raise RoundFailedError(shortage, raised=lacking <= kinds["raised"] + len(current.raised))


def _reasons(failures: Iterable[Mapping[str, Any]]) -> str:
    """Return why clients failed: the first five reasons, each with its clients."""
    clients: dict[str, list[int]] = {}
    for failure in failures:
        client = failure["client"]
        message = str(failure["message"]).removeprefix(f"client {client}: ").replace(f", client {client})", ")")
        reason = f"{failure['kind']}, {message}"
        clients.setdefault(reason, []).append(client)
    listed = []
    for reason, failed in [*clients.items()][:5]:
        shown = ", ".join(map(str, failed[:10])) + ", ..." * (len(failed) > 10)
        listed.append(f"client{'s' * (len(failed) > 1)} {shown}: {reason}")
    more = sum(map(len, [*clients.values()][5:]))
    return "; ".join(listed) + (f"; and {more} more" if more else "")


def _checked(
    setup: Setup, plugin: Plugin, hook: str, returned: Mapping[str, Tensor] | None, allowed: list[str]
) -> Tensors:
    tensors = {name: tensor.detach().cpu() for name, tensor in (returned or {}).items()}
    check_partial(setup, tensors, allowed, plugin.name, hook)
    return tensors


def _against_divergence(current: Round) -> str:
    """Return a sentence about the options that make local steps smaller, with their current values.

    In the first round a plugin's term can be the reason. No option helps then. Neither does one against a client whose
    update was far larger than the others' in the round before.
    """
    if outliers := current.committed.outliers:
        listed = ", ".join(f"{client} (up to {value:.1e})" for client, value in [*outliers.items()][:5])
        more = f" and {len(outliers) - 5} more" if len(outliers) > 5 else ""
        return (
            f"Training diverged right after round {current.number}, in which updates of some clients had far larger "
            f"values than the median client's: client {listed}{more}. No --lr helps against them; a rule of "
            "fedcore-robust does, such as --plugin median or --plugin norm-clip, in a new run."
        )
    options: TrainingOptions = current.federation.config
    clip, less = "bounded gradients, such as --clip-norm 10 (off now)", ""
    if options.clip_norm is not None:
        clip = f"a smaller bound on gradients, --clip-norm ({options.clip_norm:g} now)"
    if options.momentum and options.optimizer == "sgd":
        less = f" or less --momentum ({options.momentum:g} now)"
    plugins = current.federation.setup.plugins
    terms = dict.fromkeys(p.name for hook in ("task_loss", "local_loss") for p in plugins.implementers(hook))
    bug = ""
    if terms and current.number == 0:
        bug = (
            f" Or a term of {', '.join(terms)} or its gradient is not finite, such as that of sqrt or a norm at 0: "
            "--fast-dev-run prints the line."
        )
    return f"Training diverged; try a smaller --lr ({options.lr:g} now) or {clip}{less}.{bug}"


class RunningMean:
    """The weighted mean of models, which are added one by one in a fixed order.

    Each name has a float64 sum of weight * tensor. It is divided once and rounded to the tensor's dtype, so that the
    mean of equal models is exactly the model. Floating buffers are weighted by samples. Integer buffers take the
    maximum. The sums are on the models' device.
    """

    def __init__(self, layout: Layout, names: Iterable[str]) -> None:
        self._layout, self._names = layout, list(names)
        self._sums: Tensors = {}
        self._largest: Tensors = {}
        self._weight = 0.0
        self._samples = 0

    def add(self, model: Mapping[str, Tensor], weight: float, *, samples: int) -> None:
        """Add one model.

        :param weight: finite and at least 0.
        """
        self._weight += weight
        self._samples += samples
        for name in self._names:
            tensor = model[name]
            if not tensor.is_floating_point():
                self._largest[name] = torch.maximum(self._largest.get(name, tensor), tensor)
                continue
            if name not in self._sums:
                self._sums[name] = torch.zeros(tensor.numel(), dtype=torch.float64, device=tensor.device)
            factor = samples if name in self._layout.buffers else weight
            for total, block in zip(_blocks(self._sums[name]), _blocks(tensor.flatten()), strict=True):
                total.add_(block, alpha=factor)  # torch converts the block to float64 first

    def mean(self) -> Tensors:
        """Return the mean of the added models.

        :raises ArithmeticError: the weights add up to 0 or to infinity.
        """
        means = dict(self._largest)
        for name, total in self._sums.items():
            divisor = self._samples if name in self._layout.buffers else self._weight
            if not 0 < divisor < math.inf:
                raise ArithmeticError(f"the weights of all accepted updates add up to {divisor}")
            shape, dtype = self._layout.shapes[name]
            means[name] = (total / divisor).to(dtype).view(shape)
        return {name: means[name] for name in self._names if name in means}


def _blocks(flat: Tensor) -> Sequence[Tensor]:
    """Return the parts of a tensor that the processor adds up without leaving its cache."""
    return flat.split(BLOCK) if flat.numel() > BLOCK else (flat,)
