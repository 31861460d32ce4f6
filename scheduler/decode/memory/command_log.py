"""What the ranks have been told and have not done yet, and the pages that rest until they have.

Ranks carry out steps and page copies in the order in which they are told, a moment later. A page that an order may
still touch must not go to a prompt that a prefill server then writes into: that writer does not wait in our line. So
pages are let go only when everything told before has been done.
"""

import collections

from ....memory.index_spaces import KvPage
from ....memory.pages import PageAllocator, PageGrant


class CommandLog:
    """Numbers orders, and releases grants when the orders before them are done."""

    def __init__(self, pages: PageAllocator[KvPage]) -> None:
        self._pages = pages
        self._told = 0
        self._done = 0
        self._resting: collections.deque[tuple[int, PageGrant[KvPage]]] = collections.deque()

    def __len__(self) -> int:
        """CommandLog under way."""
        return self._told - self._done

    @property
    def resting(self) -> int:
        """Grants that wait for orders to be done."""
        return len(self._resting)

    def next(self) -> int:
        """The number of an order that is about to be given."""
        self._told += 1
        return self._told

    def done(self, command_id: int) -> None:
        """All ranks have carried out this order, and with it every earlier one, whether reported yet or not."""
        assert command_id <= self._told, f"order {command_id} is done, but only {self._told} were given"
        self._done = max(self._done, command_id)
        while self._resting and self._resting[0][0] <= self._done:
            self._pages.release(self._resting.popleft()[1])

    def release(self, grant: PageGrant[KvPage]) -> None:
        """Release a grant as soon as nothing that was told can touch its pages."""
        if self._told > self._done:
            self._resting.append((self._told, grant))
        else:
            self._pages.release(grant)
