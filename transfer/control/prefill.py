"""The control port of a prefill server: one ROUTER, any number of decode servers."""

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import zmq

from ..protocol.messages import Hello, Load, Refused, Welcome
from ..protocol.wire import MAX_FRAME_BYTES, Buffer
from .bind import bind_tcp
from .curve import AUTHENTICATION_FAILED, ClientGate, ClusterKeys
from .events import Event, PeerRefused
from .peers import MESSAGES_PER_TURN, Control
from .session import Session, SessionState, Timing
from .thread import Ready
from .unknown_peers import UnknownPeers
from .wakeup import ConnectionMonitor

logger = logging.getLogger(__name__)

_MONITORED = (
    zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
MAX_MESSAGE_BYTES = 4 * MAX_FRAME_BYTES
"""The largest message of a decode server: a message and its three arrays."""
EVENTS_PER_TURN = 1024
"""Connection events read before messages are read and heartbeats are sent: thousands of peers may connect at once."""
_WRONG_KEY = (zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC, zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)


class _Route(Session):
    """The connection of one decode server: its ZMQ routing id, and the file descriptor that monitor events name."""

    def __init__(
        self, name: str, router: zmq.Socket[bytes], routing_id: bytes, fd: int, *, resend_after_s: float, now: float
    ) -> None:
        def transmit(frames: Sequence[Buffer]) -> None:
            router.send_multipart([routing_id, *frames], zmq.NOBLOCK)

        super().__init__(name, transmit, resend_after_s=resend_after_s, now=now)
        self.routing_id = routing_id
        self.fd = fd


class PrefillControl(Control[_Route, Hello]):
    """Binds the bootstrap port and pairs with every decode server that sends Hello and passes `check`.

    Port 0 binds a free port; `port` is the bound one. Raises StartupError if it cannot bind.
    """

    def __init__(
        self,
        bind_host: str,
        port: int,
        me: Welcome,
        *,
        check: Callable[[Hello], str | None],
        on_event: Callable[[Event], None],
        load: Callable[[], Load] = Load,
        keys: ClusterKeys | None = None,
        timing: Timing | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(me, turn=self._turn, check=check, on_event=on_event, load=load, timing=timing, clock=clock)
        self._routes: dict[bytes, _Route] = {}
        self._route_of_fd: dict[int, _Route] = {}
        self._connections = UnknownPeers(MAX_MESSAGE_BYTES, self._report_cut)
        self._limits_at = clock()
        self._router = self._thread.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._gate = ClientGate(self._thread.context, keys)
        self._gate.protect(self._router)
        self._thread.poller.register(self._gate.socket, zmq.POLLIN)
        self._monitor = ConnectionMonitor(self._thread.context, self._router, _MONITORED)
        self._thread.poller.register(self._monitor.socket, zmq.POLLIN)
        self._thread.poller.register(self._router, zmq.POLLIN)
        try:
            self.port = bind_tcp(self._router, bind_host, port, "bootstrap port", "--bootstrap-port")
            self._connections.port = self.port
        except BaseException:
            self._thread.release()
            raise

    def _turn(self, ready: Ready, now: float) -> None:
        self._keep_all_up(now, all_read=self._read(ready, now))
        if now >= self._limits_at:
            self._limits_at = now + self.timing.tick_s
            self._connections.enforce_limits()
        self._snapshot = [route.snapshot() for route in self._sessions]

    def _read(self, ready: dict[zmq.Socket[bytes], int], now: float) -> bool:
        if self._gate.socket in ready:
            self._gate.answer_all()
        self._read_connections(EVENTS_PER_TURN)
        self._thread.soon = self._connections.cut_excess()
        for _ in range(MESSAGES_PER_TURN):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return True
            route = self._route_of_sender(frames[0], sum(map(len, frames[1:])), now)
            if route is not None:
                self._thread.guard(partial(self._handle, route, [frame.buffer for frame in frames[1:]], now))
        return False

    def _handle(self, route: _Route, frames: Sequence[Buffer], now: float) -> None:
        match self._receive(route, frames, now):
            case "unpaired" if route.state is SessionState.MEETING:
                if self._pair(route, now):
                    self._receive(route, frames, now)
            case "unpaired":
                self._counts["unknown_peer"] += 1
                self._reply(route, Refused("unknown_peer", "this server has no session for this peer: send Hello"))
            case "broken":
                self._connections.cut(route.fd, route.detail or "")
            case Hello() | Welcome() | Refused() as message:
                self._introduce(route, message, now)

    def _route_of_sender(self, routing_id: zmq.Frame, size_bytes: int, now: float) -> _Route | None:
        """The route that a message of this size came on, a new one for an unknown peer; None if its connection is not
        known, or closed.
        """
        try:
            fd = int(routing_id.get(zmq.SRCFD))
            address = str(routing_id.get("Peer-Address"))
        except zmq.ZMQError:
            self._counts["malformed"] += 1
            self._noise.warning("ignoring a message on the control port: its connection cannot be determined")
            return None
        if fd not in self._connections:
            self._read_connections()  # it may be new
        if not self._connections.message_read(fd, size_bytes):
            return None
        route = self._routes.get(routing_id.bytes)
        if route is not None and route.fd != fd:
            self._forget(route, "another connection has the same routing id")
            route = None
        if route is None:
            # Stored once it sends Hello.
            resend_after_s = self.timing.resend_after_s
            route = _Route(address, self._router, routing_id.bytes, fd, resend_after_s=resend_after_s, now=now)
        return route

    def _read_connections(self, limit: int | None = None) -> None:
        """Read all connection events, or `limit` of them: the poller reports the rest in the next iteration."""
        for _ in itertools.count() if limit is None else range(limit):
            match self._monitor.read():
                case None:
                    return
                case (zmq.EVENT_ACCEPTED, fd):
                    self._connections.accepted(fd)
                case (zmq.EVENT_DISCONNECTED, fd):
                    self._connections.closed(fd)
                    route = self._route_of_fd.get(fd)
                    if route is not None:
                        self._forget(route, "its connection was closed")
                case (kind, value) if kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH or value in _WRONG_KEY:
                    self._counts["authentication_failures"] += 1
                    if self._first_time("", "authentication"):
                        logger.warning("a connecting peer was refused: %s", AUTHENTICATION_FAILED)
                        self._emit(PeerRefused("a connecting peer", AUTHENTICATION_FAILED))
                case _:
                    if self._first_time("", "handshake"):
                        logger.warning("a client that does not speak ZMQ connected to the control port")

    def _introduce(self, session: _Route, message: Hello | Welcome | Refused, now: float) -> None:
        match message:
            case Hello():
                self._greet(session, message, now)
            case Refused(code="mismatch", reason=reason) if session.instance is not None:
                self._set_refused(session, reason)
            case Refused(reason=reason):
                self._note_complaint(session, reason)
            case Welcome():
                self._complain(
                    session, "received Welcome, but this is a prefill server: only decode servers accept Welcome", now
                )

    def _greet(self, route: _Route, hello: Hello, now: float) -> None:
        # Read connection events first: the descriptor may have been reused, and this Hello may be from the connection
        # that had it before.
        self._read_connections()
        if route.fd not in self._connections:
            return
        if route.instance not in (None, hello.instance):
            self._forget(route, "another instance uses its connection")
            resend_after_s = self.timing.resend_after_s
            route = _Route(route.name, self._router, route.routing_id, route.fd, resend_after_s=resend_after_s, now=now)
        previous = self._route_of_fd.get(route.fd)
        if previous is not None and previous is not route:
            self._forget(previous, "its connection was closed")
        if route.routing_id not in self._routes:
            self._sessions.append(route)
        self._routes[route.routing_id] = route
        self._route_of_fd[route.fd] = route
        if not self._accepts(route, hello):
            return
        if route.state is SessionState.PAIRED:
            self._lose(route, "it had lost this server and sent Hello again")
        route.state = SessionState.MEETING
        self._reply(route, self._me)

    def _pair(self, route: _Route, now: float) -> bool:
        """Decode has received our Welcome and uses this connection: pair with it. Returns False if the instance still
        sends on another connection, because a process that replays recorded messages must not end that pair. If decode
        itself has connected again, the other connection soon becomes silent, and decode repeats what was not
        acknowledged.
        """
        assert route.instance is not None
        # also if it has to wait: its messages are many then, and it sends them again
        self._connections.introduced(route.fd)
        previous = self._session_of.get(route.instance)
        if previous is not None and previous is not route:
            if now - previous.heard_at < self.timing.silent_s:
                self._counts["unknown_peer"] += 1
                self._noise.warning("ignoring a second connection of decode %s: its first one is in use", route)
                return False
            self._forget(previous, "it connected again")
        route.heartbeat_at = now
        self._set_paired(route, endpoint=None)
        return True

    def _forget(self, route: _Route, reason: str) -> None:
        self._routes.pop(route.routing_id, None)
        self._route_of_fd.pop(route.fd, None)
        self._end(route, reason)

    def _report_cut(self, reason: str) -> None:
        self._counts["connections_cut"] += 1
        self._noise.warning("a connection to the control port was closed: %s", reason)
