"""Pages that belong to nobody but that a remote writer may still write. They rest here until it cannot."""

import dataclasses
import math
from collections.abc import Container

from ....memory.index_spaces import KvPage
from ....memory.pages import PageGrant
from ....transfer.protocol.messages import InstanceId, TransferKey
from ..requests.request import Prompt


@dataclasses.dataclass(slots=True)
class QuarantinedPages:
    """The pages of an attempt that was given up. `release_at` is infinite until its writer is known to have stopped."""

    key: TransferKey
    prompt: Prompt
    instance: InstanceId
    grant: PageGrant[KvPage]
    release_at: float


class Quarantine:
    """All fences of a decode server. A writer is known to have stopped when it says so; once its connection is closed
    there is a quarantine to go, in which bytes on their way may land.
    """

    def __init__(self, quarantine_s: float) -> None:
        self._quarantine_s = quarantine_s
        self._pages: dict[TransferKey, QuarantinedPages] = {}

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def pages(self) -> int:
        return sum(len(quarantined.grant.pages) for quarantined in self._pages.values())

    def grant_of(self, key: TransferKey) -> PageGrant[KvPage]:
        return self._pages[key].grant

    def put(self, prompt: Prompt) -> None:
        """QuarantinedPages the pages of the prompt's attempt, whose writer may be writing."""
        attempt, grant = prompt.attempt, prompt.grant
        assert attempt is not None, f"prompt {prompt.prompt_id} has no attempt to fence"
        assert grant is not None, f"prompt {prompt.prompt_id} has no pages to fence"
        self._pages[attempt.key] = QuarantinedPages(attempt.key, prompt, attempt.instance, grant, math.inf)
        prompt.grant = None
        prompt.quarantined += 1

    def writer_stopped(self, key: TransferKey, *, late_writes: bool, now: float) -> None:
        """The writer will issue nothing more; with `late_writes` bytes may be on their way. Unknown keys are fine.

        Its first word counts: the AbortAck of a transfer that has failed before knows nothing of its late writes.
        """
        quarantined = self._pages.get(key)
        if quarantined is not None and quarantined.release_at == math.inf:
            quarantined.release_at = now + (self._quarantine_s if late_writes else 0.0)

    def writer_closed(self, instance: InstanceId, now: float) -> None:
        """The connection of this peer is closed: it cannot write any more once the kernel's buffers have been read."""
        for quarantined in self._pages.values():
            if quarantined.instance == instance:
                quarantined.release_at = min(quarantined.release_at, now + self._quarantine_s)

    def take_due(self, now: float, *, scattering: Container[TransferKey] = ()) -> list[QuarantinedPages]:
        """The fences that have done their duty; the caller releases their grants.

        Into the pages of transfers that are `scattering` our own ranks still write.
        """
        due = [
            quarantined
            for quarantined in self._pages.values()
            if quarantined.release_at <= now and quarantined.key not in scattering
        ]
        for quarantined in due:
            del self._pages[quarantined.key]
            quarantined.prompt.quarantined -= 1
        return due
