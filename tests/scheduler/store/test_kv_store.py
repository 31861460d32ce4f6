"""The KV store of a scheduler: what is written, held, loaded and given up."""

import collections

import pytest

from pdserve.memory.index_spaces import KvPage
from pdserve.memory.page_hashes import page_hashes
from pdserve.memory.pages import PageAllocator, PageGrant
from pdserve.memory.prefix_cache import InsertedPrefix, PrefixCache
from pdserve.scheduler.messages.effects import Outbox
from pdserve.scheduler.messages.ranks import StoreLoad, StoreLoaded, StorePing, StorePinged, StoreWrite, StoreWritten
from pdserve.scheduler.store import kv_store
from pdserve.scheduler.store.kv_store import BlockChain, KvStore, StoreLimits, root_of
from pdserve.transfer.store.blocks import BLOCK_TOKENS
from tests.scheduler.outboxes import take_all

ROOT = root_of("a model")
TOKENS = tuple(range(1000, 1000 + 12 * BLOCK_TOKENS))


class Server:
    """The store of a server with its pages and prefix cache. The test acts as its ranks."""

    def __init__(self, *, page_size: int = 16, pages: int = 64, ranks: int = 1, connect: bool = True) -> None:
        self.page_size, self.ranks = page_size, ranks
        self.allocator: PageAllocator[KvPage] = PageAllocator(pages)
        self.cache = PrefixCache(self.allocator, page_size)
        self.counters: collections.Counter[str] = collections.Counter()
        self.outbox = Outbox()
        limits = StoreLimits(ROOT, page_size, ranks, timeout_s=1.0)
        self.store: KvStore[str] = KvStore(limits, self.allocator, self.cache, self.counters, self.outbox)
        if connect:
            self.store.send_next(0.0)
            assert take_all(self.outbox) == [StorePing()]
            for rank in range(ranks):
                self.store.handle(StorePinged(rank), 0.0)

    def insert(self, tokens: int) -> tuple[BlockChain, InsertedPrefix, PageGrant[KvPage]]:
        """A sequence of `tokens` tokens is computed, cached and offered to the store."""
        grant = self.allocator.grant("request", -(-tokens // self.page_size))
        assert grant is not None
        chain, inserted = self.store.new_chain(), InsertedPrefix()
        self.cache.insert(TOKENS[:tokens], grant.pages, inserted)
        self.store.offer(chain, TOKENS, inserted)
        return chain, inserted, grant

    def next_write(self) -> StoreWrite | None:
        self.store.send_next(0.0)
        commands = take_all(self.outbox)
        assert len(commands) <= 1
        command = commands[0] if commands else None
        assert command is None or isinstance(command, StoreWrite)
        return command

    def finish(self, command: StoreWrite, problem: str | None = None) -> None:
        for rank in range(self.ranks):
            self.store.handle(StoreWritten(rank, command.number, len(command.blocks), 1, problem), 0.0)

    def load(self, tokens: int, *, cached: int = 0, most: int | None = None, rate: float | None = None) -> bool:
        grant = self.allocator.grant("loading", -(-tokens // self.page_size))
        assert grant is not None
        most = tokens - 1 if most is None else most
        chain = self.store.new_chain()
        begun = self.store.load(
            "owner", chain, TOKENS[:tokens], grant.pages, cached=cached, most=most, tokens_per_s=rate
        )
        self.allocator.release(grant)
        return begun

    def take_load(self) -> StoreLoad:
        (command,) = take_all(self.outbox)
        assert isinstance(command, StoreLoad)
        return command


def test_hashes_depend_on_all_tokens_before_and_on_the_model() -> None:
    chain = BlockChain(ROOT)
    assert chain.blocks(TOKENS, 100) == page_hashes(TOKENS[:96], BLOCK_TOKENS, ROOT)
    assert chain.blocks(TOKENS, 200)[:3] == chain.blocks(TOKENS, 96)
    assert chain.blocks(TOKENS, 200) == page_hashes(TOKENS[:192], BLOCK_TOKENS, ROOT)
    assert not set(chain.blocks(TOKENS, 96)) & set(BlockChain(root_of("another")).blocks(TOKENS, 96))


def test_cached_pages_are_written_and_held_until_all_ranks_are_done() -> None:
    server = Server(ranks=2)
    _, _, grant = server.insert(100)
    server.allocator.release(grant)
    command = server.next_write()
    assert command is not None
    assert command.blocks == tuple(page_hashes(TOKENS[:96], BLOCK_TOKENS, ROOT))
    assert (len(command.pages), command.offset) == (6, 0)
    assert server.allocator.held == 6
    assert server.allocator.grant("all", 64) is None
    server.store.handle(StoreWritten(0, command.number, 3, 100), 0.0)
    assert server.allocator.held == 6
    server.store.handle(StoreWritten(1, command.number, 3, 100), 0.0)
    server.allocator.check_integrity(idle=True)
    assert server.counters["store_bytes_written"] == 200


def test_only_new_blocks_of_a_growing_sequence_are_offered() -> None:
    server = Server(page_size=48)
    chain, inserted, grant = server.insert(100)  # two pages: three blocks
    command = server.next_write()
    assert command is not None
    assert len(command.blocks) == 3
    server.finish(command)
    server.allocator.grow(grant)
    server.cache.insert(TOKENS[:144], grant.pages, inserted)
    server.store.offer(chain, TOKENS, inserted)
    command = server.next_write()
    assert command is not None
    assert command.blocks == tuple(page_hashes(TOKENS[:128], BLOCK_TOKENS, ROOT)[3:])
    assert (command.pages, command.offset) == (tuple(grant.pages[2:3]), 0)


def test_page_that_is_larger_than_a_block_is_written_in_several() -> None:
    server = Server(page_size=128)
    server.insert(256)
    command = server.next_write()
    assert command is not None
    assert (len(command.blocks), len(command.pages)) == (8, 2)


def test_pages_that_are_evicted_before_their_turn_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_store, "WRITE_BLOCKS", 4)
    monkeypatch.setattr(kv_store, "MOST_SHARE", 1)
    server = Server(pages=32)
    *_, sequence = server.insert(12 * BLOCK_TOKENS)  # 24 pages
    write = server.next_write()
    assert write is not None
    server.allocator.release(sequence)
    others = server.allocator.grant("others", 20)  # evicts the last 12 pages
    assert others is not None
    server.finish(write)
    command = server.next_write()
    assert command is not None
    assert command.blocks == tuple(page_hashes(TOKENS, BLOCK_TOKENS, ROOT)[4:6])
    assert server.counters["store_blocks_dropped"] == 6
    server.finish(command)
    assert server.next_write() is None
    server.allocator.release(others)
    server.allocator.check_integrity(idle=True)


def test_long_sequence_is_written_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_store, "WRITE_BLOCKS", 5)
    server = Server(page_size=48)
    server.insert(12 * BLOCK_TOKENS)
    blocks: list[bytes] = []
    while (command := server.next_write()) is not None:
        first = len(blocks) * BLOCK_TOKENS
        assert command.offset == first % 48
        blocks += command.blocks
        server.finish(command)
    assert blocks == page_hashes(TOKENS, BLOCK_TOKENS, ROOT)
    assert server.store.gauges()["kv_store_queued_blocks"] == 0


def test_write_holds_a_small_part_of_the_pool_and_the_pages_of_its_prefix() -> None:
    server = Server(pages=64)
    *_, sequence = server.insert(12 * BLOCK_TOKENS)
    server.allocator.release(sequence)
    held = []
    while (command := server.next_write()) is not None:
        assert len(command.pages) == 8
        held.append(server.allocator.held)
        server.finish(command)
    assert held == [8, 16, 24]


def test_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_store, "MOST_QUEUED", 4)
    server = Server()
    _, _, grant = server.insert(64)
    for _ in range(3):
        inserted = InsertedPrefix()
        server.cache.insert(TOKENS[:64], grant.pages, inserted)
        server.store.offer(server.store.new_chain(), TOKENS, inserted)
    assert server.store.gauges()["kv_store_queued_blocks"] == 4
    assert server.counters["store_blocks_dropped"] == 4


def test_nothing_is_sent_to_a_store_that_does_not_answer() -> None:
    server = Server()
    server.insert(64)
    command = server.next_write()
    assert command is not None
    server.insert(128)
    server.finish(command, "gone")
    assert server.counters["store_outages"] == 1
    assert server.next_write() is None
    server.insert(256)
    assert server.next_write() is None
    assert not server.load(256)
    server.store.send_next(2.0)
    assert take_all(server.outbox) == [StorePing()]
    server.store.handle(StorePinged(0), 2.0)
    assert server.load(256)


def test_load_has_the_blocks_behind_the_cached_pages() -> None:
    server = Server()
    assert server.load(300, cached=48)
    command = server.take_load()
    assert command.blocks == tuple(page_hashes(TOKENS[:288], BLOCK_TOKENS, ROOT)[1:])
    assert (len(command.pages), command.offset, command.skip) == (16, 0, 16)


@pytest.mark.parametrize(
    ("page_size", "most", "loaded"), [(16, 299, 288), (64, 299, 256), (16, 100, 96), (48, 299, 288)]
)
def test_loaded_tokens_are_whole_pages_within_the_limit(page_size: int, most: int, loaded: int) -> None:
    server = Server(page_size=page_size)
    assert server.load(300, most=most)
    command = server.take_load()
    result = server.store.handle(StoreLoaded(0, command.number, len(command.blocks), 0.1), 0.0)
    assert result is not None
    assert (result.owner, result.tokens) == ("owner", loaded)


def test_ranks_agree_on_what_all_have_loaded() -> None:
    server = Server(ranks=3)
    assert server.load(300)
    number = server.take_load().number
    assert server.store.handle(StoreLoaded(0, number, 9, 0.1), 0.0) is None
    assert server.store.handle(StoreLoaded(1, number, 4, 0.1, corrupt=2), 0.0) is None
    result = server.store.handle(StoreLoaded(2, number, 7, 0.1), 0.0)
    assert result is not None
    assert result.tokens == 4 * BLOCK_TOKENS
    assert server.counters["store_corrupt_cells"] == 2


def test_few_tokens_are_computed_and_not_loaded() -> None:
    server = Server()
    assert not server.load(300, cached=240)
    assert not server.load(60)


def test_store_that_is_slower_than_the_model_is_rarely_used() -> None:
    server = Server()
    assert server.load(300, rate=1000.0)
    server.store.handle(StoreLoaded(0, server.take_load().number, 9, seconds=9.0), 0.0)
    asked = sum(server.load(300, rate=1000.0) for _ in range(32))
    assert asked == 2
    assert server.counters["store_skipped_as_slow"] == 30
    assert server.load(300, rate=10.0)
