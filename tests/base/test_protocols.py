"""The table of evaluation protocols is the one that summaries and clients use."""

from __future__ import annotations

from fedcore.base.protocols import EVALUATED, ON_CLIENTS, PROTOCOLS, VALIDATION


def test_each_protocol_has_its_words_and_they_differ():
    assert [name for name, protocol in PROTOCOLS.items() if protocol.name != name] == []
    assert len({protocol.heading for protocol in PROTOCOLS.values()}) == len(PROTOCOLS)
    assert len({protocol.measures for protocol in PROTOCOLS.values()}) == len(PROTOCOLS)


def test_what_is_validated_on_is_held_out():
    """The best round is never chosen on the server's test set."""
    assert all(PROTOCOLS[name].held_out and PROTOCOLS[name].on_clients for name in VALIDATION)
    assert set(ON_CLIENTS) < set(EVALUATED) < set(PROTOCOLS)
