"""Several clients as one computation: their steps on batches of equal shape are one step on stacked tensors.

Each client of a stack has a session and a working model of its own, whose parameters and optimizer state are slices of
stacked tensors (K, ...). All of its work but the steps is therefore done as without a stack. Where clients begin alike,
:mod:`fedcore_accelerate.whole` does the rest once per stack, too. A stacked step is one forward pass and
one call of each hook of the loss under :func:`torch.func.vmap`, one backward pass from the sum of the clients'
objectives, and one step of the optimizer.

A Python branch on a tensor, random numbers, an operation that ``vmap`` does not know and what
:mod:`fedcore_accelerate.stacked_step` refuses cannot be stacked. Such steps are taken one by one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_map

from fedcore import PluginContractError, SplitModel
from fedcore.client import (
    Batch,
    BatchStep,
    LocalSession,
    LossTotals,
    Optimizer,
    Picked,
    WorkingModel,
    require_gradient,
    total_loss,
)
from fedcore.models import Outputs
from fedcore_accelerate.random_stream import draws_refused
from fedcore_accelerate.rules import OutOfOrder, Rules
from fedcore_accelerate.stacked_step import (
    Lent,
    NotStackable,
    Path,
    Read,
    Reads,
    StackedStep,
    TrainedClient,
    Unread,
    attributes_refused,
)
from fedcore_accelerate.tuning import why_alone
from fedcore_functional import as_parameters

REPEATS = "the backward pass repeats a part of the forward pass, as checkpoints do"
"""Why a step is taken alone: such a pass finds the model without the clients' weights."""


class Stacked:
    """The tensors of a stack.

    :ivar weights: the models' parameters by name, (K, ...).
    """

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights
        self.added: dict[str, Tensor] = {}
        """The parameters that plugins added, by plugin and name."""
        self.states: dict[str, dict[str, Tensor]] = {}
        """The optimizer's state by a parameter's name."""
        self.known: dict[Path, None] = {}
        """What hooks have read of their clients so far: it is stacked before the next step."""
        self.known_at_end: dict[Path, None] = {}
        """The same of ``end_local``."""
        self.in_order = False
        """Whether outputs of linear layers lie in memory as they do alone, which some models need."""


class Stack(Stacked):
    """Up to K working models whose parameters are slices of stacked tensors."""

    def __init__(self, workings: Sequence[WorkingModel]) -> None:
        parameters = zip(*(working.parameters.items() for working in workings), strict=True)
        super().__init__({column[0][0]: stacked([w.detach() for _, w in column]) for column in parameters})
        for working, *own in zip(workings, *self.weights.values(), strict=True):
            for name, part in zip(self.weights, own, strict=True):  # other memory, which holds the same values
                working.parameters[name].data = part
            working.state = working.module.state_dict()

    def begin(self, sessions: Sequence[LocalSession]) -> Stack:
        """Begin with other clients, which have the first working models; return the stack.

        :raises NotStackable: they do not train the same parameters.
        :raises RuntimeError: parameters that plugins added have other shapes.
        """
        self.added, self.states = {}, {}
        first, *others = trained = [trained_by(session) for session in sessions]
        if differing := next((names for each in others if (names := first.keys() ^ each.keys())), None):
            raise NotStackable(f"not all clients train {min(differing)!r}")
        for name in first:
            own = [each[name] for each in trained]
            if name not in self.weights:
                self.added[name] = stacked([parameter.detach() for parameter in own])
                for parameter, part in zip(own, self.added[name], strict=True):
                    parameter.data = part
            states = [session.optimizer.state[id(p)] for session, p in zip(sessions, own, strict=True)]
            self.states[name] = {kind: stacked([state[kind] for state in states]) for kind in states[0]}
            for kind, joined in self.states[name].items():
                for state, part in zip(states, joined, strict=True):
                    state[kind] = part
        return self


def stacked(tensors: list[Tensor]) -> Tensor:
    """Stack tensors, (K, ...), in their memory format."""
    return torch.stack(tensors, out=room(tensors[0], len(tensors)))


def room(tensor: Tensor, count: int) -> Tensor:
    """Return room for so many tensors, (K, ...). Each keeps its memory format: a kernel's last bits depend on it."""
    return tensor.new_empty_strided((count, *tensor.shape), (tensor.numel(), *tensor.stride()))


def trained_by(session: LocalSession) -> dict[str, nn.Parameter]:
    """Return the parameters that some epoch of a session trains, and those that plugins added."""
    own = {name: p for name, p in session.working.parameters.items() if id(p) in session.optimizer.state}
    return own | {f"{plugin}/{name}": p for plugin, own in session.requests.added.items() for name, p in own.items()}


