"""Which blocks a server expects to be in the KV store, and which pages it reports for them."""

import collections
import random

import pytest

from pdserve.memory.index_spaces import KvPage
from pdserve.memory.page_hashes import ROOT, page_hashes
from pdserve.memory.pages import PageAllocator
from pdserve.memory.prefix_cache import InsertedPrefix, PrefixCache
from pdserve.scheduler.messages.effects import Outbox
from pdserve.scheduler.messages.ranks import StoreLoad, StoreLoaded, StorePing, StorePinged, StoreWrite, StoreWritten
from pdserve.scheduler.store import stored_blocks
from pdserve.scheduler.store.kv_store import KvStore, StoreLimits, root_of
from pdserve.transfer.store.blocks import BLOCK_TOKENS
from tests.scheduler.outboxes import take_all

MODEL = root_of("a model")
ROOM = 400
"""Tokens of the longest sequence."""


class Listener:
    """Ignores all events. A prefix cache with a listener hashes its pages."""

    def stored(self, parent: bytes, first: int, hashes: list[bytes], tokens: list[tuple[int, ...]]) -> None: ...

    def removed(self, pages: list[bytes]) -> None: ...

    def cleared(self) -> None: ...


class View(Listener):
    """The pages that a subscriber knows."""

    def __init__(self) -> None:
        self.pages: dict[bytes, bytes] = {}
        """The parent of each page."""
        self.removals = 0

    def stored(self, parent: bytes, first: int, hashes: list[bytes], tokens: list[tuple[int, ...]]) -> None:
        assert len(hashes) == len(tokens)
        assert parent == ROOT if first == 0 else parent in self.pages
        for page in hashes:
            assert page not in self.pages
            self.pages[page], parent = parent, page

    def removed(self, pages: list[bytes]) -> None:
        self.removals += len(pages)
        for page in pages:
            del self.pages[page]


