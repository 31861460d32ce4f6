"""Prompts on their way in: from the queue, with memory reserved, to a prefill server, until their KV has arrived.

Knows prompts, pages and peers. It ends no request: what becomes of one whose prompt did not make it is the scheduler's.
"""

import collections
import dataclasses
import itertools
from collections.abc import Sequence

import msgspec

from ....memory.index_spaces import KvPage
from ....memory.pages import PageAllocator
from ....memory.prefix_cache import PrefixCache
from ....transfer.protocol.messages import Abort, ChunkArrived, InstanceId, KvDestination, PrefillDone, TransferKey
from ...messages.effects import ConnectPeer, Effect, SendToPeer
from ...messages.lifecycle import State
from ..requests.dispatch_window import PromptKind
from ..requests.request import Attempt, Prompt, Request
from ..requests.reservation import Reservation, pages_needed, reserve
from .prefill_peers import PrefillPeer, PrefillPeers
from .prompt_queue import PromptQueue
from .quarantine import Quarantine
from .queue_pace import QueuePace
from .staging import RankRing, StagedArrivals

MAX_OVERTAKES = 16
"""How many smaller prompts may pass one that waits for memory; then memory is left to gather for it."""
MAX_MISFITS = 8
"""Prompts that do not fit before a turn stops looking for one that does."""


@dataclasses.dataclass(frozen=True)
class DecodeLimits:
    """The bounds a decode scheduler works within."""

    page_size: int
    max_running_requests: int
    max_queued_requests: int
    growth_tokens: int
    retract_pages: int
    queue_timeout_s: float
    prefill_wait_s: float
    prefill_timeout_s: float
    request_timeout_s: float
    quarantine_s: float
    verify_kv: bool = False
    prefix_cache: bool = True
    hisparse: bool = False
    stages: int = 1
    """Pipeline stages: so many batches are under way at once, of different requests."""
    overlap: bool = False
    """With one stage: the next step of a batch is given before the tokens of the last one are known."""


