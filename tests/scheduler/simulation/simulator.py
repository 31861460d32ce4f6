"""A decode server and prefill servers without torch, sockets or a clock: the real schedulers in a simulated world.

The network is a pair of queues per server, a write is an entry in a list, the ranks are a queue of orders that are
carried out some time later, and memory is a dictionary that says of which prefix each row holds the KV. With HiSparse
that is host memory, and hot memory is another; where free pages are lent, hot memory lies over the keys, and what is
written to one is gone from the other. Whatever happens, three things must hold, and `check()` and `finish()` see to it:
every step finds the KV of all its tokens where it looks, pages under a write that may still land are never free, and in
the end every pool is full and every client has exactly one answer.
"""

import collections
import dataclasses
import itertools
from collections.abc import Sequence

from pdserve.configs.sampling import SamplingParams, TokenLogprob
from pdserve.memory.hisparse.shared_pool import PoolOverlay
from pdserve.memory.index_spaces import KvPage
from pdserve.memory.pages import PageAllocator, PageGrant
from pdserve.scheduler.decode.dispatch.dispatcher import DecodeLimits
from pdserve.scheduler.decode.memory.hot_buffers import HotLimits
from pdserve.scheduler.decode.requests.request import Request
from pdserve.scheduler.decode.run_queue import DecodeRow, DecodeStep
from pdserve.scheduler.decode.scheduler import DecodeScheduler
from pdserve.scheduler.messages.effects import ConnectPeer, Effect, SendToFrontend, SendToPeer
from pdserve.scheduler.messages.frontend import Failed, Finished, Submit, Tokens
from pdserve.scheduler.messages.lifecycle import State
from pdserve.scheduler.messages.ranks import (
    CancelChunks,
    CopyPage,
    DropPages,
    HotCommand,
    LoadPages,
    OpenHot,
    PageCommand,
    ResizeHot,
    SavePages,
)
from pdserve.scheduler.prefill.limits import PrefillLimits
from pdserve.scheduler.prefill.request import PageSpace, PrefillStep
from pdserve.scheduler.prefill.scheduler import PrefillScheduler
from pdserve.transfer.data.chunks import ChunkWrite, ChunkWritten
from pdserve.transfer.protocol.messages import (
    Abort,
    AbortAck,
    AnyMessage,
    ChunkArrived,
    InstanceId,
    KvDestination,
    PrefillDone,
    TransferFailed,
    TransferKey,
)

DECODE = InstanceId("decode")
ENDPOINTS = ("a:1", "b:1")
EOS = 7
QUARANTINE_S = 6.0
PAGES = 12
PAGE_SIZE = 4
PREFILL = PrefillLimits(page_size=2, chunk_size=4, max_queued_requests=3, context_length=64, vocab_size=100)
PREFILL_PAGES = 13
HOT_ROWS = 8
LENDING_PAGES = 32
KEY_BYTES, HOT_BYTES = 2, 3
"""Of a page where pages are lent: a lot is three pages, or two hot ones; the last two pages are not whole lots."""

Row = tuple[int, int]
"""Page and place in it, of decode's pool or of its hot pool."""
Prefix = tuple[int, ...]
"""KV of a token depends on all tokens before it, so a row is known by the whole prefix."""
LOST: Prefix = (-1,)
"""What a row holds when something else was written there."""


@dataclasses.dataclass
class Write:
    """A chunk on its way into decode's pages; it may land until it has ended and `lands_until` has passed."""

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
    hung: bool = False


