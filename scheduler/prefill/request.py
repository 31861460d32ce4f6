"""What the prefill scheduler works with: a prompt on its way to a decode server, and the pieces it is computed in."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ...configs.sampling import SamplingParams, TokenLogprob
from ...memory.index_spaces import KvPage
from ...memory.pages import PageGrant
from ...transfer.protocol.messages import InstanceId, KvDestination, TransferKey
from ..messages.lifecycle import TRANSFER, Lifecycle, TransferState

DEADLINE_GRACE_S = 2.0
"""Decode ends a request at its deadline and says Abort; ours is for the case that it does not."""

TransferRef = tuple[InstanceId, TransferKey]
"""Keys are minted by each decode instance on its own."""


class PageSpace(NamedTuple):
    """Pages that decode names in its destinations."""

    num_pages: int
    page_size: int


class PrefillRequest:
    """One prompt on its way to one decode server. Mutable, owned by the scheduler."""

    def __init__(
        self,
        instance: InstanceId,
        destination: KvDestination,
        prompt: Sequence[int],
        indices: list[int],
        now: float,
    ) -> None:
        self.instance = instance
        self.destination = destination
        self.prompt = prompt
        self.indices = indices
        self.deadline = now + destination.timeout_s + DEADLINE_GRACE_S
        self.lifecycle = Lifecycle(TRANSFER, TransferState.WAITING, now)
        self.grant: PageGrant[KvPage] | None = None
        self.cached = 0
        """Tokens [0, cached) were found in the prefix cache."""
        self.given = 0
        """Tokens [0, given) are computed or in a step under way."""
        self.computed = 0
        """Tokens [0, computed) have their KV in our pages."""
        self.compute_s = 0.0
        """How long steps that it was in have computed; the rest of its time here it has waited."""
        self.computed_at = now
        """When the last of them has ended."""
        self.said_begun = False
        """Decode knows that the first one is under way."""
        self.no_room_at: int | None = None
        """`PageAllocator.chances` when there were not enough pages for it: looking for its prefix takes long."""
        self.sending = 0
        """Chunks handed to the sender that have not reported their end."""
        self.chunks = 0
        self.writes = 0
        self.bytes_written = 0
        self.late_writes = False
        self.first_tokens: tuple[TokenLogprob, ...] = ()
        self.input_logprobs: list[TokenLogprob] = []
        self.failure: str | None = None
        self.retryable = True
        self.aborted = False
        """Decode asked for the end: it is owed an AbortAck, not a TransferFailed."""

    @property
    def key(self) -> TransferKey:
        return self.destination.key

    @property
    def priority(self) -> int:
        return self.destination.priority

    @property
    def ref(self) -> TransferRef:
        return self.instance, self.key

    @property
    def state(self) -> TransferState:
        return self.lifecycle.state

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def left(self) -> int:
        """Tokens that are in no step yet."""
        return self.prompt_tokens - self.given


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillRow:
    """One slice of a prefill step: compute tokens [start, end) of this prompt; draw first tokens when `last`."""

    transfer: PrefillRequest
    start: int
    end: int
    pages: list[KvPage]
    last: bool

    def samplings(self) -> list[SamplingParams]:
        """How to draw each sample's first token; none before the prompt's end."""
        if not self.last:
            return []
        wanted = self.transfer.destination
        seed = wanted.sampling.seed
        return [msgspec.structs.replace(wanted.sampling, seed=seed + index) for index in range(wanted.samples)]


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillStep:
    """A batch that is under way. Steps end in the order in which they were given."""

    command_id: int
    rows: list[PrefillRow]
