"""The control plane over real sockets, with real processes for tests that stop or kill one.

These processes run this file as a script: `test_control.py prefill|decode PORT INSTANCE` pairs, prints one line of JSON
per event, and answers every Abort with an AbortAck.
"""

import json
import logging
import os
import signal
import socket as sockets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import zmq

from pdserve.common.errors import StartupError
from pdserve.common.sampling import SamplingParams
from pdserve.configs.allowed_hosts import AllowedHosts
from pdserve.transfer.control import peers, session
from pdserve.transfer.control.curve import AUTHENTICATION_FAILED, ClusterKeys
from pdserve.transfer.control.decode import HUNG_UP, MAX_UNPAIRED_PER_CLIENT, UNPAIRED_S, DecodeControl
from pdserve.transfer.control.endpoints import resolve
from pdserve.transfer.control.events import (
    Event,
    LoadReported,
    MessageReceived,
    PeerAlias,
    PeerClosed,
    PeerLost,
    PeerRefused,
    PeerSnapshot,
    PeersUnreachable,
    PeerUp,
)
from pdserve.transfer.control.peers import LAST_WORDS_S, AnyControl
from pdserve.transfer.control.prefill import PrefillControl
from pdserve.transfer.control.reachability import HTTP_PORT
from pdserve.transfer.control.reliable_channel import ReliableChannel
from pdserve.transfer.control.session import Timing
from pdserve.transfer.control.unknown_peers import UNKNOWN_PEER_BYTES, UNKNOWN_PEER_MESSAGES
from pdserve.transfer.mooncake.infiniband import port_states
from pdserve.transfer.plan.pairing import check_pair
from pdserve.transfer.protocol.layout import KvLayout, Plane
from pdserve.transfer.protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    AbortAck,
    AnyMessage,
    ChunkArrived,
    Heartbeat,
    Hello,
    InstanceId,
    KvDestination,
    Load,
    Pool,
    Rank,
    Refused,
    TransferKey,
    Welcome,
)
from pdserve.transfer.protocol.wire import Envelope, decode, encode
from tests.ports import free_port
from tests.processes import stop_process
from tests.transfer.control.tcp_proxy import TcpProxy

T = TypeVar("T")

derived_keys = cache(ClusterKeys.derive)
"""`ClusterKeys.derive`, called once per secret: it takes 0.2 s."""
FAST = Timing(
    heartbeat_interval_s=0.1, peer_timeout_s=0.8, hello_retry_s=0.3, refused_retry_s=0.3, connect_timeout_s=2.0
)
DEFAULT = Timing()
LAYOUT = KvLayout((Plane("k", 128), Plane("v", 128)), 0, 4, 0, 2, 16, 100, "float32")


def ranks(layout: KvLayout = LAYOUT) -> tuple[Rank, ...]:
    return (Rank(0, "127.0.0.1:1", (Pool(layout, 1 << 20, layout.size_bytes),)),)


def hello(instance: str, *, version: int = PROTOCOL_VERSION, fingerprint: str = "fp") -> Hello:
    return Hello(version, InstanceId(instance), fingerprint, "llama", ranks())


def welcome(instance: str, *, version: int = PROTOCOL_VERSION, fingerprint: str = "fp") -> Welcome:
    return Welcome(version, InstanceId(instance), fingerprint, "llama", ranks())


def key(number: int) -> TransferKey:
    return TransferKey(number, 0)


class Recorder:
    """Records all events of one control; a test can wait for them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._changed = threading.Condition()

    def __call__(self, event: Event) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def of(self, kind: type[T]) -> list[T]:
        return [event for event in list(self.events) if isinstance(event, kind)]

    def wait(self, kind: type[T], count: int = 1, timeout_s: float = 5.0) -> list[T]:
        """The first `count` events of this kind."""
        with self._changed:
            done = self._changed.wait_for(lambda: len(self.of(kind)) >= count, timeout_s)
        assert done, f"{count} x {kind.__name__} did not come within {timeout_s} s: {self.events}"
        return self.of(kind)[:count]

    def messages(self) -> list[AnyMessage]:
        return [event.message for event in self.of(MessageReceived)]

    def deliveries_while_not_up(self) -> list[MessageReceived]:
        """Messages outside PeerUp .. PeerLost of their peer: there must be none."""
        up: set[InstanceId] = set()
        stray = []
        for event in self.events:
            match event:
                case PeerUp():
                    up.add(event.instance)
                case PeerLost():
                    up.discard(event.instance)
                case MessageReceived() if event.instance not in up:
                    stray.append(event)
        return stray

    def life(self, instance: str) -> list[str]:
        """The names of the events of one peer, in order."""
        kinds = PeerUp | PeerLost | PeerClosed
        return [
            type(event).__name__ for event in self.events if isinstance(event, kinds) and event.instance == instance
        ]


def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"did not become true within {timeout_s} s"
        time.sleep(0.01)


class Cluster:
    """Starts controls in this process and closes them, in reverse, at the end of the test."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def prefill(
        self,
        instance: str = "p1",
        port: int = 0,
        *,
        host: str = "127.0.0.1",
        me: Welcome | None = None,
        check: Callable[[Hello], str | None] | None = None,
        secret: str | None = None,
        timing: Timing = FAST,
        on_event: Callable[[Event], None] | None = None,
        load: Callable[[], Load] = Load,
        clock: Callable[[], float] = time.monotonic,
    ) -> tuple[PrefillControl, Recorder]:
        recorder = Recorder()
        mine = me or welcome(instance)
        server = PrefillControl(
            host,
            port,
            mine,
            check=check or (lambda theirs: check_pair(theirs, mine)),
            on_event=on_event or recorder,
            load=load,
            keys=None if secret is None else derived_keys(secret),
            timing=timing,
            clock=clock,
        )
        self._stack.callback(server.close)
        server.start()
        return server, recorder

    def decode(
        self,
        instance: str = "d1",
        *ports: int,
        me: Hello | None = None,
        check: Callable[[Welcome], str | None] | None = None,
        secret: str | None = None,
        timing: Timing = FAST,
        load: Callable[[], Load] = Load,
        look_up: Callable[[str], list[str]] = resolve,
    ) -> tuple[DecodeControl, Recorder]:
        recorder = Recorder()
        mine = me or hello(instance)
        client = DecodeControl(
            mine,
            check=check or (lambda theirs: check_pair(mine, theirs)),
            on_event=recorder,
            load=load,
            keys=None if secret is None else derived_keys(secret),
            timing=timing,
            resolve=look_up,
        )
        self._stack.callback(client.close)
        client.start()
        for port in ports:
            client.connect(f"127.0.0.1:{port}")
        return client, recorder

    def pair(self, timing: Timing = FAST) -> tuple[PrefillControl, Recorder, DecodeControl, Recorder]:
        """One prefill and one decode, paired on both sides."""
        server, at_prefill = self.prefill(timing=timing)
        client, at_decode = self.decode("d1", server.port, timing=timing)
        at_prefill.wait(PeerUp)
        at_decode.wait(PeerUp)
        return server, at_prefill, client, at_decode


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(stack)


