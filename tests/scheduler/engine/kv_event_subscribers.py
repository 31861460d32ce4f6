"""Subscribers of KV events for tests, and a cache for them to follow.

`Follower` is written from the format alone: it shares no code with the publisher.
"""

import random
import time
from collections.abc import Callable

import msgspec
import zmq

from pdserve.memory.index_spaces import KvPage
from pdserve.memory.page_hashes import page_hashes
from pdserve.memory.pages import PageAllocator
from pdserve.memory.prefix_cache import CachedPage, InsertedPrefix, PrefixCache
from pdserve.scheduler.engine.kv_events import CacheEvents
from pdserve.scheduler.store.stored_blocks import StoredBlocks

PAGE = 4
VOCAB = 3
PAGES = 120


class BusyCache:
    """A prefix cache with random sequences that share prefixes, evictions and, rarely, a flush."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.allocator = PageAllocator[KvPage](PAGES)
        self.cache = PrefixCache(self.allocator, PAGE)
        self.sequences: list[tuple[int, ...]] = [()]

    def change(self) -> None:
        draw = self.random
        if draw.random() < 0.0005:
            self.flush()
        known = draw.choice(self.sequences[-50:])
        new = tuple(draw.randrange(VOCAB) for _ in range(draw.randrange(1, 4) * PAGE))
        tokens = (known[: draw.randrange(len(known) + 1) // PAGE * PAGE] + new)[: 15 * PAGE]
        self.sequences.append(tokens)
        shared = self.cache.match(tokens, len(tokens))
        grant = self.allocator.grant("request", len(tokens) // PAGE - len(shared), shared=shared)
        assert grant is not None
        inserted = InsertedPrefix()
        self.cache.insert(tokens, grant.pages, inserted)
        self.inserted(tokens, self.cache.path(inserted))
        self.allocator.release(grant)

    def flush(self) -> None:
        self.cache.flush()

    def inserted(self, tokens: tuple[int, ...], path: list[CachedPage]) -> None:
        """Called when the pages of a sequence are in the cache."""

    def cached_tokens(self, tokens: tuple[int, ...]) -> int:
        return len(self.cache.match(tokens, len(tokens))) * PAGE


BLOCK = 2 * PAGE
"""Tokens of a block of the KV store; tests set it in `stored_blocks`."""


class StoringCache(BusyCache):
    """The same with a KV store that gets most of the pages, loses some of them, and fails, rarely."""

    def __init__(self, seed: int, events: CacheEvents) -> None:
        super().__init__(seed)
        self._stored = StoredBlocks(PAGE)
        self._stored.listen(self)
        self._events = events
        self._in_store: set[bytes] = set()

    def inserted(self, tokens: tuple[int, ...], path: list[CachedPage]) -> None:
        blocks = page_hashes(tokens[: len(path) * PAGE], BLOCK)
        action = self.random.random()
        if action < 0.5:
            self._stored.written(blocks, 0, path)
        elif action < 0.6:
            self._stored.lost(blocks[self.random.randrange(len(blocks) + 1) :])
        elif action < 0.601:
            self._stored.clear()

    def flush(self) -> None:
        self._stored.withdraw()
        super().flush()

    def longest(self, tokens: tuple[int, ...]) -> int:
        """Tokens of the cached prefix, and of those that follow it in the store."""
        cached = self.cached_tokens(tokens)
        pages = page_hashes(tokens, PAGE)[cached // PAGE :]
        missing = (number for number, page in enumerate(pages) if page not in self._in_store)
        return cached + next(missing, len(pages)) * PAGE

    def stored(self, parent: bytes, first: int, hashes: list[bytes], tokens: list[tuple[int, ...]]) -> None:
        self._in_store |= set(hashes)
        self._events.stored(parent, first, hashes, tokens)

    def removed(self, pages: list[bytes]) -> None:
        self._in_store -= set(pages)
        self._events.removed(pages)

    def cleared(self) -> None: ...


class Follower:
    """Follows the events of one server: the subset of a KV-aware router that tests need."""

    def __init__(
        self, port: int, replay_port: int, topic: bytes = b"", *, page_size: int = PAGE, medium: str | None = None
    ) -> None:
        """With `medium`, only blocks on this medium are followed."""
        self._page_size = page_size
        self._medium = medium
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.setsockopt(zmq.SUBSCRIBE, topic)
        self._events.connect(f"tcp://127.0.0.1:{port}")
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(f"tcp://127.0.0.1:{replay_port}")
        self.next_sequence = 0
        self.replayed = 0
        self.to_lose = 0
        """Batches that are lost on their way, from now on."""
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        """Parent and tokens of each block."""
        self.children: dict[tuple[int | None, tuple[int, ...]], int] = {}
        self.media: set[str] = set()
        self.ranks: set[int] = set()
        self.kinds: set[str] = set()

    def __enter__(self) -> "Follower":
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def follow(self, until: Callable[[], bool]) -> None:
        """Apply events until the condition holds. If none arrive, request a replay: the first batches may have been
        sent before the subscription.
        """
        ends_at = time.monotonic() + 60
        while not until():
            assert time.monotonic() < ends_at, f"not caught up at sequence {self.next_sequence}"
            if not self._events.poll(50):
                self.ask_again()
                continue
            _, number, payload = self._events.recv_multipart()
            sequence = int.from_bytes(number, "big")
            if self.to_lose:
                self.to_lose -= 1
            elif sequence > self.next_sequence:
                self.ask_again()
            elif sequence == self.next_sequence:
                self._apply(payload)

    def ask_again(self) -> None:
        """Request all batches from the next one on."""
        self._replay.send_multipart((b"", self.next_sequence.to_bytes(8, "big")))
        while True:
            assert self._replay.poll(60_000), "no answer to a replay request"
            empty, sequence, payload = self._replay.recv_multipart()
            assert empty == b""
            if not payload:
                assert sequence == b"\xff" * 8
                return
            self.replayed += 1
            assert int.from_bytes(sequence, "big") == self.next_sequence
            self._apply(payload)

    def cached_tokens(self, tokens: tuple[int, ...]) -> int:
        parent: int | None = None
        for start in range(0, len(tokens) - self._page_size + 1, self._page_size):
            parent = self.children.get((parent, tokens[start : start + self._page_size]))
            if parent is None:
                return start
        return len(tokens) // self._page_size * self._page_size

    def agrees_with(self, busy: BusyCache) -> bool:
        """Whether it has found the cached prefix of every sequence, and nothing else."""
        return len(self.blocks) == len(busy.cache) and all(
            self.cached_tokens(tokens) == busy.cached_tokens(tokens) for tokens in busy.sequences
        )

    def _apply(self, payload: bytes) -> None:
        self.next_sequence += 1
        at, events, rank = msgspec.msgpack.decode(payload)
        assert abs(at - time.time()) < 3600
        self.ranks.add(rank)
        for event in events:
            self.kinds.add(event[0])
            match event:
                case ["BlockStored", hashes, parent, tokens, block_size, None, medium]:
                    assert (block_size, len(tokens)) == (self._page_size, self._page_size * len(hashes))
                    self.media.add(medium)
                    if self._medium not in (None, medium):
                        continue
                    assert parent is None or parent in self.blocks
                    for number, block in enumerate(hashes):
                        place = parent, tuple(tokens[number * self._page_size : (number + 1) * self._page_size])
                        assert block not in self.blocks
                        self.blocks[block], self.children[place], parent = place, block, block
                case ["BlockRemoved", hashes, medium]:
                    assert medium in self.media
                    if self._medium not in (None, medium):
                        continue
                    for block in hashes:
                        del self.children[self.blocks.pop(block)]
                case ["AllBlocksCleared"]:
                    self.blocks.clear()
                    self.children.clear()
                case _:
                    raise AssertionError(event)
