"""The control connections of a decode server: one DEALER per prefill server, reconnected without limit."""

import ipaddress
import logging
import random
import secrets
import socket as sockets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import zmq

from ...configs.allowed_hosts import ANY_HOST, AllowedHosts
from ..protocol.messages import Hello, Load, Refused, Welcome
from ..protocol.wire import Buffer
from .curve import AUTHENTICATION_FAILED, ClusterKeys
from .events import Event, PeerAlias, PeerRefused, PeerSnapshot, PeersUnreachable
from .peers import PeerControl
from .reachability import Reachability
from .session import Session, SessionState, Timing
from .thread import MESSAGES_PER_TURN
from .wakeup import ConnectionMonitor

logger = logging.getLogger(__name__)

_MONITORED = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)

HUNG_UP = (
    "{} closes connections of this server, which has no cluster_key: "
    "it needs one, or is not the control port of a prefill server"
)
ZMQ_RECONNECT_MS = 3_600_000
"""Practically never: this module reconnects itself."""
MAX_ENDPOINTS = 1024
"""Requests may name endpoints, so their number is bounded."""
MAX_UNPAIRED = 256
MAX_UNPAIRED_PER_CLIENT = 64
"""Most endpoints that requests have named and that are not paired: in total, and of one client. Each endpoint costs
sockets and connection attempts.
"""
UNPAIRED_S = 30.0
"""How long an unpaired endpoint is tried after the last request that named it."""


class _Connection(Session):
    """An established connection to one endpoint."""

    def __init__(self, endpoint: str, socket: zmq.Socket[bytes], *, resend_after_s: float, now: float) -> None:
        super().__init__(endpoint, resend_after_s=resend_after_s, now=now)
        self.socket = socket
        self.state = SessionState.MEETING
        self.hello_at = now


class _Endpoint:
    """One HOST:PORT to connect to. Every attempt has its own socket, so a connection and its routing id end together.

    `socket` is None between attempts and while the host name is resolved; `connection` is set after the ZMQ handshake.
    """

    def __init__(self, name: str, *, client: str | None, now: float, reconnect_min_s: float) -> None:
        self.name = name
        self.client = client
        """The client whose request named it; None for a configured endpoint, which is never removed."""
        self.wanted_at = now
        self.host, _, self.port = name.rpartition(":")
        self.address: str | None = None
        """The IP address of this attempt."""
        self.socket: zmq.Socket[bytes] | None = None
        self.monitor: ConnectionMonitor | None = None
        self.connection: _Connection | None = None
        self.resolving = False
        self.attempt_at = now
        self.attempt_ends_at = now
        self.backoff_s = reconnect_min_s
        self.failed_handshakes = 0
        self.refused = False
        self.detail: str | None = None

    @property
    def unpaired(self) -> bool:
        """Named by a request, and no server is paired there."""
        paired = self.connection is not None and self.connection.state in _PAIRED
        return self.client is not None and not paired


_PAIRED = (SessionState.PAIRED, SessionState.ALIAS, SessionState.LOST)
"""States of a connection whose server has paired. A lost server may come back; its PeerClosed follows later."""


