"""Events of the control thread for its owner. Events of one peer come in this order:

PeerUp, then MessageReceived and LoadReported in any order, then PeerLost; after that PeerUp again (the same process was
silent and is back) or PeerClosed (the connection has ended). Messages are delivered only between PeerUp and PeerLost.
Messages that arrive at other times are dropped, and the peer sends them again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, TypeAlias

from ..protocol.messages import AnyMessage, Hello, InstanceId, Load, Welcome
from ..protocol.wire import IntArray

MOST_SHOWN = 4
"""Endpoints named in one log line."""


@dataclass(frozen=True, slots=True)
class PeerUp:
    """The servers are paired. `endpoint` is where decode connected to; None on the prefill side."""

    instance: InstanceId
    endpoint: str | None
    introduction: Hello | Welcome


@dataclass(frozen=True, slots=True)
class PeerAlias:
    """`endpoint` is another name or address of a server that is already paired as `instance`."""

    endpoint: str
    instance: InstanceId


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The peer is silent, its connection closed, or it has lost us. It may still run, and still write."""

    instance: InstanceId
    reason: str


@dataclass(frozen=True, slots=True)
class PeerClosed:
    """The connection of a lost peer is closed or replaced by a new one: its process has ended, or it is disconnected
    and has stopped writing to us. Messages queued for it are dropped, and its transfers have failed. A silent peer (for
    example under SIGSTOP) is lost, but not closed.
    """

    instance: InstanceId


@dataclass(frozen=True, slots=True)
class PeerRefused:
    """Pairing was refused; `peer` is the endpoint (on decode) or the instance or address (on prefill)."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class PeersUnreachable:
    """Why no server is paired at these endpoints (decode); replaces the previous event."""

    reasons: Mapping[str, str]


def describe_absence(reasons: Mapping[str, str]) -> str:
    """The first few reasons in one line."""
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


Event: TypeAlias = (
    PeerUp | PeerAlias | PeerLost | PeerClosed | PeerRefused | PeersUnreachable | MessageReceived | LoadReported
)


PublicState: TypeAlias = Literal["connecting", "paired", "refused", "lost"]


@dataclass(frozen=True, slots=True)
class PeerSnapshot:
    """One peer for /server_info. `endpoint` is HOST:PORT on the decode side, the peer's address on the prefill side.

    If HOST is a name, there is one snapshot for each of its addresses, with the same endpoint.
    """

    endpoint: str
    state: PublicState
    instance: InstanceId | None = None
    detail: str | None = None
    round_trip_ms: float | None = None
    address: str | None = None
    """The IP address, if `endpoint` has a name (decode)."""
    rdma_ports: dict[str, str] = field(default_factory=dict)
    """The states of its RDMA devices, by name."""
