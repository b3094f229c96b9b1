"""Every hook of fedcore, in the order in which a run calls them, with what the core does with its results.

Most methods use some of these six hooks::

    add a term to the local loss (FedProx, MOON)                    local_loss
    prepare a client's training, from what it received or kept      begin_local
    send something up, keep something for the client's next round   end_local
    add up what the clients sent                                    accumulate
    step from the mean to the new model (FedAvgM, FedDyn)           server_step
    send something to the clients next to the model                 broadcast

The call tree of a run shows when each hook is called. ``[server]`` and ``[client]`` say where it runs. The order is the
same with every engine::

    run
      configure_model, personal_parameters                          [both]
      check_run                                                     [both]
      assign_samples                                                [server]
      for each round:
        select_clients                                              [server]   may ask clients
        begin_round                                                 [server]   may ask clients
          (an answer: local_samples, the question, pre_answer       [client]   wherever the server asks)
        broadcast                                                   [server]   once; broadcast_to for each client
        for each client of the cohort:
          local_samples                                             [client]   and before an evaluation
          begin_local                                               [client]
          for each local epoch:
            (a break: mid_local_epoch                               [server]   between two epochs)
            for each mini-batch:
              task_loss, local_loss                                 [client]   forward, then these
              gradients                                             [client]   after backward
              observe                                               [client]   after clipping, before the optimizer
          end_local                                                 [client]
          pre_upload, guard_upload                                  [client]
        all_updates                                                 [server]   keeps the updates until the last arrives
        for each update that arrives, in dispatch order:
          pre_aggregate                                             [server]   checked before and after
          weight, accumulate                                        [server]   then the mean; rejected if one raises
        aggregate                                                   [server]   may ask clients
        server_step                                                 [server]   after the mean
        end_round                                                   [server]   may ask clients; then the round commits
        personal_model                                              [client]   in personalised evaluation
        report                                                      [server]   and once for the summary
      post_train                                                    [server]   may ask clients

A plugin implements a hook as a method marked with ``@hookimpl``. The method takes any of the specified arguments by
name. Plugins are called in the order in which the user lists them; ``@hookimpl(tryfirst=True)`` and ``trylast`` change
this order as in pytest. ``RejectUpdate`` in ``pre_aggregate``, ``weight`` or ``accumulate`` rejects the client: the
round's record names it, its state stays as it was, and the core rolls back what plugins wrote for its update. Any other
exception in these hooks rejects the client, too, and the record names the plugin. If plugins raise for every update of
a round, the run ends with this error. It ends at once if a plugin breaks its contract, as with an object in ``state``.
The server and the clients have separate objects of a plugin. These are read-only after ``__init__``: values for later
rounds go into the context's ``state``. ``server.ask`` puts a question to clients. A question is a method of the plugin
that is marked with ``@question``. Only one plugin of a run can implement an exclusive hook; the core refuses two at
start-up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import pluggy
from torch import Tensor, nn

from fedcore.base.types import ClientUpdate, Loss
from fedcore.hooks.contexts import ClientContext, RunSetup, ServerContext, Step

if TYPE_CHECKING:
    from fedcore.data import ClientData, Partition
    from fedcore.models.split import ModelTask, SplitModel

hookspec = pluggy.HookspecMarker("fedcore")
hookimpl = pluggy.HookimplMarker("fedcore")

Spec = TypeVar("Spec", bound=Callable[..., Any])


def called(**how: Any) -> Callable[[Spec], Spec]:
    """Say how the core calls a hook.

    :param how: ``replaces``, an argument: a result takes its place for the parts and plugins after this one.
        ``whole``, an argument that a plugin sees with the entries of all plugins. ``rejects``, for a hook that sees
        one update: if it raises RejectUpdate or any other exception, the update is left out. ``apart``, for a hook
        whose results of a plugin's parts stay apart.
    """

    def marked(spec: Spec) -> Spec:
        vars(spec)["fedcore_called"] = how
        return spec

    return marked


# -------------------------------------------------------------------------------------------------
# Both sides, before anything runs
# -------------------------------------------------------------------------------------------------


@hookspec
@called(replaces="model")
def configure_model(model: SplitModel, task: ModelTask) -> SplitModel | None:
    """Change the model before the run: add a projection head, replace the classifier.

    When: before round 0, on the server and wherever clients run. All must arrive at the same layout and weights.
    :param model: Encoder and classifier as built so far. It may be edited in place.
    :param task: Number of classes, input shape, ``ensure_projection`` and the random streams to draw from.
    :returns: The model to use from here on, or None to keep the given model. Parameters with ``requires_grad=False``
        (a frozen backbone) are never trained, sent or kept per client. Modules without any other parameters stay in
        eval mode, and their buffers do not change.
    Combining: in user order, each on the result of the plugin before.
    """


@hookspec
def personal_parameters(model: SplitModel) -> Sequence[str] | None:
    """Name the parameters that stay on each client (FedPer).

    When: after every ``configure_model``, on the server and wherever clients run.
    :returns: Patterns over the model's names (``classifier.*``), of parameters and buffers, or None to keep none there.
        The core does not send, average or count them. Each client starts with their values in the initial global model.
    Combining: a client keeps what any plugin names. Refused are two plugins of which one names nothing that the other
        does not, and two that together leave nothing to send.
    """


@hookspec
def check_run(setup: RunSetup) -> None:
    """Refuse a run in which this plugin cannot keep its guarantee (differential privacy, for example).

    When: once model and layout are known, on the server and wherever clients run. On the server a new run has written
        nothing by then.
    :param setup: Configuration, all plugins of the run, model and layout; read-only.
    :raises ConfigError: The configuration does not fit. Two plugins that do not fit each other are a
        ``PluginConflictError``, which names both and the reason.
    Combining: all are called, in user order.
    """


@hookspec
@called(replaces="partition")
def assign_samples(setup: RunSetup, partition: Partition) -> Partition | None:
    """Give clients other training samples than the partition says (pooled training, shared samples).

    When: once, on the server, before the engine starts. The run's directory keeps the partition as it was.
    :param setup: Configuration, plugins, model and layout; read-only.
    :returns: ``Partition(train, test, partition.info)`` with the same clients, or None to keep the given one. A client
        without samples must not be selected. Over Flower, ``partition.is_declared``: clients hold their own data.
    Combining: in user order, each on the result of the plugin before.
    """


# -------------------------------------------------------------------------------------------------
# Server, in the order of a round
# -------------------------------------------------------------------------------------------------


@hookspec(firstresult=True)
def select_clients(server: ServerContext) -> Sequence[int] | Mapping[int, int] | None:
    """Choose the cohort of a round.

    When: at the start of a round, unless no client is available. It may ``server.ask`` clients that then do not train.
    :returns: Distinct client ids, or None for the default: max(1, round(participation * clients)) of the available
        clients, drawn uniformly without replacement. Choose from ``server.available``; any other client fails as
        ``unavailable``. A mapping of ids to local epochs sets each client's work: from 1 to ``--local-epochs``, and
        more than the epoch of the last exchange. ``fedcore.Steps(number)`` are optimizer steps, as many as you like.
        Refused are steps where exchanges or ``--system`` count epochs, and epochs with ``--local-steps``.
    Combining: exclusive.
    """


@hookspec
def begin_round(server: ServerContext) -> None:
    """Prepare a round: read and write ``server.state``, ask clients.

    When: after the cohort is known, before ``broadcast``, unless no client of the cohort can be reached.
    :param server: ``server.ask`` works here, and in ``select_clients``, ``aggregate``, ``end_round`` and
        ``post_train``. It works in no other hook.
    Combining: all are called, in user order.
    """


@hookspec
def broadcast(server: ServerContext) -> Mapping[str, Tensor] | None:
    """Send tensors to all clients, next to the model; the clients find them in ``client.received``.

    When: once after each ``begin_round``, and again for every evaluation that clients take part in.
    :param server: ``server.state`` is read-only.
    :returns: Named tensors in the plugin's own namespace, or None to send nothing. The result is a pure function of
        ``server.state``.
    Combining: each plugin has its own namespace.
    """


@hookspec
def broadcast_to(server: ServerContext, client: int) -> Mapping[str, Tensor] | None:
    """Send tensors to one client, next to the model and to the tensors of ``broadcast``.

    When: for every client that trains or is evaluated, when its task is sent.
    :param server: State as of the end of ``begin_round``, read-only; updates that arrived since are not visible.
    :param client: The id of the client.
    :returns: Named tensors in the plugin's own namespace, or None to send nothing. The result is a pure function of
        ``server.state`` and ``client``. Its names differ from the names of ``broadcast``.
    Combining: each plugin has its own namespace.
    """


@hookspec
def mid_local_epoch(
    server: ServerContext, epoch: int, snapshots: Mapping[int, Mapping[str, Tensor]]
) -> Mapping[int, Mapping[str, Tensor]] | None:
    """Exchange parts of the models between clients in the middle of their local training (FedCME).

    When: at each epoch of this plugin's ``exchanges``, once all running clients have paused.
    :param epoch: The epoch that starts now.
    :param snapshots: By client id, the tensors under the patterns of this plugin's ``exchanges``. Clients that failed
        before are absent.
    :returns: Patches by client id, each with some or all names of a snapshot. Patched parameters get fresh optimizer
        state; everything else of a client survives the pause. Clients you leave out are not patched. Return None to
        patch no client.
    Combining: plugins exchange disjoint names.
    """


@hookspec
def all_updates(server: ServerContext, updates: Sequence[ClientUpdate]) -> Sequence[ClientUpdate] | None:
    """See all updates of a round before any of them is inspected or added; replace some of them.

    When: once per round with a valid update, after the last update arrived. The server keeps all updates of the round
        until then, so a run with this hook takes more memory. Without it each update is freed once it is added.
    :param updates: The valid updates in dispatch order, as they were sent. ``payload`` holds the tensors of every
        plugin: plugin -> name -> tensor, with your own at ``payload[self.name]``. Parameters that a plugin ``encodes``
        may be absent from ``model``.
    :returns: The updates that change (``dataclasses.replace``), or None to keep them all. They are checked as if the
        clients had sent them.
    Combining: in user order, each on the result of the plugin before.
    """


@hookspec
@called(replaces="update", rejects=True)
def pre_aggregate(server: ServerContext, update: ClientUpdate) -> ClientUpdate | None:
    """Inspect, replace or refuse one client's update.

    When: once per arriving update, in dispatch order. The core checks the update before and after.
    :returns: The update to use (``dataclasses.replace``), or None to keep the given update.
    :raises RejectUpdate: The update is left out.
    Combining: in user order, each on the result of the plugin before. A plugin that ``encodes`` parameters comes
        first, so that the others see whole models.
    """


@hookspec(firstresult=True)
@called(rejects=True)
def weight(server: ServerContext, update: ClientUpdate) -> float | None:
    """Weigh one update's parameters in the mean.

    When: once per update that ``pre_aggregate`` let pass.
    :raises RejectUpdate: The update is left out.
    :returns: A finite number >= 0, or None for the default, the number of samples. Weights of a round that add up to
        0 stop the run. Buffers are always weighted by samples.
    Combining: exclusive.
    """


@hookspec
@called(rejects=True)
def accumulate(server: ServerContext, update: ClientUpdate, updates: Sequence[ClientUpdate]) -> None:
    """Add one update to streaming sums in ``server.state``, with ``server.state.add`` for example.

    When: once per update, after ``weight``, in dispatch order. The sums do not depend on the order of arrival.
    :raises RejectUpdate: The update is left out.
    :param update: ``update.model`` is read-only. The core clears ``update.payload`` afterwards, unless the plugin owns
        parameters and implements ``aggregate``. Such a plugin finds the payload there, and may pop entries here to
        free memory.
    :param updates: Take this in place of ``update`` to add several updates in one call: clients that train together
        (``--stack``) arrive together. Otherwise the list has one update. Add them in their order. ``model`` is None if
        there are several. If a plugin raises, what was added is undone, and the hook is called for each update alone.
    Combining: all are called, in user order.
    """


@hookspec
def aggregate(server: ServerContext, updates: Sequence[ClientUpdate]) -> Mapping[str, Tensor] | None:
    """Aggregate the parameters that this plugin ``owns``.

    When: once per round, after the last update, for a plugin that owns parameters. A plugin that owns none implements
        ``end_round`` instead.
    :param updates: The accepted updates in dispatch order. ``model`` holds the owned names only. ``payload`` holds the
        entries of this plugin that ``accumulate`` left. ``server.mean_of(updates)`` is the weighted mean of some
        updates, such as a cluster's.
    :returns: Values by owned names. They are not copied: do not edit them later. Names you leave out get the weighted
        mean. Return None for the mean of all names.
    Combining: plugins own disjoint names.
    """


@hookspec
def server_step(server: ServerContext, mean: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
    """Take a server optimizer's step from w_t (``server.model``) with the aggregated ``mean`` (FedAvgM, FedDyn).

    When: once per round, after ``aggregate``.
    :param mean: The trainable shared parameters of the next model. Its buffers are in ``server.buffers``.
    :returns: New values for some of these names, never for buffers. They are not copied: do not edit them later. Return
        the given tensor itself where nothing changes, so that neutral options are bit-equal to FedAvg. Return None to
        change nothing.
    Combining: in user order, each on the result of the plugin before. A ``server_optimizer`` excludes owners.
    """


@hookspec
def end_round(server: ServerContext) -> None:
    """Finish a round: turn this round's sums into the values that the next round needs, in ``server.state``.

    When: once per round with an accepted update, after ``aggregate`` and ``server_step``, before the round commits.
    :param server: ``server.model`` is the new model, ``server.state`` is writable, and ``server.ask`` works.
    Combining: all are called, in user order.
    """


@hookspec
def report(server: ServerContext) -> Mapping[str, Any] | None:
    """Report figures of the run so far, such as the privacy budget that was spent.

    For example, the new model's accuracy on the public samples::

        @hookimpl
        def report(self, server):
            with torch.no_grad():
                logits = server.network()(server.public.inputs(torch.arange(len(server.public)))).logits
            right = logits.argmax(dim=1) == server.public.labels.to(logits.device)
            return {"public_accuracy": right.float().mean().item()}

    When: once per round, after the round committed and was evaluated, and once more for the summary.
    :param server: ``server.round`` is the last round, and ``server.model`` is the model after it. ``server.network()``
        and ``server.public`` work here, and ``server.test`` works only here. ``server.state`` is read-only.
    :returns: JSON values by name, or None to report nothing. The result is a pure function of ``server``. The round's
        record and summary.json hold it under ``reports`` and the plugin's name, with null for numbers that are not
        finite. ``result.history`` holds it as ``report.PLUGIN.NAME``.
    Combining: each plugin has its own place.
    """


@hookspec
def post_train(server: ServerContext) -> None:
    """Work on the final global model (USCC).

    When: once, after the last round.
    :param server: ``server.ask`` works here. ``server.update_model`` changes the parameters that the plugin
        ``corrects``.
    Combining: in user order; plugins correct disjoint names.
    """


# -------------------------------------------------------------------------------------------------
# Client, in the order of its local training
# -------------------------------------------------------------------------------------------------


@hookspec
@called(replaces="samples")
def local_samples(client: ClientContext, samples: ClientData) -> ClientData | None:
    """Change a client's training samples: noisy labels, mixed samples, an attack on the data.

    When: before any other hook of the client, in every task: a training, a question or an evaluation. Held-out samples
        never change. The model holds the weights that the client received.
    :param samples: ``samples.labels`` (n,) and ``samples.inputs(positions)`` (B, ...), normalised and on the device.
    :returns: ``samples.changed(inputs=..., labels=...)``, or None to keep the samples. The number of samples stays.
        The data set and its partition do not change, and ``--augment`` augments the new inputs.
    Combining: in user order, each on the result of the plugin before.
    """


@hookspec
def begin_local(client: ClientContext) -> Mapping[str, Tensor] | None:
    """Prepare one client's local training; choose the weights that it starts from (FedALA, IFCA).

    When: before the first step. The model holds the weights from which the client starts, and its own personal ones.
    :param client: ``client.add_parameters`` and ``client.freeze`` work here only. ``client.model`` is read-only.
    :returns: Weights by names that the plugin declares in ``starts``, or None to keep the weights. They become the
        start of the round: ``step.reference`` and the frozen ``"global"`` model hold them, too.
    Combining: plugins that declare ``starts`` are called first. They see the model as received, and start disjoint
        names. Then the core loads the weights that they return, and calls the other plugins. Both in user order.
    """


@hookspec(firstresult=True)
def task_loss(step: Step) -> Tensor | None:
    """Replace the task loss, cross-entropy by default (FedRS, FedCD).

    When: after the forward pass of every mini-batch. It never syncs with the host: no ``.item()``, no boolean
        indexing, no Python branch on tensor values or on the client's identity.
    :returns: A tensor of shape (), or None for the default.
    Combining: exclusive.
    """


@hookspec
def local_loss(step: Step) -> Loss | list[Loss] | None:
    """Add terms to the local objective of one mini-batch.

    When: after the forward pass, before backward, and again in each further pass that ``gradients`` takes. It is pure
        and never syncs with the host (see ``task_loss``).
    :returns: One ``Loss`` or a list of them, or None to add no term.
    Combining: total = task_scale * task + sum of weight * value over all plugins.
    """


@hookspec(firstresult=True)
def gradients(step: Step, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
    """Replace the gradients of the local objective (FedSAM, Per-FedAvg).

    When: after backward, before clipping, ``observe`` and the optimizer, under ``torch.no_grad``. It never syncs with
        the host (see ``task_loss``).
    :param step: ``step.gradients_at(weights, rows)`` works here only. It gives the gradient of the whole objective,
        with the terms of all plugins, at other weights or on some rows of the batch.
    :param gradients: By name, the gradients of the model's parameters that this step trains, shared and personal;
        read-only. Parameters that plugins added are absent and keep their gradients.
    :returns: Gradients by the same names. Parameters you leave out are not updated. Return None to keep the gradients.
    Combining: exclusive.
    """


@hookspec
def observe(step: Step) -> None:
    """Add to sums over batches in ``step.client.scratch``, in place (FedCME's features).

    When: after backward, ``gradients`` and clipping, before the optimizer's update, under ``torch.no_grad``.
    Combining: all are called, in user order.
    """


@hookspec
@called(apart=True)
def end_local(client: ClientContext) -> Mapping[str, Tensor] | None:
    """Finish one client's local training: write ``client.state``, send tensors to the server.

    When: after the last epoch. ``client.model`` holds the trained weights.
    :returns: Named tensors for the server, in the plugin's own namespace, or None to send nothing.
    Combining: each plugin has its own namespace.
    """


@hookspec
@called(replaces="update")
def pre_upload(client: ClientContext, update: ClientUpdate) -> ClientUpdate | None:
    """Change the update before it is sent: clip, add noise, compress, mix a head (FedCP).

    A plugin that ``encodes`` parameters may take them out of ``update.model`` and send another form of them in its
    payload. Its ``pre_aggregate`` puts them back. A memory of the error in ``client.state`` commits with the update.

    When: after every ``end_local``.
    :param update: ``payload`` holds this plugin's tensors only.
    :returns: The update to send (``dataclasses.replace``), or None to keep the given update.
    Combining: in user order, each on the result of the plugin before. A plugin that ``encodes`` comes last.
    """


@hookspec(firstresult=True)
@called(whole="update")
def guard_upload(client: ClientContext, update: ClientUpdate) -> ClientUpdate | None:
    """Change the whole update, with the payloads of the other plugins (local differential privacy).

    When: after every ``pre_upload``.
    :param update: ``payload`` holds the tensors of every plugin: plugin -> name -> tensor.
    :returns: The update to send (``dataclasses.replace``), or None to keep the given update.
    Combining: exclusive.
    """


@hookspec
@called(replaces="answer")
def pre_answer(client: ClientContext, answer: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
    """Change a client's answer to a question before it is sent: an attack, noise. It may be another plugin's question.

    When: after the question's method.
    :param client: ``client.state`` is read-only, as in the question.
    :param answer: The named tensors of the answer.
    :returns: The answer to send, or None to keep the given answer.
    Combining: in user order, each on the result of the plugin before.
    """


@hookspec(firstresult=True)
def personal_model(client: ClientContext) -> nn.Module | None:
    """Return the model that personalised evaluation uses for this client (Ditto, FDCL).

    When: in an evaluation, once per client, after it received ``broadcast``. An unseen client is asked only after it
        adapted (``--adapt-epochs``). A run in which clients keep parameters does not ask those that never trained.
        ``client.state`` is from the client's last training, empty if there was none, and read-only.
    :returns: A module on the client's device that takes the model's batches and returns
        :class:`~fedcore.models.Outputs`, or None for the received model with the client's personal parameters, also
        after an adaptation: keep what that trained in ``client.state``. If the module fails or its logits are nan, the
        protocols of own models leave the client out, and the run says why. An export of the weights holds the module's
        parameters and buffers, but no tensor that is a plain attribute.
    Combining: exclusive.
    """
