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

ROOT = root_of("a model")
TOKENS = tuple(range(1000, 1000 + 12 * BLOCK_TOKENS))


class World:
    """A store with its pages and prefix cache; `ranks` ranks report."""

    def __init__(self, *, page_size: int = 16, pages: int = 64, ranks: int = 1, connect: bool = True) -> None:
        self.page_size, self.ranks = page_size, ranks
        self.pages: PageAllocator[KvPage] = PageAllocator(pages)
        self.cache = PrefixCache(self.pages, page_size)
        self.counters: collections.Counter[str] = collections.Counter()
        self.outbox = Outbox()
        limits = StoreLimits(ROOT, page_size, ranks, timeout_s=1.0)
        self.store: KvStore[str] = KvStore(limits, self.pages, self.cache, self.counters, self.outbox)
        if connect:
            self.store.advance(0.0)
            assert self.outbox.take_all() == [StorePing()]
            for rank in range(ranks):
                self.store.pinged(StorePinged(rank), 0.0)

    def insert(self, tokens: int) -> tuple[BlockChain, InsertedPrefix, PageGrant[KvPage]]:
        """A sequence of so many tokens is computed, cached and offered."""
        grant = self.pages.grant("request", -(-tokens // self.page_size))
        assert grant is not None
        chain, inserted = self.store.new_chain(), InsertedPrefix()
        self.cache.insert(TOKENS[:tokens], grant.pages, inserted)
        self.store.offer(chain, TOKENS, inserted)
        return chain, inserted, grant

    def next_write(self) -> StoreWrite | None:
        self.store.advance(0.0)
        commands = self.outbox.take_all()
        assert len(commands) <= 1
        command = commands[0] if commands else None
        assert command is None or isinstance(command, StoreWrite)
        return command

    def finish(self, command: StoreWrite, problem: str | None = None) -> None:
        for rank in range(self.ranks):
            self.store.written(StoreWritten(rank, command.number, len(command.blocks), 1, problem), 0.0)

    def load(self, tokens: int, *, cached: int = 0, most: int | None = None, rate: float | None = None) -> bool:
        grant = self.pages.grant("loading", -(-tokens // self.page_size))
        assert grant is not None
        most = tokens - 1 if most is None else most
        chain = self.store.new_chain()
        begun = self.store.load(
            "owner", chain, TOKENS[:tokens], grant.pages, cached=cached, most=most, tokens_per_s=rate
        )
        self.pages.release(grant)
        return begun

    def take_load(self) -> StoreLoad:
        (command,) = self.outbox.take_all()
        assert isinstance(command, StoreLoad)
        return command


def test_hashes_depend_on_all_tokens_before_and_on_the_model() -> None:
    chain = BlockChain(ROOT)
    assert chain.blocks(TOKENS, 100) == page_hashes(TOKENS[:96], BLOCK_TOKENS, ROOT)
    assert chain.blocks(TOKENS, 200)[:3] == chain.blocks(TOKENS, 96)
    assert chain.blocks(TOKENS, 200) == page_hashes(TOKENS[:192], BLOCK_TOKENS, ROOT)
    assert not set(chain.blocks(TOKENS, 96)) & set(BlockChain(root_of("another")).blocks(TOKENS, 96))


def test_cached_pages_are_written_and_held_until_all_ranks_are_done() -> None:
    world = World(ranks=2)
    _, _, grant = world.insert(100)
    world.pages.release(grant)
    command = world.next_write()
    assert command is not None
    assert command.blocks == tuple(page_hashes(TOKENS[:96], BLOCK_TOKENS, ROOT))
    assert (len(command.pages), command.offset) == (6, 0)
    assert world.pages.held == 6
    assert world.pages.grant("all", 64) is None
    world.store.written(StoreWritten(0, command.number, 3, 100), 0.0)
    assert world.pages.held == 6
    world.store.written(StoreWritten(1, command.number, 3, 100), 0.0)
    world.pages.check_integrity(idle=True)
    assert world.counters["store_bytes_written"] == 200


def test_only_new_blocks_of_a_growing_sequence_are_offered() -> None:
    world = World(page_size=48)
    chain, inserted, grant = world.insert(100)  # two pages: three blocks
    command = world.next_write()
    assert command is not None
    assert len(command.blocks) == 3
    world.finish(command)
    world.pages.grow(grant)
    world.cache.insert(TOKENS[:144], grant.pages, inserted)
    world.store.offer(chain, TOKENS, inserted)
    command = world.next_write()
    assert command is not None
    assert command.blocks == tuple(page_hashes(TOKENS[:128], BLOCK_TOKENS, ROOT)[3:])
    assert (command.pages, command.offset) == (tuple(grant.pages[2:3]), 0)


def test_page_that_is_larger_than_a_block_is_written_in_several() -> None:
    world = World(page_size=128)
    world.insert(256)
    command = world.next_write()
    assert command is not None
    assert (len(command.blocks), len(command.pages)) == (8, 2)


def test_pages_that_are_evicted_before_their_turn_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_store, "WRITE_BLOCKS", 4)
    monkeypatch.setattr(kv_store, "MOST_SHARE", 1)
    world = World(pages=32)
    *_, sequence = world.insert(12 * BLOCK_TOKENS)  # 24 pages
    write = world.next_write()
    assert write is not None
    world.pages.release(sequence)
    others = world.pages.grant("others", 20)  # evicts the last 12 pages
    assert others is not None
    world.finish(write)
    command = world.next_write()
    assert command is not None
    assert command.blocks == tuple(page_hashes(TOKENS, BLOCK_TOKENS, ROOT)[4:6])
    assert world.counters["store_blocks_dropped"] == 6
    world.finish(command)
    assert world.next_write() is None
    world.pages.release(others)
    world.pages.check_integrity(idle=True)


def test_long_sequence_is_written_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_store, "WRITE_BLOCKS", 5)
    world = World(page_size=48)
    world.insert(12 * BLOCK_TOKENS)
    blocks: list[bytes] = []
    while (command := world.next_write()) is not None:
        first = len(blocks) * BLOCK_TOKENS
        assert command.offset == first % 48
        blocks += command.blocks
        world.finish(command)
    assert blocks == page_hashes(TOKENS, BLOCK_TOKENS, ROOT)
    assert world.store.gauges()["kv_store_queued_blocks"] == 0


def test_write_holds_a_small_part_of_the_pool_and_all_pages_before_it() -> None:
    world = World(pages=64)
    *_, sequence = world.insert(12 * BLOCK_TOKENS)
    world.pages.release(sequence)
    held = []
    while (command := world.next_write()) is not None:
        assert len(command.pages) == 8
        held.append(world.pages.held)
        world.finish(command)
    assert held == [8, 16, 24]


def test_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_store, "MOST_QUEUED", 4)
    world = World()
    _, _, grant = world.insert(64)
    for _ in range(3):
        inserted = InsertedPrefix()
        world.cache.insert(TOKENS[:64], grant.pages, inserted)
        world.store.offer(world.store.new_chain(), TOKENS, inserted)
    assert world.store.gauges()["kv_store_queued_blocks"] == 4
    assert world.counters["store_blocks_dropped"] == 4


def test_nothing_is_sent_to_a_store_that_does_not_answer() -> None:
    world = World()
    world.insert(64)
    command = world.next_write()
    assert command is not None
    world.insert(128)
    world.finish(command, "gone")
    assert world.counters["store_outages"] == 1
    assert world.next_write() is None
    world.insert(256)
    assert world.next_write() is None
    assert not world.load(256)
    world.store.advance(2.0)
    assert world.outbox.take_all() == [StorePing()]
    world.store.pinged(StorePinged(0), 2.0)
    assert world.load(256)


def test_load_has_the_blocks_behind_the_cached_pages() -> None:
    world = World()
    assert world.load(300, cached=48)
    command = world.take_load()
    assert command.blocks == tuple(page_hashes(TOKENS[:288], BLOCK_TOKENS, ROOT)[1:])
    assert (len(command.pages), command.offset, command.skip) == (16, 0, 16)


@pytest.mark.parametrize(
    ("page_size", "most", "loaded"), [(16, 299, 288), (64, 299, 256), (16, 100, 96), (48, 299, 288)]
)
def test_loaded_tokens_are_whole_pages_within_the_limit(page_size: int, most: int, loaded: int) -> None:
    world = World(page_size=page_size)
    assert world.load(300, most=most)
    command = world.take_load()
    result = world.store.loaded(StoreLoaded(0, command.number, len(command.blocks), 0.1), 0.0)
    assert result is not None
    assert (result.owner, result.tokens) == ("owner", loaded)


def test_ranks_agree_on_what_all_have_loaded() -> None:
    world = World(ranks=3)
    assert world.load(300)
    number = world.take_load().number
    assert world.store.loaded(StoreLoaded(0, number, 9, 0.1), 0.0) is None
    assert world.store.loaded(StoreLoaded(1, number, 4, 0.1, corrupt=2), 0.0) is None
    result = world.store.loaded(StoreLoaded(2, number, 7, 0.1), 0.0)
    assert result is not None
    assert result.tokens == 4 * BLOCK_TOKENS
    assert world.counters["store_corrupt_cells"] == 2


def test_short_rest_is_computed() -> None:
    world = World()
    assert not world.load(300, cached=240)
    assert not world.load(60)


def test_store_that_is_slower_than_the_model_is_tried_again_only_sometimes() -> None:
    world = World()
    assert world.load(300, rate=1000.0)
    world.store.loaded(StoreLoaded(0, world.take_load().number, 9, seconds=9.0), 0.0)
    asked = sum(world.load(300, rate=1000.0) for _ in range(32))
    assert asked == 2
    assert world.counters["store_skipped_as_slow"] == 30
    assert world.load(300, rate=10.0)
