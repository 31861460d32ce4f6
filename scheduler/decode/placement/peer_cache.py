"""What a prefill server has cached, estimated from its reports and from the prompts that were sent to it.

Both are approximations: reports are late, and a prompt that was sent may not be computed. A wrong entry costs time, not
correctness: the prefill server looks up its own cache.
"""

from collections.abc import Sequence

from ....memory.page_hashes import unpack_hashes
from ....transfer.protocol.messages import CachedPrefixes

SENT_S = 10.0
"""A prompt that was sent counts as cached for this long, even if no report confirms it."""


class PeerCache:
    """The hashes of the cached pages of one prefill server (memory/page_hashes.py)."""

    def __init__(self) -> None:
        self.page_size: int | None = None
        """None before the first report."""
        self.version = 0
        """Changes with the content."""
        self._stride = 1
        self._ranks: dict[int, set[int]] = {}
        self._sent: dict[int, float] = {}
        """Pages that were sent and are not reported yet, and when they were sent."""
        self._forget_at = 0.0

    @property
    def ranks(self) -> int:
        """Data-parallel ranks of the server, each with a cache of its own."""
        return len(self._ranks) or 1

    @property
    def stored_tokens(self) -> int:
        """Tokens in its cache."""
        return (sum(map(len, self._ranks.values())) + len(self._sent)) * self._stride * (self.page_size or 0)

    def report(self, report: CachedPrefixes) -> None:
        """Take a report of the server, or of one of its data-parallel ranks."""
        self.page_size, self._stride = max(1, report.page_size), max(1, report.stride)
        pages = self._ranks.setdefault(report.dp_rank, set())
        if report.reset:
            pages.clear()
            self._sent.clear()
        removed = unpack_hashes(report.removed)
        pages.difference_update(removed)
        added = unpack_hashes(report.added)
        pages.update(added)
        for page in (*removed, *added):
            self._sent.pop(page, None)
        self.version += 1

    def sent(self, hashes: Sequence[int], cached_tokens: int, now: float) -> None:
        """A prompt with these pages was sent to the server, which has `cached_tokens` of it."""
        assert self.page_size is not None, "a server without reports has unknown pages"
        if now >= self._forget_at:
            self._forget_at = now + SENT_S
            self._sent = {page: at for page, at in self._sent.items() if now - at < SENT_S}
        first_new = cached_tokens // self.page_size
        self._sent |= dict.fromkeys(hashes[first_new + self._stride - 1 :: self._stride], now)
        self.version += 1

    def cached_tokens(self, hashes: Sequence[int], most_tokens: int) -> int:
        """Tokens of the longest cached prefix of a prompt with these pages, at most `most_tokens`.

        Pages are evicted before the pages that they build on, so the end of the prefix is found by bisection. With
        sliding windows the first pages may be evicted earlier: then the result is an estimate.
        """
        if self.page_size is None:
            return 0
        step = self._stride
        low, high = 0, min(len(hashes), most_tokens // self.page_size) // step
        while low < high:
            middle = (low + high + 1) // 2
            if self._has(hashes[middle * step - 1]):
                low = middle
            else:
                high = middle - 1
        return low * step * self.page_size

    def _has(self, page: int) -> bool:
        return page in self._sent or any(page in pages for pages in self._ranks.values())
