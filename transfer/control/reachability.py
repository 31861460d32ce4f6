"""Finds out why a decode server has no prefill server, per endpoint; logged at once and then every 30 s.

ZMQ reports that a connection failed, but not why. So an endpoint that does not answer is probed with a plain socket, on
a separate thread, one endpoint at a time.
"""

import dataclasses
import logging
import math
import queue
import socket
import threading
from collections.abc import Callable, Sequence

from .events import PeerSnapshot, describe_absence

logger = logging.getLogger(__name__)

GRACE_S = 1.0
"""Time for servers that start together to pair before a warning is logged."""
LOG_INTERVAL_S = 30.0
PROBE_INTERVAL_S = 10.0
CONNECT_S = 2.0
ANSWER_S = 0.5
MOST_PROBES = 16
"""Limit of endpoints that wait for a probe: requests may name many endpoints."""

ZMQ_GREETING = b"\xff"
HTTP_PORT = "that is an HTTP port: --prefill needs the control port of the prefill server (its --bootstrap-port)"


def find_reason(address: str, port: int) -> str | None:
    """Why no prefill server can be reached there; None if something speaks ZMQ there."""
    try:
        with socket.create_connection((address, port), timeout=CONNECT_S) as connection:
            return _reason_from_answer(connection)
    except ConnectionRefusedError:
        return "connection refused: nothing listens there"
    except TimeoutError:
        return f"no answer within {CONNECT_S:g} s: no such machine, or a firewall"
    except OSError as error:
        return f"{error.strerror or error}"


def _reason_from_answer(connection: socket.socket) -> str | None:
    """Why this is not a prefill server, or None. A ZMQ server sends first; an HTTP server waits for a request."""
    connection.settimeout(ANSWER_S)
    try:
        first = connection.recv(1)
    except TimeoutError:
        first = None
    if first is not None:
        # any server may close the connection at once, for example during shutdown
        return None if first in (ZMQ_GREETING, b"") else "that is not the control port of a prefill server"
    try:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        answer = connection.recv(5)
    except TimeoutError:
        return "something listens there and does not answer: a server that hangs, or not a control port"
    return HTTP_PORT if answer == b"HTTP/" else "that is not the control port of a prefill server"


@dataclasses.dataclass(eq=False, slots=True)
class _Silence:
    """The time in which an endpoint does not answer. A probe that ends after it changes nothing that is shown."""

    address: str = ""
    probe_at: float = -math.inf
    reason: str | None = None
    speaks_zmq: bool = False


class Reachability:
    """The reasons of endpoints that do not answer. Used by one thread; probes run on another."""

    def __init__(self, probe: Callable[[str, int], str | None] = find_reason) -> None:
        self._probe = probe
        self._silent: dict[str, _Silence] = {}
        self._queue: queue.Queue[tuple[str, _Silence]] = queue.Queue(MOST_PROBES)
        self._thread: threading.Thread | None = None
        self._absent_since: float | None = None
        self._log_at = -math.inf
        self._reported: dict[str, str] = {}

    def failed(self, endpoint: str, address: str, now: float) -> None:
        """A connection attempt has failed: probe the address, at most every `PROBE_INTERVAL_S`.

        Not the host name: by now it may resolve to another address, which requests may not use.
        """
        silence = self._silent.setdefault(endpoint, _Silence())
        silence.address = address
        if now < silence.probe_at:
            return
        try:
            self._queue.put_nowait((endpoint, silence))
        except queue.Full:
            return
        silence.probe_at = now + PROBE_INTERVAL_S
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="decode-probe", daemon=True)
            self._thread.start()

    def forget(self, endpoint: str) -> None:
        """The endpoint was reached, or is not tried any more."""
        self._silent.pop(endpoint, None)

    def reason(self, endpoint: str) -> str | None:
        silence = self._silent.get(endpoint)
        return silence.reason if silence is not None else None

    def speaks_zmq(self, endpoint: str) -> bool:
        """Whether a probe has found a server there that may be a prefill server."""
        silence = self._silent.get(endpoint)
        return silence is not None and silence.speaks_zmq

    def report(self, peers: Sequence[PeerSnapshot], now: float) -> dict[str, str] | None:
        """Log the reasons while no peer is paired. Returns all reasons if one has changed. Of a name with several
        addresses, the first reason stands for all, if no server is paired at any.
        """
        paired = {peer.endpoint for peer in peers if peer.state == "paired"}
        reasons: dict[str, str] = {}
        for peer in peers:
            if peer.endpoint not in paired and peer.detail is not None:
                reasons.setdefault(peer.endpoint, peer.detail)
        if paired:
            self._absent_since, self._log_at = None, -math.inf
        elif reasons:
            self._absent_since = now if self._absent_since is None else self._absent_since
            if now >= max(self._absent_since + GRACE_S, self._log_at):
                self._log_at = now + LOG_INTERVAL_S
                logger.warning("no prefill server is paired: %s", describe_absence(reasons))
        if reasons == self._reported:
            return None
        self._reported = reasons
        return reasons

    def _run(self) -> None:
        while True:
            endpoint, silence = self._queue.get()
            silence.reason = self._probe(silence.address, int(endpoint.rpartition(":")[2]))
            silence.speaks_zmq = silence.reason is None
