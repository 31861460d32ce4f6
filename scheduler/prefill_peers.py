"""The prefill servers a decode server is paired with, and which of them gets the next prompt."""

import dataclasses
import math

from ..transfer.messages import InstanceId, Load
from .request import Prompt


@dataclasses.dataclass(slots=True)
class PrefillPeer:
    """A paired prefill server; more than one endpoint may lead to it."""

    instance: InstanceId
    endpoints: set[str]
    capacity: float = math.inf
    """Tokens of the longest prompt that its KV pool holds."""
    load: Load = dataclasses.field(default_factory=Load)
    dispatched_tokens: int = 0
    """Prompt tokens sent there that have not come back yet; its own report lags behind by a heartbeat."""


class PrefillPeers:
    """Paired prefill servers by instance."""

    def __init__(self) -> None:
        self._peers: dict[InstanceId, PrefillPeer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def up(self, instance: InstanceId, endpoint: str, capacity: float) -> None:
        self._peers[instance] = PrefillPeer(instance, {endpoint}, capacity)

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
        """The pinned one, or the one with the fewest prompt tokens before it; one that just failed comes last, and
        before it one that is too small.
        """
        peers = self._of(prompt.endpoint)
        last = prompt.attempt.instance if prompt.attempt is not None else None
        return min(
            peers,
            key=lambda peer: (
                peer.instance == last,
                peer.capacity < prompt.tokens,
                peer.load.waiting_tokens + peer.dispatched_tokens,
            ),
            default=None,
        )

    def can_compute(self, endpoint: str | None, tokens: int) -> bool:
        """Whether one of them, or the pinned one, holds a prompt of so many tokens. Nobody is paired: it may be so."""
        peers = self._of(endpoint)
        return not peers or any(peer.capacity >= tokens for peer in peers)

    def _of(self, endpoint: str | None) -> list[PrefillPeer]:
        return [peer for peer in self._peers.values() if endpoint is None or endpoint in peer.endpoints]
