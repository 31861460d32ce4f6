"""The control connections of a decode server: one DEALER per address of a prefill server, reconnected without limit."""

import dataclasses
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import zmq

from ...configs.allowed_hosts import ANY_HOST, AllowedHosts
from ..protocol.messages import Hello, Load, Refused, Welcome
from ..protocol.wire import Buffer
from .curve import AUTHENTICATION_FAILED, ClusterKeys
from .endpoints import Address, Connection, Endpoint, resolve
from .events import Event, PeerAlias, PeerRefused, PeerSnapshot, PeersUnreachable, PublicState
from .peers import MESSAGES_PER_TURN, Control
from .reachability import Reachability
from .session import SessionState, Timing
from .thread import Ready
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

_UP = (SessionState.PAIRED, SessionState.ALIAS)
HUNG_UP = (
    "{} closes connections of this server, which has no cluster_key: "
    "it needs one, or is not the control port of a prefill server"
)
ZMQ_RECONNECT_MS = 3_600_000
"""Practically never: this module reconnects itself."""
MAX_ENDPOINTS = 1024
"""Most addresses. Requests may name endpoints, and a name server may answer with many addresses."""
MAX_REQUESTED_ADDRESSES = 3
"""Most addresses of a name that a request gives: enough to see that it stands for several servers."""
MAX_UNPAIRED = 256
MAX_UNPAIRED_PER_CLIENT = 64
"""Most endpoints that requests have named and that are not paired: in total, and of one client. Each endpoint costs
sockets and connection attempts.
"""
UNPAIRED_S = 30.0
"""How long an unpaired endpoint is tried after the last request that named it."""


