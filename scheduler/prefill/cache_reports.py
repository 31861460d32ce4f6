"""Reports to decode servers what this server has cached, so that they send prompts where their prefix is.

A decode server that asks for it gets the whole content once, and the changes a few times a second.
"""

from collections.abc import Collection

from ...common.arithmetic import ceil_div
from ...memory.page_hashes import pack_short_hashes
from ...memory.prefix_cache import PrefixCache
from ...transfer.protocol.messages import CachedPrefixes, InstanceId
from ..messages.effects import Outbox, SendToPeer

INTERVAL_S = 0.2
"""Time between two reports. It need not be shorter: decode assumes without a report that prompts it has sent are
cached.
"""
MOST_HASHES = 1 << 16
"""Most pages that are reported. For a larger pool, only every n-th page of a sequence is reported."""
HASHES_PER_MESSAGE = 1 << 13
"""64 KiB."""


class CacheReports:
    """Listens to a prefix cache, from the first subscription on."""

    def __init__(self, cache: PrefixCache, page_size: int, num_pages: int, dp_rank: int, outbox: Outbox) -> None:
        self._cache = cache
        self._page_size = page_size
        self._stride = ceil_div(num_pages, MOST_HASHES)
        self._dp_rank = dp_rank
        self._outbox = outbox
        self._listens = False
        self._peers: set[InstanceId] = set()
        self._cached: set[bytes] = set()
        self._added: set[bytes] = set()
        self._removed: set[bytes] = set()
        self._reset = False
        self._due_at = 0.0

    def subscribe(self, instance: InstanceId) -> None:
        """Report to this decode server from now on. Repeated calls have no effect."""
        if instance in self._peers:
            return
        if not self._listens:
            self._listens = True
            self._cache.listen(self)
        self._send_changes()  # so that later changes are relative to the same state for all subscribers
        self._peers.add(instance)
        self._send([instance], self._cached, (), reset=True)

    def unsubscribe(self, instance: InstanceId) -> None:
        self._peers.discard(instance)

    def due(self, now: float) -> None:
        """Send what has changed, if the interval has passed. Call once per loop turn."""
        if now >= self._due_at and (self._added or self._removed or self._reset):
            self._due_at = now + INTERVAL_S
            self._send_changes()

    def _send_changes(self) -> None:
        self._send(self._peers, self._added, self._removed, reset=self._reset)
        self._added, self._removed, self._reset = set(), set(), False

    # -- CacheListener -----------------------------------------------------------------------------------------

    def stored(self, parent: bytes, first: int, hashes: list[bytes], tokens: list[tuple[int, ...]]) -> None:  # noqa: ARG002
        skipped = -(first + 1) % self._stride
        for page in hashes[skipped :: self._stride]:
            self._cached.add(page)
            if page in self._removed:
                self._removed.remove(page)
            else:
                self._added.add(page)

    def removed(self, pages: list[bytes]) -> None:
        for page in pages:
            if page not in self._cached:
                continue  # not reported: only every `_stride`-th page is
            self._cached.remove(page)
            if page in self._added:
                self._added.remove(page)
            else:
                self._removed.add(page)

    def cleared(self) -> None:
        for pages in (self._cached, self._added, self._removed):
            pages.clear()
        self._reset = True

    def _send(
        self, peers: Collection[InstanceId], added: Collection[bytes], removed: Collection[bytes], *, reset: bool
    ) -> None:
        """Send a report, in messages of limited size: removed pages first, then added ones. No page is in both."""
        parts = [(b"", part) for part in _parts(removed)] + [(part, b"") for part in _parts(added)]
        for number, (new, old) in enumerate(parts or [(b"", b"")]):
            message = CachedPrefixes(
                self._dp_rank, self._page_size, self._stride, new, old, reset=reset and number == 0
            )
            for instance in peers:
                self._outbox.append(SendToPeer(instance, message))


def _parts(hashes: Collection[bytes]) -> list[bytes]:
    packed, size = pack_short_hashes(hashes), 8 * HASHES_PER_MESSAGE
    return [packed[start : start + size] for start in range(0, len(packed), size)]
