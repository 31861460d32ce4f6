"""The prompts that prefill servers compute: sends them, tracks the transfer of their KV, and gives up attempts.

An attempt that was given up leaves its pages in quarantine: its writer may still write them.
"""

import dataclasses
import math
from collections.abc import Sequence

from ....memory.index_spaces import HotPage, KvPage
from ....memory.pages import PageGrant, pages_for
from ....transfer.protocol.messages import (
    Abort,
    ChunkArrived,
    InstanceId,
    KvDestination,
    PrefillDone,
    TransferKey,
)
from ...messages.effects import SendToPeer
from ...messages.ranks import OpenHot
from ..memory.hot_buffers import HotBuffers
from ..memory.resources import Resources
from ..requests.request import Attempt, Prompt
from ..requests.reservation import Reservation
from .kv_path import PathInputs, choose_path
from .placer import Placer
from .prefill_peers import PrefillPeer, PrefillPeers, Selection, prompt_kind
from .staging import RankRing, StagedArrivals

LOOK_S = 0.05
"""A look at all prompts takes up to a millisecond."""


@dataclasses.dataclass(slots=True)
class QuarantinedPages:
    """The pages of an attempt that was given up. `release_at` is infinite until the writer is known to have stopped."""

    key: TransferKey
    instance: InstanceId
    grant: PageGrant[KvPage]
    release_at: float
    hot_grant: PageGrant[HotPage] | None = None
    """Of a hot buffer that the writer writes rows to (HiSparse)."""


class Quarantine:
    """All quarantined pages of a decode server. A writer has stopped when it reports so. When its connection closes,
    bytes in flight may still arrive, so the pages stay for another `quarantine_s`.
    """

    def __init__(self, quarantine_s: float) -> None:
        self._quarantine_s = quarantine_s
        self._pages: dict[TransferKey, QuarantinedPages] = {}

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def pages(self) -> int:
        return sum(len(quarantined.grant.held) for quarantined in self._pages.values())

    @property
    def hot_pages(self) -> int:
        grants = (quarantined.hot_grant for quarantined in self._pages.values())
        return sum(len(grant.pages) for grant in grants if grant is not None)

    def put(self, prompt: Prompt, hot_grant: PageGrant[HotPage] | None = None) -> None:
        """Quarantine the pages of the prompt's attempt, and of its hot buffer, which its writer may still write."""
        attempt, grant = prompt.attempt, prompt.grant
        assert attempt is not None, f"prompt {prompt.prompt_id} has no attempt to quarantine"
        assert grant is not None, f"prompt {prompt.prompt_id} has no pages to quarantine"
        self._pages[attempt.key] = QuarantinedPages(attempt.key, attempt.instance, grant, math.inf, hot_grant)
        prompt.grant = None

    def writer_stopped(self, key: TransferKey, *, late_writes: bool, now: float) -> None:
        """The writer issues no more writes; with `late_writes`, bytes may be in flight. Unknown keys are ignored.

        Only the first report counts. If a transfer fails before our Abort arrives, its TransferFailed may report late
        writes; the AbortAck that follows never does.
        """
        quarantined = self._pages.get(key)
        if quarantined is not None and quarantined.release_at == math.inf:
            quarantined.release_at = now + (self._quarantine_s if late_writes else 0.0)

    def writer_closed(self, instance: InstanceId, now: float) -> None:
        """The connection of this peer is closed: only bytes in kernel buffers may still arrive."""
        for quarantined in self._pages.values():
            if quarantined.instance == instance:
                quarantined.release_at = min(quarantined.release_at, now + self._quarantine_s)

    def resumed(self, absent_s: float, now: float) -> None:
        """This process did not run for `absent_s`: bytes that its kernel has received are still to be written."""
        for quarantined in self._pages.values():
            if quarantined.release_at < math.inf:
                quarantined.release_at = min(quarantined.release_at + absent_s, now + self._quarantine_s)

    def take_due(self, now: float) -> list[QuarantinedPages]:
        """Remove and return the pages whose writer has stopped; the caller releases its hold of their grants."""
        due = [quarantined for quarantined in self._pages.values() if quarantined.release_at <= now]
        for quarantined in due:
            del self._pages[quarantined.key]
        return due


