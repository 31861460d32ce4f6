"""The control connections of a decode server: one DEALER to each prefill server, made again for ever."""

import ipaddress
import logging
import random
import socket as sockets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import zmq

from ...configs.allowed_hosts import ANY_HOST, AllowedHosts
from ..plan.pairing import describe_versions
from ..protocol.messages import Hello, InstanceId, Load, Refused, Welcome
from ..protocol.wire import Buffer
from .curve import AUTHENTICATION_FAILED, ClusterKeys
from .events import Event, PeerAlias, PeerRefused, PeerSnapshot, PeersUnreachable, PeerUp
from .reachability import Reachability
from .session import Session, SessionState, Timing
from .thread import MESSAGES_PER_TURN, Control
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
    "{} hangs up on this server, which has no cluster_key: it has one, or is not the control port of a prefill server"
)
ZMQ_RECONNECT_MS = 3_600_000
MAX_ENDPOINTS = 1024
"""Endpoints may come with requests, so their number is bounded."""
MAX_UNPAIRED = 256
MAX_UNPAIRED_PER_CLIENT = 64
"""Endpoints of requests that are not paired. Each costs sockets and connection attempts, whoever is behind it."""
UNPAIRED_S = 30.0
"""How long an endpoint that no request names any more is tried."""


class _Connection(Session):
    """An established connection to one endpoint."""

    def __init__(self, endpoint: str, socket: zmq.Socket[bytes], *, resend_after_s: float, now: float) -> None:
        super().__init__(endpoint, resend_after_s=resend_after_s, now=now)
        self.socket = socket
        self.state = SessionState.MEETING
        self.hello_at = now


class _Endpoint:
    """One place to connect to. Every attempt has its own socket, so a connection and its routing id end together.

    `socket` is None between attempts and while the name is resolved; `connection` is there once ZMQ has shaken hands.
    """

    def __init__(self, endpoint: str, *, client: str | None, now: float, reconnect_min_s: float) -> None:
        self.endpoint = endpoint
        self.client = client
        """Whose request named it; None for a configured one, which is never given up."""
        self.wanted_at = now
        self.host, _, self.port = endpoint.rpartition(":")
        self.address: str | None = None
        """What this attempt connects to."""
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
        """Named by a request, and nobody has paired there, or not any more."""
        paired = self.connection is not None and self.connection.state in _PAIRED
        return self.client is not None and not paired


_PAIRED = (SessionState.PAIRED, SessionState.ALIAS, SessionState.LOST)
"""States of a connection whose server has paired. A lost one may be back, and its end is still to be told."""


