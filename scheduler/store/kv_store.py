"""The KV store of a scheduler: which blocks are loaded for a prompt, and which cached pages are written. Pure.

Ranks do the work (`ranks/store.py`) and report. Whatever fails is computed instead: no request depends on the store.
"""

import collections
import dataclasses
import hashlib
import logging
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from ...common.arithmetic import round_up
from ...memory.index_spaces import KvPage
from ...memory.page_hashes import page_hashes
from ...memory.pages import PageAllocator, PageGrant, pages_for, pages_holding
from ...memory.prefix_cache import CachedPage, InsertedPrefix, PrefixCache
from ...transfer.store.blocks import BLOCK_TOKENS
from ..messages.counters import STORE_COUNTERS
from ..messages.effects import Outbox
from ..messages.ranks import StoreLoad, StoreLoaded, StorePing, StorePinged, StoreWrite, StoreWritten
from ..messages.reports import Reports, first_problem
from ..rates import Rate
from .breaker import Breaker
from .stored_blocks import StoredBlocks

log = logging.getLogger(__name__)

LEAST_TOKENS = 2 * BLOCK_TOKENS
"""Fewer tokens are not loaded but computed: a lookup in the store takes about as long."""
WRITE_BLOCKS = 64
"""Blocks of one StoreWrite. Its pages are held until it ends."""
MOST_SHARE = 8
"""A StoreWrite holds at most 1 / MOST_SHARE of the pages of the pool."""
MOST_QUEUED = 1 << 14
"""Most blocks that wait to be written. Beyond that, the oldest are dropped."""
HASHED_BLOCKS = 16
"""Blocks of a prompt that are hashed at a time, to find out how many the store is expected to have."""
MEASURE_AGAIN = 16
"""A store that is slower than the model is tried again after this many prompts."""

OwnerT = TypeVar("OwnerT")


def root_of(model_fingerprint: str) -> bytes:
    """The parent hash of first blocks: blocks of different models have nothing in common."""
    return hashlib.sha256(model_fingerprint.encode()).digest()


@dataclasses.dataclass(frozen=True)
class StoreLimits:
    """Settings of the store."""

    root: bytes
    """Parent hash of first blocks; depends on the model."""
    page_size: int
    ranks: int
    """Ranks that report every command."""
    timeout_s: float
    """Longest time that a prompt waits for a load."""
    lookup_timeout_s: float = 0.05
    """Longest time that a lookup in the store may take."""


class BlockChain:
    """The hashes of the full blocks of a sequence, and how many of its blocks were offered to the store."""

    def __init__(self, root: bytes) -> None:
        self.offered = 0
        self._hashes: list[bytes] = []
        self._root = root

    def blocks(self, tokens: Sequence[int], end: int) -> list[bytes]:
        """The hashes of the full blocks before token `end`. `tokens` may have grown since the last call."""
        known, count = len(self._hashes), end // BLOCK_TOKENS
        if count > known:
            more = tokens[known * BLOCK_TOKENS : count * BLOCK_TOKENS]
            self._hashes += page_hashes(more, BLOCK_TOKENS, self._hashes[-1] if known else self._root)
        return self._hashes[:count]

    def hashed(self, count: int) -> list[bytes]:
        """The first blocks, which were hashed before."""
        return self._hashes[:count]


@dataclasses.dataclass(slots=True)
class _Offer:
    """Blocks of a sequence to write, from block number `first` on, and the cached pages of the sequence."""

    chain: BlockChain
    blocks: list[bytes]
    first: int
    path: list[CachedPage]
    """All pages from the start of the sequence: whoever holds a page must hold the pages before it too, because
    eviction relies on that.
    """


@dataclasses.dataclass(slots=True)
class _Write:
    """A StoreWrite in progress: the first blocks of an offer."""

    command: StoreWrite
    grant: PageGrant[KvPage]
    offer: _Offer


@dataclasses.dataclass(slots=True, eq=False)
class _Load(Generic[OwnerT]):
    owner: OwnerT
    blocks: list[bytes]
    first_block: int
    end: int
    """Tokens from here on are computed in any case."""
    grant: PageGrant[KvPage]
    """Holds the pages of the load, and those before them, until all ranks are done, even if the owner releases them."""


class Loaded(NamedTuple, Generic[OwnerT]):
    """The result of a load: `tokens` tokens from the start of the sequence are in its pages, whole pages; 0 if nothing
    was loaded.
    """

    owner: OwnerT
    tokens: int