def only_peer(side: AnyControl) -> PeerSnapshot:
    """Waits for the first snapshot, which the control thread takes after it has started."""
    eventually(lambda: bool(side.peers()))
    (peer,) = side.peers()
    return peer


def test_pair_forms_if_prefill_starts_first(cluster: Cluster) -> None:
    server, at_prefill = cluster.prefill()
    client, at_decode = cluster.decode("d1", server.port)
    assert at_decode.wait(PeerUp) == [PeerUp(InstanceId("p1"), f"127.0.0.1:{server.port}", welcome("p1"))]
    assert at_prefill.wait(PeerUp) == [PeerUp(InstanceId("d1"), None, hello("d1"))]
    eventually(lambda: only_peer(client).round_trip_ms is not None and only_peer(server).round_trip_ms is not None)
    seen = only_peer(client)
    assert (seen.endpoint, seen.state, seen.instance, seen.detail) == (
        f"127.0.0.1:{server.port}",
        "paired",
        "p1",
        None,
    )
    assert seen.round_trip_ms is not None
    assert 0 < seen.round_trip_ms < 1000
    assert only_peer(server).instance == "d1"


def test_pair_forms_if_decode_starts_first_and_with_an_endpoint_added_later(cluster: Cluster) -> None:
    port = free_port()
    client, at_decode = cluster.decode("d1", port)
    eventually(lambda: bool(client.peers()) and only_peer(client).detail is not None)
    assert only_peer(client).state == "connecting"
    assert "nothing listens" in str(only_peer(client).detail)
    cluster.prefill("p1", port)
    at_decode.wait(PeerUp)
    second, _ = cluster.prefill("p2")
    client.connect(f"localhost:{second.port}")  # by name, and while running
    ups = at_decode.wait(PeerUp, 2)
    assert [(up.instance, up.endpoint) for up in ups] == [
        ("p1", f"127.0.0.1:{port}"),
        ("p2", f"localhost:{second.port}"),
    ]
    assert at_decode.of(PeerLost) == []


def test_every_decode_server_pairs_with_every_prefill_server(cluster: Cluster) -> None:
    servers = [cluster.prefill(f"p{index}") for index in range(2)]
    clients = [cluster.decode(f"d{index}", *(server.port for server, _ in servers)) for index in range(3)]
    for _, at_prefill in servers:
        assert {up.instance for up in at_prefill.wait(PeerUp, 3)} == {"d0", "d1", "d2"}
    for number, (client, at_decode) in enumerate(clients):
        assert {up.instance for up in at_decode.wait(PeerUp, 2)} == {"p0", "p1"}
        for name in ("p0", "p1"):
            client.send(InstanceId(name), Abort(key(number), name))
    for number, (server, at_prefill) in enumerate(servers):
        got = at_prefill.wait(MessageReceived, 3)
        assert {(event.instance, event.message) for event in got} == {
            (f"d{index}", Abort(key(index), f"p{number}")) for index in range(3)
        }
        for event in got:
            server.send(event.instance, AbortAck(key(number)))
    for _, at_decode in clients:
        assert {(event.instance, event.message) for event in at_decode.wait(MessageReceived, 2)} == {
            ("p0", AbortAck(key(0))),
            ("p1", AbortAck(key(1))),
        }


def test_two_addresses_of_one_server_are_one_peer(cluster: Cluster) -> None:
    server, at_prefill = cluster.prefill()
    with TcpProxy(server.port) as proxy:
        client, at_decode = cluster.decode("d1", proxy.port)
        at_decode.wait(PeerUp)
        client.connect(f"localhost:{server.port}")
        assert at_decode.wait(PeerAlias) == [PeerAlias(f"localhost:{server.port}", InstanceId("p1"))]
        client.send(InstanceId("p1"), Abort(key(1), "r"))
        at_prefill.wait(MessageReceived)
        eventually(lambda: [peer.state for peer in client.peers()] == ["paired", "paired"])
        assert client.peers()[1].detail == f"same server as 127.0.0.1:{proxy.port}"
        assert at_prefill.life("d1") == ["PeerUp"]
        proxy.cut()  # the other address takes over
        assert at_decode.wait(PeerUp, 2)[1].endpoint == f"localhost:{server.port}"
        assert at_decode.life("p1") == ["PeerUp", "PeerLost", "PeerClosed", "PeerUp"]
        at_prefill.wait(PeerUp, 2)
        assert at_prefill.life("d1") == ["PeerUp", "PeerLost", "PeerClosed", "PeerUp"]
        client.close()


def test_alias_of_a_server_is_reported_again_when_it_pairs_again(cluster: Cluster) -> None:
    """Requests may name a server by any of its addresses. PeerUp has the first one, PeerAlias has each further one."""
    server, _ = cluster.prefill()
    with TcpProxy(server.port) as proxy:
        client, at_decode = cluster.decode("d1", proxy.port)
        at_decode.wait(PeerUp)
        client.connect(f"localhost:{server.port}")
        at_decode.wait(PeerAlias)
        proxy.flows.clear()
        at_decode.wait(PeerLost)
        proxy.flows.set()
        at_decode.wait(PeerUp, 2)
        names = [f"localhost:{server.port}", f"127.0.0.1:{server.port}"]
        assert at_decode.wait(PeerAlias, 4) == [PeerAlias(name, InstanceId("p1")) for name in names] * 2
        assert proxy.connections == 1
        client.close()


def test_port_in_use_is_named_in_the_error(cluster: Cluster) -> None:
    server, _ = cluster.prefill()
    with pytest.raises(StartupError, match=rf"bootstrap port {server.port} on 127.0.0.1 is in use.*--bootstrap-port"):
        cluster.prefill("p2", server.port)


def test_endpoints_are_checked(cluster: Cluster) -> None:
    client, _ = cluster.decode()
    for wrong in ("host", "host:", ":8998", "host:0", "host:65536", "host:http"):
        with pytest.raises(ValueError, match="HOST:PORT"):
            client.connect(wrong)


def test_messages_arrive_in_order_with_their_arrays(cluster: Cluster) -> None:
    server, at_prefill, client, at_decode = cluster.pair(Timing(heartbeat_interval_s=3.0, peer_timeout_s=10.0))
    count = 1000  # several windows of the reliable channel
    for index in range(count):
        destination = KvDestination(key(index), f"r{index}", SamplingParams(), 1.0)
        client.send(InstanceId("p1"), destination, np.arange(index, dtype=np.int32), np.full(3, index, np.int32))
        server.send(InstanceId("d1"), ChunkArrived(key(index), 0, index))
    received = at_prefill.wait(MessageReceived, count)
    for index, event in enumerate(received):
        assert isinstance(event.message, KvDestination)
        assert event.message.key == key(index)
        assert event.arrays[0].tolist() == list(range(index))
        assert event.arrays[1].tolist() == [index] * 3
    assert [event.message for event in at_decode.wait(MessageReceived, count)] == [
        ChunkArrived(key(index), 0, index) for index in range(count)
    ]
    assert client.stats()["messages_sent"] == server.stats()["messages_received"] == count
    assert client.stats()["messages_resent"] == 0


