"""The prefill servers that a decode server is paired with, what each has to do, and the choice of one for a prompt."""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

from ....configs.setting_types import DispatchSetting
from ....transfer.control.events import describe_absence
from ....transfer.protocol.messages import CachedPrefixes, InstanceId, Load
from ..requests.request import Prompt, PromptKind
from .choice import Candidate, Reason, choose
from .peer_cache import PeerCache

DEFAULT_TOKENS = 8192
"""Dispatch window of a prefill server that has not reported one."""
SHORT_PART = 4
"""A short prompt has at most 1 / SHORT_PART of the window."""
MIN_LONG_PROMPTS = 2
"""Long prompts that a window always admits: the computing prompt and the next one."""


@dataclasses.dataclass(slots=True)
class _Sent:
    """Prompts of one kind that are at the prefill server."""

    prompts: int = 0
    tokens: int = 0


class DispatchWindow:
    """Bounds the tokens that a decode server has at one prefill server at a time.

    A dispatched prompt holds pages on decode until its KV has arrived. So prompts wait in the queue of decode, where
    they hold no pages, and not on prefill. The prefill server reports how many tokens keep it busy until the next
    prompt arrives (`Load.window_tokens`). There are two windows of that size:

    - One for short prompts. Prefill computes them beside longer ones (chunk_queue.py), so longer ones do not count.
    - One for all others. Everything at the prefill server counts, also prompts of other decode servers. It is always
      open to MIN_LONG_PROMPTS, so each of several decode servers gets a share.

    Prompts of a lower priority count for neither: prefill computes them later.
    """

    def __init__(self) -> None:
        self._tokens = DEFAULT_TOKENS
        self._others = 0
        self._sent: dict[PromptKind, _Sent] = {}
        self.own_tokens = 0
        """Tokens that were dispatched and whose KV has not arrived."""

    @property
    def tokens_ahead(self) -> int:
        """Tokens that prefill has to compute before a prompt that is dispatched now: ours, and those of other decode
        servers. Another thread reads this, so it must not iterate over `_sent`.
        """
        return self.own_tokens + self._others

    def tokens_before(self, tokens: int) -> int:
        """The part of `tokens_ahead` that prefill computes before a prompt of `tokens` tokens is done. A longer prompt
        counts only as `tokens` tokens, because prefill computes the shorter one beside it.
        """
        return self._others + sum(min(sent.tokens, sent.prompts * tokens) for sent in self._sent.values())

    def report(self, load: Load) -> None:
        """Take a heartbeat of the prefill server. It only tells the tokens of other decode servers: for our own tokens,
        the count in this process is newer.
        """
        self._tokens = load.window_tokens or DEFAULT_TOKENS
        self._others = max(0, load.waiting_tokens - self.own_tokens)

    def sent(self, kind: PromptKind, tokens: int) -> None:
        """A prompt was dispatched, with `tokens` tokens to compute."""
        sent = self._sent.setdefault(kind, _Sent())
        sent.prompts += 1
        sent.tokens += tokens
        self.own_tokens += tokens

    def computed(self, kind: PromptKind, tokens: int) -> None:
        """KV of `tokens` tokens has arrived."""
        self._sent[kind].tokens -= tokens
        self.own_tokens -= tokens

    def returned(self, kind: PromptKind, tokens: int) -> None:
        """A prompt is done or was given up; the KV of `tokens` tokens has not arrived."""
        sent = self._sent[kind]
        sent.prompts -= 1
        sent.tokens -= tokens
        self.own_tokens -= tokens
        if not sent.prompts:
            del self._sent[kind]

    def is_open(self, kind: PromptKind) -> bool:
        """Whether a prompt of this kind may be dispatched now."""
        ahead = [(other, sent) for other, sent in self._sent.items() if other.priority >= kind.priority]
        if self._is_short(kind):
            return sum(sent.tokens for other, sent in ahead if self._is_short(other)) < self._tokens
        if sum(sent.tokens for _, sent in ahead) + self._others < self._tokens:
            return True
        return sum(sent.prompts for other, sent in ahead if not self._is_short(other)) < MIN_LONG_PROMPTS

    def _is_short(self, kind: PromptKind) -> bool:
        return 1 << kind.bits <= self._tokens // SHORT_PART


