"""A request on a prefill server, and the steps that compute its prompt."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

from ...common.sampling import TokenLogprob
from ...memory.index_spaces import KvPage
from ...memory.pages import PageGrant
from ...memory.prefix_cache import InsertedPrefix
from ...transfer.protocol.messages import InstanceId, KvDestination, KvPath, PrefillDone, TransferKey
from ..chunking.chunk_queue import Chunk
from ..chunking.shared_prefix import AwaitedPrefix, PrefixInProgress
from ..messages.frontend import PromptSent
from ..messages.lifecycle import PREFILL_TRANSITIONS, Lifecycle, PrefillState
from ..store.kv_store import BlockChain

DEADLINE_GRACE_S = 2.0
"""The deadline on prefill is later than that on decode by this much. Normally decode aborts the request first; this is
for a decode server that does not.
"""

TransferRef = tuple[InstanceId, TransferKey]
"""Identifies a transfer: each decode instance numbers its keys on its own."""


class PageSpace(NamedTuple):
    """The page ids of a decode server, and the memory that it has announced."""

    num_pages: int
    page_size: int
    in_host_memory: bool = False
    """KV rows can be written to host memory (HiSparse)."""
    hot_pages: int = 0
    """Pages of its hot pool, on the GPU, that rows can be written to instead; 0 if it announced none."""

    def path(self, destination: KvDestination) -> KvPath:
        """Where the KV rows of this request go. Only a server that announced a hot pool has two places for them."""
        to_host = destination.enable_hisparse or not self.hot_pages
        return "host" if self.in_host_memory and to_host else "device"


class PrefillRequest:
    """One prompt whose KV goes to one decode server. Owned by the scheduler."""

    def __init__(
        self,
        instance: InstanceId,
        destination: KvDestination,
        token_ids: Sequence[int],
        indices: Sequence[int],
        now: float,
        hot_indices: Sequence[int] = (),
        *,
        traceparent: str | None = None,
        waited_s: float = 0.0,
        slo_ttft_s: float | None = None,
    ) -> None:
        self.instance = instance
        self.destination = destination
        self.token_ids = token_ids
        self.indices = indices
        self.hot_indices = hot_indices
        """Where its KV rows go, if that is the hot pool of a HiSparse server."""
        self.traceparent = traceparent
        """None unless it is traced."""
        self.slo_ttft_s = slo_ttft_s
        """The request's own limit on the time to its first token."""
        self.arrived_at = now - waited_s
        """On decode."""
        self.path: KvPath = "device"
        self.staged = False
        """A part of its KV goes through the staging rings of the decode server."""
        self.deadline = now + destination.timeout_s + DEADLINE_GRACE_S
        first = PrefillState.WAITING if destination.sampling.grammar is None else PrefillState.COMPILING
        self.lifecycle = Lifecycle(PREFILL_TRANSITIONS, first, now)
        self.grant: PageGrant[KvPage] | None = None
        self.cached = 0
        """Tokens [0, cached) were found in the prefix cache, or loaded from the KV store."""
        self.stored = 0
        """How many of the `cached` tokens came from the KV store: the last ones."""
        self.chain: BlockChain | None = None
        """Its blocks in the KV store, if there is one."""
        self.scheduled = 0
        """Tokens [0, scheduled) are computed or in a step in flight."""
        self.computed = 0
        """Tokens [0, computed) have their KV in our pages."""
        self.written = 0
        """The ranks already have the commands to write tokens [0, written): they got them before the step."""
        self.inserted = InsertedPrefix()
        """The part in the prefix cache."""
        self.progress: PrefixInProgress | None = None
        """While it is computed: lets other requests wait for a prefix that they share."""
        self.awaited: AwaitedPrefix | None = None
        """The prefix of another request that it waits for."""
        self.compute_s = 0.0
        """Compute time of the steps that it was in. The rest of its time before SENDING is reported as queue time."""
        self.computed_at = now
        """When the last of these steps ended."""
        self.begun_reported = False
        """Decode was informed that the first step has begun."""
        self.refused_at_chances: int | None = None
        """`PageAllocator.chances` when its last allocation failed. Until `chances` changes, it is not tried again,
        because the lookup of its prefix is slow.
        """
        self.unsent: list[int] = []
        """The `token_start` of each chunk in flight: the ranks have the command, and have not reported its end."""
        self.chunks = 0
        self.writes = 0
        self.bytes_written = 0
        self.late_writes = False
        self.first_tokens: tuple[TokenLogprob, ...] = ()
        self.input_logprobs: list[TokenLogprob] = []
        self.failure: str | None = None
        self.retryable = True
        self.too_complex = False
        """Its grammar has become too expensive."""
        self.aborted = False
        """Decode sent Abort: it gets an AbortAck instead of a TransferFailed."""

    @classmethod
    def received(
        cls, instance: InstanceId, destination: KvDestination, arrays: Sequence[Sequence[int]], now: float
    ) -> "PrefillRequest":
        """From a message and its arrays. Older peers send fewer arrays, newer ones may send more."""
        token_ids, indices, hot_indices, trace, deadline, *_ = (*arrays, (), b"", ())
        waited_ms, slo_ttft_ms, *_ = (*deadline, 0, 0)
        return cls(
            instance,
            destination,
            token_ids,
            indices,
            now,
            hot_indices,
            traceparent=bytes(trace).rstrip(b"\0").decode(errors="replace") or None,
            waited_s=waited_ms / 1000,
            slo_ttft_s=slo_ttft_ms / 1000 or None,
        )

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
    def state(self) -> PrefillState:
        return self.lifecycle.state

    @property
    def granted(self) -> PageGrant[KvPage]:
        """Its grant; it has to have one."""
        assert self.grant is not None, f"{self.ref} is {self.state.name} without pages"
        return self.grant

    @property
    def awaits_prefix(self) -> bool:
        """Another request computes its prefix."""
        return self.awaited is not None and self.awaited.tokens_left > 0

    @property
    def sending(self) -> bool:
        """Chunks are in flight."""
        return bool(self.unsent)

    @property
    def prompt_tokens(self) -> int:
        return len(self.token_ids)

    @functools.cached_property
    def listed_ids(self) -> list[int]:
        """Its tokens for messages, which cannot have an array. Few requests need it: a million tokens take 0.05 s."""
        return list(self.token_ids)


def prompt_sent(request: PrefillRequest, done: PrefillDone, traceparent: str) -> PromptSent:
    """The report of a traced prompt for the frontend."""
    return PromptSent(
        request.destination.rid,
        traceparent,
        prompt_tokens=done.prompt_tokens,
        cached_tokens=done.cached_tokens,
        chunks=done.chunks,
        bytes_written=done.bytes_written,
        queue_s=done.queue_s,
        compute_s=done.compute_s,
        transfer_s=done.transfer_tail_s,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillStep:
    """A batch in flight. Steps end in the order in which they were started."""

    command_id: int
    chunks: list[Chunk[PrefillRequest]]
