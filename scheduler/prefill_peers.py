"""The prefill servers a decode server is paired with, and which of them gets the next prompt."""

import dataclasses

from ..transfer.messages import InstanceId, Load
from .request import Prompt


@dataclasses.dataclass(slots=True)
class PrefillPeer:
    """A paired prefill server; more than one endpoint may lead to it."""

    instance: InstanceId
    endpoints: set[str]
    load: Load = dataclasses.field(default_factory=Load)
    dispatched_tokens: int = 0
    """Prompt tokens sent there that have not come back yet; its own report lags behind by a heartbeat."""


class PrefillPeers:
    """Paired prefill servers by instance."""

    def __init__(self) -> None:
        self._peers: dict[InstanceId, PrefillPeer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def up(self, instance: InstanceId, endpoint: str) -> None:
        self._peers[instance] = PrefillPeer(instance, {endpoint})

    def alias(self, instance: InstanceId, endpoint: str) -> None:
        """`endpoint` is another address of a paired server."""
        if instance in self._peers:
            self._peers[instance].endpoints.add(endpoint)

    def lost(self, instance: InstanceId) -> None:
        self._peers.pop(instance, None)

    def report(self, instance: InstanceId, load: Load) -> None:
        if instance in self._peers:
            self._peers[instance].load = load

    def dispatched(self, instance: InstanceId, tokens: int) -> None:
        """`tokens` more are on their way there; fewer when negative."""
        if instance in self._peers:
            self._peers[instance].dispatched_tokens += tokens

    def choose(self, prompt: Prompt) -> PrefillPeer | None:
        """The pinned one, or the one with the fewest prompt tokens before it; one that just failed comes last."""
        peers = [p for p in self._peers.values() if prompt.endpoint is None or prompt.endpoint in p.endpoints]
        last = prompt.attempt.instance if prompt.attempt is not None else None
        return min(
            peers,
            key=lambda peer: (peer.instance == last, peer.load.waiting_tokens + peer.dispatched_tokens),
            default=None,
        )
