"""SCAFFOLD as a fedcore plugin: control variates against client drift."""

from fedcore_scaffold.equations import server_update
from fedcore_scaffold.plugin import Scaffold, ScaffoldOptions

__all__ = ["Scaffold", "ScaffoldOptions", "server_update"]
