"""Norm clipping: no client moves the model further than a bound."""

from __future__ import annotations

import math
from dataclasses import replace

from pydantic import Field
from torch import Tensor

from fedcore import ClientUpdate, Plugin, PluginOptions, RunSetup, ServerContext, hookimpl
from fedcore_robust.equations import clip_factor


class NormClipOptions(PluginOptions):
    """Options of norm clipping."""

    bound: float = Field(default=1.0, gt=0, description="M: largest Euclidean norm of a client's update y_k - w_t.")


class NormClip(Plugin[NormClipOptions]):
    """Norm clipping (Sun, Kairouz, Suresh, McMahan, 2019, arXiv 1911.07963, norm thresholding of updates).

    An update counts as (y_k - w_t) / max(1, |y_k - w_t| / M); goes before any aggregation and
    after all other changes of an update.
    """

    neutral = {"bound": 1e300}
    assumes = ("one-model",)

    @hookimpl
    def check_run(self, setup: RunSetup) -> None:
        """Refuse a run in which clients share nothing that they train."""
        setup.require_shared(self.name)

    @hookimpl(trylast=True)  # only then y_k - w_t is the client's movement: FedBuff's late clients started elsewhere
    def pre_aggregate(self, server: ServerContext, update: ClientUpdate) -> ClientUpdate | None:
        """Shorten an update that is too long; floating buffers go the same part of their way."""
        squares = (_moved(server.model[name], update.model[name]).square().sum() for name in server.trainable)
        factor = clip_factor(math.sqrt(sum(float(square) for square in squares)), self.options.bound)
        if factor == 1:
            return None
        shortened = {
            name: (w.double() + factor * _moved(w, tensor)).to(tensor.dtype)
            for name, tensor in update.model.items()
            if (w := server.model[name]).is_floating_point()
        }
        return replace(update, model={**update.model, **shortened})


def _moved(start: Tensor, end: Tensor) -> Tensor:
    return end.double() - start.double()
