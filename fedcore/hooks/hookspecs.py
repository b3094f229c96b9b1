"""Every hook of fedcore, in the order in which a run calls them. No logic.

Six hooks serve four methods of five::

    add a term to the local loss (FedProx, MOON)                    local_loss
    prepare a client's training, from what it received or kept      begin_local
    send something up, keep something for the client's next round   end_local
    add up what the clients sent                                    accumulate
    step from the mean to the new model (FedAvgM, FedDyn)           server_step
    send something to the clients next to the model                 broadcast

The others are rarely needed. The call tree of a run (``[server]`` and ``[client]`` say where a hook runs; several
engines, one order)::

    run
      configure_model, personal_parameters                          [both]
      check_run                                                     [both]
      for each round:
        select_clients                                              [server]   may ask clients
        begin_round                                                 [server]   may ask clients
        broadcast                                                   [server]   once; broadcast_to for each client
        for each client of the cohort:
          begin_local                                               [client]
          for each local epoch:
            (a break: mid_local_epoch                               [server]   between two epochs)
            for each mini-batch:
              task_loss, local_loss                                 [client]   forward, then these
              gradients                                             [client]   after backward
              observe                                               [client]   after clipping, before the optimizer
          end_local                                                 [client]
          pre_upload, guard_upload                                  [client]
        for each update that arrives, in dispatch order:
          pre_aggregate                                             [server]   checked before and after
          weight, accumulate                                        [server]   then the mean; rejected if one raises
        aggregate                                                   [server]   may ask clients
        server_step                                                 [server]   after the mean
        end_round                                                   [server]   may ask clients; then the round commits
        personal_model                                              [client]   in personalised evaluation
        report                                                      [server]   and once for the summary
      post_train                                                    [server]   may ask clients

A plugin implements a hook as a method marked with ``@hookimpl`` that takes any of the specified arguments
by name. Plugins are called in the order in which the user lists them, but for ``@hookimpl(tryfirst=True)`` and
``trylast``, which work as in pytest. ``RejectUpdate`` in ``pre_aggregate``, ``weight``
or ``accumulate`` rejects the client: it is in the round's record, its state stays as it was, and what plugins wrote for
its update is undone. Another exception of a plugin there rejects the client, too, and the record names the plugin; if
it rejects every client of a round, the run ends with its traceback. Server and client instances of a
plugin are separate and read-only after ``__init__``: values for later rounds go into the context's ``state``.
``server.ask`` puts a question to clients: a method of the plugin that is marked with ``@question``.
"Exclusive" hooks may be implemented by one plugin of a run only; the core refuses two at start-up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy
from torch import Tensor, nn

from fedcore.base.types import ClientUpdate, Loss
from fedcore.hooks.contexts import ClientContext, ServerContext, Step

if TYPE_CHECKING:
    from fedcore.client.setup import Setup
    from fedcore.models import ModelTask, SplitModel

hookspec = pluggy.HookspecMarker("fedcore")
hookimpl = pluggy.HookimplMarker("fedcore")

# -------------------------------------------------------------------------------------------------
# Both sides, before anything runs
# -------------------------------------------------------------------------------------------------


@hookspec
def configure_model(model: SplitModel, task: ModelTask) -> SplitModel | None:
    """Change the model before the run: add a projection head, replace the classifier.

    When: once per process, before round 0; server and clients must arrive at the same layout and weights.
    :param model: Encoder and classifier as built so far; may be edited in place.
    :param task: Number of classes, input shape, ``ensure_projection`` and the random streams to draw from.
    :returns: The model to use from here on, or None for the one that was given. A parameter that it leaves at
        ``requires_grad=False`` (a frozen backbone) is never trained, sent or kept per client, and modules that have no
        others stay in eval mode, their buffers as they are.
    Combining: in user order, each on the result of the one before.
    """


@hookspec(firstresult=True)
def personal_parameters(model: SplitModel) -> Sequence[str] | None:
    """Name the parameters that stay on each client (FedPer).

    When: once per process, after every ``configure_model``.
    :returns: Patterns over the model's names (``classifier.*``), or None for none. They are not sent,
        averaged, weighted or counted; a client's initial values are those of the initial global model.
    Combining: exclusive.
    """


@hookspec
def check_run(setup: Setup) -> None:
    """Refuse a run in which this plugin cannot keep its guarantee (differential privacy, for example).

    When: once per process, after all other checks, before anything is written.
    :param setup: Configuration, all plugins of the run, model and layout; read-only.
    :raises ConfigError: what does not fit; ``PluginConflictError``, which names both plugins and the reason.
    Combining: all are called, in user order.
    """


# -------------------------------------------------------------------------------------------------
# Server, in the order of a round
# -------------------------------------------------------------------------------------------------


@hookspec(firstresult=True)
def select_clients(server: ServerContext) -> Sequence[int] | Mapping[int, int] | None:
    """Choose the cohort of a round.

    When: at the start of a round. It may ``server.ask`` candidates, also some that then do not train.
    :returns: Distinct client ids, best of ``server.available`` (others fail as ``unavailable``), or None for the
        default: uniformly without replacement, max(1, round(participation * clients)) of the available ones. A mapping
        of ids gives each client its local epochs, 1 to ``--local-epochs`` and more than the last exchange's; refused
        with ``--local-steps``. Not called in a round in which no client is available.
    Combining: exclusive.
    """


@hookspec
def begin_round(server: ServerContext) -> None:
    """Prepare a round: read and write ``server.state``, ask clients.

    When: after the cohort is known, before ``broadcast``.
    :param server: ``server.ask`` works here, and in ``select_clients``, ``aggregate``, ``end_round`` and
        ``post_train``.
    Combining: all are called, in user order.
    """


@hookspec
def broadcast(server: ServerContext) -> Mapping[str, Tensor] | None:
    """Send tensors to all clients, next to the model; they find them in ``client.received``.

    When: once after ``begin_round`` of each round, and again for every evaluation.
    :returns: Named tensors in the plugin's own namespace, a pure function of ``server.state``; None for none.
    Combining: each plugin has its own namespace.
    """


@hookspec
def broadcast_to(server: ServerContext, client: int) -> Mapping[str, Tensor] | None:
    """Send tensors to one client, next to the model and to what ``broadcast`` sends to all.

    When: for every client that trains or is evaluated, when its task is sent.
    :param server: State as of the end of ``begin_round``; updates that arrived since are not visible. Its state is
        read-only.
    :param client: The id of the client.
    :returns: Named tensors in the plugin's own namespace, a pure function of ``server.state`` and ``client``, under
        other names than those of ``broadcast``; None for none.
    Combining: each plugin has its own namespace.
    """


@hookspec
def mid_local_epoch(
    server: ServerContext, epoch: int, snapshots: Mapping[int, Mapping[str, Tensor]]
) -> Mapping[int, Mapping[str, Tensor]] | None:
    """Exchange parts of the models between clients in the middle of their local training (FedCME).

    When: at each epoch of this plugin's ``exchanges``, once all running clients paused.
    :param epoch: The epoch that starts now.
    :param snapshots: By client id, the tensors under the patterns of this plugin's ``exchanges``. Clients that failed
        before are absent.
    :returns: Patches by client id, for exactly those names; patched parameters get fresh optimizer state,
        everything else of a client survives the pause. None or an absent client: nothing changes.
    Combining: plugins exchange disjoint names.
    """


@hookspec
def pre_aggregate(server: ServerContext, update: ClientUpdate) -> ClientUpdate | None:
    """Inspect, replace or refuse one client's update.

    When: once per arriving update, in dispatch order; the core checks it before and after.
    :returns: The update to use (``dataclasses.replace``), or None to leave it as it is.
    :raises RejectUpdate: leaves out the update.
    Combining: in user order, each on the result of the one before; a plugin that ``encodes`` parameters is first, so
        that all others see whole models.
    """


@hookspec(firstresult=True)
def weight(server: ServerContext, update: ClientUpdate) -> float | None:
    """Weigh one update's parameters in the mean.

    When: once per update that ``pre_aggregate`` let pass.
    :raises RejectUpdate: leaves out the update.
    :returns: A finite number >= 0, or None for the default, the number of samples. Buffers always use samples.
    Combining: exclusive.
    """


@hookspec
def accumulate(server: ServerContext, update: ClientUpdate) -> None:
    """Add one update to streaming sums in ``server.state``, with ``server.state.add`` for example.

    When: once per update, after ``weight``, in dispatch order, so that sums do not depend on the order of arrival.
    :raises RejectUpdate: leaves out the update.
    :param update: ``update.model`` is read-only. ``update.payload`` is cleared afterwards, unless the plugin owns
        parameters and implements ``aggregate``: then what is left stays for it, and entries may be popped to free
        memory.
    Combining: all are called.
    """


@hookspec
def aggregate(server: ServerContext, updates: Sequence[ClientUpdate]) -> Mapping[str, Tensor] | None:
    """Aggregate the parameters that this plugin ``owns``.

    When: once per round, after the last update, for a plugin that owns parameters. One that owns none has
        ``end_round``.
    :param updates: The accepted updates in dispatch order; ``model`` holds the owned names only, ``payload``
        what ``accumulate`` left of this plugin's. ``server.mean_of(updates)`` is the weighted mean of some of them,
        such as a cluster's.
    :returns: A partial state of owned names; the weighted mean fills the rest. None: the mean for all.
    Combining: plugins own disjoint names.
    """


@hookspec
def server_step(server: ServerContext, mean: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
    """Take a server optimizer's step from w_t (``server.model``) with the aggregated ``mean`` (FedAvgM, FedDyn).

    When: once per round, after ``aggregate``.
    :param mean: The new state as it stands: trainable shared parameters; its buffers are in ``server.buffers``.
    :returns: New values for some of these names, never buffers; the given tensor itself where nothing changes,
        so that neutral options are bit-equal to FedAvg.
    Combining: in user order, each on the result of the one before; a ``server_optimizer`` excludes owners.
    """


@hookspec
def end_round(server: ServerContext) -> None:
    """Finish a round: make of this round's sums what the next one needs, in ``server.state``.

    When: once per round with an accepted update, after ``aggregate`` and ``server_step``, before the round commits.
    :param server: ``server.model`` is the new model, ``server.state`` is writable, and ``server.ask`` works.
    Combining: all are called, in user order.
    """


@hookspec
def report(server: ServerContext) -> Mapping[str, Any] | None:
    """Report figures of the run so far, such as the privacy that was spent.

    For example, the new model's accuracy on the public samples::

        @hookimpl
        def report(self, server):
            with torch.no_grad():
                logits = server.network()(server.public.inputs(torch.arange(len(server.public)))).logits
            right = logits.argmax(dim=1) == server.public.labels.to(logits.device)
            return {"public_accuracy": right.float().mean().item()}

    When: once per round, after it committed and was evaluated, and once more for the summary.
    :param server: ``server.round`` is the last round, ``server.model`` the model that it left. ``server.network()`` and
        ``server.public`` work here. ``server.state`` is read-only. The result is a pure function of these.
    :returns: JSON values by name; they stand under ``reports`` and the plugin's name in the round's record and in
        summary.json, numbers that are not finite as null; ``result.history`` has them as ``report.PLUGIN.NAME``. None
        for none.
    Combining: each plugin has its own place.
    """


@hookspec
def post_train(server: ServerContext) -> None:
    """Work on the final global model (USCC).

    When: once, after the last round.
    :param server: May ``ask`` clients and change the parameters that the plugin ``corrects``, through
        ``server.retrain_classifier`` or ``server.update_model``.
    Combining: in user order; plugins correct disjoint names.
    """


# -------------------------------------------------------------------------------------------------
# Client, in the order of its local training
# -------------------------------------------------------------------------------------------------


@hookspec
def begin_local(client: ClientContext) -> Mapping[str, Tensor] | None:
    """Prepare one client's local training; choose the weights that it starts from (FedALA, IFCA).

    When: the model is loaded as received and kept, no step has been taken.
    :param client: Own ``state`` and ``received``; ``add_parameters`` and ``freeze`` work here only. ``client.model`` is
        read-only.
    :returns: Weights of names that the plugin declares in ``starts``, in place of those received or kept. They are the
        round's start: ``step.reference`` and the frozen ``"global"`` model are these. None: as received.
    Combining: all are called, in user order, on the model as received; then the starts are loaded. Plugins start
        disjoint names.
    """


@hookspec(firstresult=True)
def task_loss(step: Step) -> Tensor | None:
    """Replace the task loss, cross-entropy by default (FedRS, FedCD).

    When: after the forward pass of every mini-batch. Never syncs with the host: no ``.item()``, no boolean
        indexing, no Python branch on tensor values or on the client's identity.
    :returns: Tensor of shape (), or None for the default.
    Combining: exclusive.
    """


@hookspec
def local_loss(step: Step) -> Loss | list[Loss] | None:
    """Add terms to the local objective of one mini-batch.

    When: after the forward pass, before backward; again in each further pass that ``gradients`` takes. Pure; never
        syncs with the host (see ``task_loss``).
    :returns: One or several ``Loss``; None for none.
    Combining: total = task_scale * task + sum of weight * value over all plugins.
    """


@hookspec(firstresult=True)
def gradients(step: Step, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
    """Put other gradients in place of the local objective's (FedSAM, Per-FedAvg).

    When: after backward, before clipping, ``observe`` and the optimizer, without gradient. Never syncs with the host
        (see ``task_loss``).
    :param step: ``step.gradients_at(weights, rows)`` works here only: the gradient of the whole objective, the terms
        of all plugins included, at other weights or on some rows of the batch.
    :param gradients: of the model's parameters that this step trains, shared and personal, by name; read-only.
        Parameters that plugins added keep theirs.
    :returns: Gradients by the same names; a parameter that is left out does not move. None: as they are.
    Combining: exclusive.
    """


@hookspec
def observe(step: Step) -> None:
    """Add to sums in ``step.client.scratch``, in place (FedCME's features).

    When: after backward, ``gradients`` and clipping, before the optimizer's update, without gradient.
    Combining: all are called.
    """


@hookspec
def end_local(client: ClientContext) -> Mapping[str, Tensor] | None:
    """Finish one client's local training: write own ``state``, send tensors up.

    When: after the last epoch; ``client.model`` holds the trained weights.
    :returns: Named tensors that go up in the plugin's own namespace; None for none.
    Combining: each plugin has its own namespace.
    """


@hookspec
def pre_upload(client: ClientContext, update: ClientUpdate) -> ClientUpdate | None:
    """Change what goes up: clip, add noise, compress, mix a head (FedCP).

    A plugin that ``encodes`` parameters may leave these out of ``update.model`` and send another form of them in its
    payload, from which its ``pre_aggregate`` puts them back. Memory of the error (``client.state``) commits with the
    update.

    When: after every ``end_local``.
    :param update: ``payload`` holds what this plugin sends.
    :returns: The update to send (``dataclasses.replace``), or None to leave it as it is.
    Combining: in user order, each on the result of the one before; a plugin that ``encodes`` is last.
    """


@hookspec(firstresult=True)
def guard_upload(client: ClientContext, update: ClientUpdate) -> ClientUpdate | None:
    """Change all that goes up, other plugins' payloads too (local differential privacy).

    When: after every ``pre_upload``.
    :param update: ``payload`` holds all that goes up: plugin -> name -> tensor.
    :returns: The update to send (``dataclasses.replace``), or None to leave it as it is.
    Combining: exclusive.
    """


@hookspec(firstresult=True)
def personal_model(client: ClientContext) -> nn.Module | None:
    """Give the model that personalised evaluation uses for this client (Ditto, FDCL).

    When: in an evaluation, once per client that has trained in some round, after it received ``broadcast``; the
        others have the global model. ``client.state`` is that of its last training, and read-only.
    :returns: A module that takes the model's batches and returns :class:`~fedcore.models.Outputs`, as the model does,
        on the client's device; None for the global model (with personal parameters). Where it fails or its logits are
        nan, the client is left out of the protocols of own models, and the run says why.
    Combining: exclusive.
    """
