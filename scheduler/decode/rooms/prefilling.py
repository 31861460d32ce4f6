"""PREFILLING and VERIFYING prompts: sends them to prefill servers, tracks the transfer of their KV, gives up attempts.

An attempt that was given up leaves its pages in quarantine: its writer may still write them (memory/holds.py).
"""

from collections.abc import Sequence

from ....memory.pages import pages_for
from ....transfer.protocol.messages import (
    Abort,
    ChunkArrived,
    InstanceId,
    KvDestination,
    KvPath,
    PrefillDone,
    StageArrived,
    StageRequest,
    StageStopped,
    TransferKey,
)
from ...chunking.shared_prefix import PrefixesInProgress
from ...messages.effects import SendToPeer
from ...messages.ranks import OpenHot
from ..memory.hisparse_memory import HisparseMemory
from ..memory.hot_buffers import HotBuffers
from ..memory.request_memory import Reservation
from ..memory.resources import Resources
from ..placement.kv_path import PathInputs, choose_path
from ..placement.peers import PrefillPeer, PrefillPeers, Selection
from ..requests.request import Attempt, Prompt
from .staging import RankRing, StagedArrivals


class Prefilling:
    """Owns the transfers in flight and their staged parts. `prompts` maps transfers to prompts."""

    def __init__(self, resources: Resources, rings: Sequence[RankRing], peers: PrefillPeers) -> None:
        self._limits = limits = resources.limits
        self._memory = resources.memory
        self._counters = resources.counters
        self._rates = resources.rates
        self._outbox = resources.outbox
        self._peers = peers
        self.prompts: dict[TransferKey, Prompt] = {}
        self.prefixes = PrefixesInProgress(limits.page_size, limits.max_step_tokens, enabled=limits.prefix_cache)
        """Of prompts at prefill servers, which compute a shared prefix once, too. Only placement uses it."""
        self.staging: StagedArrivals | None = None
        if rings:
            holds, outbox = self._memory.holds, self._outbox
            self.staging = StagedArrivals(
                rings, limits.page_size, limits.quarantine_s, resources.counters, outbox, holds
            )

    def send(self, prompt: Prompt, reservation: Reservation, selection: Selection, now: float) -> None:
        """Send a prompt, whose pages are reserved, to the selected server."""
        peer, expected = selection.peer, selection.cached
        prompt.attempts += 1
        key = TransferKey(prompt.prompt_id, prompt.attempts)
        kind = prompt.kind(expected or 0)
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
            self._memory.holds.release(reservation.copied)
        destinations: list[Sequence[int]] = [new_pages]
        to_host = False
        opened: OpenHot | None = None
        if isinstance(memory := self._memory, HisparseMemory):
            choice = choose_path(self._path_inputs(prompt, peer, memory.hot))
            self._counters[f"kv_path_{choice.path}_{choice.reason}"] += 1
            to_host = choice.path == "host"
            if not to_host:
                opened = memory.open_for_arrival(prompt, attempt, reservation.prompt.pages)
                destinations.append(memory.hot.announced(attempt.hot_pages[first_new:]))
        if within:
            count = prompt.tokens - reservation.prefix_tokens
            destinations = [self._rows(pages, within, count) for pages in destinations]
        self.prompts[key] = prompt
        if self._limits.local_prefill == "auto":
            whole = cached // self._limits.page_size * self._limits.page_size
            attempt.progress = self.prefixes.start(prompt.token_ids, whole, prompt.priority)
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
            room=prompt.bootstrap_room,
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
        if self.staging is not None:
            self.staging.open(key, peer.instance, reservation.prefix_tokens, prompt.tokens, reservation.prompt)
        self._outbox.append(SendToPeer(peer.instance, message, tuple(arrays)))
        if opened is not None:
            self._outbox.append(opened)

    def of_peer(self, instance: InstanceId) -> list[Prompt]:
        """Prompts that were sent to this prefill server and that it has not finished."""
        attempts = ((prompt, _attempt(prompt)) for prompt in self.prompts.values())
        return [prompt for prompt, attempt in attempts if attempt.instance == instance and attempt.done is None]

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

    def receive_staged(
        self, instance: InstanceId, message: StageRequest | StageArrived | StageStopped, now: float
    ) -> str | None:
        """A message about a part of a staged transfer. Returns the reason if the transfer has to fail."""
        if self.staging is None:
            return "this server has no staging ring"
        return self.staging.receive(instance, message, now)

    def done(self, prompt: Prompt, done: PrefillDone) -> bool:
        """Prefill has written everything; staged parts may not be in their pages yet. Returns False if it was known."""
        attempt = _attempt(prompt)
        if attempt.done is not None:
            return False
        attempt.done = done
        self._leave_prefill(attempt)
        return True

    def landed(self, prompt: Prompt) -> bool:
        """Whether all that prefill has written is in its pages."""
        return self.staging is None or not self.staging.misses(_attempt(prompt).key)

    def missing(self, prompt: Prompt, done: PrefillDone) -> str | None:
        """What is missing in a transfer that prefill reports as done, or None."""
        attempt = _attempt(prompt)
        arrived = attempt.prefix_tokens  # without a gap, from the start
        for chunk in sorted(attempt.chunks, key=lambda chunk: chunk.token_start):
            if chunk.token_start > arrived:
                break
            arrived = max(arrived, chunk.token_end)
        if arrived != prompt.tokens:
            return f"prefill reported the end after {arrived} of {prompt.tokens} prompt tokens"
        if len(done.first_tokens) < prompt.samples:
            return f"prefill sent {len(done.first_tokens)} first tokens for {prompt.samples} samples"
        return None

    def count(self, prompt: Prompt, done: PrefillDone, now: float) -> None:
        """Count and measure a transfer that has arrived."""
        attempt, counters = _attempt(prompt), self._counters
        counters["transfers"] += 1
        counters["transfer_bytes"] += done.bytes_written
        counters[f"path_bytes_{self.path(attempt)}"] += done.bytes_written
        counters["transfer_writes"] += done.writes
        if attempt.expected_cached is not None:
            counters["dispatch_tokens_reused"] += done.cached_tokens
        self._rates.prefilled_tokens.measured(done.prompt_tokens - done.cached_tokens, done.compute_s)
        self._rates.transfers.ended(now - attempt.sent_at - done.queue_s - done.compute_s, now)

    def path(self, attempt: Attempt) -> KvPath:
        """Where prefill writes the rows."""
        return "device" if attempt.hot_pages or self._memory.hot is None else "host"

    def give_up(self, prompt: Prompt, reason: str, *, abort: bool) -> None:
        """Quarantine the pages of an attempt. With `abort`, tell its writer to stop."""
        attempt = _attempt(prompt)
        prompt.last_problem = reason
        attempt.given_up = True
        if abort:
            self._outbox.append(SendToPeer(attempt.instance, Abort(attempt.key, reason)))
        self._memory.quarantine(prompt)

    def writer_stopped(self, key: TransferKey, *, late_writes: bool, now: float) -> None:
        """The writer of a transfer issues no more writes, neither into its pages nor into the staging rings."""
        self._memory.holds.writer_stopped(key, late_writes=late_writes, now=now)
        if self.staging is not None:
            self.staging.writer_stopped(key, late_writes=late_writes, now=now)

    def leave(self, prompt: Prompt) -> None:
        """Remove a transfer that is done or given up. No further part of it is scattered."""
        attempt = _attempt(prompt)
        if self.staging is not None:
            self.staging.close(attempt.key)
        del self.prompts[attempt.key]
        if attempt.progress is not None:
            self.prefixes.end(attempt.progress)
        if attempt.done is None:
            self._leave_prefill(attempt)

    def withdraw(self, prompt: Prompt, reason: str, now: float) -> None:
        """No request needs this prompt any more: stop its writer."""
        attempt = _attempt(prompt)
        if prompt.grant is not None:  # not in quarantine yet
            self.give_up(prompt, reason, abort=attempt.done is None)
            if attempt.done is not None:
                self.writer_stopped(attempt.key, late_writes=False, now=now)
        self.leave(prompt)

    def gauges(self) -> dict[str, float]:
        """Occupancy of the staging rings, for the metrics."""
        names = ("staging_ring_bytes", "staging_ring_bytes_granted", "staging_parts_waiting")
        return self.staging.gauges() if self.staging is not None else dict.fromkeys(names, 0)

    def peer_closed(self, instance: InstanceId, now: float) -> None:
        """The connection to a prefill server is closed."""
        self._memory.holds.writer_closed(instance, now)
        if self.staging is not None:
            self.staging.peer_closed(instance, now)

    def resumed(self, absent_s: float, now: float) -> None:
        """This process did not run for `absent_s`: that time does not count as quarantine."""
        self._memory.holds.resumed(absent_s, now)
        if self.staging is not None:
            self.staging.resumed(absent_s, now)

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
            free_pages=hot.allocator.available,
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
