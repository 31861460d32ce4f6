"""Holds of pages: by their users, and by the commands that the ranks have not completed yet.

Whoever may touch pages holds them: their owner, a copy, a verification, a scatter of a staged part, a remote writer.

Ranks run steps and page copies in the order of the commands, some time after the scheduler has sent them. A prefill
server writes pages without regard to that order. So a page that a command in flight may still read or write must not go
to a new prompt: when the last user has released pages, they are free once all commands sent so far are done.
"""

import collections

from ....memory.index_spaces import KvPage
from ....memory.pages import PageAllocator, PageGrant


class CommandLog:
    """Numbers commands, and holds page grants until the commands before their release are done."""

    def __init__(self, pages: PageAllocator[KvPage]) -> None:
        self._pages = pages
        self.issued = 0
        """The `command_id` of the last command that was sent."""
        self._completed = 0
        self._pending: collections.deque[tuple[int, PageGrant[KvPage]]] = collections.deque()

    def __len__(self) -> int:
        """Commands in flight."""
        return self.issued - self._completed

    def is_done(self, command_id: int) -> bool:
        """Whether all ranks have completed this command."""
        return command_id <= self._completed

    @property
    def pending_grants(self) -> int:
        """Grants that wait for commands to complete."""
        return len(self._pending)

    def next_id(self) -> int:
        """The `command_id` of a command that is about to be sent."""
        self.issued += 1
        return self.issued

    def completed(self, command_id: int) -> None:
        """All ranks have completed this command, and so every earlier one, reported or not."""
        assert command_id <= self.issued, f"command {command_id} is done, but only {self.issued} were sent"
        self._completed = max(self._completed, command_id)
        while self._pending and self._pending[0][0] <= self._completed:
            self._pages.release(self._pending.popleft()[1])

    def hold(self, grant: PageGrant[KvPage]) -> PageGrant[KvPage]:
        """Another user of these pages, which calls `release` when it has stopped."""
        self._pages.hold(grant)
        return grant

    def release(self, grant: PageGrant[KvPage]) -> None:
        """A user has stopped. After the last one, the pages are free when the commands sent so far are done."""
        if grant.users == 1 and self.issued > self._completed:
            self._pending.append((self.issued, grant))
        else:
            self._pages.release(grant)
