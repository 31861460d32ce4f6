"""One connection to one peer: its state, its channel and the last introduction and load of the peer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from ..protocol.messages import Hello, InstanceId, Load, Welcome
from ..protocol.wire import Buffer
from .events import PeerSnapshot, PublicState
from .reliable_channel import ReliableChannel


@dataclass(frozen=True, slots=True)
class Timing:
    """Intervals and timeouts."""

    heartbeat_interval_s: float = 0.4
    peer_timeout_s: float = 1.8
    hello_retry_s: float = 1.0
    refused_retry_s: float = 3.0
    connect_timeout_s: float = 5.0
    reconnect_min_s: float = 0.1
    reconnect_max_s: float = 1.0
    lookup_s: float = 2.0
    """How often host names are looked up."""

    @property
    def tick_s(self) -> float:
        """The longest sleep of the thread: silence of a peer is detected at most this much late."""
        return min(self.heartbeat_interval_s, self.peer_timeout_s / 4) / 4

    @property
    def silent_s(self) -> float:
        """A peer that is silent for this long may be dead: two heartbeats are missing."""
        return min(2.5 * self.heartbeat_interval_s, self.peer_timeout_s)

    @property
    def resend_after_s(self) -> float:
        """Well above the heartbeat interval: an acknowledgement may come with the next heartbeat."""
        return max(1.0, 2.5 * self.heartbeat_interval_s)


class SessionState(Enum):
    """The state of a connection.

    UNKNOWN   prefill: the peer has sent no Hello yet
    MEETING   decode sends Hello until it is answered; prefill has answered with Welcome
    PAIRED    messages are delivered
    LOST      the peer is silent or has lost us; it may come back on this connection
    REFUSED   the servers do not fit each other; decode tries again from time to time
    ALIAS     decode: the same server is paired over another connection
    """

    UNKNOWN = "unknown"
    MEETING = "meeting"
    PAIRED = "paired"
    LOST = "lost"
    REFUSED = "refused"
    ALIAS = "alias"


class Session:
    """One connection to one peer. It and its channel exist exactly as long as the connection. `transmit` hands one
    message to ZMQ without blocking, and may raise zmq.ZMQError.
    """

    def __init__(
        self, name: str, transmit: Callable[[Sequence[Buffer]], object], *, resend_after_s: float, now: float
    ) -> None:
        self.name = name
        self.transmit = transmit
        self.channel = ReliableChannel(resend_after_s=resend_after_s)
        self.state = SessionState.UNKNOWN
        self.instance: InstanceId | None = None
        self.introduction: Hello | Welcome | None = None
        self.announced = False  # PeerUp was emitted, so PeerClosed must follow
        self.broken_at: float | None = None
        """When a message did not fit into the channel."""
        self.heard_at = now
        self.heartbeat_at = now
        self.complaint_at = now
        self.round_trip_s: float | None = None
        self.answered_beat_at = now
        """When we sent the last heartbeat that the peer has answered."""
        self.load = Load()
        self.rdma_ports: dict[str, str] = {}
        self.detail: str | None = None

    def refused(self, reason: str, retry_at: float) -> None:  # noqa: ARG002 (decode tries again)
        """The servers do not fit each other."""
        self.state = SessionState.REFUSED
        self.detail = reason

    @property
    def public_name(self) -> str:
        """By which a refusal names it."""
        return self.instance or self.name

    def __str__(self) -> str:
        return self.name if self.instance is None else f"{self.name} ({self.instance})"

    def snapshot(self) -> PeerSnapshot:
        """The session for /server_info."""
        return PeerSnapshot(
            endpoint=self.name,
            state=_PUBLIC_STATES[self.state],
            instance=self.instance,
            detail=self.detail,
            round_trip_ms=None if self.round_trip_s is None else self.round_trip_s * 1000,
            rdma_ports=self.rdma_ports,
        )


_PUBLIC_STATES: dict[SessionState, PublicState] = {
    SessionState.UNKNOWN: "connecting",
    SessionState.MEETING: "connecting",
    SessionState.PAIRED: "paired",
    SessionState.ALIAS: "paired",
    SessionState.LOST: "lost",
    SessionState.REFUSED: "refused",
}
