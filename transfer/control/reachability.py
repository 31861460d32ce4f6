"""Why a decode server has no prefill server: found out for each endpoint, logged at once and every 30 s.

ZMQ says that a connection was not made, and not why. So an endpoint that does not answer is probed with a plain socket,
on a thread of its own, one endpoint at a time.
"""

import logging
import math
import queue
import socket
import threading
from collections.abc import Callable, Iterable, Sequence

from .events import PeerSnapshot, describe_absence

logger = logging.getLogger(__name__)

GRACE_S = 1.0
"""How long servers that are started together may take to find each other before it is a warning."""
LOG_INTERVAL_S = 30.0
PROBE_INTERVAL_S = 10.0
CONNECT_S = 2.0
ANSWER_S = 0.5
MOST_PROBES = 16
"""Endpoints that wait to be probed: requests name endpoints, too, and there may be many."""

ZMQ_GREETING = b"\xff"
HTTP_PORT = "that is an HTTP port: --prefill wants the control port of the prefill server (its --bootstrap-port)"


def find_reason(address: str, port: int) -> str | None:
    """Why no prefill server can be reached there, in a clause; None where one may be: ZMQ knows more then."""
    try:
        with socket.create_connection((address, port), timeout=CONNECT_S) as connection:
            return _who_answers(connection)
    except ConnectionRefusedError:
        return "connection refused: nothing listens there"
    except TimeoutError:
        return f"no answer within {CONNECT_S:g} s: no such machine, or a firewall"
    except OSError as error:
        return f"{error.strerror or error}"


def _who_answers(connection: socket.socket) -> str | None:
    """ZMQ speaks first, HTTP when it is spoken to."""
    connection.settimeout(ANSWER_S)
    try:
        first = connection.recv(1)
    except TimeoutError:
        first = None
    if first is not None:
        # one that hangs up at once may be any server, also one that is just ending
        return None if first in (ZMQ_GREETING, b"") else "that is not the control port of a prefill server"
    try:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        answer = connection.recv(5)
    except TimeoutError:
        return "something listens there and says nothing: a server that hangs, or not a control port"
    return HTTP_PORT if answer == b"HTTP/" else "that is not the control port of a prefill server"


class Reachability:
    """What is known of endpoints that do not answer. For one thread, but for the probes."""

    def __init__(self, probe: Callable[[str, int], str | None] = find_reason) -> None:
        self._probe = probe
        self._reasons: dict[str, str] = {}
        self._probe_at: dict[str, float] = {}
        self._queue: queue.Queue[tuple[str, str]] = queue.Queue(MOST_PROBES)
        self._thread: threading.Thread | None = None
        self._absent_since: float | None = None
        self._log_at = -math.inf
        self._reported: dict[str, str] = {}

    def failed(self, endpoint: str, address: str, now: float) -> None:
        """An attempt to connect has failed. The address is probed, every `PROBE_INTERVAL_S` at most.

        The address and not the host name: the name may lead elsewhere by now, where requests may not send this server.
        """
        if now < self._probe_at.get(endpoint, -math.inf):
            return
        try:
            self._queue.put_nowait((endpoint, address))
        except queue.Full:
            return
        self._probe_at[endpoint] = now + PROBE_INTERVAL_S
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="decode-probe", daemon=True)
            self._thread.start()

    def forget(self, endpoint: str) -> None:
        """It was reached, or is not tried any more."""
        self._probe_at.pop(endpoint, None)
        self._reasons.pop(endpoint, None)

    def reason(self, endpoint: str) -> str | None:
        return self._reasons.get(endpoint)

    def report(self, peers: Sequence[PeerSnapshot], now: float) -> dict[str, str] | None:
        """Log it when no peer has been paired for a moment, and go on. Returns all reasons when one has changed."""
        reasons = absence_reasons(peers)
        if any(peer.state == "paired" for peer in peers):
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
            endpoint, address = self._queue.get()
            reason = self._probe(address, int(endpoint.rpartition(":")[2]))
            if endpoint not in self._probe_at:
                continue  # it was reached meanwhile
            if reason is None:
                self._reasons.pop(endpoint, None)
            else:
                self._reasons[endpoint] = reason


def absence_reasons(peers: Iterable[PeerSnapshot]) -> dict[str, str]:
    """What is known of each endpoint that no server is paired at."""
    return {peer.endpoint: peer.detail for peer in peers if peer.state != "paired" and peer.detail is not None}
