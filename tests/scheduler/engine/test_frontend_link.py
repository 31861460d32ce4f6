"""The leader's end of the socket to the frontend. The test acts as the frontend."""

import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from pdserve.scheduler.engine import frontend_link
from pdserve.scheduler.engine.frontend_link import FrontendLink
from pdserve.scheduler.messages.frontend import Cancel, StartupFailed, Status, ToFrontendBatch, Tokens


class Frontend:
    def __init__(self, socket: "zmq.Socket[bytes]", address: str) -> None:
        self.inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.socket = socket
        self.link = FrontendLink(address, self.inbox.put)

    def receive(self) -> ToFrontendBatch:
        assert self.socket.poll(5000), "the leader is silent"
        batch: ToFrontendBatch = msgspec.msgpack.decode(self.socket.recv(), type=ToFrontendBatch)
        return batch


@pytest.fixture
def frontend(tmp_path: Path) -> Iterator[Frontend]:
    address = f"ipc://{tmp_path}/front"
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.set_hwm(0)
        socket.bind(address)
        frontend = Frontend(socket, address)
        yield frontend
        frontend.link.close()


def test_tokens_of_a_step_are_sent_in_one_message(frontend: Frontend) -> None:
    step = [Tokens(f"r{row}", (row,)) for row in range(128)]
    frontend.link.send(*step)
    assert frontend.receive() == step


def test_close_sends_all_queued_messages_in_order(frontend: Frontend) -> None:
    sent = [Tokens("r", (token,)) for token in range(1000)]
    for message in sent:
        frontend.link.send(message)
    frontend.link.send(StartupFailed("the end"))
    frontend.link.close()
    received: ToFrontendBatch = []
    while StartupFailed("the end") not in received:
        received += frontend.receive()
    assert received == [*sent, StartupFailed("the end")]


def test_messages_of_the_frontend_arrive_while_other_threads_send(frontend: Frontend) -> None:
    for number in range(100):
        frontend.link.send(Tokens("r", (number,)))
        frontend.socket.send(msgspec.msgpack.encode(Cancel(f"r{number}")))
    assert [frontend.inbox.get(timeout=5) for _ in range(100)] == [Cancel(f"r{number}") for number in range(100)]


def test_messages_arrive_after_an_error_in_the_status(frontend: Frontend, caplog: pytest.LogCaptureFixture) -> None:
    failed = threading.Event()

    def status() -> Status:
        failed.set()
        raise RuntimeError("dictionary changed size during iteration")

    frontend.link.start_status(status)
    assert failed.wait(10)
    frontend.socket.send(msgspec.msgpack.encode(Cancel("r")))
    assert frontend.inbox.get(timeout=5) == Cancel("r")
    assert "the status cannot be sent" in caplog.text


def test_close_does_not_wait_for_a_frontend_that_has_exited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend_link, "LINGER_MS", 60_000)
    link = FrontendLink(f"ipc://{tmp_path}/nobody", lambda _: None)
    link.send(Tokens("r", (1,)))
    link.lost()
    closing = threading.Thread(target=link.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
    link.lost()
