"""Local training: the loop over local epochs and batches, and one optimizer step.

Every method trains through :func:`epochs_of`. Methods differ in the hooks that a step calls.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from fedcore.base.errors import PluginContractError
from fedcore.client.context import Batch, BatchStep
from fedcore.client.objective import SecondPass, change_gradients, require_gradient, total_loss
from fedcore.client.session import LocalSession
from fedcore.models import Outputs


def epochs_of(session: LocalSession, epochs: Iterable[int]) -> Generator[Batch, None, None]:
    """Yield the batches of some local epochs. The caller takes the step on each before it asks for the next one.

    The model is in eval mode afterwards.
    """
    for epoch in epochs:
        session.begin_epoch(epoch)
        yield from batches(session, epoch)
    session.end_epochs()


def batches(session: LocalSession, epoch: int) -> Iterator[Batch]:
    """Yield the batches of a local epoch, and count their steps. With ``--local-steps`` it ends after the last step.

    Batches that are too small are left out, but they have a number.
    """
    data, work = session.data, session.work
    order = torch.randperm(len(data), generator=session.generator(f"shuffle/{epoch}"))
    augment = partial(session.generator, f"augment/{epoch}")
    drawn = enumerate(data.batches(order, session.config.batch_size, augment))
    trained = [(number, picked) for number, picked in drawn if len(picked.positions) >= work.smallest_batch]
    if work.most_steps is not None:
        del trained[work.most_steps - session.steps :]
    for number, picked in trained:
        yield Batch(session, epoch, number, picked, last=number == trained[-1][0])
        session.steps += 1


GRAPH_FAULTS = {
    "modified by an inplace operation": (
        "edits a tensor in place, which the gradient needs",
        "clone it first (z = z.clone()), or write z = z + 1 instead of z += 1",
    ),
    "backward through the graph a second time": (
        "uses a tensor whose graph is freed, such as one of an earlier batch",
        "keep tensors without their graph: client.scratch['mean'] = mean.detach()",
    ),
}
"""Words of autograd's errors in torch 2.13 -> what a hook or the model did, and the remedy."""

ViewOf = Callable[[Batch, Outputs], BatchStep]
"""Makes the step that plugins see, from a batch and the model's outputs on it."""


def take_step(batch: Batch, view: ViewOf = BatchStep) -> None:
    """Take one optimizer step.

    :param view: makes the step that plugins see.
    """
    session, plugins = batch.session, batch.session.plugins
    changes = plugins.implements("gradients")
    random = session.working.memory.random_state(session.working.device) if changes else None
    step, total = _forward(batch, view)
    session.optimizer.zero_grad()
    try:
        total.backward()
    except RuntimeError as error:
        for words, (fault, hint) in GRAPH_FAULTS.items():
            if words in str(error):
                raise _broken_graph(session, fault, hint) from error
        raise
    if changes:
        second = SecondPass(session, lambda rows: _forward(batch.part(rows), view, record=False)[1], random)
        change_gradients(session, step._with(_second=second))
    if session.config.clip_norm is not None:
        nn.utils.clip_grad_norm_(session.working.trained.values(), session.config.clip_norm)
    if plugins.implements("observe"):
        with torch.no_grad():
            plugins.call_all("observe", step=step)
    session.optimizer.step()


def _forward(batch: Batch, view: ViewOf, *, record: bool = True) -> tuple[BatchStep, Tensor]:
    """Take the forward pass of a batch; return the step that plugins see, and the objective."""
    session = batch.session
    with session.autocast():
        step = view(batch, Outputs(*session.working.module(batch.x)))
        total = total_loss(session, step, record=record)
    require_gradient(session, total)
    return step, total


def _broken_graph(session: LocalSession, fault: str, hint: str) -> PluginContractError:
    """Return the error for a graph that autograd cannot go through. Autograd does not know who made it."""
    hooks = [
        f"plugin {plugin.name!r} hook {hook}"
        for hook in ("task_loss", "local_loss")
        for plugin in session.plugins.implementers(hook)
    ]
    suspects = " or ".join([*hooks, "the model"])
    return PluginContractError(f"{suspects} (round {session.round + 1}, client {session.client}) {fault}. Hint: {hint}")
