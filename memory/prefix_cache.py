"""Prefix cache: a tree over full pages of tokens that finds the pages with the KV of a prompt's prefix.

A node is one page; its path from the root spells the tokens whose KV the pages hold. Only full pages are in the tree:
they are not written again, so any number of requests may read them. The cache owns no memory: it asks the allocator to
keep pages after their last release, and drops them, least recently used first, when the allocator evicts them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .index_spaces import KvPage
from .pages import PageAllocator


@dataclass(slots=True, eq=False)
class _Node:
    """One cached page and its tokens."""

    tokens: tuple[int, ...]
    page: KvPage
    parent: "_Node | None"
    children: "dict[tuple[int, ...], _Node]" = field(default_factory=dict)


class PrefixCache:
    """The prefixes in the pages of one allocator. A disabled cache is always empty."""

    def __init__(self, pages: PageAllocator[KvPage], page_size: int, *, enabled: bool = True) -> None:
        self._pages = pages
        self._page_size = page_size
        self._enabled = enabled
        self._roots: dict[tuple[int, ...], _Node] = {}
        self._nodes: dict[KvPage, _Node] = {}
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

    def insert(self, tokens: Sequence[int], pages: Sequence[KvPage]) -> None:
        """Add the full pages among `pages`, which the caller holds and which have the KV of `tokens`.

        If another page with the same prefix is cached already, that one stays and the rest is not added: a page in use
        must have its parent in use, because eviction takes leaves first.
        """
        if not self._enabled:
            return
        parent: _Node | None = None
        children = self._roots
        for key, page in zip(self._keys(tokens, len(tokens)), pages, strict=False):
            node = children.get(key)
            if node is None:
                node = children[key] = self._nodes[page] = _Node(key, page, parent)
                self._pages.keep(page)
            elif node.page != page:
                return
            parent, children = node, node.children

    def flush(self) -> int:
        """Remove all pages; those in use are freed when their requests end. Returns how many were cached."""
        for page in self._nodes:
            self._pages.forget(page)
        count = len(self._nodes)
        self._nodes.clear()
        self._roots.clear()
        return count

    def _keys(self, tokens: Sequence[int], most_tokens: int) -> Iterator[tuple[int, ...]]:
        end = min(len(tokens), most_tokens)
        for start in range(0, end - self._page_size + 1, self._page_size):
            yield tuple(tokens[start : start + self._page_size])

    def _evicted(self, page: KvPage) -> None:
        node = self._nodes.pop(page)
        assert not node.children, f"page {page} was evicted before its children"
        siblings = node.parent.children if node.parent is not None else self._roots
        del siblings[node.tokens]
