"""Request and prompt on a decode server: a request is one sequence; a prompt is shared by one or more requests.

Each sample of a prompt (n > 1) is a request with its own response. There is one prefill and one transfer for all of
them: the `Prompt` goes through the queue and to prefill, and its members have the same state until the KV has arrived.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from ....common.sampling import LogprobParams, SamplingParams, TokenLogprob
from ....memory.index_spaces import HotPage, KvPage, RequestSlot
from ....memory.page_hashes import unpack_hashes
from ....memory.pages import PageGrant
from ....memory.prefix_cache import InsertedPrefix
from ....transfer.protocol.messages import ChunkArrived, InstanceId, PrefillDone, TransferKey
from ...chunking.shared_prefix import AwaitedPrefix, PrefixInProgress
from ...messages.frontend import FinishReason, Submit
from ...messages.lifecycle import DECODE_TRANSITIONS, Lifecycle, State
from ...messages.step import Draw
from ...store.kv_store import BlockChain

_IN_PREFILL = (State.PREFILLING, State.VERIFYING, State.LOADING, State.COMPUTING)
_BEFORE_ARRIVAL = (State.COMPILING, State.QUEUED, *_IN_PREFILL)
_RETRACTED = (State.SAVING, State.SAVED, State.RESTORING)


class PromptKind(NamedTuple):
    """What a dispatch window depends on: the priority and the size of a prompt, which has less than 2 ** `bits` tokens
    to compute.
    """

    priority: int
    bits: int


@dataclasses.dataclass(slots=True, eq=False)
class Attempt:
    """One dispatch of a prompt to a prefill server. The server does not send the KV of tokens [0, prefix_tokens): it
    was in the prefix cache of decode, or it is behind the sliding window of the first decode step.
    """

    key: TransferKey
    instance: InstanceId
    prefix_tokens: int
    kind: PromptKind
    sent_at: float
    tokens_left: int
    """Tokens that prefill has to compute and whose KV has not arrived; they count in its dispatch window."""
    expected_s: float = 0.0
    """When it was sent: the expected time until its KV is here; 0 if nothing was known."""
    done: PrefillDone | None = None
    """Prefill has written everything and is not needed any more. Decode ranks may still scatter or verify the KV, or
    copy the cached prefix into the hot buffer.
    """
    verified: bool = False
    """All ranks have compared the KV with what was sent (`verify_kv`)."""
    begun: bool = False
    """Prefill computes it, or has computed part of it."""
    chunks: list[ChunkArrived] = dataclasses.field(default_factory=list)
    hot_pages: tuple[HotPage, ...] = ()
    """Pages of the hot buffer that prefill writes the rows to (HiSparse); empty if they go to the prompt's KV pages."""
    expected_cached: int | None = None
    """Tokens that were expected in the cache of the prefill server; None if nothing was known about it."""
    progress: PrefixInProgress | None = None
    """Lets other prompts find out that prefill is computing a prefix that they share."""
    given_up: bool = False
    unseen_tokens: int = 0
    """How many of the `prefix_tokens` were not in the prefix cache: they are behind the sliding window."""


class LocalPrompt:
    """A prompt that this server computes itself, in chunks. Tokens [0, cached) were in the prefix cache."""

    def __init__(self, prompt: "Prompt", pages: list[KvPage], cached: int, now: float) -> None:
        self.prompt = prompt
        self.pages = pages
        self.cached = self.scheduled = self.computed = cached
        """Tokens [0, scheduled) are computed or in a step in flight, tokens [0, computed) are computed."""
        self.started_at = now
        self.kind = prompt.kind()
        self.compute_s = 0.0
        """Time of the steps that it was in."""
        self.input_logprobs: list[TokenLogprob] = []
        self.hot_slot: RequestSlot | None = None
        """The slot of its hot buffer (HiSparse)."""
        self.stored = 0
        """How many of the `cached` tokens came from the KV store: the last ones."""
        self.progress: PrefixInProgress | None = None
        """While it is in the queue: lets other prompts wait for a prefix that they share."""

    @property
    def priority(self) -> int:
        return self.prompt.priority

    @property
    def arrived_at(self) -> float:
        return self.prompt.arrived_at

    @property
    def slo_ttft_s(self) -> float | None:
        return self.prompt.slo_ttft_s

    @property
    def prompt_tokens(self) -> int:
        return self.prompt.tokens

    @property
    def left(self) -> int:
        """Tokens that are not computed."""
        return self.prompt_tokens - self.computed

    @property
    def begun(self) -> bool:
        """Part of it is computed or in a step in flight."""
        return self.scheduled > self.cached


