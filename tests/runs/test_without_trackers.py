"""Without fedcore-trackers."""

from __future__ import annotations

from fedcore.base import registry
from fedcore.base.errors import ConfigError
from fedcore_testing import federate
from tests.sentences import raises


def test_without_this_package_a_tracker_is_answered_with_it(tmp_path, monkeypatch):
    known = registry.available
    absent = ("tracker", "tracking")
    monkeypatch.setattr(registry, "available", lambda kind: {} if kind in absent else known(kind))
    with raises(ConfigError, "--tracker tensorboard", "fedcore-trackers"):
        federate(tmp_path, rounds=1, trackers={"tensorboard": {}})
    assert not list(tmp_path.rglob("config.yaml"))
    federate(tmp_path, rounds=1)
