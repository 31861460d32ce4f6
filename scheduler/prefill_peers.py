"""The prefill servers a decode server is paired with, and which of them gets the next prompt."""

import dataclasses
import math
from collections.abc import Mapping

from ..transfer.events import describe_absence
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
    rests_until: float = -math.inf
    """It has refused a prompt, and gets none before."""
    leaving: bool = False
    """It is about to end, and gets no more prompts."""
    dispatched_tokens: int = 0
    """Prompt tokens sent there that have not come back yet; its own report lags behind by a heartbeat."""


REFUSED_REST_S = 0.5
"""How long one that refuses prompts, because it is full or shutting down, is left alone."""


class PrefillPeers:
    """Paired prefill servers by instance."""

    def __init__(self) -> None:
        self._peers: dict[InstanceId, PrefillPeer] = {}
        self._lost_at: dict[str | None, float] = {}
        """When the last server was lost: at each endpoint where there is none any more, and of all."""
        self.unreachable: Mapping[str, str] = {}
        """Why no server is paired, by endpoint, where that is known."""

    def __len__(self) -> int:
        return len(self._peers)

    def up(self, instance: InstanceId, endpoint: str, capacity: float) -> None:
        self._peers[instance] = PrefillPeer(instance, {endpoint}, capacity)
        self._found(endpoint)

    def alias(self, instance: InstanceId, endpoint: str) -> None:
        """`endpoint` is another address of a paired server."""
        if instance in self._peers:
            self._peers[instance].endpoints.add(endpoint)
            self._found(endpoint)

    def lost(self, instance: InstanceId, now: float) -> None:
        peer = self._peers.pop(instance, None)
        if peer is not None:
            self._note_absence(peer, now)

    def leaving(self, instance: InstanceId, now: float) -> None:
        """It takes no more prompts, whether or not it is still there."""
        peer = self._peers.get(instance)
        if peer is not None and not peer.leaving:
            peer.leaving = True
            self._note_absence(peer, now)

    def report(self, instance: InstanceId, load: Load) -> None:
        if instance in self._peers:
            self._peers[instance].load = load

    def dispatched(self, instance: InstanceId, tokens: int) -> None:
        """`tokens` more are on their way there; fewer when negative."""
        if instance in self._peers:
            self._peers[instance].dispatched_tokens += tokens

    def refused(self, instance: InstanceId, now: float) -> None:
        """It did not take a prompt, and may take that or another one later."""
        if instance in self._peers:
            self._peers[instance].rests_until = now + REFUSED_REST_S

    def serve(self, endpoint: str | None, now: float) -> bool:
        """Whether a server at this endpoint, or any at all, may be given prompts."""
        return any(peer.rests_until <= now for peer in self._of(endpoint))

    def absent_since(self, endpoint: str | None) -> float | None:
        """Since when there is no server at this endpoint, or none at all: for ever, where there never was. None while
        there is one.
        """
        return None if self._of(endpoint) else self._lost_at.get(endpoint, -math.inf)

    def describe_absence(self, endpoint: str | None) -> str:
        """Why no server is paired at this endpoint, or none at all; empty where nothing is known."""
        if endpoint is not None:
            return self.unreachable.get(endpoint, "")
        return describe_absence(self.unreachable)

    def choose(self, prompt: Prompt, now: float) -> PrefillPeer | None:
        """The pinned one, or the one with the fewest prompt tokens before it; one that just failed comes last, and
        before it one that is too small.
        """
        peers = [peer for peer in self._of(prompt.endpoint) if peer.rests_until <= now]
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

    def _note_absence(self, peer: PrefillPeer, now: float) -> None:
        for endpoint in (*peer.endpoints, None):
            if not self._of(endpoint):
                self._lost_at.setdefault(endpoint, now)

    def _found(self, endpoint: str) -> None:
        for served in (endpoint, None):
            self._lost_at.pop(served, None)

    def _of(self, endpoint: str | None) -> list[PrefillPeer]:
        """Those that may be given prompts, now or later."""
        return [
            peer
            for peer in self._peers.values()
            if not peer.leaving and (endpoint is None or endpoint in peer.endpoints)
        ]
