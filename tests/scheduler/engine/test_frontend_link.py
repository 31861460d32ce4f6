"""The leader's end of the socket to its front, with the test in the place of the front."""

import queue
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from pdserve.scheduler.engine.frontend_link import FrontLink
from pdserve.scheduler.messages.frontend import Cancel, StartupFailed, ToFrontBatch, Tokens


class Front:
    def __init__(self, socket: "zmq.Socket[bytes]", address: str) -> None:
        self.inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.socket = socket
        self.link = FrontLink(address, self.inbox.put)

    def receive(self) -> ToFrontBatch:
        assert self.socket.poll(5000), "the leader is silent"
        batch: ToFrontBatch = msgspec.msgpack.decode(self.socket.recv(), type=ToFrontBatch)
        return batch


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Front]:
    address = f"ipc://{tmp_path}/front"
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.set_hwm(0)
        socket.bind(address)
        front = Front(socket, address)
        yield front
        front.link.close()


def test_the_tokens_of_a_step_travel_together(front: Front) -> None:
    step = [Tokens(f"r{row}", (row,)) for row in range(128)]
    front.link.send(*step)
    assert front.receive() == step


def test_nothing_is_lost_or_out_of_order_at_the_end(front: Front) -> None:
    sent = [Tokens("r", (token,)) for token in range(1000)]
    for message in sent:
        front.link.send(message)
    front.link.send(StartupFailed("the end"))
    front.link.close()
    received: ToFrontBatch = []
    while StartupFailed("the end") not in received:
        received += front.receive()
    assert received == [*sent, StartupFailed("the end")]


def test_what_the_front_says_arrives_while_others_send(front: Front) -> None:
    for number in range(100):
        front.link.send(Tokens("r", (number,)))
        front.socket.send(msgspec.msgpack.encode(Cancel(f"r{number}")))
    assert [front.inbox.get(timeout=5) for _ in range(100)] == [Cancel(f"r{number}") for number in range(100)]