class DecodeControl(Control[Connection, Welcome]):
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
        resolve: Callable[[str], list[str]] = resolve,
    ) -> None:
        """`allowed_hosts` applies to endpoints named by requests, after their host names are resolved."""
        super().__init__(me, turn=self._turn, check=check, on_event=on_event, load=load, timing=timing, clock=clock)
        self._keys = keys
        self._allowed_hosts = allowed_hosts
        self._unpaired_s = unpaired_s
        self._resolve = resolve
        self._endpoints: dict[str, Endpoint] = {}
        self._reachability = Reachability()

    def connect(self, endpoint: str, *, client: str | None = None) -> None:
        """Pair with the prefill servers at HOST:PORT, now or when they start; HOST may be a name that stands for
        several addresses. Repeated calls have no effect. Any thread.

        With a `client` (its request named the endpoint), connection attempts end after `unpaired_s`. When too many such
        endpoints are unpaired, the least recently named one of this client is removed, so that a client cannot use up
        the limit of the others. Raises ValueError if `endpoint` is not HOST:PORT.
        """
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"a prefill endpoint is HOST:PORT, got {endpoint!r}")
        self._thread.post(partial(self._add, endpoint, client))

    def _addresses(self) -> list[Address]:
        return [address for endpoint in self._endpoints.values() for address in endpoint.addresses.values()]

    @property
    def _is_full(self) -> bool:
        return sum(max(1, len(endpoint.addresses)) for endpoint in self._endpoints.values()) >= MAX_ENDPOINTS

    def _turn(self, ready: Ready, now: float) -> None:
        self._keep_all_up(now, all_read=self._read(ready, now))
        self._tick(now)
        self._snapshot = [snapshot for endpoint in self._endpoints.values() for snapshot in self._snapshots(endpoint)]

    def _add(self, name: str, client: str | None) -> None:
        now = self._clock()
        endpoint = self._endpoints.get(name)
        if endpoint is not None:
            endpoint.wanted_at = now
            return
        if client is not None:
            self._make_room(client, now)
            if self._is_full:
                reason = f"{MAX_ENDPOINTS} prefill endpoints are paired or configured, no more are accepted"
                self._emit(PeerRefused(name, reason))
                return
        self._endpoints[name] = Endpoint(name, client=client, now=now, timing=self.timing)

    def _make_room(self, client: str, now: float) -> None:
        """Make room for another endpoint of this client, if necessary. If this client has too many unpaired endpoints,
        remove one of them. If there are too many in total, remove one of the client with the most.
        """
        unpaired = [endpoint for endpoint in self._endpoints.values() if endpoint.unpaired]
        count_of = Counter(endpoint.client for endpoint in unpaired)
        largest: str | None = client
        if count_of[client] < MAX_UNPAIRED_PER_CLIENT:
            if len(unpaired) < MAX_UNPAIRED and not self._is_full:
                return
            largest = max(count_of, key=count_of.__getitem__, default=client)
        candidates = [endpoint for endpoint in unpaired if endpoint.client == largest]
        if candidates:
            self._give_up(
                min(candidates, key=lambda endpoint: endpoint.wanted_at), "too many endpoints are not paired", now
            )

    def _give_up(self, endpoint: Endpoint, reason: str, now: float) -> None:
        for address in list(endpoint.addresses.values()):
            self._remove(address, reason, now)
        del self._endpoints[endpoint.name]
        self._noise.warning(
            "no longer connecting to prefill endpoint %s, which a request named: %s", endpoint.name, reason
        )

    def _remove(self, address: Address, reason: str, now: float) -> None:
        self._end_attempt(address, reason, now)
        self._reachability.forget(address.label)
        address.endpoint.addresses.pop(address.ip, None)

    def _look_up(self, endpoint: Endpoint) -> None:
        endpoint.look_up(self._resolve, lambda ips: self._thread.post(partial(self._looked_up, endpoint, ips)))

    def _looked_up(self, endpoint: Endpoint, ips: list[str] | None) -> None:
        """Take in new addresses of a name. One that is gone stays while a server is paired there."""
        if self._endpoints.get(endpoint.name) is not endpoint:
            return  # it was removed
        now = self._clock()
        allowed = ips and self._allowed(endpoint, ips)
        endpoint.looked_up(allowed, now)
        if ips and not allowed:
            endpoint.problem = (
                f"{endpoint.host} resolves to {ips[0]}, which bootstrap_allow does not permit for requests"
            )
            self._report_refused(endpoint.name, endpoint.problem)
        if allowed is None:
            return
        known = endpoint.addresses
        for ip in allowed:
            if ip in known:
                known[ip].vanished = False
            elif known and self._is_full:
                self._noise.warning("%s has more addresses than the %d that are used", endpoint.name, MAX_ENDPOINTS)
                break
            else:
                known[ip] = Address(endpoint, ip, now=now)
                logger.info("prefill %s has the address %s", endpoint.name, ip)
        for address in list(known.values()):
            if address.ip not in allowed and not address.vanished:
                address.vanished = True
                logger.info("prefill %s no longer has the address %s", endpoint.name, address.ip)
                if not address.paired:
                    self._remove(address, "its name has other addresses now", now)

    def _allowed(self, endpoint: Endpoint, ips: list[str]) -> list[str]:
        if endpoint.client is None:
            return ips
        allowed = [ip for ip in ips if self._allowed_hosts.allows_at(endpoint.host, ip)]
        return allowed[:MAX_REQUESTED_ADDRESSES]

    def _begin_attempt(self, address: Address, now: float) -> None:
        try:
            self._connect(address, now)
        except zmq.ZMQError as error:  # for example, too many sockets
            self._end_attempt(address, f"cannot connect to {address.name}: {error}", now)

    def _connect(self, address: Address, now: float) -> None:
        socket = self._thread.socket(zmq.DEALER)
        address.socket = socket
        self._thread.poller.register(socket, zmq.POLLIN)
        # One socket per attempt: ZMQ must not reconnect by itself. The value -1 would disable reconnection too, but
        # with it ZMQ drops messages that were received and not read when the connection ends.
        socket.setsockopt(zmq.RECONNECT_IVL, ZMQ_RECONNECT_MS)
        # Random, so that no other process can guess it: prefill ignores a connection if another has the same routing
        # id.
        socket.setsockopt(zmq.ROUTING_ID, f"{self._me.instance[:64]}#{secrets.token_hex(8)}".encode())
        if ":" in address.ip:
            socket.setsockopt(zmq.IPV6, 1)
        if self._keys is not None:
            self._keys.secure_client(socket)
        address.monitor = ConnectionMonitor(self._thread.context, socket, _MONITORED)
        self._thread.poller.register(address.monitor.socket, zmq.POLLIN)
        address.attempt_ends_at = now + self.timing.connect_timeout_s
        socket.connect(f"tcp://{address.label}")

    def _end_attempt(self, address: Address, reason: str, now: float) -> None:
        """Close the socket, if there is one, and try again later."""
        endpoint = address.endpoint
        attempted = address.socket is not None
        if address.monitor is not None:
            self._thread.poller.unregister(address.monitor.socket)
            address.monitor.close()
            address.monitor = None
        if address.socket is not None:
            self._thread.poller.unregister(address.socket)
            address.socket.close(linger=0)
            address.socket = None
        if address.connection is None:
            if attempted:
                self._reachability.failed(address.label, address.ip, now)
            else:  # `reason` has the cause
                self._reachability.forget(address.label)
        else:
            if not endpoint.unpaired:
                endpoint.wanted_at = now  # its server may come back
            connection, address.connection = address.connection, None
            self._end_connection(connection, reason)
        if not address.refused:
            address.detail = reason
        address.tried = True
        address.retry_later(now)
        endpoint.look_up_soon(now)
        if address.vanished:
            endpoint.addresses.pop(address.ip, None)

    def _end_connection(self, connection: Connection, reason: str) -> None:
        self._end(connection, reason)
        for other in self._sessions:
            if other.state is SessionState.ALIAS and other.instance == connection.instance:
                other.state = SessionState.MEETING
                other.hello_at = self._clock()

    def _read(self, ready: dict[zmq.Socket[bytes], int], now: float) -> bool:
        all_read = True
        for address in self._addresses():
            if address.monitor is not None and address.monitor.socket in ready:
                self._read_connection_events(address, now)
            if address.connection is not None and address.socket in ready:
                all_read &= self._read_messages(address.connection, now)
        return all_read

    def _read_messages(self, connection: Connection, now: float) -> bool:
        for _ in range(MESSAGES_PER_TURN):
            if connection.socket.closed:
                return True
            try:
                frames = connection.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return True
            self._thread.guard(partial(self._handle, connection, [frame.buffer for frame in frames], now))
        return False

    def _handle(self, connection: Connection, frames: Sequence[Buffer], now: float) -> None:
        match self._receive(connection, frames, now):
            case "broken":
                self._end_attempt(connection.address, connection.detail or "", now)
            case Hello() | Welcome() | Refused() as message:
                self._introduce(connection, message, now)

    def _read_connection_events(self, address: Address, now: float) -> None:
        while address.monitor is not None and (event := address.monitor.read()) is not None:
            kind, value = event
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                assert address.socket is not None
                self._reachability.forget(address.label)
                address.failed_handshakes = 0
                address.refused = False
                address.detail = None
                address.connection = Connection(
                    address, address.socket, resend_after_s=self.timing.resend_after_s, now=now
                )
                self._sessions.append(address.connection)
            elif kind == zmq.EVENT_CLOSED:
                address.failed_handshakes = 0
                address.refused = False
                self._end_attempt(address, f"nothing listens at {address.name}, or it cannot be reached", now)
            elif kind == zmq.EVENT_DISCONNECTED:
                if address.connection is None:
                    self._end_attempt(address, f"{address.name} closed the connection during the handshake", now)
                else:
                    while not self._read_messages(address.connection, now):
                        pass  # messages sent before the close, such as PrefillDone, are valid
                    self._end_attempt(address, "its connection was closed", now)
            else:
                self._note_failed_handshake(address, kind, value)

    def _note_failed_handshake(self, address: Address, kind: int, value: int) -> None:
        """Find out why a handshake failed, and report it. A prefill server with another key closes the connection
        without an error, like a server that crashes or an HTTP port. So only the second failure in a row is reported as
        an authentication failure, when a probe has found that the server speaks ZMQ. If we have no key, the peer may
        also be another kind of server, and the text says so.
        """
        self._counts["authentication_failures"] += kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        address.failed_handshakes += 1
        repeated = address.failed_handshakes > 1 and self._reachability.speaks_zmq(address.label)
        certain = kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH or value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
        if kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and not certain:
            reason = f"{address.name} is not the control port of a prefill server"
        elif certain or (self._keys is not None and repeated):
            reason = AUTHENTICATION_FAILED
        elif repeated and not address.refused:
            reason = HUNG_UP.format(address.name)
        else:
            return
        address.refused = True
        address.detail = reason
        self._report_refused(address.name, reason)

    def _introduce(self, session: Connection, message: Hello | Welcome | Refused, now: float) -> None:
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

    def _welcomed(self, connection: Connection, welcome: Welcome, now: float) -> None:
        if connection.state in _UP:
            return  # the answer to an earlier Hello
        if connection.announced and connection.instance != welcome.instance:
            # A proxy connected the same stream to another process.
            self._end_attempt(connection.address, "another instance took its endpoint", now)
            return
        if not self._accepts(connection, welcome):
            return
        paired = self._session_of.get(welcome.instance)
        if paired is not None and paired is not connection:
            # Send nothing but Hello on this connection: then prefill keeps using the other one.
            connection.state = SessionState.ALIAS
            connection.detail = f"same server as {paired.name}"
            self._announce(connection)
            return
        connection.address.tried = True
        connection.address.backoff_s = self.timing.reconnect_min_s
        self._beat(connection, now)  # tells prefill that its Welcome arrived
        self._set_paired(connection, connection.address.names[0])
        self._announce(connection, known=1)
        for other in self._sessions:  # a server that was lost and is back still has its other addresses
            if other.state is SessionState.ALIAS and other.instance == welcome.instance:
                self._announce(other)

    def _announce(self, connection: Connection, *, known: int = 0) -> None:
        """Tell the scheduler by which names requests may name this server, after those that it knows."""
        assert connection.instance is not None
        for name in connection.address.names[known:]:
            self._emit(PeerAlias(name, connection.instance))

    def _tick(self, now: float) -> None:
        for endpoint in list(self._endpoints.values()):
            if endpoint.unpaired and now - endpoint.wanted_at > self._unpaired_s:
                self._give_up(endpoint, f"no request has named it for {self._unpaired_s:g} s", now)
                continue
            if endpoint.is_name and not endpoint.looking_up and now >= endpoint.lookup_at:
                self._look_up(endpoint)
            for address in list(endpoint.addresses.values()):
                self._tick_address(address, now)
            if endpoint.settles(now):
                for address in endpoint.addresses.values():
                    if address.connection is not None and address.connection.state in _UP:
                        self._announce(address.connection)
        reasons = self._reachability.report(self._snapshot, now)
        if reasons is not None:
            self._emit(PeersUnreachable(reasons))

    def _tick_address(self, address: Address, now: float) -> None:
        connection = address.connection
        if connection is not None:
            if connection.state not in _UP and now >= connection.hello_at:
                refused = connection.state is SessionState.REFUSED
                connection.hello_at = now + (self.timing.refused_retry_s if refused else self.timing.hello_retry_s)
                self._reply(connection, self._me)
        elif address.socket is not None:
            if now >= address.attempt_ends_at:
                self._end_attempt(
                    address, f"{address.name} did not answer for {self.timing.connect_timeout_s:g} s", now
                )
        elif now >= address.attempt_at:
            self._begin_attempt(address, now)

    def _snapshots(self, endpoint: Endpoint) -> list[PeerSnapshot]:
        if not endpoint.addresses:
            return [PeerSnapshot(endpoint.name, "connecting", detail=endpoint.problem)]
        return [self._snapshot_of(address) for address in endpoint.addresses.values()]

    def _snapshot_of(self, address: Address) -> PeerSnapshot:
        endpoint, ip = address.endpoint, address.ip if address.endpoint.is_name else None
        if address.connection is not None:
            return dataclasses.replace(address.connection.snapshot(), endpoint=endpoint.name, address=ip)
        state: PublicState = "refused" if address.refused else "connecting"
        detail = self._reachability.reason(address.label) or address.detail
        return PeerSnapshot(endpoint.name, state, detail=detail, address=ip)
