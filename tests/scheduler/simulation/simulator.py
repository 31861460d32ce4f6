"""Simulates a decode server and prefill servers with the real schedulers, without torch, sockets or a clock.

The network is a pair of queues per server, a write is an entry in a list, and the ranks are a queue of commands that
run some time later. Memory is a dictionary from each row to the prefix whose KV it holds. With HiSparse, `memory` has
the index keys and the rows in host memory, and `hot_memory` is a second dictionary. `host` has the content of rows in
host memory that prefill wrote to hot memory instead. If free pages are lent, hot memory overlaps the index keys: a
write to one destroys the other.

The simulator verifies four invariants: every step finds the KV of all its tokens, cached pages are complete in host
memory, pages under a write that may still land are never free, and at the end every page is free and every request has
exactly one terminal message.
"""

import collections
import dataclasses
import itertools
from collections.abc import Sequence

import msgspec

from pdserve.common.sampling import Grammar, SamplingParams, TokenLogprob
from pdserve.configs.setting_types import LocalPrefillSetting
from pdserve.memory.hisparse.shared_pool import PoolOverlay
from pdserve.memory.index_spaces import KvPage
from pdserve.memory.pages import PageAllocator, PageGrant, pages_for
from pdserve.scheduler.chunking.chunk_queue import Chunk
from pdserve.scheduler.decode.memory.hot_buffers import HotLimits
from pdserve.scheduler.decode.placement.peers import PrefillPeer
from pdserve.scheduler.decode.requests.limits import DecodeLimits
from pdserve.scheduler.decode.requests.request import LocalPrompt, Request
from pdserve.scheduler.decode.rooms.batch import DecodeRow, DecodeStep
from pdserve.scheduler.decode.scheduler import DecodeScheduler
from pdserve.scheduler.engine.step_rows import decode_row
from pdserve.scheduler.messages.effects import ConnectPeer, Effect, SendToFrontend, SendToPeer
from pdserve.scheduler.messages.frontend import Cancel, Failed, Finished, Submit, Tokens
from pdserve.scheduler.messages.lifecycle import PrefillState, State
from pdserve.scheduler.messages.ranks import (
    CancelChunks,
    ChunkReport,
    CommandDone,
    CopyDone,
    CopyPage,
    DropGrammarState,
    DropPages,
    GrammarReady,
    HotCommand,
    KvVerified,
    LoadPages,
    MaskReady,
    OpenHot,
    PageCommand,
    PrepareGrammar,
    PrepareMask,
    ResizeHot,
    SavePages,
    StoreLoad,
    VerifyKv,
    WriteBackRows,
)
from pdserve.scheduler.messages.step import Draw, StepResult
from pdserve.scheduler.prefill.limits import PrefillLimits
from pdserve.scheduler.prefill.request import PageSpace, PrefillRequest, PrefillStep
from pdserve.scheduler.prefill.scheduler import PrefillScheduler
from pdserve.scheduler.store.kv_store import StoreLimits
from pdserve.transfer.control.events import MessageReceived, PeerClosed, PeerLost
from pdserve.transfer.data.chunks import ChunkWrite, ChunkWritten
from pdserve.transfer.protocol.messages import (
    Abort,
    AnyMessage,
    InstanceId,
    KvDestination,
    TransferKey,
)

DECODE = InstanceId("decode")
ENDPOINTS = ("a:1", "b:1")
EOS = 7
QUARANTINE_S = 6.0
SETTLED_AFTER = 1500
"""Turns after which every request has ended, in less time than any deadline."""
PAGES = 12
PAGE_SIZE = 4
PREFILL = PrefillLimits(page_size=2, chunk_size=4, max_queued_requests=3, context_length=64, vocab_size=100)
PREFILL_PAGES = 13
HOT_ROWS = 8
LENDING_PAGES = 32
KEY_BYTES, HOT_BYTES = 2, 3
"""Sizes of a page, for lending: a unit is three KV pages or two hot pages; the last two KV pages are in no unit."""
NO_UNITS = PoolOverlay(num_pages=1, kv_pages=2, hot_pages=1, covered=0)
"""A unit is larger than the pool: nothing can be lent."""

Row = tuple[int, int]
"""Page and offset in it, of decode's pool or of its hot pool."""
Prefix = tuple[int, ...]
"""KV of a token depends on all tokens before it, so a row is identified by its whole prefix."""
LOST: Prefix = (-1,)
"""Content of a row that was overwritten through the other pool."""


@dataclasses.dataclass
class Write:
    """A write of a chunk into decode's pages. Its bytes may land until it has ended and `lands_until` has passed."""

    chunk: ChunkWrite
    prompt: Prefix
    grant: PageGrant[KvPage]
    cancelled: bool = False
    lands_until: float | None = None


