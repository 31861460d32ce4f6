"""One connection to one peer: its state, its link and what is known about the other side."""

from dataclasses import dataclass
from enum import Enum

from ..protocol.messages import Hello, InstanceId, Load, Welcome
from .events import PeerSnapshot, PublicState
from .reliable_channel import ReliableChannel


@dataclass(frozen=True, slots=True)
class Timing:
    """How often and how long, in seconds."""

    heartbeat_interval_s: float = 0.4
    peer_timeout_s: float = 1.8
    hello_retry_s: float = 1.0
    refused_retry_s: float = 3.0
    connect_timeout_s: float = 5.0
    reconnect_min_s: float = 0.1
    reconnect_max_s: float = 1.0

    @property
    def tick_s(self) -> float:
        """The longest the thread sleeps; peers are found silent at most this much late."""
        return min(self.heartbeat_interval_s, self.peer_timeout_s / 4) / 4

    @property
    def resend_after_s(self) -> float:
        """Acknowledgements may ride on the next heartbeat, so a message is late only well after it."""
        return max(1.0, 2.5 * self.heartbeat_interval_s)


class SessionState(Enum):
    """Where a connection stands. `STRANGER` has not said Hello; `ALIAS` leads to a server paired elsewhere."""

    STRANGER = "stranger"
    MEETING = "meeting"
    PAIRED = "paired"
    LOST = "lost"
    REFUSED = "refused"
    ALIAS = "alias"


class Session:
    """One connection to one peer. Lives exactly as long as the connection, and so does its link."""

    def __init__(self, name: str, *, resend_after_s: float, now: float) -> None:
        self.name = name
        self.link = ReliableChannel(resend_after_s=resend_after_s)
        self.state = SessionState.STRANGER
        self.instance: InstanceId | None = None
        self.introduction: Hello | Welcome | None = None
        self.announced = False  # PeerUp was raised, so PeerClosed is owed
        self.heard_at = now
        self.heartbeat_at = now
        self.complaint_at = now
        self.round_trip_s: float | None = None
        self.load = Load()
        self.detail: str | None = None

    def __str__(self) -> str:
        return self.name if self.instance is None else f"{self.name} ({self.instance})"

    def snapshot(self, endpoint: str) -> PeerSnapshot:
        """The session for /server_info."""
        return PeerSnapshot(
            endpoint=endpoint,
            state=_PUBLIC_STATES[self.state],
            instance=self.instance,
            detail=self.detail,
            round_trip_ms=None if self.round_trip_s is None else self.round_trip_s * 1000,
        )


_PUBLIC_STATES: dict[SessionState, PublicState] = {
    SessionState.STRANGER: "connecting",
    SessionState.MEETING: "connecting",
    SessionState.PAIRED: "paired",
    SessionState.ALIAS: "paired",
    SessionState.LOST: "lost",
    SessionState.REFUSED: "refused",
}
