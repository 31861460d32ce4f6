"""A long job at start-up says how far it is: every few seconds, and nothing where it is over before that."""

import logging
import time

INTERVAL_S = 5.0


class ProgressLog:
    """Logs `done` of `total` of a job, at most every INTERVAL_S; `message` has a place for the two, "%.1f of %.1f"."""

    def __init__(self, log: logging.Logger, message: str, total: float) -> None:
        self._log = log
        self._message = message
        self._total = total
        self._done = 0.0
        self._said_at = time.monotonic()

    def add(self, amount: float) -> None:
        """So much more is done."""
        self._done += amount
        now = time.monotonic()
        if now - self._said_at >= INTERVAL_S:
            self._said_at = now
            self._log.info(self._message, self._done, self._total)
