"""The log of all processes of a server, on stderr: lines of text, or one JSON object per line."""

import json
import logging
import os
import select
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime

STDERR = 2
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


class DroppingHandler(logging.Handler):
    """Writes lines to a descriptor, and drops them while nobody reads it: a log that is not read must not stop the
    server. A process that ends loses no line that could be written, as it would with a thread that writes.

    Waits PATIENCE_S for a reader, and then for none until lines can be written again. The next line that can be
    written comes after one that has the number of those that were dropped.
    """

    PATIENCE_S = 0.05
    _AT_ONCE = select.PIPE_BUF  # a pipe that is reported as writable takes as much at once

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._own = False
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            # Several processes write to it: with a file description of our own, which does not block, another one
            # cannot make us wait between poll() and write().
            with suppress(OSError):  # a pipe of another user
                self._descriptor = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK)
                self._own = True
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLOUT)
        self.dropped = 0
        """Lines, since the last one that was written."""
        self.dropped_in_all = 0
        self._torn = False
        """Only the beginning of the last line was written."""

    def close(self) -> None:
        if self._own:
            self._own = False
            os.close(self._descriptor)
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record).encode(errors="backslashreplace") + b"\n"
            if self.dropped:
                if not self._write(self._dropped_line(record), 0.0):
                    self._drop()
                    return
                self.dropped, self._torn = 0, False
            if self._write(line, self.PATIENCE_S):
                self._torn = False
            else:
                self._drop()
        except Exception:
            self.handleError(record)

    def _drop(self) -> None:
        self.dropped += 1
        self.dropped_in_all += 1

    def _dropped_line(self, record: logging.LogRecord) -> bytes:
        message = f"{self.dropped} log lines were dropped: nobody has read the log"
        about = logging.LogRecord(__name__, logging.WARNING, record.pathname, 0, message, None, None)
        return b"\n" * self._torn + self.format(about).encode() + b"\n"

    def _write(self, line: bytes, patience_s: float) -> bool:
        """Returns whether the whole line was written."""
        while self._poll.poll(1000 * patience_s):
            try:
                line = line[os.write(self._descriptor, line[: self._AT_ONCE]) :]
            except OSError:  # full, or closed by its reader
                return False
            if not line:
                return True
            self._torn = True
        return False


def dropped_lines() -> int:
    """How many log lines this process has dropped."""
    return sum(one.dropped_in_all for one in logging.getLogger().handlers if isinstance(one, DroppingHandler))


def set_log_role(role: str) -> None:
    """Name another role in all later lines of this process."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, LineFormatter | JsonFormatter):
            handler.setFormatter(type(handler.formatter)(role))


def configure_logging(level: str, role: str, log_format: str = "text") -> None:
    """Send the log of this process to stderr. Call once, before anything else."""
    handler = DroppingHandler(STDERR)
    handler.setFormatter(FORMATTERS[log_format](role))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in CLIENT_LOGGERS:
        logging.getLogger(name).addFilter(RateLimit())