class Refusal(NamedTuple):
    """A failed reservation: `pages` pages for `samples` samples were not free when `PageAllocator.chances` had this
    value. Until `samples` or `chances` changes, or so many pages are free, another try would fail too.
    """

    pages: int
    samples: int
    chances: int


class Prompt:
    """The tokens to prefill for its members, and the attempts to prefill them. Owned by the scheduler."""

    def __init__(
        self,
        prompt_id: int,
        token_ids: tuple[int, ...],
        *,
        endpoint: str | None = None,
        bootstrap_room: int | None = None,
        priority: int = 0,
        slo_ttft_s: float | None = None,
        output_tokens: int = 0,
        page_hashes: Mapping[int, Sequence[int]] | None = None,
        now: float,
    ) -> None:
        self.prompt_id = prompt_id
        self.token_ids = token_ids
        self.page_hashes = page_hashes or {}
        """Short hashes of its pages (memory/page_hashes.py), by page size; of its first pages at least."""
        self.cached_at: dict[InstanceId, tuple[int, int]] = {}
        """By prefill server: the version of its `PeerCache`, and the tokens of this prompt that it had cached then."""
        self.endpoint = endpoint
        self.bootstrap_room = bootstrap_room
        self.priority = priority
        self.slo_ttft_s = slo_ttft_s
        """The request's own limit on the time to its first token."""
        self.arrived_at = self.waits_since = now
        """Since when it waits for any server to begin it; `queue_timeout_s` counts from here."""
        self.moved_at = -math.inf
        """When another data-parallel rank gave it to this one, which may not be paired with its prefill server yet."""
        self.output_tokens = output_tokens
        """How many of the `token_ids`, the last ones, are output of a retracted request whose KV is computed again."""
        self.traceparent: str | None = None
        """The span of its first request, if it is traced."""
        self.members: list[Request] = []
        """One request per sample, in the order of their seeds."""
        self.grant: PageGrant[KvPage] | None = None
        """The pages of the prompt: the cached prefix, then those that prefill writes. Held until it is computed."""
        self.attempt: Attempt | None = None
        self.attempts = 0
        self.local: LocalPrompt | None = None
        """While this server computes it."""
        self.cached_estimate: tuple[float, int] | None = None
        """The time of the last lookup in the prefix cache and the KV store, and how many tokens were found."""
        self.stored_estimate = 0
        """The part of `cached_estimate` that the KV store is expected to have."""
        self.chain: BlockChain | None = None
        """Its blocks in the KV store, if it was compared with the store."""
        self.load_failed = False
        """The store did not have what was expected, and the prompt was queued again."""
        self.awaited: AwaitedPrefix | None = None
        """The prefix that another prompt computes on this server, while this one waits for it."""
        self.computed_here = False
        """Only this server computes it: the first token of a prefill server may not match its grammar, or was late."""
        self.refusal: Refusal | None = None
        """The last reservation, if it has failed."""
        self.times_refused = 0
        """Attempts that a prefill server refused."""
        self.refused_since: float | None = None
        """When a prefill server first refused it for another reason than a full queue (such as a shutdown), since the
        last attempt that began.
        """
        self.busy_s_when_queued = 0.0
        """`QueuePace.busy_s` when it was queued."""
        self.last_problem: str | None = None
        """Why the previous attempt ended; part of the error if there is no further attempt."""
        self.inserted = InsertedPrefix()
        """Its pages in the prefix cache."""

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def most_cached(self) -> int:
        """Most tokens that may come from the cache if this server computes it. The last one is always computed, because
        its logits give the first output token. A log-probability of a prompt token needs the logits before it.
        """
        logprobs = self.waiting[0].logprobs
        if logprobs is not None and logprobs.start is not None and not self.output_tokens:
            return min(self.tokens - 1, max(0, logprobs.start - 1))
        return self.tokens - 1

    def kind(self, cached: int = 0) -> PromptKind:
        """For the dispatch window of a server that has `cached` tokens of it."""
        return PromptKind(self.priority, (len(self.token_ids) - cached).bit_length())

    @property
    def first_sampling(self) -> SamplingParams:
        """Sampling parameters of its first sample; sample i has seed + i."""
        first = self.waiting[0]
        return msgspec.structs.replace(first.sampling, seed=first.sampling.seed - first.sample)

    @property
    def has_json(self) -> bool:
        """Whether its samples may be JSON by a grammar."""
        grammar = self.waiting[0].sampling.grammar
        return grammar is not None and grammar.kind in ("json_schema", "structural_tag")

    @property
    def samples(self) -> int:
        """How many first tokens have to be sampled. First tokens are matched to samples by index, so ended samples
        before the last waiting one are included.
        """
        return 1 + max(request.sample for request in self.waiting)

    def raise_priority(self, priority: int) -> None:
        """Raise the priority of the prompt and its members (ageing). Call while none of them is in a queue."""
        self.priority = priority
        for request in self.members:
            request.priority = priority

    @property
    def waiting(self) -> "list[Request]":
        """The members that still wait for this prompt's KV. All have the same state."""
        return [request for request in self.members if request.prompt is self and request.state in _BEFORE_ARRIVAL]


