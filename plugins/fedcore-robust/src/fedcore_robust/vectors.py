"""Rules on whole updates y_k - w_t as vectors: centred clipping, geometric median, Bulyan, FLTrust."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import torch
from pydantic import Field
from torch import Tensor, nn

from fedcore import ClientUpdate, DivergedError, ServerContext, hookimpl
from fedcore.models import frozen_modules, smallest_batch
from fedcore_functional import moved_model, update_vector
from fedcore_robust.heterogeneity import (
    bulyan_selection,
    centred_clipping,
    geometric_median,
    mean_around_median,
    trusted_mean,
)
from fedcore_robust.rules import Rule, RuleOptions, distances_of, medians


class VectorRule(Rule):
    """A rule of the vectors y_k - w_t of all trainable parameters; buffers are medians over the clients."""

    def combined(self, server: ServerContext, vectors: Tensor) -> Tensor:
        """Return the step of the global model, (d,), from the clients' updates (n, d)."""
        raise NotImplementedError

    @hookimpl
    def aggregate(self, server: ServerContext, updates: Sequence[ClientUpdate]) -> dict[str, Tensor]:
        """Return w_t plus the rule's step."""
        names = server.trainable
        step = self.combined(server, _vectors(server, self.mixed(server, updates), names))
        return {**medians(updates), **moved_model(server.model, step, names)}


class CentredClipOptions(RuleOptions):
    """Options of centred clipping."""

    radius: float = Field(default=1.0, gt=0, description="tau: largest distance to the centre that counts.")
    iterations: int = Field(default=3, ge=1, description="Steps from the centre, L.")


class CentredClip(VectorRule):
    """Centred clipping (Karimireddy, He, Jaggi, ICML 2021, arXiv 2012.10333) around the step of the last round.

    The centre of the first round is 0: the model does not move.
    """

    Options = CentredClipOptions
    options: CentredClipOptions

    def combined(self, server: ServerContext, vectors: Tensor) -> Tensor:
        """Return the clipped mean around the last round's step, and keep it for the next round."""
        centre = server.state.get("step")
        centre = vectors.new_zeros(vectors.shape[1]) if centre is None else centre
        step = centred_clipping(vectors, centre, self.options.radius, self.options.iterations)
        server.state["step"] = step
        return step


class GeometricMedianOptions(RuleOptions):
    """Options of the geometric median."""

    smoothing: float = Field(default=1e-6, gt=0, description="nu: smaller distances count as this one.")
    iterations: int = Field(
        default=500, ge=1, description="Most steps of Weiszfeld's algorithm; it ends earlier once a step is small."
    )


class GeometricMedian(VectorRule):
    """RFA: geometric median by smoothed Weiszfeld (Pillutla, Kakade, Harchaoui, IEEE TSP 2022, arXiv 1912.13445)."""

    Options = GeometricMedianOptions
    options: GeometricMedianOptions

    def combined(self, server: ServerContext, vectors: Tensor) -> Tensor:
        """Return the geometric median of the updates."""
        return geometric_median(vectors, self.options.smoothing, self.options.iterations)


class Bulyan(Rule):
    """Bulyan of Krum (El Mhamdi, Guerraoui, Rouault, ICML 2018, arXiv 1802.07927).

    Krum chooses n - 2f updates in turn; of every coordinate the n - 4f values nearest to their median are averaged.
    """

    @hookimpl
    def aggregate(self, server: ServerContext, updates: Sequence[ClientUpdate]) -> dict[str, Tensor]:
        """Return the means around the chosen updates' medians; buffers are medians of all."""
        stacked, names = self.mixed(server, updates), server.trainable
        distances = distances_of(stacked, names)
        n = len(distances)
        byzantine = self.attackers(server, n, (n - 3) // 4, len(updates))
        chosen = bulyan_selection(distances, byzantine)
        count = len(chosen) - 2 * byzantine
        return {**medians(updates), **{name: mean_around_median(stacked(name)[chosen], count) for name in names}}


class FLTrust(VectorRule):
    """FLTrust (Cao, Fang, Liu, Gong, NDSS 2021, arXiv 2012.13995): updates count by their cosine to the server's own.

    The server trains w_t on the ``--public`` samples as a client would, with SGD.
    """

    reads = ("public",)
    assumes = ("cross-entropy",)  # the server trains by it

    def combined(self, server: ServerContext, vectors: Tensor) -> Tensor:
        """Return the trusted mean of the updates; tell where none is trusted."""
        where = f"{self.name}, round {server.round + 1}"
        own = update_vector(self.trained(server), server.model, server.trainable)
        if not own.isfinite().all():
            raise DivergedError(f"{where}: the server's own training on --public diverged; lower --lr")
        step = trusted_mean(vectors, own)
        if not step.any():
            server.note("no update has a positive cosine to the server's own, so the model stays as it is")
        return step

    def trained(self, server: ServerContext) -> dict[str, Tensor]:
        """Return the model that the server trains on the public samples, by name, on the CPU."""
        config, public, stream = server.config, server.public, server.generator("fltrust/root")
        assert public is not None
        model = server.network().train()
        for name in server.frozen:  # no client moved it: neither does the server
            model.get_parameter(name).requires_grad_(False)
        for module in frozen_modules(model):
            module.eval()
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(parameters, server.lr, momentum=config.momentum, weight_decay=config.weight_decay)
        unit, work = config.local_work
        smallest = config.smallest_batch(
            len(public), smallest_batch(model, public.inputs(torch.zeros(1, dtype=torch.int64)))
        )
        passes = (torch.randperm(len(public), generator=stream) for _ in range(work))  # a pass takes a step or more
        batches = (batch for order in passes for batch in order.split(config.batch_size) if len(batch) >= smallest)
        with torch.enable_grad(), torch.random.fork_rng():
            torch.manual_seed(stream.initial_seed())  # for dropout
            for batch in islice(batches, work if unit == "steps" else None):
                optimizer.zero_grad()
                logits = model(public.inputs(batch)).logits
                server.task.loss(logits, public.labels[batch.to(public.labels.device)]).backward()
                if config.clip_norm is not None:
                    nn.utils.clip_grad_norm_(parameters, config.clip_norm)
                optimizer.step()
        return {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}


def _vectors(server: ServerContext, stacked: Callable[[str], Tensor], names: Sequence[str]) -> Tensor:
    """Return the differences to w_t as rows, (n, d) float64."""
    differences = [stacked(name).double() - server.model[name].double() for name in names]
    return torch.cat([d.reshape(len(d), -1) for d in differences], dim=1)  # a parameter may be one number: (n,)
