"""Reliable, ordered delivery of control messages over one connection: pure, no sockets, no clock.

TCP does not lose bytes, but messages are lost: ZMQ drops those that do not fit its queues, and a peer that is not
paired refuses them. So messages are numbered 1, 2, 3, ... per direction, kept until they are acknowledged, and sent
again after a timeout. The receiver delivers each number once, in order, and drops duplicates and messages after a gap.
Acknowledgements are cumulative and part of every envelope, also of heartbeats. Introductions and heartbeats are not
numbered (number 0), because each replaces the previous one.

A channel belongs to one connection between two instances. It survives silence: a stopped process gets its messages when
it continues. It ends with the connection, because both sides then treat every transfer of the pair as ended. An old
KvDestination that was delivered later would make prefill write into pages that have a new owner.
"""

from collections import deque

from ...common.errors import PdserveError
from ..protocol.messages import AnyMessage, Heartbeat, HeartbeatAck, Hello, Refused, Welcome
from ..protocol.wire import Body, Buffer, Envelope

UNSEQUENCED = (Hello, Welcome, Refused, Heartbeat, HeartbeatAck)


def is_sequenced(message: AnyMessage) -> bool:
    """Whether messages of this kind are numbered, acknowledged and sent again."""
    return not isinstance(message, UNSEQUENCED)


class ChannelFullError(PdserveError):
    """The unacknowledged messages reach a limit of the channel; the message was not queued."""


class ChannelProtocolError(PdserveError):
    """The peer acknowledges a message that was never sent."""


class ReliableChannel:
    """One end of a channel: the unacknowledged messages, and the last number received.

    At most `window` messages are in flight; more wait here, up to `limit_messages` and `limit_bytes`. Not thread-safe:
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
        self._next = 1  # [_first, _next) is in flight; [_next, _first + len(_waiting)) was never sent
        self._highest_sent = 0
        self._progress_at = 0.0  # when the oldest message in flight was sent, or the one before it was acknowledged
        self._received = 0
        self._acknowledged = 0

    @property
    def pending(self) -> int:
        """Messages that the peer has not acknowledged."""
        return len(self._waiting)

    @property
    def unacknowledged_received(self) -> int:
        """Messages received since the last envelope was sent, and so not acknowledged yet."""
        return self._received - self._acknowledged

    def put(self, body: Body) -> None:
        """Queue a message for delivery by `due`. Raises ChannelFullError."""
        size = sum(len(frame) for frame in body)
        if len(self._waiting) >= self.limit_messages or self._waiting_bytes + size > self.limit_bytes:
            raise ChannelFullError(
                f"{len(self._waiting)} messages with {self._waiting_bytes} B wait for the peer's acknowledgement; the "
                f"limits are {self.limit_messages} messages and {self.limit_bytes} B, and this one has {size} B"
            )
        self._waiting.append(body)
        self._waiting_bytes += size

    def due(self, now: float) -> list[list[Buffer]]:
        """The frames to send now: all messages in flight again if their timeout has passed, then new messages."""
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
        """Nothing is in flight any more: the next `due` sends all unacknowledged messages again."""
        self._next = self._first

    def envelope(self, seq: int = 0) -> bytes:
        """The envelope of a message with this number; acknowledges all received messages."""
        self._acknowledged = self._received
        return Envelope(seq, self._received).pack()

    def acknowledge(self, ack: int, now: float) -> None:
        """The peer has received everything up to and including `ack`. Raises ChannelProtocolError."""
        if ack > self._highest_sent:
            raise ChannelProtocolError(f"message {ack} was acknowledged, the last one sent was {self._highest_sent}")
        if ack < self._first:
            return
        for _ in range(ack - self._first + 1):
            self._waiting_bytes -= sum(len(frame) for frame in self._waiting.popleft())
        self._first = ack + 1
        self._next = max(self._next, self._first)
        self._progress_at = now

    def accept(self, seq: int) -> bool:
        """Whether to deliver message `seq`: only the next number; duplicates and messages after a gap are dropped."""
        if seq != self._received + 1:
            return False
        self._received = seq
        return True
