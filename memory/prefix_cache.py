"""Prefix cache: a tree over full pages of tokens that finds the pages with the KV of a prompt's prefix.

A node is one page; its path from the root spells the tokens whose KV the pages hold. Only full pages are in the tree:
they are not written again, so any number of requests may read them. The cache owns no memory: it asks the allocator to
keep pages after their last release, and drops them, least recently used first, when the allocator evicts them.

If all layers of the model have a sliding window, a sequence releases its first pages before the others. When such a
page is evicted, or was never cached, its node stays without a page, as long as later pages of a sequence are cached. A
prefix is found if the pages that the token after it sees are cached.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ..common.arithmetic import ceil_div
from .index_spaces import KvPage
from .page_hashes import ROOT, page_hash
from .pages import PageAllocator, first_visible_page

SIBLINGS_COMPARED = 64
"""Children of a node, the latest ones, that are compared with the rest of a prompt for a hit inside a page."""
LEAST_SHARE = 4
"""A page is copied for its first tokens if these are at least this part of it: a quarter."""


class PartialPage(NamedTuple):
    """A cached page whose first `tokens` tokens continue a prefix."""

    page: KvPage
    tokens: int


class CacheListener(Protocol):
    """Follows the content of a cache, or of the KV store. Pages are named by their chained hashes (page_hashes.py)."""

    def stored(self, parent: bytes, first: int, hashes: list[bytes], tokens: list[tuple[int, ...]]) -> None:
        """Pages were added, in order, behind `parent`: pages number `first`, `first` + 1, ... of a sequence."""

    def removed(self, pages: list[bytes]) -> None:
        """Pages were evicted."""

    def cleared(self) -> None:
        """All pages were removed."""


@dataclass(slots=True, eq=False)
class CachedPage:
    """One cached page and its tokens."""

    tokens: tuple[int, ...]
    page: KvPage
    parent: "CachedPage | None"
    children: "dict[tuple[int, ...], CachedPage]" = field(default_factory=dict)
    hash: bytes = b""
    """Hash of the page and all pages before it; empty while there is no listener."""
    cached: bool = False
    """If False, `page` is a placeholder: only later pages are cached."""
    removed: bool = False
    """It is not in the tree any more."""


@dataclass(slots=True, eq=False)
class InsertedPrefix:
    """How many pages of a sequence are in the tree, so that `insert` continues there. The sequence holds its pages."""

    pages: int = 0
    node: CachedPage | None = None
    flushes: int = 0
    complete: bool = False
    """The rest is not added: another page with the same prefix is cached, or the cache is disabled."""

    def continue_at(self, other: "InsertedPrefix") -> None:
        """Continue where `other` is, if that is further. It is the prefix of a sequence in the same pages."""
        if other.pages > self.pages:
            self.pages, self.node, self.flushes, self.complete = other.pages, other.node, other.flushes, other.complete


class PrefixCache:
    """The prefixes in the pages of one allocator. A disabled cache is always empty."""

    def __init__(
        self, allocator: PageAllocator[KvPage], page_size: int, *, enabled: bool = True, window: int | None = None
    ) -> None:
        """`window` is the sliding window if all layers have one."""
        self._allocator = allocator
        self._page_size = page_size
        self._window = window
        self._enabled = enabled
        self._roots: dict[tuple[int, ...], CachedPage] = {}
        self._nodes: dict[KvPage, CachedPage] = {}
        self._flushes = 0
        self._listeners: tuple[CacheListener, ...] = ()
        allocator.on_evict = self._evicted

    def __len__(self) -> int:
        return len(self._nodes)

    def listen(self, listener: CacheListener) -> None:
        """Report changes to `listener` from now on, beginning with what is cached. Without listeners, no page is
        hashed.
        """
        waiting = [(ROOT, 0, node) for node in self._roots.values()]
        while waiting:
            parent, number, node = waiting.pop()
            node.hash = node.hash or page_hash(parent, node.tokens)
            if node.cached:
                listener.stored(parent, number, [node.hash], [node.tokens])
            waiting += [(node.hash, number + 1, child) for child in node.children.values()]
        self._listeners += (listener,)

    def match(self, tokens: Sequence[int], most_tokens: int, needed_from: int | None = None) -> list[KvPage]:
        """The pages of the longest cached prefix of at most `most_tokens` tokens, in order.

        With a window, pages that the token after the prefix does not see are placeholders, but all pages from number
        `needed_from` on are cached. The next grant may evict cached pages unless it shares them.
        """
        found: list[KvPage] = []
        children = self._roots
        complete = run = 0  # pages of the longest usable prefix; the first page behind the last placeholder
        for count, key in enumerate(self._keys(tokens, most_tokens), 1):
            node = children.get(key)
            if node is None:
                break
            found.append(node.page)
            children = node.children
            if not node.cached:
                run = count
            if not run or run <= self.first_needed(count, needed_from):
                complete = count
        return found[:complete]

    def after(self, prefix: Sequence[KvPage]) -> InsertedPrefix:
        """Where `insert` continues for a sequence that shares `prefix`, the result of `match`."""
        node = self._nodes.get(prefix[-1]) if prefix else None
        return InsertedPrefix() if node is None else InsertedPrefix(len(prefix), node, self._flushes)

    def first_needed(self, prefix_pages: int, needed_from: int | None = None) -> int:
        """The first page that the token after `prefix_pages` pages sees, or `needed_from` if that is less."""
        first = first_visible_page(prefix_pages * self._page_size, self._window, self._page_size)
        return first if needed_from is None else min(first, needed_from)

    def match_within(self, tokens: Sequence[int], prefix: Sequence[KvPage], most_tokens: int) -> PartialPage | None:
        """A cached page that begins with the tokens after `prefix`, the result of `match`; None if no page has enough
        of them. It cannot be shared, because its other tokens differ, but its first rows can be copied.
        """
        start = len(prefix) * self._page_size
        wanted = tuple(tokens[start : min(start + self._page_size, most_tokens)])
        children = self._nodes[prefix[-1]].children if prefix else self._roots
        least = ceil_div(self._page_size, LEAST_SHARE)
        if len(wanted) < least:
            return None
        begin = wanted[:least]
        best: PartialPage | None = None
        for node in itertools.islice(reversed(children.values()), SIBLINGS_COMPARED):
            if not node.cached or node.tokens[:least] != begin:
                continue
            same = common_prefix(node.tokens, wanted)
            if best is None or same > best.tokens:
                best = PartialPage(node.page, same)
        return best

    def insert(
        self,
        tokens: Sequence[int],
        pages: Sequence[KvPage],
        inserted: InsertedPrefix | None = None,
        *,
        end: int | None = None,
        freed: int = 0,
    ) -> None:
        """Add the full pages among `pages`, which the caller holds and which have the KV of `tokens` (of those before
        `end`). Pages that `inserted` counts are skipped; it is updated. The first `freed` pages are not held.

        If another page with the same prefix is cached already, that page stays, and the rest of `pages` is not added: a
        page in use must have its parent in use, because eviction takes leaves first.
        """
        inserted = inserted or InsertedPrefix()
        if inserted.flushes != self._flushes or (inserted.node is not None and inserted.node.removed):
            inserted.pages, inserted.node, inserted.complete = 0, None, False
            inserted.flushes = self._flushes
        end = len(tokens) if end is None else min(end, len(tokens))
        inserted.complete |= not self._enabled
        if inserted.complete or end // self._page_size <= freed:
            return
        added: list[CachedPage] = []
        keys = self._keys(tokens, end, inserted.pages)
        for key, page in zip(keys, itertools.islice(pages, inserted.pages, None), strict=False):
            held = inserted.pages >= freed
            node = self._child(inserted.node, key, page)
            if held and node.cached and node.page != page:
                inserted.complete = True
                break
            if held and not node.cached:
                node.page, node.cached = page, True
                self._nodes[page] = node
                self._allocator.keep(page)
                added.append(node)
            elif added:
                self._report(added, inserted.pages - len(added))
                added = []
            inserted.node = node
            inserted.pages += 1
        self._report(added, inserted.pages - len(added))

    def _child(self, parent: CachedPage | None, key: tuple[int, ...], page: KvPage) -> CachedPage:
        """The node of a page, which is made without a cached page if there is none."""
        children = self._roots if parent is None else parent.children
        node = children.get(key)
        if node is None:
            node = children[key] = CachedPage(key, page, parent)
            if self._listeners:
                node.hash = page_hash(parent.hash if parent is not None else ROOT, key)
        return node

    def path(self, inserted: InsertedPrefix) -> list[CachedPage]:
        """The inserted pages of a sequence, in order."""
        found: list[CachedPage] = []
        node = inserted.node
        while node is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    def holds(self, cached: CachedPage) -> bool:
        """Whether a page is still cached, with the same tokens."""
        return self._nodes.get(cached.page) is cached

    def flush(self) -> int:
        """Remove all pages; those in use are freed when their requests end. Returns how many were cached."""
        for page in self._nodes:
            self._allocator.forget(page)
        count = len(self._nodes)
        self._nodes.clear()
        self._roots.clear()
        self._flushes += 1
        for listener in self._listeners:
            listener.cleared()
        return count

    def _keys(self, tokens: Sequence[int], most_tokens: int, first: int = 0) -> Iterator[tuple[int, ...]]:
        """The tokens of each full page, from page `first` on."""
        end = min(len(tokens), most_tokens)
        for start in range(first * self._page_size, end - self._page_size + 1, self._page_size):
            yield tuple(tokens[start : start + self._page_size])

    def _evicted(self, page: KvPage) -> None:
        node = self._nodes.pop(page)
        assert self._window is not None or not node.children, f"page {page} was evicted before its children"
        node.cached = False
        for listener in self._listeners:
            listener.removed([node.hash])
        self._prune(node)

    def _prune(self, node: CachedPage | None) -> None:
        """Remove a node without a page, and such nodes before it, if no later page is cached."""
        while node is not None and not node.cached and not node.children:
            node.removed = True
            siblings = node.parent.children if node.parent is not None else self._roots
            del siblings[node.tokens]
            node = node.parent

    def _report(self, added: list[CachedPage], first: int) -> None:
        """Report new pages, each of which is the parent of the next."""
        if not added or not self._listeners:
            return
        parent = added[0].parent
        hashes, tokens = [node.hash for node in added], [node.tokens for node in added]
        for listener in self._listeners:
            listener.stored(parent.hash if parent is not None else ROOT, first, hashes, tokens)


def common_prefix(first: Sequence[int], second: Sequence[int], most: int | None = None) -> int:
    """Length of the common prefix of two sequences of the same type, `most` at most. Compares slices, which is faster
    than tokens one by one.
    """
    low, high = 0, min(len(first), len(second))
    high = high if most is None else min(high, most)
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