class _Models(nn.Module):
    """The models of a step, so that one functional call gives all of them the weights of a client."""

    def __init__(self, working: WorkingModel) -> None:
        super().__init__()
        self.trained = working.module
        for name, frozen in working.frozen.items():
            self.add_module(name, frozen.module)

    def forward(self, function: Callable[[SplitModel], Any]) -> Any:
        return function(self.trained)


class Group:
    """Neighbours in a stack whose steps are one step.

    :param first: the slice of the first client in the stack.
    :param one: the session that stands for all of them in what they have in common.
    :param count: the number of clients.
    :param values_of: returns what hooks read of the clients, client by client.
    :raises NotStackable: the run's steps cannot be stacked.
    """

    def __init__(
        self, stack: Stacked, first: int, count: int, one: LocalSession, values_of: Callable[[Path], Sequence[Any]]
    ) -> None:
        if reason := why_alone(one.working.setup):
            raise NotStackable(reason)
        if one.working.plain.unsaved:
            raise NotStackable("the model has buffers that are not saved, such as a mask")
        self._stack, self._where, self._alone = stack, slice(first, first + count), count == 1
        self._trained = {name: nn.Parameter(stack.weights[name][self._where]) for name in one.working.trained}
        self._added = {name: nn.Parameter(tensor[self._where]) for name, tensor in stack.added.items()}
        self._weights = {name: tensor[self._where] for name, tensor in stack.weights.items()}
        self._weights |= self._trained | self._added
        self._own = [one.working.parameters[name] for name in stack.weights]
        """The parameters of the model, in whose place it has these weights."""
        names = {id(p): name for name, p in {**one.working.parameters, **trained_by(one)}.items()}
        widest = reduce(torch.promote_types, (weight.dtype for weight in self._weights.values()), torch.float32)
        self._reads = Reads(values_of, names, widest, one.working.device)
        self._models = _Models(one.working)
        self._parameters = [name for name, _ in self._models.named_parameters()]
        parameters = self._trained | self._added
        groups = []
        for group in one.optimizer.groups:
            stacked = [parameters[names[id(p)]] for p in group.parameters if names[id(p)] in parameters]
            groups.append(replace(group, parameters=stacked))
        self._optimizer = Optimizer(one.config, groups)
        self._counts: Mapping[str, int] = {}
        """The numbers of losses in a step by name: two terms of a plugin may have one name."""
        self._steps: list[Tensor] = []
        """Adam's numbers of steps, (K,) each. A group takes one number for all of its clients: the first client's."""
        for name, parameter in parameters.items():
            state = {kind: tensor[self._where] for kind, tensor in stack.states[name].items()}
            if "steps" in state:
                self._steps.append(state["steps"])
                state["steps"] = state["steps"][0]
            self._optimizer.state[id(parameter)] = state

    def take(self, batches: Sequence[Batch]) -> list[Exception | None]:
        """Take a step of each client. Return the exceptions of ``observe``, which is called client by client.

        :raises Exception: the step cannot be taken at once. Nothing has changed.
        """
        batches = [replace(batch) for batch in batches]  # the inputs of a refused step may be drawn ones
        one = batches[0].session
        errors: list[Exception | None] = [None] * len(batches)

        def frozen(name: str) -> Outputs:
            own = [batch.frozen(name) for batch in batches]
            return Outputs(*map(torch.stack, zip(*own, strict=True)))

        def observe(*outputs: Tensor) -> None:
            if names := [plugin.name for plugin in one.plugins.implementers("observe")]:
                try:
                    # A stream for each client takes as long as its step.
                    with draws_refused(one.working.device), self._gradients_lent(batches):
                        errors[:] = map(_observed, batches, *outputs)
                except NotStackable:  # it has seen the clients, and must not see them again
                    errors[:] = [_draws(", ".join(names), one.round)] * len(batches)
                self._reads.forget(names)

        with ExitStack() as watched:
            watched.enter_context(draws_refused(one.working.device))
            watched.enter_context(attributes_refused(one.working.module))
            joined = _joined(batches)
            for batch, x in zip(batches, joined[0], strict=True):
                vars(batch)["x"] = x  # else the first view of the step gathers it again
            losses, counts = self.step(batches[0], *joined, frozen=frozen, observe=observe, watched=watched)
        for name, values in losses.items():
            for batch, value in zip(batches, values, strict=True):
                batch.session.losses.add(name, value, counts[name])
        return errors

    @contextmanager
    def _gradients_lent(self, batches: Sequence[Batch]) -> Iterator[None]:
        """Let each client's parameters have its part of the gradients in a block, as after a step alone."""
        gradients = {name: parameter.grad for name, parameter in (self._trained | self._added).items()}
        clients = [trained_by(batch.session) for batch in batches]
        for k, own in enumerate(clients):
            for name, gradient in gradients.items():
                own[name].grad = None if gradient is None else gradient[k]
        yield
        for own in clients:
            for parameter in own.values():
                parameter.grad = None

    def step(
        self,
        first: Batch,
        *joined: Tensor,
        frozen: Callable[[str], Outputs] | None = None,
        observe: Callable[..., None] | None = None,
        watched: ExitStack | None = None,
    ) -> tuple[dict[str, Tensor], Mapping[str, int]]:
        """Take a step of each client. Return the sums of losses by name, (K,) each, and how many each is the sum of.

        :param first: the first client's batch.
        :param joined: the inputs and the labels, (K, B, ...) each; the positions in the clients' samples (K, B).
        :param frozen: returns a frozen model's outputs on the batches, (K, B, ...).
        :param observe: called with the features and the logits before the weights change.
        :param watched: closed after the forward pass, and thus may refuse the step.
        :raises Exception: the step cannot be taken at once. Nothing has changed.
        """
        one = first.session
        total, losses, *outputs = self._forward(first, frozen, *joined)
        if watched is not None:
            watched.close()
        require_gradient(one, total)
        self._optimizer.zero_grad()
        own = self._own if self._alone else []  # for several clients vmap refuses it
        for parameter in own:
            parameter.grad = None
        total.sum().backward()  # a client's objective depends on no other client's weights
        if any(parameter.grad is not None for parameter in own):
            raise NotStackable(REPEATS)
        if one.config.clip_norm is not None:
            _clip([p.grad for p in self._trained.values() if p.grad is not None], one.config.clip_norm)
        if observe is not None:
            observe(*outputs)
        self._optimizer.step()
        for steps in self._steps:
            steps.fill_(steps[0])
        return {name: values.detach() for name, values in losses.items()}, self._counts

    def _forward(self, first: Batch, outputs: Callable[[str], Outputs] | None, *joined: Tensor) -> tuple[Any, ...]:
        """Take the forward pass: the objectives (K,), the losses by name, (K,) each, the features and the logits."""
        one, working = copy.copy(first.session), first.session.working

        def of_path(path: Path) -> Outputs | None:
            return outputs(path.owner) if outputs is not None and working.frozen[path.owner].present else None

        def step(read: Read, model: SplitModel, x: Tensor, y: Tensor, indices: Tensor) -> tuple[Any, ...]:
            one.losses = LossTotals({})
            rules = partial(Rules, [*model.parameters()], self._own, in_order=self._stack.in_order)
            with disable_saved_tensors_hooks(REPEATS):
                with rules():
                    outputs = Outputs(*model(x))
                # Hooks take more than a product of them.
                outputs = Outputs(*(part.contiguous() if part.dim() == 2 else part for part in outputs))
                with rules():
                    total = total_loss(one, StackedStep(first, outputs, read, x, y, indices))
            self._counts = one.losses.counts
            return total, one.losses.sums, *outputs

        results: tuple[Any, ...] = self._mapped(self._stack.known, of_path, step, *joined)
        return results

    def end(self, one: LocalSession, labels: Tensor, chunks: Iterable[Tensor]) -> dict[str, dict[str, Tensor]]:
        """Call ``end_local`` for all clients at once; return the payloads, by namespace and name, (K, ...) each.

        :param one: the session that stands for all clients.
        :param labels: of the clients' samples, (K, n, ...).
        :param chunks: the inputs of their samples in turn, (K, m, ...) each; read if a hook asks for outputs.
        :raises Exception: the hooks cannot be called at once.
        """

        def pass_over(read: Read, model: SplitModel, x: Tensor) -> Outputs:
            with torch.no_grad():
                return Outputs(*model(x))

        def of_path(path: Path) -> tuple[Tensor, ...]:
            outputs = zip(*(self._mapped({}, lambda path: None, pass_over, x) for x in chunks), strict=True)
            return *(torch.cat(parts, dim=1) for parts in outputs), labels

        def hooks(read: Read, model: SplitModel) -> dict[str, dict[str, Tensor]]:
            sent: dict[str, dict[str, Tensor]] = {}
            for _, payload in one.plugins.each("end_local", client=TrainedClient(one, "", read)):
                for namespace, tensors in (payload or {}).items():
                    sent[namespace] = {name: tensor.detach() for name, tensor in tensors.items()}
            return sent

        payloads: dict[str, dict[str, Tensor]] = self._mapped(self._stack.known_at_end, of_path, hooks)
        return {plugin: {name: tensor.clone() for name, tensor in own.items()} for plugin, own in payloads.items()}

    def _mapped(
        self,
        known: dict[Path, None],
        of_path: Callable[[Path], Any],
        function: Callable[..., Any],
        *joined: Tensor,
    ) -> Any:
        """Call a function for each client: its results, stacked. What it reads for the first time is stacked first.

        :param known: what hooks have read of their clients so far.
        :param of_path: returns the stacked outputs that a path names, or None if there are none.
        :param function: takes what reads a value of a client, the model with its weights, and its part of ``joined``.
        """
        outputs: dict[Path, Any] = {}
        while True:
            for path in known:
                if path.kind not in ("frozen", "forward"):
                    self._reads.read(path)
                elif path not in outputs and (stacked_outputs := of_path(path)) is not None:
                    outputs[path] = stacked_outputs
            try:
                return self._vmapped(known, outputs, function, *joined)
            except OutOfOrder:
                self._stack.in_order = True
            except Unread as error:
                if error.path in known:
                    raise NotStackable(f"clients differ in {error}") from error
                known[error.path] = None

    def _vmapped(
        self, known: Iterable[Path], outputs: Mapping[Path, Any], function: Callable[..., Any], *joined: Tensor
    ) -> Any:
        modules = [path for path in known if path.kind == "module"]

        def of_client(
            weights: dict[str, Tensor], tensors: list[Tensor], outputs: dict[Path, Any], *part: Tensor
        ) -> Any:
            lent = Lent()

            def read(path: Path) -> Any:
                if path.kind not in ("frozen", "forward"):
                    return lent.lend(path, self._reads.get(path, weights, tensors))
                if path not in outputs:
                    raise Unread(path)
                return outputs[path]

            own = {f"trained.{name}": weights[name] for name in self._stack.weights}
            for path in modules:
                own |= {f"{path.owner}.{name}": tensor for name, tensor in read(path).items()}
            as_parameters(own, self._parameters)
            result = functional_call(self._models, own, (lambda model: function(read, model, *part),))
            lent.require_unedited()
            return result

        of_all: Any = self._weights, self._reads.tensors, dict(outputs), *joined
        lent = [*self._reads.tensors, *joined, *(tensor for own in outputs.values() for tensor in own)]
        versions = [tensor._version for tensor in lent]  # those inside of vmap count no edits
        if self._alone:  # vmap takes its time
            alone = of_client(*tree_map(lambda tensor: tensor.squeeze(0), of_all))
            results = tree_map(lambda tensor: tensor.unsqueeze(0), alone)
        else:
            results = vmap(of_client)(*of_all)
        if versions != [tensor._version for tensor in lent]:
            raise NotStackable("the model edits its inputs in place, or a plugin a tensor of its client, in a step")
        return results