class DecodeControl(Control):
    """Connects to prefill servers, introduces itself and stays connected whatever happens to them.

    `check(welcome)` returns one sentence when the pair must not be; protocol versions are compared before it is asked.
    """

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
        """`allowed_hosts` is for endpoints of requests, whose names are resolved here."""
        super().__init__(role="decode", on_event=on_event, load=load, timing=timing or Timing(), clock=clock)
        self._hello = me
        self._check = check
        self._keys = keys
        self._allowed_hosts = allowed_hosts
        self._unpaired_s = unpaired_s
        self._endpoints: dict[str, _Endpoint] = {}
        self._connection_of: dict[InstanceId, _Connection] = {}  # of each instance that was announced
        self._attempts = 0
        self._reachability = Reachability()

    def connect(self, endpoint: str, *, client: str | None = None) -> None:
        """Pair with the prefill server at HOST:PORT, now or whenever it is there. Again is a no-op. Any thread.

        With a `client`, whose request has named it, it is tried for a while only, and when there are too many that do
        not pair the least recently named one of that client gives way: nobody uses up what others need. Raises
        ValueError when it is not HOST:PORT.
        """
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"a prefill endpoint is HOST:PORT, got {endpoint!r}")
        self._post(partial(self._add, endpoint, client))

    @property
    def _me(self) -> Hello:
        return self._hello

    def _sessions(self) -> Iterable[Session]:
        return self._connections()

    def _connections(self) -> list[_Connection]:
        return [place.connection for place in self._endpoints.values() if place.connection is not None]

    def _session_of(self, instance: InstanceId) -> Session | None:
        return self._connection_of.get(instance)

    def _transmit(self, session: Session, frames: Sequence[Buffer]) -> None:
        assert isinstance(session, _Connection)
        session.socket.send_multipart(frames, zmq.NOBLOCK)

    def _add(self, endpoint: str, client: str | None) -> None:
        now = self._clock()
        place = self._endpoints.get(endpoint)
        if place is not None:
            place.wanted_at = now
            return
        if client is not None:
            self._make_room(client, now)
            if len(self._endpoints) >= MAX_ENDPOINTS:
                reason = f"{MAX_ENDPOINTS} prefill endpoints are paired or configured, no more are taken"
                self._emit(PeerRefused(endpoint, reason))
                return
        self._endpoints[endpoint] = _Endpoint(
            endpoint, client=client, now=now, reconnect_min_s=self.timing.reconnect_min_s
        )

    def _make_room(self, client: str, now: float) -> None:
        """For another endpoint of this client's: of those that are not paired, one of its own gives way or, when there
        are too many in all, one of the client that has most.
        """
        unpaired = [place for place in self._endpoints.values() if place.unpaired]
        count_of = Counter(place.client for place in unpaired)
        largest: str | None = client
        if count_of[client] < MAX_UNPAIRED_PER_CLIENT:
            if len(unpaired) < MAX_UNPAIRED and len(self._endpoints) < MAX_ENDPOINTS:
                return
            largest = max(count_of, key=count_of.__getitem__, default=client)
        candidates = [place for place in unpaired if place.client == largest]
        if candidates:
            self._give_up(min(candidates, key=lambda place: place.wanted_at), "it gives way to another endpoint", now)

    def _give_up(self, place: _Endpoint, reason: str, now: float) -> None:
        self._end_attempt(place, reason, now)
        self._reachability.forget(place.endpoint)
        del self._endpoints[place.endpoint]
        self._noise.warning("prefill endpoint %s of a request is given up: %s", place.endpoint, reason)

    def _begin_attempt(self, place: _Endpoint, now: float) -> None:
        try:
            ipaddress.ip_address(place.host)
        except ValueError:
            # Not in ZMQ's I/O thread, where one slow name server would silence all other peers; and anew for every
            # attempt, because a restarted server may have a new address.
            place.resolving = True
            threading.Thread(target=self._resolve, args=(place,), name="decode-resolve", daemon=True).start()
        else:
            self._open(place, place.host, now)

    def _resolve(self, place: _Endpoint) -> None:
        """Runs on a thread of its own."""
        address: str | None = None
        try:
            found = sockets.getaddrinfo(place.host, None, type=sockets.SOCK_STREAM)
            found.sort(key=lambda entry: entry[0] != sockets.AF_INET)
            address = str(found[0][4][0])
        except (OSError, UnicodeError) as error:
            logger.debug("%s cannot be resolved: %s", place.host, error)
        self._post(partial(self._resolved, place, address))

    def _resolved(self, place: _Endpoint, address: str | None) -> None:
        place.resolving = False
        if self._endpoints.get(place.endpoint) is not place:
            return  # it was given up
        if address is None:
            self._end_attempt(place, f"host name {place.host} cannot be resolved", self._clock())
        elif place.client is not None and not self._allowed_hosts.allows_at(place.host, address):
            reason = f"{place.host} is {address}, where requests may not send this server (bootstrap_allow)"
            self._report_refused(place.endpoint, reason)
            self._end_attempt(place, reason, self._clock())
        else:
            self._open(place, address, self._clock())

    def _open(self, place: _Endpoint, address: str, now: float) -> None:
        try:
            self._connect(place, address, now)
        except zmq.ZMQError as error:  # this process has no more sockets, say
            self._end_attempt(place, f"cannot connect to {place.endpoint}: {error}", now)

    def _connect(self, place: _Endpoint, address: str, now: float) -> None:
        self._attempts += 1
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        place.socket = socket
        place.address = address
        self._poller.register(socket, zmq.POLLIN)
        self._configure(socket)
        # One socket per attempt: ZMQ must not reconnect behind our back. Not -1, which says just that but makes ZMQ
        # throw away received messages that were not read yet when the connection ends.
        socket.setsockopt(zmq.RECONNECT_IVL, ZMQ_RECONNECT_MS)
        socket.setsockopt(zmq.ROUTING_ID, f"{self._me.instance[:64]}#{self._attempts}".encode())
        if ":" in address:
            socket.setsockopt(zmq.IPV6, 1)
            address = f"[{address}]"
        if self._keys is not None:
            self._keys.secure_client(socket)
        place.monitor = ConnectionMonitor(self._context, socket, _MONITORED)
        self._poller.register(place.monitor.socket, zmq.POLLIN)
        place.attempt_ends_at = now + self.timing.connect_timeout_s
        socket.connect(f"tcp://{address}:{place.port}")

    def _end_attempt(self, place: _Endpoint, reason: str, now: float) -> None:
        """Drop the socket, if there is one, and try again later."""
        if place.monitor is not None:
            self._poller.unregister(place.monitor.socket)
            place.monitor.close()
            place.monitor = None
        if place.socket is not None:
            self._poller.unregister(place.socket)
            place.socket.close(linger=0)
            place.socket = None
        address, place.address = place.address, None
        if place.connection is None:
            if address is None:  # nothing was connected to, and `reason` says why
                self._reachability.forget(place.endpoint)
            else:
                self._reachability.failed(place.endpoint, address, now)
        else:
            if not place.unpaired:
                place.wanted_at = now  # its server may come back
            connection, place.connection = place.connection, None
            self._end_connection(connection, reason)
        if not place.refused:
            place.detail = reason
        place.attempt_at = now + place.backoff_s * random.uniform(0.75, 1.25)
        place.backoff_s = min(2 * place.backoff_s, self.timing.reconnect_max_s)

    def _end_connection(self, connection: _Connection, reason: str) -> None:
        instance = connection.instance
        if instance is not None and self._connection_of.get(instance) is connection:
            del self._connection_of[instance]
        self._end(connection, reason)
        for other in self._connections():
            if other.state is SessionState.ALIAS and other.instance == instance:
                other.state = SessionState.MEETING
                other.hello_at = self._clock()

    def _read(self, ready: dict[zmq.Socket[bytes], int], now: float) -> bool:
        all_read = True
        for place in list(self._endpoints.values()):
            if place.monitor is not None and place.monitor.socket in ready:
                self._read_connection_events(place, now)
            if place.connection is not None and place.socket in ready:
                all_read &= self._read_messages(place.connection, now)
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

    def _read_connection_events(self, place: _Endpoint, now: float) -> None:
        while place.monitor is not None and (event := place.monitor.read()) is not None:
            kind, value = event
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                assert place.socket is not None
                self._reachability.forget(place.endpoint)
                place.failed_handshakes = 0
                place.refused = False
                place.detail = None
                place.connection = _Connection(
                    place.endpoint, place.socket, resend_after_s=self.timing.resend_after_s, now=now
                )
            elif kind == zmq.EVENT_CLOSED:
                place.failed_handshakes = 0
                place.refused = False
                self._end_attempt(place, f"nothing listens at {place.endpoint}, or it cannot be reached", now)
            elif kind == zmq.EVENT_DISCONNECTED:
                if place.connection is None:
                    self._end_attempt(place, f"{place.endpoint} closed the connection while shaking hands", now)
                else:
                    while not self._read_messages(place.connection, now):
                        pass  # its last words, such as a PrefillDone, count
                    self._end_attempt(place, "its connection was closed", now)
            else:
                self._note_failed_handshake(place, kind, value)

    def _note_failed_handshake(self, place: _Endpoint, kind: int, value: int) -> None:
        """A prefill server with another key hangs up without a word, as does one that dies: only the second in a row
        is called by its name. Where we have no key it may as well be something else that hangs up, until more is known.
        """
        self._counts["authentication_failures"] += kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        place.failed_handshakes += 1
        certain = kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH or value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
        if kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and not certain:
            reason = f"{place.endpoint} is not the control port of a prefill server"
        elif certain or (self._keys is not None and place.failed_handshakes > 1):
            reason = AUTHENTICATION_FAILED
        elif place.failed_handshakes > 1 and not place.refused:
            reason = HUNG_UP.format(place.endpoint)
        else:
            return
        place.refused = True
        place.detail = reason
        self._report_refused(place.endpoint, reason)

    def _admits(self, session: Session, now: float) -> bool:  # noqa: ARG002
        return session.state is SessionState.PAIRED

    def _introduce(self, session: Session, message: Hello | Welcome | Refused, now: float) -> None:
        assert isinstance(session, _Connection)
        match message:
            case Welcome():
                self._welcomed(session, message, now)
            case Refused(code="unknown_peer"):
                if session.state is SessionState.PAIRED:
                    self._lose(session, "it had lost this server")
                    session.hello_at = now
            case Refused(code="mismatch", reason=reason):
                self._set_refused(session, reason, now)
            case Refused(reason=reason):
                self._counts["complaints_received"] += 1
                if self._first_time(str(session), "complaint"):
                    self._refusals.warning("%s does not understand this server: %s", session, reason)
            case Hello():
                self._complain(session, "Hello is for prefill servers: this is a decode server", now)

    def _welcomed(self, connection: _Connection, welcome: Welcome, now: float) -> None:
        if connection.state in (SessionState.PAIRED, SessionState.ALIAS):
            return  # the answer to an earlier Hello
        if connection.announced and connection.instance != welcome.instance:
            # Something between us connected the same stream to another process.
            self._end_attempt(self._endpoints[connection.name], "another instance took its place", now)
            return
        connection.instance = welcome.instance
        connection.introduction = welcome
        if welcome.protocol_version != self._me.protocol_version:
            self._refuse_version(connection, welcome.protocol_version)
            return
        reason = self._check(welcome)
        if reason is not None:
            self._refuse(connection, reason, now)
            return
        connection.detail = None
        paired = self._connection_of.get(welcome.instance)
        if paired is not None and paired is not connection:
            # Prefill goes on using the other connection as long as nothing but Hello is sent on this one.
            connection.state = SessionState.ALIAS
            connection.detail = f"same server as {paired.name}"
            self._emit(PeerAlias(connection.name, welcome.instance))
            return
        self._connection_of[welcome.instance] = connection
        connection.state = SessionState.PAIRED
        connection.announced = True
        connection.link.restart()
        self._endpoints[connection.name].backoff_s = self.timing.reconnect_min_s
        self._beat(connection, now)  # tells prefill that its Welcome arrived
        self._counts["peers_up"] += 1
        logger.info("paired with prefill %s", connection)
        self._emit(PeerUp(welcome.instance, connection.name, welcome))

    def _refuse_version(self, session: Session, version: int) -> None:
        assert isinstance(session, _Connection)
        self._refuse(session, describe_versions(prefill=version, decode=self._me.protocol_version), self._clock())

    def _refuse(self, connection: _Connection, reason: str, now: float) -> None:
        self._set_refused(connection, reason, now)
        self._reply(connection, Refused("mismatch", reason))

    def _set_refused(self, connection: _Connection, reason: str, now: float) -> None:
        if connection.state is SessionState.PAIRED:
            self._lose(connection, reason)
        connection.state = SessionState.REFUSED
        connection.detail = reason
        connection.hello_at = now + self.timing.refused_retry_s
        self._report_refused(connection.name, reason)

    def _report_refused(self, endpoint: str, reason: str) -> None:
        self._counts["refused"] += 1
        if self._first_time(endpoint, reason):
            self._refusals.warning("no pair with prefill %s: %s", endpoint, reason)
            self._emit(PeerRefused(endpoint, reason))

    def _tick(self, now: float) -> None:
        for place in list(self._endpoints.values()):
            connection = place.connection
            if place.unpaired and now - place.wanted_at > self._unpaired_s:
                self._give_up(place, f"no request has named it for {self._unpaired_s:g} s", now)
            elif connection is not None:
                if connection.state not in (SessionState.PAIRED, SessionState.ALIAS) and now >= connection.hello_at:
                    refused = connection.state is SessionState.REFUSED
                    connection.hello_at = now + (self.timing.refused_retry_s if refused else self.timing.hello_retry_s)
                    self._reply(connection, self._me)
            elif place.socket is not None:
                if now >= place.attempt_ends_at:
                    self._end_attempt(
                        place, f"{place.endpoint} did not answer for {self.timing.connect_timeout_s:g} s", now
                    )
            elif not place.resolving and now >= place.attempt_at:
                self._begin_attempt(place, now)
        reasons = self._reachability.report(self._snapshot, now)
        if reasons is not None:
            self._emit(PeersUnreachable(reasons))

    def _take_snapshot(self) -> list[PeerSnapshot]:
        return [
            PeerSnapshot(
                place.endpoint,
                "refused" if place.refused else "connecting",
                detail=self._reachability.reason(place.endpoint) or place.detail,
            )
            if place.connection is None
            else place.connection.snapshot(place.endpoint)
            for place in self._endpoints.values()
        ]
