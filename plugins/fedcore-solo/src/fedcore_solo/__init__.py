"""SOLO, local training only, as a fedcore plugin."""

from __future__ import annotations

from fedcore import Plugin, hookimpl

__all__ = ["Solo"]


class Solo(Plugin):
    """SOLO, the local-only baseline of MOON (Li, He, Song, CVPR 2021, arXiv 2103.16257).

    Client i minimises its own F_i(w_i) from w_0 on; nothing is sent and nothing is averaged.
    """

    @hookimpl
    def personal_parameters(self) -> list[str]:
        """Keep the whole model, buffers included, on each client."""
        return ["*"]
