"""Quarantine: the holds of remote writers, of the pages of attempts that were given up, until they have stopped."""

import dataclasses
import math

from ....memory.index_spaces import HotPage, KvPage
from ....memory.pages import PageGrant
from ....transfer.protocol.messages import InstanceId, TransferKey
from ..requests.request import Prompt


@dataclasses.dataclass(slots=True)
class QuarantinedPages:
    """The pages of an attempt that was given up. `release_at` is infinite until the writer is known to have stopped."""

    key: TransferKey
    instance: InstanceId
    grant: PageGrant[KvPage]
    release_at: float
    hot_grant: PageGrant[HotPage] | None = None
    """Of a hot buffer that the writer writes rows to (HiSparse)."""


class Quarantine:
    """All quarantined pages of a decode server. A writer has stopped when it reports so. When its connection closes,
    bytes in flight may still arrive, so the pages stay for another `quarantine_s`.
    """

    def __init__(self, quarantine_s: float) -> None:
        self._quarantine_s = quarantine_s
        self._pages: dict[TransferKey, QuarantinedPages] = {}

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def pages(self) -> int:
        return sum(len(quarantined.grant.held) for quarantined in self._pages.values())

    @property
    def hot_pages(self) -> int:
        grants = (quarantined.hot_grant for quarantined in self._pages.values())
        return sum(len(grant.pages) for grant in grants if grant is not None)

    def put(self, prompt: Prompt, hot_grant: PageGrant[HotPage] | None = None) -> None:
        """Quarantine the pages of the prompt's attempt, and of its hot buffer, which its writer may still write."""
        attempt, grant = prompt.attempt, prompt.grant
        assert attempt is not None, f"prompt {prompt.prompt_id} has no attempt to quarantine"
        assert grant is not None, f"prompt {prompt.prompt_id} has no pages to quarantine"
        self._pages[attempt.key] = QuarantinedPages(attempt.key, attempt.instance, grant, math.inf, hot_grant)
        prompt.grant = None

    def writer_stopped(self, key: TransferKey, *, late_writes: bool, now: float) -> None:
        """The writer issues no more writes; with `late_writes`, bytes may be in flight. Unknown keys are ignored.

        Only the first report counts. If a transfer fails before our Abort arrives, its TransferFailed may report late
        writes; the AbortAck that follows never does.
        """
        quarantined = self._pages.get(key)
        if quarantined is not None and quarantined.release_at == math.inf:
            quarantined.release_at = now + (self._quarantine_s if late_writes else 0.0)

    def writer_closed(self, instance: InstanceId, now: float) -> None:
        """The connection of this peer is closed: only bytes in kernel buffers may still arrive."""
        for quarantined in self._pages.values():
            if quarantined.instance == instance:
                quarantined.release_at = min(quarantined.release_at, now + self._quarantine_s)

    def resumed(self, absent_s: float, now: float) -> None:
        """This process did not run for `absent_s`: bytes that its kernel has received are still to be written."""
        for quarantined in self._pages.values():
            if quarantined.release_at < math.inf:
                quarantined.release_at = min(quarantined.release_at + absent_s, now + self._quarantine_s)

    def take_due(self, now: float) -> list[QuarantinedPages]:
        """Remove and return the pages whose writer has stopped; the caller releases its hold of their grants."""
        due = [quarantined for quarantined in self._pages.values() if quarantined.release_at <= now]
        for quarantined in due:
            del self._pages[quarantined.key]
        return due
