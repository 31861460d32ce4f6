"""Prefix cache: a tree over full pages of tokens that finds the pages with the KV of a prompt's prefix.

A node is one page; its path from the root spells the tokens whose KV the pages hold. Only full pages are in the tree:
they are not written again, so any number of requests may read them. The cache owns no memory: it asks the allocator to
keep pages after their last release, and drops them, least recently used first, when the allocator evicts them.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .index_spaces import KvPage
from .pages import PageAllocator

SIBLINGS_COMPARED = 64
"""Children of a node, the latest ones, that are compared with the rest of a prompt for a hit inside a page."""
LEAST_SHARE = 4
"""A page is copied for its first tokens if these are at least this part of it: a quarter."""


class PartialPage(NamedTuple):
    """A cached page whose first `tokens` tokens continue a prefix."""

    page: KvPage
    tokens: int


@dataclass(slots=True, eq=False)
class _Node:
    """One cached page and its tokens."""

    tokens: tuple[int, ...]
    page: KvPage
    parent: "_Node | None"
    children: "dict[tuple[int, ...], _Node]" = field(default_factory=dict)


CachedPage = _Node
"""A page in the tree, for `PrefixCache.holds`."""


class InsertedPrefix:
    """How many pages of a sequence are in the tree, so that `insert` continues there. The sequence holds its pages."""

    def __init__(self) -> None:
        self.pages = 0
        self.node: _Node | None = None
        self.flushes = 0
        self.complete = False
        """Another page with the same prefix is cached: the rest is not added."""


class PrefixCache:
    """The prefixes in the pages of one allocator. A disabled cache is always empty."""

    def __init__(self, pages: PageAllocator[KvPage], page_size: int, *, enabled: bool = True) -> None:
        self._pages = pages
        self._page_size = page_size
        self._enabled = enabled
        self._roots: dict[tuple[int, ...], _Node] = {}
        self._nodes: dict[KvPage, _Node] = {}
        self._flushes = 0
        pages.on_evict = self._evicted

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, tokens: Sequence[int], most_tokens: int) -> list[KvPage]:
        """The pages of the longest cached prefix of at most `most_tokens` tokens, in order.

        The next grant may evict them unless it shares them.
        """
        found: list[KvPage] = []
        children = self._roots
        for key in self._keys(tokens, most_tokens):
            node = children.get(key)
            if node is None:
                break
            found.append(node.page)
            children = node.children
        return found

    def match_within(self, tokens: Sequence[int], prefix: Sequence[KvPage], most_tokens: int) -> PartialPage | None:
        """A cached page that begins with the tokens behind `prefix`, the result of `match`; None if no page has enough
        of them. It cannot be shared, because its other tokens differ, but its first rows can be copied.
        """
        start = len(prefix) * self._page_size
        wanted = tuple(tokens[start : min(start + self._page_size, most_tokens)])
        children = self._nodes[prefix[-1]].children if prefix else self._roots
        best: PartialPage | None = None
        for node in itertools.islice(reversed(children.values()), SIBLINGS_COMPARED):
            same = _common(node.tokens, wanted)
            if same * LEAST_SHARE >= self._page_size and (best is None or same > best.tokens):
                best = PartialPage(node.page, same)
        return best

    def insert(
        self,
        tokens: Sequence[int],
        pages: Sequence[KvPage],
        inserted: InsertedPrefix | None = None,
        *,
        end: int | None = None,
    ) -> None:
        """Add the full pages among `pages`, which the caller holds and which have the KV of `tokens` (of those before
        `end`). Pages that `inserted` counts are skipped; it is updated.

        If another page with the same prefix is cached already, that one stays and the rest is not added: a page in use
        must have its parent in use, because eviction takes leaves first.
        """
        inserted = inserted or InsertedPrefix()
        if inserted.flushes != self._flushes:
            inserted.pages, inserted.node, inserted.complete = 0, None, False
            inserted.flushes = self._flushes
        if not self._enabled or inserted.complete:
            return
        first = inserted.pages
        keys = self._keys(tokens, len(tokens) if end is None else end, first)
        for key, page in zip(keys, itertools.islice(pages, first, None), strict=False):
            parent = inserted.node
            children = self._roots if parent is None else parent.children
            node = children.get(key)
            if node is None:
                node = children[key] = self._nodes[page] = _Node(key, page, parent)
                self._pages.keep(page)
            elif node.page != page:
                inserted.complete = True
                return
            inserted.node = node
            inserted.pages += 1

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
            self._pages.forget(page)
        count = len(self._nodes)
        self._nodes.clear()
        self._roots.clear()
        self._flushes += 1
        return count

    def _keys(self, tokens: Sequence[int], most_tokens: int, first: int = 0) -> Iterator[tuple[int, ...]]:
        """The tokens of each full page, from page `first` on."""
        end = min(len(tokens), most_tokens)
        for start in range(first * self._page_size, end - self._page_size + 1, self._page_size):
            yield tuple(tokens[start : start + self._page_size])

    def _evicted(self, page: KvPage) -> None:
        node = self._nodes.pop(page)
        assert not node.children, f"page {page} was evicted before its children"
        siblings = node.parent.children if node.parent is not None else self._roots
        del siblings[node.tokens]


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix."""
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return min(len(first), len(second))