class Simulator:
    """Everything that can happen, as methods over plain integers. A `which` picks among what there is, modulo."""

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
        limits: DecodeLimits | None = None,
        pages: int | None = None,
        prefill: PrefillLimits = PREFILL,
        prefill_pages: int = PREFILL_PAGES,
        endpoints: Sequence[str] = ENDPOINTS,
    ) -> None:
        """With `hot_pages` of its own (HiSparse); if it `lends`, free pages are hot pages as well. If it `verifies`,
        its ranks compare what has landed before it counts as arrived. The last five replace the small servers that
        random lives are led in.
        """
        self.now = 0.0
        self.pages = pages or (LENDING_PAGES if lends else PAGES)
        self.endpoints = endpoints
        self.prefill = prefill
        self.prefill_pages = prefill_pages
        overlay = PoolOverlay.of(self.pages, kv_page_bytes=KEY_BYTES, hot_page_bytes=HOT_BYTES) if lends else None
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
            prefix_cache=prefix_cache,
            stages=stages,
            overlap=overlap,
        )
        hot_limits = (
            HotLimits(hot_pages, PAGE_SIZE, HOT_ROWS, slots=3, overlay=overlay) if hot_pages is not None else None
        )
        self.decode = DecodeScheduler(limits, PageAllocator[KvPage](self.pages), [EOS], hot_limits)
        self.lends = lends
        self.verifies = verifies
        self.hot: dict[int, ResizeHot] = {}
        """Pages and capacity of each request slot, as the ranks know them."""
        self.hot_memory: dict[Row, Prefix] = {}
        self.hot_seen: collections.Counter[str] = collections.Counter()
        """What has happened to hot buffers."""
        self.servers: dict[InstanceId, Server] = {}
        self.ghosts: list[Write] = []
        self.commands: collections.deque[DecodeStep | PageCommand | HotCommand | PrefillDone] = collections.deque()
        """What the ranks of the decode server have been told and not done."""
        self.copies: collections.deque[SavePages | LoadPages | DropPages | OpenHot] = collections.deque()
        """Copies that they have begun beside their steps: each is made as a whole, at any time."""
        self.drawn: list[int] = []
        """Tokens of the last step they did."""
        self.failed = False
        """Whether the last step failed."""
        self.known: dict[str, Prefix] = {}
        """All tokens of a sequence, as the ranks know them."""
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
        """Prompts of families 0 and 1 share a prefix of up to 22 tokens; family 2 goes on where another one ended."""
        rids = tuple(f"r{next(self.names)}" for _ in range(samples))
        self.submitted.update(rids)
        tokens = tuple(range(10 + 30 * family, 10 + 30 * family + length))
        if family == 2:
            tokens = (*self.last_conversation[:30], *range(90, 93))
        sampling = SamplingParams(max_new_tokens=new)
        self.decode.submit(Submit(rids[0], tokens, sampling, pinned, more_rids=rids[1:], priority=priority), self.now)
        self.act()

    def ask_for(self, tokens: Prefix, new: int) -> str:
        """One request for this prompt."""
        rid = f"r{next(self.names)}"
        self.submitted.add(rid)
        self.decode.submit(Submit(rid, tokens, SamplingParams(max_new_tokens=new)), self.now)
        self.act()
        return rid

    def cancel(self, which: int, stopped: bool) -> None:
        if self.decode.requests:
            rid = sorted(self.decode.requests)[which % len(self.decode.requests)]
            self.decode.cancel(rid, self.now, stopped=stopped)
            self.act()

    def flush(self) -> None:
        self.decode.cache.flush()

    # -- the servers work --------------------------------------------------------------------------------------

    def decode_turn(self) -> None:
        hot = self.decode.memory.hot
        loans = self.decode.memory._lending
        borrowed = loans.borrowed if loans is not None else 0
        cycled = [rid for rid in hot.owners if hot.of(rid).evicting] if hot is not None else []
        self.decode.advance(self.now)
        if hot is not None:
            self.hot_seen["reopened"] += any(rid in hot.owners and not hot.of(rid).evicting for rid in cycled)
        self.act()
        requests = self.decode.requests.values()
        late = [request.rid for request in requests if self.decode._deadlines._next(request)[0] <= self.now]
        assert not late, f"the time of {late} is up, and they were not told"
        self.hot_seen["parked"] += any(is_parked(request) for request in requests)
        self.hot_seen["waited"] += any(request.state is State.ARRIVED for request in requests)
        while (step := self.decode.next_step(self.now)) is not None:
            self.act()  # pages of retracted requests are saved before the step
            self.commands.append(step)
        self.act()
        if loans is not None:
            self.hot_seen["lent"] += loans.borrowed > 0
            self.hot_seen["called in"] += loans.borrowed < borrowed

    def rank_turn(self, eos: bool, *, fail: bool = False) -> None:
        """The ranks carry out their next order, and report; a step may fail."""
        if not self.commands:
            return
        match self.commands.popleft():
            case DecodeStep() as step if fail or (self.failed and any(row.token is None for row in step.rows)):
                self.failed = True  # and so does a step that follows it
                self.decode.step_failed(step.command_id, "injected", self.now)
            case DecodeStep() as step:
                self.failed = False
                self._compute(step, eos)
            case OpenHot() as opened:
                self._open_hot(opened)
            case ResizeHot() as resized:
                self._resize_hot(resized)
            case PrefillDone() as done:
                self.decode.prefill_done(done, self.now)
            case CopyPage(command_id=command_id, source=source, destination=destination):
                self._put_page(destination, self._page(source))
                self.decode.command_done(command_id)
            case copy:
                self.copies.append(copy)
        self.act()

    def copy_turn(self) -> None:
        """The ranks make their next copy beside the steps, and report."""
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
            case DropPages(rid=rid):
                del self.saved[rid]
                return
        self.decode.copy_done(number, 0.0, self.now)
        self.act()

    def _open_hot(self, opened: OpenHot) -> None:
        """The rows of a resident are copied beside the steps; those of others are fetched when they are selected."""
        buffer = ResizeHot(opened.slot, opened.hot_pages, opened.capacity)
        self.hot[opened.slot] = buffer
        assert buffer.capacity >= HOT_ROWS
        assert len(opened.pages) * PAGE_SIZE >= opened.tokens
        resident = opened.tokens <= opened.capacity
        assert resident == (opened.copy is not None)
        self.hot_seen["opened resident" if resident else "opened cold"] += 1
        if resident:
            self.copies.append(opened)
            return
        for position in range(min(opened.tokens, HOT_ROWS + 1)):
            self._write_hot(_hot_place(buffer, position), ())

    def _load_hot(self, opened: OpenHot) -> None:
        buffer = ResizeHot(opened.slot, opened.hot_pages, opened.capacity)
        for position in range(opened.tokens):
            source = opened.pages[position // PAGE_SIZE], position % PAGE_SIZE
            self._write_hot(_hot_place(buffer, position), self.memory.get(source, ()))

    def _resize_hot(self, buffer: ResizeHot) -> None:
        """Rows stay where they are, so the pages that stay must be the first, in their order."""
        before = self.hot[buffer.slot]
        self.hot[buffer.slot] = buffer
        assert buffer.capacity >= HOT_ROWS
        kept = min(len(before.hot_pages), len(buffer.hot_pages))
        assert buffer.hot_pages[:kept] == before.hot_pages[:kept], f"slot {buffer.slot} was given other pages"
        self.hot_seen["shrunk" if len(buffer.hot_pages) < len(before.hot_pages) else "grown"] += 1

    def _use_hot(self, row: DecodeRow, tokens: Prefix, *, alive: bool) -> None:
        """A step of one request: its buffer has room for what the step needs, and its rows are those of its tokens."""
        assert row.hot_slot is not None
        buffer, count = self.hot[row.hot_slot], len(tokens)
        resident = count <= buffer.capacity
        if alive:
            rows = len(buffer.hot_pages) * PAGE_SIZE
            assert rows >= (count if resident else HOT_ROWS + 1), f"{row.request.rid} lacks hot rows"
            for position in range(count - 1 if resident else HOT_ROWS):
                found = self.hot_memory[_hot_place(buffer, position)]
                cycled = not resident and found == ()
                assert cycled or found == tokens[: position + 1], f"{row.request.rid} reads a wrong hot row {position}"
        if resident:
            self._write_hot(_hot_place(buffer, count - 1), tokens)
        else:
            self.hot_seen["cycled"] += 1
            for slot in range(HOT_ROWS + 1):
                self._write_hot(_hot_place(buffer, slot), ())

    def _write_hot(self, row: Row, prefix: Prefix) -> None:
        """And the keys that were there are gone."""
        self.hot_memory[row] = prefix
        for page in self._keys_under(row[0]):
            self.memory.update({(page, slot): LOST for slot in range(PAGE_SIZE)})

    def _write(self, row: Row, prefix: Prefix) -> None:
        """And the hot rows that were there are gone."""
        self.memory[row] = prefix
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
        hot = [page for slot in slots for page in self.hot[slot].hot_pages]
        assert len(hot) == len(set(hot)), "two requests of a step share a hot page"
        for row in step.rows:
            rid = row.request.rid
            alive = rid in self.decode.requests  # of one that has ended nobody looks at the result
            if row.token is None:
                assert row.follows is not None
                tokens = (*self.known[rid], self.drawn[row.follows])
            else:
                tokens = (*row.request.prompt_ids, *row.request.output_ids)
                assert row.token == tokens[-1]
            assert row.position == len(tokens) - 1
            assert row.output_index == len(tokens) - len(row.request.prompt_ids)
            for position in range(row.position):
                place = row.pages[position // PAGE_SIZE], position % PAGE_SIZE
                if alive:
                    assert self.memory[place] == tokens[: position + 1], f"{rid} reads wrong KV at {position}"
            if self.decode.memory.hot is not None:
                self._use_hot(row, tokens, alive=alive)
            if row.pages:
                self._write((row.pages[row.position // PAGE_SIZE], row.position % PAGE_SIZE), tokens)
            self.known[rid] = tokens
            drawn.append(EOS if eos else 50 + row.request.sample)  # samples of a prompt differ: their KV must not mix
            self.last_conversation = (*tokens, drawn[-1])
        self.drawn = drawn
        self.decode.step_done(step.command_id, [TokenLogprob(token, None) for token in drawn], self.now)

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

    # -- what goes wrong ---------------------------------------------------------------------------------------

    def start(self, endpoint: str) -> None:
        """Start a server at this endpoint, unless there is one."""
        if any(server.endpoint == endpoint for server in self.servers.values()):
            return
        instance = InstanceId(f"{endpoint}#{next(self.names)}")
        scheduler = PrefillScheduler(self.prefill, PageAllocator[KvPage](self.prefill_pages))
        scheduler.peer_up(DECODE, PageSpace(self.pages, self.decode.limits.page_size))
        self.servers[instance] = Server(endpoint, instance, scheduler)
        self.decode.peer_up(instance, endpoint, capacity=self.prefill_pages * self.prefill.page_size)

    def kill(self, which: int) -> None:
        if (server := self._pick(which)) is None:
            return
        del self.servers[server.instance]
        for write in server.writes:
            write.lands_until = self.now + QUARANTINE_S
        self.ghosts += server.writes
        self.decode.peer_lost(server.instance, "killed", self.now)
        self.decode.peer_closed(server.instance, self.now)
        self.act()

    def hang(self, which: int) -> None:
        if (server := self._pick(which)) is not None:
            server.hung = True
            self.decode.peer_lost(server.instance, "silent", self.now)
            self.act()

    def wake(self, which: int, lost_us: bool) -> None:
        """A hung server goes on; it may find that it has not heard of decode for too long, too."""
        hung = [server for server in self.servers.values() if server.hung]
        if hung:
            server = hung[which % len(hung)]
            server.hung = False
            if lost_us:
                self._lose_decode(server)
            self.decode.peer_up(server.instance, server.endpoint)
            self.act()

    def prefill_alone_loses_decode(self, which: int) -> None:
        if (server := self._pick(which)) is not None:
            self._lose_decode(server)

    def drain(self, which: int) -> None:
        """A prefill server is told to stop: it ends what it has, and takes nothing new."""
        if (server := self._pick(which)) is not None:
            server.scheduler.stop_accepting()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    def work(self) -> None:
        """Everybody does something, and no time passes."""
        self.decode_turn()
        self.rank_turn(eos=False)
        self.copy_turn()
        for which in range(len(self.endpoints)):
            self.deliver(which, up=False)
            self.prefill_turn(which)
            self.end_write(which, ok=True, late=False)
            self.deliver(which, up=True)

    # -- what must hold ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """No page under a possible write is free, and everything is accounted for."""
        under_way = [*self.ghosts, *(write for server in self.servers.values() for write in server.writes)]
        for write in under_way:
            self._land(write, intact=False)  # at any moment
        self.ghosts = [write for write in self.ghosts if write.lands_until is not None and write.lands_until > self.now]
        for write in [*self.ghosts, *(write for server in self.servers.values() for write in server.writes)]:
            assert write.grant in self.decode.pages._grants, f"{write.chunk.key} writes pages that were given back"
        self.decode.check_integrity()
        self._check_loans()
        self._check_windows()
        for server in self.servers.values():
            server.scheduler.check_integrity()

    def _check_windows(self) -> None:
        """What decode believes to have with each prefill server is what it waits for."""
        for peer in self.decode.dispatcher.peers._peers.values():
            prompts = self.decode.dispatcher.of_peer(peer.instance)
            left = [prompt.attempt.tokens_left for prompt in prompts if prompt.attempt is not None]
            assert peer.window.own_tokens == sum(left), f"{peer.instance}: {left}"
            assert sum(sent.prompts for sent in peer.window._sent.values()) == len(prompts)

    def _check_loans(self) -> None:
        """Whatever hot page the ranks may still touch, its keys are nobody else's."""
        buffers = dict(self.hot)
        touched = {page for copy in self.copies if isinstance(copy, OpenHot) for page in copy.hot_pages}
        for command in self.commands:
            match command:
                case OpenHot(slot=slot, hot_pages=hot_pages, capacity=capacity):
                    buffers[slot] = ResizeHot(slot, hot_pages, capacity)
                    touched.update(hot_pages)
                case ResizeHot(slot=slot):
                    buffers[slot] = command
                case DecodeStep(rows=rows):
                    touched.update(
                        page for row in rows if row.hot_slot is not None for page in buffers[row.hot_slot].hot_pages
                    )
        if self.decode.memory.hot is not None:
            touched.update(page for buffer in self.decode.memory.hot._buffers.values() for page in buffer.pages)
            touched.update(page for buffer in self.decode.memory.hot._detached for page in buffer.pages)
        lent = {page for loan in self.decode.pages._loans for page in loan.pages}
        assert {key for page in touched for key in self._keys_under(page)} <= lent, "a hot page lies over keys in use"

    def finish(self) -> None:
        """Heal the world, let it run, and look for what is left."""
        while any(server.hung for server in self.servers.values()):
            self.wake(0, lost_us=False)
        for which, server in reversed(list(enumerate(self.servers.values()))):
            if not server.scheduler.load().accepting:
                self.kill(which)  # another is started in its place
        for endpoint in self.endpoints:
            self.start(endpoint)
        self._settle()
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
        assert self.decode.pages.available == self.pages
        if self.decode.memory.hot is not None:
            assert self.decode.memory.hot.pages.available == self.decode.memory.hot.limits.num_pages
        for server in self.servers.values():
            assert server.scheduler.idle, server.scheduler.state_counts()
            assert server.scheduler.pages.available == self.prefill_pages
        assert set(self.terminal) == self.submitted
        assert not self.saved

    def _settle(self) -> None:
        """Work alone, for a time in which no deadline but quarantines passes, is enough for everybody to be done."""
        for _ in range(1500):
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
            if not self.decode.requests:
                return
        raise AssertionError(f"stuck: {self.decode.state_counts()}")

    def work_ranks(self, *, eos: bool = False) -> None:
        """They do all that they have been told."""
        while self.commands or self.copies:
            self.rank_turn(eos=eos)
            self.copy_turn()

    # -- inside ------------------------------------------------------------------------------------------------

    def act(self) -> None:
        """Carry out the effects of everybody."""
        for effect in self.decode.take_effects():
            self._of_decode(effect)
        for server in self.servers.values():
            if not server.hung:
                for effect in server.scheduler.take_effects():
                    self._of_prefill(server, effect)

    def _of_decode(self, effect: Effect) -> None:
        match effect:
            case SendToPeer(instance=instance):
                if instance in self.servers:
                    self.servers[instance].to_prefill.append(effect)
            case SendToFrontend():
                self._answer(effect)
            case CopyPage() | SavePages() | LoadPages() | DropPages() | OpenHot() | ResizeHot():
                self.commands.append(effect)
            case ConnectPeer():
                pass
            case other:
                raise AssertionError(other)

    def _of_prefill(self, server: Server, effect: Effect) -> None:
        match effect:
            case SendToPeer(message=message):
                server.to_decode.append(message)
            case ChunkWrite(instance=instance, key=key):
                transfer = server.scheduler.requests[instance, key]
                assert transfer.grant is not None
                page_size = server.scheduler.limits.page_size
                pages = slice(effect.token_start // page_size, -(-effect.token_end // page_size))
                assert effect.source_pages == transfer.grant.pages[pages]
                server.writes.append(Write(effect, tuple(transfer.prompt), self._grant_of(key)))
            case CancelChunks(key=key):
                for write in server.writes:
                    write.cancelled |= write.chunk.key == key
            case SendToFrontend():
                pass  # who asked prefill itself is of no interest here
            case other:
                raise AssertionError(other)

    def _answer(self, effect: SendToFrontend) -> None:
        match effect.message:
            case Finished(rid=rid, completion_tokens=completion_tokens):
                assert self.output[rid] == completion_tokens
                self._end(rid)
            case Failed(rid=rid) as failed:
                self._end(rid)
                self.failures[rid] = failed
            case Tokens(rid=rid, token_ids=token_ids):
                assert self.terminal[rid] == 0, f"{rid} got tokens after its end"
                self.output[rid] += len(token_ids)

    def _end(self, rid: str) -> None:
        self.terminal[rid] += 1
        assert self.terminal[rid] == 1, f"{rid} was answered twice"

    def _pick(self, which: int) -> Server | None:
        live = [server for server in self.servers.values() if not server.hung]
        return live[which % len(live)] if live else None

    def _turn(self, server: Server) -> None:
        """Give a step if there is one, and do the oldest when two are under way or there is none to give."""
        server.scheduler.advance(self.now)
        step = server.scheduler.next_step(self.now)
        if step is not None:
            assert sum(row.end - row.start for row in step.rows) <= self.prefill.chunk_size
            server.steps.append(step)
        if server.steps and (step is None or len(server.steps) > 1):
            done = server.steps.popleft()
            tokens = [tuple(TokenLogprob(50 + i, None) for i in range(len(row.samplings()))) for row in done.rows]
            server.scheduler.step_done(done.command_id, tokens, [()] * len(done.rows), self.now)
        self.act()

    def _end_write(self, server: Server, ok: bool, late: bool) -> None:
        write = server.writes.pop(0)
        ok = ok and not write.cancelled
        self._land(write, intact=ok)
        chunk = write.chunk
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
            self.ghosts.append(write)
        server.scheduler.chunk_written(written, self.now)
        self.act()

    def _land(self, write: Write, *, intact: bool) -> None:
        """The bytes of a write arrive in decode's memory, or garbage does."""
        chunk = write.chunk
        for position in range(chunk.token_start, chunk.token_end):
            page = chunk.indices[position // PAGE_SIZE - chunk.token_start // PAGE_SIZE]
            self._write((page, position % PAGE_SIZE), write.prompt[: position + 1] if intact else ())

    def _deliver_down(self, server: Server) -> None:
        effect = server.to_prefill.popleft()
        match effect.message:
            case KvDestination():
                prompt, indices = effect.arrays
                server.scheduler.receive(DECODE, effect.message, prompt, list(indices), self.now)
            case Abort():
                server.scheduler.abort(DECODE, effect.message, self.now)
            case message:
                raise AssertionError(message)
        self.act()

    def _deliver_up(self, server: Server) -> None:
        match server.to_decode.popleft():
            case ChunkArrived() as chunk:
                self.decode.chunk_arrived(chunk)
            case PrefillDone() as done:
                if self.decode.dispatcher.written(done):
                    self._landed(done)
            case TransferFailed() as failed:
                if failed.leaving:
                    self.decode.peer_leaving(server.instance, self.now)
                self.decode.transfer_failed(
                    failed.key,
                    failed.reason,
                    retryable=failed.retryable,
                    late_writes=failed.late_writes,
                    refused=failed.refused,
                    full=failed.full,
                    now=self.now,
                )
            case AbortAck() as ack:
                self.decode.abort_acked(ack.key, ack.late_writes, self.now)
            case message:
                raise AssertionError(message)
        self.act()

    def _landed(self, done: PrefillDone) -> None:
        """All that was written is in its pages."""
        if self.verifies:
            self.commands.append(done)
        else:
            self.decode.prefill_done(done, self.now)

    def _lose_decode(self, server: Server) -> None:
        server.scheduler.peer_lost(DECODE, "silent", self.now)
        server.scheduler.peer_up(DECODE, PageSpace(self.pages, PAGE_SIZE))
        self.act()

    def _grant_of(self, key: TransferKey) -> PageGrant[KvPage]:
        """Whose pages a write of this transfer goes to: they must still be reserved for it when it starts."""
        prompt = self.decode.prompt_of(key)
        grant = prompt.grant if prompt is not None else self.decode.dispatcher.quarantine._pages[key].grant
        assert grant is not None
        return grant

    def _page(self, page: int) -> dict[int, Prefix]:
        return {slot: self.memory[page, slot] for slot in range(PAGE_SIZE) if (page, slot) in self.memory}

    def _put_page(self, page: int, rows: dict[int, Prefix]) -> None:
        for slot in range(PAGE_SIZE):
            self._write((page, slot), rows.get(slot, ()))


def is_parked(request: Request) -> bool:
    """Whether it has run, and waits for a hot buffer with more KV than prefill has written for it."""
    return request.state is State.ARRIVED and request.kv_tokens > request.prompt.tokens


def _pages_over(page: int, page_bytes: int, other_bytes: int) -> tuple[int, int]:
    """The first page of the other pool, and the end of those, that this page shares bytes with."""
    return page * page_bytes // other_bytes, -(-(page + 1) * page_bytes // other_bytes)


def _hot_place(buffer: ResizeHot, slot: int) -> Row:
    return buffer.hot_pages[slot // PAGE_SIZE], slot % PAGE_SIZE
