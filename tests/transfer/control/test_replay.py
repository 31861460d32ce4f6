"""Replay attacks: recorded messages of a decode server, sent again by another process, do not affect its pairing."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from pdserve.transfer.control.events import MessageReceived, PeerClosed, PeerUp
from pdserve.transfer.control.session import Timing
from pdserve.transfer.protocol.messages import Abort, AbortAck, Heartbeat, InstanceId, Load, Welcome
from tests.transfer.control.tcp_proxy import TcpProxy
from tests.transfer.control.test_control import Cluster, RawPeer, eventually, hello, key

PATIENT = Timing(heartbeat_interval_s=0.1, peer_timeout_s=30.0)
"""No peer is lost because the test machine is busy."""
GREETING_BYTES = 64
DECODE, PREFILL = InstanceId("d1"), InstanceId("p1")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(stack)


def test_replayed_hello_pairs_only_after_the_first_connection_is_closed(cluster: Cluster) -> None:
    server, at_prefill = cluster.prefill(
        timing=PATIENT, clock=lambda: 0.0
    )  # a clock that stands still: decode is never lost for silence
    client, at_decode = cluster.decode("d1", server.port, timing=PATIENT)
    at_prefill.wait(PeerUp)
    with RawPeer(server.port) as replay:
        replay.say(hello("d1"))
        assert isinstance(replay.receive(), Welcome)
        for number in range(1, 6):
            replay.say(Heartbeat(DECODE, 0.0, Load()))
            replay.say(Abort(key(number), "recorded"), seq=number)
        eventually(lambda: server.stats()["unknown_peer"] == 10)
        client.send(PREFILL, Abort(key(7), "from decode"))
        server.send(DECODE, AbortAck(key(7)))
        at_prefill.wait(MessageReceived)
        at_decode.wait(MessageReceived)
        assert at_prefill.messages() == [Abort(key(7), "from decode")]
        assert at_prefill.life("d1") == at_decode.life("p1") == ["PeerUp"]
        client.close()
        at_prefill.wait(PeerClosed)
        replay.say(Heartbeat(DECODE, 0.0, Load()))
        at_prefill.wait(PeerUp, 2)
    assert at_prefill.life("d1")[:4] == ["PeerUp", "PeerLost", "PeerClosed", "PeerUp"]


@pytest.mark.parametrize("secret", [None, "a key that was not recorded"], ids=["without a key", "with a key"])
def test_replayed_bytes_of_a_connection_do_not_close_it(cluster: Cluster, secret: str | None) -> None:
    """The recorded bytes contain the routing id of the first connection."""
    server, at_prefill = cluster.prefill(secret=secret, timing=PATIENT)
    with TcpProxy(server.port) as proxy:
        client, at_decode = cluster.decode("d1", proxy.port, secret=secret, timing=PATIENT)
        at_prefill.wait(PeerUp)
        at_decode.wait(PeerUp)
        client.send(PREFILL, Abort(key(1), "first"))
        at_prefill.wait(MessageReceived)
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", server.port), timeout=10) as replay:
                recorded = bytes(proxy.sent_by_decode)
                handshake = GREETING_BYTES + 2 + recorded[GREETING_BYTES + 1]  # one command with its flags and length
                replay.sendall(recorded[:handshake])
                answer = b""
                while (b"READY" if secret is None else b"WELCOME") not in answer:
                    received = replay.recv(4096)
                    assert received, "closed before the handshake was answered"
                    answer += received
                replay.sendall(recorded[handshake:])
                before = server.stats()["heartbeats_received"]
                eventually(lambda before=before: server.stats()["heartbeats_received"] > before)  # type: ignore[misc]
        client.send(PREFILL, Abort(key(2), "second"))
        server.send(DECODE, AbortAck(key(2)))
        at_prefill.wait(MessageReceived, 2)
        at_decode.wait(MessageReceived)
        assert at_prefill.messages() == [Abort(key(1), "first"), Abort(key(2), "second")]
        assert at_prefill.life("d1") == at_decode.life("p1") == ["PeerUp"]
        assert proxy.connections == 1
        client.close()
