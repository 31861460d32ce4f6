"""Why there is no prefill server: the reasons that a probe finds, and when they are logged."""

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import zmq

from pdserve.transfer.control.events import MOST_SHOWN, PeerSnapshot, describe_absence
from pdserve.transfer.control.reachability import (
    GRACE_S,
    HTTP_PORT,
    LOG_INTERVAL_S,
    MOST_PROBES,
    Reachability,
    find_reason,
)
from tests.cluster.servers import wait_until
from tests.ports import free_port

REFUSED = "connection refused: nothing listens there"


@contextmanager
def listening(answers: bytes | None) -> Iterator[int]:
    """The port of a server that sends these bytes to its client, or sends nothing and keeps the connection open."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connections = []

        def accept() -> None:
            connection, _ = server.accept()
            connections.append(connection)
            if answers is not None:
                connection.sendall(answers)
                with suppress(OSError):  # the client may have closed it
                    connection.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=accept)
        thread.start()
        yield server.getsockname()[1]
        thread.join()
        for connection in connections:
            connection.close()


def test_closed_port_is_the_reason() -> None:
    assert find_reason("127.0.0.1", free_port()) == REFUSED


def test_http_port_is_the_reason() -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert find_reason("127.0.0.1", server.server_port) == HTTP_PORT
        thread.join()


@pytest.mark.parametrize("curve", [False, True])
def test_a_control_port_gives_no_reason(curve: bool) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        if curve:
            _, secret = zmq.curve_keypair()
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.CURVE_SECRETKEY, secret)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        assert find_reason("127.0.0.1", port) is None


@pytest.mark.parametrize(
    ("answers", "reason"),
    [(b"SSH-2.0-OpenSSH_9.6\r\n", "not the control port"), (None, "does not answer"), (b"", None)],
)
def test_other_protocol_is_the_reason(answers: bytes | None, reason: str | None) -> None:
    with listening(answers) as port:
        found = find_reason("127.0.0.1", port)
    assert (found is None) if reason is None else (reason in str(found))


def test_missing_machine_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(_address: object, timeout: float) -> socket.socket:
        raise TimeoutError(timeout)

    monkeypatch.setattr(socket, "create_connection", connect)
    assert find_reason("10.255.255.1", 8998) == "no answer within 2 s: no such machine, or a firewall"


def peer(state: str = "connecting", detail: str | None = REFUSED, endpoint: str = "p:1") -> PeerSnapshot:
    return PeerSnapshot(endpoint, state, detail=detail)  # type: ignore[arg-type]  # one of the states


def test_absence_is_logged_at_once_and_every_30_s(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    known = Reachability()
    said_at = []
    for tenth in range(1000):
        caplog.clear()
        known.report([peer()], tenth / 10)
        if caplog.messages:
            assert caplog.messages == [f"no prefill server is paired: p:1: {REFUSED}"]
            said_at.append(tenth / 10)
    assert said_at == [GRACE_S, *(GRACE_S + LOG_INTERVAL_S * n for n in (1, 2, 3))]


def test_absence_is_not_logged_while_a_peer_is_paired(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    known = Reachability()
    for second in range(100):
        known.report([peer("paired", None), peer(endpoint="q:1")], second)
    assert caplog.messages == []
    for tenth in range(20):
        known.report([peer("lost", "no heartbeat"), peer(endpoint="q:1")], 100 + tenth / 10)
    assert caplog.messages == [f"no prefill server is paired: p:1: no heartbeat; q:1: {REFUSED}"]


def test_absence_is_not_logged_during_the_grace_period(caplog: pytest.LogCaptureFixture) -> None:
    known = Reachability()
    known.report([], 0.0)
    known.report([peer()], 0.5)
    known.report([peer("paired", None)], 0.5 + 0.9 * GRACE_S)
    known.report([peer("paired", None)], 100.0)
    assert caplog.messages == []


def test_report_returns_changes_once() -> None:
    known = Reachability()
    assert known.report([peer()], 0.0) == {"p:1": REFUSED}
    assert known.report([peer()], 0.1) is None
    assert known.report([peer("paired", None)], 0.2) == {}
    assert known.report([peer("paired", None)], 0.3) is None


def test_endpoint_is_probed_at_intervals() -> None:
    probed: list[tuple[str, int]] = []
    reasons: list[str | None] = [REFUSED, None]

    def probe(host: str, port: int) -> str | None:
        probed.append((host, port))
        return reasons[len(probed) - 1]

    known = Reachability(probe)
    known.failed("p:1", "10.0.0.1", 0.0)
    wait_until(lambda: known.reason("p:1") == REFUSED, 5, "probed")
    known.failed("p:1", "10.0.0.1", 9.0)
    known.failed("p:1", "10.0.0.1", 10.0)
    wait_until(lambda: known.reason("p:1") is None, 5, "probed again")
    assert probed == [("10.0.0.1", 1)] * 2


def test_probe_that_ends_after_the_endpoint_was_reached_gives_no_reason() -> None:
    go = threading.Event()

    def probe(_host: str, _port: int) -> str | None:
        assert go.wait(5)
        return REFUSED

    known = Reachability(probe)
    known.failed("p:1", "10.0.0.1", 0.0)
    known.forget("p:1")
    go.set()
    known.failed("q:1", "10.0.0.1", 0.0)
    wait_until(lambda: known.reason("q:1") == REFUSED, 5, "probed")
    assert known.reason("p:1") is None


def test_probe_of_an_earlier_silence_gives_no_reason() -> None:
    """The endpoint was reached, and has failed again, while it ran."""
    old, new = threading.Event(), threading.Event()
    probes = iter((old, new))

    def probe(_host: str, _port: int) -> str | None:
        begun.set()
        assert next(probes).wait(5)
        return REFUSED if old.is_set() and not new.is_set() else "hangs"

    begun = threading.Event()
    known = Reachability(probe)
    known.failed("p:1", "10.0.0.1", 0.0)
    assert begun.wait(5)
    known.forget("p:1")
    known.failed("p:1", "10.0.0.1", 1.0)
    begun.clear()
    old.set()
    assert begun.wait(5), "the second probe begins when the first has ended"
    assert known.reason("p:1") is None
    new.set()
    wait_until(lambda: known.reason("p:1") == "hangs", 5, "probed again")


def test_number_of_waiting_probes_is_bounded() -> None:
    """Requests may name thousands of endpoints."""
    go = threading.Event()
    probed: list[str] = []

    def probe(host: str, _port: int) -> str | None:
        probed.append(host)
        assert go.wait(5)
        return REFUSED

    known = Reachability(probe)
    for number in range(1000):
        known.failed(f"p{number}:1", "10.0.0.1", 0.0)
    go.set()
    known.failed("last:1", "10.0.0.1", 1.0)
    wait_until(lambda: len(probed) >= MOST_PROBES, 5, "probed")
    assert len(probed) <= MOST_PROBES + 2


def test_many_endpoints_are_logged_in_one_line() -> None:
    text = describe_absence({f"p{number}:1": "gone" for number in range(100)})
    assert text == "p0:1: gone; p1:1: gone; p2:1: gone; p3:1: gone; and 96 more"
    assert text.count("gone") == MOST_SHOWN