class DecodeControl(PeerControl[_Connection, Welcome]):
    """Connects to prefill servers, introduces itself, and reconnects when a connection ends."""

    def __init__(
        self,
        me: Hello,
        *,
        check: Callable[[Welcome], str | None],
        on_event: Callable[[Event], None],
        load: Callable[[], Load] = Load,
        keys: ClusterKeys | None = None,
        timing: Timing | None = None,
        clock: Callable[[], float] = time.monotonic,
        allowed_hosts: AllowedHosts = ANY_HOST,
        unpaired_s: float = UNPAIRED_S,
    ) -> None:
        """`allowed_hosts` applies to endpoints named by requests, after their host names are resolved."""
        super().__init__(me, check=check, on_event=on_event, load=load, timing=timing, clock=clock)
        self._keys = keys
        self._allowed_hosts = allowed_hosts
        self._unpaired_s = unpaired_s
        self._endpoints: dict[str, _Endpoint] = {}
        self._reachability = Reachability()

    def connect(self, endpoint: str, *, client: str | None = None) -> None:
        """Pair with the prefill server at HOST:PORT, now or when it starts. Repeated calls have no effect. Any thread.

        With a `client` (its request named the endpoint), connection attempts end after `unpaired_s`. When too many such
        endpoints are unpaired, the least recently named one of this client is removed, so that a client cannot use up
        the limit of the others. Raises ValueError if `endpoint` is not HOST:PORT.
        """
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"a prefill endpoint is HOST:PORT, got {endpoint!r}")
        self._post(partial(self._add, endpoint, client))

    def _sessions(self) -> list[_Connection]:
        return [endpoint.connection for endpoint in self._endpoints.values() if endpoint.connection is not None]

    def _transmit(self, session: _Connection, frames: Sequence[Buffer]) -> None:
        session.socket.send_multipart(frames, zmq.NOBLOCK)

    def _add(self, name: str, client: str | None) -> None:
        now = self._clock()
        endpoint = self._endpoints.get(name)
        if endpoint is not None:
            endpoint.wanted_at = now
            return
        if client is not None:
            self._make_room(client, now)
            if len(self._endpoints) >= MAX_ENDPOINTS:
                reason = f"{MAX_ENDPOINTS} prefill endpoints are paired or configured, no more are accepted"
                self._emit(PeerRefused(name, reason))
                return
        self._endpoints[name] = _Endpoint(name, client=client, now=now, reconnect_min_s=self.timing.reconnect_min_s)

    def _make_room(self, client: str, now: float) -> None:
        """Make room for another endpoint of this client, if necessary. If this client has too many unpaired endpoints,
        remove one of them. If there are too many in total, remove one of the client with the most.
        """
        unpaired = [endpoint for endpoint in self._endpoints.values() if endpoint.unpaired]
        count_of = Counter(endpoint.client for endpoint in unpaired)
        largest: str | None = client
        if count_of[client] < MAX_UNPAIRED_PER_CLIENT:
            if len(unpaired) < MAX_UNPAIRED and len(self._endpoints) < MAX_ENDPOINTS:
                return
            largest = max(count_of, key=count_of.__getitem__, default=client)
        candidates = [endpoint for endpoint in unpaired if endpoint.client == largest]
        if candidates:
            self._give_up(
                min(candidates, key=lambda endpoint: endpoint.wanted_at), "too many endpoints are not paired", now
            )

    def _give_up(self, endpoint: _Endpoint, reason: str, now: float) -> None:
        self._end_attempt(endpoint, reason, now)
        self._reachability.forget(endpoint.name)
        del self._endpoints[endpoint.name]
        self._noise.warning(
            "no longer connecting to prefill endpoint %s, which a request named: %s", endpoint.name, reason
        )

    def _begin_attempt(self, endpoint: _Endpoint, now: float) -> None:
        try:
            ipaddress.ip_address(endpoint.host)
        except ValueError:
            # Resolve the name on a thread of its own: in ZMQ's I/O thread, one slow name server would block all other
            # peers. Resolve it again for every attempt: a restarted server may have a new address.
            endpoint.resolving = True
            threading.Thread(target=self._resolve, args=(endpoint,), name="decode-resolve", daemon=True).start()
        else:
            self._open(endpoint, endpoint.host, now)

    def _resolve(self, endpoint: _Endpoint) -> None:
        """Runs on its own thread."""
        address: str | None = None
        try:
            found = sockets.getaddrinfo(endpoint.host, None, type=sockets.SOCK_STREAM)
            found.sort(key=lambda entry: entry[0] != sockets.AF_INET)
            address = str(found[0][4][0])
        except (OSError, UnicodeError) as error:
            logger.debug("%s cannot be resolved: %s", endpoint.host, error)
        self._post(partial(self._resolved, endpoint, address))

    def _resolved(self, endpoint: _Endpoint, address: str | None) -> None:
        endpoint.resolving = False
        if self._endpoints.get(endpoint.name) is not endpoint:
            return  # it was removed
        if address is None:
            self._end_attempt(endpoint, f"host name {endpoint.host} cannot be resolved", self._clock())
        elif endpoint.client is not None and not self._allowed_hosts.allows_at(endpoint.host, address):
            reason = f"{endpoint.host} resolves to {address}, which bootstrap_allow does not permit for requests"
            self._report_refused(endpoint, reason)
            self._end_attempt(endpoint, reason, self._clock())
        else:
            self._open(endpoint, address, self._clock())

    def _open(self, endpoint: _Endpoint, address: str, now: float) -> None:
        try:
            self._connect(endpoint, address, now)
        except zmq.ZMQError as error:  # for example, too many sockets
            self._end_attempt(endpoint, f"cannot connect to {endpoint.name}: {error}", now)

    def _connect(self, endpoint: _Endpoint, address: str, now: float) -> None:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        endpoint.socket = socket
        endpoint.address = address
        self._poller.register(socket, zmq.POLLIN)
        self._configure(socket)
        # One socket per attempt: ZMQ must not reconnect by itself. The value -1 would disable reconnection too, but
        # with it ZMQ drops messages that were received and not read when the connection ends.
        socket.setsockopt(zmq.RECONNECT_IVL, ZMQ_RECONNECT_MS)
        # Random, so that no other process can guess it: prefill ignores a connection if another has the same routing
        # id.
        socket.setsockopt(zmq.ROUTING_ID, f"{self._me.instance[:64]}#{secrets.token_hex(8)}".encode())
        if ":" in address:
            socket.setsockopt(zmq.IPV6, 1)
            address = f"[{address}]"
        if self._keys is not None:
            self._keys.secure_client(socket)
        endpoint.monitor = ConnectionMonitor(self._context, socket, _MONITORED)
        self._poller.register(endpoint.monitor.socket, zmq.POLLIN)
        endpoint.attempt_ends_at = now + self.timing.connect_timeout_s
        socket.connect(f"tcp://{address}:{endpoint.port}")

    def _end_attempt(self, endpoint: _Endpoint, reason: str, now: float) -> None:
        """Close the socket, if there is one, and try again later."""
        if endpoint.monitor is not None:
            self._poller.unregister(endpoint.monitor.socket)
            endpoint.monitor.close()
            endpoint.monitor = None
        if endpoint.socket is not None:
            self._poller.unregister(endpoint.socket)
            endpoint.socket.close(linger=0)
            endpoint.socket = None
        address, endpoint.address = endpoint.address, None
        if endpoint.connection is None:
            if address is None:  # there was no connection attempt; `reason` has the cause
                self._reachability.forget(endpoint.name)
            else:
                self._reachability.failed(endpoint.name, address, now)
        else:
            if not endpoint.unpaired:
                endpoint.wanted_at = now  # its server may come back
            connection, endpoint.connection = endpoint.connection, None
            self._end_connection(connection, reason)
        if not endpoint.refused:
            endpoint.detail = reason
        endpoint.attempt_at = now + endpoint.backoff_s * random.uniform(0.75, 1.25)
        endpoint.backoff_s = min(2 * endpoint.backoff_s, self.timing.reconnect_max_s)

    def _end_connection(self, connection: _Connection, reason: str) -> None:
        self._end(connection, reason)
        for other in self._sessions():
            if other.state is SessionState.ALIAS and other.instance == connection.instance:
                other.state = SessionState.MEETING
                other.hello_at = self._clock()

    def _read(self, ready: dict[zmq.Socket[bytes], int], now: float) -> bool:
        all_read = True
        for endpoint in list(self._endpoints.values()):
            if endpoint.monitor is not None and endpoint.monitor.socket in ready:
                self._read_connection_events(endpoint, now)
            if endpoint.connection is not None and endpoint.socket in ready:
                all_read &= self._read_messages(endpoint.connection, now)
        return all_read

    def _read_messages(self, connection: _Connection, now: float) -> bool:
        for _ in range(MESSAGES_PER_TURN):
            if connection.socket.closed:
                return True
            frames = self._receive_frames(connection.socket)
            if frames is None:
                return True
            self._receive(connection, [frame.buffer for frame in frames], now)
        return False

    def _read_connection_events(self, endpoint: _Endpoint, now: float) -> None:
        while endpoint.monitor is not None and (event := endpoint.monitor.read()) is not None:
            kind, value = event
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                assert endpoint.socket is not None
                self._reachability.forget(endpoint.name)
                endpoint.failed_handshakes = 0
                endpoint.refused = False
                endpoint.detail = None
                endpoint.connection = _Connection(
                    endpoint.name, endpoint.socket, resend_after_s=self.timing.resend_after_s, now=now
                )
            elif kind == zmq.EVENT_CLOSED:
                endpoint.failed_handshakes = 0
                endpoint.refused = False
                self._end_attempt(endpoint, f"nothing listens at {endpoint.name}, or it cannot be reached", now)
            elif kind == zmq.EVENT_DISCONNECTED:
                if endpoint.connection is None:
                    self._end_attempt(endpoint, f"{endpoint.name} closed the connection during the handshake", now)
                else:
                    while not self._read_messages(endpoint.connection, now):
                        pass  # messages sent before the close, such as PrefillDone, are valid
                    self._end_attempt(endpoint, "its connection was closed", now)
            else:
                self._note_failed_handshake(endpoint, kind, value)

    def _note_failed_handshake(self, endpoint: _Endpoint, kind: int, value: int) -> None:
        """Find out why a handshake failed, and report it. A prefill server with another key closes the connection
        without an error, like a server that crashes. So only the second failure in a row is reported as an
        authentication failure. If we have no key, the peer may also be another kind of server, and the text says so.
        """
        self._counts["authentication_failures"] += kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        endpoint.failed_handshakes += 1
        certain = kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH or value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
        if kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and not certain:
            reason = f"{endpoint.name} is not the control port of a prefill server"
        elif certain or (self._keys is not None and endpoint.failed_handshakes > 1):
            reason = AUTHENTICATION_FAILED
        elif endpoint.failed_handshakes > 1 and not endpoint.refused:
            reason = HUNG_UP.format(endpoint.name)
        else:
            return
        endpoint.refused = True
        endpoint.detail = reason
        self._report_refused(endpoint, reason)

    def _admits(self, session: _Connection, now: float) -> bool:  # noqa: ARG002
        return session.state is SessionState.PAIRED

    def _introduce(self, session: _Connection, message: Hello | Welcome | Refused, now: float) -> None:
        match message:
            case Welcome():
                self._welcomed(session, message, now)
            case Refused(code="unknown_peer"):
                if session.state is SessionState.PAIRED:
                    self._lose(session, "it has no session for this server any more")
                    session.hello_at = now
            case Refused(code="mismatch", reason=reason):
                self._set_refused(session, reason)
            case Refused(reason=reason):
                self._note_complaint(session, reason)
            case Hello():
                self._complain(
                    session, "received Hello, but this is a decode server: only prefill servers accept Hello", now
                )

    def _welcomed(self, connection: _Connection, welcome: Welcome, now: float) -> None:
        if connection.state in (SessionState.PAIRED, SessionState.ALIAS):
            return  # the answer to an earlier Hello
        if connection.announced and connection.instance != welcome.instance:
            # A proxy connected the same stream to another process.
            self._end_attempt(self._endpoints[connection.name], "another instance took its endpoint", now)
            return
        if not self._accepts(connection, welcome):
            return
        paired = self._session_of.get(welcome.instance)
        if paired is not None and paired is not connection:
            # Send nothing but Hello on this connection: then prefill keeps using the other one.
            connection.state = SessionState.ALIAS
            connection.detail = f"same server as {paired.name}"
            self._emit(PeerAlias(connection.name, welcome.instance))
            return
        self._endpoints[connection.name].backoff_s = self.timing.reconnect_min_s
        self._beat(connection, now)  # tells prefill that its Welcome arrived
        self._set_paired(connection, connection.name)
        for other in self._sessions():  # a server that was lost and is back still has its other addresses
            if other.state is SessionState.ALIAS and other.instance == welcome.instance:
                self._emit(PeerAlias(other.name, welcome.instance))

    def _set_refused(self, session: _Connection, reason: str) -> None:
        super()._set_refused(session, reason)
        session.hello_at = self._clock() + self.timing.refused_retry_s

    def _report_refused(self, session: _Connection | _Endpoint, reason: str) -> None:
        self._counts["refused"] += 1
        if self._first_time(session.name, reason):
            self._refusals.warning("no pair with prefill %s: %s", session.name, reason)
            self._emit(PeerRefused(session.name, reason))

    def _tick(self, now: float) -> None:
        for endpoint in list(self._endpoints.values()):
            connection = endpoint.connection
            if endpoint.unpaired and now - endpoint.wanted_at > self._unpaired_s:
                self._give_up(endpoint, f"no request has named it for {self._unpaired_s:g} s", now)
            elif connection is not None:
                if connection.state not in (SessionState.PAIRED, SessionState.ALIAS) and now >= connection.hello_at:
                    refused = connection.state is SessionState.REFUSED
                    connection.hello_at = now + (self.timing.refused_retry_s if refused else self.timing.hello_retry_s)
                    self._reply(connection, self._me)
            elif endpoint.socket is not None:
                if now >= endpoint.attempt_ends_at:
                    self._end_attempt(
                        endpoint, f"{endpoint.name} did not answer for {self.timing.connect_timeout_s:g} s", now
                    )
            elif not endpoint.resolving and now >= endpoint.attempt_at:
                self._begin_attempt(endpoint, now)
        reasons = self._reachability.report(self._snapshot, now)
        if reasons is not None:
            self._emit(PeersUnreachable(reasons))

    def _take_snapshot(self) -> list[PeerSnapshot]:
        return [
            PeerSnapshot(
                endpoint.name,
                "refused" if endpoint.refused else "connecting",
                detail=self._reachability.reason(endpoint.name) or endpoint.detail,
            )
            if endpoint.connection is None
            else endpoint.connection.snapshot()
            for endpoint in self._endpoints.values()
        ]
