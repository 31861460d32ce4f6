"""The control thread of a server: the common part of prefill (`prefill.py`) and decode (`decode.py`).

One thread owns all sockets and sleeps in one poller. Other threads post work to it (`send`), and it calls `on_event`,
whose owner puts the event into its own queue and returns. Messages of peers and exceptions of callbacks never end the
thread: they are logged and counted.

How two servers pair, on every connection (one ZMQ connection = one Session = one ReliableChannel):

    decode                     prefill
    Hello             ->                          repeated every second until it is answered
                      <-       Welcome            or Refused(mismatch)
    Heartbeat         ->                          decode is paired when Welcome arrives, prefill when this arrives

A side that has lost the other one introduces itself again on the same connection: decode with Hello, prefill by asking
for it with Refused(unknown_peer). The channel survives that, so queued messages (an Abort) are delivered. It ends with
the connection.

Silence is measured by heartbeats, after all pending input was read; time in which this process did not run is not
counted as silence of its peers. ZMQ's own heartbeats are off: they would close the connection of a stopped process
(SIGSTOP), and a closed connection means that the process cannot write any more.
"""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec
import zmq

from ...configs.logs import rate_limited
from ..protocol.messages import AnyMessage, Heartbeat, HeartbeatAck, Hello, InstanceId, Load, Refused, Welcome
from ..protocol.wire import MAX_FRAME_BYTES, Body, Buffer, IntArray, OtherVersionError, WireError, decode, encode, split
from .events import Event, LoadReported, MessageReceived, PeerClosed, PeerLost, PeerSnapshot, SendFailed
from .reliable_channel import ChannelFullError, ChannelProtocolError, is_sequenced
from .session import Session, SessionState, Timing
from .wakeup import Wakeup

logger = logging.getLogger(__name__)

MESSAGES_PER_TURN = 4096
"""Messages read from one socket before the next socket is read."""
ACK_EVERY = 64
"""After this many received messages, an acknowledgement is sent before the next regular heartbeat."""
SEND_QUEUE_MESSAGES = 10_000
"""ZMQ's own queue per peer. A channel has at most its window in flight, so only heartbeats can fill this queue."""
MAX_SOCKETS = 8192
"""ZMQ sockets in one process. Decode has three per prefill endpoint."""
REMEMBERED_WARNINGS = 1024
ANNOUNCE_SHUTDOWN_S = 0.3
"""How long close() waits for paired peers to acknowledge that this server shuts down."""
LAST_WORDS_S = 1.0
"""How long close() waits for paired peers to acknowledge the messages sent before."""

COUNTERS = (
    "messages_sent",
    "messages_received",
    "messages_resent",
    "messages_out_of_order",
    "heartbeats_received",
    "malformed",
    "complaints_received",
    "unknown_peer",
    "refused",
    "authentication_failures",
    "connections_cut",
    "peers_up",
    "peers_lost",
    "peers_closed",
    "sends_dropped_by_zmq",
    "sends_to_unknown_instance",
    "sends_over_limit",
    "event_errors",
    "handler_errors",
)


