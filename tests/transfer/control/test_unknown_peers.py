"""Clients of the control port that do not pair cannot disturb servers that do."""

import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest

from pdserve.common.sampling import SamplingParams
from pdserve.transfer.control.events import MessageReceived, PeerLost, PeerUp
from pdserve.transfer.control.unknown_peers import UNKNOWN_PEER_BYTES, UNKNOWN_PEER_MESSAGES, UnknownPeers
from pdserve.transfer.protocol.messages import Abort, Heartbeat, InstanceId, KvDestination, Load, Refused
from pdserve.transfer.protocol.wire import Envelope, encode
from pdserve.transfer.protocol.zmtp import frame_head
from tests.scheduler.engine.zmtp_clients import is_closed, shaken
from tests.transfer.control.test_control import Cluster, RawPeer, eventually, hello, key
from tests.transfer.control.zmtp_peer import OLD_PROTOCOL, ZmtpPeer

MIB = 1 << 20


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(stack)


def rss_mib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) // 1024


def test_messages_of_old_zmq_protocols_are_refused(cluster: Cluster) -> None:
    """Without the refusal, these 3 KB block the control port for 100 s: each message costs 0.1 s and a traceback."""
    server, at_prefill, client, _ = cluster.pair()
    with socket.create_connection(("127.0.0.1", server.port)) as peer:
        before = time.monotonic()
        peer.sendall(OLD_PROTOCOL)
        peer.settimeout(5)
        with suppress(ConnectionResetError):
            while peer.recv(4096):
                pass
        client.send(InstanceId("p1"), Abort(key(1), "still there"))
        assert at_prefill.wait(MessageReceived)[0].message == Abort(key(1), "still there")
        assert time.monotonic() - before < 10
    assert server.stats()["handler_errors"] == 0
    assert at_prefill.of(PeerLost) == []


@pytest.mark.parametrize("secret", [None, "a key that unknown peers lack"], ids=["without a key", "with a key"])
@pytest.mark.parametrize("attack", ["a frame", "many parts"])
def test_connections_with_endless_messages_are_closed(cluster: Cluster, secret: str | None, attack: str) -> None:
    server, _ = cluster.prefill(secret=secret)
    before = rss_mib()
    sent = []
    for _ in range(4):
        with ZmtpPeer(server.port, mechanism="CURVE" if secret is not None else "NULL") as peer:
            send = peer.send_frame_until_cut if attack == "a frame" else peer.send_parts_until_cut
            sent.append(send(60 * MIB))
    assert max(sent) < 60 * MIB
    eventually(lambda: rss_mib() < before + 100)
    client, at_decode = cluster.decode("d1", server.port, secret=secret)
    at_decode.wait(PeerUp)
    assert server.stats()["handler_errors"] == 0
    client.close()


