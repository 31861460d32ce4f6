"""One log format for all processes of a server: time, level letter, role, message, on stderr."""

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable

CHATTY = ("uvicorn", "uvicorn.error", "asyncio")
STRANGERS = ("uvicorn.error", "pdserve.http")
"""Loggers of what anybody who can reach the HTTP port can cause."""


class LineFormatter(logging.Formatter):
    """`2026-11-15 02:14:54.123 I decode: message`."""

    default_msec_format = "%s.%03d"

    def __init__(self, role: str) -> None:
        super().__init__(f"%(asctime)s %(levelletter)s {role}: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        record.levelletter = record.levelname[0]
        return super().format(record)


class OncePerSecond(logging.Filter):
    """Lets a message through once a second, whatever its values; the next one says how many were left out.

    For messages that strangers can cause: a port that anybody can reach must not fill the log.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._next_at: dict[str, float] = {}
        self._left_out: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        now, template = self._clock(), str(record.msg)
        if now < self._next_at.get(template, -math.inf):
            self._left_out[template] += 1
            return False
        self._next_at[template] = now + 1.0
        if left_out := self._left_out.pop(template, 0):
            record.msg = f"{template} ({left_out} more since the last such line)"
        return True


def configure_logging(level: str, role: str) -> None:
    """Send the log of this process to stderr. Call once, first thing."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(role))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in STRANGERS:
        logging.getLogger(name).addFilter(OncePerSecond())


class RateLimitedLog:
    """At most one line per `interval_s`, for events that strangers can cause; the next line says how many were left
    out. May be used from any thread.
    """

    def __init__(
        self, logger: logging.Logger, *, interval_s: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._clock = clock
        self._next_at = clock()
        self._left_out = 0
        self._lock = threading.Lock()

    def warning(self, text: str, *values: object) -> None:
        self._log(logging.WARNING, text, values, traceback=False)

    def exception(self, text: str, *values: object) -> None:
        """With the traceback of the exception being handled."""
        self._log(logging.ERROR, text, values, traceback=True)

    def _log(self, level: int, text: str, values: tuple[object, ...], *, traceback: bool) -> None:
        with self._lock:
            now = self._clock()
            if now < self._next_at:
                self._left_out += 1
                return
            left_out, self._left_out = self._left_out, 0
            self._next_at = now + self._interval_s
        note = f" ({left_out} more of this kind since the last such line)" if left_out else ""
        self._logger.log(level, "%s%s", text % values if values else text, note, exc_info=traceback)
