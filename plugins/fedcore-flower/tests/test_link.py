"""The run's grid, which the ServerApp lends to the server's process."""

from __future__ import annotations

import socket
import threading
from multiprocessing.connection import Connection

import pytest

pytest.importorskip("flwr", reason="flwr is not installed here: make test-flower runs these in .venv-flower")

import httpx
from flwr.app import Error, Message
from flwr.supercore.task_identity import TaskIdentity

from fedcore import FedcoreError
from fedcore.engines import ClientFailure
from fedcore_flower import server_app
from fedcore_flower.courier import LostMessage
from fedcore_flower.link import LOST, FlowerLink
from fedcore_flower.records import INLINE, from_content, to_content
from fedcore_flower.superlink import SuperLink

NODES = [70, 80, 90]


class Grid:
    """A grid whose nodes answer with what they got, or as a test says."""

    def __init__(self):
        self.online, self.sent, self.replies = [90, 70], [], {}

    def get_node_ids(self):
        return self.online

    def push_messages(self, messages):
        (message,) = messages
        if message.metadata.dst_node_id not in self.online:
            return [None]
        ticket = str(len(self.sent))
        self.sent.append(message)
        self.replies[ticket] = message.content
        return [ticket]

    def pull_messages(self, ids):
        replies = []
        for ticket in ids:
            reply = self.replies.pop(ticket, None)
            if isinstance(reply, Exception):
                raise reply
            if reply is not None:
                message = self.sent[int(ticket)]
                message.metadata.__dict__["_message_id"] = ticket
                replies.append(Message(reply, reply_to=message))
        return replies


@pytest.fixture
def grid():
    return Grid()


@pytest.fixture
def link(grid, tmp_path, monkeypatch):
    """A link whose ServerApp runs in a thread."""
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # Flower's process of a ServerApp has it
    path = str(tmp_path / "app")
    monkeypatch.setenv(server_app.SOCKET, path)
    superlink = SuperLink.__new__(SuperLink)
    superlink._children = {}
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(1)
        app = threading.Thread(target=lambda: server_app.app(grid=grid, context=None))
        app.start()
        superlink._app = Connection(server.accept()[0].detach())
    yield FlowerLink(superlink, NODES)
    superlink._app.close()
    app.join(60)
    assert not app.is_alive()


def test_messages_go_to_the_client_s_node_and_replies_come_back(link, grid):
    large = bytes(INLINE + 1)
    assert link.online() == {0, 2}
    ticket = link.send(2, "train", {"head": b"small", "shared": large}, 60)
    assert (grid.sent[0].metadata.dst_node_id, grid.sent[0].metadata.message_type) == (90, "train.fedcore")
    assert grid.sent[0].metadata.ttl == 60
    assert list(link.collect([ticket])) == [(ticket, {"head": b"small", "shared": large})]
    assert list(link.collect([ticket])) == []
    assert link.send(1, "train", {"head": b"small"}, 60) is None


def test_a_round_s_payload_goes_once_to_the_server_app(link, grid, monkeypatch):
    payload, other = bytes(INLINE + 1), bytes(INLINE + 2)
    call, went = link._superlink.call, []
    monkeypatch.setattr(
        link._superlink, "call", lambda name, blobs=None, **more: went.append(blobs) or call(name, blobs, **more)
    )
    messages = [{"head": b"1", "shared": payload}, {"head": b"2"}, {"head": b"3", "shared": payload}, {"shared": other}]
    for message in messages:
        link.send(0, "train", message, 60)
    assert [sorted(blobs) for blobs in went] == [["head", "shared"], ["head"], ["head"], ["shared"]]
    assert [from_content(message.content) for message in grid.sent] == messages


def test_an_error_of_flower_is_a_failure_or_a_lost_message(link, grid):
    tickets = [link.send(0, "train", {"head": b""}, 60) for _ in range(2)]
    grid.replies = {"0": Error(LOST[0], "expired"), "1": Error(12345, "odd")}
    (_, lost), (_, failed) = link.collect(tickets)
    assert isinstance(lost, LostMessage)
    assert "expired" in lost.message
    assert (failed.kind, type(failed)) == ("worker_lost", ClientFailure)


def test_a_reply_that_flower_cannot_decode_is_its_client_s_failure(link, grid):
    tickets = [link.send(client, "train", {"head": b"here"}, 60) for client in (0, 2)]
    grid.replies[tickets[0]] = ValueError("nonsense")
    assert list(link.collect(tickets)) == []  # which of them it was is not known
    grid.replies[tickets[0]] = ValueError("nonsense")
    (first, failure), (second, reply) = link.collect(tickets)
    assert [first, second] == tickets
    assert (failure.kind, "nonsense" in failure.message) == ("rejected", True)
    assert reply == {"head": b"here"}


def test_a_server_app_that_ends_is_an_error_for_the_user(link, grid, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    ticket = link.send(0, "train", {"head": b""}, 60)
    grid.replies[ticket] = httpx.ConnectError("gone")
    with pytest.raises(FedcoreError, match="the run's ServerApp has ended"):
        list(link.collect([ticket]))


def test_a_message_that_is_not_of_fedcore_has_no_blobs():
    assert from_content(to_content({"head": b"1"})) == {"head": b"1"}
    assert from_content({}) == {}
