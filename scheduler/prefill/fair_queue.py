"""Transfers in line on prefill, for pages or for a place in the next step: the higher priority first, then who came
first; but nobody is passed for ever.
"""

import bisect
import collections
from collections.abc import Collection, Iterator

from .request import PrefillRequest

MAX_OVERTAKES = 16
"""How many turns the one that has waited longest lets pass to others; the next one is its own."""


class FairQueue:
    """A line in the order of precedence. Those of one priority stay in the order in which they came."""

    def __init__(self) -> None:
        self._in_order: list[PrefillRequest] = []
        self._by_arrival: collections.OrderedDict[PrefillRequest, None] = collections.OrderedDict()
        self._overtaken = 0
        """Turns that others have had since the oldest had one, or became the oldest."""

    def __len__(self) -> int:
        return len(self._in_order)

    def __contains__(self, transfer: PrefillRequest) -> bool:
        return transfer in self._by_arrival

    def __iter__(self) -> Iterator[PrefillRequest]:
        """Whose turn it is first; only `turn`, `push` and `remove` change the order."""
        if not self.oldest_is_due:
            yield from self._in_order
            return
        oldest = self._oldest
        yield oldest
        yield from (transfer for transfer in self._in_order if transfer is not oldest)

    @property
    def oldest_is_due(self) -> bool:
        """Others have passed the oldest often enough: it comes first, whatever its priority."""
        return self._overtaken >= MAX_OVERTAKES

    @property
    def first(self) -> PrefillRequest:
        """Whose turn it is; there is somebody."""
        return next(iter(self))

    def push(self, transfer: PrefillRequest) -> None:
        self._by_arrival[transfer] = None
        bisect.insort(self._in_order, transfer, key=_precedence)

    def turn(self, transfers: Collection[PrefillRequest]) -> None:
        """These had a turn, and stay in line."""
        self._overtaken = 0 if self._oldest in transfers else self._overtaken + 1

    def take(self, transfer: PrefillRequest) -> None:
        """It has its turn and leaves."""
        self.turn((transfer,))
        self.remove(transfer)

    def remove(self, transfer: PrefillRequest) -> None:
        """It has to be here."""
        if transfer is self._oldest:
            self._overtaken = 0
        del self._by_arrival[transfer]
        place = bisect.bisect_left(self._in_order, _precedence(transfer), key=_precedence)
        del self._in_order[self._in_order.index(transfer, place)]

    @property
    def _oldest(self) -> PrefillRequest:
        return next(iter(self._by_arrival))


def _precedence(transfer: PrefillRequest) -> int:
    return -transfer.priority
