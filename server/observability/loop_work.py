"""Finds the requests whose work holds the event loop: by the CPU time of its thread, because others share the CPU."""

import logging
import time

from starlette.types import Scope

from ...common.words import shown

log = logging.getLogger("pdserve.http")

LONG_S = 0.05
_KEY = "pdserve.loop_work"


class LoopWork:
    """The work of one HTTP request on the event loop. A piece of more than LONG_S is logged, once per request."""

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

    def ended(self, what: str, began_s: float) -> None:
        """A piece of work has ended, without an await in it. `began_s` was the `time.thread_time()` at its beginning.
        (A context manager would take 3 us more per token of a stream.)
        """
        spent_s = time.thread_time() - began_s
        if spent_s > LONG_S and not self._logged:
            self._logged = True
            log.warning(
                "%s of a request of %d bytes to %s held the event loop for %.0f ms of CPU time",
                what,
                self._body_bytes,
                shown(self._route),
                1000 * spent_s,
            )