class KvStore(Generic[OwnerT]):
    """The loads and writes of one scheduler. `OwnerT` is what waits for a load."""

    def __init__(
        self,
        limits: StoreLimits,
        allocator: PageAllocator[KvPage],
        cache: PrefixCache,
        counters: "collections.Counter[str]",
        outbox: Outbox,
    ) -> None:
        self._limits = limits
        self._allocator = allocator
        self._cache = cache
        self._counters = counters
        self._outbox = outbox
        self.breaker = Breaker()
        self.stored = StoredBlocks(limits.page_size)
        self.loaded_tokens_rate = Rate()
        self._numbers = 0
        self._loads: dict[int, _Load[OwnerT]] = {}
        self._offers: collections.deque[_Offer] = collections.deque()
        self._queued = 0
        self._writing: _Write | None = None
        self._reports = Reports(limits.ranks)
        self._skipped = 0
        self._most_held = max(1, allocator.num_pages * limits.page_size // (MOST_SHARE * BLOCK_TOKENS))
        for name in STORE_COUNTERS:
            counters[name] += 0

    @property
    def busy(self) -> bool:
        """Pages are held for a write or a load."""
        return self._writing is not None or bool(self._loads)

    def new_chain(self) -> BlockChain:
        return BlockChain(self._limits.root)

    def gauges(self) -> dict[str, float]:
        writing = len(self._writing.command.blocks) if self._writing is not None else 0
        return {
            "kv_store_available": float(self.breaker.closed),
            "kv_store_loading_prompts": len(self._loads),
            "kv_store_queued_blocks": self._queued + writing,
        }

    def handle(self, report: StoreLoaded | StoreWritten | StorePinged, now: float) -> Loaded[OwnerT] | None:
        """Take the report of a rank. Returns the result of a load when all ranks have reported."""
        match report:
            case StoreLoaded():
                return self._loaded(report, now)
            case StoreWritten():
                self._written(report, now)
            case StorePinged():
                self._pinged(report, now)
        return None

    # -- loads -------------------------------------------------------------------------------------------------

    def load(
        self,
        owner: OwnerT,
        chain: BlockChain,
        tokens: Sequence[int],
        pages: Sequence[KvPage],
        *,
        cached: int,
        most: int,
        tokens_per_s: float | None,
        freed: int = 0,
    ) -> bool:
        """Start to load what the store has of tokens [cached, most) into `pages`; `handle` returns the result. The
        owner holds `pages`, except for the first `freed`. Returns False, without a load, if it is better to compute the
        tokens; `tokens_per_s` is how fast the model computes them, if that was measured.
        """
        page_size = self._limits.page_size
        end = self._end(tokens, most)
        if not self.breaker.closed or end - cached < LEAST_TOKENS or self._is_skipped(tokens_per_s):
            return False
        first = cached // BLOCK_TOKENS
        blocks = chain.blocks(tokens, round_up(end, BLOCK_TOKENS))[first:]
        last = first + len(blocks)
        loading, offset = pages_holding(pages, page_size, first * BLOCK_TOKENS, last * BLOCK_TOKENS)
        path = pages[freed : pages_for(last * BLOCK_TOKENS, page_size)]
        grant = self._allocator.grant("a load from the KV store", 0, shared=path)
        assert grant is not None, "the owner holds these pages"
        self._numbers += 1
        self._loads[self._numbers] = _Load(owner, blocks, first, end, grant)
        self._outbox.append(
            StoreLoad(
                self._numbers,
                tuple(blocks),
                tuple(map(KvPage, loading)),
                offset,
                skip=cached - first * BLOCK_TOKENS,
                timeout_s=self._limits.timeout_s,
                lookup_timeout_s=self._limits.lookup_timeout_s,
            )
        )
        self._counters["store_lookups"] += 1
        return True

    def _loaded(self, report: StoreLoaded, now: float) -> Loaded[OwnerT] | None:
        """A rank has ended a load. Returns the result when all ranks have: the blocks that every rank has loaded."""
        self._counters["store_corrupt_cells"] += report.corrupt
        self._counters["store_bytes_loaded"] += report.size_bytes
        self._counters["store_loads_late"] += report.late
        if report.problem is not None:
            self._failed(report.problem, now)
        if (reports := self._reports.add("load", report.number, report)) is None:
            return None
        load = self._loads.pop(report.number)
        self._allocator.release(load.grant)
        blocks = min(part.blocks for part in reports)
        if first_problem(reports) is None:
            self.stored.found(load.blocks[:blocks])
            if any(part.blocks == blocks and not part.late for part in reports):
                self.stored.lost(load.blocks[blocks:])
        if blocks:
            self.loaded_tokens_rate.measured(blocks * BLOCK_TOKENS, max(part.seconds for part in reports))
        tokens = min((load.first_block + blocks) * BLOCK_TOKENS, load.end) if blocks else 0
        return Loaded(load.owner, tokens // self._limits.page_size * self._limits.page_size)

    def expected_tokens(
        self, chain: BlockChain, tokens: Sequence[int], *, cached: int, most: int, tokens_per_s: float | None
    ) -> int:
        """How many of the tokens [cached, most) a load would find, if the store still has all blocks that this server
        has written to it or found there. Hashes only a few blocks more than these.
        """
        page_size, end = self._limits.page_size, self._end(tokens, most)
        if not self.stored or not self.breaker.closed or end - cached < LEAST_TOKENS or self._is_slow(tokens_per_s):
            return 0
        found = cached // BLOCK_TOKENS
        while found * BLOCK_TOKENS < end:
            blocks = chain.blocks(tokens, min((found + HASHED_BLOCKS) * BLOCK_TOKENS, len(tokens)))[found:]
            count = next((index for index, block in enumerate(blocks) if block not in self.stored), len(blocks))
            found += count
            if count < HASHED_BLOCKS:
                break
        return max(0, min(found * BLOCK_TOKENS, end) // page_size * page_size - cached)

    def _end(self, tokens: Sequence[int], most: int) -> int:
        """The end of what may be loaded of the first `most` tokens: full pages in full blocks."""
        page_size = self._limits.page_size
        return min(most // page_size * page_size, len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS)

    def _is_slow(self, tokens_per_s: float | None) -> bool:
        """Whether the store is slower than the model."""
        rate = self.loaded_tokens_rate.per_s
        return rate is not None and tokens_per_s is not None and rate <= tokens_per_s

    def _is_skipped(self, tokens_per_s: float | None) -> bool:
        """Whether this prompt is computed because the store is slow. It is tried again from time to time."""
        if not self._is_slow(tokens_per_s):
            return False
        self._skipped = (self._skipped + 1) % MEASURE_AGAIN
        self._counters["store_skipped_as_slow"] += self._skipped != 0
        return self._skipped != 0

    # -- writes ------------------------------------------------------------------------------------------------

    def offer(self, chain: BlockChain, tokens: Sequence[int], inserted: InsertedPrefix) -> None:
        """Queue the full blocks of a sequence that were inserted in the prefix cache since the last call. Ranks write
        those that the store lacks.
        """
        blocks = chain.blocks(tokens, inserted.pages * self._limits.page_size)
        if not self.breaker.closed:
            return  # not lost: the next sequence with these blocks offers them again
        first = chain.offered
        if first >= len(blocks):
            return
        self._offers.append(_Offer(chain, blocks[first:], first, self._cache.path(inserted)))
        chain.offered = len(blocks)
        self._queued += len(blocks) - first
        while self._queued > MOST_QUEUED:
            self._drop(len(self._offers.popleft().blocks))

    def send_next(self, now: float) -> None:
        """Send the next write, or a ping, if it is time for one."""
        if self.breaker.take_ping(now):
            self._outbox.append(StorePing())
        while self._writing is None and self._offers:
            self._write(self._offers.popleft())

    def _write(self, offer: _Offer) -> None:
        """Write the first blocks of an offer, whose pages are still cached; the rest stays in the queue."""
        page_size = self._limits.page_size
        cached = 0
        while cached < len(offer.path) and self._cache.holds(offer.path[cached]):
            cached += 1
        able = max(0, min(len(offer.blocks), cached * page_size // BLOCK_TOKENS - offer.first))
        self._drop(len(offer.blocks) - able)
        count = min(able, WRITE_BLOCKS, self._most_held)
        if not count:
            return
        last = offer.first + count
        path = [cached.page for cached in offer.path[: pages_for(last * BLOCK_TOKENS, page_size)]]
        grant = self._allocator.grant("the KV store", 0, shared=path)
        if grant is None:
            self._drop(able)
            return
        self._queued -= count
        if able > count:
            self._offers.appendleft(_Offer(offer.chain, offer.blocks[count:able], last, offer.path))
        self._numbers += 1
        pages, offset = pages_holding(path, page_size, offer.first * BLOCK_TOKENS, last * BLOCK_TOKENS)
        command = StoreWrite(self._numbers, tuple(offer.blocks[:count]), tuple(map(KvPage, pages)), offset)
        self._writing = _Write(command, grant, offer)
        self._outbox.append(command)

    def _drop(self, blocks: int) -> None:
        """Count blocks that leave the queue without being written."""
        self._queued -= blocks
        self._counters["store_blocks_dropped"] += blocks

    def _written(self, report: StoreWritten, now: float) -> None:
        """A rank has ended a write. When all have, its pages are released."""
        write = self._writing
        assert write is not None, "a write ended that was not begun"
        command = write.command
        assert command.number == report.number, f"write {report.number} ended before write {command.number}"
        self._counters["store_blocks_written"] += report.blocks
        self._counters["store_bytes_written"] += report.size_bytes
        self._counters["store_blocks_refused"] += report.refused
        if report.problem is not None:
            self._failed(report.problem, now)
        if (reports := self._reports.add("write", report.number, report)) is None:
            return
        self._writing = None
        self._allocator.release(write.grant)
        if all(part.problem is None and not part.refused for part in reports):
            offer, last = write.offer, write.offer.first + len(command.blocks)
            self.stored.written(offer.chain.hashed(last), offer.first, offer.path)

    # -- availability ------------------------------------------------------------------------------------------

    def _pinged(self, report: StorePinged, now: float) -> None:
        """A rank has ended a ping."""
        pings = self._reports.add("ping", None, report)
        if pings is not None and self.breaker.pinged(first_problem(pings), now):
            log.info("the KV store is available")

    def _failed(self, problem: str, now: float) -> None:
        if self.breaker.failed(problem, now):
            self._counters["store_outages"] += 1
            log.warning("the KV store is not used: %s", problem)
            self._queued = 0
            self._offers.clear()
            self.stored.clear()