def test_threads_may_send_concurrently_and_each_keeps_its_order(cluster: Cluster) -> None:
    _, at_prefill, client, _ = cluster.pair()

    def send_all(sender: int) -> None:
        for index in range(100):
            client.send(InstanceId("p1"), Abort(TransferKey(sender, index), "r"))

    threads = [threading.Thread(target=send_all, args=(sender,)) for sender in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    at_prefill.wait(MessageReceived, 400)
    keys = [message.key for message in at_prefill.messages() if isinstance(message, Abort)]
    for sender in range(4):
        assert [one.generation for one in keys if one.transfer_id == sender] == list(range(100))


def test_a_burst_does_not_wait_for_heartbeats(cluster: Cluster) -> None:
    """Many received messages are acknowledged at once, so the window of the sender moves on."""
    slow = Timing(heartbeat_interval_s=3.0, peer_timeout_s=10.0)
    server, at_prefill = cluster.prefill(timing=slow)
    client, at_decode = cluster.decode("d1", server.port, timing=slow)
    at_decode.wait(PeerUp)
    for index in range(2000):
        client.send(InstanceId("p1"), Abort(key(index), "r"))
    at_prefill.wait(MessageReceived, 2000, timeout_s=2.5)


def test_load_is_reported_in_both_directions(cluster: Cluster) -> None:
    loads = [Load(1, 2, 3)]
    server, at_prefill = cluster.prefill(load=lambda: loads[0])
    _, at_decode = cluster.decode("d1", server.port, load=lambda: Load(9))
    assert at_decode.wait(LoadReported) == [LoadReported(InstanceId("p1"), Load(1, 2, 3))]
    assert at_prefill.wait(LoadReported) == [LoadReported(InstanceId("d1"), Load(9))]
    loads[0] = Load(5)
    assert at_decode.wait(LoadReported, 2)[1].load == Load(5)
    time.sleep(3 * FAST.heartbeat_interval_s)
    assert len(at_decode.of(LoadReported)) == 2, "an unchanged load is not an event"


def test_states_of_rdma_ports_are_reported_in_both_directions(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pdserve.transfer.control")
    monkeypatch.setattr(peers, "port_states", partial(port_states, tmp_path))
    state = tmp_path / "mlx5_0" / "ports" / "1" / "state"
    state.parent.mkdir(parents=True)
    state.write_text("4: ACTIVE\n")
    server, _ = cluster.prefill()
    client, at_decode = cluster.decode("d1", server.port)
    at_decode.wait(PeerUp)
    eventually(lambda: [only_peer(side).rdma_ports for side in (server, client)] == [{"mlx5_0": "ACTIVE"}] * 2)
    state.write_text("1: DOWN\n")
    eventually(lambda: [only_peer(side).rdma_ports for side in (server, client)] == [{"mlx5_0": "DOWN"}] * 2)
    assert sum(message.endswith(": mlx5_0 DOWN") for message in caplog.messages) == 2


def test_sends_to_unknown_and_closed_instances_are_dropped_and_counted(cluster: Cluster) -> None:
    server, at_prefill, client, at_decode = cluster.pair()
    client.send(InstanceId("nobody"), Abort(key(1), "r"))
    eventually(lambda: client.stats()["sends_to_unknown_instance"] == 1)
    server.close()
    at_decode.wait(PeerClosed)
    client.send(InstanceId("p1"), Abort(key(1), "r"))
    eventually(lambda: client.stats()["sends_to_unknown_instance"] == 2)
    assert at_prefill.messages() == []


@pytest.mark.parametrize("sender", ["decode", "prefill"])
def test_message_that_does_not_fit_its_channel_ends_the_connection_and_the_servers_pair_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, sender: str
) -> None:
    """So the transfers of the pair fail on both sides, and none waits for that message."""
    monkeypatch.setattr(session, "ReliableChannel", partial(ReliableChannel, limit_bytes=1000))
    server, at_prefill, client, at_decode = cluster.pair()
    from_decode, other = (client, at_prefill) if sender == "decode" else (server, at_decode)
    own = at_decode if sender == "decode" else at_prefill
    to = InstanceId("p1" if sender == "decode" else "d1")
    from_decode.send(to, Abort(key(1), "x" * 2000))
    from_decode.send(to, Abort(key(2), "dropped with the connection"))
    for events in (at_decode, at_prefill):
        events.wait(PeerUp, 2)
        events.wait(PeerClosed)
    (lost,) = own.of(PeerLost)
    assert "Abort cannot be sent: " in lost.reason
    assert "1000 B" in lost.reason
    assert own.life(to) == ["PeerUp", "PeerLost", "PeerClosed", "PeerUp"]
    from_decode.send(to, Abort(key(3), "over the new connection"))
    other.wait(MessageReceived)
    assert other.messages() == [Abort(key(3), "over the new connection")]
    assert from_decode.stats()["sends_over_limit"] == 1


def test_restarted_prefill_server_is_a_new_instance(cluster: Cluster) -> None:
    server, at_prefill, client, at_decode = cluster.pair()
    server.close()
    at_decode.wait(PeerClosed)
    client.send(InstanceId("p1"), Abort(key(1), "for the old one only"))
    _, at_prefill = cluster.prefill("p2", server.port)
    at_decode.wait(PeerUp, 2)
    assert at_decode.life("p1") == ["PeerUp", "PeerLost", "PeerClosed"]
    assert at_decode.life("p2") == ["PeerUp"]
    client.send(InstanceId("p2"), Abort(key(2), "for the new one"))
    at_prefill.wait(MessageReceived)
    assert at_prefill.messages() == [Abort(key(2), "for the new one")]


def test_restarted_decode_server_is_a_new_instance(cluster: Cluster) -> None:
    server, at_prefill, client, _ = cluster.pair()
    client.close()
    at_prefill.wait(PeerClosed)
    assert at_prefill.of(PeerLost) == [PeerLost(InstanceId("d1"), "its connection was closed")]
    cluster.decode("d2", server.port)
    at_prefill.wait(PeerUp, 2)
    assert at_prefill.life("d1") == ["PeerUp", "PeerLost", "PeerClosed"]
    eventually(lambda: [peer.instance for peer in server.peers()] == ["d2"])


def test_many_short_connections_leave_nothing_behind(cluster: Cluster) -> None:
    """File descriptors are reused at once: the end of one connection must not be attributed to the next."""
    server, at_prefill = cluster.prefill()
    for index in range(20):
        client, at_decode = cluster.decode(f"d{index}", server.port)
        at_decode.wait(PeerUp)
        client.send(InstanceId("p1"), Abort(key(index), "r"))
        at_prefill.wait(MessageReceived, index + 1)
        client.close()
    at_prefill.wait(PeerClosed, 20)
    for index in range(20):
        assert at_prefill.life(f"d{index}") == ["PeerUp", "PeerLost", "PeerClosed"]
    eventually(lambda: server.peers() == [])


def test_messages_sent_before_a_close_are_delivered(cluster: Cluster) -> None:
    """A message and the end of its connection are pending together: the message is handled first."""
    quiet = Timing(heartbeat_interval_s=3.0, peer_timeout_s=10.0)
    server, at_prefill = cluster.prefill(timing=quiet)
    client, at_decode = cluster.decode("d1", server.port, timing=quiet)
    at_prefill.wait(PeerUp)
    time.sleep(0.1)  # the first heartbeats have arrived
    may_go_on, busy = threading.Event(), threading.Event()

    def be_busy() -> None:
        busy.set()
        may_go_on.wait(5)

    client._thread.post(be_busy)  # simulates slow work on the control thread
    assert busy.wait(2)
    server.send(InstanceId("d1"), AbortAck(key(1)))
    time.sleep(0.2)
    server.close()
    time.sleep(0.1)
    may_go_on.set()
    at_decode.wait(PeerClosed)
    assert at_decode.messages() == [AbortAck(key(1))]
    assert at_decode.deliveries_while_not_up() == []


def test_hello_of_a_closed_connection_is_ignored(cluster: Cluster) -> None:
    may_go_on, busy = threading.Event(), threading.Event()

    def check(theirs: Hello) -> str | None:
        if theirs.instance == "d1":
            busy.set()
            may_go_on.wait(5)
        return None

    server, at_prefill = cluster.prefill(check=check)
    cluster.decode("d1", server.port)
    assert busy.wait(2)
    with RawPeer(server.port) as raw:
        raw.say(hello("ghost"))
        time.sleep(0.2)
    time.sleep(0.1)
    may_go_on.set()
    at_prefill.wait(PeerUp)
    eventually(lambda: [peer.instance for peer in server.peers()] == ["d1"])


@pytest.mark.parametrize("both_ends", [True, False], ids=["noticed by both", "noticed by decode only"])
def test_cut_connection_closes_the_peer_and_a_new_one_pairs(cluster: Cluster, both_ends: bool) -> None:
    server, at_prefill = cluster.prefill()
    with TcpProxy(server.port) as proxy:
        client, at_decode = cluster.decode("d1", proxy.port)
        at_prefill.wait(PeerUp)
        for index in range(3):
            client.send(InstanceId("p1"), Abort(key(index), "before"))
        at_prefill.wait(MessageReceived, 3)
        proxy.both_ends = both_ends
        proxy.cut()
        at_prefill.wait(PeerUp, 2)
        at_decode.wait(PeerUp, 2)
        assert proxy.connections == 2
        assert at_prefill.of(PeerLost)[0].reason == ("its connection was closed" if both_ends else "it connected again")
        assert at_prefill.life("d1") == at_decode.life("p1") == ["PeerUp", "PeerLost", "PeerClosed", "PeerUp"]
        client.send(InstanceId("p1"), Abort(key(3), "after"))
        server.send(InstanceId("d1"), AbortAck(key(3)))
        at_prefill.wait(MessageReceived, 4)
        at_decode.wait(MessageReceived)
        assert at_prefill.messages() == [*(Abort(key(index), "before") for index in range(3)), Abort(key(3), "after")]
        client.close()


@pytest.mark.parametrize(("count", "tokens"), [(UNKNOWN_PEER_MESSAGES + 40, 1), (1, UNKNOWN_PEER_BYTES // 2)])
def test_messages_before_prefill_uses_a_new_connection_are_delivered(cluster: Cluster, count: int, tokens: int) -> None:
    """Decode may send as soon as it has its Welcome. Prefill waits until the first connection is silent."""
    timing = Timing(heartbeat_interval_s=0.4, peer_timeout_s=10.0)
    server, at_prefill = cluster.prefill(timing=timing)
    with TcpProxy(server.port) as proxy:
        client, at_decode = cluster.decode("d1", proxy.port, timing=timing)
        at_prefill.wait(PeerUp)
        proxy.both_ends = False
        proxy.cut()
        at_decode.wait(PeerUp, 2)
        wanted = [KvDestination(key(index), f"r{index}", SamplingParams(), 1.0) for index in range(count)]
        for message in wanted:
            client.send(InstanceId("p1"), message, np.zeros(tokens, dtype=np.int32), np.zeros(1, dtype=np.int32))
        at_prefill.wait(MessageReceived, count, timeout_s=10)
        assert at_prefill.messages() == wanted
        assert at_decode.life("p1") == ["PeerUp", "PeerLost", "PeerClosed", "PeerUp"]
        assert server.stats()["unknown_peer"] > 0, "prefill used the new connection at once"
        assert server.stats()["connections_cut"] == 0
        client.close()


def test_peers_are_lost_but_not_closed_while_the_network_delays_everything(cluster: Cluster) -> None:
    server, at_prefill = cluster.prefill()
    with TcpProxy(server.port) as proxy:
        client, at_decode = cluster.decode("d1", proxy.port, load=lambda: Load(9))
        at_prefill.wait(PeerUp)
        client.send(InstanceId("p1"), Abort(key(0), "r"))
        at_prefill.wait(MessageReceived)
        proxy.flows.clear()
        client.send(InstanceId("p1"), Abort(key(1), "r"))
        server.send(InstanceId("d1"), AbortAck(key(1)))
        at_prefill.wait(PeerLost)
        at_decode.wait(PeerLost)
        client.send(InstanceId("p1"), Abort(key(2), "r"))
        server.send(InstanceId("d1"), AbortAck(key(2)))
        proxy.flows.set()
        at_prefill.wait(MessageReceived, 3)
        at_decode.wait(MessageReceived, 2)
        time.sleep(2 * FAST.resend_after_s)
        assert at_prefill.messages() == [Abort(key(index), "r") for index in range(3)]
        assert at_decode.messages() == [AbortAck(key(1)), AbortAck(key(2))]
        assert at_prefill.life("d1") == at_decode.life("p1") == ["PeerUp", "PeerLost", "PeerUp"]
        assert at_prefill.wait(LoadReported, 2) == [LoadReported(InstanceId("d1"), Load(9))] * 2, "once per PeerUp"
        assert at_prefill.deliveries_while_not_up() == at_decode.deliveries_while_not_up() == []
        assert proxy.connections == 1
        client.close()


def test_slow_dns_server_does_not_delay_other_peers(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = sockets.getaddrinfo
    asked = threading.Event()

    def slow(host: str, *rest: Any, **options: Any) -> Any:
        if host != "no-such-host":
            return resolve(host, *rest, **options)
        asked.set()
        time.sleep(2 * FAST.peer_timeout_s)
        raise sockets.gaierror(sockets.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(sockets, "getaddrinfo", slow)
    _, at_prefill, client, at_decode = cluster.pair()
    client.connect("no-such-host:1")
    assert asked.wait(2)
    eventually(lambda: client.peers()[-1].detail == "host name no-such-host cannot be resolved")
    assert at_prefill.life("d1") == at_decode.life("p1") == ["PeerUp"]


@pytest.mark.parametrize("checking", ["prefill", "decode"])
def test_version_mismatch_names_both_versions_on_both_sides(cluster: Cluster, checking: str) -> None:
    """Either side may be the newer one, and the first to notice."""
    versions = (PROTOCOL_VERSION, PROTOCOL_VERSION + 1) if checking == "prefill" else (PROTOCOL_VERSION + 1, 1)
    server, at_prefill = cluster.prefill(me=welcome("p1", version=versions[0]))
    client, at_decode = cluster.decode(me=hello("d1", version=versions[1]))
    client.connect(f"127.0.0.1:{server.port}")
    reason = f"protocol version differs: prefill speaks {versions[0]}, decode speaks {versions[1]}"
    assert at_decode.wait(PeerRefused) == [PeerRefused(f"127.0.0.1:{server.port}", reason)]
    assert at_prefill.wait(PeerRefused) == [PeerRefused("d1", reason)]
    eventually(lambda: client.stats()["refused"] >= 2)  # it keeps asking
    assert len(at_decode.of(PeerRefused)) == len(at_prefill.of(PeerRefused)) == 1
    for side in (server, client):
        assert (only_peer(side).state, only_peer(side).detail) == ("refused", reason)


def test_an_unreadable_hello_of_another_version_is_refused_by_version(cluster: Cluster) -> None:
    server, at_prefill = cluster.prefill()
    with RawPeer(server.port) as raw:
        raw.send(Envelope(0, 0).pack(), b"\x93\xa5Hello\x63\x80")  # ["Hello", 99, {}]
        reason = f"protocol version differs: prefill speaks {PROTOCOL_VERSION}, decode speaks 99"
        assert raw.receive() == Refused("mismatch", reason)
    at_prefill.wait(PeerRefused)


def test_model_mismatch_is_refused_until_it_is_fixed(cluster: Cluster) -> None:
    server, at_prefill = cluster.prefill(me=welcome("p1", fingerprint="other"))
    client, at_decode = cluster.decode("d1", server.port)
    (refused,) = at_decode.wait(PeerRefused)
    assert refused.reason == "models differ: prefill serves llama (other), decode serves llama (fp)"
    assert at_prefill.wait(PeerRefused) == [PeerRefused("d1", refused.reason)]
    server.close()
    cluster.prefill("p2", server.port)
    at_decode.wait(PeerUp)
    assert only_peer(client).detail is None


@pytest.mark.parametrize("by", ["prefill", "decode"])
def test_a_refused_pair_forms_when_the_check_passes_later(cluster: Cluster, by: str) -> None:
    verdict: list[str | None] = ["not today"]
    refusing: dict[str, Callable[[object], str | None]] = {by: lambda _: verdict[0]}
    accept: Callable[[object], str | None] = lambda _: None  # noqa: E731
    server, at_prefill = cluster.prefill(check=refusing.get("prefill", accept))
    _, at_decode = cluster.decode("d1", server.port, check=refusing.get("decode", accept))
    assert at_decode.wait(PeerRefused)[0].reason == "not today"
    assert at_prefill.wait(PeerRefused)[0].reason == "not today"
    assert at_prefill.of(PeerUp) == at_decode.of(PeerUp) == []
    verdict[0] = None
    at_prefill.wait(PeerUp)
    at_decode.wait(PeerUp)


@pytest.mark.parametrize(
    ("prefill_key", "decode_key"), [("k" * 16, "w" * 16), (None, "k" * 16)], ids=["two keys", "no key on prefill"]
)
def test_servers_with_different_cluster_keys_cannot_pair(
    cluster: Cluster, prefill_key: str | None, decode_key: str | None
) -> None:
    server, at_prefill = cluster.prefill(secret=prefill_key)
    client, at_decode = cluster.decode("d1", server.port, secret=decode_key)
    assert at_decode.wait(PeerRefused) == [PeerRefused(f"127.0.0.1:{server.port}", AUTHENTICATION_FAILED)]
    assert at_prefill.wait(PeerRefused)[0].reason == AUTHENTICATION_FAILED
    eventually(lambda: (only_peer(client).state, only_peer(client).detail) == ("refused", AUTHENTICATION_FAILED))
    assert server.stats()["authentication_failures"] >= 1
    assert at_prefill.of(PeerUp) == at_decode.of(PeerUp) == []


def test_decode_server_without_the_cluster_key_cannot_pair(cluster: Cluster) -> None:
    """The reason depends on whether prefill closes the connection before or after it has sent its ZMTP mechanism."""
    server, at_prefill = cluster.prefill(secret="k" * 16)
    client, at_decode = cluster.decode("d1", server.port)
    endpoint = f"127.0.0.1:{server.port}"
    (refused,) = at_decode.wait(PeerRefused)
    assert refused.peer == endpoint
    assert refused.reason in (AUTHENTICATION_FAILED, HUNG_UP.format(endpoint))
    assert at_prefill.wait(PeerRefused)[0].reason == AUTHENTICATION_FAILED
    eventually(lambda: only_peer(client).state == "refused")
    assert at_prefill.of(PeerUp) == at_decode.of(PeerUp) == []


def test_closed_connection_is_not_reported_as_a_wrong_key_if_this_server_has_none(cluster: Cluster) -> None:
    with sockets.create_server(("127.0.0.1", 0)) as server:
        closer = threading.Thread(target=close_connections, args=(server,), daemon=True)
        closer.start()
        port = server.getsockname()[1]
        client, at_decode = cluster.decode("d1", port)
        (refused,) = at_decode.wait(PeerRefused)
        assert refused == PeerRefused(f"127.0.0.1:{port}", HUNG_UP.format(f"127.0.0.1:{port}"))
        eventually(lambda: (only_peer(client).state, only_peer(client).detail) == ("refused", refused.reason))
        client.close()
        server.shutdown(sockets.SHUT_RDWR)
        closer.join()


@pytest.mark.parametrize("secret", [None, "k" * 16], ids=["no key", "a key"])
def test_http_port_is_named_as_the_reason(cluster: Cluster, secret: str | None) -> None:
    """ZMQ reports only that the handshake failed, as it does for a wrong key."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            client, at_decode = cluster.decode("d1", server.server_port, secret=secret)
            endpoint = f"127.0.0.1:{server.server_port}"
            eventually(lambda: bool(client.peers()) and only_peer(client).detail == HTTP_PORT, 20)
            eventually(lambda: PeersUnreachable({endpoint: HTTP_PORT}) in at_decode.of(PeersUnreachable), 20)
            client.close()
        finally:
            server.shutdown()  # otherwise its thread spins on the closed socket
            serving.join()


@pytest.mark.parametrize("stops", ["prefill", "decode"])
def test_clean_shutdown_logs_no_warning(cluster: Cluster, caplog: pytest.LogCaptureFixture, stops: str) -> None:
    caplog.set_level(logging.INFO, "pdserve")
    server, at_prefill, client, at_decode = cluster.pair()
    (server if stops == "prefill" else client).close()
    (at_decode if stops == "prefill" else at_prefill).wait(PeerClosed)
    about_peers = [r for r in caplog.records if "has stopped" in r.message or r.message.startswith("lost ")]
    assert [record.levelname for record in about_peers] == ["INFO"]


def close_connections(server: sockets.socket) -> None:
    with suppress(OSError):  # until it is shut down
        while True:
            server.accept()[0].close()


def test_the_same_cluster_key_pairs(cluster: Cluster) -> None:
    server, at_prefill = cluster.prefill(secret="k" * 16)
    client, at_decode = cluster.decode("d1", server.port, secret="k" * 16)
    at_decode.wait(PeerUp)
    client.send(InstanceId("p1"), Abort(key(1), "r"))
    assert at_prefill.wait(MessageReceived)[0].message == Abort(key(1), "r")
    assert at_decode.of(PeerRefused) == []


class RawPeer:
    """A plain DEALER that can send anything."""

    def __init__(self, port: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    def __enter__(self) -> "RawPeer":
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def say(self, message: AnyMessage, seq: int = 0, ack: int = 0) -> None:
        self.send(Envelope(seq, ack).pack(), *(bytes(frame) for frame in encode(message)))

    def receive(self) -> AnyMessage:
        """The next message that is not a heartbeat."""
        while self._socket.poll(3000):
            message, _ = decode(self._socket.recv_multipart()[1:])
            if not isinstance(message, Heartbeat):
                return message
        raise AssertionError("no answer within 3 s")


def test_malformed_messages_are_answered_and_counted_and_logged_once(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    server, at_prefill, client, _ = cluster.pair()
    wrong = [
        [b""],
        [b"junk"],
        [b"junk", b"junk"],
        [bytes(16)],
        [bytes(16), b"\xc1"],
        [bytes(16), b"\x92\xa7Unheard\x01"],
        [bytes(16)] + [b""] * 100,
        [bytes(16), bytes(encode(Abort(key(1), "unnumbered"))[0])],
    ]
    with RawPeer(server.port) as raw, caplog.at_level(logging.WARNING):
        for frames in wrong:
            raw.send(*frames)
            answer = raw.receive()
            assert isinstance(answer, Refused)
            assert answer.code == "malformed"
        raw.say(Abort(key(1), "from nobody"), seq=1)
        assert raw.receive() == Refused("unknown_peer", "this server has no session for this peer: send Hello")
        raw.say(welcome("p9"))
        answer = raw.receive()
        assert isinstance(answer, Refused)
        assert "this is a prefill server" in answer.reason
    assert server.stats()["malformed"] == len(wrong) + 1
    assert sum("malformed message" in record.message for record in caplog.records) == 1
    client.send(InstanceId("p1"), Abort(key(2), "still alive"))
    at_prefill.wait(MessageReceived)
    assert at_prefill.messages() == [Abort(key(2), "still alive")]
    assert server.stats()["handler_errors"] == 0


def test_unreadable_numbered_message_does_not_block_the_next(cluster: Cluster) -> None:
    server, at_prefill = cluster.prefill()
    with RawPeer(server.port) as raw:
        raw.say(hello("d1"))
        assert raw.receive() == welcome("p1")
        raw.send(Envelope(1, 0).pack(), b"\x92\xa7Unheard\x01")
        answer = raw.receive()
        assert isinstance(answer, Refused)
        assert answer.code == "malformed"
        raw.say(Abort(key(2), "next"), seq=2)
        raw.say(Abort(key(2), "again"), seq=2)
        raw.say(Abort(key(4), "behind a gap"), seq=4)
        raw.say(Abort(key(3), "and next"), seq=3)
        at_prefill.wait(MessageReceived, 2)
        raw.say(Abort(key(5), "acknowledges what was never sent"), seq=4, ack=77)
        eventually(lambda: server.stats()["malformed"] == 2)
    assert at_prefill.messages() == [Abort(key(2), "next"), Abort(key(3), "and next")]
    assert server.stats()["messages_out_of_order"] == 2


def test_unacknowledged_messages_are_sent_again(cluster: Cluster) -> None:
    server, at_prefill = cluster.prefill()
    with RawPeer(server.port) as raw:
        raw.say(hello("d1"))
        raw.receive()
        raw.say(Heartbeat(InstanceId("d1"), 0.0))
        at_prefill.wait(PeerUp)
        server.send(InstanceId("d1"), AbortAck(key(1)))
        answers: list[AnyMessage] = []
        deadline = time.monotonic() + 5
        while answers.count(AbortAck(key(1))) < 2 and time.monotonic() < deadline:
            raw.say(Heartbeat(InstanceId("d1"), 0.0))  # alive, acknowledging nothing
            answers.append(raw.receive())
        assert answers.count(AbortAck(key(1))) == 2
        raw.say(Heartbeat(InstanceId("d1"), 0.0), ack=1)
        eventually(lambda: server.stats()["messages_resent"] == 1)


def test_failing_callbacks_do_not_end_the_thread(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    seen = Recorder()

    def on_event(event: Event) -> None:
        seen(event)
        raise RuntimeError("owner is broken")

    def load() -> Load:
        raise RuntimeError("load is broken")

    server, _ = cluster.prefill(on_event=on_event, load=load)
    client, at_decode = cluster.decode("d1", server.port)
    at_decode.wait(PeerUp)
    client.send(InstanceId("p1"), Abort(key(1), "r"))
    seen.wait(MessageReceived)
    client.send(InstanceId("p1"), Abort(key(2), "r"))
    seen.wait(MessageReceived, 2)
    assert server.stats()["event_errors"] >= 4
    assert server.progress_age_s() < 1
    assert "owner is broken" in caplog.text
    caplog.clear()


def test_a_failing_check_does_not_end_the_thread(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    broken = [True]

    def check(_: Hello) -> str | None:
        if broken[0]:
            raise RuntimeError("check is broken")
        return None

    server, at_prefill = cluster.prefill(check=check)
    cluster.decode("d1", server.port)
    eventually(lambda: server.stats()["handler_errors"] >= 1)
    broken[0] = False
    at_prefill.wait(PeerUp)
    assert "check is broken" in caplog.text
    caplog.clear()


def test_close_is_bounded_and_repeatable(cluster: Cluster) -> None:
    server, _, client, at_decode = cluster.pair()
    before = time.monotonic()
    server.close()
    server.close()
    at_decode.wait(PeerClosed)
    client.close()
    assert time.monotonic() - before < 10
    client.send(InstanceId("p1"), Abort(key(1), "after close"))
    client.close()
    unstarted = PrefillControl("localhost", 0, welcome("p9"), check=lambda _: None, on_event=lambda _: None)
    unstarted.close()


def endpoints_of(side: DecodeControl) -> list[str]:
    return [peer.endpoint for peer in side.peers()]


def test_client_with_too_many_unpaired_endpoints_loses_its_oldest(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that names missing servers does not displace endpoints of others; configured ones stay."""
    monkeypatch.setattr("pdserve.transfer.control.decode.MAX_UNPAIRED_PER_CLIENT", 2)
    monkeypatch.setattr("pdserve.transfer.control.decode.MAX_UNPAIRED", 4)
    server, _ = cluster.prefill()
    paired, configured = f"127.0.0.1:{server.port}", f"127.0.0.1:{free_port()}"
    client, at_decode = cluster.decode("d1")
    client.connect(configured)
    client.connect(paired, client="10.0.0.1")
    at_decode.wait(PeerUp)
    client.connect("127.0.0.1:1", client="10.0.0.1")
    client.connect("127.0.0.1:2", client="10.0.0.1")
    client.connect("127.0.0.1:1", client="10.0.0.1")  # again: it is not the oldest now
    client.connect("127.0.0.1:3", client="10.0.0.1")
    eventually(lambda: endpoints_of(client) == [configured, paired, "127.0.0.1:1", "127.0.0.1:3"])
    client.connect("127.0.0.1:4", client="10.0.0.2")
    client.connect("127.0.0.1:5", client="10.0.0.3")
    client.connect("127.0.0.1:6", client="10.0.0.4")  # the fifth: removes the oldest of the client with two
    others = ["127.0.0.1:4", "127.0.0.1:5", "127.0.0.1:6"]
    eventually(lambda: endpoints_of(client) == [configured, paired, "127.0.0.1:3", *others])
    assert at_decode.of(PeerRefused) == []
    assert client.stats()["handler_errors"] == 0


def test_paired_endpoints_are_bounded_too(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.transfer.control.decode.MAX_ENDPOINTS", 2)
    client, at_decode = cluster.decode("d1")
    for number in range(2):
        server, _ = cluster.prefill(f"p{number}")
        client.connect(f"127.0.0.1:{server.port}", client="10.0.0.1")
    at_decode.wait(PeerUp, 2)
    client.connect("127.0.0.1:5", client="10.0.0.1")
    reason = "2 prefill endpoints are paired or configured, no more are accepted"
    assert at_decode.wait(PeerRefused) == [PeerRefused("127.0.0.1:5", reason)]


def test_unpaired_endpoint_of_a_request_is_removed_after_a_timeout(cluster: Cluster) -> None:
    now = [0.0]
    recorder = Recorder()
    client = DecodeControl(
        hello("d1"), check=lambda _: None, on_event=recorder, timing=FAST, clock=lambda: time.monotonic() + now[0]
    )
    server, _ = cluster.prefill()
    paired, configured = f"127.0.0.1:{server.port}", f"127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        stack.callback(client.close)
        client.connect(configured)
        client.start()
        client.connect(paired, client="10.0.0.1")
        client.connect("127.0.0.1:1", client="10.0.0.1")
        recorder.wait(PeerUp)
        now[0] += UNPAIRED_S + 1
        eventually(lambda: endpoints_of(client) == [configured, paired])
        server.close()
        recorder.wait(PeerClosed)
        assert endpoints_of(client) == [configured, paired], "it was removed at once, but may return"
        now[0] += UNPAIRED_S + 1
        eventually(lambda: endpoints_of(client) == [configured])


def test_endpoints_that_never_answer_do_not_exhaust_sockets(cluster: Cluster) -> None:
    """Before there was a limit, 1,200 requests with such endpoints took all sockets, and no server could pair."""
    server, _ = cluster.prefill()
    client, at_decode = cluster.decode("d1")
    with ExitStack() as stack:
        listeners = [stack.enter_context(sockets.create_server(("127.0.0.1", 0))) for _ in range(400)]
        for listener in listeners:
            client.connect(f"127.0.0.1:{listener.getsockname()[1]}", client="10.0.0.1")
        eventually(lambda: len(endpoints_of(client)) == MAX_UNPAIRED_PER_CLIENT)
        client.connect(f"127.0.0.1:{server.port}", client="10.0.0.2")
        at_decode.wait(PeerUp)
    assert client.stats()["handler_errors"] == 0


def test_connection_attempt_fails_if_there_are_no_free_sockets(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.transfer.control.thread.MAX_SOCKETS", 30)
    server, _ = cluster.prefill()
    client, at_decode = cluster.decode("d1")
    with ExitStack() as stack:
        silent = [stack.enter_context(sockets.create_server(("127.0.0.1", 0))) for _ in range(20)]
        for listener in silent:
            client.connect(f"127.0.0.1:{listener.getsockname()[1]}", client="10.0.0.1")
        eventually(lambda: "Too many open files" in str([peer.detail for peer in client.peers()]))
    client.connect(f"127.0.0.1:{server.port}", client="10.0.0.2")
    at_decode.wait(PeerUp, timeout_s=10)
    assert client.stats()["handler_errors"] == 0


def test_name_that_resolves_to_a_forbidden_address_is_refused(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frontend cannot check this: it does not resolve names, and a name may resolve to another address later."""
    server, at_prefill = cluster.prefill()
    recorder = Recorder()
    client = DecodeControl(
        hello("d1"),
        check=lambda _: None,
        on_event=recorder,
        timing=FAST,
        allowed_hosts=AllowedHosts.of(["trusted", "10.0.0.0/8"]),
    )
    found = [(sockets.AF_INET, sockets.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]
    monkeypatch.setattr(sockets, "getaddrinfo", lambda *_, **__: found)
    probed: list[object] = []
    monkeypatch.setattr(sockets, "create_connection", lambda address, **_: probed.append(address))
    with ExitStack() as stack:
        stack.callback(client.close)
        client.start()
        client.connect(f"elsewhere:{server.port}", client="10.0.0.1")
        reason = "elsewhere resolves to 127.0.0.1, which bootstrap_allow does not permit for requests"
        assert recorder.wait(PeerRefused) == [PeerRefused(f"elsewhere:{server.port}", reason)]
        eventually(lambda: only_peer(client).detail == reason)
        assert at_prefill.of(PeerUp) == []
        client.connect(f"trusted:{server.port}", client="10.0.0.1")
        recorder.wait(PeerUp)
    assert probed == []


@pytest.mark.parametrize("closing", ["prefill", "decode"])
def test_close_delivers_queued_messages(cluster: Cluster, closing: str) -> None:
    """A draining server closes right after the message that ends its last request."""
    server, at_prefill, client, at_decode = cluster.pair()
    expected = [AbortAck(key(number)) for number in range(1000)]  # more than a window of the reliable channel
    side, other, peer = (server, at_decode, "d1") if closing == "prefill" else (client, at_prefill, "p1")
    for message in expected:
        side.send(InstanceId(peer), message)
    before = time.monotonic()
    side.close()
    assert time.monotonic() - before < LAST_WORDS_S, "close() waited although the peer was acknowledging"
    other.wait(PeerClosed)
    assert other.messages() == expected


def test_close_does_not_wait_for_a_peer_that_is_stopped(
    cluster: Cluster, prefill_process: tuple["OtherProcess", int], caplog: pytest.LogCaptureFixture
) -> None:
    process, port = prefill_process
    client, at_decode = cluster.decode("d1", port, timing=DEFAULT)
    at_decode.wait(PeerUp, timeout_s=START_TIMEOUT_S)
    process.stop()
    client.send(InstanceId("p1"), Abort(key(1), "nobody hears it"))
    before = time.monotonic()
    client.close()
    assert LAST_WORDS_S <= time.monotonic() - before < LAST_WORDS_S + 0.5
    assert f"closing with unacknowledged messages, by peer: {{'127.0.0.1:{port} (p1)': 1}}" in caplog.text


START_TIMEOUT_S = 60.0
"""Limit for the start of another process, including its imports."""
NOTICED_S = DEFAULT.peer_timeout_s + 1.0
"""Limit for the detection of a silent peer, with reserve for a busy machine."""


class OtherProcess:
    """Runs this file as a server process; `lines` has its events."""

    def __init__(self, role: str, port: int, instance: str) -> None:
        root = Path(__file__).resolve().parents[3]
        self._process = subprocess.Popen(
            [sys.executable, __file__, role, str(port), instance],
            env={**os.environ, "PYTHONPATH": f"{root / '.dev'}{os.pathsep}{root}"},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lines: list[list[str]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(json.loads(line))

    def stop(self) -> None:
        stop_process(self._process.pid)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture
def prefill_process() -> Iterator[tuple[OtherProcess, int]]:
    port = free_port()
    process = OtherProcess("prefill", port, "p1")
    yield process, port
    process.close()


def test_stopped_prefill_is_lost_but_not_closed_and_gets_its_messages_when_it_continues(
    cluster: Cluster, prefill_process: tuple[OtherProcess, int]
) -> None:
    process, port = prefill_process
    client, at_decode = cluster.decode("d1", port, timing=DEFAULT)
    at_decode.wait(PeerUp, timeout_s=START_TIMEOUT_S)
    client.send(InstanceId("p1"), Abort(key(0), "running"))
    at_decode.wait(MessageReceived)
    process.stop()
    stopped_at = time.monotonic()
    client.send(InstanceId("p1"), Abort(key(1), "sent before it was found lost"))
    (lost,) = at_decode.wait(PeerLost, timeout_s=3)
    assert time.monotonic() - stopped_at < NOTICED_S
    assert "no heartbeat for " in lost.reason
    eventually(lambda: only_peer(client).state == "lost")
    client.send(InstanceId("p1"), Abort(key(2), "sent while it was lost"))
    time.sleep(1.0)
    assert at_decode.life("p1") == ["PeerUp", "PeerLost"]
    process.signal(signal.SIGCONT)
    at_decode.wait(PeerUp, 2, timeout_s=3)
    client.send(InstanceId("p1"), Abort(key(3), "after"))
    at_decode.wait(MessageReceived, 4)
    time.sleep(2 * DEFAULT.heartbeat_interval_s)
    assert at_decode.messages() == [AbortAck(key(index)) for index in range(4)]
    assert at_decode.life("p1") == ["PeerUp", "PeerLost", "PeerUp"]
    aborts = [line[1] for line in process.lines if line[0] == "MessageReceived"]
    assert aborts == ["0.0", "1.0", "2.0", "3.0"], "each exactly once, in order"
    assert [line for line in process.lines if line[0].startswith("Peer")] == [
        ["PeerUp"],
        ["PeerLost", "it had lost this server and sent Hello again"],  # no second loss, for silence
        ["PeerUp"],
    ]


def test_connection_to_a_stopped_prefill_server_whose_channel_is_full_ends_when_it_continues(
    cluster: Cluster, prefill_process: tuple[OtherProcess, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before: until then it may go on to write at any time."""
    process, port = prefill_process
    monkeypatch.setattr(session, "ReliableChannel", partial(ReliableChannel, limit_bytes=1000))
    client, at_decode = cluster.decode("d1", port, timing=DEFAULT)
    at_decode.wait(PeerUp, timeout_s=START_TIMEOUT_S)
    process.stop()
    client.send(InstanceId("p1"), Abort(key(1), "x" * 2000))
    at_decode.wait(PeerLost)
    time.sleep(DEFAULT.peer_timeout_s)
    assert at_decode.life("p1") == ["PeerUp", "PeerLost"]
    process.signal(signal.SIGCONT)
    at_decode.wait(PeerUp, 2)
    assert at_decode.life("p1") == ["PeerUp", "PeerLost", "PeerClosed", "PeerUp"]


def test_a_killed_prefill_is_lost_and_closed(cluster: Cluster, prefill_process: tuple[OtherProcess, int]) -> None:
    process, port = prefill_process
    client, at_decode = cluster.decode("d1", port, timing=DEFAULT)
    at_decode.wait(PeerUp, timeout_s=START_TIMEOUT_S)
    process.signal(signal.SIGKILL)
    killed_at = time.monotonic()
    at_decode.wait(PeerClosed, timeout_s=3)
    assert time.monotonic() - killed_at < 2.0
    assert at_decode.life("p1") == ["PeerUp", "PeerLost", "PeerClosed"]
    process.close()  # the kernel closes connections of a killed process a moment before its listening sockets
    cluster.prefill("p2", port)
    at_decode.wait(PeerUp, 2)
    eventually(lambda: only_peer(client).instance == "p2")


def test_decode_is_lost_when_stopped_and_closed_when_killed(cluster: Cluster) -> None:
    server, at_prefill = cluster.prefill(timing=DEFAULT)
    process = OtherProcess("decode", server.port, "d1")
    try:
        at_prefill.wait(PeerUp, timeout_s=START_TIMEOUT_S)
        process.stop()
        stopped_at = time.monotonic()
        at_prefill.wait(PeerLost, timeout_s=3)
        assert time.monotonic() - stopped_at < NOTICED_S
        server.send(InstanceId("d1"), AbortAck(key(1)))
        time.sleep(0.5)
        assert at_prefill.life("d1") == ["PeerUp", "PeerLost"]
        process.signal(signal.SIGCONT)
        at_prefill.wait(PeerUp, 2, timeout_s=3)
        eventually(lambda: ["MessageReceived", "1.0"] in process.lines)
        assert process.lines == [
            ["PeerUp"],
            ["PeerLost", "it has no session for this server any more"],
            ["PeerUp"],
            ["MessageReceived", "1.0"],
        ]
        process.signal(signal.SIGKILL)
        killed_at = time.monotonic()
        at_prefill.wait(PeerClosed, timeout_s=3)
        assert time.monotonic() - killed_at < 2.0
        assert at_prefill.life("d1") == ["PeerUp", "PeerLost", "PeerUp", "PeerLost", "PeerClosed"]
    finally:
        process.close()


def test_pause_of_the_control_thread_does_not_count_as_silence_of_its_peers(cluster: Cluster) -> None:
    """A control thread that did not run for longer than the timeout does not declare its peers lost afterwards."""
    ahead = [0.0]
    server, at_prefill = cluster.prefill(clock=lambda: time.monotonic() + ahead[0])
    cluster.decode("d1", server.port)
    at_prefill.wait(PeerUp)
    for _ in range(5):
        ahead[0] += 10 * FAST.peer_timeout_s
        time.sleep(2 * FAST.tick_s)
    assert at_prefill.life("d1") == ["PeerUp"]


def _serve(role: str, port: int, instance: str) -> None:
    """Entry point of the other process."""
    done = threading.Event()
    side: list[AnyControl] = []

    def on_event(event: Event) -> None:
        match event:
            case MessageReceived(message=Abort(key=transfer)):
                print(json.dumps(["MessageReceived", str(transfer)]), flush=True)
                side[0].send(event.instance, AbortAck(transfer))
            case MessageReceived(message=AbortAck(key=transfer)):
                print(json.dumps(["MessageReceived", str(transfer)]), flush=True)
            case PeerLost(reason=reason):
                print(json.dumps(["PeerLost", reason]), flush=True)
            case PeersUnreachable():
                pass
            case _:
                print(json.dumps([type(event).__name__]), flush=True)

    if role == "prefill":
        side.append(PrefillControl("127.0.0.1", port, welcome(instance), check=lambda _: None, on_event=on_event))
        side[0].start()
    else:
        client = DecodeControl(hello(instance), check=lambda _: None, on_event=on_event)
        side.append(client)
        client.start()
        client.connect(f"127.0.0.1:{port}")
    done.wait(60)  # the test kills this process earlier


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), sys.argv[3])
