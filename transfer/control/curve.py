"""Authentication of the control port: CURVE key pairs derived from the cluster key, and the check of client keys.

All servers of a cluster share one secret. From it every server derives the same two key pairs: prefill proves that it
holds the server key, decode that it holds the client key, and traffic is encrypted. Without the secret a process can
neither pair nor impersonate a prefill server.

A malicious listener that a decode server connects to can test guesses of the secret against the handshake, offline. So
the derivation is slow (scrypt; 0.2 s and 64 MiB per guess), and weak secrets are refused at start
(`configs/key_strength.py`). Releases with different derivations cannot pair: the derivation has its own number.
"""

import hashlib
import hmac
import secrets
from typing import NamedTuple

import zmq
from zmq.utils import z85

from ...common.errors import StartupError

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"pdserve"

DERIVATION = b"pdserve cluster key, derivation 2"
"""Salt: the same for all clusters, because servers share only the secret. Derivation 1 was an unstretched BLAKE2b."""
SCRYPT_COST = 1 << 16
SCRYPT_BLOCK = 8

AUTHENTICATION_FAILED = "authentication failed: cluster_key differs (or only one side has one)"


class KeyPair(NamedTuple):
    """A CURVE key pair, z85-encoded for ZMQ."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"  # the secret stays out of logs and tracebacks


class ClusterKeys:
    """The two key pairs of a cluster, from two secret seeds of 32 bytes. Raises StartupError if libzmq lacks CURVE."""

    def __init__(self, seeds: bytes) -> None:
        if not zmq.has("curve"):
            raise StartupError("cluster_key needs CURVE, which this libzmq was built without: use the pyzmq wheel")
        self.seeds = seeds
        self.server = _key_pair(seeds[:32])
        self.client = _key_pair(seeds[32:])

    @classmethod
    def derive(cls, cluster_key: str) -> "ClusterKeys":
        """Takes about 0.2 s. Raises StartupError if Python lacks scrypt."""
        return cls(_stretch(cluster_key))

    @classmethod
    def random(cls) -> "ClusterKeys":
        """New keys. Random seeds cannot be guessed and are not stretched."""
        return cls(secrets.token_bytes(64))

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        """Make `socket` prove that it holds the server key; ClientGate decides which clients are accepted."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.server.secret)

    def secure_client(self, socket: zmq.Socket[bytes]) -> None:
        """Make `socket` accept only a server that holds the server key. Call before connect."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server.public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.client.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.client.secret)


class ClientGate:
    """The ZAP handler (ZMQ RFC 27), which accepts or refuses connecting clients. With a cluster key it accepts only
    clients that hold the derived key; without one it accepts every client.

    Even without a key there must be a handler: only then does libzmq refuse ZMTP 1.0 and 2.0, which have no handshake
    and whose messages do not identify their connection.

    Owns a socket that the control thread polls; call `answer_all()` when it is readable. pyzmq's authenticator does the
    same with an asyncio loop in its own thread.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ClusterKeys | None) -> None:
        self._keys = keys
        self._client_key = z85.decode(keys.client.public) if keys is not None else None
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ZAP_ENDPOINT)

    def protect(self, server: zmq.Socket[bytes]) -> None:
        """Make `server`, of the same context, accept only clients that this gate allows. Call before bind."""
        if self._keys is not None:
            self._keys.secure_server(server)
        server.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        server.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def answer_all(self) -> None:
        """Answer all pending ZAP requests."""
        while True:
            try:
                request = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            version, request_id = request[0], request[1]
            if self._allows(request):
                answer = [version, request_id, b"200", b"OK", b"pdserve", b""]
            else:
                answer = [version, request_id, b"400", b"unknown client key", b"", b""]
            self.socket.send_multipart(answer)

    def close(self) -> None:
        self.socket.close(linger=0)

    def _allows(self, request: list[bytes]) -> bool:
        match request:
            case [b"1.0", _, domain, _, _, b"CURVE", key] if self._client_key is not None:
                return domain == ZAP_DOMAIN and hmac.compare_digest(key, self._client_key)
            case [b"1.0", _, domain, _, _, b"NULL"]:
                return domain == ZAP_DOMAIN and self._client_key is None
            case _:
                return False


def _stretch(cluster_key: str) -> bytes:
    """Two seeds of 32 bytes."""
    memory = 128 * SCRYPT_COST * SCRYPT_BLOCK
    try:
        return hashlib.scrypt(
            cluster_key.encode(),
            salt=DERIVATION,
            n=SCRYPT_COST,
            r=SCRYPT_BLOCK,
            p=1,
            maxmem=memory + (1 << 20),
            dklen=64,
        )
    except (AttributeError, ValueError) as error:
        raise StartupError(f"cluster_key needs scrypt of Python's hashlib, which is not available: {error}") from error


def _key_pair(seed: bytes) -> KeyPair:
    secret = z85.encode(seed)
    return KeyPair(public=zmq.curve_public(secret), secret=secret)
