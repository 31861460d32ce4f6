"""Finds the requests whose work holds the event loop: by the CPU time of its thread, because others share the CPU."""

import logging
import math
import time
from typing import ClassVar

from starlette.types import Scope

from ...common.words import shown

log = logging.getLogger("pdserve.http")

LONG_S = 0.05
READ_S = 0.005
"""The CPU time of the thread is read at most once in this time: to read it for each token takes 1 us, twice."""
_KEY = "pdserve.loop_work"


class LoopWork:
    """The work of one HTTP request on the event loop. A piece of more than LONG_S is logged, once per request."""

    _read_at: ClassVar[float] = -math.inf
    _read_s: ClassVar[float] = 0.0
    """The CPU time of the event loop's thread at `_read_at`."""

    def __init__(self, route: str, body_bytes: int) -> None:
        self._route = route
        self._body_bytes = body_bytes
        self._logged = False

    @classmethod
    def begin(cls, scope: Scope, body_bytes: int) -> None:
        """Note that a request with a body of this size is served."""
        scope[_KEY] = cls(scope["path"], body_bytes)

    @classmethod
    def of(cls, scope: Scope) -> "LoopWork":
        work = scope.get(_KEY)
        return work if isinstance(work, cls) else cls(scope.get("path", ""), 0)

    @classmethod
    def begin_piece(cls) -> float:
        """Call this on the event loop, before a piece of work without an await in it. Returns when it began."""
        now = time.monotonic()
        if now > cls._read_at + READ_S:
            cls._read_at, cls._read_s = now, time.thread_time()
        return now

    def ended(self, what: str, began_at: float) -> None:
        """A piece of work has ended, which `begin_piece` has begun."""
        if time.monotonic() - began_at <= LONG_S or self._logged:
            return
        # between the reading and `began_at`, the thread has used at most the time that has passed
        spent_s = time.thread_time() - LoopWork._read_s - (began_at - LoopWork._read_at)
        if spent_s > LONG_S:
            self._logged = True
            log.warning(
                "%s of a request of %d bytes to %s held the event loop for %.0f ms of CPU time",
                what,
                self._body_bytes,
                shown(self._route),
                1000 * spent_s,
            )
