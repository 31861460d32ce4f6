"""A handshake with the control port of a running prefill server, without pairing.

doctor introduces itself like a decode server, with the cluster key and the protocol version, but with a model that no
server has. Prefill answers that the models differ. So everything before that works: address, firewall, key, version.
Prefill logs the refusal and counts it; its requests are not affected.
"""

import queue
import time
import uuid

from ...transfer.control.curve import ClusterKeys
from ...transfer.control.decode import DecodeControl
from ...transfer.control.events import Event, PeerRefused, PeersUnreachable, PeerUp
from ...transfer.plan.pairing import check_pair
from ...transfer.protocol.messages import PROTOCOL_VERSION, Hello, InstanceId
from .facts import Peer

TIMEOUT_S = 10.0
SETTLE_S = 2.0
"""How long to wait for a more precise reason after a first reason why the server cannot be reached."""
OTHER_MODEL = "models differ: "


def greet(endpoint: str, cluster_key: str | None, timeout_s: float = TIMEOUT_S) -> Peer:
    """Greet the prefill server at HOST:PORT and return how it answered."""
    me = Hello(PROTOCOL_VERSION, InstanceId(f"doctor-{uuid.uuid4()}"), "doctor", "pdserve doctor", ())
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    keys = ClusterKeys.derive(cluster_key) if cluster_key is not None else None
    control = DecodeControl(me, check=lambda welcome: check_pair(me, welcome), on_event=events.put, keys=keys)
    started = time.monotonic()
    control.start()
    try:
        control.connect(endpoint)
        return _answer(endpoint, events, started, timeout_s)
    finally:
        control.close()


def _answer(endpoint: str, events: "queue.SimpleQueue[Event]", started: float, timeout_s: float) -> Peer:
    reason, ends_at = f"no answer within {timeout_s:g} s", started + timeout_s
    while (left_s := ends_at - time.monotonic()) > 0:
        try:
            event = events.get(timeout=left_s)
        except queue.Empty:
            break
        took_s = time.monotonic() - started
        match event:
            case PeerRefused(reason=refusal) if refusal.startswith(OTHER_MODEL):
                served = refusal.removeprefix(OTHER_MODEL).partition(", decode serves")[0]
                return Peer(endpoint, True, served, took_s)
            case PeerRefused(reason=refusal):
                return Peer(endpoint, False, refusal, took_s)
            case PeerUp():
                return Peer(endpoint, True, "paired", took_s)
            case PeersUnreachable(reasons=reasons) if endpoint in reasons:
                # the reason of the first attempt to connect; a more precise one may follow
                reason, ends_at = reasons[endpoint], min(ends_at, time.monotonic() + SETTLE_S)
            case _:
                pass
    return Peer(endpoint, False, reason)