@dataclasses.dataclass
class Server:
    """One prefill server process and its connection."""

    endpoint: str
    instance: InstanceId
    scheduler: PrefillScheduler
    to_prefill: collections.deque[SendToPeer] = dataclasses.field(default_factory=collections.deque)
    to_decode: collections.deque[AnyMessage] = dataclasses.field(default_factory=collections.deque)
    writes: list[Write] = dataclasses.field(default_factory=list)
    steps: collections.deque[PrefillStep] = dataclasses.field(default_factory=collections.deque)
    step_pages: collections.deque[list[list[KvPage]]] = dataclasses.field(default_factory=collections.deque)
    """The pages of the chunks of each step, also of requests that end before it."""
    memory: dict[Row, Prefix] = dataclasses.field(default_factory=dict)
    hung: bool = False

    def row(self, pages: Sequence[int], position: int) -> Row:
        """Where the KV of a token is, if a sequence has these pages."""
        page_size = self.scheduler.limits.page_size
        return pages[position // page_size], position % page_size


class Simulator:
    """Every event that can happen is a method with plain integers. `which` selects a server or request, modulo their
    number.
    """

    def __init__(
        self,
        *,
        stages: int = 1,
        overlap: bool = False,
        hot_pages: int | None = None,
        lends: bool = False,
        prefix_cache: bool = True,
        retract_pages: int = 3,
        verifies: bool = False,
        local_prefill: LocalPrefillSetting = "never",
        writes_both: bool = False,
        window: int | None = None,
        prefill_window: int | None = None,
        slow_masks: bool = False,
        limits: DecodeLimits | None = None,
        pages: int | None = None,
        prefill: PrefillLimits = PREFILL,
        prefill_pages: int = PREFILL_PAGES,
        endpoints: Sequence[str] = ENDPOINTS,
        store: StoreLimits | None = None,
        hot: HotLimits | None = None,
    ) -> None:
        """`hot_pages`: pages of the hot pool (HiSparse), or `hot` for one of another shape. `lends`: free pages are
        lent to hot buffers. `verifies`: ranks verify the KV of a transfer before it counts as arrived. `local_prefill`:
        whether the decode server computes prompts. `writes_both`: prefill servers write rows to host memory or to the
        GPU. `window` and `prefill_window`: the sliding window of all layers, None for a server that does not free pages
        behind it. `slow_masks`: some requests have a grammar, and ranks find many of its masks slow.
        `store`: the decode server has a KV store (store_simulator.py). The others replace the small servers of random
        workloads.
        """
        self.writes_both = writes_both
        self.window = window
        self.now = 0.0
        self.pages = pages or (LENDING_PAGES if lends else PAGES)
        self.endpoints = endpoints
        self.prefill = dataclasses.replace(prefill, window=prefill_window)
        self.prefill_pages = prefill_pages
        overlay = PoolOverlay.of(self.pages, kv_page_bytes=KEY_BYTES, hot_page_bytes=HOT_BYTES) if lends else NO_UNITS
        self.names = itertools.count()
        limits = limits or DecodeLimits(
            page_size=PAGE_SIZE,
            max_running_requests=3,
            max_queued_requests=5,
            growth_tokens=4,
            retract_pages=retract_pages,
            queue_timeout_s=60,
            prefill_wait_s=3,
            prefill_timeout_s=40,
            request_timeout_s=200,
            quarantine_s=QUARANTINE_S,
            verify_kv=verifies,
            prefix_cache=prefix_cache,
            stages=stages,
            overlap=overlap,
            local_prefill=local_prefill,
            max_step_tokens=8,
            window=window,
        )
        if hot_pages is not None:
            hot = HotLimits(hot_pages, PAGE_SIZE, HOT_ROWS, slots=3, overlay=overlay)
        self.decode = DecodeScheduler(limits, PageAllocator[KvPage](self.pages), [EOS], hot, store_limits=store)
        self.lends = lends
        self.hot: dict[int, ResizeHot] = {}
        """Pages and capacity of each request slot, as on the ranks."""
        self.hot_memory: dict[Row, Prefix] = {}
        self.host: dict[Row, Prefix] = {}
        """Content of rows in host memory where it differs from `memory`, which then has only the index keys."""
        self.hot_seen: collections.Counter[str] = collections.Counter()
        """Counts of events of hot buffers."""
        self.servers: dict[InstanceId, Server] = {}
        self.late_writes_in_flight: list[Write] = []
        self.commands: collections.deque[DecodeStep | PageCommand | HotCommand | VerifyKv | StoreLoad] = (
            collections.deque()
        )
        """Commands that the ranks of the decode server have not run yet."""
        self.copies: collections.deque[SavePages | LoadPages | DropPages | OpenHot | WriteBackRows] = (
            collections.deque()
        )
        """Background copies in flight: each is made as a whole, at any time."""
        self.slow_masks = slow_masks
        self.masks: collections.deque[PrepareMask] = collections.deque()
        """Masks that the rank that samples has not computed yet."""
        self.grammar_states: dict[int, int] = {}
        """How long the output was at the last mask of each sequence, as on that rank."""
        self.dropped_states: set[int] = set()
        self.prepared: set[int] = set()
        """States whose mask was computed beside the steps and not used yet."""
        self.seen_chunks = 0
        """Chunks of prompts that the decode server has computed."""
        self.drawn: list[int] = []
        """Tokens of the last step."""
        self.failed = False
        """Whether the last step failed."""
        self.known: dict[str, Prefix] = {}
        """All tokens of a sequence, as on the ranks."""
        self.memory: dict[Row, Prefix] = {}
        self.saved: dict[str, list[dict[int, Prefix]]] = {}
        self.last_conversation: Prefix = ()
        self.submitted: set[str] = set()
        self.terminal: collections.Counter[str] = collections.Counter()
        self.failures: dict[str, Failed] = {}
        self.output: collections.Counter[str] = collections.Counter()
        for endpoint in endpoints:
            self.start(endpoint)

    # -- clients -----------------------------------------------------------------------------------------------

    def submit(self, length: int, family: int, new: int, samples: int, pinned: str | None, priority: int) -> None:
        """Prompts of families 0 and 1 share a prefix of up to 22 tokens; family 2 continues an earlier request."""
        rids = tuple(f"r{next(self.names)}" for _ in range(samples))
        self.submitted.update(rids)
        tokens = tuple(range(10 + 30 * family, 10 + 30 * family + length))
        if family == 2:
            tokens = (*self.last_conversation[:30], *range(90, 93))
        grammar = Grammar("regex", ".*") if self.slow_masks and family != 1 else None
        sampling = SamplingParams(max_new_tokens=new, grammar=grammar)
        self.take(Submit(rids[0], tokens, sampling, pinned, more_rids=rids[1:], priority=priority))

    def take(self, submit: Submit) -> None:
        """The decode server gets this prompt."""
        self.decode.handle(submit, self.now)
        self.act()

    def ask_for(self, tokens: Prefix, new: int) -> str:
        """Submit one request for this prompt."""
        rid = f"r{next(self.names)}"
        self.submitted.add(rid)
        self.decode.handle(Submit(rid, tokens, SamplingParams(max_new_tokens=new)), self.now)
        self.act()
        return rid

    def cancel(self, which: int, stopped: bool) -> None:
        if self.decode.requests:
            rid = sorted(self.decode.requests)[which % len(self.decode.requests)]
            self.decode.handle(Cancel(rid, stopped), self.now)
            self.act()

    def flush(self) -> None:
        self.decode.flush_cache()

    # -- turns of the servers ----------------------------------------------------------------------------------

    def decode_turn(self) -> None:
        hot = self.decode.memory.hot
        lending = hot.lending if hot is not None else None
        borrowed = lending.borrowed if lending is not None else 0
        evicting = [rid for rid in hot.owners if hot.of(rid).evicting] if hot is not None else []
        self.decode.advance(self.now)
        if hot is not None:
            self.hot_seen["reopened"] += any(rid in hot.owners and not hot.of(rid).evicting for rid in evicting)
        self.act()
        self.look_at_requests()
        while (step := self.decode.next_step(self.now)) is not None:
            self.act()  # pages of retracted requests are saved before the step
            self.commands.append(step)
        self.act()
        if lending is not None:
            self.hot_seen["lent"] += lending.borrowed > 0
            self.hot_seen["reclaimed"] += lending.borrowed < borrowed

    def look_at_requests(self) -> None:
        """Assert that no deadline has passed, and count what happens to requests."""
        requests = self.decode.requests.values()
        late = [request.rid for request in requests if self.decode._deadlines._next(request)[0] <= self.now]
        assert not late, f"the deadline of {late} has passed, but they are still open"
        self.hot_seen["lost hot buffer"] += any(lost_hot_buffer(request) for request in requests)
        self.hot_seen["waited"] += any(request.state is State.ARRIVED for request in requests)

    def rank_turn(self, eos: bool, *, fail: bool = False) -> None:
        """The ranks run their next command, and report; a step may fail."""
        if not self.commands:
            return
        match self.commands.popleft():
            case DecodeStep() as step if fail or (self.failed and any(row.token is None for row in step.rows)):
                self.failed = True  # a step that follows it fails too
                self.decode.step_failed(step.command_id, "injected", self.now)
            case DecodeStep() as step:
                self.failed = False
                self._compute(step, eos)
            case OpenHot() as opened:
                self._open_hot(opened)
            case ResizeHot() as resized:
                self._resize_hot(resized)
            case VerifyKv(key=key, chunks=chunks):
                self.decode.handle(KvVerified(0, key, len(chunks), None), self.now)
            case CopyPage(command_id=command_id, source=source, destination=destination, tokens=tokens):
                self._put_page(destination, self._page(source), tokens)
                self.hot_seen["copied within a page"] += tokens is not None
                self.decode.handle(CommandDone(0, command_id), self.now)
            case StoreLoad():
                raise AssertionError("a load without a KV store")
            case copy:
                self.copies.append(copy)
        self.act()

    def mask_turn(self) -> None:
        """The rank that samples computes a mask beside the steps, and reports."""
        if not self.masks:
            return
        command = self.masks.popleft()
        self._take_mask(command.draw)
        assert command.draw.grammar_state is not None
        self.prepared.add(command.draw.grammar_state)
        self.decode.handle(MaskReady(0, command.number, slow=command.number % 3 != 0), self.now)
        self.act()

    def _take_mask(self, draw: Draw) -> None:
        """Compute the mask of a draw, or take the one that was prepared."""
        state = draw.grammar_state
        assert state is not None
        if state in self.dropped_states:
            return  # its request has ended, or was retracted: this mask is not used
        if state in self.prepared:
            self.prepared.remove(state)
            assert self.grammar_states[state] == draw.output_index, "the mask of another token"
        elif draw.sampling.grammar is not None:
            assert len(draw.output_ids) == draw.output_index
        else:
            assert self.grammar_states[state] == draw.output_index - 1, "a token is missing"
        self.grammar_states[state] = draw.output_index

    def copy_turn(self) -> None:
        """The ranks make their next background copy, and report."""
        if not self.copies:
            return
        match self.copies.popleft():
            case SavePages(copy=number, rid=rid, pages=pages):
                self.saved[rid] = [self._page(page) for page in pages]
            case LoadPages(copy=number, rid=rid, pages=pages):
                for page, rows in zip(pages, self.saved.pop(rid), strict=False):
                    self._put_page(page, rows)
            case OpenHot(copy=number) as opened:
                self._load_hot(opened)
                assert number is not None
            case WriteBackRows(copy=number) as command:
                self._write_back(command)
            case DropPages(rid=rid):
                del self.saved[rid]
                return
        self.decode.handle(CopyDone(0, number, 0.0), self.now)
        self.act()

    def _open_hot(self, opened: OpenHot) -> None:
        """A background copy fills the buffer of a fully resident request; an evicting request fetches selected rows."""
        buffer = ResizeHot(opened.slot, opened.hot_pages, opened.capacity)
        self.hot[opened.slot] = buffer
        assert buffer.capacity >= HOT_ROWS
        assert len(opened.pages) * PAGE_SIZE >= opened.tokens
        resident = opened.tokens <= opened.capacity
        assert (resident and opened.tokens > 0) == (opened.copy is not None)
        self.hot_seen["opened fully resident" if resident else "opened evicting"] += 1
        if opened.copy is not None:
            self.copies.append(opened)
        if resident:
            return
        for position in range(min(opened.tokens, HOT_ROWS + 1)):
            self._write_hot(_hot_row(buffer, position), ())

    def _load_hot(self, opened: OpenHot) -> None:
        buffer = ResizeHot(opened.slot, opened.hot_pages, opened.capacity)
        for position in range(opened.tokens):
            source = opened.pages[position // PAGE_SIZE], position % PAGE_SIZE
            self._write_hot(_hot_row(buffer, position), self._in_host(source))

    def _write_back(self, command: WriteBackRows) -> None:
        """Rows that prefill wrote to a hot buffer are copied to host memory."""
        self.hot_seen["written back"] += 1
        for position in range(command.start // PAGE_SIZE * PAGE_SIZE, command.end):
            page, slot = position // PAGE_SIZE, position % PAGE_SIZE
            target = command.pages[page], slot
            self.host[target] = self.hot_memory[command.hot_pages[page], slot]
            if self.host[target] == self.memory.get(target):
                del self.host[target]

    def _in_host(self, row: Row) -> Prefix:
        return self.host.get(row, self.memory.get(row, ()))

    def _resize_hot(self, buffer: ResizeHot) -> None:
        """Rows do not move, so the pages that stay must be the first pages, in the same order."""
        before = self.hot[buffer.slot]
        self.hot[buffer.slot] = buffer
        assert buffer.capacity >= HOT_ROWS
        kept = min(len(before.hot_pages), len(buffer.hot_pages))
        assert buffer.hot_pages[:kept] == before.hot_pages[:kept], f"slot {buffer.slot} has other first pages"
        self.hot_seen["shrunk" if len(buffer.hot_pages) < len(before.hot_pages) else "grown"] += 1

    def _use_hot(self, row: DecodeRow, tokens: Prefix, *, alive: bool) -> None:
        """A step of one request: its buffer is large enough for the step, and its rows are those of its tokens."""
        assert row.hot_slot is not None
        buffer, count = self.hot[row.hot_slot], len(tokens)
        resident = count <= buffer.capacity
        if alive:
            rows = len(buffer.hot_pages) * PAGE_SIZE
            assert rows >= (count if resident else HOT_ROWS + 1), f"{row.request.rid} lacks hot rows"
            for position in range(count - 1 if resident else HOT_ROWS):
                found = self.hot_memory[_hot_row(buffer, position)]
                evicted = not resident and found == ()
                assert evicted or found == tokens[: position + 1], f"{row.request.rid} reads a wrong hot row {position}"
        if resident:
            self._write_hot(_hot_row(buffer, count - 1), tokens)
        else:
            self.hot_seen["evicting step"] += 1
            for slot in range(HOT_ROWS + 1):
                self._write_hot(_hot_row(buffer, slot), ())

    def _use_hot_chunk(self, chunk: Chunk[LocalPrompt], *, alive: bool) -> None:
        """A chunk: all rows before it are in the buffer of its prompt, and its own rows are written there."""
        local, tokens = chunk.owner, chunk.owner.prompt.token_ids
        assert local.hot_slot is not None
        buffer = self.hot[local.hot_slot]
        assert chunk.end <= min(buffer.capacity, len(buffer.hot_pages) * PAGE_SIZE), "a chunk lacks hot rows"
        if alive:
            for position in range(chunk.start):
                found = self.hot_memory[_hot_row(buffer, position)]
                assert found == tokens[: position + 1], f"a chunk reads a wrong hot row {position}"
        for position in range(chunk.start, chunk.end):
            self._write_hot(_hot_row(buffer, position), tokens[: position + 1])
        self.hot_seen["resident chunk"] += 1

    def _is_resident(self, row: DecodeRow) -> bool:
        assert row.hot_slot is not None
        return row.position + 1 <= self.hot[row.hot_slot].capacity

    def _write_hot(self, row: Row, prefix: Prefix) -> None:
        """Write a hot row. Index keys in the same memory are lost."""
        self.hot_memory[row] = prefix
        for page in self._keys_under(row[0]):
            self.memory.update({(page, slot): LOST for slot in range(PAGE_SIZE)})

    def _write(self, row: Row, prefix: Prefix) -> None:
        """Write a KV row. Hot rows in the same memory are lost."""
        self.memory[row] = prefix
        self.host.pop(row, None)
        if self.lends:
            first, end = _pages_over(row[0], KEY_BYTES, HOT_BYTES)
            self.hot_memory.update({(page, slot): LOST for page in range(first, end) for slot in range(PAGE_SIZE)})

    def _keys_under(self, hot_page: int) -> range:
        first, end = _pages_over(hot_page, HOT_BYTES, KEY_BYTES)
        return range(first, min(end, self.pages)) if self.lends else range(0)

    def _compute(self, step: DecodeStep, eos: bool) -> None:
        drawn: list[int] = []
        slots = [
            row.hot_slot for row in step.rows if row.hot_slot is not None and row.request.rid in self.decode.requests
        ]
        prompts = [chunk.owner for chunk in step.chunks if chunk.owner.prompt.local is chunk.owner]
        slots += [local.hot_slot for local in prompts if local.hot_slot is not None]
        hot = [page for slot in slots for page in self.hot[slot].hot_pages]
        assert len(hot) == len(set(hot)), "two requests of a step share a hot page"
        if self.decode.memory.hot is not None and step.chunks:
            assert all(self._is_resident(row) for row in step.rows), "a step with chunks fetches rows"
            self.hot_seen["mixed step" if step.rows else "step of chunks"] += 1
        for row in step.rows:
            rid = row.request.rid
            alive = rid in self.decode.requests  # the result of an ended request is ignored
            if row.token is None:
                assert row.follows is not None
                tokens = (*self.known[rid], self.drawn[row.follows])
            else:
                tokens = (*row.request.prompt_ids, *row.request.output_ids)
                assert row.token == tokens[-1]
            assert row.position == len(tokens) - 1
            assert row.output_index == len(tokens) - len(row.request.prompt_ids)
            for position in range(first_seen(row.position, self.window), row.position):
                kv_row = row.pages[position // PAGE_SIZE], position % PAGE_SIZE
                if alive:
                    assert self.memory[kv_row] == tokens[: position + 1], f"{rid} reads wrong KV at {position}"
                    assert kv_row not in self.host or self._is_resident(row), f"{rid} fetches a row not in host memory"
            if self.decode.memory.hot is not None:
                self._use_hot(row, tokens, alive=alive)
            if row.pages:
                self._write((row.pages[row.position // PAGE_SIZE], row.position % PAGE_SIZE), tokens)
            self.known[rid] = tokens
            drawn.append(EOS if eos else 50 + row.request.sample)  # samples of a prompt differ: their KV must not mix
            self.last_conversation = (*tokens, drawn[-1])
        results = [sampled(token) for token in drawn]
        for index, row in enumerate(step.rows):
            if row.request.sampling.grammar is not None:
                self._take_mask(decode_row(row).draws[0])
                slow = row.position % 3 == 0
                results[index] = msgspec.structs.replace(results[index], slow_mask=slow)
        for chunk in step.chunks:
            first_tokens = self._compute_chunk(chunk)
            drawn += first_tokens
            results.append(sampled(*first_tokens))
        self.drawn = drawn
        self.decode.step_done(step.command_id, results, self.now)

    def _compute_chunk(self, chunk: Chunk[LocalPrompt]) -> list[int]:
        """Compute a chunk of a prompt; returns the first tokens of all samples after the last one."""
        local, tokens = chunk.owner, chunk.owner.prompt.token_ids
        alive = local.prompt.local is local
        if self.decode.memory.hot is not None:
            self._use_hot_chunk(chunk, alive=alive)
        for position in range(first_seen(chunk.start, self.window), chunk.end):
            kv_row = local.pages[position // PAGE_SIZE], position % PAGE_SIZE
            if position >= chunk.start:
                self._write(kv_row, tokens[: position + 1])
            elif alive:
                assert self.memory[kv_row] == tokens[: position + 1], f"a prompt reads wrong KV at {position}"
        self.seen_chunks += 1
        return [50 + sample for sample in range(local.prompt.samples)] if chunk.last and alive else []

    def prefill_turn(self, which: int) -> None:
        if (server := self._pick(which)) is not None:
            self._turn(server)

    def end_write(self, which: int, ok: bool, late: bool) -> None:
        if (server := self._pick(which)) is not None and server.writes:
            self._end_write(server, ok, late)

    def deliver(self, which: int, up: bool) -> None:
        if up:
            servers = [server for server in self.servers.values() if server.to_decode]
            if servers:
                self._deliver_up(servers[which % len(servers)])
        elif (server := self._pick(which)) is not None and server.to_prefill:
            self._deliver_down(server)

    # -- faults ------------------------------------------------------------------------------------------------

    def start(self, endpoint: str) -> None:
        """Start a server at this endpoint, unless there is one."""
        if any(server.endpoint == endpoint for server in self.servers.values()):
            return
        instance = InstanceId(f"{endpoint}#{next(self.names)}")
        scheduler = PrefillScheduler(self.prefill, PageAllocator[KvPage](self.prefill_pages))
        scheduler.peer_up(DECODE, self._page_space)
        self.servers[instance] = Server(endpoint, instance, scheduler)
        capacity = self.prefill_pages * self.prefill.page_size
        self.decode.peer_up(PrefillPeer(instance, {endpoint}, capacity, writes_both=self.writes_both))

    @property
    def _page_space(self) -> PageSpace:
        """What the decode server announces."""
        hot, page_size = self.decode.memory.hot, self.decode.limits.page_size
        return PageSpace(self.pages, page_size, hot is not None, hot.limits.num_pages if hot is not None else 0)

    def kill(self, which: int) -> None:
        if (server := self._pick(which)) is None:
            return
        del self.servers[server.instance]
        for write in server.writes:
            write.lands_until = self.now + QUARANTINE_S
        self.late_writes_in_flight += server.writes
        self.decode.handle(PeerLost(server.instance, "killed"), self.now)
        self.decode.handle(PeerClosed(server.instance), self.now)
        self.act()

    def hang(self, which: int) -> None:
        if (server := self._pick(which)) is not None:
            server.hung = True
            self.decode.handle(PeerLost(server.instance, "silent"), self.now)
            self.act()

    def wake(self, which: int, lost_us: bool) -> None:
        """A hung server continues; with `lost_us` it has lost decode as well."""
        hung = [server for server in self.servers.values() if server.hung]
        if hung:
            server = hung[which % len(hung)]
            server.hung = False
            if lost_us:
                self._lose_decode(server)
            self.decode.peer_up(PrefillPeer(server.instance, {server.endpoint}, writes_both=self.writes_both))
            self.act()

    def prefill_alone_loses_decode(self, which: int) -> None:
        """A prefill server loses its connection to decode; decode does not notice."""
        if (server := self._pick(which)) is not None:
            self._lose_decode(server)

    def drain(self, which: int) -> None:
        """A prefill server shuts down: it finishes its requests and refuses new ones."""
        if (server := self._pick(which)) is not None:
            server.scheduler.stop_accepting()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    def work(self) -> None:
        """One turn of every server and rank; no time passes."""
        self.decode_turn()
        self.rank_turn(eos=False)
        self.copy_turn()
        self.mask_turn()
        for which in range(len(self.endpoints)):
            self.deliver(which, up=False)
            self.prefill_turn(which)
            self.end_write(which, ok=True, late=False)
            self.deliver(which, up=True)

    # -- invariants --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert that no page under a possible write is free, and that all pages are accounted for."""
        self.late_writes_in_flight = [
            write
            for write in self.late_writes_in_flight
            if write.lands_until is not None and write.lands_until > self.now
        ]
        for write in [
            *self.late_writes_in_flight,
            *(write for server in self.servers.values() for write in server.writes),
        ]:
            self._land(write, intact=False)  # bytes may land at any moment
            assert write.grant in self.decode.allocator._grants, f"{write.chunk.key} writes released pages"
            assert not self._free_hot_pages(write), f"{write.chunk.key} writes free hot pages"
        elsewhere = {page for page, _ in self.host} & self.decode.cache._nodes.keys()
        assert not elsewhere, f"pages {elsewhere} are not in host memory"
        self.decode.check_integrity()
        self._check_lending()
        self._check_windows()
        for server in self.servers.values():
            server.scheduler.check_integrity()
            for write in server.writes:
                grant = server.scheduler.requests[DECODE, write.chunk.key].grant
                assert grant is not None
                first = write.chunk.token_start // self.prefill.page_size
                assert grant.freed <= first, f"{write.chunk.key} sends freed pages"

    def _free_hot_pages(self, write: Write) -> set[int]:
        """Hot pages of a write that are free."""
        hot = self.decode.memory.hot
        return set(self._hot_pages(write.chunk)) & set(hot.allocator._free) if hot is not None else set()

    def _hot_pages(self, chunk: ChunkWrite) -> list[int]:
        """The hot pages that a chunk is written to."""
        positions = range(chunk.token_start, chunk.token_end) if chunk.hot_indices else ()
        return [row_of(chunk, chunk.hot_indices, position)[0] + self._covered for position in positions]

    @property
    def _covered(self) -> int:
        """The first page of the hot pool."""
        hot = self.decode.memory.hot
        return hot.limits.overlay.covered if hot is not None else 0

    def _check_windows(self) -> None:
        """The dispatch window of each prefill server matches the transfers in flight."""
        for peer in self.decode.peers._peers.values():
            prompts = self.decode.rooms.prefilling.of_peer(peer.instance)
            left = [prompt.attempt.tokens_left for prompt in prompts if prompt.attempt is not None]
            assert peer.window.own_tokens == sum(left), f"{peer.instance}: {left}"
            assert sum(sent.prompts for sent in peer.window._sent.values()) == len(prompts)

    def _check_lending(self) -> None:
        """All hot pages that the ranks may still access are in lent memory or in the hot pool."""
        buffers = dict(self.hot)
        copies = [copy for copy in self.copies if isinstance(copy, OpenHot | WriteBackRows)]
        touched = {page for copy in copies for page in copy.hot_pages}
        for command in self.commands:
            match command:
                case OpenHot(slot=slot, hot_pages=hot_pages, capacity=capacity):
                    buffers[slot] = ResizeHot(slot, hot_pages, capacity)
                    touched.update(hot_pages)
                case ResizeHot(slot=slot):
                    buffers[slot] = command
                case DecodeStep(rows=rows, chunks=chunks):
                    slots = [*(row.hot_slot for row in rows), *(chunk.owner.hot_slot for chunk in chunks)]
                    touched.update(page for slot in slots if slot is not None for page in buffers[slot].hot_pages)
        if self.decode.memory.hot is not None:
            touched.update(page for buffer in self.decode.memory.hot._buffers.values() for page in buffer.pages)
            touched.update(page for buffer in self.decode.memory.hot._copied_last for page in buffer.pages)
        lent = {page for loan in self.decode.allocator._loans for page in loan.pages}
        assert {key for page in touched for key in self._keys_under(page)} <= lent, (
            "a hot page overlaps index keys in use"
        )

    def finish(self) -> None:
        """End all faults, run until every request has ended, and check that nothing is left."""
        self.heal()
        self._settle()
        self.check_end()

    def heal(self) -> None:
        """End all faults: every endpoint has a server that accepts prompts."""
        while any(server.hung for server in self.servers.values()):
            self.wake(0, lost_us=False)
        for which, server in reversed(list(enumerate(self.servers.values()))):
            if not server.scheduler.load().accepting:
                self.kill(which)  # another one starts below
        for endpoint in self.endpoints:
            self.start(endpoint)

    def check_end(self) -> None:
        """Nothing is left of any request, after all pages have left quarantine."""
        for _ in range(60):
            self.now += QUARANTINE_S
            for server in list(self.servers.values()):
                while server.to_prefill:
                    self._deliver_down(server)
                self._turn(server)
                while server.writes:
                    self._end_write(server, ok=True, late=False)
                while server.to_decode:
                    self._deliver_up(server)
            self.decode_turn()
            self.work_ranks(eos=True)
            self.check()
        assert self.decode.idle, self.decode.state_counts()
        assert self.decode.allocator.available == self.pages
        if self.decode.memory.hot is not None:
            assert self.decode.memory.hot.allocator.available == self.decode.memory.hot.limits.num_pages
        for server in self.servers.values():
            assert server.scheduler.idle, server.scheduler.state_counts()
            assert server.scheduler.allocator.available == self.prefill_pages
        assert set(self.terminal) == self.submitted
        assert not self.saved
        assert not self.grammar_states

    def _settle(self) -> None:
        """Run, within a time in which no deadline passes, until every request has ended."""
        for _ in range(SETTLED_AFTER):
            self.settle_some()
            if not self.decode.requests:
                return
        raise AssertionError(f"stuck: {self.decode.state_counts()}")

    def settle_some(self) -> None:
        """A short time passes, in which everything in flight ends."""
        self.now += 0.012
        for server in list(self.servers.values()):
            while server.to_prefill:
                self._deliver_down(server)
            self._turn(server)
            while server.writes:
                self._end_write(server, ok=True, late=False)
            while server.to_decode:
                self._deliver_up(server)
        self.decode_turn()
        self.work_ranks(eos=False)

    def work_ranks(self, *, eos: bool = False) -> None:
        """The ranks run all commands and copies."""
        while self.commands or self.copies or self.masks:
            self.rank_turn(eos=eos)
            self.copy_turn()
            self.mask_turn()

    # -- inside ------------------------------------------------------------------------------------------------

    def act(self) -> None:
        """Perform the effects of all schedulers."""
        for effect in self.decode.take_effects():
            self._of_decode(effect)
        for server in self.servers.values():
            if not server.hung:
                for effect in server.scheduler.take_effects():
                    self._of_prefill(server, effect)

    def _of_decode(self, effect: Effect) -> None:
        match effect:
            case SendToFrontend():  # the most frequent effect
                self._answer(effect)
            case SendToPeer(instance=instance):
                if instance in self.servers:
                    self.servers[instance].to_prefill.append(effect)
            case CopyPage() | SavePages() | LoadPages() | DropPages() | OpenHot() | ResizeHot() | VerifyKv():
                self.commands.append(effect)
            case WriteBackRows():
                self.copies.append(effect)  # does not wait for earlier steps
            case PrepareGrammar(number=number):
                self.decode.handle(GrammarReady(0, number, slow=self.slow_masks and number % 2 == 1), self.now)
            case PrepareMask():
                self.masks.append(effect)
            case DropGrammarState(grammar_state=state):
                assert state not in self.dropped_states
                self.dropped_states.add(state)
                self.grammar_states.pop(state, None)
            case ConnectPeer():
                pass
            case other:
                raise AssertionError(other)

    def _of_prefill(self, server: Server, effect: Effect) -> None:
        match effect:
            case SendToPeer(message=message):
                server.to_decode.append(message)
            case ChunkWrite(instance=instance, key=key):
                request = server.scheduler.requests[instance, key]
                assert request.grant is not None
                page_size = server.scheduler.limits.page_size
                pages = slice(effect.token_start // page_size, pages_for(effect.token_end, page_size))
                assert effect.source_pages == request.grant.pages[pages]
                server.writes.append(Write(effect, tuple(request.token_ids), self._grant_of(key)))
            case CancelChunks(key=key):
                for write in server.writes:
                    write.cancelled |= write.chunk.key == key
            case PrepareGrammar(number=number):
                server.scheduler.handle(GrammarReady(0, number), self.now)
            case SendToFrontend():
                pass  # prefill sends nothing that matters here
            case other:
                raise AssertionError(other)

    def _answer(self, effect: SendToFrontend) -> None:
        match effect.message:
            case Tokens(rid=rid, token_ids=token_ids):
                assert self.terminal[rid] == 0, f"{rid} got tokens after its end"
                self.output[rid] += len(token_ids)
            case Finished(rid=rid, completion_tokens=completion_tokens):
                assert self.output[rid] == completion_tokens
                self._end(rid)
            case Failed(rid=rid) as failed:
                self._end(rid)
                self.failures[rid] = failed

    def _end(self, rid: str) -> None:
        self.terminal[rid] += 1
        assert self.terminal[rid] == 1, f"{rid} was answered twice"

    def _pick(self, which: int) -> Server | None:
        live = [server for server in self.servers.values() if not server.hung]
        return live[which % len(live)] if live else None

    def _turn(self, server: Server) -> None:
        """Start a step if possible. End the oldest one if two are in flight or none could start."""
        server.scheduler.advance(self.now)
        step = server.scheduler.next_step(self.now)
        if step is not None:
            assert sum(chunk.end - chunk.start for chunk in step.chunks) <= self.prefill.chunk_size
            server.steps.append(step)
            server.step_pages.append([chunk.owner.granted.pages for chunk in step.chunks])
        if server.steps and (step is None or len(server.steps) > 1):
            self._end_prefill_step(server)
        self.act()

    def _end_prefill_step(self, server: Server) -> None:
        done = server.steps.popleft()
        for chunk, pages in zip(done.chunks, server.step_pages.popleft(), strict=True):
            self._compute_prefill(server, chunk, pages)
        server.scheduler.step_done(done.command_id, prefill_results(done), self.now)

    def _compute_prefill(self, server: Server, chunk: Chunk[PrefillRequest], pages: list[KvPage]) -> None:
        """Compute a chunk on a prefill server."""
        tokens, alive = tuple(chunk.owner.token_ids), chunk.owner.state is PrefillState.COMPUTING
        for position in range(first_seen(chunk.start, self.prefill.window), chunk.end):
            kv_row = server.row(pages, position) if alive or pages else None
            if kv_row is not None and position >= chunk.start:
                server.memory[kv_row] = tokens[: position + 1]
            elif alive and kv_row is not None:
                assert server.memory[kv_row] == tokens[: position + 1], f"prefill reads wrong KV at {position}"

    def _end_write(self, server: Server, ok: bool, late: bool, write: Write | None = None) -> None:
        """End a write, by default the first one."""
        write = write or server.writes[0]
        server.writes.remove(write)
        while any(step.command_id == write.chunk.after for step in server.steps):
            self._end_prefill_step(server)  # the write waits for its KV
        ok = ok and not write.cancelled
        chunk = write.chunk
        if ok:
            self._check_source(server, write)
        self._land(write, intact=ok)
        written = ChunkWritten(
            instance=chunk.instance,
            key=chunk.key,
            token_start=chunk.token_start,
            token_end=chunk.token_end,
            ok=ok,
            reason="" if ok else "injected",
            late_writes=late and not ok,
            writes=1,
            bytes_written=8,
            checksums=(),
        )
        if written.late_writes:
            write.lands_until = self.now + QUARANTINE_S
            self.late_writes_in_flight.append(write)
        server.scheduler.handle(ChunkReport(0, written), self.now)
        self.act()

    def _check_source(self, server: Server, write: Write) -> None:
        """A write reads the KV of its tokens from prefill's pages."""
        chunk = write.chunk
        first = chunk.token_start - chunk.token_start % server.scheduler.limits.page_size
        for position in range(chunk.token_start, chunk.token_end):
            sent = server.memory[server.row(chunk.source_pages, position - first)]
            assert sent == write.prompt[: position + 1], f"{chunk.key} sends wrong KV at {position}"

    def _land(self, write: Write, *, intact: bool) -> None:
        """The bytes of a write land in decode's memory, or garbage does."""
        chunk, covered = write.chunk, self._covered
        for position in range(chunk.token_start, chunk.token_end):
            prefix = write.prompt[: position + 1] if intact else ()
            row = row_of(chunk, chunk.indices, position)
            self._write(row, prefix)
            if chunk.hot_indices:
                page, slot = row_of(chunk, chunk.hot_indices, position)
                self._write_hot((page + covered, slot), prefix)
                self.host[row] = LOST

    def _deliver_down(self, server: Server) -> None:
        effect = server.to_prefill.popleft()
        match effect.message:
            case KvDestination():
                request = PrefillRequest.received(DECODE, effect.message, effect.arrays, self.now)
                assert bool(request.hot_indices) <= (not effect.message.enable_hisparse)
                server.scheduler.receive(request, self.now)
            case Abort():
                server.scheduler.handle(MessageReceived(DECODE, effect.message, ()), self.now)
            case message:
                raise AssertionError(message)
        self.act()

    def _deliver_up(self, server: Server) -> None:
        self.decode.handle(MessageReceived(server.instance, server.to_decode.popleft(), ()), self.now)
        self.act()

    def _lose_decode(self, server: Server) -> None:
        server.scheduler.handle(PeerLost(DECODE, "silent"), self.now)
        server.scheduler.peer_up(DECODE, self._page_space)
        self.act()

    def _grant_of(self, key: TransferKey) -> PageGrant[KvPage]:
        """The pages of this transfer, which must still be reserved when a write starts."""
        prompt = self.decode.rooms.prefilling.prompts.get(key)
        grant = prompt.grant if prompt is not None else self.decode.memory.holds.quarantined[key].grant
        assert grant is not None
        return grant

    def _page(self, page: int) -> dict[int, Prefix]:
        return {slot: self._in_host((page, slot)) for slot in range(PAGE_SIZE) if (page, slot) in self.memory}

    def _put_page(self, page: int, rows: dict[int, Prefix], tokens: int | None = None) -> None:
        for slot in range(PAGE_SIZE if tokens is None else tokens):
            self._write((page, slot), rows.get(slot, ()))


def first_seen(position: int, window: int | None) -> int:
    """The first token that the query at `position` sees."""
    return 0 if window is None else max(0, position - window + 1)


def sampled(*tokens: int) -> StepResult:
    """The result of a row of a step that samples these tokens."""
    return StepResult(tuple(TokenLogprob(token, None) for token in tokens), ())


def prefill_results(step: PrefillStep) -> list[StepResult]:
    """The results of a step of a prefill server: a first token for each sample of the prompts that it ends."""
    return [
        sampled(*range(50, 50 + chunk.owner.destination.samples)) if chunk.last else sampled() for chunk in step.chunks
    ]


def lost_hot_buffer(request: Request) -> bool:
    """Whether a request has run and waits for another hot buffer: it has more KV than prefill has written."""
    return request.state in (State.ARRIVED, State.OPENING) and request.kv_tokens > request.prompt.tokens


def _pages_over(page: int, page_bytes: int, other_bytes: int) -> tuple[int, int]:
    """The range of pages [first, end) of the other pool that this page shares bytes with."""
    return page * page_bytes // other_bytes, pages_for((page + 1) * page_bytes, other_bytes)


def row_of(chunk: ChunkWrite, indices: Sequence[int], position: int) -> Row:
    """Where a token of a chunk is written."""
    if chunk.granularity == "token":
        return divmod(indices[position - chunk.token_start], PAGE_SIZE)
    return indices[position // PAGE_SIZE - chunk.token_start // PAGE_SIZE], position % PAGE_SIZE


def _hot_row(buffer: ResizeHot, slot: int) -> Row:
    return buffer.hot_pages[slot // PAGE_SIZE], slot % PAGE_SIZE
