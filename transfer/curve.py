"""Authentication of the control port: CURVE key pairs derived from the cluster key, and the check of client keys.

All servers of a cluster share one secret. From it every server derives the same two key pairs: prefill proves that it
holds the server key, decode that it holds the client key, and traffic is encrypted. Whoever lacks the secret can
neither pair nor pose as a prefill server.
"""

import hashlib
import hmac
from typing import NamedTuple

import zmq
from zmq.utils import z85

from ..configs.errors import StartupError

MIN_CLUSTER_KEY_CHARACTERS = 16
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"pdserve"

AUTHENTICATION_FAILED = "authentication failed: cluster_key differs (or only one side has one)"


class KeyPair(NamedTuple):
    """A CURVE key pair, z85-encoded as ZMQ takes it."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"  # the secret stays out of logs and tracebacks


class ClusterKeys:
    """The two key pairs of a cluster. Raises StartupError for a cluster key that is too short."""

    def __init__(self, cluster_key: str) -> None:
        if len(cluster_key) < MIN_CLUSTER_KEY_CHARACTERS:
            raise StartupError(
                f"cluster_key has {len(cluster_key)} characters, at least {MIN_CLUSTER_KEY_CHARACTERS} are needed "
                "(make one with: openssl rand -base64 24)"
            )
        if not zmq.has("curve"):
            raise StartupError("cluster_key needs CURVE, which this libzmq was built without: use the pyzmq wheel")
        self.server = _derive(cluster_key, b"pdserve-server")
        self.client = _derive(cluster_key, b"pdserve-client")

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        """Make `socket` accept only clients that a ClientGate of the same context lets in. Call before bind."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.server.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def secure_client(self, socket: zmq.Socket[bytes]) -> None:
        """Make `socket` talk only to a server that holds the server key. Call before connect."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server.public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.client.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.client.secret)


class ClientGate:
    """Answers libzmq's question whether a connecting client may come in (ZAP, ZMQ RFC 27): only the derived key may.

    Owns a socket that the control thread polls next to its own: `answer_all()` when it is readable. pyzmq's
    authenticator does the same with an asyncio loop in a thread of its own. Bind before the server socket binds.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ClusterKeys) -> None:
        self.denied = 0
        self._client_key = z85.decode(keys.client.public)
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ZAP_ENDPOINT)

    def answer_all(self) -> None:
        """Answer every waiting question."""
        while True:
            try:
                request = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            version, request_id = request[0], request[1]
            if self._allows(request):
                answer = [version, request_id, b"200", b"OK", b"pdserve", b""]
            else:
                self.denied += 1
                answer = [version, request_id, b"400", b"unknown client key", b"", b""]
            self.socket.send_multipart(answer)

    def close(self) -> None:
        self.socket.close(linger=0)

    def _allows(self, request: list[bytes]) -> bool:
        match request:
            case [b"1.0", _, domain, _, _, b"CURVE", key]:
                return domain == ZAP_DOMAIN and hmac.compare_digest(key, self._client_key)
            case _:
                return False


def _derive(cluster_key: str, person: bytes) -> KeyPair:
    seed = hashlib.blake2b(cluster_key.encode(), digest_size=32, person=person).digest()
    secret = z85.encode(seed)
    return KeyPair(public=zmq.curve_public(secret), secret=secret)
