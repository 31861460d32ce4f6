"""What a server expects to be in the KV store: the blocks that it has written or found there. Pure.

The store evicts without notice, so this is a hint: a block may be gone. It is forgotten when a load does not find it,
and with all others when the store fails.
"""

import itertools
from collections.abc import Sequence

from ...memory.page_hashes import ROOT
from ...memory.prefix_cache import CachedPage, CacheListener
from ...transfer.store.blocks import BLOCK_TOKENS

MOST_BLOCKS = 1 << 17
"""Blocks that are remembered; those that were not used for the longest time are forgotten. About 4 million tokens."""


class StoredBlocks:
    """The hashes of the blocks, the least recently used first. Pages are reported if there is a listener."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._blocks: dict[bytes, tuple[bytes, ...]] = {}
        """For each block: the reported pages that have tokens in it. Some may have been removed since."""
        self._reported: set[bytes] = set()
        self._listener: CacheListener | None = None

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: bytes) -> bool:
        return block in self._blocks

    def listen(self, listener: CacheListener) -> None:
        """Report pages that are written from now on. The prefix cache needs a listener too, because their hashes come
        from it.
        """
        self._listener = listener

    def found(self, blocks: Sequence[bytes]) -> None:
        """These blocks are in the store."""
        for block in blocks:
            self._blocks[block] = self._blocks.pop(block, ())
        if len(self._blocks) > MOST_BLOCKS:
            self.lost(list(itertools.islice(self._blocks, len(self._blocks) - MOST_BLOCKS)))

    def written(self, blocks: Sequence[bytes], first: int, path: Sequence[CachedPage]) -> None:
        """The blocks of a sequence from number `first` on are in the store; `blocks` has those before them too. `path`
        are its pages.
        """
        self.found(blocks[first:])
        if self._listener is None:
            return
        size = self._page_size
        new: list[int] = []  # numbers of adjacent pages to report
        for number in range(first * BLOCK_TOKENS // size, len(blocks) * BLOCK_TOKENS // size):
            page = path[number]
            of_page = blocks[number * size // BLOCK_TOKENS : ((number + 1) * size - 1) // BLOCK_TOKENS + 1]
            if page.hash in self._reported or not all(block in self._blocks for block in of_page):
                continue
            if number and path[number - 1].hash not in self._reported:
                continue  # subscribers keep a tree of pages, and could not place one without its parent
            if new and new[-1] != number - 1:
                self._report(path, new)
                new = []
            for block in of_page:
                if page.hash not in self._blocks[block]:
                    self._blocks[block] += (page.hash,)
            self._reported.add(page.hash)
            new.append(number)
        if new:
            self._report(path, new)

    def lost(self, blocks: Sequence[bytes]) -> None:
        """These blocks are not in the store, or cannot be used because one before them is not there."""
        pages = dict.fromkeys(page for block in blocks for page in self._blocks.pop(block, ()))
        self._remove([page for page in pages if page in self._reported])

    def clear(self) -> None:
        """Nothing is expected to be in the store any more."""
        self._blocks.clear()
        self._remove(list(self._reported))

    def withdraw(self) -> None:
        """Report all pages as removed. Blocks are still expected in the store; their pages are reported again when they
        are written again.
        """
        if self._reported:
            self._blocks = dict.fromkeys(self._blocks, ())
            self._remove(list(self._reported))

    def _report(self, path: Sequence[CachedPage], numbers: Sequence[int]) -> None:
        """Report these adjacent pages of a sequence."""
        assert self._listener is not None, "pages are reported without a listener"
        first, pages = numbers[0], [path[number] for number in numbers]
        hashes, tokens = [page.hash for page in pages], [page.tokens for page in pages]
        self._listener.stored(path[first - 1].hash if first else ROOT, first, hashes, tokens)

    def _remove(self, pages: list[bytes]) -> None:
        self._reported.difference_update(pages)
        if pages and self._listener is not None:
            self._listener.removed(pages)
