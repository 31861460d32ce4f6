"""Pairing, heartbeats and delivery of messages: what prefill (`prefill.py`) and decode (`decode.py`) have in common.

How two servers pair, on every connection (one ZMQ connection = one Session = one ReliableChannel):

    decode                     prefill
    Hello             ->                          repeated every second until it is answered
                      <-       Welcome            or Refused(mismatch)
    Heartbeat         ->                          decode is paired when Welcome arrives, prefill when this arrives

A side that has lost the other one repeats the introduction on the same connection: decode sends Hello, prefill asks for
a Hello with Refused(unknown_peer). The channel survives that, so queued messages (such as an Abort) are delivered; it
ends with the connection. While an instance still sends on one connection, prefill does not pair with it on another one:
the second connection may be a replay of recorded messages.

A message that does not fit into its channel breaks the connection: every transfer of the pair fails. The connection is
closed when the peer is heard again, because only a peer that runs notices the end and stops writing. A message to an
instance without a connection is dropped: the scheduler has a PeerLost of it in its inbox.

A peer is lost if it sends nothing, not even heartbeats, for `peer_timeout_s`. This is checked after all pending input
was read, and time in which this process itself did not run does not count. ZMQ's own heartbeats are off: they would
close the connection of a stopped process (SIGSTOP). But a closed connection has to mean that the process cannot write
any more.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar

import msgspec
import zmq

from ...common.logs import rate_limited
from ..mooncake.infiniband import port_states
from ..plan.pairing import describe_versions
from ..protocol.messages import AnyMessage, Heartbeat, HeartbeatAck, Hello, InstanceId, Load, Refused, Welcome
from ..protocol.wire import Array, Body, Buffer, OtherVersionError, WireError, decode, encode, split
from .events import Event, LoadReported, MessageReceived, PeerClosed, PeerLost, PeerRefused, PeerSnapshot, PeerUp
from .reliable_channel import ChannelFullError, ChannelProtocolError, is_sequenced
from .session import Session, SessionState, Timing
from .thread import ControlThread, Ready

logger = logging.getLogger(__name__)

SessionT = TypeVar("SessionT", bound=Session)
IntroductionT = TypeVar("IntroductionT", Hello, Welcome)
"""What the peer sends to introduce itself."""
Unhandled = Hello | Welcome | Refused | Literal["unpaired", "broken"] | None
"""What a message leaves to the role: an introduction, to decide whether the session is paired now, or to hang up."""

MESSAGES_PER_TURN: Final = 4096
"""Messages read from one socket before the next socket is read."""
ACK_EVERY: Final = 64
"""After this many received messages, an acknowledgement is sent before the next regular heartbeat."""
REMEMBERED_WARNINGS: Final = 1024
LAST_WORDS_S: Final = 1.0
"""How long close() waits for paired peers to acknowledge the messages sent before."""
ANNOUNCE_SHUTDOWN_S: Final = 0.3
"""How long close() waits for paired peers to acknowledge that this server shuts down."""

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


class Control(Generic[SessionT, IntroductionT]):
    """The control thread of a server and its sessions. It reports events by calling `on_event`, which should only put
    the event into a queue and return. No message of a peer and no exception of a callback ends the thread: errors are
    logged and counted. `start()` once, `close()` once.

    `start`, `close`, `send`, `peers`, `stats` and `progress_age_s` may be called from any thread; the rest runs on the
    control thread. `check` returns one sentence if the servers must not pair; it is called only if their protocol
    versions agree. `turn` is what the role does in each iteration, with the sockets that are ready. The role keeps
    `_sessions`; this class never calls it.
    """

    def __init__(
        self,
        me: Hello | Welcome,
        *,
        turn: Callable[[Ready, float], None],
        check: Callable[[IntroductionT], str | None],
        on_event: Callable[[Event], None],
        load: Callable[[], Load],
        timing: Timing | None,
        clock: Callable[[], float],
    ) -> None:
        self._role, self._peer_role = ("decode", "prefill") if isinstance(me, Hello) else ("prefill", "decode")
        self.timing = timing or Timing()
        self._me = me
        self._check: Callable[[IntroductionT], str | None] = check
        self._on_event = on_event
        self._load = load
        self._clock = clock
        self._thread = ControlThread(
            f"{self._role}-control",
            turn=turn,
            flush=self._flush,
            on_error=self._count_error,
            on_absence=self._exclude_own_absence,
            tick_s=self.timing.tick_s,
            clock=clock,
        )
        self.start = self._thread.start
        self.progress_age_s = self._thread.progress_age_s
        self._sessions: list[SessionT] = []
        """In any state."""
        self._session_of: dict[InstanceId, SessionT] = {}  # of each instance from PeerUp to PeerClosed
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._snapshot: list[PeerSnapshot] = []
        self._warned: set[tuple[str, str]] = set()
        # Log lines that peers can cause without limit.
        self._noise = rate_limited(logger)
        self._refusals = rate_limited(logger)
        self._errors = rate_limited(logger)

    def close(self) -> None:
        """End the thread and close all connections; peers notice at once. Do not call it from `on_event`.

        Messages sent before are still delivered, if a paired peer acknowledges them within LAST_WORDS_S: the last
        request of a draining server ends with a message. Other messages are dropped. Takes a bounded time; may be
        called twice.
        """
        self._thread.close()

    def send(self, instance: InstanceId, message: AnyMessage, *arrays: Array) -> None:
        """Deliver `message` to this instance once, in order. Returns at once; raises WireError if it cannot be encoded.

        While the instance is lost, the message waits in the channel and is delivered if the same instance comes back;
        it is dropped if the instance is closed or unknown. Do not write to the arrays afterwards.
        """
        assert is_sequenced(message), f"{type(message).__name__} is sent by the control thread only"
        self._thread.post(partial(self._send_numbered, instance, message, encode(message, *arrays)))

    def peers(self) -> list[PeerSnapshot]:
        """All peers as of the last iteration of the loop."""
        return self._snapshot

    def stats(self) -> dict[str, int]:
        """Counters since the start, by name."""
        return dict(self._counts)

    def _flush(self) -> None:
        """Wait until paired peers have acknowledged everything. Heartbeats are sent in every turn, because their
        answers carry acknowledgements.
        """
        ends_at = time.monotonic() + LAST_WORDS_S
        self._announce_shutdown()
        while self._thread.work or any(map(_has_pending, self._sessions)):
            if time.monotonic() >= ends_at:
                pending = {str(session): session.channel.pending for session in self._sessions if _has_pending(session)}
                logger.warning("closing with unacknowledged messages, by peer: %s", pending)
                return
            for session in self._sessions:
                session.heartbeat_at = self._clock()
            self._thread.turn()

    def _announce_shutdown(self) -> None:
        """Send heartbeats with accepting=False and wait for the answers. A peer that knows of the shutdown does not log
        the end of this server as a loss.
        """
        peers = [session for session in self._sessions if session.state is SessionState.PAIRED]
        began_at = self._clock()
        for session in peers:
            self._beat(session, began_at)
        ends_at = time.monotonic() + ANNOUNCE_SHUTDOWN_S
        while time.monotonic() < ends_at and any(
            session.state is SessionState.PAIRED and session.answered_beat_at < began_at for session in peers
        ):
            self._thread.turn()

    def _keep_all_up(self, now: float, *, all_read: bool) -> None:
        """Heartbeats and messages of all paired sessions; silent ones are lost, if all that they have sent was read."""
        for session in list(self._sessions):
            if session.state is SessionState.PAIRED:
                if all_read and now - session.heard_at > self.timing.peer_timeout_s:
                    self._lose(session, f"no heartbeat for {now - session.heard_at:.1f} s")
                else:
                    self._thread.guard(partial(self._keep_up, session, now))

    def _exclude_own_absence(self, absence_s: float) -> None:
        if absence_s > self.timing.peer_timeout_s / 2:
            # This process was stopped or starved. Messages that peers sent meanwhile may still be in kernel buffers.
            logger.info("the control thread did not run for %.1f s", absence_s)
            for session in self._sessions:
                session.heard_at += absence_s
                if session.broken_at is not None:
                    session.broken_at += absence_s

    def _keep_up(self, session: SessionT, now: float) -> None:
        """Heartbeat, acknowledgement and (re-)sending of a paired session."""
        if now >= session.heartbeat_at or session.channel.unacknowledged_received >= ACK_EVERY:
            self._beat(session, now)
        resent_before = session.channel.resent
        for frames in session.channel.due(now):
            self._hand_to_zmq(session, frames)
        self._counts["messages_resent"] += session.channel.resent - resent_before

    def _beat(self, session: SessionT, now: float) -> None:
        session.heartbeat_at = now + self.timing.heartbeat_interval_s
        self._reply(session, Heartbeat(self._me.instance, self._clock(), self._current_load(), self._rdma_ports()))

    def _receive(self, session: SessionT, frames: Sequence[Buffer], now: float) -> Unhandled:
        """Handle one message of this session, or leave it to the role; never raises."""
        try:
            return self._dispatch(session, frames, now)
        except OtherVersionError as error:
            self._refuse(session, self._describe_versions(error.version))
        except (WireError, ChannelProtocolError) as error:
            self._complain(session, str(error), now)
        except Exception:
            self._counts["handler_errors"] += 1
            self._errors.exception("error while handling a message of %s", session)
        return None

    def _dispatch(self, session: SessionT, frames: Sequence[Buffer], now: float) -> Unhandled:
        envelope, body = split(frames)
        session.heard_at = now
        if session.broken_at is not None:
            return "broken" if now - session.broken_at > self.timing.silent_s else None  # sent after it broke
        paired = session.state is SessionState.PAIRED
        if envelope.seq:
            if not paired:
                return "unpaired"
            session.channel.acknowledge(envelope.ack, now)
            if not session.channel.accept(envelope.seq):
                self._counts["messages_out_of_order"] += 1
                return None
            # The number counts as received from here on, so that an unreadable message does not block later ones.
            message, arrays = decode(body)
            if not is_sequenced(message):
                raise WireError(f"{type(message).__name__} has number {envelope.seq}, but is not numbered")
            assert session.instance is not None
            self._counts["messages_received"] += 1
            self._emit(MessageReceived(session.instance, message, arrays))
            return None
        message, _ = decode(body)
        match message:
            case Hello() | Welcome() | Refused():
                return message
            case Heartbeat() | HeartbeatAck():
                if not paired:
                    return "unpaired"
                session.channel.acknowledge(envelope.ack, now)
                self._hear(session, message)
                return None
            case _:
                raise WireError(f"{type(message).__name__} has no number")

    def _hear(self, session: SessionT, message: Heartbeat | HeartbeatAck) -> None:
        assert session.instance is not None
        self._counts["heartbeats_received"] += 1
        if isinstance(message, Heartbeat):
            answer = HeartbeatAck(self._me.instance, message.sent_at, self._current_load(), self._rdma_ports())
            self._reply(session, answer)
        else:
            session.round_trip_s = max(0.0, self._clock() - message.sent_at)
            session.answered_beat_at = message.sent_at
        if message.rdma_ports != session.rdma_ports:
            session.rdma_ports = message.rdma_ports
            shown = ", ".join(f"{device} {state}" for device, state in message.rdma_ports.items()) or "none"
            logger.info("RDMA ports of %s: %s", session, shown)
        if message.load != session.load:
            session.load = message.load
            self._emit(LoadReported(session.instance, message.load))

    def _accepts(self, session: SessionT, introduction: IntroductionT) -> bool:
        """Compare protocol versions, then `check`; refuses a peer that does not fit."""
        session.instance, session.introduction = introduction.instance, introduction
        if introduction.protocol_version != self._me.protocol_version:
            reason: str | None = self._describe_versions(introduction.protocol_version)
        else:
            reason = self._check(introduction)
        if reason is not None:
            self._refuse(session, reason)
        return reason is None

    def _describe_versions(self, peer: int) -> str:
        return describe_versions(**{self._role: self._me.protocol_version, self._peer_role: peer})

    def _refuse(self, session: SessionT, reason: str) -> None:
        self._set_refused(session, reason)
        self._reply(session, Refused("mismatch", reason))

    def _set_refused(self, session: SessionT, reason: str) -> None:
        if session.state is SessionState.PAIRED:
            self._lose(session, reason)
        session.refused(reason, self._clock() + self.timing.refused_retry_s)
        self._report_refused(session.public_name, reason, session)

    def _report_refused(self, peer: str, reason: str, session: SessionT | None = None) -> None:
        """Count, log and emit that a peer is refused."""
        self._counts["refused"] += 1
        if self._first_time(peer, reason):
            self._refusals.warning("no pair with %s %s: %s", self._peer_role, session or peer, reason)
            self._emit(PeerRefused(peer, reason))

    def _set_paired(self, session: SessionT, endpoint: str | None) -> None:
        assert session.instance is not None
        assert session.introduction is not None
        self._session_of[session.instance] = session
        session.state = SessionState.PAIRED
        session.announced = True
        session.detail = None
        session.load = Load()  # so that its next load is reported, even if it has not changed
        session.channel.restart()
        self._counts["peers_up"] += 1
        logger.info("paired with %s %s", self._peer_role, session)
        self._emit(PeerUp(session.instance, endpoint, session.introduction))

    def _note_complaint(self, session: SessionT, reason: str) -> None:
        """The peer could not read a message of ours: count it, and log it once per peer."""
        self._counts["complaints_received"] += 1
        if self._first_time(str(session), "complaint"):
            self._refusals.warning("%s could not read a message of this server: %s", session, reason)

    def _complain(self, session: SessionT, reason: str, now: float) -> None:
        """Count, log once per peer, and answer once per heartbeat interval: the peer may not understand it."""
        self._counts["malformed"] += 1
        if self._first_time(str(session), "malformed"):
            self._noise.warning("malformed message from %s: %s (later ones are counted, not logged)", session, reason)
        if now >= session.complaint_at:
            session.complaint_at = now + self.timing.heartbeat_interval_s
            self._reply(session, Refused("malformed", reason))

    def _send_numbered(self, instance: InstanceId, message: AnyMessage, body: Body) -> None:
        session = self._session_of.get(instance)
        if session is None:
            self._counts["sends_to_unknown_instance"] += 1
            logger.debug("%s to %s dropped: no such instance", type(message).__name__, instance)
            return
        try:
            session.channel.put(body)
        except ChannelFullError as error:
            self._counts["sends_over_limit"] += 1
            if session.broken_at is None:
                session.broken_at = self._clock()
                logger.error("%s to %s dropped: %s", type(message).__name__, session, error)
            if session.state is SessionState.PAIRED:
                self._lose(session, f"{type(message).__name__} cannot be sent: {error}")
            return
        self._counts["messages_sent"] += 1

    def _reply(self, session: SessionT, message: Hello | Welcome | Refused | Heartbeat | HeartbeatAck) -> None:
        self._hand_to_zmq(session, [session.channel.envelope(), *encode(message)])

    def _hand_to_zmq(self, session: SessionT, frames: Sequence[Buffer]) -> None:
        try:
            session.transmit(frames)
        except zmq.ZMQError as error:
            # The queue is full, or the connection has just ended. The channel sends the message again.
            self._counts["sends_dropped_by_zmq"] += 1
            logger.debug("a message to %s was dropped: %s", session, error)

    def _lose(self, session: SessionT, reason: str) -> None:
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

    def _end(self, session: SessionT, reason: str) -> None:
        """The connection has ended: emit the pending PeerLost and PeerClosed, and remove the session."""
        if session in self._sessions:
            self._sessions.remove(session)
        if session.instance is not None and self._session_of.get(session.instance) is session:
            del self._session_of[session.instance]
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

    def _count_error(self) -> None:
        self._counts["handler_errors"] += 1
        self._errors.exception("error in the control loop; it continues")

    def _current_load(self) -> Load:
        try:
            load = self._load()
            return msgspec.structs.replace(load, accepting=False) if self._thread.stopping.is_set() else load
        except Exception:
            self._counts["event_errors"] += 1
            self._errors.exception("load() failed")
            return Load()

    def _rdma_ports(self) -> dict[str, str]:
        try:
            return port_states()
        except OSError as error:  # a device has just been removed
            logger.debug("the states of RDMA ports cannot be read: %s", error)
            return {}

    def _first_time(self, peer: str, what: str) -> bool:
        """Whether this warning about this peer is the first one. The record is cleared when it reaches
        REMEMBERED_WARNINGS.
        """
        if len(self._warned) >= REMEMBERED_WARNINGS:
            self._warned.clear()
        known = (peer, what) in self._warned
        self._warned.add((peer, what))
        return not known


AnyControl: TypeAlias = Control[Any, Any]
"""Of either role."""


def _has_pending(session: Session) -> bool:
    """Whether messages wait for the acknowledgement of a paired peer."""
    return session.state is SessionState.PAIRED and session.channel.pending > 0
