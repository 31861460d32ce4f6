"""Reliable, ordered delivery of control messages over one connection: pure, no sockets, no clock.

TCP does not lose bytes, ZMQ does lose messages: what does not fit its queues is dropped, and what reaches a peer that
is not ready for it is refused. So every message that matters is numbered 1, 2, 3, ... per direction, kept until it is
acknowledged and sent again when that takes too long; the receiver delivers each number once, in order, and drops
duplicates and whatever comes after a gap. Acknowledgements are cumulative and ride on every envelope, heartbeats
included. Introductions and heartbeats are outside the numbering (number 0): each replaces the one before it.

A link belongs to one connection between two instances. It outlives silence (a stopped process gets its messages when it
wakes up) and ends with the connection: both sides then treat every transfer of the pair as over, and delivering an old
KvDestination to a peer that has forgotten it would write into pages that have another owner.
"""

from collections import deque

from ...configs.errors import PdserveError
from ..protocol.messages import AnyMessage, Heartbeat, HeartbeatAck, Hello, Refused, Welcome
from ..protocol.wire import Body, Buffer, Envelope

UNSEQUENCED = (Hello, Welcome, Refused, Heartbeat, HeartbeatAck)


def is_sequenced(message: AnyMessage) -> bool:
    """Whether messages of this kind are numbered, acknowledged and sent again."""
    return not isinstance(message, UNSEQUENCED)


class LinkFullError(PdserveError):
    """More is waiting for the peer's acknowledgement than the link may hold; the message was not taken."""


class LinkProtocolError(PdserveError):
    """The peer acknowledges what was never sent to it."""


class ReliableChannel:
    """One end of a link: what was sent and is not acknowledged, and how far the other side was received.

    At most `window` messages are under way; more wait here, up to `limit_messages` and `limit_bytes`. Not thread-safe:
    the control thread owns it.
    """

    def __init__(
        self,
        *,
        resend_after_s: float = 1.0,
        window: int = 256,
        limit_messages: int = 65536,
        limit_bytes: int = 256 << 20,
    ) -> None:
        self.resend_after_s = resend_after_s
        self.window = window
        self.limit_messages = limit_messages
        self.limit_bytes = limit_bytes
        self.resent = 0
        self._waiting: deque[Body] = deque()  # number _first, _first + 1, ...
        self._waiting_bytes = 0
        self._first = 1
        self._next = 1  # [_first, _next) is under way; [_next, _first + len(_waiting)) was never sent
        self._highest_sent = 0
        self._progress_at = 0.0  # when the oldest message under way was sent, or the one before it acknowledged
        self._received = 0
        self._acknowledged = 0

    @property
    def pending(self) -> int:
        """Messages that the peer has not acknowledged."""
        return len(self._waiting)

    @property
    def unacknowledged_received(self) -> int:
        """Messages received since the last envelope was made: the peer waits for these."""
        return self._received - self._acknowledged

    def put(self, body: Body) -> None:
        """Take a message for delivery; `due` hands it out. Raises LinkFullError."""
        size = sum(len(frame) for frame in body)
        if len(self._waiting) >= self.limit_messages or self._waiting_bytes + size > self.limit_bytes:
            raise LinkFullError(
                f"{len(self._waiting)} messages with {self._waiting_bytes} B wait for the peer's acknowledgement; the "
                f"limits are {self.limit_messages} messages and {self.limit_bytes} B, and this one has {size} B"
            )
        self._waiting.append(body)
        self._waiting_bytes += size

    def due(self, now: float) -> list[list[Buffer]]:
        """What to send now, as frames: everything under way again when its time is up, then new messages."""
        if self._next > self._first and now - self._progress_at > self.resend_after_s:
            self.restart()
        frames: list[list[Buffer]] = []
        end = self._first + min(len(self._waiting), self.window)
        if self._next < end and self._next == self._first:
            self._progress_at = now
        for seq in range(self._next, end):
            frames.append([self.envelope(seq), *self._waiting[seq - self._first]])
            self.resent += seq <= self._highest_sent
        if frames:
            self._next = end
            self._highest_sent = max(self._highest_sent, end - 1)
        return frames

    def restart(self) -> None:
        """Nothing is under way any more: the next `due` sends all unacknowledged messages again."""
        self._next = self._first

    def envelope(self, seq: int = 0) -> bytes:
        """The envelope of a message with this number; acknowledges all that was received."""
        self._acknowledged = self._received
        return Envelope(seq, self._received).pack()

    def acknowledge(self, ack: int, now: float) -> None:
        """The peer has received everything up to and including `ack`. Raises LinkProtocolError."""
        if ack > self._highest_sent:
            raise LinkProtocolError(f"message {ack} was acknowledged, the last one sent was {self._highest_sent}")
        if ack < self._first:
            return
        for _ in range(ack - self._first + 1):
            self._waiting_bytes -= sum(len(frame) for frame in self._waiting.popleft())
        self._first = ack + 1
        self._next = max(self._next, self._first)
        self._progress_at = now

    def accept(self, seq: int) -> bool:
        """Whether to deliver message `seq`: the next number is taken, a duplicate or one behind a gap is dropped."""
        if seq != self._received + 1:
            return False
        self._received = seq
        return True

    def check_integrity(self) -> None:
        """Assert what always holds between the counters."""
        assert self._first <= self._next <= self._first + min(len(self._waiting), self.window)
        assert self._first <= self._highest_sent + 1 <= self._first + len(self._waiting)
        assert self._waiting_bytes == sum(len(frame) for body in self._waiting for frame in body)
        assert self._waiting_bytes <= self.limit_bytes
        assert len(self._waiting) <= self.limit_messages
        assert self._acknowledged <= self._received