@dataclasses.dataclass(slots=True)
class PrefillPeer:
    """A paired prefill server; it may be known by several endpoints."""

    instance: InstanceId
    endpoints: set[str]
    capacity: float = math.inf
    """Tokens of the longest prompt that its KV pool holds."""
    backoff_until: float = -math.inf
    """It has refused a prompt, and gets none before this time."""
    leaving: bool = False
    """It is shutting down, and gets no more prompts."""
    writes_both: bool = False
    """It writes KV to host memory or to the GPU, as its KvDestination says (HiSparse)."""
    shares_device: bool = False
    """It computes on the GPU or the CPU cores that this server computes on."""
    shares_gpu: bool = False
    window: DispatchWindow = dataclasses.field(default_factory=DispatchWindow)
    tokens_per_s: float = 0.0
    """How fast it computes prompts, by its own report; 0 if it has not reported it."""
    cache: PeerCache = dataclasses.field(default_factory=PeerCache)
    held_tokens: int = 0
    """Tokens to compute of prompts in our queue that wait for this server, because it has their prefix."""
    sent_at: float = -math.inf
    """When it last got a prompt from us."""
    heard_at: float = 0.0
    """When it last sent a message, or got a prompt after it had answered all others."""

    @property
    def answered_all(self) -> bool:
        """It has none of our prompts, and has sent a message since the last one."""
        return not self.window.own_tokens and self.heard_at > self.sent_at

    def silent_s(self, tokens_per_s: float, now: float) -> float:
        """For how much longer it has been silent than all of its prompts should take: it is slow or dead."""
        if self.answered_all:
            return 0.0
        return max(0.0, now - self.heard_at - self.window.tokens_ahead / tokens_per_s)

    def expected_s(self, tokens: int, queued: int, tokens_per_s: float, now: float) -> float:
        """The expected time until it has computed `tokens` tokens, after `queued` others that it has not got yet. A
        silent server is expected to be silent for as long again.
        """
        ahead = self.window.tokens_before(tokens)
        return (ahead + queued + tokens) / tokens_per_s + self.silent_s(tokens_per_s, now)

    def cached_tokens(self, prompt: Prompt) -> int | None:
        """Tokens of a prompt that are in its cache, as far as known; None if it does not report its cache, or the pages
        of the prompt were not hashed.
        """
        hashes = prompt.page_hashes.get(self.cache.page_size or 0)
        if hashes is None:
            return None
        known = prompt.cached_at.get(self.instance)
        if known is None or known[0] != self.cache.version:
            found = self.cache.cached_tokens(hashes, prompt.tokens - 1)
            prompt.cached_at[self.instance] = known = self.cache.version, found
        return known[1]


class Selection(NamedTuple):
    """The server that a prompt is sent to, or waits for."""

    peer: PrefillPeer
    is_open: bool
    reason: Reason
    cached: int | None
    """Tokens of the prompt in its cache; None if unknown."""


class DispatchInputs(NamedTuple):
    """What the choice of a prefill server depends on, besides the prompt."""

    tokens_ahead: int | None
    cached_tokens: int | None
    """None if the server does not report its cache."""
    shares_device: bool | None = None


SLOWER = 2
"""A server counts as slower if the fastest is this many times as fast: measured rates vary."""
REFUSED_BACKOFF_S = 0.5
"""How long a server gets no prompts after it has refused one, because it is full or shutting down."""