class RemotePrefill:
    """Owns the transfers in flight, their staged parts and the quarantine. `prompts` maps transfers to prompts."""

    def __init__(self, resources: Resources, rings: Sequence[RankRing], *, peers: PrefillPeers, placer: Placer) -> None:
        self._limits = limits = resources.limits
        self._memory = resources.memory
        self._counters = counters = resources.counters
        self._outbox = outbox = resources.outbox
        self._peers = peers
        self._placer = placer
        self.prompts: dict[TransferKey, Prompt] = {}
        self._look_at = -math.inf
        """When to look for late prompts again."""
        self.quarantine = Quarantine(limits.quarantine_s)
        self.staging = StagedArrivals(
            rings, limits.page_size, limits.quarantine_s, counters, outbox, self._memory.commands
        )

    def send(self, prompt: Prompt, reservation: Reservation, selection: Selection, now: float) -> None:
        """Send a prompt, whose pages are reserved, to the selected server."""
        peer, expected = selection.peer, selection.cached
        prompt.attempts += 1
        key = TransferKey(prompt.prompt_id, prompt.attempts)
        kind = prompt_kind(prompt, expected)
        cached = reservation.prefix_tokens - reservation.unseen_tokens
        tokens = max(1, prompt.tokens - max(cached, expected or 0))
        members = prompt.waiting
        first = members[0]
        prompt.attempt = attempt = Attempt(
            key,
            peer.instance,
            reservation.prefix_tokens,
            kind,
            now,
            tokens,
            expected_cached=expected,
            unseen_tokens=reservation.unseen_tokens,
        )
        self._counters[f"dispatch_{selection.reason}"] += 1
        if expected is not None:
            self._counters["dispatch_tokens_expected"] += expected
            peer.cache.sent(prompt.page_hashes[peer.cache.page_size or 0], expected, now)
        first_new, within = divmod(reservation.prefix_tokens, self._limits.page_size)
        new_pages = reservation.prompt.pages[first_new:]
        if reservation.copied is not None:
            (source,) = reservation.copied.pages
            self._memory.copy_page(source, new_pages[0], tokens=within)
            self._memory.release_grant(reservation.copied)
        destinations: list[Sequence[int]] = [new_pages]
        to_host = False
        opened: OpenHot | None = None
        if (hot := self._memory.hot) is not None:
            choice = choose_path(self._path_inputs(prompt, peer, hot))
            self._counters[f"kv_path_{choice.path}_{choice.reason}"] += 1
            to_host = choice.path == "host"
            if not to_host:
                opened = self._memory.open_for_arrival(prompt, attempt, reservation.prompt.pages)
                destinations.append(hot.announced(attempt.hot_pages[first_new:]))
        if within:
            count = prompt.tokens - reservation.prefix_tokens
            destinations = [self._rows(pages, within, count) for pages in destinations]
        self.prompts[key] = prompt
        self._placer.sent(prompt, attempt)
        if peer.answered_all:
            peer.heard_at = now
        rate = self._peers.rate(peer.instance)
        attempt.expected_s = peer.expected_s(tokens, 0, rate, now) if rate else 0.0
        peer.window.sent(kind, tokens)
        peer.sent_at = now
        message = KvDestination(
            key=key,
            rid=first.rid,
            sampling=prompt.first_sampling,
            timeout_s=min(self._limits.prefill_timeout_s, max(request.deadline for request in members) - now),
            granularity="token" if within else "page",
            prefix_tokens=reservation.prefix_tokens,
            room=prompt.room,
            verify=self._limits.verify_kv,
            samples=prompt.samples,
            output_tokens=prompt.output_tokens,
            logprobs=first.logprobs,
            priority=prompt.priority,
            enable_hisparse=to_host,
        )
        arrays: list[Sequence[int]] = [prompt.token_ids, *map(tuple, destinations)]
        arrays += [()] * (3 - len(arrays))  # no hot indices
        arrays.append((prompt.traceparent or "").encode())
        arrays.append((round(1000 * (now - prompt.arrived_at)), round(1000 * (prompt.slo_ttft_s or 0))))
        self.staging.open(key, peer.instance, reservation.prefix_tokens, prompt.tokens, reservation.prompt)
        self._outbox.append(SendToPeer(peer.instance, message, tuple(arrays)))
        if opened is not None:
            self._outbox.append(opened)

    def of_peer(self, instance: InstanceId) -> list[Prompt]:
        """Prompts that were sent to this prefill server and that it has not finished."""
        attempts = ((prompt, _attempt(prompt)) for prompt in self.prompts.values())
        return [prompt for prompt, attempt in attempts if attempt.instance == instance and not attempt.written]

    def first_late(self, now: float) -> Prompt | None:
        """The first prompt that its prefill server will bring late, and that this server computes sooner. When there is
        none, the next look is LOOK_S later.
        """
        if self._limits.local_prefill != "auto" or now < self._look_at:
            return None
        for prompt in self.prompts.values():
            attempt = _attempt(prompt)
            if not attempt.written and self._placer.is_late(prompt, attempt, now):
                return prompt
        self._look_at = now + LOOK_S
        return None

    def chunk_arrived(self, chunk: ChunkArrived) -> bool:
        """Record a chunk; False if its transfer is not in flight."""
        prompt = self.prompts.get(chunk.key)
        if prompt is None:
            return False
        attempt = _attempt(prompt)
        attempt.begun = True
        if chunk.token_start < chunk.token_end:
            attempt.chunks.append(chunk)
        computed = chunk.token_end - max(chunk.token_start, attempt.expected_cached or 0)
        tokens = min(attempt.tokens_left, max(0, computed))
        window = self._peers.window(attempt.instance)
        if tokens and window is not None:
            attempt.tokens_left -= tokens
            window.computed(attempt.kind, tokens)
        return True

    def written(self, done: PrefillDone) -> bool:
        """Prefill has written everything. Returns whether all of it is in its pages; if not, `staging.scattered()`
        returns `done` later.
        """
        prompt = self.prompts.get(done.key)
        if prompt is not None and not (attempt := _attempt(prompt)).written:
            attempt.written = True
            self._leave_prefill(attempt)
        return not self.staging.hold(done)

    def check_complete(self, prompt: Prompt, done: PrefillDone) -> str | None:
        """Check a transfer that prefill reports as done. Returns what is missing, or None."""
        arrived = _attempt(prompt).tokens_arrived()
        if arrived != prompt.tokens:
            return f"prefill reported the end after {arrived} of {prompt.tokens} prompt tokens"
        if len(done.first_tokens) < prompt.samples:
            return f"prefill sent {len(done.first_tokens)} first tokens for {prompt.samples} samples"
        return None

    def give_up(self, prompt: Prompt, reason: str, *, abort: bool) -> None:
        """Quarantine the pages of an attempt. With `abort`, tell its writer to stop."""
        attempt = _attempt(prompt)
        prompt.last_problem = reason
        attempt.given_up = True
        if abort:
            self._outbox.append(SendToPeer(attempt.instance, Abort(attempt.key, reason)))
        hot = self._memory.hot if attempt.hot_pages else None
        self.quarantine.put(prompt, hot.quarantine(prompt.prompt_id) if hot is not None else None)

    def writer_stopped(self, key: TransferKey, *, late_writes: bool, now: float) -> None:
        """The writer of a transfer issues no more writes, neither into its pages nor into the staging rings."""
        self.quarantine.writer_stopped(key, late_writes=late_writes, now=now)
        self.staging.writer_stopped(key, late_writes=late_writes, now=now)

    def leave(self, prompt: Prompt) -> None:
        """Remove a transfer that is done or given up. No further part of it is scattered."""
        attempt = _attempt(prompt)
        self.staging.close(attempt.key)
        del self.prompts[attempt.key]
        self._placer.returned(attempt)
        if not attempt.written:
            self._leave_prefill(attempt)

    def withdraw(self, prompt: Prompt, reason: str, now: float) -> None:
        """No request needs this prompt any more: stop its writer."""
        attempt = _attempt(prompt)
        if prompt.grant is not None:  # not in quarantine yet
            self.give_up(prompt, reason, abort=not attempt.written)
            if attempt.written:
                self.writer_stopped(attempt.key, late_writes=False, now=now)
        self.leave(prompt)

    def peer_closed(self, instance: InstanceId, now: float) -> None:
        """The connection to a prefill server is closed."""
        self.quarantine.writer_closed(instance, now)
        self.staging.peer_closed(instance, now)

    def resumed(self, absent_s: float, now: float) -> None:
        """This process did not run for `absent_s`: that time does not count as quarantine."""
        self.quarantine.resumed(absent_s, now)
        self.staging.resumed(absent_s, now)

    def take_released(self, now: float) -> list[QuarantinedPages]:
        """The pages whose quarantine is over; the caller releases their grants."""
        self.staging.due(now)
        return self.quarantine.take_due(now)

    def _rows(self, pages: Sequence[int], first: int, count: int) -> list[int]:
        """Rows of a pool for `count` tokens, from offset `first` of the first page on."""
        size = self._limits.page_size
        return [pages[at // size] * size + at % size for at in range(first, first + count)]

    def _path_inputs(self, prompt: Prompt, peer: PrefillPeer, hot: HotBuffers) -> PathInputs:
        """What the path of a prompt to this server depends on."""
        members = prompt.waiting
        return PathInputs(
            peer_writes_both=peer.writes_both,
            samples=len(members),
            new_tokens=max(request.sampling.max_new_tokens - len(request.output_ids) for request in members),
            pages=pages_for(prompt.tokens + 1, self._limits.page_size),
            first_pages=hot.limits.buffer_pages,
            free_pages=hot.pages.available,
            free_slots=hot.free_slots,
            ahead=sum(len(other.waiting) for other in self.prompts.values() if not _attempt(other).hot_pages),
            settled=hot.settled,
        )

    def _leave_prefill(self, attempt: Attempt) -> None:
        """Prefill has nothing more to do for this attempt: remove it from the dispatch window, if the server is still
        paired.
        """
        window = self._peers.window(attempt.instance)
        if window is not None:
            window.returned(attempt.kind, attempt.tokens_left)
        attempt.tokens_left = 0


def _attempt(prompt: Prompt) -> Attempt:
    assert prompt.attempt is not None, f"prompt {prompt.prompt_id} has no attempt"
    return prompt.attempt
