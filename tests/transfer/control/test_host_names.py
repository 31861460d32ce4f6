"""A host name stands for all its addresses. Prefill servers listen at 127.0.0.2, 127.0.0.3 ..., over real sockets; the
name server is a dictionary that the test changes.
"""

import dataclasses
import socket
import time

import pytest

from pdserve.transfer.control.decode import MAX_REQUESTED_ADDRESSES, DecodeControl
from pdserve.transfer.control.endpoints import resolve
from pdserve.transfer.control.events import PeerAlias, PeerClosed, PeerLost, PeerUp
from pdserve.transfer.protocol.messages import InstanceId
from tests.ports import free_port
from tests.transfer.control.test_control import FAST, Cluster, cluster, eventually

__all__ = ["cluster"]  # a fixture

QUICK = dataclasses.replace(FAST, lookup_s=0.1)


class NameServer:
    """Answers with the addresses in `of`, or fails."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)
        self.fails = False
        self.asked_at: list[float] = []

    def __call__(self, host: str) -> list[str]:
        assert host == "prefill"
        self.asked_at.append(time.monotonic())
        if self.fails:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return list(self.addresses)


def at(number: int) -> str:
    return f"127.0.0.{number}"


def paired_at(client: DecodeControl) -> list[str]:
    return sorted(peer.address or "" for peer in client.peers() if peer.state == "paired")


@pytest.fixture
def port() -> int:
    return free_port()


def test_decode_pairs_with_the_servers_at_all_addresses_of_a_name(cluster: Cluster, port: int) -> None:
    names = NameServer(at(2), at(3), at(4))
    for number in (2, 3, 4):
        cluster.prefill(f"p{number}", port, host=at(number))
    client, at_decode = cluster.decode(timing=QUICK, look_up=names)
    client.connect(f"prefill:{port}")
    assert {up.instance for up in at_decode.wait(PeerUp, 3)} == {"p2", "p3", "p4"}
    eventually(lambda: paired_at(client) == [at(2), at(3), at(4)])
    assert {peer.endpoint for peer in client.peers()} == {f"prefill:{port}"}
    eventually(lambda: len(names.asked_at) > 2)
    assert [len(at_decode.of(kind)) for kind in (PeerUp, PeerLost)] == [3, 0]


def test_new_address_is_taken_in_and_a_vanished_one_goes_when_its_connection_ends(cluster: Cluster, port: int) -> None:
    names = NameServer(at(2), at(9))
    first, _ = cluster.prefill("p2", port, host=at(2))
    client, at_decode = cluster.decode(timing=QUICK, look_up=names)
    client.connect(f"prefill:{port}")
    at_decode.wait(PeerUp)
    cluster.prefill("p3", port, host=at(3))
    names.addresses = [at(3)]
    assert at_decode.wait(PeerUp, 2)[1].instance == "p3"
    eventually(lambda: {peer.address for peer in client.peers()} == {at(2), at(3)})  # nobody was at 127.0.0.9
    seen = len(names.asked_at)
    eventually(lambda: len(names.asked_at) > seen + 2)
    assert paired_at(client) == [at(2), at(3)], "its connection has not ended"
    first.close()
    at_decode.wait(PeerClosed)
    eventually(lambda: [peer.address for peer in client.peers()] == [at(3)])
    names.addresses = [at(2), at(3)]
    cluster.prefill("again", port, host=at(2))
    assert at_decode.wait(PeerUp, 3)[2].instance == "again"


def test_server_that_restarts_at_another_address_pairs_again(cluster: Cluster, port: int) -> None:
    names = NameServer(at(2))
    first, _ = cluster.prefill("p2", port, host=at(2))
    client, at_decode = cluster.decode(look_up=names)  # looks up every 2 s, and sooner when a connection has ended
    client.connect(f"prefill:{port}")
    at_decode.wait(PeerUp)
    cluster.prefill("p3", port, host=at(3))
    names.addresses = [at(3)]
    first.close()
    assert at_decode.wait(PeerUp, 2)[1].instance == "p3"
    eventually(lambda: [peer.address for peer in client.peers()] == [at(3)])


def test_failed_lookups_change_nothing_and_are_repeated_less_often(cluster: Cluster, port: int) -> None:
    names = NameServer(at(2))
    cluster.prefill("p2", port, host=at(2))
    client, at_decode = cluster.decode(timing=QUICK, look_up=names)
    client.connect(f"prefill:{port}")
    at_decode.wait(PeerUp)
    names.fails = True
    failed = len(names.asked_at)
    eventually(lambda: len(names.asked_at) > failed + 4)
    *_, before, last = names.asked_at
    assert last - before >= 0.75 * 2 * QUICK.lookup_s
    assert paired_at(client) == [at(2)]
    names.fails = False
    names.addresses.append(at(3))
    cluster.prefill("p3", port, host=at(3))
    at_decode.wait(PeerUp, 2)


def test_name_without_addresses_keeps_paired_servers(cluster: Cluster, port: int) -> None:
    """Kubernetes answers so while no pod is ready."""
    names = NameServer(at(2), at(9))
    cluster.prefill("p2", port, host=at(2))
    client, at_decode = cluster.decode(timing=QUICK, look_up=names)
    client.connect(f"prefill:{port}")
    at_decode.wait(PeerUp)
    names.addresses = []
    eventually(lambda: [peer.address for peer in client.peers()] == [at(2)])
    assert at_decode.of(PeerLost) == []


def test_addresses_of_one_server_count_once(cluster: Cluster, port: int) -> None:
    cluster.prefill("p", port, host="0.0.0.0")
    client, at_decode = cluster.decode(timing=QUICK, look_up=NameServer(at(2), at(3)))
    client.connect(f"prefill:{port}")
    eventually(lambda: paired_at(client) == [at(2), at(3)])
    assert len(at_decode.of(PeerUp)) == 1
    details = sorted(peer.detail or "" for peer in client.peers())
    assert details[0] == ""
    assert details[1].startswith(f"same server as prefill:{port} at 127.0.0.")


def test_addresses_of_names_are_bounded(
    cluster: Cluster, port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pdserve.transfer.control.decode.MAX_ENDPOINTS", 5)
    client, _ = cluster.decode(timing=QUICK, look_up=NameServer(*map(at, range(2, 12))))
    client.connect(f"prefill:{port}")
    eventually(lambda: len(client.peers()) == 5)
    eventually(lambda: f"prefill:{port} has more addresses than the 5 that are used" in caplog.messages)
    assert len(client.peers()) == 5


def test_name_in_a_request_stands_for_no_server_before_all_its_addresses_have_answered(
    cluster: Cluster, port: int
) -> None:
    """The first request that names it must fail like all later ones, not go to the server that pairs first."""
    for number in (2, 3):
        cluster.prefill(f"p{number}", port, host=at(number))
    client, at_decode = cluster.decode(timing=QUICK, look_up=NameServer(at(2), at(3)))
    client.connect(f"prefill:{port}", client="10.0.0.1")
    by_name = [PeerAlias(f"prefill:{port}", InstanceId(name)) for name in ("p2", "p3")]
    eventually(lambda: all(alias in at_decode.events for alias in by_name))
    ups = at_decode.of(PeerUp)
    assert {up.endpoint for up in ups} == {f"{at(2)}:{port}", f"{at(3)}:{port}"}
    assert min(map(at_decode.events.index, by_name)) > max(map(at_decode.events.index, ups))


def test_name_in_a_request_settles_although_one_address_does_not_answer(cluster: Cluster, port: int) -> None:
    cluster.prefill("p2", port, host=at(2))
    with socket.create_server((at(3), port)):  # accepts, and never answers
        client, at_decode = cluster.decode(timing=QUICK, look_up=NameServer(at(2), at(3)))
        client.connect(f"prefill:{port}", client="10.0.0.1")
        eventually(lambda: PeerAlias(f"prefill:{port}", InstanceId("p2")) in at_decode.events)


def test_request_cannot_make_decode_connect_to_many_addresses(cluster: Cluster, port: int) -> None:
    names = NameServer(*map(at, range(2, 12)))
    client, _ = cluster.decode(timing=QUICK, look_up=names)
    client.connect(f"prefill:{port}", client="10.0.0.1")
    eventually(lambda: len(names.asked_at) > 2)
    assert len(client.peers()) == MAX_REQUESTED_ADDRESSES


def test_ipv6_addresses_are_used_if_a_name_has_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers listen at 0.0.0.0: the IPv6 addresses of the same machines would be refused forever."""
    found = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::2", 0, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (at(3), 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (at(2), 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert resolve("prefill") == [at(2), at(3)]
    del found[1:]
    assert resolve("prefill") == ["fd00::2"]


def test_name_that_does_not_exist_has_no_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [
        socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
        socket.gaierror(socket.EAI_AGAIN, "Temporary failure"),
    ]

    def fail(*_: object, **__: object) -> None:
        raise errors.pop(0)

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert resolve("prefill") == []
    with pytest.raises(socket.gaierror, match="Temporary"):
        resolve("prefill")
