"""What the decode scheduler works with: a request is one sequence; a prompt is what one or more of them share.

All samples of a prompt (n > 1) are requests of their own with their own answer, but there is one prefill and one
transfer for them: the `Prompt` goes through the queue and to prefill, its members follow in step until the KV is here.
"""

import dataclasses
from typing import NamedTuple

from ....configs.sampling import LogprobParams, SamplingParams
from ....memory.index_spaces import KvPage
from ....memory.pages import PageGrant
from ....transfer.protocol.messages import ChunkArrived, InstanceId, PrefillDone, TransferKey
from ...messages.frontend import FinishReason
from ...messages.lifecycle import REQUEST, Lifecycle, State
from .dispatch_window import PromptKind

_BEFORE_ARRIVAL = (State.QUEUED, State.RESERVED, State.PREFILLING)


@dataclasses.dataclass(slots=True)
class Attempt:
    """One try to have a prefill server fill a prompt's pages. Tokens [0, prefix_tokens) were here before."""

    key: TransferKey
    instance: InstanceId
    prefix_tokens: int
    kind: PromptKind
    tokens_left: int
    """Of those that prefill has to compute, which close its dispatch window."""
    written: bool = False
    """Prefill has said that it is done: it may go, what it wrote stays. Ranks may still scatter or compare it."""
    begun: bool = False
    """Prefill has computed something of it, or is about to."""
    chunks: list[ChunkArrived] = dataclasses.field(default_factory=list)

    def tokens_arrived(self) -> int:
        """Tokens that are here without a gap from the start."""
        end = self.prefix_tokens
        for chunk in sorted(self.chunks, key=lambda chunk: chunk.token_start):
            if chunk.token_start > end:
                break
            end = max(end, chunk.token_end)
        return end


class Refusal(NamedTuple):
    """There were not as many `pages` for so many `samples`, when `PageAllocator.chances` was this."""

    pages: int
    samples: int
    chances: int


class Prompt:
    """The tokens to prefill for its members, and the attempts to do so. Owned by the scheduler."""

    def __init__(
        self,
        prompt_id: int,
        token_ids: tuple[int, ...],
        *,
        endpoint: str | None = None,
        room: int | None = None,
        priority: int = 0,
        output_tokens: int = 0,
        now: float,
    ) -> None:
        self.prompt_id = prompt_id
        self.token_ids = token_ids
        self.endpoint = endpoint
        self.room = room
        self.priority = priority
        self.waits_since = now
        """Since when no prefill server has begun to compute it; after `queue_timeout_s` it has waited too long."""
        self.output_tokens = output_tokens
        """How many of `token_ids`, at the end, are output of a request whose KV has to be computed anew."""
        self.members: list[Request] = []
        """One request per sample, in the order of their seeds."""
        self.grant: PageGrant[KvPage] | None = None
        """The pages prefill writes to, behind those of the cached prefix; held for as long as it may write."""
        self.attempt: Attempt | None = None
        self.attempts = 0
        self.quarantined = 0
        """Grants of earlier attempts that a remote writer may still write."""
        self.refusal: Refusal | None = None
        """Of the last try to find memory for it."""
        self.times_refused = 0
        """Attempts that a prefill server did not begin."""
        self.refused_since: float | None = None
        """When one that shuts down has first refused it, since one was begun."""
        self.busy_mark = 0.0
        """How long prefill had been busy (queue_pace.py) when it was queued."""
        self.overtaken = 0
        """How many later ones were let in while this one waited for memory."""
        self.last_problem: str | None = None
        """Why the previous attempt ended; part of the error if there is no other."""

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    def raise_priority(self, priority: int) -> None:
        """It has waited for long, and so have its members. Call while none of them is in a line."""
        self.priority = priority
        for request in self.members:
            request.priority = priority

    @property
    def waiting(self) -> "list[Request]":
        """The members that still want this prompt's KV. They are in step: all QUEUED or all PREFILLING."""
        return [request for request in self.members if request.prompt is self and request.state in _BEFORE_ARRIVAL]


