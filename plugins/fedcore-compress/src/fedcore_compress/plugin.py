"""The plugins: they replace tensors of the update by an encoding, which the server turns back."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedcore import (
    ClientContext,
    ClientUpdate,
    Plugin,
    PluginOptions,
    RunSetup,
    ServerContext,
    check_tensors,
    hookimpl,
)
from fedcore_compress import equations as eq


class _Compressor(Plugin):
    """Sends the movement y_k - w_t of all trained shared parameters as one compressed vector."""

    encodes = ("*",)

    @hookimpl
    def check_run(self, setup: RunSetup) -> None:
        """Refuse clients that start from another model than w_t."""
        setup.require_received_start(self.name)

    @hookimpl
    def begin_local(self, client: ClientContext) -> None:
        """Keep w_t."""
        client.scratch["start"] = client.start

    def moves(self, client: ClientContext, update: ClientUpdate) -> dict[str, Tensor]:
        """Return y_k - w_t by name, of what this client trained."""
        start = client.scratch["start"]
        return {name: update.model[name] - w for name, w in start.items() if name not in update.frozen}

    @staticmethod
    def joined(moves: dict[str, Tensor]) -> Tensor:
        """Return the moves as one vector; it is empty if the client trained nothing that it shares."""
        return torch.cat([move.flatten() for move in moves.values()]) if moves else torch.empty(0)

    @staticmethod
    def encoded(client: ClientContext, update: ClientUpdate, payload: dict[str, Tensor]) -> ClientUpdate:
        """Return the update with ``payload`` in place of the parameters; frozen ones are the server's own.

        A frozen parameter that a plugin before this one changed, such as FedCP's head, goes up as it is.
        """
        start = client.scratch["start"]
        taken = {name for name in start if name not in update.frozen or torch.equal(update.model[name], start[name])}
        return replace(update, model={n: w for n, w in update.model.items() if n not in taken}, payload=payload)

    @staticmethod
    def names(server: ServerContext, update: ClientUpdate) -> list[str]:
        """Return the encoded parameters' names, in the order in which they were joined."""
        return [name for name in server.trainable if name not in update.frozen]

    def decoded(self, server: ServerContext, update: ClientUpdate, vector: Tensor) -> ClientUpdate:
        """Return the update with w_t plus the vector's parts in place of the payload."""
        model = {**{name: server.model[name] for name in update.frozen}, **update.model}
        weights = {name: server.model[name] for name in self.names(server, update)}
        for (name, w), part in zip(weights.items(), vector.split([w.numel() for w in weights.values()]), strict=True):
            model[name] = (w + part.view_as(w)).to(w.dtype)
        return replace(update, model=model, payload={})


class TopKOptions(PluginOptions):
    """Options of top-k."""

    fraction: float = Field(default=0.1, gt=0, le=1, description="Part of the entries that is sent; 1 is FedAvg.")
    error_feedback: bool = Field(default=True, description="Add what was not sent to the client's next update.")


class TopK(_Compressor):
    """Top-k sparsification with error feedback (Stich, Cordonnier, Jaggi, NeurIPS 2018, arXiv 1809.07599, Algorithm 1).

    A client sends the k entries of e_k + y_k - w_t that are largest in magnitude, and keeps the others in e_k.
    """

    Options = TopKOptions
    neutral = {"fraction": 1.0}
    options: TopKOptions

    @hookimpl
    def pre_upload(self, client: ClientContext, update: ClientUpdate) -> ClientUpdate | None:
        """Send the largest entries and their positions; keep the rest."""
        if self.options.fraction == 1:
            return None
        moves = self.moves(client, update)
        if self.options.error_feedback:
            moves = {name: move + client.state.get(name, 0) for name, move in moves.items()}
        vector = self.joined(moves)
        kept = eq.largest(vector, eq.keep_count(len(vector), self.options.fraction))
        payload = {"values": vector[kept], "indices": kept.to(torch.int32)}
        if self.options.error_feedback:
            vector[kept] = 0
            parts = vector.split([move.numel() for move in moves.values()])
            client.state.update({name: part.view_as(moves[name]) for name, part in zip(moves, parts, strict=True)})
        return self.encoded(client, update, payload)

    @hookimpl
    def pre_aggregate(self, server: ServerContext, update: ClientUpdate) -> ClientUpdate | None:
        """Put the entries back; the others did not move."""
        if self.options.fraction == 1:
            return None
        size = sum(server.model[name].numel() for name in self.names(server, update))
        count = eq.keep_count(size, self.options.fraction)
        check_tensors(update.payload, {"values": ((count,), None), "indices": ((count,), torch.int32)})
        indices = update.payload["indices"].long()
        if count and not 0 <= int(indices.min()) <= int(indices.max()) < size:
            raise ValueError(f"'indices' are not positions of {size} entries")
        values = update.payload["values"]
        return self.decoded(server, update, values.new_zeros(size).index_copy_(0, indices, values))


class QSGDOptions(PluginOptions):
    """Options of QSGD."""

    bits: Literal[2, 4, 8] = Field(default=4, description="Bits of an entry: s = 2^(bits-1) - 1 levels, and the sign.")
    bucket: int = Field(default=512, ge=1, le=1 << 24, description="Entries that share one norm (d in the paper).")


class QSGD(_Compressor):
    """QSGD (Alistarh, Grubic, Li, Tomioka, Vojnovic, NeurIPS 2017, arXiv 1610.02132).

    Each entry of y_k - w_t is rounded at random to one of s levels of its bucket's norm; the mean is kept.
    """

    Options = QSGDOptions
    options: QSGDOptions

    @hookimpl
    def pre_upload(self, client: ClientContext, update: ClientUpdate) -> ClientUpdate:
        """Send the levels, packed, and the norms."""
        moves, bits = self.moves(client, update), self.options.bits
        vector = self.joined(moves)
        chances = torch.rand(len(vector), generator=client.generator("qsgd")).to(vector.device)
        numbers, norms = eq.quantise(vector, chances, (1 << (bits - 1)) - 1, self.options.bucket)
        return self.encoded(client, update, {"levels": eq.pack_bits(numbers, bits), "norms": norms})

    @hookimpl
    def pre_aggregate(self, server: ServerContext, update: ClientUpdate) -> ClientUpdate:
        """Put the rounded entries back."""
        size, bits = sum(server.model[name].numel() for name in self.names(server, update)), self.options.bits
        packed, buckets = -(-size // (8 // bits)), -(-size // self.options.bucket)
        check_tensors(update.payload, {"levels": ((packed,), torch.uint8), "norms": ((buckets,), None)})
        numbers = eq.unpack_bits(update.payload["levels"], bits, size)
        levels = (1 << (bits - 1)) - 1
        return self.decoded(
            server, update, eq.dequantise(numbers, update.payload["norms"], levels, self.options.bucket)
        )