class Control(ABC):
    """The thread and all that does not depend on the role. `start()` once, `close()` once.

    `send`, `peers`, `stats` and `progress_age_s` may be called from any thread; the rest runs on the control thread.
    """

    def __init__(
        self,
        *,
        role: str,
        on_event: Callable[[Event], None],
        load: Callable[[], Load],
        timing: Timing,
        clock: Callable[[], float],
    ) -> None:
        self.timing = timing
        self._on_event = on_event
        self._load = load
        self._clock = clock
        # One I/O thread: so the end of a connection is always reported before events of its successor.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._poller = zmq.Poller()
        self._work: deque[Callable[[], None]] = deque()
        self._wakeup = Wakeup(self._context)
        self._poller.register(self._wakeup.receiver, zmq.POLLIN)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{role}-control", daemon=True)
        self._turned_at = clock()
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._snapshot: list[PeerSnapshot] = []
        self._warned: set[tuple[str, str]] = set()
        # Log lines that peers can cause without limit.
        self._noise = rate_limited(logger)
        self._refusals = rate_limited(logger)
        self._errors = rate_limited(logger)

    def start(self) -> None:
        self._turned_at = self._clock()
        self._thread.start()

    def close(self) -> None:
        """End the thread and close all connections; peers notice at once. Not from within `on_event`.

        Messages sent before are delivered to paired peers that acknowledge them within LAST_WORDS_S: the last request
        of a draining server ends with a message. Others are dropped. Bounded, and safe to call twice.
        """
        self._stopping.set()
        self._wakeup.ring()
        if self._thread.ident is None:
            self._release()
            return
        self._thread.join(timeout=5.0)
        if self._thread.is_alive():
            logger.error("the control thread did not end within 5 s: %s", self._thread.name)

    def send(self, instance: InstanceId, message: AnyMessage, *arrays: IntArray) -> None:
        """Deliver `message` to this instance once, in order. Returns at once; raises WireError if it cannot be encoded.

        While the instance is lost, the message waits in the channel and is delivered if the same instance comes back;
        it is dropped if the instance is closed or unknown. Do not write to the arrays afterwards.
        """
        assert is_sequenced(message), f"{type(message).__name__} is sent by the control thread only"
        self._post(partial(self._send_numbered, instance, message, encode(message, *arrays)))

    def peers(self) -> list[PeerSnapshot]:
        """All peers as of the last iteration of the loop."""
        return self._snapshot

    def stats(self) -> dict[str, int]:
        """Counters since the start, by name."""
        return dict(self._counts)

    def progress_age_s(self) -> float:
        """Time since the last iteration of the loop; well below a second while the thread is healthy."""
        return self._clock() - self._turned_at

    @abstractmethod
    def _sessions(self) -> Iterable[Session]:
        """All sessions, in any state."""

    @abstractmethod
    def _session_of(self, instance: InstanceId) -> Session | None:
        """The session to send to this instance on."""

    @abstractmethod
    def _transmit(self, session: Session, frames: Sequence[Buffer]) -> None:
        """Hand one message to ZMQ without blocking; may raise zmq.ZMQError."""

    @abstractmethod
    def _read(self, ready: dict[zmq.Socket[bytes], int], now: float) -> bool:
        """Read the role's sockets; False if some input is left for the next iteration."""

    @abstractmethod
    def _admits(self, session: Session, now: float) -> bool:
        """Whether to process heartbeats and numbered messages of this session now."""

    @abstractmethod
    def _introduce(self, session: Session, message: Hello | Welcome | Refused, now: float) -> None:
        """Handle a message of the introduction."""

    @abstractmethod
    def _refuse_version(self, session: Session, version: int) -> None:
        """The peer sent a Hello or Welcome of another protocol version that we cannot decode."""

    @abstractmethod
    def _tick(self, now: float) -> None:
        """Periodic work of the role."""

    @abstractmethod
    def _take_snapshot(self) -> list[PeerSnapshot]: ...

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    self._turn()
                except Exception:
                    self._counts["handler_errors"] += 1
                    self._errors.exception("error in the control loop; it continues")
                    self._stopping.wait(self.timing.tick_s)
            self._guard(self._flush)
        finally:
            self._release()

    def _flush(self) -> None:
        """Wait until paired peers have acknowledged everything: the answer to a heartbeat is an acknowledgement."""
        ends_at = time.monotonic() + LAST_WORDS_S
        self._announce_shutdown()
        while self._work or any(_has_pending(session) for session in self._sessions()):
            if time.monotonic() >= ends_at:
                pending = {
                    str(session): session.channel.pending for session in self._sessions() if _has_pending(session)
                }
                logger.warning("closing with unacknowledged messages, by peer: %s", pending)
                return
            for session in self._sessions():
                session.heartbeat_at = self._clock()
            self._turn()

    def _announce_shutdown(self) -> None:
        """Send heartbeats with accepting=False and wait for the answers. A peer that has answered does not log the end
        of this server as a loss.
        """
        peers = [session for session in self._sessions() if session.state is SessionState.PAIRED]
        for session in peers:
            session.round_trip_s = None
            self._beat(session, self._clock())
        ends_at = time.monotonic() + ANNOUNCE_SHUTDOWN_S
        while time.monotonic() < ends_at and any(
            session.state is SessionState.PAIRED and session.round_trip_s is None for session in peers
        ):
            self._turn()

    def _turn(self) -> None:
        ready = dict(self._poller.poll(max(1, int(self.timing.tick_s * 1000))))
        now = self._clock()
        self._exclude_own_absence(now)
        self._turned_at = now
        if self._wakeup.receiver in ready:
            self._wakeup.drain()
        while self._work:
            self._guard(self._work.popleft())
        all_read = self._read(ready, now)
        for session in list(self._sessions()):
            if session.state is SessionState.PAIRED:
                if all_read and now - session.heard_at > self.timing.peer_timeout_s:
                    self._lose(session, f"no heartbeat for {now - session.heard_at:.1f} s")
                else:
                    self._guard(partial(self._keep_up, session, now))
        self._tick(now)
        self._snapshot = self._take_snapshot()

    def _exclude_own_absence(self, now: float) -> None:
        absence = now - self._turned_at - self.timing.tick_s
        if absence > self.timing.peer_timeout_s / 2:
            # This process was stopped or starved. Messages that peers sent meanwhile may still be in kernel buffers.
            logger.info("the control thread did not run for %.1f s", absence)
            for session in self._sessions():
                session.heard_at += absence

    def _keep_up(self, session: Session, now: float) -> None:
        """Heartbeat, acknowledgement and (re-)sending of a paired session."""
        if now >= session.heartbeat_at or session.channel.unacknowledged_received >= ACK_EVERY:
            self._beat(session, now)
        resent_before = session.channel.resent
        for frames in session.channel.due(now):
            self._hand_to_zmq(session, frames)
        self._counts["messages_resent"] += session.channel.resent - resent_before

    def _beat(self, session: Session, now: float) -> None:
        session.heartbeat_at = now + self.timing.heartbeat_interval_s
        self._reply(session, Heartbeat(self._me.instance, self._clock(), self._current_load()))

    @property
    @abstractmethod
    def _me(self) -> Hello | Welcome: ...

    def _receive(self, session: Session, frames: Sequence[Buffer], now: float) -> None:
        """Handle one message of this session; never raises."""
        try:
            self._dispatch(session, frames, now)
        except OtherVersionError as error:
            self._refuse_version(session, error.version)
        except (WireError, ChannelProtocolError) as error:
            self._complain(session, str(error), now)
        except Exception:
            self._counts["handler_errors"] += 1
            self._errors.exception("error while handling a message of %s", session)

    def _dispatch(self, session: Session, frames: Sequence[Buffer], now: float) -> None:
        envelope, body = split(frames)
        session.heard_at = now
        if envelope.seq:
            if not self._admits(session, now):
                return
            session.channel.acknowledge(envelope.ack, now)
            if not session.channel.accept(envelope.seq):
                self._counts["messages_out_of_order"] += 1
                return
            # From here on the number is consumed: an unreadable message must not block the following ones.
            message, arrays = decode(body)
            if not is_sequenced(message):
                raise WireError(f"{type(message).__name__} has number {envelope.seq}, but is not numbered")
            assert session.instance is not None
            self._counts["messages_received"] += 1
            self._emit(MessageReceived(session.instance, message, arrays))
            return
        message, _ = decode(body)
        match message:
            case Hello() | Welcome() | Refused():
                self._introduce(session, message, now)
            case Heartbeat() | HeartbeatAck():
                if self._admits(session, now):
                    session.channel.acknowledge(envelope.ack, now)
                    self._hear(session, message)
            case _:
                raise WireError(f"{type(message).__name__} has no number")

    def _hear(self, session: Session, message: Heartbeat | HeartbeatAck) -> None:
        assert session.instance is not None
        self._counts["heartbeats_received"] += 1
        if isinstance(message, Heartbeat):
            self._reply(session, HeartbeatAck(self._me.instance, message.sent_at, self._current_load()))
        else:
            session.round_trip_s = max(0.0, self._clock() - message.sent_at)
        if message.load != session.load:
            session.load = message.load
            self._emit(LoadReported(session.instance, message.load))

    def _complain(self, session: Session, reason: str, now: float) -> None:
        """Count, log once per peer, and answer once per heartbeat interval: the peer may not understand it."""
        self._counts["malformed"] += 1
        if self._first_time(str(session), "malformed"):
            self._noise.warning("malformed message from %s: %s (later ones are counted, not logged)", session, reason)
        if now >= session.complaint_at:
            session.complaint_at = now + self.timing.heartbeat_interval_s
            self._reply(session, Refused("malformed", reason))

    def _send_numbered(self, instance: InstanceId, message: AnyMessage, body: Body) -> None:
        session = self._session_of(instance)
        if session is None:
            self._counts["sends_to_unknown_instance"] += 1
            logger.debug("%s to %s dropped: no such instance", type(message).__name__, instance)
            return
        try:
            session.channel.put(body)
        except ChannelFullError as error:
            self._counts["sends_over_limit"] += 1
            if self._first_time(str(session), "full"):
                logger.error("%s to %s dropped: %s", type(message).__name__, session, error)
            self._emit(SendFailed(instance, message, str(error)))
            return
        self._counts["messages_sent"] += 1

    def _reply(self, session: Session, message: Hello | Welcome | Refused | Heartbeat | HeartbeatAck) -> None:
        self._hand_to_zmq(session, [session.channel.envelope(), *encode(message)])

    def _hand_to_zmq(self, session: Session, frames: Sequence[Buffer]) -> None:
        try:
            self._transmit(session, frames)
        except zmq.ZMQError as error:
            # The queue is full, or the connection has just ended. The channel sends the message again.
            self._counts["sends_dropped_by_zmq"] += 1
            logger.debug("a message to %s was dropped: %s", session, error)

    def _lose(self, session: Session, reason: str) -> None:
        """A paired peer is lost; it may come back on the same connection."""
        assert session.instance is not None
        session.state = SessionState.LOST
        session.detail = reason
        self._counts["peers_lost"] += 1
        if session.load.accepting:
            logger.warning("lost %s: %s", session, reason)
        else:
            logger.info("%s has stopped", session)
        self._emit(PeerLost(session.instance, reason))

    def _end(self, session: Session, reason: str) -> None:
        """The connection has ended: emit the pending PeerLost and PeerClosed. The role removes the session."""
        if session.state is SessionState.PAIRED:
            self._lose(session, reason)
        if session.announced:
            assert session.instance is not None
            session.announced = False
            self._counts["peers_closed"] += 1
            logger.info("closed %s: %s", session, reason)
            self._emit(PeerClosed(session.instance))

    def _emit(self, event: Event) -> None:
        try:
            self._on_event(event)
        except Exception:
            self._counts["event_errors"] += 1
            self._errors.exception("error while handling event %s", type(event).__name__)

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            self._counts["handler_errors"] += 1
            self._errors.exception("error in the control loop; it continues")

    def _current_load(self) -> Load:
        try:
            load = self._load()
            return msgspec.structs.replace(load, accepting=False) if self._stopping.is_set() else load
        except Exception:
            self._counts["event_errors"] += 1
            self._errors.exception("load() failed")
            return Load()

    def _first_time(self, peer: str, what: str) -> bool:
        """Whether this was not logged yet. The record is cleared when it reaches REMEMBERED_WARNINGS."""
        if len(self._warned) >= REMEMBERED_WARNINGS:
            self._warned.clear()
        known = (peer, what) in self._warned
        self._warned.add((peer, what))
        return not known

    def _post(self, action: Callable[[], None]) -> None:
        self._work.append(action)
        self._wakeup.ring()

    def _configure(self, socket: zmq.Socket[bytes]) -> None:
        """Options of all sockets to peers."""
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        # Keepalive closes connections to machines that are down, but not to processes that are stopped.
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 5)
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 2)
        socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)

    @staticmethod
    def _receive_frames(socket: zmq.Socket[bytes]) -> list[zmq.Frame] | None:
        """The next message without copying it; None if there is none."""
        try:
            return socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None

    def _release(self) -> None:
        self._wakeup.close()
        self._context.destroy(linger=0)


def _has_pending(session: Session) -> bool:
    """Whether messages wait for the acknowledgement of a paired peer."""
    return session.state is SessionState.PAIRED and session.channel.pending > 0