def test_decode_server_pairs_while_others_open_too_many_connections(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.transfer.control.unknown_peers.MAX_UNKNOWN_PEERS", 4)
    server, at_prefill = cluster.prefill()
    client, at_decode = cluster.decode("d1", server.port)
    at_prefill.wait(PeerUp)
    with ExitStack() as stack:
        peers = [stack.enter_context(ZmtpPeer(server.port)) for _ in range(20)]
        eventually(lambda: server.stats()["connections_cut"] >= 16)
        assert [peer.cut() for peer in peers] == [True] * 16 + [False] * 4
        _, second = cluster.decode("d2", server.port)
        second.wait(PeerUp)
        client.send(InstanceId("p1"), Abort(key(1), "still there"))
        at_prefill.wait(MessageReceived)
    assert at_decode.of(PeerLost) == at_prefill.of(PeerLost) == []


def test_excess_connections_are_cut_in_bounded_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control thread closes them, and it must send heartbeats in between."""
    monkeypatch.setattr("pdserve.transfer.control.unknown_peers.MAX_UNKNOWN_PEERS", 4)
    monkeypatch.setattr("pdserve.transfer.control.unknown_peers.CUTS_PER_CALL", 3)
    cuts: list[str] = []
    peers = UnknownPeers(None, cuts.append)
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        accepted = []
        for _ in range(9):
            stack.enter_context(socket.create_connection(listener.getsockname()))
            accepted.append(stack.enter_context(listener.accept()[0]))
            peers.accepted(accepted[-1].fileno())
        assert cuts == []
        assert [(peers.cut_excess(), len(cuts)) for _ in range(3)] == [(True, 3), (False, 5), (False, 5)]
        assert [connection.fileno() in peers for connection in accepted] == [False] * 5 + [True] * 4
        assert [connection.recv(1) for connection in accepted[:5]] == [b""] * 5, "the oldest were shut down"


def test_reused_file_descriptor_is_not_shut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.transfer.control.unknown_peers.MAX_UNKNOWN_PEERS", 0)
    cuts: list[str] = []
    peers = UnknownPeers(None, cuts.append)
    first, other = socket.socketpair()
    second, another = socket.socketpair()
    with first, other, second, another:
        peers.accepted(first.fileno())
        os.dup2(second.fileno(), first.fileno())
        assert not peers.cut_excess()
        another.sendall(b"x")
        assert first.recv(1) == b"x"
    assert cuts == []


def test_connection_to_another_port_is_not_shut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """When ZMQ's event is read, its file descriptor may belong to another socket."""
    monkeypatch.setattr("pdserve.transfer.control.unknown_peers.MAX_UNKNOWN_PEERS", 0)
    cuts: list[str] = []
    peers = UnknownPeers(None, cuts.append)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        peers.port = listener.getsockname()[1]
        with listener.accept()[0] as accepted:
            for descriptor in (client.fileno(), accepted.fileno()):
                peers.accepted(descriptor)
            peers.cut_excess()
            assert len(cuts) == 1
            with pytest.raises(BrokenPipeError):
                accepted.send(b"x")


def test_connection_with_too_many_messages_without_an_introduction_is_closed(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each was answered: a client that sent a megabyte of them kept the control thread busy for seconds."""
    server, at_prefill = cluster.prefill()
    client, _ = cluster.decode("d1", server.port)
    at_prefill.wait(PeerUp)
    beat = encode(Heartbeat(InstanceId("nobody"), 0.0, Load(), {}))
    frames = [Envelope(0, 0).pack(), *map(bytes, beat)]
    message = b"".join(frame_head(len(one), number < len(frames) - 1) + one for number, one in enumerate(frames))
    with shaken(server.port, "DEALER") as peer:
        peer.sendall(message * UNKNOWN_PEER_MESSAGES)
        eventually(lambda: server.stats()["unknown_peer"] == UNKNOWN_PEER_MESSAGES)
        monkeypatch.setattr("pdserve.transfer.control.unknown_peers.MESSAGES_S", -1.0)
        peer.sendall(message * UNKNOWN_PEER_MESSAGES)
        eventually(lambda: server.stats()["unknown_peer"] == 2 * UNKNOWN_PEER_MESSAGES)
        monkeypatch.undo()
        peer.sendall(message * 5000)
        assert is_closed(peer, 10)
    eventually(lambda: server.stats()["connections_cut"] == 1)
    assert server.stats()["unknown_peer"] == 3 * UNKNOWN_PEER_MESSAGES - 1
    client.send(InstanceId("p1"), Abort(key(1), "still there"))
    at_prefill.wait(MessageReceived)


def test_messages_of_an_earlier_connection_are_not_blamed_on_the_next_one() -> None:
    """ZMQ has kept them, and the next connection has the same descriptor."""
    cuts: list[str] = []
    peers = UnknownPeers(None, cuts.append)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
        listener.accept()[0] as accepted,
    ):
        fd = accepted.fileno()
        peers.accepted(fd)
        kept = [peers.message_read(fd, 100) for _ in range(2 * UNKNOWN_PEER_MESSAGES)]
        assert kept == [True] * UNKNOWN_PEER_MESSAGES + [False] * UNKNOWN_PEER_MESSAGES
        assert cuts == []
        assert fd in peers
        client.sendall(bytes(100 * (2 * UNKNOWN_PEER_MESSAGES + 1)))
        assert accepted.recv(1, socket.MSG_PEEK)
        eventually(lambda: not peers.message_read(fd, 0) and len(cuts) == 1)
        assert fd not in peers


def test_received_bytes_are_checked_once_per_tick(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check reads the counters of all connections, which is too slow for every message."""
    now = [0.0]
    server, _ = cluster.prefill(clock=lambda: now[0])
    checks: list[None] = []
    monkeypatch.setattr(server._connections, "enforce_limits", lambda: checks.append(None))
    with RawPeer(server.port) as peer:
        for _ in range(20):
            peer.say(hello("d1", fingerprint="another model"))
            assert isinstance(peer.receive(), Refused)
        assert len(checks) <= 1
        now[0] += server.timing.tick_s
        eventually(lambda: bool(checks))


def test_known_peer_may_send_more_than_an_unknown_one(cluster: Cluster) -> None:
    server, at_prefill, client, _ = cluster.pair()
    prompt = np.zeros(UNKNOWN_PEER_BYTES // 4 + 1000, dtype=np.int32)
    for number in range(5):
        message = KvDestination(key(number), "rid", SamplingParams(), timeout_s=1.0)
        client.send(InstanceId("p1"), message, prompt, np.zeros(1, dtype=np.int32))
        time.sleep(2 * server.timing.tick_s)
    assert len(at_prefill.wait(MessageReceived, 5)) == 5
    assert server.stats()["connections_cut"] == 0
    assert at_prefill.of(PeerLost) == []


def test_an_unfinished_message_of_a_known_peer_is_bounded_too(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.transfer.control.prefill.MAX_MESSAGE_BYTES", MIB)
    server, at_prefill, client, _ = cluster.pair()
    message = KvDestination(key(1), "rid", SamplingParams(), timeout_s=1.0)
    # as if the end of the message never came
    monkeypatch.setattr(server._connections, "message_read", lambda *_: None)
    # wait for the check that resets the byte counter after the last heartbeat
    eventually(lambda: not any(connection.message_read for connection in server._connections._known.values()))
    client.send(InstanceId("p1"), message, np.zeros(2 * MIB, dtype=np.int32), np.zeros(1, dtype=np.int32))
    at_prefill.wait(PeerLost)
    assert server.stats()["connections_cut"] == 1


def test_refusals_are_logged_once_per_second(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    server, _ = cluster.prefill()
    before = time.monotonic()
    with caplog.at_level(logging.INFO):
        for number in range(30):
            with RawPeer(server.port) as peer:
                peer.say(hello(f"nobody {number}", fingerprint="another model"))
                assert isinstance(peer.receive(), Refused)
    assert server.stats()["refused"] == 30
    assert 1 <= len(caplog.records) <= 2 + (time.monotonic() - before)
