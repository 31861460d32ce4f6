"""Holds of pages: who may still touch them.

Whoever may touch pages holds them: their owner, a copy, a verification, a scatter of a staged part, a remote writer.

Ranks run steps and page copies in the order of the commands, some time after the scheduler has sent them. A prefill
server writes pages without regard to that order. So a page that a command in flight may still read or write must not go
to a new prompt: when the last user has released pages, they are free once all commands sent so far are done.

The writer of an attempt that was given up holds its pages in quarantine. It has stopped when it reports so. When its
connection closes, bytes in flight may still arrive, so the pages stay for another `quarantine_s`.
"""

import collections
import dataclasses
import math

from ....memory.index_spaces import HotPage, KvPage
from ....memory.pages import PageAllocator, PageGrant
from ....transfer.protocol.messages import InstanceId, TransferKey
from ..requests.request import Attempt


@dataclasses.dataclass(slots=True)
class Quarantined:
    """The pages of an attempt that was given up. `release_at` is infinite until the writer is known to have stopped."""

    instance: InstanceId
    grant: PageGrant[KvPage]
    hot_grant: PageGrant[HotPage] | None
    """Of a hot buffer that the writer writes rows to (HiSparse)."""
    release_at: float = math.inf


class Holds:
    """Commands in flight and quarantined pages."""

    def __init__(self, allocator: PageAllocator[KvPage], quarantine_s: float = 0.0) -> None:
        self._allocator = allocator
        self._quarantine_s = quarantine_s
        self.issued = 0
        """The `command_id` of the last command that was sent."""
        self._completed = 0
        self._pending: collections.deque[tuple[int, PageGrant[KvPage]]] = collections.deque()
        """Grants that wait for commands to complete."""
        self.verifying: dict[TransferKey, PageGrant[KvPage]] = {}
        """Pages that the ranks verify, also of transfers that were given up meanwhile."""
        self.quarantined: dict[TransferKey, Quarantined] = {}

    @property
    def idle(self) -> bool:
        """No command and no verification is in flight, and no page is in quarantine."""
        in_order = self.issued == self._completed and not self._pending
        return in_order and not self.verifying and not self.quarantined

    @property
    def quarantined_pages(self) -> int:
        return sum(len(quarantined.grant.held) for quarantined in self.quarantined.values())

    @property
    def pending_grants(self) -> int:
        """Grants that wait for commands to complete."""
        return len(self._pending)

    def hold(self, grant: PageGrant[KvPage]) -> PageGrant[KvPage]:
        """Another user of these pages, which calls `release` when it has stopped."""
        self._allocator.hold(grant)
        return grant

    def release(self, grant: PageGrant[KvPage]) -> None:
        """A user has stopped. After the last one, the pages are free when the commands sent so far are done."""
        if grant.users == 1 and self.issued > self._completed:
            self._pending.append((self.issued, grant))
        else:
            self._allocator.release(grant)

    # -- commands, in order --------------------------------------------------------------------------------------

    def next_id(self) -> int:
        """The `command_id` of a command that is about to be sent."""
        self.issued += 1
        return self.issued

    def is_done(self, command_id: int) -> bool:
        """Whether all ranks have completed this command."""
        return command_id <= self._completed

    def completed(self, command_id: int) -> None:
        """All ranks have completed this command, and so every earlier one, reported or not."""
        assert command_id <= self.issued, f"command {command_id} is done, but only {self.issued} were sent"
        self._completed = max(self._completed, command_id)
        while self._pending and self._pending[0][0] <= self._completed:
            self._allocator.release(self._pending.popleft()[1])

    # -- remote writers, until they have stopped -----------------------------------------------------------------

    def quarantine(
        self, attempt: Attempt, grant: PageGrant[KvPage], hot_grant: PageGrant[HotPage] | None = None
    ) -> None:
        """The writer of this attempt, which was given up, may still write these pages."""
        self.quarantined[attempt.key] = Quarantined(attempt.instance, grant, hot_grant)

    def writer_stopped(self, key: TransferKey, *, late_writes: bool, now: float) -> None:
        """The writer issues no more writes; with `late_writes`, bytes may be in flight. Unknown keys are ignored.

        Only the first report counts. If a transfer fails before our Abort arrives, its TransferFailed may report late
        writes; the AbortAck that follows never does.
        """
        quarantined = self.quarantined.get(key)
        if quarantined is not None and quarantined.release_at == math.inf:
            quarantined.release_at = now + (self._quarantine_s if late_writes else 0.0)

    def writer_closed(self, instance: InstanceId, now: float) -> None:
        """The connection of this peer is closed: only bytes in kernel buffers may still arrive."""
        for quarantined in self.quarantined.values():
            if quarantined.instance == instance:
                quarantined.release_at = min(quarantined.release_at, now + self._quarantine_s)

    def resumed(self, absent_s: float, now: float) -> None:
        """This process did not run for `absent_s`: bytes that its kernel has received are still to be written."""
        for quarantined in self.quarantined.values():
            if quarantined.release_at < math.inf:
                quarantined.release_at = min(quarantined.release_at + absent_s, now + self._quarantine_s)

    def take_due(self, now: float) -> list[Quarantined]:
        """Remove and return the pages whose writer has stopped; the caller releases their grants."""
        due = [key for key, quarantined in self.quarantined.items() if quarantined.release_at <= now]
        return [self.quarantined.pop(key) for key in due]
