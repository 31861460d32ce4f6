"""Joins the status of all control threads of a server. There is one, but a decode server with data-parallel attention
has one per data-parallel rank.
"""

import collections
import threading
from collections.abc import Sequence

from ...transfer.control.events import PeerSnapshot
from ...transfer.control.peers import AnyControl
from ..decode.placement.peers import DispatchInputs
from ..messages.frontend import PeerStatus
from .decode_engine import DecodeEngine
from .prefill_engine import NO_ROUTES, KvRoutes, PrefillEngine

NO_INPUTS = DispatchInputs(None, None)
_WORST_FIRST = ("refused", "lost", "connecting", "paired")


def control_counters(controls: Sequence[AnyControl]) -> dict[str, float]:
    """The counters of all control threads."""
    total: collections.Counter[str] = collections.Counter()
    for control in controls:
        total.update({f"control_{name}": count for name, count in control.stats().items()})
    return dict(total)


def peer_status(
    controls: Sequence[AnyControl], engines: Sequence[DecodeEngine] | Sequence[PrefillEngine]
) -> tuple[PeerStatus, ...]:
    """The peers of a server. If several data-parallel ranks connect to one address, the connection in the worst state
    is shown.
    """
    routes: dict[str, KvRoutes] = {}
    inputs: dict[str, DispatchInputs] = {}
    for engine in engines:
        if isinstance(engine, DecodeEngine) and not inputs:  # data-parallel ranks have connections of their own
            inputs = engine.scheduler.peers.inputs()
        if isinstance(engine, PrefillEngine):
            for instance, found in list(engine.routes.items()):
                known = routes.get(instance, NO_ROUTES)
                routes[instance] = KvRoutes(
                    known.transports | found.transports,
                    known.unusable | found.unusable,
                    max(known.since or 0.0, found.since or 0.0) or None,
                )
    peers = controls[0].peers() if len(controls) == 1 else _worst([control.peers() for control in controls])
    return tuple(
        PeerStatus(
            peer.endpoint,
            peer.state,
            peer.instance,
            peer.detail,
            peer.round_trip_ms,
            *routes.get(peer.instance or "", NO_ROUTES),
            **inputs.get(peer.instance or "", NO_INPUTS)._asdict(),
            address=peer.address,
            rdma_ports=peer.rdma_ports,
        )
        for peer in peers
    )


def hashed_page_sizes(engines: Sequence[DecodeEngine] | Sequence[PrefillEngine]) -> tuple[int, ...]:
    """Page sizes for which the frontend hashes prompts."""
    peers = (engine.scheduler.peers for engine in engines if isinstance(engine, DecodeEngine))
    return tuple(sorted({size for known in peers for size in known.hashed_page_sizes}))


def _worst(of_controls: Sequence[Sequence[PeerSnapshot]]) -> list[PeerSnapshot]:
    found: dict[tuple[str, str | None], PeerSnapshot] = {}
    for peers in of_controls:
        for peer in peers:
            at = peer.endpoint, peer.address
            other = found.setdefault(at, peer)
            if _WORST_FIRST.index(peer.state) < _WORST_FIRST.index(other.state):
                found[at] = peer
    return list(found.values())


def close_all(controls: Sequence[AnyControl]) -> None:
    """Close all control threads at the same time: each waits for its peers."""
    closers = [threading.Thread(target=control.close, name="control-close") for control in controls]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join()
