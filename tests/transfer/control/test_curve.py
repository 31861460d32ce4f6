"""Cluster keys and ClientGate, with real sockets: a client without the cluster key cannot send messages."""

import threading
import time
from collections.abc import Iterator
from functools import cache

import pytest
import zmq
from zmq.utils import z85

from pdserve.transfer.control.curve import ZAP_DOMAIN, ClientGate, ClusterKeys, KeyPair

SECRET = "correct horse battery"
derived_keys = cache(ClusterKeys.derive)
"""`ClusterKeys.derive`, called once per secret: it takes 0.2 s."""


class Server:
    """A secured ROUTER with its gate, answering on a thread."""

    def __init__(self, keys: ClusterKeys) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.gate = ClientGate(self.context, keys)
        self.router: zmq.Socket[bytes] = self.context.socket(zmq.ROUTER)
        self.gate.protect(self.router)
        self.port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.received: list[bytes] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self.gate.socket, zmq.POLLIN)
        poller.register(self.router, zmq.POLLIN)
        while not self._stop.is_set():
            ready = dict(poller.poll(20))
            if self.gate.socket in ready:
                self.gate.answer_all()
            if self.router in ready:
                routing_id, body = self.router.recv_multipart()
                self.received.append(body)
                self.router.send_multipart([routing_id, b"answer to " + body])

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.gate.close()
        self.context.destroy(linger=0)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(derived_keys(SECRET))
    yield server
    server.close()


def ask(server: Server, keys: ClusterKeys | None, client: KeyPair | None = None) -> bytes | None:
    """Send one message as a client with these keys. Returns its answer, or None."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        if keys is not None:
            keys.secure_client(dealer)
        if client is not None:
            dealer.setsockopt(zmq.CURVE_PUBLICKEY, client.public)
            dealer.setsockopt(zmq.CURVE_SECRETKEY, client.secret)
        dealer.connect(f"tcp://127.0.0.1:{server.port}")
        dealer.send(b"question")
        return dealer.recv() if dealer.poll(300) else None
    finally:
        context.destroy(linger=0)


def test_same_secret_connects(server: Server) -> None:
    assert ask(server, derived_keys(SECRET)) == b"answer to question"


def test_different_secret_is_refused(server: Server) -> None:
    assert ask(server, derived_keys(SECRET + "!")) is None
    assert server.received == []


def test_client_without_a_secret_is_refused(server: Server) -> None:
    assert ask(server, None) is None
    assert server.received == []


def test_knowing_the_public_server_key_is_not_enough(server: Server) -> None:
    """CURVE itself accepts any client key; the gate refuses it."""
    public, secret = zmq.curve_keypair()
    assert ask(server, derived_keys(SECRET), KeyPair(public, secret)) is None
    assert server.received == []


def test_keys_are_a_function_of_the_secret() -> None:
    one, same, other = ClusterKeys.derive(SECRET), ClusterKeys.derive(SECRET), ClusterKeys.derive(SECRET + "!")
    assert (one.server, one.client) == (same.server, same.client)
    pairs = [one.server, one.client, other.server, other.client]
    assert len({pair.public for pair in pairs}) == 4
    assert len({pair.secret for pair in pairs}) == 4
    for pair in pairs:
        assert zmq.curve_public(pair.secret) == pair.public
        assert len(z85.decode(pair.secret)) == 32


def test_secrets_are_not_in_the_repr() -> None:
    keys = derived_keys(SECRET)
    assert keys.server.secret.decode() not in f"{keys.server!r} {keys.server} {keys!r}"


def test_key_derivation_is_slow() -> None:
    """A malicious listener can test guesses of the key offline. Derivation 1, a plain hash, allowed 6,800 a second."""
    before = time.process_time()
    ClusterKeys.derive("a guess of somebody")
    assert time.process_time() - before > 0.05


def test_gate_without_a_key_accepts_only_null_clients_of_its_domain() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gate = ClientGate(context, None)
    question = [b"1.0", b"1", ZAP_DOMAIN, b"10.0.0.1", b"", b"NULL"]
    assert gate._allows(question)
    assert not gate._allows([*question[:2], b"another domain", *question[3:]])
    assert not gate._allows([*question[:5], b"CURVE", bytes(32)])
    gate.close()
    context.term()