class PrefillDispatcher:
    """The queue, the prefill servers, the transfers under way and the fences around those that were given up."""

    def __init__(
        self,
        limits: DecodeLimits,
        pages: PageAllocator[KvPage],
        cache: PrefixCache,
        counters: "collections.Counter[str]",
        rings: Sequence[RankRing] = (),
    ) -> None:
        self.limits = limits
        self.counters = counters
        self.queue = PromptQueue()
        self.pace = QueuePace()
        self.peers = PrefillPeers()
        self.quarantine = Quarantine(limits.quarantine_s)
        self.prefilling: dict[TransferKey, Prompt] = {}
        self.effects: list[Effect] = []
        """What is to be sent; the scheduler takes it."""
        self.staging = StagedArrivals(rings, limits.page_size, limits.quarantine_s, counters, self.effects)
        self._pages = pages
        self._cache = cache
        self._prompt_ids = itertools.count(1)

    def new_prompt(
        self,
        token_ids: tuple[int, ...],
        *,
        endpoint: str | None = None,
        room: int | None = None,
        priority: int = 0,
        output_tokens: int = 0,
        now: float,
    ) -> Prompt:
        """A prompt that is not in the queue yet."""
        return Prompt(
            next(self._prompt_ids),
            token_ids,
            endpoint=endpoint,
            room=room,
            priority=priority,
            output_tokens=output_tokens,
            now=now,
        )

    def enqueue(self, prompt: Prompt, now: float, *, again: bool = False) -> None:
        """Have it wait for memory and for a prefill server; `again` if it was let in before."""
        prompt.busy_mark = self.pace.busy_s(prompt.endpoint, now)
        self.queue.push(prompt, again=again)

    def compute_anew(self, request: Request, now: float) -> None:
        """Queue a request whose KV is gone, before those that are new: what it has said is part of its prompt now."""
        old = request.prompt
        request.prompt = self.new_prompt(
            (*request.prompt_ids, *request.output_ids),
            endpoint=old.endpoint,
            priority=request.priority,
            output_tokens=len(request.output_ids),
            now=now,
        )
        request.prompt.members.append(request)
        self.enqueue(request.prompt, now, again=True)
        if old.endpoint is not None:
            self.effects.append(ConnectPeer(old.endpoint))  # it may have been given up since

    def of_peer(self, instance: InstanceId) -> list[Prompt]:
        """Prompts that this prefill server has, and has not finished."""
        attempts = ((prompt, _attempt(prompt)) for prompt in self.prefilling.values())
        return [prompt for prompt, attempt in attempts if attempt.instance == instance and not attempt.written]

    def chunk_arrived(self, chunk: ChunkArrived) -> bool:
        """Note it; False when nobody waits for it."""
        prompt = self.prefilling.get(chunk.key)
        if prompt is None:
            return False
        attempt = _attempt(prompt)
        attempt.begun = True
        if chunk.token_start < chunk.token_end:
            attempt.chunks.append(chunk)
        tokens = min(attempt.tokens_left, chunk.token_end - chunk.token_start)
        window = self.peers.window(attempt.instance)
        if tokens and window is not None:
            attempt.tokens_left -= tokens
            window.computed(attempt.kind, tokens)
        return True

    def written(self, done: PrefillDone) -> bool:
        """Prefill has written everything. Whether all of it is in its pages: if not, staging returns `done` later."""
        prompt = self.prefilling.get(done.key)
        if prompt is not None and not (attempt := _attempt(prompt)).written:
            attempt.written = True
            self._leave_prefill(attempt)
        return not self.staging.hold(done)

    def check_complete(self, prompt: Prompt, done: PrefillDone) -> str | None:
        """What is missing although prefill says that it is done."""
        arrived = _attempt(prompt).tokens_arrived()
        if arrived != prompt.tokens:
            return f"prefill reported the end after {arrived} of {prompt.tokens} prompt tokens"
        samples = 1 + max(request.sample for request in prompt.waiting)
        if len(done.first_tokens) < samples:
            return f"prefill sent {len(done.first_tokens)} first tokens for {samples} samples"
        return None

    def expected_wait_s(self, now: float) -> float:
        """How long a prompt that comes now would be in the queue: nobody is for longer than `queue_timeout_s`."""
        return self.pace.wait_s(len(self.queue), now, most_s=self.limits.queue_timeout_s)

    def dispatch(self, now: float, *, above: int | None = None, keep: int = 0) -> list[int]:
        """Let prompts in, in order of the queue; only those of a priority `above` that of somebody who waits as well.
        Returns the priorities of those that were let in.

        One that does not fit may be passed by smaller ones, but not for ever; one whose prefill server is away holds up
        nobody.
        """
        blocked: list[Prompt] = []
        sent: list[int] = []
        busy: set[str | None] = set()

        def may_send(prompt: Prompt) -> bool:
            """Prefill servers that are there and take no prompt are busy."""
            if self.peers.choose(prompt, now) is not None:
                return True
            if self.peers.absent_since(prompt.endpoint) is None:
                busy.add(prompt.endpoint)
            return False

        for prompt in self.queue.in_order(may_send):
            if len(blocked) >= MAX_MISFITS or any(other.overtaken >= MAX_OVERTAKES for other in blocked):
                break
            if above is not None and prompt.priority <= above:
                break
            peer = self.peers.choose(prompt, now)
            assert peer is not None, f"prompt {prompt.prompt_id} has no prefill server"
            if keep and self._pages.available + self._pages.lent < keep + self._most_pages(prompt):
                break
            reservation = reserve(
                prompt,
                self._pages,
                self._cache,
                page_size=self.limits.page_size,
                growth_tokens=self.limits.growth_tokens,
            )
            if reservation is None:
                blocked.append(prompt)
                continue
            self.counters["overtakes"] += bool(blocked)
            for other in blocked:
                other.overtaken += 1
            self._send(prompt, reservation, peer, now)
            sent.append(prompt.priority)
        self.pace.note(len(self.queue), busy, now)
        return sent

    def _most_pages(self, prompt: Prompt) -> int:
        """What it is let in with, if none of it is cached."""
        samples, page_size = len(prompt.waiting), self.limits.page_size
        return pages_needed(prompt.tokens, samples, prompt.tokens + self.limits.growth_tokens, page_size)

    def _send(self, prompt: Prompt, reservation: Reservation, peer: PrefillPeer, now: float) -> None:
        self.queue.take(prompt)
        prompt.attempts += 1
        key = TransferKey(prompt.prompt_id, prompt.attempts)
        kind, tokens = PromptKind.of(prompt.priority, prompt.tokens), max(1, prompt.tokens - reservation.prefix_tokens)
        prompt.attempt = Attempt(key, peer.instance, reservation.prefix_tokens, kind, tokens)
        prompt.grant = reservation.prompt
        self.prefilling[key] = prompt
        peer.window.sent(kind, tokens)
        members = prompt.waiting
        busy_s = self.pace.busy_s(prompt.endpoint, now) - prompt.busy_mark
        for request, grant in zip(members, reservation.members, strict=True):
            request.grant = grant
            request.prefill_wait_s += busy_s
            request.lifecycle.advance(State.RESERVED, now)
            request.lifecycle.advance(State.PREFILLING, now)
        first = members[0]
        message = KvDestination(
            key=key,
            rid=first.rid,
            sampling=msgspec.structs.replace(first.sampling, seed=first.sampling.seed - first.sample),
            timeout_s=min(self.limits.prefill_timeout_s, max(request.deadline for request in members) - now),
            prefix_tokens=reservation.prefix_tokens,
            room=prompt.room,
            verify=self.limits.verify_kv,
            samples=1 + max(request.sample for request in members),
            output_tokens=prompt.output_tokens,
            logprobs=first.logprobs,
            priority=prompt.priority,
            enable_hisparse=self.limits.hisparse,
        )
        new_pages = reservation.prompt.pages[reservation.prefix_tokens // self.limits.page_size :]
        self.staging.open(key, peer.instance, reservation.prefix_tokens, prompt.tokens, new_pages)
        self.effects.append(SendToPeer(peer.instance, message, (prompt.token_ids, tuple(new_pages))))

    def give_up(self, prompt: Prompt, reason: str, *, tell: bool) -> None:
        """QuarantinedPages the pages of an attempt; `tell` its writer to stop unless it has."""
        attempt = _attempt(prompt)
        prompt.last_problem = reason
        if tell:
            self.effects.append(SendToPeer(attempt.instance, Abort(attempt.key, reason)))
        self.quarantine.put(prompt)

    def writer_stopped(self, key: TransferKey, *, late_writes: bool, now: float) -> None:
        """The writer of a transfer will issue nothing more, neither into its pages nor into the rings."""
        self.quarantine.writer_stopped(key, late_writes=late_writes, now=now)
        self.staging.writer_stopped(key, late_writes=late_writes, now=now)

    def leave(self, prompt: Prompt) -> None:
        """The transfer is over, done or given up: nothing more of it is scattered."""
        attempt = _attempt(prompt)
        self.staging.close(attempt.key)
        del self.prefilling[attempt.key]
        if not attempt.written:
            self._leave_prefill(attempt)

    def _leave_prefill(self, attempt: Attempt) -> None:
        """Prefill has nothing more to do for it. One that was lost has left its window behind."""
        window = self.peers.window(attempt.instance)
        if window is not None:
            window.returned(attempt.kind, attempt.tokens_left)
        attempt.tokens_left = 0

    def withdraw(self, prompt: Prompt, reason: str, now: float) -> None:
        """Nobody wants this prompt any more: out of the queue, or stop its writer."""
        if prompt in self.queue:
            self.queue.remove(prompt)
            return
        attempt = _attempt(prompt)
        if prompt.grant is not None:  # not fenced yet
            self.give_up(prompt, reason, tell=not attempt.written)
            if attempt.written:
                self.writer_stopped(attempt.key, late_writes=False, now=now)
        self.leave(prompt)


def _attempt(prompt: Prompt) -> Attempt:
    assert prompt.attempt is not None, f"prompt {prompt.prompt_id} has no attempt"
    return prompt.attempt
