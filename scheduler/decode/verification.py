"""Transfers whose KV the ranks compare with what was sent, before it counts as arrived (`verify_kv`)."""

import dataclasses

from ...transfer.protocol.messages import PrefillDone, TransferKey
from ..messages.ranks import KvVerified


@dataclasses.dataclass(slots=True)
class _Verification:
    """`ranks` have reported so far; `problem` is the first difference that one has found."""

    done: PrefillDone
    ranks: int = 0
    problem: str | None = None


class Verifications:
    """The verifications in flight, also of transfers that were given up meanwhile."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._open: dict[TransferKey, _Verification] = {}

    def begin(self, done: PrefillDone) -> None:
        self._open[done.key] = _Verification(done)

    def reported(self, report: KvVerified) -> tuple[PrefillDone, str | None] | None:
        """A rank has compared its part. Returns the end of the transfer, with the problem if any, after the last."""
        verification = self._open[report.key]
        verification.ranks += 1
        verification.problem = verification.problem or report.problem
        if verification.ranks < self._ranks:
            return None
        del self._open[report.key]
        return verification.done, verification.problem