def _draws(name: str, number: int) -> PluginContractError:
    """Return the error of an ``observe`` that draws what the clients would draw from streams of their own."""
    fault = "draws random numbers from a global generator, which the clients of a stack share"
    hint = f"draw in a block of step.random({name!r}), or leave --stack out"
    return PluginContractError.of(name, fault, hook="observe", round=number, hint=hint)


def _observed(batch: Batch, features: Tensor, logits: Tensor) -> Exception | None:
    """Show a client's step to the plugins that observe steps; return the exception if one raises."""
    try:
        with torch.no_grad():
            batch.session.plugins.call_all("observe", step=BatchStep(batch, Outputs(features, logits)))
    except Exception as error:
        return error
    return None


def _joined(batches: Sequence[Batch]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs (K, B, ...), the labels (K, B, ...) and the positions in the clients' samples (K, B)."""
    one, count = batches[0], len(batches)
    columns: Any = zip(*(batch.picked for batch in batches), strict=True)
    joined = Picked(*(None if parts[0] is None else torch.cat(parts) for parts in columns))  # type: ignore[arg-type]
    if one.session.plugins.implements("local_samples") or joined.drawn is not None:  # which may be of a whole batch
        x = torch.stack([batch.x for batch in batches])
    else:
        x = one.session.data.inputs_of(joined)
        if not isinstance(x, Tensor):
            raise NotStackable("the samples are no tensors")
        x = x.unflatten(0, (count, -1))
    return x, joined.labels.unflatten(0, (count, -1)), joined.positions.view(count, -1)


def _clip(gradients: Sequence[Tensor], most: float) -> None:
    """Clip each client's gradient as :func:`torch.nn.utils.clip_grad_norm_` does."""
    norms = torch.stack([torch.linalg.vector_norm(g.reshape(len(g), -1), dim=1) for g in gradients])  # (tensors, K)
    scale = (most / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.view(-1, *[1] * (gradient.ndim - 1)))
