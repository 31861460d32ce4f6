"""The control thread of a server: what prefill (`prefill_control.py`) and decode (`decode_control.py`) have in common.

One thread owns all sockets and sleeps in one poller. Other threads post work to it (`send`), and it calls `on_event`
for whatever happens; the owner puts events into its own queue and returns. Nothing a peer sends and nothing an owner's
callback raises ends the thread: it is logged, counted and left behind.

How two servers pair, on every connection (one ZMQ connection = one Session = one Link):

    decode                     prefill
    Hello             ->                          who I am; again every second until it is answered
                      <-       Welcome            or Refused(mismatch)
    Heartbeat         ->                          decode is paired when Welcome arrives, prefill when this does

A side that has lost the other introduces itself anew on the same connection: decode with Hello, prefill by asking for
one with Refused(unknown_peer). The link survives that, so queued messages (an Abort) arrive after all. It does not
survive the connection.

Silence is measured by heartbeats and only after all waiting input was read; time in which this process itself did not
run is not counted as silence of its peers. ZMQ's own heartbeats are off: they would close the connection of a process
that is merely stopped, and a closed connection means that its process cannot write any more.
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
from .reliable_channel import LinkFullError, LinkProtocolError, is_sequenced
from .session import Session, SessionState, Timing
from .wakeup import Wakeup

logger = logging.getLogger(__name__)

MESSAGES_PER_TURN = 4096
"""Messages read from one socket before the others get their turn."""
ACK_EVERY = 64
"""Received messages after which an acknowledgement does not wait for the next regular heartbeat."""
SEND_QUEUE_MESSAGES = 10_000
"""ZMQ's own queue per peer. A link has at most its window under way, so this fills only with heartbeats."""
MAX_SOCKETS = 8192
"""Of ZMQ, in one process. Decode has three for each prefill endpoint."""
REMEMBERED_WARNINGS = 1024
GOODBYE_S = 0.3
"""How long close() waits for paired peers to hear that this server leaves."""
LAST_WORDS_S = 1.0
"""How long close() waits for paired peers to acknowledge what was sent to them before."""

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
    """The thread and everything that does not depend on the role. `start()` once, `close()` once.

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
        # One I/O thread: events of a connection's end then never overtake those of its successor.
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
        # What others can cause as often as they like.
        self._noise = rate_limited(logger)
        self._refusals = rate_limited(logger)
        self._errors = rate_limited(logger)

    def start(self) -> None:
        self._turned_at = self._clock()
        self._thread.start()

    def close(self) -> None:
        """End the thread and close all connections; peers see that at once. Not from within `on_event`.

        Paired peers get what was sent before, if they take it within LAST_WORDS_S: the last request of a server that
        is drained ends with a message. The rest is dropped. Bounded, and safe to call twice.
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

        While the instance is lost it waits in the link and is delivered if that very instance comes back; it is dropped
        when the instance is closed or was never met. Do not write to the arrays any more.
        """
        assert is_sequenced(message), f"{type(message).__name__} is not for callers to send"
        self._post(partial(self._send_numbered, instance, message, encode(message, *arrays)))

    def peers(self) -> list[PeerSnapshot]:
        """All peers as of the last turn of the loop."""
        return self._snapshot

    def stats(self) -> dict[str, int]:
        """Counters since the start, by name."""
        return dict(self._counts)

    def progress_age_s(self) -> float:
        """How long ago the loop last turned; well below a second while the thread is healthy."""
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
        """Read the role's sockets; False when some input had to be left for the next turn."""

    @abstractmethod
    def _admits(self, session: Session, now: float) -> bool:
        """Whether heartbeats and numbered messages of this session count now."""

    @abstractmethod
    def _introduce(self, session: Session, message: Hello | Welcome | Refused, now: float) -> None:
        """Handle a message of the introduction."""

    @abstractmethod
    def _refuse_version(self, session: Session, version: int) -> None:
        """The peer introduced itself in another protocol version, in words that we cannot read."""

    @abstractmethod
    def _tick(self, now: float) -> None:
        """What the role does by the clock."""

    @abstractmethod
    def _take_snapshot(self) -> list[PeerSnapshot]: ...

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    self._turn()
                except Exception:
                    self._counts["handler_errors"] += 1
                    self._errors.exception("the control loop goes on after an error")
                    self._stopping.wait(self.timing.tick_s)
            self._guard(self._say_last_words)
        finally:
            self._release()

    def _say_last_words(self) -> None:
        """Go on until paired peers have acknowledged everything. They answer each heartbeat, and that acknowledges."""
        ends_at = time.monotonic() + LAST_WORDS_S
        self._say_goodbye()
        while self._work or any(_owes(session) for session in self._sessions()):
            if time.monotonic() >= ends_at:
                owed = {str(session): session.link.pending for session in self._sessions() if _owes(session)}
                logger.warning("closed before these peers had acknowledged so many messages: %s", owed)
                return
            for session in self._sessions():
                session.heartbeat_at = self._clock()
            self._turn()

    def _say_goodbye(self) -> None:
        """Heartbeats say that this server leaves; the answer to one says that the peer knows, to whom its end is no
        loss then.
        """
        peers = [session for session in self._sessions() if session.state is SessionState.PAIRED]
        for session in peers:
            session.round_trip_s = None
            self._beat(session, self._clock())
        ends_at = time.monotonic() + GOODBYE_S
        while time.monotonic() < ends_at and any(
            session.state is SessionState.PAIRED and session.round_trip_s is None for session in peers
        ):
            self._turn()

    def _turn(self) -> None:
        ready = dict(self._poller.poll(max(1, int(self.timing.tick_s * 1000))))
        now = self._clock()
        self._forgive_own_absence(now)
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

    def _forgive_own_absence(self, now: float) -> None:
        absence = now - self._turned_at - self.timing.tick_s
        if absence > self.timing.peer_timeout_s / 2:
            # This process was stopped or starved. What peers sent meanwhile may still be in the kernel's buffers.
            logger.info("the control thread did not run for %.1f s", absence)
            for session in self._sessions():
                session.heard_at += absence

    def _keep_up(self, session: Session, now: float) -> None:
        """Heartbeat, acknowledgement and (re-)sending of a paired session."""
        if now >= session.heartbeat_at or session.link.unacknowledged_received >= ACK_EVERY:
            self._beat(session, now)
        resent_before = session.link.resent
        for frames in session.link.due(now):
            self._hand_to_zmq(session, frames)
        self._counts["messages_resent"] += session.link.resent - resent_before

    def _beat(self, session: Session, now: float) -> None:
        session.heartbeat_at = now + self.timing.heartbeat_interval_s
        self._reply(session, Heartbeat(self._me.instance, self._clock(), self._current_load()))

    @property
    @abstractmethod
    def _me(self) -> Hello | Welcome: ...

    def _receive(self, session: Session, frames: Sequence[Buffer], now: float) -> None:
        """One message of this session; never raises."""
        try:
            self._dispatch(session, frames, now)
        except OtherVersionError as error:
            self._refuse_version(session, error.version)
        except (WireError, LinkProtocolError) as error:
            self._complain(session, str(error), now)
        except Exception:
            self._counts["handler_errors"] += 1
            self._errors.exception("a message of %s could not be handled", session)

    def _dispatch(self, session: Session, frames: Sequence[Buffer], now: float) -> None:
        envelope, body = split(frames)
        session.heard_at = now
        if envelope.seq:
            if not self._admits(session, now):
                return
            session.link.acknowledge(envelope.ack, now)
            if not session.link.accept(envelope.seq):
                self._counts["messages_out_of_order"] += 1
                return
            # From here on the number is used up: a message that cannot be read must not block those behind it.
            message, arrays = decode(body)
            if not is_sequenced(message):
                raise WireError(f"{type(message).__name__} has number {envelope.seq}, it takes none")
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
                    session.link.acknowledge(envelope.ack, now)
                    self._hear(session, message)
            case _:
                raise WireError(f"{type(message).__name__} has no number, it needs one")

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
        """Count, log once per peer and answer, but not faster than heartbeats: the answer might not be understood."""
        self._counts["malformed"] += 1
        if self._first_time(str(session), "malformed"):
            self._noise.warning("malformed message from %s: %s (further ones are only counted)", session, reason)
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
            session.link.put(body)
        except LinkFullError as error:
            self._counts["sends_over_limit"] += 1
            if self._first_time(str(session), "full"):
                logger.error("%s to %s dropped: %s", type(message).__name__, session, error)
            self._emit(SendFailed(instance, message, str(error)))
            return
        self._counts["messages_sent"] += 1

    def _reply(self, session: Session, message: Hello | Welcome | Refused | Heartbeat | HeartbeatAck) -> None:
        self._hand_to_zmq(session, [session.link.envelope(), *encode(message)])

    def _hand_to_zmq(self, session: Session, frames: Sequence[Buffer]) -> None:
        try:
            self._transmit(session, frames)
        except zmq.ZMQError as error:
            # Full queue, or the connection ended a moment ago and its event is under way. The link sends again.
            self._counts["sends_dropped_by_zmq"] += 1
            logger.debug("a message to %s was dropped: %s", session, error)

    def _lose(self, session: Session, reason: str) -> None:
        """A paired peer is no longer; it may come back on the same connection."""
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
        """The session's connection is over; raises what its owner is still owed. The role forgets the session."""
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
            self._errors.exception("on_event failed for %s", type(event).__name__)

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            self._counts["handler_errors"] += 1
            self._errors.exception("the control loop goes on after an error")

    def _current_load(self) -> Load:
        try:
            load = self._load()
            return msgspec.structs.replace(load, accepting=False) if self._stopping.is_set() else load
        except Exception:
            self._counts["event_errors"] += 1
            self._errors.exception("load() failed")
            return Load()

    def _first_time(self, peer: str, what: str) -> bool:
        """Whether this was not logged yet; forgets everything once it remembers too much."""
        if len(self._warned) >= REMEMBERED_WARNINGS:
            self._warned.clear()
        known = (peer, what) in self._warned
        self._warned.add((peer, what))
        return not known

    def _post(self, action: Callable[[], None]) -> None:
        self._work.append(action)
        self._wakeup.ring()

    def _configure(self, socket: zmq.Socket[bytes]) -> None:
        """What all sockets to peers have in common."""
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        # The kernel notices a machine that is gone, and lets a process that is stopped be.
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 5)
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 2)
        socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)

    @staticmethod
    def _receive_frames(socket: zmq.Socket[bytes]) -> list[zmq.Frame] | None:
        """The next message without copying it; None when there is none."""
        try:
            return socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None

    def _release(self) -> None:
        self._wakeup.close()
        self._context.destroy(linger=0)


def _owes(session: Session) -> bool:
    """Whether there is something to deliver, and somebody to take it."""
    return session.state is SessionState.PAIRED and session.link.pending > 0
