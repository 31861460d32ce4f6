"""What the control thread tells its owner. Events of one peer come in this order:

PeerUp, then MessageReceived and LoadReported in between, then PeerLost; from there PeerUp again (the same process was
silent and is back) or PeerClosed (it is not coming back under this connection). No message is delivered outside
PeerUp .. PeerLost: what a peer sends meanwhile it sends again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Literal, TypeAlias

from ..protocol.messages import AnyMessage, Hello, InstanceId, Load, Welcome
from ..protocol.wire import IntArray

MOST_SHOWN = 4
"""Endpoints that one line names."""


@dataclass(frozen=True, slots=True)
class PeerUp:
    """The pair exists, on both sides. `endpoint` is where decode connected to; None on the prefill side."""

    instance: InstanceId
    endpoint: str | None
    introduction: Hello | Welcome


@dataclass(frozen=True, slots=True)
class PeerAlias:
    """`endpoint` is another name of a server that is already paired; use `instance`."""

    endpoint: str
    instance: InstanceId


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The peer is silent, its connection closed, or it has lost us. It may still be alive, and still write."""

    instance: InstanceId
    reason: str


@dataclass(frozen=True, slots=True)
class PeerClosed:
    """The connection of a lost peer is closed or has a successor: its process is gone, or cut off and has stopped for
    us too. Messages queued for it are dropped. Never raised for mere silence, as of a process under SIGSTOP.
    """

    instance: InstanceId


@dataclass(frozen=True, slots=True)
class PeerRefused:
    """A peer cannot be paired with; `peer` is its endpoint (decode) or its instance or address (prefill)."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class PeersUnreachable:
    """Why no server is paired at these endpoints (decode); takes the place of what was said before."""

    reasons: Mapping[str, str]


def describe_absence(reasons: Mapping[str, str]) -> str:
    """The first few of them in one line."""
    shown = [f"{endpoint}: {reason}" for endpoint, reason in islice(reasons.items(), MOST_SHOWN)]
    more = len(reasons) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more else "")


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """One message of a paired peer, delivered once and in the order it was sent."""

    instance: InstanceId
    message: AnyMessage
    arrays: tuple[IntArray, ...]


@dataclass(frozen=True, slots=True)
class LoadReported:
    """The load of a peer has changed."""

    instance: InstanceId
    load: Load


@dataclass(frozen=True, slots=True)
class SendFailed:
    """A message was not taken because too much already waits for this peer."""

    instance: InstanceId
    message: AnyMessage
    reason: str


Event: TypeAlias = (
    PeerUp
    | PeerAlias
    | PeerLost
    | PeerClosed
    | PeerRefused
    | PeersUnreachable
    | MessageReceived
    | LoadReported
    | SendFailed
)


PublicState: TypeAlias = Literal["connecting", "paired", "refused", "lost"]


@dataclass(frozen=True, slots=True)
class PeerSnapshot:
    """One peer for /server_info. `endpoint` is HOST:PORT on the decode side, the peer's address on the prefill side."""

    endpoint: str
    state: PublicState
    instance: InstanceId | None = None
    detail: str | None = None
    round_trip_ms: float | None = None