class Request:
    """One sequence. `grant` is set from RESERVED on, and while it has device memory."""

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
    ) -> None:
        self.rid = rid
        self.sample = sample
        """Its place among the samples of its prompt."""
        self.prompt = prompt
        self.priority = prompt.priority
        self.prompt_ids = prompt.token_ids
        self.sampling = sampling
        self.logprobs = logprobs
        self.deadline = deadline
        self.lifecycle = Lifecycle(REQUEST, State.QUEUED, now)
        self.grant: PageGrant[KvPage] | None = None
        self.done: PrefillDone | None = None
        self.output_ids: list[int] = []
        self.prefill_wait_s = 0.0
        """What of the time in the queue it has waited because prefill servers were busy."""
        self.in_flight = 0
        """Steps under way: tokens of its output that exist and are not known here yet."""
        self.last_step = 0
        """The order of its latest step."""
        self.saved_pages = 0
        """Pages of its KV that are in host memory while it is RETRACTED; 0 when they have to be computed anew."""

    @property
    def state(self) -> State:
        return self.lifecycle.state

    @property
    def pages(self) -> list[KvPage]:
        """Those of its KV, while it has memory."""
        assert self.grant is not None, f"{self.rid} is {self.state.name} without pages"
        return self.grant.pages

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def most_kv_tokens(self) -> int:
        """KV rows it can ever need: the last token is sampled and never fed back."""
        return self.prompt_tokens + self.sampling.max_new_tokens - 1

    @property
    def kv_tokens(self) -> int:
        """KV rows that exist: of every token but the newest, which the next step feeds."""
        return len(self.prompt_ids) + max(0, len(self.output_ids) - 1)

    @property
    def waits_for_prefill(self) -> bool:
        """Nothing of its prompt has been computed: it is in our queue, or behind others on prefill."""
        attempt = self.prompt.attempt
        begun = self.state is State.PREFILLING and attempt is not None and attempt.begun
        return self.state in _BEFORE_ARRIVAL and not begun

    @property
    def may_step(self) -> bool:
        """Whether another step can be of use: the tokens under way do not reach its `max_new_tokens`."""
        return len(self.output_ids) + self.in_flight < self.sampling.max_new_tokens

    def finish_reason(self, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Whether the newest output token ends the request, and why."""
        token = self.output_ids[-1]
        if token in self.sampling.stop_token_ids or (token in eos_token_ids and not self.sampling.ignore_eos):
            return FinishReason("stop", matched=token)
        if len(self.output_ids) >= self.sampling.max_new_tokens:
            return FinishReason("length", length=self.sampling.max_new_tokens)
        return None

    def timeline(self, now: float) -> dict[str, float]:
        """Seconds by stage, in order; they add up to the time since arrival.

        Time behind other prompts of prefill is `prefill_queue`, here and there; `queue` is for memory of this server.
        `control` is what the prefill round trip took beyond prefill's own account of it: messages, polling, and
        attempts that failed.
        """
        spent = {state: self.lifecycle.spent(state, now) for state in State}
        remote = (self.done.queue_s, self.done.compute_s, self.done.transfer_tail_s) if self.done else (0.0, 0.0, 0.0)
        prefilling = spent[State.RESERVED] + spent[State.PREFILLING]
        return {
            "queue": max(0.0, spent[State.QUEUED] - self.prefill_wait_s),
            "prefill_queue": min(spent[State.QUEUED], self.prefill_wait_s) + remote[0],
            "prefill": remote[1],
            "transfer": remote[2],
            "control": max(0.0, prefilling - sum(remote)),
            "admit": spent[State.ARRIVED] + spent[State.READY],
            "retracted": spent[State.RETRACTED],
            "decode": spent[State.RUNNING],
        }
