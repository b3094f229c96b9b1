"""What plugins tell the user: ``server.note`` and ``setup.note``."""

from __future__ import annotations

import pytest

from fedcore import Plugin, hookimpl
from fedcore_testing import federate, records


class Talks(Plugin):
    """Tells something in hooks of the server, each of them more than once."""

    @hookimpl
    def check_run(self, setup):
        setup.note(self.name, "the model has a head")

    @hookimpl
    def begin_round(self, server):
        server.note("it begins")
        server.note("it begins")

    @hookimpl
    def broadcast_to(self, server, client):
        server.note(f"sent to {client}")

    @hookimpl
    def accumulate(self, server, update):
        server.note(f"received from {update.client}")

    @hookimpl
    def report(self, server):
        server.note("a report")
        return {}

    @hookimpl
    def post_train(self, server):
        server.note("it ends")


def told(tmp_path, **options):
    """Return the notes in the order of the output, and those of each line of the records."""
    events = []
    follow = lambda event, details: events.extend(  # noqa: E731
        details["notes"] if event == "start" else [details["message"]] if event == "note" else []
    )
    result = federate(tmp_path, Talks, notify=follow, rounds=2, clients=3, participation=1.0, **options)
    return [event for event in events if event.startswith("talks")], [record["notes"] for record in records(result)]


@pytest.mark.parametrize("workers", [0, 2])
def test_each_note_is_told_once_and_recorded_with_its_round_whatever_the_workers(tmp_path, workers):
    output, lines = told(tmp_path, workers=workers)
    first = ["it begins", *(f"received from {k}" for k in range(3)), *(f"sent to {k}" for k in range(3))]
    assert output == [
        "talks: the model has a head",
        *(f"talks, round 1: {text}" for text in first),
        "talks: it ends",
    ]
    assert lines == [
        *[[{"plugin": "talks", "message": text} for text in first]] * 2,
        [{"plugin": "talks", "message": "it ends"}],
    ]
