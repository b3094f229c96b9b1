"""Local differential privacy: every client clips what it sends and adds the noise itself, before anything leaves it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from fedcore import (
    ClientContext,
    ClientUpdate,
    Plugin,
    PluginContractError,
    RunSetup,
    ServerContext,
    hookimpl,
)
from fedcore_dp.accountant import count_cohort, counts_of, privacy_report, spent_by
from fedcore_dp.clipping import clip_factor, joint_norm
from fedcore_dp.conflicts import (
    LEAVES_CLIENTS,
    refuse_chosen_rounds,
    refuse_hooks,
    refuse_questions,
    refuse_shared_buffers,
    refuse_step_readers,
)
from fedcore_dp.noise import secure_normal, seeded_normal
from fedcore_dp.options import UpdateOptions

MODEL = ""
Vector = dict[tuple[str, str], Tensor]
"""Tensors that are clipped as one: (plugin, or MODEL, and name) -> values, float64 on the CPU."""


class LocalDPOptions(UpdateOptions):
    """Options of local differential privacy."""

    payload_clip: float = Field(
        default=1.0,
        gt=0,
        description="Largest norm of what a client sends for another plugin: of its floating tensors as one vector, "
        "and of its whole numbers and booleans as one.",
    )
    delta: float = Field(default=1e-5, gt=0, lt=1, description="delta at which a client's epsilon is reported.")


class LocalDP(Plugin[LocalDPOptions]):
    """Local differential privacy of what clients upload: the Gaussian mechanism on each client, for any server.

    Update and payloads are J vectors, clipped to their bounds S_j and released together: every number of vector j gets
    noise of standard deviation z S_j sqrt(J), which makes them one release with noise multiplier z.
    """

    neutral = {"clip": 1e300, "payload_clip": 1e300, "noise_multiplier": 0.0}

    @hookimpl
    def check_run(self, setup: RunSetup) -> None:
        """Refuse shared buffers, a chosen round, and plugins whose clients send something past ``pre_upload``.

        Also without noise, refuse clients that start from another model than w_t.
        """
        setup.require_received_start(self.name)
        if self.options.private:
            refuse_step_readers(setup, self.name)
            refuse_shared_buffers(setup, self.name)
            refuse_chosen_rounds(setup, self.name)
            refuse_hooks(setup, self.name, LEAVES_CLIENTS)
            refuse_questions(setup, self.name)

    # --- client --------------------------------------------------------------------------------------------

    @hookimpl
    def begin_local(self, client: ClientContext) -> None:
        """Keep w_t."""
        client.scratch["start"] = client.start

    @hookimpl
    def guard_upload(self, client: ClientContext, update: ClientUpdate) -> ClientUpdate | None:
        """Clip and noise all that goes up; the numbers of samples and steps and the losses become constants."""
        start = {name: _exact(p) for name, p in client.scratch["start"].items()}
        model, payload = dict(update.model), {plugin: dict(tensors) for plugin, tensors in update.payload.items()}
        moves = {(MODEL, name): _exact(model[name]) - start[name] for name in model if name in start}
        vectors = [vector for vector in (moves, *_vectors(payload)) if vector]  # the model may stay on the client
        for (plugin, name), value in self._released(client, vectors).items():
            if plugin == MODEL:
                model[name] = _like(start[name] + value, model[name])
            else:
                payload[plugin][name] = _like(value, payload[plugin][name])
        if not self.options.private:
            return replace(update, model=model, payload=payload)
        return replace(update, model=model, payload=payload, samples=1, steps=1, metrics={"losses": {}})

    def _released(self, client: ClientContext, vectors: list[Vector]) -> Vector:
        """Return the tensors that replace those of the vectors; others stay."""
        options = self.options
        normal = seeded_normal(client.generator("local-dp")) if options.seed_noise else secure_normal
        released: Vector = {}
        for vector in vectors:
            bound = options.clip if any(plugin == MODEL for plugin, _ in vector) else options.payload_clip
            scale = options.noise_multiplier * bound * math.sqrt(len(vectors))
            factor = clip_factor(joint_norm(vector.values()), bound)
            for key, value in vector.items():
                if self.options.private:
                    released[key] = factor * value + scale * normal(value.shape)
                elif factor < 1:
                    released[key] = factor * value
        return released

    # --- server --------------------------------------------------------------------------------------------

    @hookimpl
    def begin_round(self, server: ServerContext) -> None:
        """Count each client's releases."""
        count_cohort(server, "releases")

    @hookimpl
    def report(self, server: ServerContext) -> dict[str, Any]:
        """Report the epsilon of the client that took part most often; none where there is no noise.

        Two data sets can give updates on opposite sides of the ball, 2 S apart: the multiplier counts half.
        """
        options = self.options
        spent = {}
        if self.options.private:
            releases = int(counts_of(server, "releases").max())
            spent = spent_by(options.accountant, options.noise_multiplier / 2, 1.0, releases, options.delta)
        return privacy_report(spent, options.delta, seeded=options.seed_noise)


def _vectors(payload: Mapping[str, Mapping[str, Tensor]]) -> Iterator[Vector]:
    """Yield what each plugin sends as two vectors, numbers and counts, without empty ones.

    :raises PluginContractError: complex numbers, which have no noise here.
    """
    for plugin, tensors in payload.items():
        if sent := next((name for name, tensor in tensors.items() if tensor.is_complex()), None):
            hint = "send real and imaginary parts, or leave one of the two plugins out"
            raise PluginContractError.of(
                plugin, f"sends {sent!r}, to whose complex numbers local-dp adds no noise", hint=hint
            )
        for floating in (True, False):
            vector = {(plugin, name): _exact(t) for name, t in tensors.items() if t.is_floating_point() == floating}
            if vector:
                yield vector


def _exact(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64)


def _like(value: Tensor, tensor: Tensor) -> Tensor:
    """Return values in another tensor's dtype: whole numbers are taken for counts, booleans are true above a half."""
    if tensor.dtype == torch.bool:
        return value > 0.5
    if tensor.is_floating_point():
        limits = torch.finfo(tensor.dtype)
        return value.clamp(limits.min, limits.max).to(tensor.dtype)
    return value.round().clamp(0, min(torch.iinfo(tensor.dtype).max, 1 << 53)).to(tensor.dtype)