class Server:
    """The store of a server with two ranks, a real prefix cache, and the values in the store."""

    def __init__(self, page_size: int, pages: int = 200) -> None:
        self.page_size = page_size
        self.allocator: PageAllocator[KvPage] = PageAllocator(pages)
        self.cache = PrefixCache(self.allocator, page_size)
        self.outbox = Outbox()
        limits = StoreLimits(MODEL, page_size, ranks=2, timeout_s=1.0)
        self.store: KvStore[str] = KvStore(limits, self.allocator, self.cache, collections.Counter(), self.outbox)
        self.view = View()
        self.cache.listen(Listener())
        self.store.stored.listen(self.view)
        self.values: set[bytes] = set()
        self.full = False
        self.problem: str | None = None
        self.late = False
        self.perform()

    def perform(self) -> None:
        """Carry out all commands. A store that is full refuses the blocks of the first rank."""
        self.store.send_next(1e9)
        while commands := take_all(self.outbox):
            for command in commands:
                for rank in range(2):
                    match command:
                        case StorePing():
                            self.store.handle(StorePinged(rank), 0.0)
                        case StoreWrite():
                            new = [] if self.full else [block for block in command.blocks if block not in self.values]
                            self.values |= set(new)
                            refused = len(set(command.blocks) - self.values) if rank == 0 else 0
                            done = StoreWritten(rank, command.number, len(new), 1, self.problem, refused)
                            self.store.handle(done, 0.0)
                        case StoreLoad():
                            there = (i for i, block in enumerate(command.blocks) if block not in self.values)
                            found = next(there, len(command.blocks))
                            report = StoreLoaded(rank, command.number, found, 0.1, problem=self.problem, late=self.late)
                            self.store.handle(report, 0.0)
                        case _:
                            raise AssertionError(command)
            self.store.send_next(1e9)

    def compute(self, tokens: tuple[int, ...]) -> None:
        """A sequence is computed, cached and written, in two parts."""
        shared = self.cache.match(tokens, len(tokens))
        grant = self.allocator.grant("request", -(-len(tokens) // self.page_size) - len(shared), shared=shared)
        assert grant is not None
        chain, inserted = self.store.new_chain(), InsertedPrefix()
        for end in (len(tokens) // 2, len(tokens)):
            self.cache.insert(tokens, grant.pages, inserted, end=end)
            self.store.offer(chain, tokens, inserted)
            self.perform()
        self.allocator.release(grant)

    def load(self, tokens: tuple[int, ...]) -> None:
        grant = self.allocator.grant("loading", -(-len(tokens) // self.page_size))
        assert grant is not None
        self.store.load(
            "owner", self.store.new_chain(), tokens, grant.pages, cached=0, most=len(tokens), tokens_per_s=None
        )
        self.perform()
        self.allocator.release(grant)

    def flush(self) -> None:
        self.store.stored.withdraw()
        self.cache.flush()

    def expected(self, tokens: tuple[int, ...]) -> int:
        chain = self.store.new_chain()
        return self.store.expected_tokens(chain, tokens, cached=0, most=len(tokens), tokens_per_s=None)

    def reported(self, tokens: tuple[int, ...]) -> int:
        """Tokens of a sequence whose pages are in the view without a gap."""
        pages = page_hashes(tokens, self.page_size)
        missing = (number for number, page in enumerate(pages) if page not in self.view.pages)
        return next(missing, len(pages)) * self.page_size

    def in_store(self, tokens: tuple[int, ...]) -> int:
        blocks = page_hashes(tokens, BLOCK_TOKENS, MODEL)
        missing = (number for number, block in enumerate(blocks) if block not in self.values)
        return next(missing, len(blocks)) * BLOCK_TOKENS


def sequence(seed: int, tokens: int = ROOM) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(1000), k=tokens))


@pytest.mark.parametrize("page_size", [4, 16, 48, 64])
def test_pages_are_reported_when_all_their_blocks_are_in_the_store(page_size: int) -> None:
    server, tokens = Server(page_size), sequence(1)
    server.compute(tokens)
    in_store = len(tokens) // page_size * page_size // BLOCK_TOKENS * BLOCK_TOKENS
    assert server.in_store(tokens) == in_store
    assert server.reported(tokens) == server.expected(tokens) == in_store // page_size * page_size
    assert len(server.view.pages) * page_size == server.reported(tokens)


def test_refused_blocks_are_neither_expected_nor_reported() -> None:
    server, tokens = Server(64), sequence(2)
    server.full = True
    server.compute(tokens[:96])
    assert (server.expected(tokens), server.view.pages) == (0, {})
    server.full = False
    server.compute(tokens)
    assert server.reported(tokens) == server.expected(tokens) == 384


@pytest.mark.parametrize("page_size", [16, 64])
def test_pages_are_removed_when_a_load_does_not_find_them(page_size: int) -> None:
    server, tokens = Server(page_size), sequence(3)
    server.compute(tokens)
    lost = page_hashes(tokens, BLOCK_TOKENS, MODEL)[5]
    server.values.discard(lost)  # the store has evicted it
    assert server.reported(tokens) == 384
    server.late = True
    server.load(tokens)
    assert server.reported(tokens) == 384, "the store has not answered in time"
    server.late = False
    server.load(tokens)
    left = 5 * BLOCK_TOKENS // page_size * page_size
    assert server.reported(tokens) == server.expected(tokens) == left
    assert server.view.removals == (384 - left) // page_size
    server.compute(tokens)
    assert server.reported(tokens) == server.expected(tokens) == 384


def test_outage_removes_everything() -> None:
    server, tokens = Server(16), sequence(4)
    server.compute(tokens)
    server.problem = "dead"
    server.load(tokens)
    assert (server.expected(tokens), server.view.pages) == (0, {})
    server.problem = None
    server.perform()  # a ping succeeds
    server.compute(tokens)
    assert server.reported(tokens) == server.expected(tokens) == 384


def test_flushed_cache_withdraws_pages_that_are_still_expected() -> None:
    server, tokens = Server(16), sequence(5)
    server.compute(tokens)
    server.flush()
    assert (server.expected(tokens), server.view.pages) == (384, {})
    server.compute(tokens)
    assert server.reported(tokens) == 384


def test_blocks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_blocks, "MOST_BLOCKS", 20)
    server = Server(16)
    for seed in range(3):
        server.compute(sequence(seed))
    assert len(server.store.stored) == 20
    assert [server.expected(sequence(seed)) for seed in range(3)] == [0, 0, 384]
    assert len(server.view.pages) <= 40


@pytest.mark.parametrize("page_size", [16, 48, 64])
def test_random_changes_with_a_store_that_evicts_and_refuses(page_size: int) -> None:
    """No page is reported that never was in the store, and pages that a load did not find are not reported."""
    server, draw = Server(page_size), random.Random(page_size)
    stems = [sequence(seed, 8 * page_size) for seed in range(3)]
    seen: collections.Counter[str] = collections.Counter()
    for number in range(300):
        stem = draw.choice(stems)
        tokens = (stem[: draw.randrange(len(stem))] + sequence(draw.randrange(20), 200))[:ROOM]
        server.full = draw.random() < 0.1
        action = draw.choice(("compute", "compute", "load", "evict", "fail" if number % 10 == 0 else "load"))
        if draw.random() < 0.01:
            server.flush()
        match action:
            case "compute":
                server.compute(tokens)
            case "load":
                server.load(tokens)
                assert server.reported(tokens) < server.in_store(tokens) + BLOCK_TOKENS  # a page may end in a block
            case "evict" if server.values:
                server.values.discard(draw.choice(sorted(server.values)))
            case "fail":
                server.problem = "dead"
                server.load(tokens)
                server.problem = None
                assert not server.view.pages
                server.perform()
        seen[action] += 1
        seen["reported"] += bool(server.reported(tokens))
        seen["removed"] = server.view.removals
    assert min(seen[name] for name in ("compute", "load", "evict", "fail", "reported", "removed")) > 2, seen
    server.allocator.check_integrity(idle=True)