class PrefillPeers:
    """Paired prefill servers by instance."""

    def __init__(self, mode: DispatchSetting = "load") -> None:
        self._mode: DispatchSetting = mode
        self._peers: dict[InstanceId, PrefillPeer] = {}
        self.any_beside = False
        """A server computes on the GPU of this one."""
        self._lost_at: dict[str | None, float] = {}
        """For each endpoint without a server: when its last server was lost. The key None stands for all endpoints: it
        is set while there is no server at all.
        """
        self.unreachable: Mapping[str, str] = {}
        """Why no server is paired, by endpoint, if known."""

    def up(self, peer: PrefillPeer) -> None:
        self._peers[peer.instance] = peer
        self.any_beside |= peer.shares_gpu
        self._found(peer.endpoints)

    def alias(self, instance: InstanceId, endpoint: str) -> None:
        """`endpoint` is another address of a paired server."""
        if instance in self._peers:
            self._peers[instance].endpoints.add(endpoint)
            self._found({endpoint})

    def lost(self, instance: InstanceId, now: float) -> None:
        peer = self._peers.pop(instance, None)
        if peer is not None:
            self.any_beside = any(other.shares_gpu for other in self._peers.values())
            self._note_absence(peer, now)

    def leaving(self, instance: InstanceId, now: float) -> None:
        """The server takes no more prompts; it may still be connected."""
        peer = self._peers.get(instance)
        if peer is not None and not peer.leaving:
            peer.leaving = True
            self._note_absence(peer, now)

    def report(self, instance: InstanceId, load: Load) -> None:
        if instance in self._peers:
            self._peers[instance].window.report(load)
            self._peers[instance].tokens_per_s = load.tokens_per_s

    def rate(self, instance: InstanceId) -> float | None:
        """How fast a server computes prompts; until it reports that, as fast as the fastest. None if it was lost."""
        return self._peers[instance].tokens_per_s or self.tokens_per_s if instance in self._peers else None

    def window(self, instance: InstanceId) -> DispatchWindow | None:
        """None for a server that was lost."""
        return self._peers[instance].window if instance in self._peers else None

    def heard(self, instance: InstanceId, now: float) -> None:
        """The server has sent a message about its prompts."""
        if instance in self._peers:
            self._peers[instance].heard_at = now

    def refused(self, instance: InstanceId, now: float) -> None:
        """The server has refused a prompt; it may take one later."""
        if instance in self._peers:
            self._peers[instance].backoff_until = now + REFUSED_BACKOFF_S

    def absent_since(self, endpoint: str | None) -> float | None:
        """Since when there is no server at this endpoint (None: at any). Returns -inf if there never was one, and None
        if there is one now.
        """
        return None if self._of(endpoint) else self._lost_at.get(endpoint, -math.inf)

    def describe_absence(self, endpoint: str | None) -> str:
        """Why no server is paired at this endpoint, or none at all; empty if unknown."""
        if endpoint is not None:
            return self.unreachable.get(endpoint, "")
        return describe_absence(self.unreachable)

    def several_at(self, endpoint: str | None) -> list[str]:
        """The addresses of the servers at an endpoint that stands for more than one of them; else empty."""
        peers = self._of(endpoint) if endpoint is not None else []
        if len(peers) < 2:
            return []
        return sorted(min(peer.endpoints - {endpoint}, default=peer.instance) for peer in peers)

    def select(self, prompt: Prompt, now: float) -> Selection | None:
        """The server for a prompt (choice.py), of those that can hold it; the server of the last attempt comes last.
        None if no server takes the prompt now and none is worth waiting for.
        """
        last = prompt.attempt.instance if prompt.attempt is not None else None
        peers = self.able(prompt)
        if len(peers) == 1 and not prompt.page_hashes:
            (peer,) = peers
            is_open = peer.backoff_until <= now and peer.window.is_open(prompt.kind())
            return Selection(peer, is_open, "load", None) if is_open else None
        cached = [peer.cached_tokens(prompt) if self._mode == "prefix" else None for peer in peers]
        candidates = [
            Candidate(
                ahead=self._ahead(peer, prompt.tokens - (tokens or 0), now),
                cached=tokens or 0,
                fullness=peer.cache.stored_tokens / (peer.capacity * peer.cache.ranks),
                is_open=peer.backoff_until <= now and peer.window.is_open(prompt.kind(tokens or 0)),
                failed=peer.instance == last,
                sent_at=peer.sent_at,
            )
            for peer, tokens in zip(peers, cached, strict=True)
        ]
        choice = choose(self._mode, prompt.tokens, candidates)
        if choice is None:
            return None
        number = choice.number
        return Selection(peers[number], candidates[number].is_open, choice.reason, cached[number])

    def _ahead(self, peer: PrefillPeer, tokens: int, now: float) -> int:
        """Tokens that a server computes before a prompt of `tokens` tokens. Time that it will take longer than the
        fastest server, because it is slower or silent, counts as tokens as well.
        """
        ahead, fastest = peer.window.tokens_ahead + peer.held_tokens, self.tokens_per_s
        if fastest is None:
            return ahead
        slower = fastest / peer.tokens_per_s if SLOWER * peer.tokens_per_s < fastest and peer.tokens_per_s else 1.0
        silent_s = peer.silent_s(fastest / slower, now)
        return int(slower * ahead + (slower - 1) * tokens + silent_s * fastest)

    def hold(self, prompt: Prompt, selection: Selection) -> None:
        """A prompt waits for a server that has its prefix. Count its tokens there, so that later prompts see them."""
        selection.peer.held_tokens += prompt.tokens - (selection.cached or 0)

    def release_held(self) -> None:
        """Reset `held_tokens`; every turn counts again which prompts wait for which server."""
        for peer in self._peers.values():
            peer.held_tokens = 0

    def take_cache_report(self, instance: InstanceId, report: CachedPrefixes) -> None:
        if instance in self._peers:
            self._peers[instance].cache.report(report)

    @property
    def compares_caches(self) -> bool:
        """Whether the choice depends on what servers have cached: by prefix, and if there are several."""
        return self._mode == "prefix" and len(self._peers) > 1

    @property
    def hashed_page_sizes(self) -> tuple[int, ...]:
        """Page sizes for which prompts have to be hashed. Read by another thread."""
        if not self.compares_caches:
            return ()
        sizes = {peer.cache.page_size for peer in list(self._peers.values())}
        return tuple(sorted(size for size in sizes if size is not None))

    def inputs(self) -> dict[str, DispatchInputs]:
        """The inputs of the choice, by instance. Called from any thread."""
        return {
            peer.instance: DispatchInputs(
                peer.window.tokens_ahead,
                None if peer.cache.page_size is None else peer.cache.stored_tokens,
                peer.shares_device,
            )
            for peer in list(self._peers.values())
        }

    @property
    def tokens_per_s(self) -> float | None:
        """How fast the fastest server computes prompts; None if none has reported it."""
        return max((peer.tokens_per_s for peer in self._peers.values()), default=0.0) or None

    def computes_beside(self, slack_s: float, now: float) -> bool:
        """Whether a server computes prompts of ours now, on the GPU of this one. It does not count if it is silent for
        `slack_s` longer than they should take: it hangs, or is dead.
        """
        return any(
            peer.shares_gpu
            and peer.window.own_tokens > 0
            and peer.tokens_per_s > 0
            and peer.silent_s(peer.tokens_per_s, now) <= slack_s
            for peer in self._peers.values()
        )

    def able(self, prompt: Prompt) -> list[PrefillPeer]:
        """The servers that can hold the prompt, whether they take it now or not."""
        return [peer for peer in self._of(prompt.endpoint) if peer.capacity >= prompt.tokens]

    def largest_prompt(self, endpoint: str | None) -> float:
        """Tokens that the largest server, or the one at this endpoint, can hold; inf if none is paired."""
        return max((peer.capacity for peer in self._of(endpoint)), default=math.inf)

    def _note_absence(self, peer: PrefillPeer, now: float) -> None:
        for endpoint in (*peer.endpoints, None):
            if not self._of(endpoint):
                self._lost_at.setdefault(endpoint, now)

    def _found(self, endpoints: set[str]) -> None:
        for served in (*endpoints, None):
            self._lost_at.pop(served, None)

    def _of(self, endpoint: str | None) -> list[PrefillPeer]:
        """The servers at this endpoint, or all, except those that are leaving."""
        return [
            peer
            for peer in self._peers.values()
            if not peer.leaving and (endpoint is None or endpoint in peer.endpoints)
        ]