class Request(Lifecycle[State]):
    """One sequence. `grant` is set while it has pages: from PREFILLING, LOADING or COMPUTING on, until it is SAVING."""

    def __init__(
        self,
        rid: str,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        deadline: float,
        now: float,
        sample: int = 0,
        logprobs: LogprobParams | None = None,
        slo_itl_s: float | None = None,
    ) -> None:
        first = State.QUEUED if sampling.grammar is None else State.COMPILING
        super().__init__(DECODE_TRANSITIONS, first, now)
        self.rid = rid
        self.sample = sample
        """Its index among the samples of its prompt."""
        self.prompt = prompt
        self.priority = prompt.priority
        self.prompt_ids = prompt.token_ids
        self.sampling = sampling
        self.counts_tokens = sampling.counts_tokens  # once: it is asked of all running requests before every step
        self.sampling_without_grammar = (
            sampling if sampling.grammar is None else msgspec.structs.replace(sampling, grammar=None)
        )
        self.logprobs = logprobs
        self.slo_ttft_s = prompt.slo_ttft_s
        self.slo_itl_s = slo_itl_s
        """Its own limit on the time between its tokens."""
        self.deadline = deadline
        self.grant: PageGrant[KvPage] | None = None
        self.done: PrefillDone | None = None
        self.kv_path = ""
        """How its KV got here: "local", or the path of its transfer ("device", "host"); empty before that."""
        self.host_tokens = 0
        """Tokens of its prompt whose KV was cached in host memory (HiSparse, if this server computed the prompt)."""
        self.output_ids: list[int] = []
        self.token_at: float | None = None
        """When its newest token was sent."""
        self.had_late_gap = False
        self.prefill_wait_s = 0.0
        """The part of its time in the queue during which prefill servers were busy."""
        self.in_flight = 0
        """Steps in flight: output tokens that are not known here yet."""
        self.joined = False
        """It has joined the batch, and the rank that samples does not know its grammar yet."""
        self.grammar_state: int | None = None
        """The number of its grammar's state on that rank, since it joined the batch."""
        self.slow_masks = False
        """Its masks are computed beside the steps (rooms/batch.py)."""
        self.masked_output = -1
        """The index of the latest output token whose mask was computed so."""
        self.last_step = 0
        """The `command_id` of its latest step."""
        self.hot_slot: RequestSlot | None = None
        """The slot of its hot buffer (HiSparse)."""
        self.saved_pages = 0
        """Pages of its KV in host memory, while it is SAVING or SAVED."""
        self._inserted: tuple[PageGrant[KvPage] | None, InsertedPrefix] = (None, InsertedPrefix())
        self._before_first_arrival: tuple[float, float, float] | None = None
        """When its KV arrived for the first time: the seconds in COMPILING and QUEUED, the seconds in the
        states of prefill, and `prefill_wait_s` up to then.
        """

    @property
    def pages(self) -> list[KvPage]:
        """The pages of its KV; it has to have some."""
        assert self.grant is not None, f"{self.rid} is {self.state.name} without pages"
        return self.grant.pages

    @property
    def inserted(self) -> InsertedPrefix:
        """The part of its pages in the prefix cache."""
        if self._inserted[0] is not self.grant:
            self._inserted = (self.grant, InsertedPrefix())
        return self._inserted[1]

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def most_kv_tokens(self) -> int:
        """The most KV rows that it can need. The last token is sampled, but not fed back."""
        return self.prompt_tokens + self.sampling.max_new_tokens - 1

    @property
    def kv_tokens(self) -> int:
        """KV rows that exist: one per token, except for the newest token, which the next step feeds."""
        return len(self.prompt_ids) + (len(self.output_ids) - 1 if self.output_ids else 0)

    @property
    def waits_for_prefill(self) -> bool:
        """No server has begun its prompt: it is in our queue, or behind others on prefill or here."""
        match self.state:
            case State.PREFILLING:
                return self.prompt.attempt is None or not self.prompt.attempt.begun
            case State.VERIFYING:
                return False
            case State.LOADING | State.COMPUTING:
                return self.prompt.local is not None and not self.prompt.local.begun
            case state:
                return state in _BEFORE_ARRIVAL

    def draw(self, output_index: int, *, joined: bool) -> Draw:
        """The token of its next row. Output ids, and the text of a grammar, would be most of the message. So ids are
        sent only for penalties, and a grammar (with the output so far) only once since it joined the batch.
        """
        sampling = self.sampling if joined else self.sampling_without_grammar
        output = tuple(self.output_ids) if self.counts_tokens or sampling.grammar is not None else ()
        return Draw(sampling, output_index, output, self.grammar_state)

    @property
    def may_step(self) -> bool:
        """Whether the tokens in flight leave it below its `max_new_tokens`."""
        return len(self.output_ids) + self.in_flight < self.sampling.max_new_tokens

    def recompute(self, prompt_id: int, now: float) -> None:
        """Its KV was dropped: it needs a prompt again, of which its output so far is a part."""
        old = self.prompt
        self.prompt = Prompt(
            prompt_id,
            (*self.prompt_ids, *self.output_ids),
            endpoint=old.endpoint,
            priority=self.priority,
            output_tokens=len(self.output_ids),
            page_hashes=old.page_hashes,
            now=now,
        )
        self.prompt.traceparent = old.traceparent
        self.prompt.members.append(self)

    def received(self, done: PrefillDone, now: float) -> None:
        """Its KV has arrived: for the first time or, after a retraction, computed again."""
        if self.done is None:
            self.done = done
            self._before_first_arrival = self._spent_before_arrival(now)

    def _spent_before_arrival(self, now: float) -> tuple[float, float, float]:
        queued = self.spent(State.COMPILING, State.QUEUED, now=now)
        return queued, self.spent(*_IN_PREFILL, now=now), self.prefill_wait_s

    def finish_reason(self, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Why the newest output token ends the request; None if it does not."""
        token, sampling = self.output_ids[-1], self.sampling
        if token in sampling.stop_token_ids:
            return FinishReason("stop", matched=token)
        if token in eos_token_ids and (not sampling.ignore_eos or sampling.grammar is not None):
            return FinishReason("stop", matched=token)
        if len(self.output_ids) >= sampling.max_new_tokens:
            return FinishReason("length", length=sampling.max_new_tokens)
        return None

    def timeline(self, now: float) -> dict[str, float]:
        """Seconds by stage, in order; they add up to the time since arrival.

        `queue` is the wait for its grammar and for memory of this server. `prefill_queue` is the wait behind other
        prompts, in our queue and on prefill. `control` is the part of the prefill round trip that prefill does not
        report itself: messages, polling, and failed attempts. `retracted` is the time without KV, until it was copied
        back or computed again.
        """
        total = self._spent_before_arrival(now)
        queued, prefilling, waited = self._before_first_arrival or total
        remote = (self.done.queue_s, self.done.compute_s, self.done.transfer_tail_s) if self.done else (0.0, 0.0, 0.0)
        return {
            "queue": max(0.0, queued - waited),
            "prefill_queue": min(queued, waited) + remote[0],
            "prefill": remote[1],
            "transfer": remote[2],
            "control": max(0.0, prefilling - sum(remote)),
            "admit": self.spent(State.ARRIVED, State.OPENING, State.READY, now=now),
            "retracted": self.spent(*_RETRACTED, now=now) + (total[0] - queued) + (total[1] - prefilling),
            "decode": self.spent(State.RUNNING, now=now),
        }


def requests_of(submit: Submit, prompt_id: int, longest_s: float, now: float) -> list[Request]:
    """A new prompt, and a request for each of its samples, which take `longest_s` at most."""
    prompt = Prompt(
        prompt_id,
        submit.prompt_ids,
        endpoint=submit.endpoint,
        bootstrap_room=submit.room,
        priority=submit.priority,
        slo_ttft_s=_seconds(submit.slo_ttft_ms),
        page_hashes={size: unpack_hashes(packed) for size, packed in submit.page_hashes.items()},
        now=now,
    )
    prompt.traceparent = submit.traceparent
    prompt.members += [
        Request(
            rid,
            prompt,
            msgspec.structs.replace(submit.sampling, seed=submit.sampling.seed + index),
            deadline=now + min(submit.timeout_s or math.inf, longest_s),
            now=now,
            sample=index,
            logprobs=submit.logprobs,
            slo_itl_s=_seconds(submit.slo_itl_ms),
        )
        for index, rid in enumerate((submit.rid, *submit.more_rids))
    ]
    return prompt.members


def _seconds(milliseconds: float | None) -> float | None:
    return milliseconds / 1000 if milliseconds is not None else None
