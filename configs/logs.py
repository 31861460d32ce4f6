"""The log format of all processes of a server, on stderr: lines of text, or one JSON object per line."""

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

CHATTY = ("uvicorn", "uvicorn.error", "asyncio", "httpx")
CLIENT_LOGGERS = ("uvicorn.error", "pdserve.http")
"""Loggers of events that any client of the HTTP port can cause."""


class LineFormatter(logging.Formatter):
    """`2026-11-15 02:14:54.123 I decode: message`."""

    default_msec_format = "%s.%03d"

    def __init__(self, role: str) -> None:
        super().__init__(f"%(asctime)s %(levelletter)s {role}: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        record.levelletter = record.levelname[0]
        return super().format(record)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, role, logger, message, `exception`, and FIELDS of `extra`."""

    FIELDS = ("rid", "request_id")

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, object] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "role": self._role,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name in self.FIELDS if (value := getattr(record, name, None)) is not None}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


FORMATTERS: Mapping[str, type[LineFormatter] | type[JsonFormatter]] = {"text": LineFormatter, "json": JsonFormatter}


class RateLimit(logging.Filter):
    """Passes each message template once a second, whatever its values; the next line adds how many were dropped.

    For messages that unauthenticated peers can cause: they must not fill the log. Thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._next_at: dict[str, float] = {}
        self._dropped: Counter[str] = Counter()
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        template = str(record.msg)
        with self._lock:
            now = self._clock()
            if now < self._next_at.get(template, now):
                self._dropped[template] += 1
                return False
            self._next_at[template] = now + 1.0
            dropped = self._dropped.pop(template, 0)
        if dropped:
            record.msg = f"{template} ({dropped} more since the last such line)"
        return True


def rate_limited(logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> logging.Logger:
    """A child of `logger` with its own rate limit. Call it with constant templates: their times are kept."""
    limited = logging.Logger(logger.name)
    limited.parent = logger
    limited.addFilter(RateLimit(clock))
    return limited


def set_log_role(role: str) -> None:
    """Name another role in all later lines of this process."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, LineFormatter | JsonFormatter):
            handler.setFormatter(type(handler.formatter)(role))


def configure_logging(level: str, role: str, log_format: str = "text") -> None:
    """Send the log of this process to stderr. Call once, before anything else."""
    handler = logging.StreamHandler()
    handler.setFormatter(FORMATTERS[log_format](role))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in CLIENT_LOGGERS:
        logging.getLogger(name).addFilter(RateLimit())
