"""What authors of plugins test with."""

from fedcore.testing.sync import HostSync, forbid_host_sync

__all__ = ["HostSync", "forbid_host_sync"]
